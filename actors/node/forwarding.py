"""The only connection out of a sandbox without a network: to the broker's servers.

A learner that runs functions of its job's owner has its own network namespace. The sandbox's
launcher listens on the loopback address there and passes the sockets out (`Sandbox.listens`); the
node accepts on them and forwards messages to and from the servers in its own URL.

The node logs in for the learner, whose key never enters the sandbox, encrypts, and checks reply
subjects: NATS checks no rights on the reply subject of a request. A client that can have a stored
message sent to any subject can write anything anywhere, for example make itself an admin.
"""

import asyncio
import contextlib
import json
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import structlog

from ...broker.client.fair_queue import end_tasks
from ...broker.client.faults import server_urls, shown_url
from ...broker.client.keys import read_job_key
from ...broker.client.login import KEY_VARIABLE, tls_options
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import AuthError, TinkermqError

URL_VARIABLE = "TINKERMQ_NATS_URL"
MAX_CONNECTIONS = 32
"""Connections of one learner at a time: a permanent one, and one for each transfer of weights."""
_CHUNK_BYTES = 1 << 18
_CONNECT_S = 5.0
_PORT = 4222
_MAX_LINE = 4096
"""Longest line of a client, as nats-server bounds it."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True)
class ForwardRoute:
    """How to reach one server from within the sandbox."""

    listen: str
    """`host:port` of the sandbox's loopback interface."""
    url: str
    """URL of the server from the node."""
    host: str
    port: int


class Forwarder:
    """Forwards the messages of one learner to the broker and back."""

    def __init__(self, url: str, key: str = "") -> None:
        """Prepare for the servers of a URL and log in with a job key; `serve` begins."""
        self._key = key
        self._tls: ssl.SSLContext | None = tls_options(url).get("tls") if url else None
        servers = server_urls(url) if url else []
        self.ways = [_route(server, number) for number, server in enumerate(servers, 1)]
        self._task: asyncio.Task[None] | None = None
        self._servers: list[asyncio.Server] = []
        self._open = set[asyncio.Task[None]]()

    @property
    def listens(self) -> Sequence[str]:
        """Addresses to listen on in the sandbox, as `host:port`; pass the sockets to `serve`."""
        return [way.listen for way in self.ways]

    def environment(self) -> Mapping[str, str]:
        """Return variables that extend or replace the learner's environment.

        Its key there only names it, and permits nothing.
        """
        url = {URL_VARIABLE: ",".join(f"nats://{way.listen}" for way in self.ways)}
        key = {KEY_VARIABLE: f"{self._key.rpartition('.')[0]}.held-by-its-node"}
        return {
            **(url if self.ways else {}),
            **(key if self._key else {}),
            "HF_HUB_OFFLINE": "1",  # the hub's cache is there, but no hub
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def serve(self, listening: Sequence[socket.socket]) -> None:
        """Accept on the sandbox's sockets, in the order of `listens`."""
        self._task = asyncio.create_task(self._serve(listening))

    async def close(self) -> None:
        """End every connection."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for server in self._servers:
            server.close()
        await end_tasks(self._open)

    async def _serve(self, listening: Sequence[socket.socket]) -> None:
        for way, listener in zip(self.ways, listening, strict=True):
            self._servers.append(
                await asyncio.start_server(
                    lambda reader, writer, way=way: self._accepted(way, reader, writer),
                    sock=listener,
                    limit=_CHUNK_BYTES,
                )
            )

    def _accepted(
        self, way: ForwardRoute, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._carried(way, reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _carried(
        self, way: ForwardRoute, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward the messages of one connection until either side ends it."""
        out: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_CONNECT_S):
                back, out = await asyncio.open_connection(way.host, way.port, limit=_CHUNK_BYTES)
                writer.write(await self._greeting(way, back, out))
            both = [
                asyncio.create_task(_carry(reader, out, ClientMessages(self._key))),
                asyncio.create_task(_carry(back, writer)),
            ]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for entry in both:
                    entry.cancel()
                await asyncio.wait(both)
        except (
            OSError,
            EOFError,
            ValueError,
            TinkermqError,
        ) as error:
            _log.warning(
                "broker_not_reached_for_learner", server=shown_url(way.url), error=str(error)
            )
        finally:
            for item in (writer, out):
                if item is not None:
                    await _ended(item)

    async def _greeting(
        self, way: ForwardRoute, back: asyncio.StreamReader, out: asyncio.StreamWriter
    ) -> bytes:
        """Return the server's greeting, without its demand for TLS.

        This connection encrypts where the server or the URL demands it, as other clients do.
        """
        info = read_json((await back.readuntil(b"\n")).partition(b" ")[2])
        if info.pop("tls_required", False):
            tls = self._tls or ssl.create_default_context()
            await out.start_tls(tls, server_hostname=way.host)
        elif way.url.startswith("tls://"):
            raise OSError("the server does not encrypt, as its tls:// URL demands")
        info.pop("tls_available", None)
        return b"INFO " + json.dumps(info).encode() + b"\r\n"


