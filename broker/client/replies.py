"""Pending replies of a connection: one inbox, and one future for each request.

nats-py has the same, but there a request waits for its timeout when the connection breaks or its
subject is denied. Here both end it at once.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from ...schemas.wire.errors import BrokerError, BusyError, TinkermqError
from ...schemas.wire.message import ErrorReply
from . import nats_internals
from .faults import Refused, Unanswered, nobody_listens

_MAX_ERROR_CHARS = 200


class _Waiting(NamedTuple):
    """A request in flight."""

    subject: str
    future: asyncio.Future[Msg]
    timer: asyncio.TimerHandle


class Replies:
    """Passes each reply to the request that waits for it."""

    def __init__(self, inbox: str) -> None:
        """`inbox` is the prefix of all reply subjects; the owner subscribes to `inbox.*`."""
        self._inbox = inbox
        self._numbers = itertools.count()
        self._waiting: dict[str, _Waiting] = {}

    def expect(self, subject: str, timeout_s: float) -> tuple[str, asyncio.Future[Msg]]:
        """Return a new reply subject for a request on `subject`, and the future of its reply.

        The future fails with Unanswered if there is no reply. Call `forget` in any case.
        """
        loop = asyncio.get_running_loop()
        reply = f"{self._inbox}.{next(self._numbers)}"
        future: asyncio.Future[Msg] = loop.create_future()
        timer = loop.call_later(timeout_s, _expire, future, subject)
        self._waiting[reply] = _Waiting(subject, future, timer)
        return reply, future

    @property
    def num_waiting(self) -> int:
        """Requests in flight."""
        return len(self._waiting)

    def forget(self, reply: str) -> None:
        """Stop waiting for a reply."""
        waiting = self._waiting.pop(reply, None)
        if waiting is not None:
            waiting.timer.cancel()
            if not waiting.future.cancel() and not waiting.future.cancelled():
                waiting.future.exception()  # retrieved: no task awaits it any more

    def deliver(self, message: Msg) -> None:
        """Deliver a reply; drop it if it is no longer awaited."""
        waiting = self._waiting.get(message.subject)
        if waiting is None or waiting.future.done():
            return
        if nats_internals.status_of(message) == nats_internals.NO_RESPONDERS:
            error = nobody_listens(waiting.subject, message.headers or {})
            waiting.future.set_exception(error)
        else:
            waiting.future.set_result(message)

    def fail(self, error: Callable[[str], BrokerError]) -> None:
        """Fail all requests with an error made from their subjects."""
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(error(waiting.subject))

    def deny(self, denied: str, error: BrokerError) -> None:
        """Fail the requests on a denied subject (in lower case)."""
        for waiting in self._waiting.values():
            if waiting.subject.lower() == denied and not waiting.future.done():
                waiting.future.set_exception(error)


def _expire(future: asyncio.Future[Msg], subject: str) -> None:
    if not future.done():
        future.set_exception(Unanswered(subject))


def checked(answer: bytes, what: str) -> dict[str, Any]:
    """Return JetStream's JSON answer; raises Refused, with `what` it refuses."""
    fields = cast("dict[str, Any]", json.loads(answer))
    if "error" in fields:
        raise Refused(fields["error"], what)
    return fields


def error_reply(code: str, message: str, hint: str) -> tuple[bytes, dict[str, str]]:
    """Return payload and headers of an error reply."""
    line = " ".join(message.encode("ascii", "replace").decode().split())[:_MAX_ERROR_CHARS]
    body = ErrorReply.of(code, message, hint).to_bytes()
    headers = {nats_internals.ERROR_CODE: code, nats_internals.ERROR_TEXT: line or code}
    if code == BusyError.code:
        headers[nats_internals.RETRY_AFTER] = f"{BusyError.retry_after_s:g}"
    return body, headers


def error_of(reply: Msg) -> TinkermqError:
    """Return the error in an error reply, as the same class."""
    try:
        error = ErrorReply.from_bytes(reply.data)
    except ValueError:  # a service of another program: only the headers are common
        names = (nats_internals.ERROR_CODE, nats_internals.ERROR_TEXT)
        text = " ".join(nats_internals.header(reply, name) for name in names)
        return BrokerError(f"the request was refused: {text}".strip())
    return error.to_error()


# Subscriptions and callbacks of a connection.

F = TypeVar("F", bound=Callable[..., None])
_YIELD_EVERY = 64
_BEHIND, _BEHIND_BYTES = 4096, 16 << 20
"""With the most that one read of the socket adds, below all bounds: nothing is dropped."""


class Listening:
    """A subscription; `stop` ends it."""

    def __init__(self, client: Client, subscription: Subscription) -> None:
        """Wrap a subscription of `Broker.listen`."""
        self._client = client
        self._subscription = subscription

    async def stop(self) -> None:
        """Unsubscribe; harmless on a closed connection."""
        if not self._client.is_closed:
            with contextlib.suppress(nats.errors.BadSubscriptionError):  # stopped already
                await self._subscription.unsubscribe()


async def listen(
    client: Client, subject: str, take: Callable[[Msg], None], *, queue: str = ""
) -> Listening:
    """Call `take` with each message on `subject`, and let other tasks run at intervals.

    nats-py itself does not pause while messages are pending.
    """
    subscription: Subscription | None = None
    num_messages = itertools.count(1)

    async def on_message(message: Msg) -> None:
        take(message)
        if next(num_messages) % _YIELD_EVERY == 0 and not is_behind(subscription):
            await asyncio.sleep(0)

    subscription = await cast("Any", client).subscribe(subject, queue=queue, cb=on_message)
    assert subscription is not None
    return Listening(client, subscription)


def is_behind(subscription: Subscription | None) -> bool:
    """Return whether nats-py would drop messages if it read more before handling pending ones."""
    return subscription is not None and (
        subscription.pending_msgs > _BEHIND or subscription.pending_bytes > _BEHIND_BYTES
    )


class Callbacks(Generic[F]):
    """Functions that are called on an event; they may be added and removed at any time."""

    def __init__(self) -> None:
        """Start empty."""
        self._callbacks: list[F] = []

    def add(self, callback: F) -> Callable[[], None]:
        """Add a function; return a function that removes it, harmless when repeated."""
        self._callbacks.append(callback)

        def remove() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return remove

    def __iter__(self) -> Iterator[F]:
        """Yield the present functions."""
        return iter(list(self._callbacks))
