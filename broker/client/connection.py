"""One connection to the broker; all requests go through it.

nats-py transfers the bytes; this module adds what a long-lived actor needs. The first connect is
bounded and reports why it failed. Lost connections are restored within some ten milliseconds:
pending requests end at once with `ConnectionLost` instead of at their timeout, so that idempotent
ones (`retry`) are repeated as soon as the server is back, without a bound if the connection is
patient (`availability.py`). Errors that NATS reports only to a callback (denied subjects, slow
consumers) become log events, and a request to a denied subject raises. Payload sizes are checked
before sending, because the server closes the connection of a client that exceeds the limit.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import nats.errors
import structlog
from nats.aio.msg import Msg

from ...schemas.wire.errors import BrokerError, DeadlineError
from ...schemas.wire.subjects import (
    BUCKET_ACTORS,
    BUCKET_EVALS,
    BUCKET_JOBS,
    DEFAULT_USER,
    stream_of,
)
from . import faults
from .availability import (
    RECONNECT_WAIT_S,
    RETRY_PAUSE_S,
    Availability,
    ErrorCallbacks,
    look_for_stream,
    persist,
)
from .fair_queue import FairQueue, end_tasks
from .faults import ConnectionLost, NoResponders, Refused, server_urls, shown_url
from .login import Login, find_login, tls_options
from .nats_internals import CarefulClient, end_connecting, reconnection, server_info
from .replies import Callbacks, Listening, Replies, checked, listen

__all__ = ["RETRY_PAUSE_S", "Broker", "ConnectionLost", "Listening", "NoResponders", "connect"]

# Where stored data is read, and how stale a read may be (`Replication`: a server, or a cluster).
#
# Services and connections without authentication use JetStream. Processes of a job use the auth
# service's store proxy for the shared buckets, guests use it for everything
# (`broker/permissions.py` explains why).

_SHARED = frozenset(f"KV_{bucket}" for bucket in (BUCKET_JOBS, BUCKET_ACTORS, BUCKET_EVALS))
_INFO = "STREAM.INFO."


@dataclass(frozen=True)
class Replication:
    """How far reads may lag behind confirmed writes."""

    reads_leader: bool
    """Whether the newest message is read from the stream's leader: a replica may lack it."""
    lag_s: float
    """How long a confirmed write may be missing from reads."""
    absent_s: float
    """How long an existing stream may not answer."""


SINGLE = Replication(reads_leader=False, lag_s=0.0, absent_s=2.0)
"""A single server. When it stops, its streams end shortly before its connections."""
CLUSTER = Replication(reads_leader=True, lag_s=3.0, absent_s=20.0)
"""Several servers. Replicas lag behind their leader, and a stream may be electing a leader."""


class StoreSubjects:
    """Chooses the subject of each kind of request for clients with access to JetStream."""

    asks_jetstream: ClassVar[bool] = True

    def __init__(self, subject: str = "") -> None:
        """`subject` is that of the store proxy; empty: all requests go to JetStream."""
        self.subject = subject

    def passes(self, stream: str) -> bool:
        """Return whether reads of a stream go through the store proxy."""
        return bool(self.subject) and stream in _SHARED

    def direct_get(self, stream: str) -> str:
        """Return the subject for reading stored messages of a stream."""
        if self.passes(stream):
            return f"{self.subject}.get.{stream}"
        return f"$JS.API.DIRECT.GET.{stream}"

    def last_get(self, stream: str, subject: str, *, of_leader: bool) -> tuple[str, bytes]:
        """Return subject and payload of the request for the last message on `subject`."""
        if of_leader and not self.passes(stream):
            request = json.dumps({"last_by_subj": subject}).encode()
            return f"$JS.API.STREAM.MSG.GET.{stream}", request
        return f"{self.direct_get(stream)}.{subject}", b""

    def api(self, verb: str) -> str:
        """Return the subject of another JetStream request; raises BrokerError for a denied one."""
        return f"$JS.API.{verb}"

    def store(self, subject: str) -> str:
        """Return the subject to publish to in order to store a message on `subject`."""
        return subject

    def absent_s(self, replication: Replication) -> float:
        """Return how long an existing stream may not answer."""
        return replication.absent_s


