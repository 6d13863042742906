"""Track the open connections: list and close them, and enforce quotas on their traffic.

NATS bounds neither the connections of an auth callout's user nor their traffic. The servers report
each connection that opens or closes, and list all of them with their counters; every few seconds
the list is read, which also corrects the counts. A user over the quota is disconnected and admitted
again after half a minute; for a job's processes only the connection over the bound is closed.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from ...broker.client.keys import JobIdentity
from ...broker.credentials import ACCOUNT
from ...broker.jobs import JobStore, is_final
from ...broker.user_records import Audit
from ...schemas.user import Quota
from ...schemas.wire.errors import BrokerError, DeadlineError

# -- listing and closing, through the server's system account --------------------------------------

_FIRST_S, _SCATTER_S = 10.0, 0.5
"""Deadlines of the first server's answer, which may be busy, and of each further answer."""
_KICK_S = 2.0
_PAGE = 1024
_MAX_ROUNDS = 20
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Connection(NamedTuple):
    """One connection, as the server that holds it lists it."""

    server: str
    number: int
    user: str
    messages: int = 0
    """Messages sent by it."""
    subscriptions: int = 0
    num_bytes: int = 0
    """Bytes sent by it."""

    @property
    def key(self) -> tuple[str, int]:
        """Its unique key."""
        return self.server, self.number


async def disconnect_user(system: Client, user: str) -> int:
    """Close all connections of a user, at every server of the cluster; return their number.

    Shut the user out first, so that no connection is opened again.
    """
    closed = 0
    for _ in range(_MAX_ROUNDS):
        listed = await _request_page(system, {"user": user})
        matches = [entry for entry in listed if entry.user == user]
        if not matches:
            break
        for item in matches:
            await close_connection(system, item)
        closed += len(matches)
    _log.info("user_kicked", user=user, connections=closed)
    return closed


async def close_connection(system: Client, connection: Connection) -> None:
    """Close one connection."""
    payload = json.dumps({"cid": connection.number}).encode()
    await system.request(f"$SYS.REQ.SERVER.{connection.server}.KICK", payload, timeout=_KICK_S)


async def list_connected_users(system: Client) -> set[str]:
    """Return the names of all users and processes that have a connection, at any server."""
    return {item.user for item in await list_connections(system)}


async def list_connections(system: Client) -> list[Connection]:
    """Return all connections, at any server."""
    connections: dict[tuple[str, int], Connection] = {}
    for page in range(_MAX_ROUNDS):
        reply = await _request_page(system, {"offset": page * _PAGE})
        connections |= {item.key: item for item in reply}
        if len(reply) < _PAGE:  # of all servers together, so no single server has more
            break
    return list(connections.values())


async def _request_page(system: Client, query: dict[str, Any]) -> list[Connection]:
    """Return one page of the connections at each server; raises DeadlineError if none answers."""
    query = {"auth": True, "acc": ACCOUNT, "limit": _PAGE, "state": 0, **query}
    answers: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = system.new_inbox()
    subscription = await cast("Any", system).subscribe(inbox, cb=answers.put)
    loop, connections, has_answer = asyncio.get_running_loop(), list[Connection](), False
    try:
        await system.publish("$SYS.REQ.SERVER.PING.CONNZ", json.dumps(query).encode(), reply=inbox)
        async with asyncio.timeout(_FIRST_S) as waiting:
            while True:  # one answer from each server
                connections += _parse_page(await answers.get())
                has_answer = True
                waiting.reschedule(loop.time() + _SCATTER_S)
    except TimeoutError as error:
        if has_answer:
            return connections
        raise DeadlineError(
            f"no server listed its connections within {_FIRST_S:g} s", hint="it may be overloaded"
        ) from error
    finally:
        await subscription.unsubscribe()


def _parse_page(answer: Msg) -> list[Connection]:
    reply: Any = json.loads(answer.data)
    data: Any = reply.get("data") or {}
    connections = cast("list[dict[str, Any]]", data.get("connections") or [])
    server = str(reply["server"]["id"])
    return [
        Connection(
            server,
            int(connection["cid"]),
            str(connection.get("authorized_user", "")),
            int(connection.get("in_msgs", 0)),
            int(connection.get("subscriptions", 0)),
            int(connection.get("in_bytes", 0)),
        )
        for connection in connections
    ]


# A node ends the processes of a job unless it is cut off, and an open connection outlives its key.
# So connections of ended jobs are closed. The grace period starts when this process first sees the
# ended job, by its own clock, so several auth services may do it.

EVERY_S = 10.0
GRACE_S = 30.0
"""Longer than a node waits for draining actors."""


