"""A place in an object store by its URL, through the package `obstore`.

Every call tries again what may pass: a store that is away, slow, or breaks off. What will not pass
by itself (no such bucket, refused credentials) is told at once. All of it blocks: call it in
threads. A file is read in ranges by several threads.
"""

import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from ...schemas.wire.errors import NotFoundError, StorageError, StoreAwayError

T = TypeVar("T")
_RANGE_BYTES = 8 << 20
_THREADS = 8
_MOST_COPIED_BYTES = 5 << 30
"""What stores copy by themselves; what is larger goes through a file in $TMPDIR."""
_FIRST_PAUSE_S = 0.5


class StoredObject(NamedTuple):
    """An object of a store, as its listing tells."""

    name: str
    num_bytes: int
    tag: str
    """Changes with the object."""
    saved: float = 0.0
    """When it was written, in seconds since 1970."""


class UrlStore:
    """What lies below a URL."""

    def __init__(self, url: str, *, tries: int = 6, timeout_s: float = 60.0) -> None:
        """Reach nothing yet. Each call is tried `tries` times, each request for `timeout_s`.

        Raises StorageError for a URL that obstore cannot read, or without that package.
        """
        self.url = url.rstrip("/")
        self._tries = tries
        self._closing = threading.Event()
        self._store = _open(self.url, timeout_s)

    def close(self) -> None:
        """Let calls that wait before another try end now, with their error."""
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
        """Write an object of that size to a file, its ranges in parallel.

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
                    one["path"],
                    one["size"],
                    str(one["e_tag"] or one["last_modified"]),
                    one["last_modified"].timestamp(),
                )
                for batch in batches
                for one in batch
            ]

        return sorted(self._try(f"list {prefix or 'what is there'}", look))

    def copy(self, one: StoredObject, target: str, *, most_bytes: int = _MOST_COPIED_BYTES) -> None:
        """Copy an object within the store. Raises NotFoundError, StorageError, OSError."""
        import obstore

        if one.num_bytes <= most_bytes:
            self._try(f"copy {one.name}", lambda: obstore.copy(self._store, one.name, target))
            return
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder) / "part"
            self.fetch(one.name, one.num_bytes, here)
            self.put(target, here)

    def delete(self, names: list[str]) -> None:
        """Remove objects; one that has gone is no error. Raises StorageError."""
        import obstore

        for name in names:
            try:
                self._try(f"remove {name}", lambda name=name: obstore.delete(self._store, name))
            except NotFoundError:
                continue

    def _try(self, what: str, call: Callable[[], T]) -> T:
        """Call until it succeeds, no more than so many times."""
        from obstore import exceptions

        pause, last = _FIRST_PAUSE_S, None
        for left in reversed(range(self._tries)):
            try:
                return call()
            except FileNotFoundError as error:
                raise NotFoundError(
                    f"{self.url} has nothing to {what}: {_in_one_line(error)}",
                    hint="see whether the bucket and the path exist",
                ) from error
            except (
                exceptions.PermissionDeniedError,
                exceptions.UnauthenticatedError,
                PermissionError,
            ) as error:
                raise StorageError(
                    f"{self.url} refuses to {what}: {_in_one_line(error)}",
                    hint="see the credentials in the environment of the pool's machines "
                    "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or their role) and their rights",
                ) from error
            except (exceptions.BaseError, OSError) as error:
                last = error
            if not left or self._closing.wait(pause):
                break
            pause *= 2
        raise StoreAwayError(
            f"{self.url}: could not {what}: {_in_one_line(last)}",
            hint="see whether the pool's machines reach the store (AWS_ENDPOINT for one that is "
            "not Amazon's), whether the bucket exists, and whether it is full",
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
            f"{url} is no place in a store: {_in_one_line(error)}",
            hint="write s3://bucket/prefix, gs://bucket/prefix or file:///folder",
        ) from error


def _is_plain() -> bool:
    """Whether the operator has named a server without TLS; options here hide the environment's."""
    named = os.environ.get("AWS_ENDPOINT") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return named.startswith("http://") or os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"


def _in_one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
