"""Run the gateway: build the application, connect, serve HTTP, drain at a signal."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import structlog
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from ...broker.client.connection import Broker, connect
from ...broker.client.faults import check_url
from ...broker.client.login import Login, take_login
from ...broker.client.rpc import Service
from ...broker.client.server_info import read_server_info
from ...broker.jetstream.kv import Entry
from ...broker.jetstream.streams import create_shared, wait_for_shared
from ...broker.presence import PresenceBeat, list_presences
from ...schemas.http_server import HttpServer, listening_socket
from ...schemas.job import FINAL_STATES
from ...schemas.local.process import notifying_systemd
from ...schemas.metric import Presence
from ...schemas.version import VERSION
from ...schemas.wire import errors
from ...schemas.wire.subjects import SERVICES
from ..runtime import settle_memory
from . import limits, openai, rest, user_episodes
from .data.jobs import Query, select
from .guard import LOOPBACK, Guard
from .operations import Scheduler
from .pages import routes as pages
from .pages.render import STATIC, compile_templates, make_templates
from .programs import ProgramEpisodes, ProgramRequests
from .rest import description
from .sessions import LogInError, Sessions, Visitor, asks_for_keys
from .tinker import routes as tinker
from .web import Gateway, Json, error_fields, gateway_of, visitor_of, why_it_failed

# -- the application -------------------------------------------------------------------------------

_MAX_LIVE_JOBS = 500
_TOO_MANY = 429
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_log = structlog.get_logger()


def make_app(sessions: Sessions, *, local_only: bool, secure: bool = False) -> Starlette:
    """Return the application for the visitors of `sessions`.

    `local_only`: answer only under names of this machine. `secure`: cookies are for TLS only.
    """
    counters = limits.Counters()
    programs = ProgramEpisodes(sessions.url, with_keys=sessions.with_keys)
    gateway = Gateway(sessions, make_templates(), programs, counters, secure=secure)
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        errors.TinkermqError: _our_error,
        HTTPException: _http_error,
        TimeoutError: _late,
        Exception: _crash,
    }
    app = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/health", healthz),
            Route("/metrics", metrics),
            Route("/api/openapi.json", openapi_document),
            *rest.routes(),
            *openai.routes(_broker_of, gateway.trainers),
            *user_episodes.routes(_broker_of, lambda request: gateway_of(request).programs),
            *tinker.routes(gateway.trainers),
            *rest.user_routes(),
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


async def _broker_of(request: Request) -> Broker:
    """Return the visitor's connection, for the model APIs; status 401 without a key."""
    try:
        return (await visitor_of(request)).broker
    except LogInError as error:
        raise HTTPException(401, f"{error.message}: {error.hint}") from error


class _Number(IntegerConvertor):
    """Numbers in paths, of up to 15 digits."""

    regex = "[0-9]{1,15}"


register_url_convertor("int", _Number())


