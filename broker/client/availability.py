"""Availability of the broker, and the operations that wait for it.

Waiting for the broker is not a failure. A *patient* connection (every actor's, and that of a client
that follows a run) waits without a bound: the clock of its deadlines stops while the broker is
away, and requests that the broker does not answer or has no room for are repeated. Such waits are
logged and appear in `trouble`, which heartbeats carry. Other connections give up at their
deadlines.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import nats.errors
import structlog
from nats.aio.client import Client

from ...schemas.wire.errors import BrokerError
from ...schemas.wire.subjects import stream_of
from . import faults
from .fair_queue import Rates
from .faults import (
    TRANSIENT,
    ConnectionLost,
    NoResponders,
    Refused,
    Unanswered,
    missing,
    stream_read,
)
from .replies import Callbacks, Replies, checked

if TYPE_CHECKING:
    from .connection import Broker, StoreSubjects


TOLD_AFTER_S = 5.0
_TOLD_EVERY_S = 60.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Trouble(NamedTuple):
    """A long wait on an open connection."""

    text: str
    """The awaited operation, and possible causes of the delay."""
    since: float
    """Seconds since the epoch."""


class Availability:
    """The connection state that waits depend on."""

    def __init__(self) -> None:
        """Start disconnected and not patient."""
        self.is_patient = False
        self._num_patient = 0
        self.outlasts_refusal = False
        """Whether to wait after a refused reconnect: the auth service may be away."""
        self.is_connected = False
        self._changed = asyncio.Event()
        self._away_s = 0.0
        self._away_since: float | None = None
        self._connected_at = float("-inf")
        self.unanswered: dict[object, Trouble] = {}
        """Long waits on an open connection."""

    def clock(self) -> float:
        """Return the event loop's clock; it stops while a patient connection is down."""
        now = time.monotonic()
        return (now if self._away_since is None else self._away_since) - self._away_s

    def came(self) -> None:
        """Record that the connection is up."""
        self._count()
        self._away_since = None
        self.is_connected = True
        self._connected_at = time.monotonic()
        self._changed.set()

    def went(self) -> None:
        """Record that the connection is lost."""
        self.is_connected = False
        if self.is_patient and self._away_since is None:
            self._away_since = time.monotonic()
        self._changed.set()

    def up_for(self, seconds: float) -> bool:
        """Return whether the connection has been up for at least this many seconds."""
        return time.monotonic() - self._connected_at > seconds

    def set_patient(self, patient: bool) -> None:
        """Set whether waits have no bound, or end at their deadlines from now on."""
        self._count()
        self.is_patient = patient
        self._away_since = time.monotonic() if patient and not self.is_connected else None
        self._changed.set()

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Make the connection patient during the block; blocks of one connection may overlap."""
        if not self._num_patient:
            self.set_patient(True)
        self._num_patient += 1
        try:
            yield
        finally:
            self._num_patient -= 1
            if not self._num_patient:
                self.set_patient(False)

    def wake(self) -> None:
        """Wake all waits after the connection is closed for good."""
        self._changed.set()

    async def wait(self, deadline: float, is_over: "asyncio.Event") -> None:
        """Wait until the connection is up or closed for good; TimeoutError at `deadline`.

        The deadline is a value of `clock`, which stops while a patient connection is down.
        """
        while not self.is_connected and not is_over.is_set():
            self._changed.clear()
            left_s = None if self.is_patient else deadline - self.clock()
            async with asyncio.timeout(left_s):
                await self._changed.wait()

    @property
    def trouble(self) -> Trouble | None:
        """Return the first of the unanswered waits; None if there is none or the broker is away."""
        return next(iter(self.unanswered.values()), None) if self.is_connected else None

    def _count(self) -> None:
        if self._away_since is not None:
            self._away_s += time.monotonic() - self._away_since
            self._away_since = None


class UnansweredRequest:
    """A wait for an answer on an open connection."""

    def __init__(self, availability: Availability, waiting_for: str) -> None:
        self._availability = availability
        self._waiting_for = waiting_for
        self._since: float | None = None
        self._next_word = 0.0

    def __enter__(self) -> "UnansweredRequest":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._availability.unanswered.pop(self, None) is not None:
            _log.info("broker_wait_over", waited_for=self._waiting_for)

    def note(self, why: str) -> None:
        """Record a failed attempt, and log it at intervals."""
        now = time.monotonic()
        if self._since is None or not self._availability.is_connected:
            self._since, self._next_word = now, now + TOLD_AFTER_S
        elif now >= self._next_word:
            self._next_word = now + _TOLD_EVERY_S
            since = time.time() - (now - self._since)
            self._availability.unanswered[self] = Trouble(f"{self._waiting_for}: {why}", since)
            _log.warning("broker_does_not_answer", waiting_for=self._waiting_for, reason=why)


# Errors that nats-py reports only to a callback.
#
# A refused reconnect is retried more slowly, since the auth service may be starting; after half a
# minute the connection is closed for good, except an actor's.

RECONNECT_WAIT_S = 0.05
REFUSED_WAIT_S = 1.0
REFUSED_FOR_S = 30.0
_DROPPED_S = 5.0
"""Pause between two reports of dropped messages of one subscription."""


class ErrorCallbacks:
    """Receives the errors of one connection."""

    def __init__(
        self,
        url: str,
        user: str,
        client: Client,
        replies: Callable[[], Replies],
        availability: Availability,
    ) -> None:
        self._availability = availability
        self.callbacks = Callbacks[Callable[[BrokerError], None]]()
        self.last: Exception | None = None
        """The last error since the connection came up."""
        self.expects: asyncio.Future[BrokerError] | None = None
        """Receives a refusal during the first connect."""
        self._url = url
        self._user = user
        self._client = client
        self._replies = replies
        self._refused_since: float | None = None
        self._closing: asyncio.Task[None] | None = None
        self._dropped = Rates(1 / _DROPPED_S, 1)

    def expect_refusal(self) -> "asyncio.Future[BrokerError]":
        """Return the future of a refusal at the first connect."""
        self.expects = asyncio.get_running_loop().create_future()
        return self.expects

    def forget(self) -> None:
        """Forget the last error after a reconnect."""
        self.last = self._refused_since = None
        self._client.options["reconnect_time_wait"] = RECONNECT_WAIT_S

    async def handle_error(self, error: Exception) -> None:
        """Handle an error that nats-py reports only to its error callback."""
        self.last = error
        if denied := faults.denied_subject(error):
            refusal = faults.denied(self._user, *denied)
            self._replies().deny(denied[1], refusal)
            self.report("subject_denied", refusal)
        elif isinstance(error, nats.errors.SlowConsumerError):
            if self._dropped.take(error.subject, time.monotonic()) is not None:
                self.report("messages_dropped", faults.dropped(error.subject))
        elif faults.is_refusal(error):
            self._refuse(error)
        elif self._client.is_connected and not isinstance(error, nats.errors.UnexpectedEOF):
            _log.warning("broker_error", error=repr(error))

    def _refuse(self, error: Exception) -> None:
        refusal = faults.refused(self._url, error)
        if self.expects is not None:
            if not self.expects.done():
                self.expects.set_result(refusal)
            return
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
            self._client.options["reconnect_time_wait"] = REFUSED_WAIT_S
            self.report("connection_refused", refusal)
        elif self._availability.outlasts_refusal or self._client.is_closed:
            return
        elif now - self._refused_since > REFUSED_FOR_S:
            self._closing = asyncio.create_task(self._client.close(), name="close refused")

    def report(self, event: str, error: BrokerError) -> None:
        """Log an error and pass it to the listener."""
        _log.error(event, message=error.message, hint=error.hint)
        for callback in self.callbacks:
            callback(error)


# Repeat idempotent operations until the broker answers.

T = TypeVar("T")

RETRY_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_LOOK_S = 2.0
_NO_ANSWER = "no answer; perhaps the disk of nats-server is full or slow"
_NO_ANSWER_TO_A_GUEST = f"{_NO_ANSWER}, or the auth service of the pool is away"


async def persist(
    broker: "Broker", attempt: Callable[[], Awaitable[T]], deadline_s: float, waiting_for: str
) -> T:
    """Repeat an attempt; see `Broker.retry`."""
    deadline, missed = broker.clock() + deadline_s, float("inf")
    pause_s = RETRY_PAUSE_S
    with UnansweredRequest(broker.availability, waiting_for) as unanswered:
        while True:
            await broker.wait_connected(deadline, waiting_for=waiting_for)
            try:
                return await _attempt(broker, attempt)
            except NoResponders as error:
                missed = min(missed, broker.clock())
                if not _is_absent(broker, missed, deadline):
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                if not broker.is_patient or await _has_jetstream(broker):
                    if error.stream:
                        raise missing(error.stream) from error
                    raise
                unanswered.note("its JetStream is off")
            except Refused as error:
                waits = broker.is_patient and error.is_passing
                if not waits and (not error.is_unsettled or _is_over(broker, deadline)):
                    raise
                unanswered.note(
                    f"{error.description} (possible causes: the storage of nats-server is full, "
                    "or its cluster has no quorum)"
                )
            except (ConnectionLost, TimeoutError, *TRANSIENT) as error:
                if not broker.is_patient and _is_over(broker, deadline):
                    raise broker.late(waiting_for) from error
                unanswered.note(_NO_ANSWER_TO_A_GUEST if broker.is_guest else _NO_ANSWER)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if broker.is_patient else pause_s


async def _attempt(broker: "Broker", attempt: Callable[[], Awaitable[T]]) -> T:
    """Attempt an operation; raises NoResponders also if a stream is gone that it reads.

    The server reports that only if nobody listens to all subjects.
    """
    try:
        return await attempt()
    except Unanswered as error:
        stream = stream_read(error.subject)
        if not stream:
            raise
        place = f"$JS.API.STREAM.INFO.{stream}"
        try:
            checked((await broker.request(place, timeout_s=_LOOK_S)).data, place)
        except Refused as refusal:
            if refusal.is_absent:
                raise NoResponders(f"there is no stream {stream}", stream=stream) from error
        except (BrokerError, TimeoutError):
            pass  # the broker is slow or away
        raise


async def look_for_stream(broker: "Broker", store: "StoreSubjects", subject: str) -> None:
    """Raise NoResponders if the stream that stores messages on `subject` is gone.

    The server reports a missing stream only if the subject has no subscriber. Mirrors of buckets
    and followers of runs subscribe, and then the message arrives without a confirmation. For guests
    the store proxy checks. Log lines are not checked: no caller waits for them, and nodes, which
    write those of all jobs, may not query the streams.
    """
    stream = stream_of(subject)
    if not store.asks_jetstream or stream == subject or stream.endswith("-log"):
        return
    try:
        if store.passes(stream):
            await broker.request(f"{store.direct_get(stream)}.{subject}", timeout_s=_LOOK_S)
        else:
            place = store.api(f"STREAM.INFO.{stream}")
            checked((await broker.request(place, timeout_s=_LOOK_S)).data, place)
    except NoResponders:
        raise
    except (BrokerError, TimeoutError) as error:
        if isinstance(error, Refused) and error.is_absent:
            raise NoResponders(f"no stream stores {subject}") from error
        return  # the broker is slow or away: repeat the request


def _is_over(broker: "Broker", deadline: float) -> bool:
    return broker.clock() + RETRY_PAUSE_S >= deadline


def _is_absent(broker: "Broker", missed: float, deadline: float) -> bool:
    """Return whether clients had time to reconnect and clusters to elect leaders."""
    return broker.settled and broker.clock() >= min(missed + broker.absent_s, deadline)


async def _has_jetstream(broker: "Broker") -> bool:
    """Return whether the server has JetStream; a guest cannot check and assumes so."""
    if broker.is_guest:
        return True
    try:
        await broker.api("INFO")
    except NoResponders:
        return False
    except (BrokerError, TimeoutError):
        return True
    return True