class JobConnection(NamedTuple):
    """The job and actor or episode in the name of a connection."""

    user: str
    job: str
    attempt: int
    episode: str = ""
    """Episode of a program; empty for the job's own processes."""

    @classmethod
    def of(cls, identity: JobIdentity) -> "JobConnection":
        """Return the identity of a client with a job key."""
        return cls(identity.user, identity.job, identity.attempt)

    @classmethod
    def read(cls, name: str) -> "JobConnection | None":
        """Parse the name of a connection; None for that of a user or a service."""
        parts = name.split(".")
        if len(parts) not in (3, 4) or not parts[2].isdecimal():
            return None
        return cls(parts[0], parts[1], int(parts[2]), *parts[3:])

    @property
    def name(self) -> str:
        """The name under which the server lists the connection."""
        name = f"{self.user}.{self.job}.{self.attempt}"
        return f"{name}.{self.episode}" if self.episode else name


class JobEnds:
    """Closes connections of jobs that have ended."""

    def __init__(
        self, system: Client, jobs: JobStore, *, every_s: float = EVERY_S, grace_s: float = GRACE_S
    ) -> None:
        """Close through the server's `system` account, `grace_s` after a job is seen to be over."""
        self._over_since: dict[str, float] = {}
        self._system = system
        self._jobs = jobs
        self._every_s = every_s
        self._grace_s = grace_s

    async def run(self) -> None:
        """Check every few seconds, for ever."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._inspect()
            except (BrokerError, DeadlineError, NatsError) as error:  # the next check repeats it
                _log.warning("connections_not_seen", error=str(error))

    async def _inspect(self) -> None:
        known, self._over_since = self._over_since, {}
        seen: dict[tuple[str, str, int], bool] = {}  # a job may have many programs
        for name in sorted(await list_connected_users(self._system)):
            connection = JobConnection.read(name)
            if connection is None:
                continue
            attempt = connection[:3]
            if attempt not in seen:
                seen[attempt] = await self._is_over(connection)
            if seen[attempt]:
                since = self._over_since[name] = known.get(name, time.monotonic())
                if time.monotonic() - since >= self._grace_s:
                    await disconnect_user(self._system, name)

    async def _is_over(self, connection: JobConnection) -> bool:
        """Return whether that attempt of the job has ended."""
        record = await self._jobs.find_by_id(connection.user, connection.job)
        return record is None or record.attempt != connection.attempt or is_final(record)


LOOK_S = 2.0
SHUT_OUT_S = 30.0
PROCESS_MESSAGES_S = 50_000
"""Messages per second of one process of a job; more are a flood."""
JOB_SUBSCRIPTIONS = 65_536
"""Subscriptions of all processes of a job; each takes a kilobyte of the server's memory."""
PROGRAM_MESSAGES_S, PROGRAM_BYTES_S = 2_000, 64 << 20
"""Messages and bytes per second of a connection with the key of an episode."""
PROGRAM_SUBSCRIPTIONS = 512
"""Subscriptions of such a connection: one for each call that waits."""
_EXPECTED_S = 5.0
_Key = tuple[str, int]


