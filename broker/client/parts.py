"""Requests with answers in several messages, such as generated text or a long episode.

The service sends numbered parts to the caller's inbox until the last one, and empty parts while it
has no content: a caller that receives nothing for a while assumes that the service has died. A
caller that leaves early sends `cancel`, and the service stops. If a caller has died, the server
reports that the inbox has no subscriber.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Generic, Protocol, TypeAlias, TypeVar, cast

import structlog
from nats.aio.msg import Msg
from nats.micro.request import Request

from ...schemas.wire import errors
from ...schemas.wire.foreign import ends_this_task
from ...schemas.wire.message import ErrorReply, Message, Part
from . import faults
from .connection import Broker, flush
from .faults import ConnectionLost
from .nats_internals import NO_RESPONDERS, reply_of, status_of
from .replies import Listening
from .rpc import RequestContext, Service, allowed_reply

# Inboxes for answers in several messages, received in order by one caller.
#
# A loss of the connection and a denied request end the wait at once, not at its timeout.


class SharedInbox:
    """One subscription for the answers to many requests: each `Inbox` made with it is cheap."""

    def __init__(self, broker: Broker, prefix: str = "") -> None:
        """Prepare; the first request subscribes, below `prefix` or the connection's own."""
        self._broker = broker
        own = broker.nc.new_inbox()
        self._prefix = f"{prefix}.{own.rpartition('.')[2]}" if prefix else own
        self._numbers = itertools.count(1)
        self._takers: dict[str, Callable[[Msg], None]] = {}
        self._listening: Listening | None = None
        self._subscribing = asyncio.Lock()

    async def new_subject(self, take: Callable[[Msg], None]) -> str:
        """Return a subject whose messages go to `take` until `forget`."""
        if self._listening is None:
            async with self._subscribing:
                if self._listening is None:
                    self._listening = await self._broker.listen(f"{self._prefix}.*", self._receive)
        subject = f"{self._prefix}.{next(self._numbers)}"
        self._takers[subject] = take
        return subject

    def forget(self, subject: str) -> None:
        """Drop further messages on a subject."""
        self._takers.pop(subject, None)

    async def close(self) -> None:
        """Unsubscribe."""
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.stop()

    def _receive(self, message: Msg) -> None:
        if taker := self._takers.get(message.subject):
            taker(message)


class Room(Protocol):
    """Memory for received parts that are not read yet."""

    def hold(self, num_bytes: int) -> None:
        """Reserve so many bytes; raises a TinkermqError if they are not available."""
        ...

    def release(self, num_bytes: int) -> None:
        """Release reserved bytes."""
        ...


class Inbox:
    """Receives the answers to one request after the other."""

    def __init__(
        self,
        broker: Broker,
        *,
        ends_with_connection: bool = True,
        shared: SharedInbox | None = None,
        room: Room | None = None,
    ) -> None:
        """Prepare; the first request subscribes, or takes a subject of the `shared` subscription.

        Without `ends_with_connection` answers continue after a reconnect. If a message does not fit
        into the `room`, all unread messages are dropped and the error remains.
        """
        self._broker = broker
        self._shared = shared
        self._room = room
        self._is_over = False
        self._subjects: list[str] = []
        self._prefix = "" if shared is not None else broker.nc.new_inbox()
        self._number = 0
        self._request_subject = ""
        self._arrived: asyncio.Queue[Msg | errors.TinkermqError] = asyncio.Queue()
        self._listening: Listening | None = None
        self._removals = [broker.on_error(self._denied)]
        if ends_with_connection:
            self._removals.append(broker.on_disconnect(self._note_disconnect))

    async def new_subject(self) -> str:
        """Return a subject for the answers to one request."""
        if self._shared is not None:
            subject = await self._shared.new_subject(self._receive)
            self._subjects.append(subject)
            return subject
        if self._listening is None:
            self._listening = await self._broker.listen(f"{self._prefix}.*", self._receive)
        self._number += 1
        return f"{self._prefix}.{self._number}"

    async def only_subject(self) -> str:
        """Return the only subject of this inbox, subscribed to without a wildcard.

        A server that checks whether the subject has subscribers does not count wildcards, and would
        wait for one.
        """
        self._listening = await self._broker.listen(self._prefix, self._receive)
        return self._prefix

    async def ask(self, subject: str, payload: bytes) -> str:
        """Send a request; return the subject of its answers. Raises what `Broker.send` raises."""
        reply = await self.new_subject()
        self._request_subject = subject
        await self._broker.send(subject, payload, reply=reply)
        return reply

    async def next(self, timeout_s: float) -> Msg:
        """Return the next message of any request.

        Raises ConnectionLost, DeniedError, TimeoutError, and what the room raised.
        """
        if self._arrived.empty():
            async with asyncio.timeout(timeout_s):
                arrived = await self._arrived.get()
        else:
            arrived = self._arrived.get_nowait()
        if isinstance(arrived, errors.TinkermqError):
            raise arrived
        self._release(arrived)
        return arrived

    def drain(self) -> list[Msg]:
        """Return the messages that have arrived, without waiting."""
        messages: list[Msg] = []
        while not self._arrived.empty():
            arrived = self._arrived.get_nowait()
            if not isinstance(arrived, errors.TinkermqError):
                self._release(arrived)
                messages.append(arrived)
        return messages

    async def close(self) -> None:
        """Unsubscribe."""
        self._is_over = True
        self.drain()
        for remove in self._removals:
            remove()
        if self._shared is not None:
            for subject in self._subjects:
                self._shared.forget(subject)
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening.stop()

    def _receive(self, message: Msg) -> None:
        if self._is_over:
            return
        try:
            if self._room is not None:
                self._room.hold(len(message.data))
        except errors.TinkermqError as error:
            self._is_over = True
            self.drain()
            self._arrived.put_nowait(error)
        else:
            self._arrived.put_nowait(message)

    def _release(self, message: Msg) -> None:
        if self._room is not None:
            self._room.release(len(message.data))

    def _note_disconnect(self) -> None:
        self._arrived.put_nowait(faults.broken(self._broker.url, self._request_subject))

    def _denied(self, error: errors.BrokerError) -> None:
        if isinstance(error, errors.DeniedError) and error.subject == self._request_subject.lower():
            self._arrived.put_nowait(error)