class _Static(StaticFiles):
    """Files that a browser caches: their URLs change with their contents."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        reply = await super().get_response(path, scope)
        reply.headers["cache-control"] = "public, max-age=31536000, immutable"
        return reply


async def healthz(request: Request) -> Response:
    """Answer 200 while the broker answers, else 503."""
    sessions = gateway_of(request).sessions
    try:
        info = await read_server_info(sessions.url)
    except errors.BrokerError as error:
        return Json({"status": "no broker", **error_fields(error)}, status_code=503)
    return Json({"status": "ok", "broker": info.get("version"), "with_keys": sessions.with_keys})


async def openapi_document(_: Request) -> Response:
    """Answer with the OpenAPI document."""
    return Json(description(VERSION))


async def metrics(request: Request) -> Response:
    """Answer with the figures for Prometheus; see `limits`."""
    gateway = gateway_of(request)
    gateway.counters.sessions.set(gateway.sessions.num_sessions)
    gateway.counters.connections.set(gateway.sessions.num_visitors)
    text = gateway.counters.text()
    try:
        text += await _pool_text(gateway, await visitor_of(request))
    except LogInError:
        if "authorization" in request.headers:
            raise
    except errors.TinkermqError as error:
        _log.warning("metrics_without_pool", error=error.message)
    return Response(text, headers={"content-type": _METRICS_TYPE})


async def _pool_text(gateway: Gateway, visitor: Visitor) -> bytes:
    scheduler = Scheduler(visitor)
    records, nodes = await asyncio.gather(scheduler.list_jobs(), scheduler.nodes())
    live = [record for record in records if record.state not in FINAL_STATES][:_MAX_LIVE_JOBS]
    rows = await gateway.figures.rows(visitor.broker, live)
    places = (visitor.user, "pool") if gateway.sessions.with_keys else ("",)
    actors: list[Entry[Presence]] = []
    with contextlib.suppress(errors.TinkermqError):
        for place in places:
            actors += await list_presences(visitor.broker, place)
    counts = select(records, Query(limit=0)).counts
    return limits.pool_text(counts, rows, nodes, [(entry.key, entry.value) for entry in actors])


def _wants_json(request: Request) -> bool:
    path = request.url.path
    return path.startswith("/api/v1") or path in ("/metrics", "/healthz", "/health")


async def _our_error(request: Request, error: errors.TinkermqError) -> Response:
    reply = await why_it_failed(request, error)
    return _error_response(request, reply, reply.status)


def _error_response(
    request: Request,
    error: errors.TinkermqError,
    status: int,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Answer with an error in the form of the visitor's API."""
    again = {**({"retry-after": "1"} if status == _TOO_MANY else {}), **(headers or {})}
    if openai.is_of_api(path := request.url.path):
        fields = openai.worded(error, status, openai.api_of(path))
        return Json(fields, status_code=status, headers=again)
    if _wants_json(request):
        return Json(error_fields(error), status_code=status, headers=again)
    if isinstance(error, LogInError) and request.method == "GET":
        place = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"/login?next={quote(place, safe='')}", status_code=303)
    return pages.error_page(request, error, status)


async def _http_error(request: Request, error: HTTPException) -> Response:
    path, status = request.url.path, error.status_code
    if openai.is_of_api(path) and status in (404, 405):
        message = openai.no_endpoint(request.method, path, status)
    else:
        what = f"page {path} does not exist" if status == 404 else error.detail
        if status == 405:
            what = f"{request.method} is not answered at {path}"
        hint = {404: "start at /jobs; operations for programs: /api", 405: "see /api"}
        message = errors.NotFoundError(what, hint=hint.get(status, ""))
    return _error_response(request, message, status, error.headers)


async def _late(request: Request, error: TimeoutError) -> Response:
    if isinstance(error, errors.TinkermqError):
        return await _our_error(request, error)
    return await _our_error(
        request,
        errors.BrokerError("the broker did not answer in time", hint="see `tinkermq doctor`"),
    )


async def _crash(request: Request, error: Exception) -> Response:
    _log.error("request_failed", path=request.url.path, exc_info=error)
    message = errors.InternalError(
        f"the gateway failed at {request.url.path}: {type(error).__name__}",
        hint="its log has the details",
    )
    return await _our_error(request, message)


