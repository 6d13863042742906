"""Large objects through NATS, in the layout of ADR-20, so that `nats object` lists and reads them.

The stock client waits for each chunk and collects into growing bytes. Here chunks are published in
a bounded pipeline directly from the caller's buffers, and read by batched direct gets into one
buffer of the caller, both in a thread with its own connection (`BulkLink`). Other threads compute
the digests: the BLAKE3 that is checked here, and the SHA-256 that the stock tools check. A put that
fails is restarted with new chunks, because the order of chunks in the stream is their order in the
object; a read continues at its position.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import socket
import ssl
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from blake3 import blake3

from ...schemas.local.process import finish
from ...schemas.wire.errors import (
    BrokerError,
    DeadlineError,
    LogInRefusedError,
    NotFoundError,
)
from ..client import faults, nats_internals
from ..client.connection import Broker
from ..client.faults import ConnectionLost, NoResponders, Refused
from ..client.replies import checked
from .direct_get import get_all, get_last
from .streams import num_messages, purge, stream_subjects

# The second connection, blocking, used in a thread for one transfer.
#
# On the actor's own connection 500 MB would delay heartbeats and leases, and every byte would be
# copied five times on the event loop. Here the kernel copies between the socket and the caller's
# memory. `stop` from another thread ends a transfer.

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

        Raises ConnectionLost, or BrokerError when the server refuses; raises ConnectionLost for a
        refusal that the broker's own connection would retry, since the auth service may be away.
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
        with _AsLost():
            url = self._broker.nc.connected_url
            if url is None or url.hostname is None:
                raise ConnectionLost("not connected", hint="try again")
            self._socket = socket.create_connection((url.hostname, url.port or 4222), _TIMEOUT_S)
            # else each requested window waits some 40 ms for a delayed acknowledgement
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._closed:
                self.stop()
            info = json.loads(self._line().split(b" ", 1)[1])
            if url.scheme == "tls" and not info.get("tls_required"):
                raise BrokerError("the server does not encrypt, as its tls:// URL demands")
            if info.get("tls_required"):
                context: ssl.SSLContext = self._broker.nc.ssl_context
                self._socket = context.wrap_socket(self._socket, server_hostname=url.hostname)
            self._send(nats_internals.connect_command(self._broker.nc, info))
            self._send(b"SUB %s.* %d\r\nPING\r\n" % (self.inbox.encode(), _SID))
            while self._line() != b"PONG":
                pass

    def stop(self) -> None:
        """Send nothing more, even while a thread uses the connection, which ends with an error."""
        self._closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # no longer connected
                self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close, once the server has read what was sent and closes, too."""
        self.stop()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                while self._socket.recv(_BUFFER_BYTES):
                    pass
            self._socket.close()

    def publish(self, subject: str, payload: "bytes | memoryview", reply: str) -> None:
        """Send one message; `payload` is not copied."""
        with _AsLost():
            self._send(b"PUB %s %s %d\r\n" % (subject.encode(), reply.encode(), len(payload)))
            self._send(payload)
            self._send(b"\r\n")

    def next(self) -> Incoming:
        """Wait for the next message; `read` or `read_into` must then read its payload."""
        with _AsLost():
            while True:
                words = self._line().split(b" ")
                if words[0] == b"HMSG":
                    head_bytes, total_bytes = int(words[-2]), int(words[-1])
                    status, headers = nats_internals.parse_headers(self._read_bytes(head_bytes))
                    return Incoming(headers, status, total_bytes - head_bytes)
                if words[0] == b"MSG":
                    return Incoming({}, "", int(words[-1]))

    def read(self, num_bytes: int) -> bytes:
        """Read the payload."""
        payload = bytearray(num_bytes)
        self.read_into(memoryview(payload))
        return bytes(payload)

    def read_into(self, target: memoryview) -> None:
        """Read the payload into memory of its size."""
        with _AsLost():
            here = min(self._end - self._start, len(target))
            target[:here] = self._view[self._start : self._start + here]
            self._start += here
            while here < len(target):
                here += self._receive_into(target[here:])
            self._read_bytes(2)  # the line end after a payload

    def _line(self) -> bytes:
        """Return the next control line; answer the server's pings before it."""
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

    def _read_bytes(self, num_bytes: int) -> bytes:
        while self._end - self._start < num_bytes:
            self._fill()
        data = bytes(self._view[self._start : self._start + num_bytes])
        self._start += num_bytes
        return data

    def _fill(self) -> None:
        """Receive more bytes into the buffer, behind the unread ones."""
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
        return faults.refused(self._broker.url, error)


