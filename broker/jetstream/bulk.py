"""A second connection for bulk data, blocking, to be used in a thread.

On the actor's own connection 500 MB would stand in the way of heartbeats and leases, and every
byte would be copied five times on the event loop. Here the kernel copies straight between socket
and the caller's memory, while the loop goes on. The connection lives for one transfer and uses the
credentials of the broker that it belongs to; `close` from another thread ends a transfer.
"""

import contextlib
import json
import socket
import ssl
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from ...schemas.wire.errors import BrokerError, LogInRefusedError
from ..client import faults
from ..client.connection import Broker, ConnectionLost
from ..client.nats_internals import connect_command, parse_headers

_TIMEOUT_S = 10.0
_BUFFER_BYTES = 1 << 16
_SID = 1
_AWAY = "the auth service of the pool may be away: see `tinkermq doctor`"


@dataclass(frozen=True, slots=True)
class Incoming:
    """The head of a message whose payload is still in the socket."""

    headers: Mapping[str, str]
    status: str
    """Status code of a message from the server itself, else empty."""
    num_bytes: int
    """Size of the payload."""


class BulkLink:
    """A blocking connection to the server that `broker` is connected to."""

    def __init__(self, broker: Broker) -> None:
        """Prepare; `open` connects."""
        self._broker = broker
        self._socket: socket.socket | None = None
        self._closed = False
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self.inbox = f"{broker.inbox_prefix}.bulk-{uuid.uuid4().hex}"

    def open(self) -> None:
        """Connect, log in, and listen on the inbox.

        Raises ConnectionLost, or BrokerError when the server refuses; that counts as lost where the
        connection itself would outlast it, for who checks keys may be away.
        """
        try:
            self._open()
        except LogInRefusedError as error:
            if not self._broker.availability.outlasts_refusal:
                raise
            raise ConnectionLost(
                "a bulk connection is refused while this one stands", hint=_AWAY
            ) from error

    def _open(self) -> None:
        with _as_lost():
            url = self._broker.nc.connected_url
            if url is None or url.hostname is None:
                raise ConnectionLost("not connected", hint="try again")
            self._socket = socket.create_connection((url.hostname, url.port or 4222), _TIMEOUT_S)
            # else each window that is asked for waits some 40 ms for a delayed acknowledgement
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._closed:
                self.close()
            info = json.loads(self._line().split(b" ", 1)[1])
            if url.scheme == "tls" and not info.get("tls_required"):
                raise BrokerError("the server does not encrypt, as its tls:// URL demands")
            if info.get("tls_required"):
                context: ssl.SSLContext = self._broker.nc.ssl_context
                self._socket = context.wrap_socket(self._socket, server_hostname=url.hostname)
            self._send(connect_command(self._broker.nc, info))
            self._send(b"SUB %s.* %d\r\nPING\r\n" % (self.inbox.encode(), _SID))
            while self._line() != b"PONG":
                pass

    def close(self) -> None:
        """Close at once, whatever the thread that uses it is doing."""
        self._closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # not connected any more
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def publish(self, subject: str, payload: "bytes | memoryview", reply: str) -> None:
        """Send one message; `payload` is not copied."""
        with _as_lost():
            self._send(b"PUB %s %s %d\r\n" % (subject.encode(), reply.encode(), len(payload)))
            self._send(payload)
            self._send(b"\r\n")

    def next(self) -> Incoming:
        """Wait for the next message; its payload is taken by `read` or `read_into`."""
        with _as_lost():
            while True:
                words = self._line().split(b" ")
                if words[0] == b"HMSG":
                    head_bytes, total_bytes = int(words[-2]), int(words[-1])
                    status, headers = parse_headers(self._take(head_bytes))
                    return Incoming(headers, status, total_bytes - head_bytes)
                if words[0] == b"MSG":
                    return Incoming({}, "", int(words[-1]))

    def read(self, num_bytes: int) -> bytes:
        """Take the payload."""
        payload = bytearray(num_bytes)
        self.read_into(memoryview(payload))
        return bytes(payload)

    def read_into(self, target: memoryview) -> None:
        """Take the payload into memory of its size."""
        with _as_lost():
            here = min(self._end - self._start, len(target))
            target[:here] = self._view[self._start : self._start + here]
            self._start += here
            while here < len(target):
                here += self._receive_into(target[here:])
            self._take(2)  # the line end behind a payload

    def _line(self) -> bytes:
        """Return the next control line, answering the server's pings on the way."""
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._end)
            if end < 0:
                self._fill()
                continue
            line = bytes(self._view[self._start : end])
            self._start = end + 2
            if line.startswith(b"-ERR"):
                raise self._refused(line.decode())
            if line != b"PING":
                return line
            self._send(b"PONG\r\n")

    def _take(self, num_bytes: int) -> bytes:
        while self._end - self._start < num_bytes:
            self._fill()
        taken = bytes(self._view[self._start : self._start + num_bytes])
        self._start += num_bytes
        return taken

    def _fill(self) -> None:
        """Receive more into the buffer, behind what is not taken yet."""
        rest = self._end - self._start
        if self._start:
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        if rest == len(self._buffer):
            raise BrokerError("the server sent a line of 64 KiB", hint="is this a NATS server?")
        self._end += self._receive_into(self._view[rest:])

    def _receive_into(self, target: memoryview) -> int:
        assert self._socket is not None
        received = self._socket.recv_into(target)
        if received == 0:
            raise ConnectionLost("the server closed a bulk connection", hint="try again")
        return received

    def _send(self, data: "bytes | memoryview") -> None:
        assert self._socket is not None
        self._socket.sendall(data)

    def _refused(self, line: str) -> BrokerError:
        error = BrokerError(line)
        if denied := faults.denied_subject(error):
            return faults.denied(self._broker.user, *denied)
        return faults.refused(self._broker.url, self._broker.user, error)


def _as_lost() -> "_AsLost":
    return _AsLost()


class _AsLost:
    """Turns errors of the socket, timeouts included, into ConnectionLost."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise ConnectionLost(f"a bulk connection broke: {error}", hint="try again") from error
