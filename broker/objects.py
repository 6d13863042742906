"""Large objects through NATS, in the layout of ADR-20, so that `nats object` lists and reads them.

The stock client waits for each chunk and collects into growing bytes; here chunks are published in
a bounded pipeline straight from the caller's buffers, and read by direct batched gets into one
buffer that the caller made. The digest runs in a thread beside both. A put that fails in the
middle starts again under new chunks, because the order of chunks in the stream is their order in
the object.
"""

import asyncio
import base64
import hashlib
import json
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import structlog
from nats.aio.msg import Msg
from nats.js.errors import APIError

from ..schemas.errors import BrokerError, DeadlineError, NotFoundError
from .connection import RETRY_PAUSE_S, Broker, ConnectionLost, NoResponders
from .stored import get_all, get_last, missing

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
PUT_WINDOW_BYTES = 16 * 2**20
GET_WINDOW_BYTES = 32 * 2**20
_CHUNK_TIMEOUT_S = 10.0
_API_DEADLINE_S = 60.0
_END_OF_BATCH = "204"
_STORE_FAILED = 10077

_log = structlog.get_logger()


class DigestMismatch(BrokerError):
    """What was read is not what was stored."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store says of one object."""

    name: str
    nuid: str
    num_bytes: int
    num_chunks: int
    digest: str
    """SHA-256, hexadecimal."""


