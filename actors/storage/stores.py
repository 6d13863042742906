"""Stores of files: below a URL, through the package `obstore`, or in the broker.

Both have the same blocking methods: call them in threads. A store by URL retries after temporary
errors (away, slow, cut off); permanent errors (no such bucket, refused credentials) are raised at
once. A file is read in ranges by several threads.

The store in the broker is for machines without a common disk or store: the checkpoints of a job are
objects in a bucket of its own, bounded by `limits.checkpoint_bytes`; calls run on the process's
event loop.
"""

import asyncio
import contextlib
import mmap
import os
import re
import shutil
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from ...broker.client.connection import Broker
from ...broker.jetstream import streams
from ...broker.jetstream.objects import ObjectInfo, ObjectStore
from ...schemas.config.job import LimitsConfig
from ...schemas.config.sections import BROKER
from ...schemas.local.folder import is_inside, temporary_folder
from ...schemas.wire.errors import BrokerError, NotFoundError, StorageError, StoreAwayError
from ...schemas.wire.subjects import JobScope
from .files import TABLE, digest_of, flush, is_state, read_table, storage_error

T = TypeVar("T")
_RANGE_BYTES = 8 << 20
_THREADS = 8
_MOST_COPIED_BYTES = 5 << 30
"""Maximum size that stores copy themselves; larger objects are copied through a file in $TMPDIR."""
_STAGED = re.compile(r"#[0-9]+\Z")
_FIRST_PAUSE_S = 0.5
_DEADLINE_S = 600.0
_BUCKET_ROOM_BYTES = 4 << 20


class StoredObject(NamedTuple):
    """An object of a store, from its listing."""

    name: str
    num_bytes: int
    tag: str
    """Tag that changes with the object's content."""
    saved: float = 0.0
    """When it was written, in seconds since 1970."""


class UrlStore:
    """The objects below a URL."""

    def __init__(self, url: str, *, tries: int = 6, timeout_s: float = 60.0) -> None:
        """Prepare, without a connection. Each call has `tries` attempts of `timeout_s`.

        Raises StorageError for a URL that obstore cannot read, or without that package.
        """
        self.url = url.rstrip("/")
        self._tries = tries
        self._closing = threading.Event()
        self._store = _open(self.url, timeout_s)

    def close(self) -> None:
        """End calls that wait for another attempt by raising their error."""
        self._closing.set()

    def put(self, name: str, content: Path | bytes) -> None:
        """Store a file or bytes under a name. Raises StorageError."""
        import obstore

        self._try(f"write {name}", lambda: obstore.put(self._store, name, content))

    def read(self, name: str) -> bytes:
        """Return a small object. Raises NotFoundError, StorageError."""
        import obstore

        return self._try(f"read {name}", lambda: bytes(obstore.get(self._store, name).bytes()))

    def fetch(self, name: str, num_bytes: int, target: Path) -> None:
        """Write an object of this size to a file, its ranges in parallel.

        Raises NotFoundError, StorageError, OSError for the file.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file, ThreadPoolExecutor(_THREADS) as threads:
            os.truncate(file.fileno(), num_bytes)

            def part(start: int) -> None:
                self._range(name, num_bytes, start, file.fileno())

            list(threads.map(part, range(0, num_bytes, _RANGE_BYTES)))

    def _range(self, name: str, num_bytes: int, start: int, file: int) -> None:
        import obstore

        length = min(_RANGE_BYTES, num_bytes - start)

        def part() -> memoryview:
            got = memoryview(obstore.get_range(self._store, name, start=start, length=length))
            if len(got) != length:
                raise OSError(f"{len(got)} bytes came of {length}")
            return got

        data = self._try(f"read {name}", part)
        while data:
            written = os.pwrite(file, data, start)
            data, start = data[written:], start + written

    def objects(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects below a prefix, by name. Raises StorageError."""
        import obstore

        def look() -> list[StoredObject]:
            batches = cast(Any, obstore).list(self._store, prefix=prefix or None)
            return [
                StoredObject(
                    infom["path"],
                    infom["size"],
                    str(infom["e_tag"] or infom["last_modified"]),
                    infom["last_modified"].timestamp(),
                )
                for batch in batches
                for infom in batch
            ]

        return sorted(self._try(f"list {prefix or 'what is there'}", look))

    def copy(
        self, source: StoredObject, target: str, *, most_bytes: int = _MOST_COPIED_BYTES
    ) -> None:
        """Copy an object within the store. Raises NotFoundError, StorageError, OSError."""
        import obstore

        if source.num_bytes <= most_bytes:
            self._try(f"copy {source.name}", lambda: obstore.copy(self._store, source.name, target))
            return
        with temporary_folder("copy") as folder:
            here = folder / "part"
            self.fetch(source.name, source.num_bytes, here)
            self.put(target, here)

    def delete(self, names: list[str]) -> None:
        """Remove objects; missing ones are ignored. Raises StorageError."""
        import obstore

        for name in names:
            try:
                self._try(f"remove {name}", lambda name=name: obstore.delete(self._store, name))
            except NotFoundError:
                continue

    def sweep(self) -> None:
        """Remove unfinished files of killed uploads to a folder.

        Unfinished uploads to other stores are not listed; a rule of the bucket removes them. Raises
        StorageError.
        """
        if not self.url.startswith("file://"):
            return
        try:
            for path in Path(urlsplit(self.url).path).rglob("*#*"):
                if _STAGED.search(path.name):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"unfinished files in {self.url} cannot be removed: {error}",
                hint="check the permissions of that folder",
            ) from error

    def _try(self, what: str, call: Callable[[], T]) -> T:
        """Call a function until it succeeds, at most `tries` times."""
        from obstore import exceptions

        pause, last = _FIRST_PAUSE_S, None
        for left in reversed(range(self._tries)):
            try:
                return call()
            except FileNotFoundError as error:
                raise NotFoundError(
                    f"{self.url} has nothing to {what}: {_in_one_line(error)}",
                    hint="check that the bucket and the path exist",
                ) from error
            except (
                exceptions.PermissionDeniedError,
                exceptions.UnauthenticatedError,
                PermissionError,
            ) as error:
                raise StorageError(
                    f"{self.url} refuses to {what}: {_in_one_line(error)}",
                    hint="check the credentials in the environment of the pool's machines "
                    "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or their role) and their rights",
                ) from error
            except (exceptions.BaseError, OSError) as error:
                last = error
            if not left or self._closing.wait(pause):
                break
            pause *= 2
        raise StoreAwayError(
            f"{self.url}: could not {what}: {_in_one_line(last)}",
            hint="check that the pool's machines reach the store (AWS_ENDPOINT for one that is "
            "not Amazon's), that the bucket exists, and that it is not full",
        ) from last