class GuestStoreSubjects(StoreSubjects):
    """Chooses subjects for guests: the store proxy handles all requests and reports missing
    streams.
    """

    asks_jetstream = False

    def passes(self, stream: str) -> bool:
        """Return True: all reads go through the store proxy."""
        del stream
        return True

    def api(self, verb: str) -> str:
        """Return the subject of a request about a stream; raises BrokerError for other requests."""
        if not verb.startswith(_INFO):
            raise BrokerError(
                f"users may not ask for {verb} at the broker",
                hint="only the pool makes, changes and removes streams",
            )
        return f"{self.subject}.info.{verb.removeprefix(_INFO)}"

    def store(self, subject: str) -> str:
        """Return the proxy's subject for storing a message on `subject`."""
        return f"{self.subject}.put.{subject}"

    def absent_s(self, replication: Replication) -> float:
        """Return 0: the proxy reports missing streams."""
        del replication
        return 0.0


T = TypeVar("T")

REQUEST_TIMEOUT_S = 5.0
RECONNECT_GRACE_S = 2.0
_REASON_S = 1.0
"""How long to wait for the reason of a closed connection, which arrives separately."""
PENDING_BYTES = 64 * 2**20
_HEADER_ROOM = 1024

_log = structlog.get_logger()


class Broker:
    """A connection to the broker; create it with `connect`."""

    def __init__(self, url: str, name: str, login: Login) -> None:
        """Prepare a connection that `connect` opens."""
        self.url, self.name = url, name
        self.user = login.user
        self.inbox_prefix = login.inbox
        self.derived_key = login.derived_key
        self.rpc, self.control = login.rpc, login.control
        self.login = login
        self._store = StoreSubjects()
        self.nc = CarefulClient()
        self.closed = asyncio.Event()
        """Set once the connection is closed for good, on purpose or not."""
        self._closing = False
        self.availability = Availability()
        self._replies = Replies("")
        self._was_open = False
        self._on_reconnect = Callbacks[Callable[[], None]]()
        self._on_disconnect = Callbacks[Callable[[], None]]()
        self._complaints = ErrorCallbacks(
            url, login.user, self.nc, lambda: self._replies, self.availability
        )

    @property
    def max_payload_bytes(self) -> int:
        """Largest payload that this server accepts, less room for headers."""
        return self.nc.max_payload - _HEADER_ROOM

    @property
    def is_connected(self) -> bool:
        """Whether the connection is up."""
        return self.nc.is_connected

    @property
    def replication(self) -> Replication:
        """How far reads may lag behind writes: depends on whether the server is in a cluster."""
        return CLUSTER if server_info(self.nc).get("cluster") else SINGLE

    @property
    def absent_s(self) -> float:
        """How long an existing stream may be without a leader."""
        return self._store.absent_s(self.replication)

    @property
    def settled(self) -> bool:
        """Whether other clients have had time to reconnect since the last reconnect."""
        return self.availability.up_for(RECONNECT_GRACE_S)

    @property
    def is_patient(self) -> bool:
        """Whether waits for the broker have no bound."""
        return self.availability.is_patient

    def clock(self) -> float:
        """Return the clock of deadlines; it stops while a patient connection is down."""
        return self.availability.clock()

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each reconnect; returns a function that removes it."""
        return self._on_reconnect.add(callback)

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` at each loss of the connection; returns a function that removes it."""
        return self._on_disconnect.add(callback)

    def on_error(self, callback: Callable[[BrokerError], None]) -> Callable[[], None]:
        """Call `callback` for each denied subject and slow consumer; returns a function that
        removes it.
        """
        return self._complaints.callbacks.add(callback)

    async def close(self) -> None:
        """Send pending messages and close."""
        self._closing = True
        if self.nc.is_connected:
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                await self.nc.flush(timeout=2)
        await self.nc.close()
        await end_connecting(reconnection(self.nc))

    async def __aenter__(self) -> "Broker":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def check_open(self) -> None:
        """Raise BrokerError if the connection is closed for good."""
        if self.nc.is_closed:
            raise faults.closed(self.url, self._complaints.last or self.nc.last_error)

    async def wait_connected(self, deadline: float, *, waiting_for: str) -> None:
        """Wait until the connection is up; `deadline` is a value of `clock`.

        Raises DeadlineError, which names `waiting_for`, and BrokerError once it is closed.
        """
        try:
            await self.availability.wait(deadline, self.closed)
        except TimeoutError:
            raise self.late(waiting_for) from None
        self.check_open()

    def check_size(self, size: int, *, what: str) -> None:
        """Raise MessageError if `size` bytes do not fit one message."""
        if size > self.max_payload_bytes:
            raise faults.too_large(what, size, self.max_payload_bytes)

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        reply: str = "",
    ) -> None:
        """Publish without confirmation: while the connection is down the message may be lost.

        If the subject has no subscriber, the server reports so on `reply`, if subscribed here.
        """
        self.check_size(len(payload), what=f"a message on {subject}")
        self.check_open()
        with contextlib.suppress(nats.errors.OutboundBufferLimitError):
            await self.nc.publish(
                subject, payload, reply=reply, headers=dict(headers) if headers else None
            )

    async def listen(
        self, subject: str, take: Callable[[Msg], None], *, queue: str = ""
    ) -> Listening:
        """Call `take` with each message on `subject`, also after reconnects.

        Raises BrokerError once the connection is closed for good.
        """
        self.check_open()
        return await listen(self.nc, subject, take, queue=queue)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Msg:
        """Send one request and return its reply.

        Raises ConnectionLost, NoResponders, TimeoutError, MessageError (too large), or
        BrokerError for a denied subject.
        """
        self.check_size(len(payload), what=f"a request on {subject}")
        reply, future = self._replies.expect(subject, timeout_s)
        try:
            await self.send(subject, payload, reply=reply, headers=headers)
            return await future
        finally:
            self._replies.forget(reply)

    async def send(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Publish with a reply subject; raises ConnectionLost while the connection is down."""
        self.check_open()
        if not self.nc.is_connected:
            raise ConnectionLost(f"not connected to {shown_url(self.url)}", hint="try again")
        await self.nc.publish(
            subject, payload, reply=reply, headers=dict(headers) if headers else None
        )

    async def api(self, verb: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a JetStream API request (`verb` follows `$JS.API.`) and return its answer.

        Raises NotFoundError when the stream that `verb` names does not exist, Refused, and what
        `request` raises.
        """
        payload = json.dumps(request).encode() if request is not None else b""
        reply = await self.request(self._store.api(verb), payload)
        try:
            return checked(reply.data, f"$JS.API.{verb}")
        except Refused as error:
            if error.is_absent:
                raise faults.missing(verb.split(".")[2]) from error
            raise

    def last_get(self, stream: str, subject: str) -> tuple[str, bytes]:
        """Return subject and payload of the request for the last message on `subject`."""
        return self._store.last_get(stream, subject, of_leader=self.replication.reads_leader)

    def direct_get(self, stream: str) -> str:
        """Return the subject for reading stored messages of a stream."""
        return self._store.direct_get(stream)

    @property
    def is_guest(self) -> bool:
        """Whether this connection reads and stores through the store proxy only."""
        return not self._store.asks_jetstream

    @property
    def is_limited(self) -> bool:
        """Whether this connection has the rights of a user or of one job's process."""
        return bool(self._store.subject)

    async def retry(
        self, attempt: Callable[[], Awaitable[T]], *, deadline_s: float, waiting_for: str
    ) -> T:
        """Repeat an idempotent operation until the broker answers.

        Raises DeadlineError, which names `waiting_for`, if it has not answered by then (never while
        the connection is patient). If there is still no responder after clients could reconnect and
        leaders be elected, raises NotFoundError for a stream, else NoResponders.
        """
        return await persist(self, attempt, deadline_s, waiting_for)

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        deadline_s: float,
        waiting_for: str,
    ) -> int:
        """Store an idempotent message, repeating until it is confirmed; return its sequence.

        Raises NotFoundError if no stream stores the subject, DeadlineError, Refused.
        """
        place = self._store.store(subject)

        async def attempt() -> int:
            try:
                reply = await self.request(place, payload, headers=headers)
            except TimeoutError:
                await look_for_stream(self, self._store, subject)
                raise
            return int(checked(reply.data, f"a message on {subject}")["seq"])

        try:
            return await self.retry(attempt, deadline_s=deadline_s, waiting_for=waiting_for)
        except NoResponders as error:
            raise faults.missing(stream_of(subject)) from error

    def late(self, waiting_for: str) -> DeadlineError:
        """Return the error of an expired wait; raises BrokerError once the connection is closed."""
        self.check_open()
        return faults.late(self.url, waiting_for)

    async def open(self, deadline_s: float, credentials: Mapping[str, Any]) -> None:
        """Connect for the first time; raises BrokerError if the server is away or refuses."""
        refusal = self._complaints.expect_refusal()
        opening = asyncio.create_task(self._open(credentials))
        try:
            done, _ = await asyncio.wait(
                {opening, refusal}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if opening in done and not await self._was_cut_off(opening, refusal):
                return await opening
            raise (
                refusal.result()
                if refusal.done()
                else faults.unreachable(self.url, deadline_s, self._complaints.last)
            )
        finally:
            self._complaints.expects = None
            await end_connecting(opening)

    async def _was_cut_off(
        self, opening: "asyncio.Task[None]", refusal: "asyncio.Future[BrokerError]"
    ) -> bool:
        """Return whether the server closed the new connection; its reason may arrive later."""
        if not isinstance(opening.exception(), RuntimeError):  # uvloop's, of a closed transport
            return False
        await asyncio.wait({refusal}, timeout=_REASON_S)
        return True

    async def _open(self, credentials: Mapping[str, Any]) -> None:
        try:
            await self.nc.connect(
                server_urls(self.url),
                name=self.name,
                error_cb=self._complaints.handle_error,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                closed_cb=self._closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=cast("int", RECONNECT_WAIT_S),  # seconds; may be fractional
                connect_timeout=2,
                ping_interval=10,
                pending_size=PENDING_BYTES,
                inbox_prefix=self.inbox_prefix,
                **{**self.login.options, **tls_options(self.url), **credentials},
            )
        except asyncio.CancelledError:
            await self.nc.close()
            raise
        if server_info(self.nc).get("auth_required"):
            subjects = GuestStoreSubjects if self.login.is_guest else StoreSubjects
            self._store = subjects(self.login.store)
        elif self.login.is_guest:
            await self.nc.close()
            raise faults.without_users(self.url, self.user)
        inbox = self.nc.new_inbox()
        self._replies = Replies(inbox)
        await self.listen(f"{inbox}.*", self._replies.deliver)
        self._was_open = True
        self.availability.came()

    async def _disconnected(self) -> None:
        if self.availability.is_connected and not self._closing:
            _log.warning("broker_disconnected", url=shown_url(self.url))
        self.availability.went()
        self._replies.fail(lambda subject: faults.broken(self.url, subject))
        for callback in self._on_disconnect:
            callback()

    async def _reconnected(self) -> None:
        _log.info("broker_reconnected", url=shown_url(self.url))
        self._complaints.forget()
        self.availability.came()
        for callback in self._on_reconnect:
            callback()

    async def _closed(self) -> None:
        self.closed.set()
        self.availability.wake()  # waiting tasks see that it is closed
        if not self._closing and self._was_open:
            error = self.nc.last_error or self._complaints.last
            self._complaints.report("broker_connection_closed", faults.closed(self.url, error))


async def connect(
    url: str,
    *,
    name: str,
    user: str = DEFAULT_USER,
    api_key: str | None = None,
    credentials_file: Path | None = None,
    login: Login | None = None,
    deadline_s: float = 10.0,
    **credentials: Any,
) -> Broker:
    """Connect to the broker and check that it has JetStream.

    The identity comes from `login`, `credentials_file` (a service's), `api_key`, or the environment
    (`login.py`); else it is `user`, at a broker without authentication. `credentials` are further
    nats-py options.

    Raises BrokerError if no server answers within `deadline_s`, refuses the user, or has JetStream
    disabled; AuthError for a malformed key.
    """
    faults.check_url(url)
    broker = Broker(url, name, login or find_login(user, api_key, credentials_file))
    await broker.open(deadline_s, credentials)
    if broker.is_guest:
        return broker
    try:
        await broker.retry(
            lambda: broker.api("INFO"), deadline_s=deadline_s, waiting_for="JetStream"
        )
    except (NoResponders, DeadlineError, Refused) as error:
        await broker.close()
        raise faults.without_jetstream(url) from error
    except BaseException:
        await broker.close()
        raise
    return broker


# -- flushing --------------------------------------------------------------------------------------

FLUSH_DEADLINE_S = 60.0
_FLUSH_ANSWER_S = 5


async def flush(broker: Broker, *, waiting_for: str, deadline_s: float = FLUSH_DEADLINE_S) -> None:
    """Wait until the server has processed everything sent, such as subscriptions.

    nats-py's own flush waits for the answer to a ping, which never arrives if the connection
    breaks. This one asks the next connection, on which nats-py has renewed its subscriptions.

    Raises DeadlineError, which names `waiting_for`, BrokerError once the connection is closed.
    """

    async def attempt() -> None:
        broken = asyncio.Event()
        forget = broker.on_disconnect(broken.set)
        breaking = asyncio.create_task(broken.wait())
        flushing = asyncio.create_task(broker.nc.flush(_FLUSH_ANSWER_S))
        try:
            await asyncio.wait({flushing, breaking}, return_when=asyncio.FIRST_COMPLETED)
            if not flushing.done():
                raise faults.broken(broker.url, "a flush")
            await flushing
        finally:
            forget()
            flushing.cancel()
            breaking.cancel()

    await broker.retry(attempt, deadline_s=deadline_s, waiting_for=waiting_for)


# -- the first connection of an actor, which may be started while the broker is away ---------------

_FIRST_DEADLINE_S = 30.0
_PAUSE_S = 1.0


@contextlib.asynccontextmanager
async def connected(
    url: str,
    name: str,
    stopping: asyncio.Event,
    *,
    login: Login | None = None,
    for_ever: bool,
) -> AsyncGenerator[Broker | None, None]:
    """Yield the connection of `first_connection`, patient until `stopping` is set, and close it."""
    broker = await first_connection(url, name, stopping, login=login, for_ever=for_ever)
    if broker is None:
        yield None
        return
    giving_up = asyncio.create_task(give_up_at(stopping, broker), name="end of patience")
    try:
        yield broker
    finally:
        giving_up.cancel()
        await broker.close()


async def first_connection(
    url: str,
    name: str,
    stopping: asyncio.Event,
    *,
    login: Login | None = None,
    for_ever: bool,
) -> Broker | None:
    """Connect patiently; None if `stopping` was set before a broker answered.

    With `for_ever`, waits while the broker is away or refuses because the auth service is away: an
    actor of a job gets the address from its node, which is connected. Otherwise a wrong address is
    reported after half a minute. Raises BrokerError, AuthError; a malformed address is reported at
    once.
    """
    faults.check_url(url)
    while not stopping.is_set():
        try:
            connecting = connect(url, name=name, login=login, deadline_s=_FIRST_DEADLINE_S)
            broker = await _unless(stopping, connecting)
        except BrokerError as error:
            if not for_ever:
                raise
            _log.warning("broker_awaited", message=error.message)
            await _unless(stopping, asyncio.sleep(_PAUSE_S))
            continue
        if broker is not None:
            broker.availability.set_patient(True)
            broker.availability.outlasts_refusal = True
        return broker
    return None


async def give_up_at(stopping: asyncio.Event, broker: Broker) -> None:
    """Make waits for the broker end at their deadlines once `stopping` is set."""
    await stopping.wait()
    broker.availability.set_patient(False)


async def _unless(stopping: asyncio.Event, awaited: Coroutine[Any, Any, T]) -> T | None:
    """Await something until `stopping` is set; None if that came first."""
    work, stop = asyncio.create_task(awaited), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        await end_tasks((work, stop))


# -- a separate connection for requests of users, replaced when a flood has filled it --------------
#
# The server queues up to `max_pending` bytes for each connection, in one line. Behind one user's
# flood the requests of all others wait in it, even after the flood has ended. If they shared the
# service's own connection, the replies that it awaits, such as those for its lease, would wait too.
# So the age of the queue is measured while many requests are refused. A queue that is too old is
# dropped with the connection: no caller awaits its requests any more, and users who do not flood
# repeat theirs.

_CONNECTION_LOOK_S = 1.0
_LATE_S = 2.0
_MANY = 16
"""Number of refused requests between two checks from which on the queue's age is measured."""


def request_connection(
    broker: Broker, stopping: asyncio.Event
) -> AbstractAsyncContextManager[Broker | None]:
    """Open a second connection like `broker`'s; None if `stopping` was set before it succeeded."""
    name = f"{broker.name}-requests"
    return connected(broker.url, name, stopping, login=broker.login, for_ever=True)


async def drop_old_requests(
    own: Broker, *shares: FairQueue, look_s: float = _CONNECTION_LOOK_S, late_s: float = _LATE_S
) -> None:
    """Replace the connection whenever a flood has left it `late_s` behind; runs for ever.

    `shares` are the queues of the requests that arrive on it.
    """
    seen = sum(share.num_refused for share in shares)
    while True:
        await asyncio.sleep(look_s)
        before, seen = seen, sum(share.num_refused for share in shares)
        refused = seen - before
        if refused >= _MANY and own.is_connected and await _is_late(own, late_s):
            _log.warning("requests_dropped", refused=refused, late_s=late_s)
            await own.nc.force_reconnect()


async def _is_late(own: Broker, late_s: float) -> bool:
    """Return whether a message from the server takes longer than the bound to arrive."""
    try:
        await own.nc.flush(cast("int", late_s))
    except nats.errors.FlushTimeoutError:
        return True
    except nats.errors.Error:  # closed meanwhile
        return False
    return False
