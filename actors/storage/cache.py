"""A cache of fetched folders, bounded in bytes and shared by the processes of a machine.

An entry is named after its content: `<key>/` is the folder, `<key>.held` contains its size and is
locked (flock): shared by processes that use the entry, exclusively by one that fetches or removes
it. Its modification time is that of the last request: the least recently used entries are removed
first, entries in use never. Locks end with their process, so a killed process leaves at most an
incomplete folder, which the next process removes.

Actors load models from folders: a model with a URL is fetched, and the actor's configuration names
its folder in the cache.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...broker.client.connection import Broker
from ...schemas.config.job import JobConfig
from ...schemas.config.sections import is_url
from ...schemas.job import JobRecord
from ...schemas.model_catalogue import cache_folder, find_model
from ...schemas.wire.errors import ModelError, StorageError
from .files import is_state
from .held_models import MayRead, held_models
from .stores import Stores, UrlStore, fetch_tree

BYTES_VARIABLE = "TINKERMQ_CACHE_BYTES"
"""Environment variable of nodes with the bound of the cache."""
_DEFAULT_BYTES = 200 << 30
_HELD = ".held"


class CacheEntry(NamedTuple):
    """One entry of a cache."""

    last_used: float
    num_bytes: int
    lock: Path


class FolderCache:
    """The cache of a machine."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._held: dict[str, int] = {}

    @classmethod
    def of_machine(cls) -> "FolderCache":
        """Open the machine's cache; raises StorageError for an invalid bound in the environment."""
        bound = os.environ.get(BYTES_VARIABLE) or str(_DEFAULT_BYTES)
        if not bound.isdecimal() or not int(bound):
            raise StorageError(
                f"${BYTES_VARIABLE}={bound!r} must be an integer ≥ 1",
                hint="write a number of bytes, such as 200000000000",
            )
        return cls(cache_folder(), int(bound))

    def hold(self, key: str, num_bytes: int, fetch: Callable[[Path], None]) -> Path:
        """Return the folder of a key, which stays until `release` or the end of this process.

        If it is missing, `fetch` writes it while other processes wait. Raises StorageError if the
        entries in use leave too little room, and the errors of `fetch`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        place = self._folder / key
        while key not in self._held:
            lock = os.open(f"{place}{_HELD}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                self._fill(lock, place, num_bytes, fetch)
                fcntl.flock(lock, fcntl.LOCK_SH)
                if place.is_dir():  # the folder may have been removed between the two locks
                    self._held[key] = lock
                    lock = -1
            finally:
                if lock >= 0:
                    os.close(lock)
        return place

    def release(self, key: str) -> None:
        """Allow an entry to be removed."""
        os.close(self._held.pop(key))

    def _fill(self, lock: int, place: Path, num_bytes: int, fetch: Callable[[Path], None]) -> None:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not place.is_dir():
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            self._make_room(lock, num_bytes, place.name)
            try:
                fetch(place)
            except BaseException:
                os.ftruncate(lock, 0)
                raise
        os.utime(lock)

    def _make_room(self, lock: int, num_bytes: int, key: str) -> None:
        """Remove the least recently used entries until `num_bytes` fit, and reserve these.

        One process at a time does this.
        """
        with _locked(self._folder / ".room"):
            entries = [entry for entry in self._entries() if entry.lock.stem != key]
            total = num_bytes + sum(entry.num_bytes for entry in entries)
            free = shutil.disk_usage(self._folder).free  # the disk may be smaller than the bound
            for entry in sorted(entries):
                if total <= self._max_bytes and num_bytes <= free:
                    break
                removed = entry.num_bytes * _remove(entry)
                total, free = total - removed, free + removed
            if total > self._max_bytes:
                raise StorageError(
                    f"the cache {self._folder} has no room for {num_bytes:,} bytes: it may hold "
                    f"{self._max_bytes:,}, and {total - num_bytes:,} are in use",
                    hint=f"raise ${BYTES_VARIABLE} in the environment of this node, or end jobs",
                )
            os.pwrite(lock, str(num_bytes).encode(), 0)

    def _entries(self) -> Iterator[CacheEntry]:
        for lock in self._folder.glob(f"*{_HELD}"):
            text = lock.read_text()
            if text:
                yield CacheEntry(lock.stat().st_mtime, int(text), lock)


def _remove(entry: CacheEntry) -> bool:
    """Remove an entry unless it is in use; return whether it was removed."""
    with contextlib.suppress(BlockingIOError), _locked(entry.lock, fcntl.LOCK_NB) as lock:
        place = entry.lock.with_suffix("")
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(place.with_name(f".{place.name}.half"), ignore_errors=True)
        os.ftruncate(lock, 0)  # the file stays: processes that wait for its lock have it open
        return True
    return False


@contextlib.contextmanager
def _locked(file: Path, how: int = 0) -> Iterator[int]:
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
        yield lock
    finally:
        os.close(lock)


# -- models by URL ---------------------------------------------------------------------------------

_caches: list[FolderCache] = []
"""The cache of this process, whose entries stay in use until the process ends."""
_fetched: dict[str, str] = {}
"""URLs of the cache's folders that this process uses."""