class ObjectStore:
    """One bucket of objects."""

    def __init__(self, broker: Broker, bucket: str, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Name a bucket that `streams` has made."""
        self._broker = broker
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._chunk_bytes = min(chunk_bytes, broker.max_payload_bytes)

    async def put(self, name: str, views: Sequence[memoryview], *, deadline_s: float) -> ObjectInfo:
        """Store the concatenation of `views`; it is there once this returns.

        Raises BrokerError when the bucket is full, DeadlineError, NotFoundError.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        digesting = loop.run_in_executor(None, _digest, views)
        nuid = uuid.uuid4().hex
        while True:
            waiting_for = f"object {name} to be stored"
            await self._broker.wait_connected(deadline, waiting_for=waiting_for)
            try:
                num_bytes, num_chunks = await self._put_chunks(nuid, views)
                break
            except (ConnectionLost, NoResponders, TimeoutError) as error:
                if isinstance(error, NoResponders) and self._broker.settled:
                    raise missing(self._stream) from error
                if loop.time() > deadline:
                    raise DeadlineError(
                        f"{waiting_for}: not within {deadline_s:g} s",
                        hint="see whether nats-server runs and has room",
                    ) from error
                _log.info("put_repeated", name=name, reason=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)
                await self._purge_chunks(nuid)
                nuid = uuid.uuid4().hex
            except APIError as error:
                await self._purge_chunks(nuid)
                raise self._refused(name, error) from error
        info = ObjectInfo(name, nuid, num_bytes, num_chunks, await digesting)
        await self._put_info(info)
        return info

    async def get_into(self, info: ObjectInfo, buffer: memoryview, *, deadline_s: float) -> None:
        """Read an object into `buffer`, which has exactly its size.

        Raises DigestMismatch, NotFoundError when it was deleted, DeadlineError.
        """
        assert len(buffer) == info.num_bytes
        digest = hashlib.sha256()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as thread:
            reading = _Reading(self._broker, self._stream, self._chunk_subject(info.nuid), buffer)
            hashed: list[asyncio.Future[None]] = []
            while not reading.complete:
                start = reading.num_bytes
                await self._read_window(reading, deadline)
                part = buffer[start : reading.num_bytes]
                hashed.append(loop.run_in_executor(thread, digest.update, part))
            await asyncio.gather(*hashed)
        if digest.hexdigest() != info.digest:
            raise DigestMismatch(
                f"object {info.name} of bucket {self._bucket} has digest {digest.hexdigest()}, "
                f"stored was {info.digest}",
                hint="publish it again",
            )

    async def info(self, name: str) -> ObjectInfo | None:
        """Return what is known of an object, or None if there is none."""
        message = await self._retry(
            lambda: get_last(self._broker, self._stream, self._info_subject(name))
        )
        return None if message is None else _read_info(message.payload)

    async def names(self) -> list[str]:
        """Return the names of all objects."""
        subject = f"$O.{self._bucket}.M.>"
        messages = await self._retry(lambda: get_all(self._broker, self._stream, subject))
        infos = (_read_info(message.payload) for message in messages)
        return sorted({info.name for info in infos if info is not None})

    async def delete(self, name: str) -> None:
        """Delete an object; harmless if it is gone."""
        info = await self.info(name)
        await self._purge(self._info_subject(name))
        if info is not None:
            await self._purge_chunks(info.nuid)

    async def _put_chunks(self, nuid: str, views: Sequence[memoryview]) -> tuple[int, int]:
        """Publish all chunks with a bounded number unconfirmed; return bytes and chunks."""
        subject = self._chunk_subject(nuid)
        window = max(2, PUT_WINDOW_BYTES // self._chunk_bytes)
        waiting: deque[asyncio.Future[Msg]] = deque()
        num_bytes = num_chunks = 0
        try:
            for chunk in chunks_of(views, self._chunk_bytes):
                if len(waiting) >= window:
                    await self._confirm(waiting.popleft())
                reply, future = self._broker.expect_reply(subject)
                waiting.append(future)
                await self._broker.send(subject, chunk, reply=reply)
                num_bytes += len(chunk)
                num_chunks += 1
            while waiting:
                await self._confirm(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()
        return num_bytes, num_chunks

    async def _confirm(self, future: "asyncio.Future[Msg]") -> None:
        async with asyncio.timeout(_CHUNK_TIMEOUT_S):
            answer: dict[str, Any] = json.loads((await future).data)
        if "error" in answer:
            APIError.from_error(answer["error"])

    async def _put_info(self, info: ObjectInfo) -> None:
        digest = base64.urlsafe_b64encode(bytes.fromhex(info.digest)).decode()
        meta = {
            "name": info.name,
            "bucket": self._bucket,
            "nuid": info.nuid,
            "size": info.num_bytes,
            "chunks": info.num_chunks,
            "mtime": datetime.now(UTC).isoformat(),
            "digest": f"SHA-256={digest}",
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
        except APIError as error:
            raise self._refused(info.name, error) from error
        if old is not None and old.nuid != info.nuid:
            await self._purge_chunks(old.nuid)

    async def _read_window(self, reading: "_Reading", deadline: float) -> None:
        while True:
            await self._broker.wait_connected(deadline, waiting_for="an object to be read")
            try:
                return await reading.read_window()
            except (ConnectionLost, NoResponders, TimeoutError) as error:
                if isinstance(error, NoResponders) and self._broker.settled:
                    raise missing(self._stream) from error
                if asyncio.get_running_loop().time() > deadline:
                    raise DeadlineError(
                        f"an object of {self._stream} was not read in time",
                        hint="see whether nats-server runs and is not overloaded",
                    ) from error
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _purge_chunks(self, nuid: str) -> None:
        await self._purge(self._chunk_subject(nuid))

    async def _purge(self, subject: str) -> None:
        await self._retry(
            lambda: self._broker.api(f"STREAM.PURGE.{self._stream}", {"filter": subject})
        )

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._broker.retry(
                attempt, deadline_s=_API_DEADLINE_S, waiting_for=f"bucket {self._bucket}"
            )
        except NoResponders as error:
            raise missing(self._stream) from error

    def _chunk_subject(self, nuid: str) -> str:
        return f"$O.{self._bucket}.C.{nuid}"

    def _info_subject(self, name: str) -> str:
        return f"$O.{self._bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    def _refused(self, name: str, error: APIError) -> BrokerError:
        hint = "look at the bucket with `nats object info`"
        if error.err_code == _STORE_FAILED:
            hint = "its bucket is full: old versions are not removed, or the bound is too small"
        return BrokerError(f"object {name} was refused: {error.description}", hint=hint)


class _Reading:
    """Copies the chunks of one object into its buffer, one bounded window after another."""

    def __init__(self, broker: Broker, stream: str, subject: str, buffer: memoryview) -> None:
        self._broker = broker
        self._stream = stream
        self._subject = subject
        self._buffer = buffer
        self._next_seq = 1
        self.num_bytes = 0

    @property
    def complete(self) -> bool:
        """Whether the buffer is full."""
        return self.num_bytes == len(self._buffer)

    async def read_window(self) -> None:
        """Read the next chunks; what came before an error stays read."""
        inbox = self._broker.nc.new_inbox()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(message: Msg) -> None:
            if ended.done():
                return
            try:
                if self._take(message):
                    ended.set_result(None)
            except (BrokerError, NotFoundError) as error:
                ended.set_exception(error)

        def lose() -> None:
            if not ended.done():
                ended.set_exception(ConnectionLost("the connection broke while reading"))

        listening = await self._broker.listen(inbox, take)
        remove = self._broker.on_disconnect(lose)
        try:
            await self._ask(inbox)
            async with asyncio.timeout(_CHUNK_TIMEOUT_S):
                await ended
        finally:
            remove()
            ended.cancel()
            await listening.stop()

    async def _ask(self, inbox: str) -> None:
        request = {
            "seq": self._next_seq,
            "next_by_subj": self._subject,
            "batch": 1_000_000,
            "max_bytes": GET_WINDOW_BYTES,
        }
        await self._broker.send(
            f"$JS.API.DIRECT.GET.{self._stream}", json.dumps(request).encode(), reply=inbox
        )

    def _take(self, message: Msg) -> bool:
        """Copy one chunk; return whether the window has ended."""
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            end = self.num_bytes + len(message.data)
            if end > len(self._buffer):
                raise DigestMismatch(f"an object of {self._stream} is longer than announced")
            self._buffer[self.num_bytes : end] = message.data
            self.num_bytes = end
            self._next_seq = int(headers["Nats-Sequence"]) + 1
            return False
        if status == "503":
            raise NoResponders(f"there is no stream {self._stream}")
        if status != _END_OF_BATCH or (
            not self.complete and int(headers.get("Nats-Num-Pending", "0")) == 0
        ):
            raise NotFoundError(
                f"chunks of an object of {self._stream} are gone after {self.num_bytes:,} bytes",
                hint="it was deleted while it was read: take a newer one",
            )
        return True


def chunks_of(views: Sequence[memoryview], chunk_bytes: int) -> Iterator[memoryview]:
    """Cut the concatenation of `views` into chunks; only one that spans views is copied."""
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


def _digest(views: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    return digest.hexdigest()


def _read_info(payload: bytes) -> ObjectInfo | None:
    """Read the entry of an object; None for one that the ordinary tools have deleted."""
    try:
        meta = json.loads(payload)
        if meta.get("deleted"):
            return None
        digest = base64.urlsafe_b64decode(meta["digest"].split("=", 1)[1]).hex()
        return ObjectInfo(meta["name"], meta["nuid"], meta["size"], meta["chunks"], digest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokerError(
            f"the entry of an object cannot be read: {error!r}", hint="see `nats object info`"
        ) from error