Q = TypeVar("Q", bound=Message)
P = TypeVar("P", bound=Part)

Tell: TypeAlias = Callable[[P], Awaitable[None]]
"""Sends one part."""
PartsHandler: TypeAlias = Callable[[Q, Tell[P]], Awaitable[P]]
"""`async handler(request, tell) -> last part`."""
UserPartsHandler: TypeAlias = Callable[[Q, Tell[P], str], Awaitable[P]]
"""`async handler(request, tell, user) -> last part`."""

ALIVE_S = 1.0
"""The longest time without a part."""
SILENCE_S = 10.0
"""A service that sends no part for so long is considered dead."""
MAX_LISTENED = 256
"""Concurrent requests on one subject that is not shared by users."""
MAX_OF_USER = 256
"""Concurrent requests of one user at a service that distinguishes users."""
_AGAIN = "ask again; another server answers if there is one"
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class PartsService:
    """Endpoints of a service with answers in parts, and their running requests."""

    def __init__(self, broker: Broker, service: Service, *, alive_s: float = ALIVE_S) -> None:
        """Add endpoints to `service`; an empty part is sent after `alive_s` without a part."""
        self._broker = broker
        self._service = service
        self._alive_s = alive_s
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Running requests by user (empty if unknown) and request name."""
        self._of_users: Counter[str] = Counter()
        self._unheard = SharedInbox(broker)
        """Inbox where the server reports that an answer's inbox has no subscriber."""

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    async def endpoint(
        self,
        name: str,
        subject: str,
        request_model: type[Q],
        part_model: type[P],
        handler: PartsHandler[Q, P],
    ) -> None:
        """Answer requests on `subject`; services on the same subject share them.

        `handler(request, tell)` sends parts of the answer by `tell` and returns the last one. The
        request's field `request` is its name for `cancel`.
        """

        async def answer(request: Request) -> None:
            if reply := allowed_reply(request.subject, reply_of(request)):
                sender = _Sender(self._broker, reply, part_model(), self._alive_s)
                async with self._while_heard(sender):
                    await self._answer(sender, handler, request_model, request.data)

        await self._service.raw_endpoint(name, subject, answer)

    async def user_endpoint(
        self,
        name: str,
        subject: str,
        request_model: type[Q],
        part_model: type[P],
        handler: UserPartsHandler[Q, P],
        *,
        max_running: int = MAX_OF_USER,
    ) -> None:
        """Answer requests on `rpc.<user>.…` as `endpoint` does, with the user as an argument.

        Names of requests are unique per user. A user with `max_running` requests at all such
        endpoints is refused with BusyError; they do not count towards the bound of the service's
        other requests.
        """

        async def run(sender: _Sender[P], user: str, payload: bytes) -> None:
            def handle(query: Q, tell: Tell[P]) -> Awaitable[P]:
                return handler(query, tell, user)

            if self._of_users[user] >= max_running:
                await sender.fail(
                    errors.BusyError(
                        f"{max_running} requests of user {user!r} are being answered",
                        hint="send the next one when an answer has come",
                    )
                )
                return
            self._of_users[user] += 1
            try:
                async with self._while_heard(sender):
                    await self._answer(sender, handle, request_model, payload, user)
            finally:
                self._of_users[user] -= 1
                if not self._of_users[user]:
                    del self._of_users[user]

        async def take(request: Request) -> None:
            if reply := allowed_reply(request.subject, reply_of(request)):
                sender = _Sender(self._broker, reply, part_model(), self._alive_s)
                user = RequestContext(request.subject).user
                self._service.run(run(sender, user, request.data), name=f"{name} request")

        await self._service.raw_endpoint(name, subject, take)

    async def listen(
        self,
        subject: str,
        request_model: type[Q],
        part_model: type[P],
        handler: PartsHandler[Q, P],
        *,
        blank: P | None = None,
        max_running: int = MAX_LISTENED,
    ) -> Listening:
        """Answer requests on `subject` as `endpoint` does, without a queue group.

        Every listener receives each request and answers it: empty parts and errors are copies of
        `blank`, which identifies the sender. The subject is not listed among the service's own, and
        may be added and removed while the service runs. A request beyond `max_running` is refused
        with BusyError. Only `cancel` or the service's end stops a running request, not the caller's
        death or the end of listening.
        """
        empty = part_model() if blank is None else blank
        running = 0

        async def answer(sender: _Sender[P], payload: bytes) -> None:
            nonlocal running
            running += 1
            try:
                if running > max_running:
                    await sender.fail(
                        errors.BusyError(
                            f"{max_running} requests on {subject} run", hint="send fewer"
                        )
                    )
                else:
                    await self._answer(sender, handler, request_model, payload)
            finally:
                running -= 1

        def take(message: Msg) -> None:
            if reply := allowed_reply(message.subject, message.reply):
                sender = _Sender(self._broker, reply, empty, self._alive_s)
                self._service.run(answer(sender, message.data), name=f"request on {subject}")

        listening = await self._broker.listen(subject, take)
        try:
            await flush(self._broker, waiting_for=f"the server to register {subject}")
        except BaseException:
            await listening.stop()
            raise
        return listening

    def cancel(self, request: str, user: str = "") -> None:
        """Stop answering a request, of a user at `user_endpoint`; harmless for an unknown one."""
        task = self._running.get((user, request))
        if task is not None:
            task.cancel()

    @asynccontextmanager
    async def _while_heard(self, sender: "_Sender[P]") -> AsyncIterator[None]:
        """Cancel this task once the answer's inbox has no subscriber; a lost part is detected
        anyway.
        """
        task = cast("asyncio.Task[None]", asyncio.current_task())

        def end(_: Msg) -> None:
            task.cancel()

        sender.unheard = await self._unheard.new_subject(end)
        try:
            yield
        finally:
            self._unheard.forget(sender.unheard)

    async def _answer(
        self,
        sender: "_Sender[P]",
        handler: PartsHandler[Q, P],
        model: type[Q],
        payload: bytes,
        user: str = "",
    ) -> None:
        keeper = asyncio.create_task(sender.keep_alive(), name="signs of life")
        name = (user, "")
        try:
            query = model.from_bytes(payload)
            name = self._enter(query, user)
            last = await handler(query, sender.send)
            keeper.cancel()
            await sender.send(last.model_copy(update={"last": True}))
        except errors.TinkermqError as error:
            keeper.cancel()
            await sender.fail(error)
        except BaseException as error:  # the service's boundary: record, reveal no internals
            keeper.cancel()
            if ends_this_task(error):
                if isinstance(error, asyncio.CancelledError):
                    await sender.fail(
                        errors.BrokerError(
                            "the request was cancelled, or its server ended", hint=_AGAIN
                        )
                    )
                raise
            _log.exception("request_failed", request=name[1])
            await sender.fail(
                errors.InternalError(
                    f"the service failed: {type(error).__name__}", hint="its log has the details"
                )
            )
        finally:
            keeper.cancel()
            if self._running.get(name) is asyncio.current_task():
                del self._running[name]

    def _enter(self, query: Message, user: str) -> tuple[str, str]:
        name = (user, str(getattr(query, "request", "")))
        if name in self._running:
            raise errors.MessageError(
                f"request {name[1]} runs already", hint="give each its own id"
            )
        self._running[name] = cast("asyncio.Task[None]", asyncio.current_task())
        return name