DRAIN_S = 5
_RETRY_S = 0.5
_OPEN_FILES = 8 * limits.MAX_REQUESTS
"""Open files: one for each connection, idle ones included, and those to the broker."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    nats: str
    host: str = "127.0.0.1"
    port: int = 8780
    name: str = "gateway"
    certificate: str | None = None
    """PEM file of a certificate: serve HTTPS."""
    certificate_key: str | None = None
    behind_tls: bool = False
    """A reverse proxy in front terminates TLS."""
    patience_s: float = 30.0
    """How long to wait for the broker at the start."""


async def run(options: Options) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ConfigError for a forbidden address and for a certificate that cannot be used,
    StorageError for an address in use, BrokerError when no broker answers.
    """
    login = take_login()  # visitors use their own keys, never the gateway's
    check_url(options.nats)
    _check_certificate(options)
    with_keys = await _until_broker(options.nats, options.patience_s)
    if not with_keys and options.host not in LOOPBACK:
        raise errors.ConfigError(
            f"the broker requires no keys, so the gateway does not listen on {options.host}: "
            "every visitor would have full access",
            hint="listen on 127.0.0.1 (and use an SSH tunnel), or switch on the broker's "
            "authentication",
        )
    sessions = Sessions(options.nats, with_keys=with_keys)
    secure = options.certificate is not None or options.behind_tls
    app = make_app(sessions, local_only=not with_keys, secure=secure)
    gateway: Gateway = app.state.gateway
    max_running = limits.MAX_REQUESTS if with_keys else limits.MAX_LOCAL_REQUESTS
    server = HttpServer(
        "gateway",
        app,
        limits.http_bounds(max_running),
        ssl_certfile=options.certificate,
        ssl_keyfile=options.certificate_key,
    )
    with listening_socket(options.host, options.port) as listener:
        settle_memory()
        _settle_open_files()
        compiling = asyncio.create_task(
            asyncio.to_thread(compile_templates, gateway.templates), name="compile templates"
        )
        sweeping = asyncio.create_task(sessions.sweep(), name="close idle connections")
        sweeping_programs = asyncio.create_task(gateway.programs.sweep(), name="idle programs")
        async with _announced(options, gateway, login):
            _stop_on_signal(gateway)
            await server.listen(listener)
            scheme = "https" if options.certificate else "http"
            address = f"{scheme}://{options.host}:{listener.getsockname()[1]}"
            _log.info("gateway_listens", url=address, with_keys=with_keys)
            await gateway.stopping.wait()
            await server.stop(DRAIN_S)
        await compiling
        sweeping.cancel()
        sweeping_programs.cancel()
        await gateway.histories.close()
        await gateway.programs.close()
        await sessions.close()


def _stop_on_signal(gateway: Gateway) -> None:
    """Drain at the first signal; a second one ends at once."""

    def stop() -> None:
        if gateway.stopping.is_set():
            sys.stderr.flush()
            os._exit(1)
        _log.info("actor_draining")
        gateway.stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


async def _until_broker(url: str, patience_s: float) -> bool:
    """Wait for the broker; return whether it requires keys."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return await asks_for_keys(url)
        except errors.BrokerError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_RETRY_S)


def _settle_open_files() -> None:
    """Raise the limit on open files as far as the system allows."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, most))
    if num_files < _OPEN_FILES:
        _log.warning("open_files_limited", limit=num_files, wanted=_OPEN_FILES)


def _check_certificate(options: Options) -> None:
    certificate, key = options.certificate, options.certificate_key
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise errors.ConfigError(
            "--certificate and --certificate-key must be used together",
            hint="give both, or neither",
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        raise errors.ConfigError(
            f"the certificate {certificate} cannot be used: {error}",
            hint="give the PEM files of a certificate and of its key, readable by this user",
        ) from error


@contextlib.asynccontextmanager
async def _announced(options: Options, gateway: Gateway, login: Login) -> AsyncIterator[None]:
    """Run a micro service with a heartbeat, as every actor does, watched by systemd.

    If the broker requires keys, this needs the gateway's own credentials, which are also used to
    fetch files for which a trainer has signed a ticket.
    """
    sessions = gateway.sessions
    if sessions.with_keys and login.user not in SERVICES:
        async with notifying_systemd():
            yield
        return
    async with await connect(options.nats, name=options.name, login=login) as broker:
        broker.availability.set_patient(True)
        broker.availability.outlasts_refusal = True
        gateway.own = broker
        if sessions.with_keys:
            await wait_for_shared(broker, options.patience_s)
        else:
            await create_shared(broker)
        service = await Service.start(
            broker, name="tinkermq-gateway", description=f"tinkermq gateway {options.name}"
        )
        beat = PresenceBeat(broker, f"pool.{options.name}", lambda: _presence(options, sessions))
        async with service, beat, notifying_systemd():
            yield


def _presence(options: Options, sessions: Sessions) -> Presence:
    return Presence(
        actor=options.name,
        role="gateway",
        host=socket.gethostname(),
        pid=os.getpid(),
        release=VERSION,
        state="working",
        numbers={"visitors": float(sessions.num_visitors)},
        time=time.time(),
    )