def _open(url: str, timeout_s: float) -> Any:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        raise StorageError(
            f"{url} cannot be opened: the package obstore is not installed here",
            hint='pip install "tinkermq[storage]" on every machine of the pool',
        ) from error
    try:
        if url.startswith("file://"):
            return LocalStore(urlsplit(url).path or "/", mkdir=True)
        return from_url(
            url,
            client_options={
                "timeout": f"{timeout_s}s",
                "connect_timeout": "10s",
                "allow_http": _is_plain(),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
        )
    except (BaseError, OSError, ValueError) as error:
        raise StorageError(
            f"{url} is not a place in a store: {_in_one_line(error)}",
            hint="write s3://bucket/prefix, gs://bucket/prefix or file:///folder",
        ) from error


def _is_plain() -> bool:
    """Whether the environment allows a server without TLS, which these options would override."""
    named = os.environ.get("AWS_ENDPOINT") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return named.startswith("http://") or os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"


def _in_one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


class BrokerStore:
    """The objects in a job's bucket of checkpoints."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        below: str = "",
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Prepare, on the event loop of the connection or with that loop as an argument.

        Names are relative to the path `below` in the bucket.
        """
        self.url = f"{BROKER}runs/{scope.user}/{scope.job}/{below}".rstrip("/") if below else BROKER
        self._broker, self._scope = broker, scope
        self._below = f"{below}/" if below else ""
        self._objects = ObjectStore(broker, scope.object_checkpoints)
        self._loop = loop or asyncio.get_running_loop()
        self._running: set[Future[Any]] = set()
        self._closed = False

    def close(self) -> None:
        """End running calls with their error."""
        self._closed = True
        for future in list(self._running):
            future.cancel()

    def make_room(self, num_bytes: int) -> None:
        """Raise the bound of the bucket, which is created if missing. Raises StoreAwayError."""
        making = _grow_bucket(self._broker, self._scope, num_bytes)
        self._wait(f"make room for {num_bytes:,} bytes", making)

    def remove(self) -> None:
        """Delete the job's bucket with its objects. Raises StoreAwayError."""
        bucket = f"OBJ_{self._scope.object_checkpoints}"
        self._wait("remove its bucket", streams.delete_stream(self._broker, bucket))

    def sweep(self) -> None:
        """Remove parts of killed uploads. Raises StoreAwayError."""
        self._wait("remove halves of files", self._objects.sweep())

    def put(self, name: str, content: Path | bytes) -> None:
        """Store a file or bytes under a name. Raises StoreAwayError, also if the bucket is full."""
        views = [memoryview(content)] if isinstance(content, bytes) else _mapped(content)
        self._wait(f"write {name}", self._put(name, views))

    def fetch(self, name: str, num_bytes: int, target: Path) -> None:
        """Write an object of this size to a file.

        Raises NotFoundError, StoreAwayError, OSError for the file.
        """
        info = self._wait(f"read {name}", self._objects.info(self._below + name))
        if info is None or info.num_bytes != num_bytes:
            raise NotFoundError(f"{self.url} has no {name} any more", hint="take another one")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w+b") as file:
            if num_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk fails here
                view = memoryview(mmap.mmap(file.fileno(), num_bytes))
                reading = self._objects.get_into(info, view, deadline_s=_DEADLINE_S)
                self._wait(f"read {name}", reading)

    def objects(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects below a prefix, by name. Raises StoreAwayError."""
        infos = self._wait("list what it has", self._objects.infos())
        below = self._below + (f"{prefix}/" if prefix else "")
        objects = (
            _stored_object(info, self._below) for info in infos if info.name.startswith(below)
        )
        return sorted(objects)

    def delete(self, names: list[str]) -> None:
        """Remove objects; missing ones are ignored. Raises StoreAwayError."""
        for name in names:
            self._wait(f"remove {name}", self._objects.delete(self._below + name))

    def _put(self, name: str, views: list[memoryview]) -> Coroutine[Any, Any, ObjectInfo]:
        return self._objects.put(self._below + name, views, deadline_s=_DEADLINE_S)

    def _wait(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise StoreAwayError(f"{self.url} was closed", hint="nothing to do: its actor ends")
        doing = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(doing)
        try:
            return doing.result()
        except (BrokerError, CancelledError) as error:
            raise StoreAwayError(
                f"{self.url} could not {what}: {error}",
                hint="limits.checkpoint_bytes must have room for training.keep_last + 2 "
                "checkpoints, and the broker's disk for all that is in it",
            ) from error
        finally:
            self._running.discard(doing)


def _mapped(file: Path) -> list[memoryview]:
    """Yield the content of a file in parts."""
    with file.open("rb") as opened:
        if not file.stat().st_size:
            return []
        return [memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))]


def _stored_object(info: ObjectInfo, below: str) -> StoredObject:
    return StoredObject(info.name.removeprefix(below), info.num_bytes, info.digest)


async def _grow_bucket(broker: Broker, scope: JobScope, num_bytes: int) -> None:
    """Raise the bound of a job's bucket of checkpoints, which is created if missing.

    Used for a checkpoint that is copied before the job starts; `create_job_streams` then sets the
    job's own bound. Raises BrokerError if the server has no room, DeadlineError.
    """
    name = f"OBJ_{scope.object_checkpoints}"
    configs = streams.job_streams(scope, LimitsConfig(), streams.WEIGHTS_BYTES)
    config = next(stream for stream in configs if stream["name"] == name)
    held = 0
    with contextlib.suppress(NotFoundError):
        held = int((await streams.stream_info(broker, name))["state"]["bytes"])
    room = num_bytes + num_bytes // 50 + _BUCKET_ROOM_BYTES
    await streams.ensure_stream(broker, {**config, "max_bytes": held + room})


Store = UrlStore | BrokerStore

_RUNS, _CHECKPOINTS = f"{BROKER}runs/", "checkpoints"


class Stores:
    """Opens stores by URL.

    `broker:runs/<user>/<job>/checkpoints/<name>` is a checkpoint in the bucket of that job; with
    another word than `checkpoints` it is a copy of another run's.
    """

    def __init__(self, broker: Broker, own: JobScope | None = None) -> None:
        """Prepare, on the loop of `broker`; an actor of a job reads the bucket of its `own` job."""
        self._broker = broker
        self._own = own
        self._loop = asyncio.get_running_loop()

    def open(self, url: str, *, tries: int = 6) -> Store:
        """Return a store whose names are relative to a URL. Raises StorageError."""
        if not url.startswith(_RUNS):
            return UrlStore(url, tries=tries)
        return self.bucket(url)

    def bucket(self, url: str) -> BrokerStore:
        """Return the store of a URL in the broker. Raises StorageError."""
        user, _, rest = url.removeprefix(_RUNS).partition("/")
        job, _, below = rest.partition("/")
        scope = JobScope(user, job)
        below = f"{below}/".removeprefix(f"{_CHECKPOINTS}/").rstrip("/")
        if self._own not in (None, scope):
            raise StorageError(
                f"{url} belongs to another run; a run reads only its own checkpoints in the broker",
                hint="start from that checkpoint: fork_of, or `--from RUN@STEP`",
            )
        return BrokerStore(self._broker, scope, below, self._loop)


# -- folders ---------------------------------------------------------------------------------------
# `SHA256SUMS` is written last and completes a folder. A folder without that table is an incomplete
# upload, not a checkpoint. Models that other programs stored need no table.

_FILES_AT_ONCE = 4
_FETCHES = 3


def upload_tree(store: Store, prefix: str, folder: Path) -> None:
    """Store the files of a folder that has a table of digests, the table last.

    Raises StorageError.
    """
    names = [name for name in read_table(folder) if (folder / name).is_file()]

    def put(name: str) -> None:
        store.put(f"{prefix}/{name}", folder / name)

    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        list(threads.map(put, names))
    there = {item.name: item.num_bytes for item in store.objects(prefix)}
    for name in names:
        if there.get(f"{prefix}/{name}") != (size := (folder / name).stat().st_size):
            raise StorageError(
                f"{store.url}/{prefix}/{name} has {there.get(f'{prefix}/{name}')} bytes in the "
                f"store, {size} were written",
                hint="it will be written again; check the store if this repeats",
            )
    store.put(f"{prefix}/{TABLE}", folder / TABLE)


def fetch_tree(store: Store, prefix: str, files: list[StoredObject], target: Path) -> None:
    """Write the files of a folder of the store to a new folder `target`, completely or not at all.

    A file that differs from the table of digests is read again. Raises StorageError for a file that
    still differs, and for a full disk.
    """
    half = target.with_name(f".{target.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    try:
        half.mkdir(parents=True)
        _fetch_files(store, prefix, files, half)
        flush(half)
        half.rename(target)
    except Exception as error:
        shutil.rmtree(half, ignore_errors=True)
        if (failure := storage_error(target, error)) is not None:
            raise failure from error
        raise


def _fetch_files(store: Store, prefix: str, files: list[StoredObject], folder: Path) -> None:
    by_name = {_inside(file.name, prefix): file for file in files}
    digests: dict[str, str] = {}
    if (table := by_name.pop(TABLE, None)) is not None:
        store.fetch(table.name, table.num_bytes, folder / TABLE)
        digests = read_table(folder)
        is_copy = not any(map(is_state, by_name))
        for name in digests:
            if name not in by_name and not (is_copy and is_state(name)):
                raise _wrong(store, prefix, name, "is missing")
    for name, file in by_name.items():
        _fetch_whole(store, file, folder / name, digests.get(name))


def _fetch_whole(store: Store, file: StoredObject, target: Path, digest: str | None) -> None:
    for _ in range(_FETCHES):
        store.fetch(file.name, file.num_bytes, target)
        if digest is None or digest_of(target) == digest:
            return
    raise _wrong(store, "", file.name, f"differs from what was written ({file.num_bytes:,} bytes)")


def _inside(name: str, prefix: str) -> str:
    """Return the name of a file in its folder; raises StorageError for one outside of it."""
    inside = name.removeprefix(f"{prefix}/") if prefix else name
    if not is_inside(inside) or (prefix and inside == name):
        raise StorageError(
            f"{name!r} is not a valid name of a file", hint="remove it from the store"
        )
    return str(PurePosixPath(inside))


def _wrong(store: Store, prefix: str, name: str, how: str) -> StorageError:
    place = "/".join(part for part in (store.url, prefix, name) if part)
    return StorageError(
        f"{place} {how}", hint="restore the file, or remove the folder that it is in"
    )