class _Sender(Generic[P]):
    """Numbers the parts of one answer, and sends empty ones in between."""

    def __init__(self, broker: Broker, inbox: str, blank: P, alive_s: float) -> None:
        self._broker = broker
        self._inbox = inbox
        self._blank = blank
        self._alive_s = alive_s
        self._index = 0
        self._order = asyncio.Lock()
        self.unheard = ""
        """Subject where the server reports that the inbox has no subscriber; empty: none."""

    async def send(self, part: P) -> None:
        async with self._order:
            payload = part.to_bytes(index=self._index)
            # a part that is too large is not sent, and the error instead of it has its number
            self._broker.check_size(len(payload), what="a part of an answer")
            self._index += 1
            await self._broker.publish(self._inbox, payload, reply=self.unheard)

    async def fail(self, error: errors.TinkermqError) -> None:
        reply = ErrorReply.of(error.code, error.message, error.hint)
        with contextlib.suppress(errors.TinkermqError):  # the connection is closed
            await self.send(self._blank.model_copy(update={"last": True, "error": reply}))

    async def keep_alive(self) -> None:
        known = -1
        while True:
            await asyncio.sleep(self._alive_s)
            if self._index == known or known < 0:
                with contextlib.suppress(errors.TinkermqError):
                    await self.send(self._blank)
            known = self._index


