"""Checks before every request: its origin, its size, and what browsers may do.

Pages run no script and load nothing that this gateway did not serve. A browser's request that
changes something must come from one of these pages: cookies are `samesite=strict`, and beyond that
`Sec-Fetch-Site` or `Origin` must say so. Without a log-in only names of this machine are answered,
so that no web site can reach the gateway under a name of its own.

A client that is answered before all of its request was read is still sending it. A connection
closed then is reset, and with it goes the answer, unread (RFC 9112, 9.6). So the answer is sent
whole, the rest of the body is dropped as it comes, within bounds, and only then does the answer
end.
"""

import asyncio
import contextlib
import time
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...envs.agents.proxy.routes import api_of, split_path
from ...schemas.model_apis.request import RequestError
from .limits import MAX_PROGRAM_BYTES, TAKEN, Counters, max_body_bytes
from .programs import is_of_program
from .sessions import COOKIE

HELD = "tinkermq.held"
"""Key in a request's scope: what is held until the request is answered."""
MAX_DROPPED_BYTES = 64 << 20
DROPPING_S = 10.0
"""How much is read, and how long, of a request that has been answered already."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, counters: Counters, local_only: bool) -> None:
        """`local_only`: answer only under names of this machine."""
        self._app = app
        self._counters = counters
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse what must not pass, and put the headers on what does."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500
        held = scope[HELD] = contextlib.ExitStack()
        body = _Body(receive, scope, _largest(scope))

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            elif not message.get("more_body", False) and not body.ended:
                await send({**message, "more_body": True})
                held.close()
                await body.drop_the_rest()
                message = {"type": "http.response.body"}
            await send(message)

        refusal = self._refusal(scope)
        app = self._app if refusal is None else refusal
        try:
            with held:
                await app(scope, body.receive, send_guarded)
        finally:
            self._counters.count(scope, status, time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._local_only and _place(f"//{host}").hostname not in LOOPBACK:
            return _refuse(f"this gateway answers on this machine only, not as {host!r}")
        if scope["method"] in _SAFE:
            return None
        length = headers.get("content-length", "0")
        largest = _largest(scope)
        if not length.isdigit() or int(length) > largest:
            why = f"a request may have {largest:,} bytes"
            if (path := scope["path"]).startswith("/v1/"):
                value = api_of(split_path(path)[1]).error(RequestError(why), 413)
                return JSONResponse(value, status_code=413)
            return _refuse(why, 413)
        return None if _same_origin(headers, host) else _refuse("the request comes from elsewhere")


def _largest(scope: Scope) -> int:
    """Return the size of the largest body that passes; what reads it for a program is stricter."""
    return MAX_PROGRAM_BYTES if is_of_program(scope) else max_body_bytes(scope["path"])


def _same_origin(headers: Headers, host: str) -> bool:
    """Whether a request that changes something comes from our own pages, or from no browser."""
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if site is not None and site not in ("same-origin", "none"):
        return False
    if origin is not None:
        return bool(host) and _place(origin).netloc == host
    return site is not None or COOKIE not in headers.get("cookie", "")


def _place(url: str) -> SplitResult:
    """Return the parts of what a visitor says is a URL; those of none where it is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


class _Body:
    """The body of a request as it comes, which is refused where it is longer than it may be."""

    def __init__(self, receive: Receive, scope: Scope, largest: int) -> None:
        headers = Headers(scope=scope)
        content_length = headers.get("content-length", "0")
        self.ended = content_length == "0" and "transfer-encoding" not in headers
        """Whether all of it has come."""
        self._receive = receive
        self._scope = scope
        self._largest = largest
        self._seen = 0

    async def receive(self) -> Message:
        """Return what came next; HTTPException 413 for more than may come."""
        message = await self._next()
        if self._seen > self._largest:
            raise HTTPException(413, f"a request may have {self._largest:,} bytes")
        return message

    async def drop_the_rest(self) -> None:
        """Read to the end of what is still sent, for as long and as much as is bearable."""
        most = self._seen + MAX_DROPPED_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DROPPING_S):
                while not self.ended and self._seen < most:
                    await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        self.ended = message["type"] != "http.request" or not message.get("more_body", False)
        if self.ended and TAKEN in self._scope:
            self._scope[TAKEN].settle(self._seen)
        return message


def _refuse(why: str, status: int = 403) -> JSONResponse:
    body = {"error": {"code": "refused", "message": why, "hint": ""}}
    return JSONResponse(body, status_code=status)
