"""Lists who is connected, and closes connections, through the server's system account."""

import asyncio
import json
from typing import Any, NamedTuple, cast

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from ...broker.users.credentials import ACCOUNT
from ...schemas.wire.errors import DeadlineError

_FIRST_S, _SCATTER_S = 10.0, 0.5
"""For the first server to answer, which may have much to do, and for each further one then."""
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
    """Sent by it so far."""
    subscriptions: int = 0
    num_bytes: int = 0
    """Sent by it so far."""

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from all others."""
        return self.server, self.number


async def kick(system: Client, user: str) -> int:
    """Close all connections of a user, at every server of the cluster; return how many.

    A user who was shut out before cannot come back.
    """
    closed = 0
    for _ in range(_MAX_ROUNDS):
        listed = await _list(system, {"user": user})
        found = [one for one in listed if one.user == user]
        if not found:
            break
        for one in found:
            await close(system, one)
        closed += len(found)
    _log.info("user_kicked", user=user, connections=closed)
    return closed


async def close(system: Client, one: Connection) -> None:
    """Close one connection."""
    payload = json.dumps({"cid": one.number}).encode()
    await system.request(f"$SYS.REQ.SERVER.{one.server}.KICK", payload, timeout=_KICK_S)


async def connected(system: Client) -> set[str]:
    """Return the names of all users and processes that have a connection, at any server."""
    return {one.user for one in await listed(system)}


async def listed(system: Client) -> list[Connection]:
    """Return all connections, at any server."""
    connections: dict[tuple[str, int], Connection] = {}
    for page in range(_MAX_ROUNDS):
        found = await _list(system, {"offset": page * _PAGE})
        connections |= {one.key: one for one in found}
        if len(found) < _PAGE:  # of all servers together, so no server has more
            break
    return list(connections.values())


async def _list(system: Client, query: dict[str, Any]) -> list[Connection]:
    """Return one page of the connections at each server; raises DeadlineError if none answers."""
    query = {"auth": True, "acc": ACCOUNT, "limit": _PAGE, "state": 0, **query}
    answers: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = system.new_inbox()
    subscription = await cast("Any", system).subscribe(inbox, cb=answers.put)
    loop, found, heard = asyncio.get_running_loop(), list[Connection](), False
    try:
        await system.publish("$SYS.REQ.SERVER.PING.CONNZ", json.dumps(query).encode(), reply=inbox)
        async with asyncio.timeout(_FIRST_S) as waiting:
            while True:  # one answer from each server
                found += _read(await answers.get())
                heard = True
                waiting.reschedule(loop.time() + _SCATTER_S)
    except TimeoutError as error:
        if heard:
            return found
        raise DeadlineError(
            f"no server told its connections within {_FIRST_S:g} s", hint="it may be overloaded"
        ) from error
    finally:
        await subscription.unsubscribe()


def _read(answer: Msg) -> list[Connection]:
    told: Any = json.loads(answer.data)
    data: Any = told.get("data") or {}
    connections = cast("list[dict[str, Any]]", data.get("connections") or [])
    server = str(told["server"]["id"])
    return [
        Connection(
            server,
            int(one["cid"]),
            str(one.get("authorized_user", "")),
            int(one.get("in_msgs", 0)),
            int(one.get("subscriptions", 0)),
            int(one.get("in_bytes", 0)),
        )
        for one in connections
    ]