async def ask_parts(
    broker: Broker,
    subject: str,
    request: Message | bytes,
    part_model: type[P],
    *,
    waiting_for: str,
    cancel: tuple[str, Message] | None = None,
    silence_s: float = SILENCE_S,
    rank: Callable[[P], int] | None = None,
    least_rank: int = 0,
    shared: SharedInbox | None = None,
    room: Room | None = None,
) -> AsyncGenerator[P, None]:
    """Send a request and yield the non-empty parts of its answer, and the last one.

    Close the generator (`aclosing`) to stop early: then the `cancel` message is sent. If several
    services may answer the same request, each numbers its own parts, and `rank` distinguishes the
    senders: only parts of the highest rank so far, and at least `least_rank`, are yielded; errors
    and ends of others are ignored, too. Pass a `shared` inbox for many requests. Unread parts
    occupy `room`.

    Raises the error that the service raised, NobodyAnswersError if no service listens,
    DeadlineError after `silence_s` without a part, ConnectionLost when a part was lost, and what
    the room raises when it is full.
    """
    # do not end with the connection: the numbers of parts show a lost one
    inbox = Inbox(broker, ends_with_connection=False, shared=shared, room=room)
    ended = False
    try:
        await broker.wait_connected(broker.clock() + silence_s, waiting_for=waiting_for)
        payload = request if isinstance(request, bytes) else request.to_bytes()
        broker.check_size(len(payload), what=f"a request on {subject}")
        await inbox.ask(subject, payload)
        order = _Order(rank, least_rank, waiting_for)
        empty = vars(part_model())
        while not ended:
            left_s = order.last_part_at + silence_s - time.monotonic()
            received = await _next(inbox, subject, waiting_for, left_s, silence_s)
            part = order.next_part(part_model.from_bytes(received))
            if part is None:
                continue
            ended = part.last
            if part.error is not None:
                raise part.error.to_error()
            if part.last or vars(part) != {**empty, "index": part.index}:
                yield part
    finally:
        await inbox.close()
        if not ended and cancel is not None:
            with contextlib.suppress(errors.TinkermqError):
                await broker.publish(cancel[0], cancel[1].to_bytes())


class _Order(Generic[P]):
    """Checks the order of an answer's parts, and selects the sender if several answer."""

    def __init__(self, rank: Callable[[P], int] | None, least: int, waiting_for: str) -> None:
        self.last_part_at = time.monotonic()
        self._rank = rank
        self._waiting_for = waiting_for
        self._top = least
        self._index = 0

    def next_part(self, part: P) -> P | None:
        """Return the next part; None for a sender of lower rank."""
        rank = 0 if self._rank is None else self._rank(part)
        if rank < self._top:
            return None
        if rank > self._top:
            self._top, self._index = rank, 0
        if part.index != self._index:
            raise ConnectionLost(
                f"a part of the answer of {self._waiting_for} was lost", hint=_AGAIN
            )
        self._index += 1
        self.last_part_at = time.monotonic()
        return part


async def last_part(parts: AsyncGenerator[P, None]) -> P:
    """Return the last part of an answer."""
    async with aclosing(parts):
        async for part in parts:
            if part.last:
                return part
    raise errors.BrokerError("an answer ended without its last part", hint=_AGAIN)


async def _next(
    inbox: Inbox, subject: str, waiting_for: str, left_s: float, silence_s: float
) -> bytes:
    try:
        message = await inbox.next(left_s)
    except TimeoutError:
        raise errors.DeadlineError(
            f"nothing was heard of {waiting_for} for {silence_s:g} s", hint=_AGAIN
        ) from None
    if status_of(message) == NO_RESPONDERS:
        raise errors.NobodyAnswersError(
            f"{waiting_for} does not answer on {subject}: no service listens there",
            hint="see whether it runs: `tinkermq ps`",
        )
    return message.data