class UserConnections:
    """The connections of users and processes at all servers, by the names of their log-ins."""

    def __init__(
        self,
        system: Client,
        audit: Audit,
        quota: Callable[[str], Quota | None],
    ) -> None:
        """Ask through the server's `system` account; `quota` returns users' quotas."""
        self._system = system
        self._audit = audit
        self._quota = quota
        self._open: dict[_Key, str] = {}
        self._count: dict[str, int] = defaultdict(int)
        self._expected: dict[str, list[float]] = {}
        self._seen: dict[_Key, Connection] = {}
        self._inspected_at = time.monotonic()
        self._over: set[str] = set()
        self._shut_out: dict[str, float] = {}

    async def start(self) -> None:
        """Subscribe to reports of opened and closed connections, and count those that are open."""
        subject = f"$SYS.ACCOUNT.{ACCOUNT}."
        subscribe = cast("Any", self._system).subscribe
        await subscribe(f"{subject}CONNECT", cb=self._opened)
        await subscribe(f"{subject}DISCONNECT", cb=self._closed)
        await self._try_to_inspect()

    def num_of(self, name: str) -> int:
        """Return the number of connections under a name, including those just admitted."""
        now = time.monotonic()
        expected = [item for item in self._expected.get(name, ()) if now - item < _EXPECTED_S]
        if expected:
            self._expected[name] = expected
        else:
            self._expected.pop(name, None)
        return self._count.get(name, 0) + len(expected)

    def num_of_programs(self, user: str) -> int:
        """Return the number of connections with keys of episodes of a user's jobs."""
        own = f"{user}."
        names = [name for name in self._count if name.startswith(own) and name.count(".") == 3]
        return sum(self._count[name] for name in names)

    def expect(self, name: str) -> None:
        """Count an admitted connection that the server has not listed yet."""
        self._expected.setdefault(name, []).append(time.monotonic())

    def shut_out_s(self, name: str) -> float:
        """Return the seconds for which a user over the quota is still shut out; 0: not shut out."""
        left = self._shut_out.get(name, 0.0) - time.monotonic()
        if left <= 0:
            self._shut_out.pop(name, None)
        return max(left, 0.0)

    async def run(self) -> None:
        """Check all connections every few seconds, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._try_to_inspect()

    async def _try_to_inspect(self) -> None:
        try:
            await self._inspect()
        except (
            BrokerError,
            DeadlineError,
            NatsError,
            ValueError,
        ) as error:  # the next check repeats it
            _log.warning("connections_not_seen", error=str(error))

    async def _opened(self, message: Msg) -> None:
        key, name = _parse_event(message)
        if key not in self._open:
            self._open[key] = name
            self._count[name] += 1
        if self._expected.get(name):
            self._expected[name].pop()

    async def _closed(self, message: Msg) -> None:
        key, _ = _parse_event(message)
        name = self._open.pop(key, None)
        if name is None:
            return
        self._count[name] -= 1
        if self._count[name] <= 0:
            del self._count[name]

    async def _inspect(self) -> None:
        reply = await list_connections(self._system)
        now = time.monotonic()
        passed_s, self._inspected_at = max(now - self._inspected_at, 0.001), now
        self._open = {element.key: element.user for element in reply}
        self._count = defaultdict(int)
        for item in reply:
            self._count[item.user] += 1
        rates = {element.key: self._rate(element, passed_s) for element in reply}
        self._seen = {element.key: element for element in reply}
        by_user: dict[str, list[Connection]] = defaultdict(list)
        for entry in reply:
            by_user[entry.user].append(entry)
        over: set[str] = set()
        for name, mine in by_user.items():
            quota = self._quota(name)
            if quota is not None:
                why = _excess(quota, mine, [rates[element.key] for element in mine])
                if why:
                    over.add(name)
                    await self._end(name, why)
            elif (process := JobConnection.read(name)) is not None:
                for connection in mine:
                    why = _excess_of(process, rates[connection.key], connection, mine)
                    if why:
                        await self._end_process(connection, why)
        self._over = over

    def _rate(self, connection: Connection, passed_s: float) -> "_Rate":
        """Return the traffic per second since the last check; all of it for a new connection."""
        before = self._seen.get(connection.key)
        messages = connection.messages - (before.messages if before else 0)
        num_bytes = connection.num_bytes - (before.num_bytes if before else 0)
        return _Rate(messages / passed_s, num_bytes / passed_s)

    async def _end(self, name: str, why: str) -> None:
        """Close a user's connections at the second consecutive check with an excess."""
        if name not in self._over:
            return
        self._shut_out[name] = time.monotonic() + SHUT_OUT_S
        audited = self._audit.refused(name, "flood", f"{why}: shut out for {SHUT_OUT_S:g} s")
        await asyncio.gather(
            audited, disconnect_user(self._system, name)
        )  # before logins use up the bound

    async def _end_process(self, connection: Connection, why: str) -> None:
        await close_connection(self._system, connection)
        await self._audit.refused(connection.user, "flood", why)


class _Rate(NamedTuple):
    """A connection's traffic per second."""

    messages: float
    num_bytes: float


def _excess(quota: Quota, mine: list[Connection], rates: list[_Rate]) -> str:
    """Return the quota that a user exceeds; empty if none."""
    messages = sum(rate.messages for rate in rates)
    if quota.max_messages_s is not None and messages > quota.max_messages_s:
        return f"{messages:,.0f} messages a second, the quota is {quota.max_messages_s:,}"
    num_bytes = sum(rate.num_bytes for rate in rates)
    if quota.max_bytes_s is not None and num_bytes > quota.max_bytes_s:
        return f"{num_bytes:,.0f} bytes a second, the quota is {quota.max_bytes_s:,}"
    num_subscriptions = sum(item.subscriptions for item in mine)
    if quota.max_subscriptions is not None and num_subscriptions > quota.max_subscriptions:
        return f"{num_subscriptions:,} subscriptions, the quota is {quota.max_subscriptions:,}"
    return ""


def _excess_of(
    process: JobConnection, rate: _Rate, connection: Connection, of_job: list[Connection]
) -> str:
    """Return the bound that a process or program exceeds; empty if none."""
    who, most = "a process", PROCESS_MESSAGES_S
    num = sum(item.subscriptions for item in of_job)
    if num > JOB_SUBSCRIPTIONS and connection.subscriptions * len(of_job) >= num:
        return f"{num:,} subscriptions of the job's processes, it may have {JOB_SUBSCRIPTIONS:,}"
    if process.episode:
        who, most = "a program", PROGRAM_MESSAGES_S
        if connection.subscriptions > PROGRAM_SUBSCRIPTIONS:
            num = connection.subscriptions
            return f"{num:,} subscriptions, a program may have {PROGRAM_SUBSCRIPTIONS}"
        if rate.num_bytes > PROGRAM_BYTES_S:
            return f"{rate.num_bytes:,.0f} bytes a second, a program may send {PROGRAM_BYTES_S:,}"
    if rate.messages > most:
        return f"{rate.messages:,.0f} messages a second, {who} may send {most:,}"
    return ""


def _parse_event(message: Msg) -> tuple[_Key, str]:
    """Return the connection in a report of the server, and its user."""
    reply: Any = json.loads(message.data)
    client = reply["client"]
    return (str(reply["server"]["id"]), int(client["id"])), str(client.get("user", ""))
