"""Checks of every request: origin, size, and rights of browsers.

Pages run only scripts of this gateway and load only its files. A browser's request that changes
something must come from one of these pages: cookies are `samesite=strict`, and `Sec-Fetch-Site` or
`Origin` must name the gateway. Without log-ins the gateway answers only under names of this
machine, so that no web site can reach it under the site's own name.
"""

import contextlib
import time
from email.utils import formatdate
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
"""Key in a request's scope: the context that ends when the request is answered."""
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
        """Refuse forbidden requests, and add headers to answers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500
        held = scope[HELD] = contextlib.ExitStack()
        largest = MAX_PROGRAM_BYTES if is_of_program(scope) else max_body_bytes(scope["path"])
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > largest:
                raise HTTPException(413, f"a request may have {largest:,} bytes")
            if not message.get("more_body", False) and TAKEN in scope:
                scope[TAKEN].settle(num_bytes)
            return message

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
                headers.setdefault("date", formatdate(usegmt=True))
            elif not message.get("more_body", False):
                held.close()  # closes later: the server may still drop the rest of the request
            await send(message)

        app = self._refusal(scope, largest) or self._app
        try:
            with held:
                await app(scope, receive_bounded, send_guarded)
        finally:
            self._counters.count(scope, status, time.perf_counter() - started)

    def _refusal(self, scope: Scope, largest: int) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._local_only and _place(f"//{host}").hostname not in LOOPBACK:
            return _refuse(f"this gateway answers on this machine only, not as {host!r}")
        if scope["method"] in _SAFE:
            return None
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > largest:
            why = f"a request may have {largest:,} bytes"
            if (path := scope["path"]).startswith("/v1/"):
                value = api_of(split_path(path)[1]).error(RequestError(why), 413)
                return JSONResponse(value, status_code=413)
            return _refuse(why, 413)
        return (
            None
            if _same_origin(headers, host)
            else _refuse("the request comes from a page of another site")
        )


def _same_origin(headers: Headers, host: str) -> bool:
    """Return whether a request comes from the gateway's own pages, or not from a browser."""
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if site is not None and site not in ("same-origin", "none"):
        return False
    if origin is not None:
        return bool(host) and _place(origin).netloc == host
    return site is not None or COOKIE not in headers.get("cookie", "")


def _place(url: str) -> SplitResult:
    """Return the parts of a URL; empty parts for a malformed one."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _refuse(why: str, status: int = 403) -> JSONResponse:
    body = {"error": {"code": "refused", "message": why, "hint": ""}}
    return JSONResponse(body, status_code=status)