async def fetch_models(
    broker: Broker,
    config: JobConfig,
    record: JobRecord,
    role: str,
    may_read: MayRead | None = None,
) -> tuple[JobConfig, JobRecord]:
    """Return both with folders of this machine for URLs; only learners get learners' states.

    With `may_read` the files of models are opened now, and libraries read these. Raises
    StorageError, ModelError, ConfigError.
    """
    stores = Stores(broker, record.scope)

    def fetch() -> tuple[JobConfig, JobRecord]:
        here = with_checkpoints_here(record, stores, weights_only=role not in ("learner", "rank"))
        local = with_models_here(config, stores)
        if may_read is not None:
            hold = partial(held_models.hold, may_read=may_read)
            local = _with_paths(local, hold, hold)
        return local, here

    return await asyncio.to_thread(fetch)


def with_models_here(config: JobConfig, stores: Stores) -> JobConfig:
    """Return a configuration with folders of this machine for URLs and catalogue names of models.

    Raises StorageError, ModelError for a URL without files.
    """
    teachers = partial(_local, stores=stores, weights_only=True)
    return _with_paths(config, partial(_local, stores=stores), teachers)


def _with_paths(
    config: JobConfig, local: Callable[[str], str], teachers: Callable[[str], str]
) -> JobConfig:
    algorithm = config.algorithm
    named = {*algorithm.loaded_teachers.values(), algorithm.reference.path or ""}
    changes: dict[str, Any] = {
        "model": _with_local(config.model, local, "path", "tokenizer"),
        "critic": _with_local(config.critic, local, "path"),
        "algorithm": algorithm.renamed({path: teachers(path) for path in named if path}),
        "policies": {role: local(path) for role, path in config.policies.items()},
        "generator": config.generator.model_copy(
            update={"speculation": _with_local(config.generator.speculation, local, "draft")}
        ),
    }
    return config.model_copy(update=changes)


def with_checkpoints_here(
    record: JobRecord, stores: Stores, *, weights_only: bool = False
) -> JobRecord:
    """Return a record with folders of this machine for checkpoints of other runs.

    With `weights_only` the learner's state is not fetched. Raises StorageError, ModelError for a
    missing checkpoint.
    """
    changes: dict[str, Any] = {
        "fork_dir": _local(record.fork_dir, stores, weights_only),
        "adapters": {name: _local(path, stores, True) for name, path in record.adapters.items()},
    }
    return record.model_copy(update=changes)


def _with_local(section: Any, local: Callable[[str], str], *keys: str) -> Any:
    named = {key: value for key in keys if (value := getattr(section, key))}
    changes = {key: local(value) for key, value in named.items()}
    return section.model_copy(update=changes) if changes != named else section


def _local(path: str, stores: Stores, weights_only: bool = False) -> str:
    if is_url(path):
        return fetch_model(path, stores, weights_only=weights_only)
    return find_model(path)


def fetch_model(url: str, stores: Stores | None = None, *, weights_only: bool = False) -> str:
    """Return the folder in this machine's cache with the files of a URL, held by this process.

    It is named after the digest of the store's listing: names, sizes and tags. Raises StorageError,
    ModelError.
    """
    store = stores.open(url) if stores else UrlStore(url)
    files = [file for file in store.objects() if not (weights_only and is_state(file.name))]
    if not files:
        raise ModelError(
            f"there are no files of a model at {url}",
            hint="check its spelling, and which bucket the pool's machines reach",
        )
    content = hashlib.sha256(repr([store.url, *(file[:3] for file in files)]).encode()).hexdigest()
    if not _caches:
        _caches.append(FolderCache.of_machine())
    num_bytes = sum(file.num_bytes for file in files)
    place = _caches[0].hold(content, num_bytes, lambda target: fetch_tree(store, "", files, target))
    _fetched[str(place)] = url
    return str(place)


def url_of(folder: str) -> str | None:
    """Return the URL of a folder that this process fetched, else None."""
    return _fetched.get(folder)


def base_here(adapter: str, base: str) -> str:
    """Return the base of an adapter: a fetched folder if both are named by URL.

    A URL in any other adapter is not fetched, since users can write it, and this machine's keys
    would be used. Raises StorageError, ModelError.
    """
    if not is_url(base) or adapter not in _fetched:
        return held_models.shown(base)
    return next((here for here, url in _fetched.items() if url == base), None) or fetch_model(base)
