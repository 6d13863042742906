"""The one way out of a sandbox without a network: to the servers of the broker.

A learner that runs functions of its job's owner has a network namespace of its own. What starts it
there listens on the loopback address and hands the sockets out (`Sandbox.listens`); the node
accepts on them and carries bytes to and from the servers that its own URL names. The learner finds
them under the names that the node has for them, so certificates are checked as ever: its /etc/hosts
gives those names the addresses of the sockets. A server
that the node has by address only is checked against that address.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import structlog

from ...broker.client.faults import server_urls, shown_url
from ...broker.client.login import CERTIFICATE_HOSTS_VARIABLE

URL_VARIABLE = "TINKERMQ_NATS_URL"
MAX_CONNECTIONS = 32
"""Of one learner, at a time; it has one that stands and one for each transfer of weights."""
_CHUNK_BYTES = 1 << 18
_CONNECT_S = 5.0
_LEAST_PORT, _PORT = 1024, 4222
"""Below the first, listening needs rights; there the second is taken."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True)
class ForwardRoute:
    """How one server is reached from within."""

    url: str
    """What the learner gets."""
    listen: str
    """`host:port` of the loopback interface within."""
    name: str | None
    """What /etc/hosts there leads to it; None for an address."""
    host: str
    """Of the server; its certificate is for this, whatever address is listened on."""
    port: int


class Forwarder:
    """Carries the bytes of one learner to the broker and back."""

    def __init__(self, url: str) -> None:
        """Prepare for the servers of a URL; `serve` begins."""
        servers = [urlsplit(item) for item in server_urls(url)] if url else []
        hosts = list(dict.fromkeys(server.hostname for server in servers))
        self.ways = [_route(server, 1 + hosts.index(server.hostname)) for server in servers]
        self._task: asyncio.Task[None] | None = None
        self._servers: list[asyncio.Server] = []
        self._open = set[asyncio.Task[None]]()

    @property
    def listens(self) -> Sequence[str]:
        """Where is to be listened within, `host:port` each; `serve` takes the sockets."""
        return [way.listen for way in self.ways]

    @property
    def hosts(self) -> str:
        """What stands in /etc/hosts within."""
        result = {way.name: way.listen.rpartition(":")[0] for way in self.ways if way.name}
        own = dict.fromkeys(("localhost", socket.gethostname().lower()), "127.0.0.1")
        return "".join(f"{address} {name}\n" for name, address in {**own, **result}.items())

    def environment(self) -> Mapping[str, str]:
        """Return what the learner is given beside, or in place of, what others are."""
        url = {URL_VARIABLE: ",".join(way.url for way in self.ways)} if self.ways else {}
        shown = {urlsplit(way.url).hostname: way.host for way in self.ways}
        moved = [f"{address}={host}" for address, host in shown.items() if address != host]
        return {
            **url,
            **({CERTIFICATE_HOSTS_VARIABLE: ",".join(moved)} if moved else {}),
            "HF_HUB_OFFLINE": "1",  # its cache is there, and no hub
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def serve(self, listening: Sequence[socket.socket]) -> None:
        """Accept on the sockets that listen within, in the order of `listens`."""
        self._task = asyncio.create_task(self._serve(listening))

    async def close(self) -> None:
        """End every connection."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for server in self._servers:
            server.close()
        for item in tuple(self._open):
            item.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _serve(self, listening: Sequence[socket.socket]) -> None:
        for way, one in zip(self.ways, listening, strict=True):
            self._servers.append(
                await asyncio.start_server(
                    lambda reader, writer, way=way: self._accepted(way, reader, writer),
                    sock=one,
                    limit=_CHUNK_BYTES,
                )
            )

    def _accepted(
        self, way: ForwardRoute, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(_carried(way, reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)


async def _carried(
    way: ForwardRoute, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Carry the bytes of one connection until either side ends it."""
    out: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_CONNECT_S):
            back, out = await asyncio.open_connection(way.host, way.port, limit=_CHUNK_BYTES)
        both = [asyncio.create_task(_carry(reader, out)), asyncio.create_task(_carry(back, writer))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for entry in both:
                entry.cancel()
            await asyncio.wait(both)
    except OSError as error:  # TimeoutError is one
        _log.warning("broker_not_reached_for_learner", server=shown_url(way.url), error=str(error))
    finally:
        for item in (writer, out):
            if item is not None:
                await _ended(item)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward one way; a slow reader makes the other side wait."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


async def _ended(writer: asyncio.StreamWriter) -> None:
    """Close a connection once what was written is sent, but do not wait for a reader that does not
    read."""
    writer.close()
    try:
        async with asyncio.timeout(_CONNECT_S):
            await writer.wait_closed()
    except OSError:
        writer.transport.abort()


def _route(server: SplitResult, number: int) -> ForwardRoute:
    """Return how a server is reached; each has a loopback address of its own where it may."""
    host, port = server.hostname or "127.0.0.1", server.port or 4222
    inner = port if port >= _LEAST_PORT else _PORT
    address = _address(host)
    if address is None:
        listen, shown = f"127.0.1.{number}", host
    elif address.is_loopback:
        listen = shown = host
    else:
        listen = shown = f"127.0.1.{number}"
    user, mark, _ = server.netloc.rpartition("@")
    bracketed = f"[{shown}]" if ":" in shown else shown
    url = server._replace(netloc=f"{user}{mark}{bracketed}:{inner}").geturl()
    name = host if address is None and host != "localhost" else None
    if host == "localhost":
        listen = "127.0.0.1"
    return ForwardRoute(url, f"{listen}:{inner}", name, host, port)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