class _AsLost:
    """Converts errors of the socket, timeouts included, to ConnectionLost."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise ConnectionLost(f"a bulk connection broke: {error}", hint="try again") from error


# Digests: BLAKE3, since SHA-256 is slower than sending on processors without instructions for it.


def new_digest() -> blake3:
    """Return a BLAKE3 for incremental updates, which uses all cores for large parts."""
    return blake3(max_threads=blake3.AUTO)


def digest_of(views: Sequence[memoryview]) -> str:
    """Return the BLAKE3 of all bytes in order, in hexadecimal."""
    digest = new_digest()
    for view in views:
        digest.update(view)
    return digest.hexdigest()


T = TypeVar("T")

CHUNK_BYTES = 1 << 20
PUT_WINDOW_BYTES = 16 * 2**20
GET_WINDOW_BYTES = 32 * 2**20
_API_DEADLINE_S = 60.0
_DIGEST = "blake3"
"""Key of the digest in an object's entry."""
_UNREADABLE = "stored without the SHA-256 by which `nats object get` checks"
_LAG_PAUSE_S = 0.05


class DigestMismatch(BrokerError):
    """The read bytes differ from the stored object."""


class BucketFullError(BrokerError):
    """An object does not fit into its bucket; none of it remains there."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The store's description of one object."""

    name: str
    nuid: str
    num_bytes: int
    num_chunks: int
    digest: str
    """BLAKE3, in hexadecimal."""


