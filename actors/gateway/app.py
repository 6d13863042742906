"""The application: pages, REST interface, health, metrics, static files, and how errors look."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import structlog
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from ...broker.client.connection import Broker
from ...broker.jetstream.kv import Entry
from ...broker.presence import list_presences
from ...schemas.job import FINAL_STATES
from ...schemas.metric import Presence
from ...schemas.wire.errors import BrokerError, InternalError, NotFoundError, TinkermqError
from . import rest, users
from .data.counters import Counters, pool_text
from .data.jobs import Query, select
from .guard import Guard
from .openai import routes as openai
from .openapi import description
from .operations import Scheduler
from .pages import routes as pages
from .pages.render import STATIC, VERSION, make_templates
from .programs import user_episodes
from .programs.episodes import ProgramEpisodes
from .programs.routes import ProgramRequests
from .sessions import LogInError, Sessions, Visitor, server_info
from .tinker import routes as tinker
from .web import Gateway, Json, error_fields, gateway_of, visitor_of, why_it_failed

_MAX_LIVE_JOBS = 500
_TOO_MANY = 429
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_log = structlog.get_logger()


def make_app(sessions: Sessions, *, local_only: bool, secure: bool = False) -> Starlette:
    """Return the application that serves the visitors of `sessions`.

    `local_only`: answer only under names of this machine. `secure`: cookies are for TLS only.
    """
    counters = Counters()
    programs = ProgramEpisodes(sessions.url, with_keys=sessions.with_keys)
    gateway = Gateway(sessions, make_templates(), programs, counters, secure=secure)
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        TinkermqError: _our_error,
        HTTPException: _http_error,
        TimeoutError: _late,
        Exception: _crash,
    }
    app = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/metrics", metrics),
            Route("/api/openapi.json", openapi_document),
            *rest.routes(),
            *openai.routes(_Brokers(), gateway.trainers),
            *user_episodes.routes(_Brokers(), lambda request: gateway_of(request).programs),
            *tinker.routes(gateway.trainers),
            *users.routes(),
            *pages.routes(),
            Mount("/static", _Static(directory=STATIC)),
        ],
        middleware=[
            Middleware(Guard, counters=counters, local_only=local_only),
            Middleware(ProgramRequests, episodes=programs),
            Middleware(GZipMiddleware, minimum_size=2000, compresslevel=5),
        ],
        exception_handlers=handlers,
    )
    app.state.gateway = gateway
    return app


class _Brokers:
    """The visitors' connections, for the endpoints of OpenAI."""

    async def broker(self, request: Request) -> Broker:
        """Return the connection of who asks; a missing key is told as HTTP tells it."""
        try:
            return (await visitor_of(request)).broker
        except LogInError as error:
            raise HTTPException(401, f"{error.message}: {error.hint}") from error


class _Number(Convertor[int]):
    """Numbers in paths: one of thousands of digits is none of ours, and no page."""

    regex = "[0-9]{1,15}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("int", _Number())


class _Static(StaticFiles):
    """Files that a browser keeps: their addresses change with their contents."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        reply = await super().get_response(path, scope)
        reply.headers["cache-control"] = "public, max-age=31536000, immutable"
        return reply


async def healthz(request: Request) -> Response:
    """Answer 200 while the broker answers, else 503."""
    sessions = gateway_of(request).sessions
    try:
        info = await server_info(sessions.url)
    except BrokerError as error:
        return Json({"status": "no broker", **error_fields(error)}, status_code=503)
    return Json({"status": "ok", "broker": info.get("version"), "with_keys": sessions.with_keys})


async def openapi_document(_: Request) -> Response:
    """Answer with the OpenAPI document."""
    return Json(description(VERSION))


async def metrics(request: Request) -> Response:
    """Answer with what Prometheus collects; see `counters`."""
    gateway = gateway_of(request)
    gateway.counters.sessions.set(gateway.sessions.num_sessions)
    gateway.counters.connections.set(gateway.sessions.num_visitors)
    text = gateway.counters.text()
    try:
        text += await _pool_text(gateway, await visitor_of(request))
    except LogInError:
        if "authorization" in request.headers:
            raise
    except TinkermqError as error:
        _log.warning("metrics_without_pool", error=error.message)
    return Response(text, headers={"content-type": _METRICS_TYPE})


async def _pool_text(gateway: Gateway, visitor: Visitor) -> bytes:
    scheduler = Scheduler(visitor)
    records, nodes = await asyncio.gather(scheduler.list_jobs(), scheduler.nodes())
    live = [one for one in records if one.state not in FINAL_STATES][:_MAX_LIVE_JOBS]
    rows = await gateway.figures.rows(visitor.broker, live)
    places = (visitor.user, "pool") if gateway.sessions.with_keys else ("",)
    actors: list[Entry[Presence]] = []
    with contextlib.suppress(TinkermqError):
        for place in places:
            actors += await list_presences(visitor.broker, place)
    counts = select(records, Query(limit=0)).counts
    return pool_text(counts, rows, nodes, [(entry.key, entry.value) for entry in actors])


def _wants_json(request: Request) -> bool:
    path = request.url.path
    return path.startswith("/api/v1") or path in ("/metrics", "/healthz")


async def _our_error(request: Request, error: TinkermqError) -> Response:
    told = await why_it_failed(request, error)
    return _told(request, told, told.status)


def _told(request: Request, error: TinkermqError, status: int) -> Response:
    """Answer with an error as who asks reads it."""
    again = {"retry-after": "1"} if status == _TOO_MANY else None
    if (path := request.url.path).startswith(("/v1/", f"{openai.OF_TINKER}/")):
        told = openai.worded(error, status, openai.api_of(path))
        return Json(told, status_code=status, headers=again)
    if _wants_json(request):
        return Json(error_fields(error), status_code=status, headers=again)
    if isinstance(error, LogInError) and request.method == "GET":
        place = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(place, safe='')}", status_code=303)
    return pages.error_page(request, error, status)


async def _http_error(request: Request, error: HTTPException) -> Response:
    said = NotFoundError(
        f"there is no page {request.url.path}" if error.status_code == 404 else error.detail,
        hint="" if error.status_code != 404 else "begin at /jobs",
    )
    return _told(request, said, error.status_code)


async def _late(request: Request, error: TimeoutError) -> Response:
    if isinstance(error, TinkermqError):
        return await _our_error(request, error)
    return await _our_error(
        request, BrokerError("the broker did not answer in time", hint="see `tinkermq doctor`")
    )


async def _crash(request: Request, error: Exception) -> Response:
    _log.error("request_failed", path=request.url.path, exc_info=error)
    said = InternalError(
        f"the gateway failed at {request.url.path}: {type(error).__name__}",
        hint="its log has the details",
    )
    return await _our_error(request, said)
