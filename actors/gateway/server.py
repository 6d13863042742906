"""The life of a gateway: connect, serve HTTP, drain at a signal."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, cast

import structlog
import uvicorn

from ...broker.client.connection import connect
from ...broker.client.faults import check_url
from ...broker.client.login import Login, take_login
from ...broker.client.rpc import Service
from ...broker.jetstream.streams import create_shared, wait_for_shared
from ...broker.presence import PresenceBeat
from ...broker.service_process import told_to_systemd
from ...envs.http_server import MAX_HEAD_BYTES, ConnectionBounds
from ...schemas.metric import Presence
from ...schemas.wire.errors import BrokerError, ConfigError, StorageError
from ...schemas.wire.subjects import SERVICES
from ..runtime import settle_memory
from .app import make_app
from .guard import LOOPBACK
from .limits import MAX_CONNECTIONS, MAX_OF_HOLDER, NUM_RESERVED, gateway_connections
from .pages.render import compile_templates
from .sessions import Sessions, asks_for_keys
from .web import Gateway

DRAIN_S = 5
_RETRY_S = 0.5
_OPEN_FILES = 4 * MAX_CONNECTIONS
"""Files: one for each connection, and those towards the broker."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class Options:
    """Where to listen, and whom to serve."""

    nats: str
    host: str = "127.0.0.1"
    port: int = 8780
    name: str = "gateway"
    certificate: str | None = None
    """PEM files of certificate and key: HTTPS."""
    certificate_key: str | None = None
    behind_tls: bool = False
    """A proxy in front speaks TLS with the browsers."""
    patience_s: float = 30.0
    """How long the broker is waited for at the start."""


async def run(options: Options) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ConfigError for an address that must not be listened on and for a certificate that
    cannot be used, StorageError for an address in use, BrokerError when no broker answers.
    """
    login = take_login()  # what visitors do is done with their own keys, never with this one
    check_url(options.nats)
    _check_certificate(options)
    with_keys = await _until_broker(options.nats, options.patience_s)
    if not with_keys and options.host not in LOOPBACK:
        raise ConfigError(
            f"the broker asks for no keys, so the gateway does not listen on {options.host}: "
            "whoever reaches it could do everything",
            hint="listen on 127.0.0.1 (and use an SSH tunnel), or switch on the broker's "
            "authentication",
        )
    sessions = Sessions(options.nats, with_keys=with_keys)
    secure = options.certificate is not None or options.behind_tls
    app = make_app(sessions, local_only=not with_keys, secure=secure)
    gateway: Gateway = app.state.gateway
    of_address = MAX_CONNECTIONS if options.behind_tls else MAX_OF_HOLDER  # the proxy's is one
    bounds = ConnectionBounds(MAX_CONNECTIONS, of_address, MAX_OF_HOLDER, NUM_RESERVED)
    connections = gateway_connections(bounds)
    with _listen(options.host, options.port) as listener:
        server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                http=cast("Any", connections.protocol),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_graceful_shutdown=DRAIN_S,
                ssl_certfile=options.certificate,
                ssl_keyfile=options.certificate_key,
            )
        )
        settle_memory()
        _settle_open_files()
        compiling = asyncio.create_task(
            asyncio.to_thread(compile_templates, gateway.templates), name="compile templates"
        )
        sweeping = asyncio.create_task(sessions.sweep(), name="close idle connections")
        sweeping_programs = asyncio.create_task(gateway.programs.sweep(), name="idle programs")
        watching = asyncio.create_task(connections.watch(), name="close slow visitors")
        async with _announced(options, gateway, login):
            _stop_on_signal(server, gateway)
            scheme = "https" if options.certificate else "http"
            address = f"{scheme}://{options.host}:{listener.getsockname()[1]}"
            _log.info("gateway_listens", url=address, with_keys=with_keys)
            await server.serve(sockets=[listener])
        await compiling
        sweeping.cancel()
        sweeping_programs.cancel()
        watching.cancel()
        await gateway.histories.close()
        await gateway.programs.close()
        await sessions.close()


class _Server(uvicorn.Server):
    """uvicorn, with its signals left to this module."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _stop_on_signal(server: uvicorn.Server, gateway: Gateway) -> None:
    """Drain at the first signal; a second one ends at once."""

    def stop() -> None:
        if gateway.stopping.is_set():
            sys.stderr.flush()
            os._exit(1)
        _log.info("actor_draining")
        gateway.stopping.set()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


async def _until_broker(url: str, patience_s: float) -> bool:
    """Wait for the broker; return whether it asks for keys."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return await asks_for_keys(url)
        except BrokerError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_RETRY_S)


def _settle_open_files() -> None:
    """Let the process open a file for each connection, as far as the system lets it."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if wanted < _OPEN_FILES:
        _log.warning("open_files_limited", limit=wanted, wanted=_OPEN_FILES)


def _check_certificate(options: Options) -> None:
    certificate, key = options.certificate, options.certificate_key
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise ConfigError(
            "--certificate and --certificate-key belong together", hint="give both, or neither"
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigError(
            f"the certificate {certificate} cannot be used: {error}",
            hint="give the PEM files of a certificate and of its key, readable by this user",
        ) from error


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=256
        )
    except OSError as error:
        raise StorageError(
            f"the gateway cannot listen on {host}:{port}: {error.strerror}",
            hint="choose another port: --port N (0 takes a free one)",
        ) from error
    with listener:
        yield listener


@contextlib.asynccontextmanager
async def _announced(options: Options, gateway: Gateway, login: Login) -> AsyncIterator[None]:
    """Be an actor like others: a micro service with a heartbeat, watched by systemd.

    Where the broker asks for keys that needs the gateway's own credentials; beside that they are
    good for fetching a file for which a trainer has signed a ticket.
    """
    sessions = gateway.sessions
    if sessions.with_keys and login.user not in SERVICES:
        async with told_to_systemd():
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
        async with service, beat, told_to_systemd():
            yield


def _presence(options: Options, sessions: Sessions) -> Presence:
    return Presence(
        actor=options.name,
        role="gateway",
        host=socket.gethostname(),
        pid=os.getpid(),
        state="working",
        numbers={"visitors": float(sessions.num_visitors)},
        time=time.time(),
    )