class ObjectStore:
    """One bucket of objects."""

    def __init__(
        self,
        broker: Broker,
        bucket: str,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        sha256: bool = True,
    ) -> None:
        """Name a bucket that `streams` has made.

        Without `sha256` the stock tools list stored objects but refuse to read them.
        """
        self._sha256 = sha256
        self._broker = broker
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._chunk_bytes = min(chunk_bytes, broker.max_payload_bytes)

    async def put(self, name: str, views: Sequence[memoryview], *, deadline_s: float) -> ObjectInfo:
        """Store the concatenation of `views`; it is stored when this returns.

        If this is cancelled, no chunk remains, or the object is complete; `views` are not used any
        more. Raises BrokerError when the bucket is full, DeadlineError, NotFoundError.
        """
        in_thread = partial(asyncio.get_running_loop().run_in_executor, None)
        digesting = in_thread(digest_of, views)
        sha256_hashing = in_thread(_sha256, views if self._sha256 else views[:0])
        attempts: list[str] = []

        async def attempt() -> tuple[int, int]:
            if attempts:  # the order of chunks is the object: restart, never continue in the middle
                await self._purge_chunks(attempts[-1])
            attempts.append(uuid.uuid4().hex)
            return await self._put_chunks(attempts[-1], views)

        try:
            try:
                num_bytes, num_chunks = await self._broker.retry(
                    attempt, deadline_s=deadline_s, waiting_for=f"object {name} to be stored"
                )
            finally:  # then no thread reads `views`
                await finish(asyncio.gather(digesting, sha256_hashing, return_exceptions=True))
        except (Refused, DeadlineError, asyncio.CancelledError) as error:
            if attempts:
                await finish(self._purge_chunks(attempts[-1]))
            if isinstance(error, Refused):
                raise self._refused(name, error) from error
            raise
        info = ObjectInfo(name, attempts[-1], num_bytes, num_chunks, digesting.result())
        await finish(self._put_info(info, sha256_hashing.result()))
        return info

    async def get_into(self, info: ObjectInfo, buffer: memoryview, *, deadline_s: float) -> None:
        """Read an object into `buffer`, which has exactly its size and is not used afterwards.

        Raises DigestMismatch, NotFoundError when it was deleted, DeadlineError.
        """
        assert len(buffer) == info.num_bytes
        asking = self._broker.direct_get(self._stream)
        lag_s = self._broker.replication.lag_s
        subject = self._chunk_subject(info.nuid)
        reading = _Reading(self._stream, asking, subject, buffer, lag_s)
        try:
            if info.num_bytes:
                await self._broker.retry(
                    lambda: self._with_link(reading.run),
                    deadline_s=deadline_s,
                    waiting_for=f"object {info.name} to be read",
                )
        finally:
            digest = await finish(asyncio.to_thread(reading.digest))
        if digest != info.digest:
            raise DigestMismatch(
                f"object {info.name} of bucket {self._bucket} has digest {digest}, stored was "
                f"{info.digest}",
                hint="publish it again",
            )

    async def info(self, name: str) -> ObjectInfo | None:
        """Return an object's description, or None if there is none."""
        message = await self._retry(
            lambda: get_last(self._broker, self._stream, self._info_subject(name))
        )
        return None if message is None else _read_info(message.payload)

    async def names(self) -> list[str]:
        """Return the names of all objects."""
        return sorted({info.name for info in await self.infos()})

    async def infos(self) -> list[ObjectInfo]:
        """Return the descriptions of all objects."""
        subject = f"$O.{self._bucket}.M.>"
        messages = await self._retry(lambda: get_all(self._broker, self._stream, subject))
        infos = (_read_info(message.payload) for message in messages)
        return [info for info in infos if info is not None]

    async def free_bytes(self) -> int:
        """Return how many more bytes the bucket can store, including the overhead of each chunk.

        Raises NotFoundError when the bucket is gone.
        """
        info = await self._retry(lambda: self._broker.api(f"STREAM.INFO.{self._stream}", None))
        bound = int(info["config"]["max_bytes"])
        return sys.maxsize if bound < 0 else max(bound - int(info["state"]["bytes"]), 0)

    async def delete(self, name: str) -> None:
        """Delete an object; harmless if it is gone."""
        info = await self.info(name)
        await purge(self._broker, self._stream, self._info_subject(name))
        if info is not None:
            await self._purge_chunks(info.nuid)

    async def sweep(self) -> None:
        """Remove chunks of no object, left by a killed writer; running puts have to restart."""
        messages = await self._retry(
            lambda: get_all(self._broker, self._stream, f"$O.{self._bucket}.M.>")
        )
        known = {_nuid_of(message.payload) for message in messages}
        chunks = self._chunk_subject("")
        for subject in await stream_subjects(self._broker, self._stream, f"{chunks}*"):
            if subject.removeprefix(chunks) not in known:
                await purge(self._broker, self._stream, subject)

    async def _put_chunks(self, nuid: str, views: Sequence[memoryview]) -> tuple[int, int]:
        """Publish all chunks with a bounded number unconfirmed; return the numbers of bytes and
        chunks.
        """
        chunks, subject = chunks_of(views, self._chunk_bytes), self._chunk_subject(nuid)
        window = max(2, PUT_WINDOW_BYTES // self._chunk_bytes)
        sent = await self._with_link(
            lambda link: _send(link, self._stream, subject, chunks, window)
        )
        if await num_messages(self._broker, self._stream, subject) != sent[1]:
            raise ConnectionLost(f"chunks in {self._stream} were removed meanwhile")
        return sent

    async def _with_link(self, work: Callable[[BulkLink], T]) -> T:
        """Run `work` in a thread with its own connection; it has ended when this returns."""
        link = BulkLink(self._broker)

        def run() -> T:
            try:
                link.open()
                return work(link)
            finally:
                link.close()

        running = asyncio.ensure_future(asyncio.to_thread(run))
        try:
            return await asyncio.shield(running)
        finally:
            link.stop()
            await finish(asyncio.gather(running, return_exceptions=True))

    async def _put_info(self, info: ObjectInfo, sha256: bytes) -> None:
        stock = f"SHA-256={base64.urlsafe_b64encode(sha256).decode()}"
        meta = {
            "name": info.name,
            "bucket": self._bucket,
            "nuid": info.nuid,
            "size": info.num_bytes,
            "chunks": info.num_chunks,
            "mtime": datetime.now(UTC).isoformat(),
            "digest": stock if self._sha256 else "",
            "description": "" if self._sha256 else _UNREADABLE,
            "metadata": {_DIGEST: info.digest},
            "options": {"max_chunk_size": self._chunk_bytes},
        }
        old = await self.info(info.name)
        try:
            await self._broker.append(
                self._info_subject(info.name),
                json.dumps(meta).encode(),
                headers={"Nats-Rollup": "sub"},
                deadline_s=_API_DEADLINE_S,
                waiting_for=f"the entry of object {info.name}",
            )
        except Refused as error:
            raise self._refused(info.name, error) from error
        if old is not None and old.nuid != info.nuid:
            await self._purge_chunks(old.nuid)

    async def _purge_chunks(self, nuid: str) -> None:
        await purge(self._broker, self._stream, self._chunk_subject(nuid))

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await self._broker.retry(
            attempt, deadline_s=_API_DEADLINE_S, waiting_for=f"bucket {self._bucket}"
        )

    def _chunk_subject(self, nuid: str) -> str:
        return f"$O.{self._bucket}.C.{nuid}"

    def _info_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    def _refused(self, name: str, error: Refused) -> BrokerError:
        message = f"object {name} was refused: {error.description}"
        if error.is_full:
            hint = f"bucket {self._bucket} is full: remove objects, or raise its bound"
            return BucketFullError(message, hint=hint)
        return BrokerError(message, hint="look at the bucket with `nats object info`")


class _Reading:
    """Receives the chunks of one object into its buffer, and digests them in another thread."""

    def __init__(
        self, stream: str, asking: str, subject: str, buffer: memoryview, lag_s: float
    ) -> None:
        """`lag_s` is how long a replica may lack the chunks."""
        self._lag_s = lag_s
        self._stream = stream
        self._asking = asking
        self._subject = subject
        self._buffer = buffer
        self._next_seq = 1
        self._num_bytes = 0
        self._digest = new_digest()
        self._digester = ThreadPoolExecutor(1, thread_name_prefix="digest")

    def run(self, link: BulkLink) -> None:
        """Receive to the end; after an error, call `run` again to continue behind the last whole
        chunk.
        """
        while self._num_bytes < len(self._buffer):
            self._request_window(link)
            while (message := link.next()).status == "":
                self._read_part(link, message)
            self._check_end(message)

    def digest(self) -> str:
        """Wait for the digester and return the digest of all received bytes."""
        self._digester.shutdown(wait=True)
        return self._digest.hexdigest()

    def _request_window(self, link: BulkLink) -> None:
        request = {
            "seq": self._next_seq,
            "next_by_subj": self._subject,
            "batch": 1_000_000,
            "max_bytes": GET_WINDOW_BYTES,
        }
        link.publish(self._asking, json.dumps(request).encode(), f"{link.inbox}.get")

    def _read_part(self, link: BulkLink, message: Incoming) -> None:
        end = self._num_bytes + message.num_bytes
        if end > len(self._buffer):
            raise DigestMismatch(f"an object of {self._stream} is longer than announced")
        part = self._buffer[self._num_bytes : end]
        link.read_into(part)
        self._digester.submit(self._digest.update, part)
        self._num_bytes = end
        self._next_seq = int(message.headers["Nats-Sequence"]) + 1

    def _check_end(self, message: Incoming) -> None:
        """Check the server's status message at the end of a window."""
        if message.status == nats_internals.NO_RESPONDERS:
            raise NoResponders("no server answers the read", stream=self._stream)
        pending = int(message.headers.get("Nats-Num-Pending", "0"))
        complete = self._num_bytes == len(self._buffer)
        if message.status != nats_internals.END_OF_BATCH or (not complete and pending == 0):
            if self._lag_s > 0:
                self._lag_s -= _LAG_PAUSE_S
                time.sleep(_LAG_PAUSE_S)  # in the thread of this transfer
                return
            raise NotFoundError(
                f"chunks in {self._stream} are missing after {self._num_bytes:,} bytes",
                hint="it was deleted while it was read: take a newer one",
            )


def _send(
    link: BulkLink, stream: str, subject: str, chunks: Iterator[memoryview], window: int
) -> tuple[int, int]:
    """Publish chunks with at most `window` unconfirmed; return the numbers of bytes and chunks."""
    num_bytes = num_chunks = num_confirmed = 0
    for chunk in chunks:
        if num_chunks - num_confirmed == window:
            _confirm(link, stream)
            num_confirmed += 1
        link.publish(subject, chunk, f"{link.inbox}.{num_chunks}")
        num_bytes += len(chunk)
        num_chunks += 1
    for _ in range(num_chunks - num_confirmed):
        _confirm(link, stream)
    return num_bytes, num_chunks


def _confirm(link: BulkLink, stream: str) -> None:
    """Read one confirmation; raises NoResponders, Refused."""
    message = link.next()
    payload = link.read(message.num_bytes)
    if message.status == nats_internals.NO_RESPONDERS:
        raise NoResponders("no server stores the chunk", stream=stream)
    checked(payload, "a chunk")


def chunks_of(views: Sequence[memoryview], chunk_bytes: int) -> Iterator[memoryview]:
    """Cut the concatenation of `views` into chunks; only a chunk that spans views is copied."""
    parts: list[memoryview] = []
    size = 0
    for view in views:
        start = 0
        while start < len(view):
            part = view[start : start + chunk_bytes - size]
            parts.append(part)
            size += len(part)
            start += len(part)
            if size == chunk_bytes:
                yield _joined(parts)
                parts, size = [], 0
    if parts:
        yield _joined(parts)


def _joined(parts: list[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _sha256(views: Sequence[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    return digest.digest()


def _nuid_of(payload: bytes) -> str | None:
    """Return the chunk name of an entry written by any client."""
    with contextlib.suppress(ValueError, AttributeError):
        return json.loads(payload).get("nuid")
    return None


def _read_info(payload: bytes) -> ObjectInfo | None:
    """Read the entry of an object; None for one deleted by the stock tools."""
    try:
        meta = json.loads(payload)
        if meta.get("deleted"):
            return None
        digest = str(meta["metadata"][_DIGEST])
        return ObjectInfo(meta["name"], meta["nuid"], meta["size"], meta["chunks"], digest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokerError(
            f"the entry of an object cannot be read: {error!r}", hint="see `nats object info`"
        ) from error