async def _carry(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    checked: "ClientMessages | None" = None,
) -> None:
    """Forward one direction; a slow reader makes the other side wait."""
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(checked.pass_on(data) if checked else data)
            await writer.drain()
            await asyncio.sleep(0)  # a flood of small messages must not block the node
    except OSError:
        pass
    except (TinkermqError, TypeError, ValueError) as error:
        _log.warning("learner_refused", error=str(error))


class ClientMessages:
    """Parses the bytes of a NATS client and returns the bytes for the server.

    Only parsed messages are passed on, and they are written anew, so the server parses the same.
    Pure.
    """

    def __init__(self, key: str) -> None:
        """Log in with a job key; answers go only to the inboxes of its actor."""
        identity = read_job_key(key)
        self._login = {"user": "job", "pass": key} if key else {}
        self._inbox = f"{identity.scope.inbox(identity.actor)}.".encode() if identity else None
        self._line = b""
        self._left = 0
        """Remaining bytes of a payload and its line end."""

    def pass_on(self, data: bytes) -> bytes:
        """Return the bytes for the server; raises AuthError for messages that are not permitted."""
        out, at = bytearray(), 0
        while at < len(data):
            if self._left:
                end = min(at + self._left, len(data))
                out += data[at:end]
                self._left -= end - at
            else:
                end = data.find(b"\n", at) + 1 or len(data)
                self._line += data[at:end]
                if len(self._line) > _MAX_LINE:
                    raise AuthError(f"a line of more than {_MAX_LINE} bytes")
                if self._line.endswith(b"\n"):
                    out += self._read(self._line)
                    self._line = b""
            at = end
        return bytes(out)

    def _read(self, line: bytes) -> bytes:
        """Return the bytes for the server for one line."""
        verb, *words = line.split() or [b""]
        verb = verb.upper()
        num_sizes = {b"PUB": 1, b"HPUB": 2}.get(verb)
        if verb == b"CONNECT":
            fields: dict[str, object] = dict(read_json(line.strip()[len(verb) :]))
            options = {name: fields[name] for name in fields if name.casefold() not in _SECRETS}
            words = [json.dumps({**options, **self._login}).encode()]
        elif num_sizes is not None:
            replies = words[1:-num_sizes]
            if len(words) <= num_sizes or len(replies) > 1 or not _SIZE.fullmatch(words[-1]):
                raise AuthError(f"a message that cannot be read: {line[:100]!r}")
            if replies and (self._inbox is None or not replies[0].startswith(self._inbox)):
                raise AuthError(f"an answer to {replies[0].decode(errors='replace')}")
            self._left = int(words[-1]) + len(b"\r\n")
        elif verb not in _VERBS:
            raise AuthError(f"what no client says: {line[:100]!r}")
        return b" ".join([verb, *words]) + b"\r\n"


# The server reads the names of fields without case, in Unicode's sense.
_SECRETS = frozenset({"user", "pass", "auth_token", "jwt", "nkey", "sig"})
_VERBS = frozenset({b"PING", b"PONG", b"SUB", b"UNSUB"})
_SIZE = re.compile(rb"[0-9]{1,9}")


async def _ended(writer: asyncio.StreamWriter) -> None:
    """Close a connection once the pending bytes are sent, unless the reader does not read."""
    writer.close()
    try:
        async with asyncio.timeout(_CONNECT_S):
            await writer.wait_closed()
    except OSError:
        writer.transport.abort()


def _route(url: str, number: int) -> ForwardRoute:
    """Return how a server is reached; each has a loopback address of its own."""
    server = urlsplit(url)
    listen = f"127.0.1.{number}:{_PORT}"
    return ForwardRoute(listen, url, server.hostname or "127.0.0.1", server.port or _PORT)
