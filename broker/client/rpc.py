"""Requests and replies: typed services over NATS micro, and typed calls.

A service is listed and counted by `nats micro ls|info|stats`. Each request runs in a task of its
own, so that a slow one does not delay the next and a call back to the caller does not deadlock.
Running requests are bounded, at the pool's own services per user. For any payload the answer is a
reply or an error reply, and the service continues: our errors travel as code, message and hint; an
unexpected exception is logged here and travels as `internal` without its details. The subject
identifies the sender, as the broker enforces, never the payload.
"""

import asyncio
import contextlib
import inspect
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.micro.request import Request
from nats.micro.service import Service as MicroService
from nats.micro.service import ServiceConfig

from ...schemas.version import VERSION
from ...schemas.wire import errors
from ...schemas.wire.codec import too_large
from ...schemas.wire.foreign import ends_this_task
from ...schemas.wire.message import Message
from ...schemas.wire.subjects import PREFIX, caller_of_rpc, user_of_rpc
from ...schemas.wire.trace import TRACEPARENT
from .availability import RETRY_PAUSE_S
from .connection import Broker, flush
from .fair_queue import FairQueue, Rates, end_tasks
from .faults import ConnectionLost, NoResponders, Unanswered
from .nats_internals import (
    ERROR_CODE,
    ERROR_TEXT,
    MicroEndpoint,
    header,
    reply_of,
    subscriptions,
)
from .replies import error_of, error_reply, is_behind

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

MAX_RUNNING = 1024
MAX_OF_USER = 512
"""Concurrent requests of one user, including waiting ones, at a service of many users."""
RUNNING_BYTES = 256 << 20
"""Bound on the bytes of concurrent requests, per user at a service of many users; a single request
always fits.
"""
INBOXES = "_INBOX"
_OF_MANY_USERS = f"{PREFIX}.rpc.*."
_UNUSED = "unused"
"""A token below the subject of a service on which no service listens."""
_LOOK_S = 1.0
_SILENT = "; a service listens there, but is silent"
_NOT_LISTED = (
    "; none of the {} endpoints that services list is there: it does not run, or cannot answer "
    "anything now. nats-server does not report it while a client (`nats sub '>'`) listens to all "
    "subjects"
)
_DRAIN_S = 5.0
_BUSY_S = 50.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request's subject, headers and sender."""

    subject: str
    """Subject of the request."""
    traceparent: str = ""
    """W3C trace context of the request."""

    @property
    def user(self) -> str:
        """The user on whose behalf the request was sent."""
        return user_of_rpc(self.subject)

    @property
    def caller(self) -> str:
        """The user that sent it: `user`, or an admin that acts for the user."""
        return caller_of_rpc(self.subject)

    @property
    def who(self) -> str:
        """The sender's name in events."""
        return f"user {self.caller}" + (f" for {self.user}" if self.caller != self.user else "")


Handler = Callable[..., Awaitable[Message]]
"""`async handler(request) -> reply`, or `async handler(request, context) -> reply`."""


RawHandler = Callable[[Request], Coroutine[Any, Any, None]]
"""Receives a raw request and sends the replies itself."""


class Service:
    """A micro service with typed endpoints; create it with `Service.start`."""

    def __init__(
        self, broker: Broker, micro: MicroService, running_bytes: int = RUNNING_BYTES
    ) -> None:
        """Wrap a started service."""
        self._broker = broker
        self._micro = micro
        self._running: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(MAX_RUNNING)
        self._num_bytes, self._most_bytes = 0, running_bytes
        self._has_room = asyncio.Event()
        self._of_users: Counter[str] = Counter()
        self._bytes_of_users: Counter[str] = Counter()
        self.share = FairQueue()
        """Requests of users, at the endpoints where users take turns."""

    @classmethod
    async def start(
        cls,
        broker: Broker,
        *,
        name: str,
        description: str,
        metadata: Mapping[str, str] | None = None,
        running_bytes: int = RUNNING_BYTES,
    ) -> "Service":
        """Register a service; `nats micro ls` shows `name` and `description`.

        A guest's service is not listed, as a guest may not receive or answer such requests.
        """
        config = ServiceConfig(
            name=name, version=VERSION, description=description, metadata=dict(metadata or {})
        )
        micro = MicroService(broker.nc, config)
        if not broker.is_guest:
            await micro.start()
        return cls(broker, micro, running_bytes)

    async def endpoint(
        self,
        name: str,
        subject: str,
        request_model: type[Q],
        handler: Handler,
        *,
        queue: str = "q",
        fair: bool = False,
    ) -> None:
        """Answer requests on `subject` with `handler`.

        Endpoints on the same subject and `queue` share its requests, also across processes. With
        `fair` the users in `rpc.<user>.…` take turns, and a user with too many requests is refused.
        Otherwise a user with `MAX_OF_USER` or `RUNNING_BYTES` at such endpoints is refused; these
        requests do not count towards the bounds of others.
        """
        share = self.share if fair else None
        endpoint = _Endpoint(self._broker, request_model, _with_context(handler), share)

        def known(micro: MicroEndpoint) -> None:
            endpoint.micro.set_result(micro)
            if share is not None:
                micro.bound_pending()

        if share is not None:
            await self._listen(name, subject, endpoint.take_turn, queue, known)
        elif subject.startswith(_OF_MANY_USERS):
            take = partial(self._take_of_user, endpoint, name)
            await self._listen(name, subject, take, queue, known)
        else:
            await self.raw_endpoint(name, subject, endpoint.answer, queue, known=known)

    async def _take_of_user(self, endpoint: "_Endpoint", name: str, request: Request) -> None:
        user, num_bytes = caller_of_rpc(request.subject), len(request.data)
        num, held = self._of_users[user], self._bytes_of_users[user]
        if num >= MAX_OF_USER or (num and held + num_bytes > self._most_bytes):
            await endpoint.refuse_busy(request, user)
            return
        self._of_users[user] += 1
        self._bytes_of_users[user] += num_bytes

        def ended(_: asyncio.Task[None]) -> None:
            self._of_users[user] -= 1
            self._bytes_of_users[user] -= num_bytes
            if not self._of_users[user]:
                del self._of_users[user], self._bytes_of_users[user]

        self.run(endpoint.answer(request), name=f"{name} request").add_done_callback(ended)

    async def raw_endpoint(
        self,
        name: str,
        subject: str,
        answer: RawHandler,
        queue: str = "q",
        *,
        known: Callable[[MicroEndpoint], None] | None = None,
    ) -> None:
        """Answer requests on `subject` with a coroutine that sends its replies itself."""

        async def take(request: Request) -> None:
            num_bytes = len(request.data)
            await self._free.acquire()
            while self._num_bytes and self._num_bytes + num_bytes > self._most_bytes:
                self._has_room.clear()
                await self._has_room.wait()
            self._num_bytes += num_bytes
            task = self.run(answer(request), name=f"{name} request")
            task.add_done_callback(lambda _: self._release(num_bytes))

        await self._listen(name, subject, take, queue, known)

    async def _listen(
        self,
        name: str,
        subject: str,
        take: RawHandler,
        queue: str,
        known: Callable[[MicroEndpoint], None] | None,
    ) -> None:
        """Listen on a subject; `known` gets the endpoint before any request is answered."""
        await self._micro.add_endpoint(name=name, subject=subject, queue_group=queue, handler=take)
        if known is not None:
            known(MicroEndpoint(self._micro))
        await flush(self._broker, waiting_for=f"the server to register {subject}")

    def run(self, answer: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run the handling of a request, which `stop` waits for; the caller bounds their number."""
        task = asyncio.create_task(answer, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _release(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._has_room.set()
        self._free.release()

    async def stop(self, drain_s: float = _DRAIN_S) -> None:
        """Stop receiving requests, and give running ones `drain_s` to finish."""
        if not self._broker.nc.is_closed:
            for subscription in subscriptions(self._micro):
                with contextlib.suppress(nats.errors.BadSubscriptionError):  # ended already
                    await subscription.unsubscribe()
        await self.share.settle(drain_s)
        await end_tasks(self._running, drain_s)

    async def __aenter__(self) -> "Service":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


class _Endpoint:
    """Answers the requests of one endpoint."""

    def __init__(
        self,
        broker: Broker,
        request_model: type[Message],
        handler: Callable[[Any, RequestContext], Awaitable[Message]],
        share: FairQueue | None,
    ) -> None:
        self._broker = broker
        self._share = share
        self._busy = Rates(_BUSY_S, int(_BUSY_S))
        self._request_model = request_model
        self._handler = handler
        self.micro: asyncio.Future[MicroEndpoint] = asyncio.get_running_loop().create_future()
        """nats-py's endpoint; the first requests may arrive before it is set."""

    async def take_turn(self, request: Request) -> None:
        """Answer in the user's turn; refuse at once if the user has too many requests."""
        assert self._share is not None
        if not (self.micro.done() and is_behind(self.micro.result().subscription)):
            await self._share.give_way()
        user, num_bytes = caller_of_rpc(request.subject), len(request.data)
        if num_bytes > self._request_model.max_bytes:  # it would occupy memory while waiting
            self._share.num_refused += 1
            await self._refuse(request, too_large(num_bytes, self._request_model.max_bytes))
        elif not self._share.submit(user, lambda: self.answer(request), num_bytes):
            await self.refuse_busy(request, user)

    async def refuse_busy(self, request: Request, user: str) -> None:
        """Refuse a user with too many requests; the number of refusals per second is bounded."""
        if self._busy.take(user, time.monotonic()) is not None:
            error = errors.BusyError(
                f"user {user!r} has too many requests under way",
                hint=f"send fewer at once; this one again in {errors.BusyError.retry_after_s:g} s",
            )
            await self._refuse(request, error)

    async def _refuse(self, request: Request, error: errors.TinkermqError) -> None:
        payload, headers = error_reply(error.code, error.message, error.hint)
        await self._count(0, headers)
        await self._send(request, payload, headers)

    async def answer(self, request: Request) -> None:
        """Handle one request; its errors are answered or logged, never raised."""
        started = time.perf_counter_ns()
        payload, headers = await self._reply_to(request)
        await self._count(time.perf_counter_ns() - started, headers)
        await self._send(request, payload, headers)

    async def _send(self, request: Request, payload: bytes, headers: dict[str, str] | None) -> None:
        reply = allowed_reply(request.subject, reply_of(request))
        if not reply:
            return
        try:
            await self._broker.publish(reply, payload, headers)
        except Exception as error:  # noqa: BLE001  the caller is gone or the connection is down
            _log.warning("reply_failed", subject=request.subject, error=repr(error))

    async def _reply_to(self, request: Request) -> tuple[bytes, dict[str, str] | None]:
        try:
            query = self._request_model.from_bytes(request.data)
            trace = (request.headers or {}).get(TRACEPARENT, "")
            reply = await self._handler(query, RequestContext(request.subject, trace))
            payload = reply.to_bytes()
            if len(payload) > self._broker.max_payload_bytes:
                self._broker.check_size(len(payload), what=f"the reply to {request.subject}")
            return payload, None
        except errors.TinkermqError as error:
            return error_reply(error.code, error.message, error.hint)
        except BaseException as error:  # the service's boundary: record, reveal no internals
            if ends_this_task(error):
                raise
            _log.exception("request_failed", subject=request.subject)
            return error_reply(
                "internal",
                f"the service failed on {request.subject}: {type(error).__name__}",
                "its log has the details",
            )

    async def _count(self, duration_ns: int, headers: dict[str, str] | None) -> None:
        error = f"{headers[ERROR_CODE]}: {headers[ERROR_TEXT]}" if headers else ""
        micro = self.micro.result() if self.micro.done() else await self.micro
        micro.count(duration_ns, error)


def allowed_reply(subject: str, reply: str) -> str:
    """Return the reply subject of a request; empty: no reply."""
    if reply and not reply.startswith(INBOXES):  # a service may publish where the caller may not
        _log.warning("reply_refused", subject=subject, reply=reply)
        return ""
    return reply


def _with_context(handler: Handler) -> Callable[[Any, RequestContext], Awaitable[Message]]:
    """Wrap a handler without a context parameter."""
    if len(inspect.signature(handler).parameters) >= 2:
        return handler

    def without(request: Any, _: RequestContext) -> Awaitable[Message]:
        return handler(request)

    return without


async def call(
    broker: Broker,
    subject: str,
    request: Message,
    reply_model: type[R],
    *,
    timeout_s: float,
    waiting_for: str,
    idempotent: bool = False,
    traceparent: str = "",
) -> R:
    """Send a request and return its reply.

    `waiting_for` names the service in DeadlineError's message. With `idempotent` the request is
    repeated if the connection breaks.

    Raises the error that the service raised, DeadlineError, NobodyAnswersError, ConnectionLost,
    MessageError for a request that is too large or a malformed reply.
    """
    payload = request.to_bytes()
    headers = {TRACEPARENT: traceparent} if traceparent else None
    deadline = broker.clock() + timeout_s
    try:
        reply = await _send(broker, subject, payload, headers, deadline, waiting_for, idempotent)
    except TimeoutError as error:
        seen = await _seen(broker, subject) if isinstance(error, Unanswered) else ""
        raise errors.DeadlineError(
            f"{waiting_for} did not answer on {subject} within {timeout_s:g} s{seen}",
            hint="see what it does: `nats micro stats`, or its log",
        ) from None
    except NoResponders:
        raise errors.NobodyAnswersError(
            f"{waiting_for} does not answer on {subject}: no service listens there",
            hint="see whether it runs: `tinkermq doctor`; an older release may lack this call",
        ) from None
    if header(reply, ERROR_CODE):
        raise error_of(reply)
    return reply_model.from_bytes(reply.data)


async def _seen(broker: Broker, subject: str) -> str:
    """Say whether a service listens on a subject that gave no answer, as far as can be known.

    nats-server reports a subject without listeners at once, but not while a client listens to all
    subjects. Whether one does, a subject shows on which nobody else listens; if so, the services
    are asked for theirs.
    """
    if broker.is_limited or broker.is_guest:
        return ""  # it may ask for neither
    try:
        await broker.request(f"{subject}.{_UNUSED}", timeout_s=_LOOK_S)
    except NoResponders:
        return _SILENT
    except TimeoutError:
        listed = await _listed_endpoints(broker)
        is_there = any(_covers(endpoint, subject) for endpoint in listed)
        return _SILENT if is_there else _NOT_LISTED.format(len(listed))
    except errors.BrokerError:
        pass
    return ""


async def _listed_endpoints(broker: Broker) -> list[str]:
    """Return the subjects that services list, as `nats micro info` shows them."""
    listed: list[str] = []

    def take(message: Msg) -> None:
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a foreign service's
            endpoints = json.loads(message.data)["endpoints"]
            listed.extend(str(endpoint["subject"]) for endpoint in endpoints)

    inbox = broker.nc.new_inbox()
    listening = await broker.listen(inbox, take)
    await broker.send("$SRV.INFO", b"", reply=inbox)
    await asyncio.sleep(_LOOK_S)
    await listening.stop()
    return listed


def _covers(pattern: str, subject: str) -> bool:
    """Return whether a subscription to `pattern` receives messages on `subject`."""
    form = re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+")
    return re.fullmatch(form, subject) is not None


async def _send(
    broker: Broker,
    subject: str,
    payload: bytes,
    headers: Mapping[str, str] | None,
    deadline: float,
    waiting_for: str,
    idempotent: bool,
) -> Msg:
    while True:
        if not broker.is_connected:
            await broker.wait_connected(deadline, waiting_for=waiting_for)
        try:
            timeout_s = deadline - broker.clock()
            return await broker.request(subject, payload, headers=headers, timeout_s=timeout_s)
        except ConnectionLost:
            if not idempotent:
                raise
        except NoResponders:
            if broker.settled:
                raise  # otherwise the service may also be reconnecting
        if broker.clock() + RETRY_PAUSE_S > deadline:
            raise TimeoutError
        await asyncio.sleep(RETRY_PAUSE_S)
