"""One read of a version for all actors of a machine: shared-memory files named by digest.

The first actor that needs some bytes writes them into a file under an exclusive lock (flock),
checks them, and renames the file. The others wait and map it, without reading from the broker. A
mapping holds a shared lock of its file, so the kernel counts the users, and a dead process holds
nothing. A waiting actor takes over the unfinished file of a dead writer at once. Actors wait for a
hanging writer no longer than `_WAIT_S` plus the time of a slow transfer; then each actor reads for
itself, as it does without shared memory or room.

The folder belongs to one system user, and no other user can read or write there; processes of the
same user could trace each other anyway. The writer checks the bytes, and a named file is never
written again. Mappings are private: a write to one does not affect others. The learner copies a
version into a file here before its digest is known (`draft`), so it needs no other copy, and reads
it part by part, unmapping each part after reading. Unmapped files are removed some time after the
last request, by requesting actors and by the node when an actor ends.
"""

import asyncio
import contextlib
import fcntl
import mmap
import os
import re
import stat
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

import structlog

from ...schemas.local.process import finish, owned
from ...schemas.wire.subjects import JobScope

MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108  a file system of memory is what is wanted
_HALF = ".half"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART_BYTES = 16 << 20
_LEAST_BYTES = 1 << 20
"""Smaller payloads are fetched without a lookup."""
_WAIT_S = 10.0
_SLOWEST_BYTES_PER_S = 100e6
_POLL_S = 0.01
_KEEP_S = 30.0
_FREE_SHARE = 0.5
"""The largest share of the free memory for one version."""
Fill = Callable[[memoryview], Awaitable[None]]
"""`await fill(buffer)` writes the bytes, checked, into a buffer of their size."""
_log = structlog.get_logger()


class MappedFile(mmap.mmap):
    """The bytes of a file that other processes of this user can map, too."""

    path: Path
    """Its path while mapped; in a shared folder, until it is removed."""
    is_in_memory = False
    """Whether it is in host memory, where reading cannot fail."""
    is_draft = False
    """Whether it does not yet have the name under which others find it."""


class MappedParts(Sequence[memoryview]):
    """The bytes of a mapped file in parts; a part is unmapped when the next one is read."""

    def __init__(self, mapped: MappedFile) -> None:
        """Hold parts of `mapped`, as views."""
        self._mapped = mapped

    def __len__(self) -> int:
        """Return the number of parts."""
        return -(-len(self._mapped) // _PART_BYTES)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        """Return one part or several, which stay in memory."""
        views = [memoryview(self._mapped)[start : start + _PART_BYTES] for start in self._starts()]
        return views[index]

    def __iter__(self) -> Iterator[memoryview]:
        """Yield each part, and unmap its pages afterwards."""
        for start in self._starts():
            part = memoryview(self._mapped)[start : start + _PART_BYTES]
            yield part
            self._mapped.madvise(mmap.MADV_DONTNEED, start, len(part))

    def _starts(self) -> range:
        return range(0, len(self._mapped), _PART_BYTES)


def whole_file(views: Sequence[memoryview]) -> MappedFile | None:
    """Return the mapped file that consists of the views, in order; None if there is none."""
    mapped = views[0].obj if views else None
    if not isinstance(mapped, MappedFile):
        return None
    return mapped if sum(map(len, views)) == len(mapped) else None


def in_parts(views: Sequence[memoryview]) -> Sequence[memoryview]:
    """Return the same bytes; bytes of a mapped file in parts, to save memory."""
    mapped = whole_file(views)
    return views if mapped is None else MappedParts(mapped)


def place_of(view: memoryview) -> tuple[Path, int] | None:
    """Return the file of a `MappedFile` view, and the view's first byte in it; else None."""
    import numpy as np

    mapped = view.obj
    if not isinstance(mapped, MappedFile) or not len(view):
        return None
    start: int = np.frombuffer(mapped, np.uint8).ctypes.data
    return mapped.path, np.frombuffer(view, np.uint8).ctypes.data - start


def is_in_memory(view: memoryview) -> bool:
    """Whether a view is in a `MappedFile` in host memory."""
    return isinstance(view.obj, MappedFile) and view.obj.is_in_memory


class SharedMemory:
    """Versions of a job in the shared memory of this machine."""

    def __init__(
        self,
        scope: JobScope,
        max_bytes: int,
        *,
        root: Path = MEMORY_FOLDER,
        wait_s: float = _WAIT_S,
    ) -> None:
        """Use at most `max_bytes` for the job; with 0, share nothing."""
        self._prefix = f"{scope.key}."
        self._max_bytes = max_bytes
        self._root = root
        self._wait_s = wait_s

    async def get(self, digest: str, num_bytes: int, fill: Fill) -> memoryview:
        """Return the bytes of a digest, from another actor or else from `fill`.

        Raises what `fill` raises.
        """

        async def write(half: UnfinishedFile) -> None:
            await fill(await finish(asyncio.to_thread(half.buffer)))

        shared = await self._shared(digest, num_bytes, write)
        return await _made(num_bytes, fill) if shared is None else shared

    async def offer(self, digest: str, views: Sequence[memoryview]) -> memoryview | None:
        """Share bytes of a digest with the others; return them, or None if they are not shared.

        For the learner, which has the bytes before they are sent. A draft is only renamed.
        """
        mapped = whole_file(views)
        if mapped is not None and mapped.is_draft:
            return await asyncio.to_thread(self._name, mapped, digest)

        async def write(half: UnfinishedFile) -> None:
            await finish(asyncio.to_thread(half.write, views))  # before its descriptor is closed

        return await self._shared(digest, sum(len(view) for view in views), write)

    def draft(self, num_bytes: int) -> "UnfinishedFile | None":
        """Return a file for a version of unknown digest; None without room.

        Pass its `finished` to `offer`, once, when the digest is known.
        """
        if not _LEAST_BYTES <= num_bytes <= self._max_bytes:
            return None
        try:
            with _as_not_shared():
                folder = own_folder(self._root)
                sweep(root=self._root)
                place = folder / f"{self._prefix}{uuid.uuid4().hex}"
                lock = _claimed(place)
                assert lock is not None  # no other process has this name
                half = self._begun(place, lock, num_bytes)
                half.reserve()
                return half
        except _NotShared as error:
            _log.info("memory_not_shared", reason=str(error))
            return None

    def _name(self, draft: MappedFile, digest: str) -> memoryview | None:
        """Rename a draft to its digest, so that others find it."""
        place = own_folder(self._root) / f"{self._prefix}{digest}"
        try:
            _half(draft.path).rename(place)
        except OSError as error:
            _log.info("memory_not_shared", reason=str(error))
            return None
        draft.path, draft.is_draft = place, False
        return memoryview(draft)

    async def _shared(
        self, digest: str, num_bytes: int, write: "Callable[[UnfinishedFile], Awaitable[None]]"
    ) -> memoryview | None:
        if not _LEAST_BYTES <= num_bytes <= self._max_bytes or not _DIGEST.fullmatch(digest):
            return None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s + num_bytes / _SLOWEST_BYTES_PER_S
        try:
            while loop.time() < deadline:
                begin = asyncio.to_thread(self._map_or_begin, digest, num_bytes)
                shared = await owned(begin, _give_up)
                if isinstance(shared, UnfinishedFile):
                    return await shared.written(write)
                if shared is not None:
                    return shared
                await asyncio.sleep(_POLL_S)
        except _NotShared as error:
            _log.info("memory_not_shared", reason=str(error))
        return None

    def _map_or_begin(self, digest: str, num_bytes: int) -> "memoryview | UnfinishedFile | None":
        """Return the bytes, or the unfinished file to write; None: another actor writes it."""
        with _as_not_shared():
            folder = own_folder(self._root)
            sweep(root=self._root)
            place = folder / f"{self._prefix}{digest}"
            mapped = _mapped(place, num_bytes)
            if mapped is not None:
                return mapped
            lock = _claimed(place)
            if lock is None:
                return None
            return self._begun(place, lock, num_bytes)

    def _begun(self, place: Path, lock: int, num_bytes: int) -> "UnfinishedFile":
        """Return a claimed file with room for the bytes; raises _NotShared without room."""
        half = UnfinishedFile(place, lock, num_bytes)
        try:
            self._make_room(place.parent, num_bytes)
        except BaseException:
            half.give_up()
            raise
        return half

    def _make_room(self, folder: Path, num_bytes: int) -> None:
        """Remove unused files until the bytes fit; raises _NotShared if they do not."""
        files = sorted(_files(folder, self._prefix), key=lambda file: file.stat().st_mtime)
        total = num_bytes + sum(file.stat().st_size for file in files)
        for file in files:
            if total <= self._max_bytes:
                break
            size = file.stat().st_size
            total -= size * _removed(file)
        room = os.statvfs(folder)
        if total > self._max_bytes or num_bytes > room.f_bavail * room.f_frsize * _FREE_SHARE:
            raise _NotShared(f"{folder} has no room for {num_bytes:,} bytes")


class _NotShared(Exception):
    """The bytes cannot be shared on this machine."""


class UnfinishedFile:
    """A shared-memory file that this process writes, not yet visible to others."""

    def __init__(self, place: Path, lock: int, num_bytes: int) -> None:
        """`lock` is its descriptor, locked exclusively."""
        self._place = place
        self._lock = lock
        self._num_bytes = num_bytes

    def buffer(self) -> memoryview:
        """Return its memory, reserved so that writing cannot run out of it."""
        with _as_not_shared():
            self.reserve()
            return memoryview(mmap.mmap(self._lock, self._num_bytes))

    def reserve(self) -> None:
        """Reserve its memory, so that writing cannot run out of it."""
        os.posix_fallocate(self._lock, 0, self._num_bytes)

    def write(self, views: Sequence[memoryview]) -> None:
        """Append views, at half the cost of writing through a buffer."""
        with _as_not_shared():
            for view in views:
                start = 0
                while start < len(view):
                    start += os.write(self._lock, view[start : start + _PART_BYTES])

    async def written(self, write: "Callable[[UnfinishedFile], Awaitable[None]]") -> memoryview:
        """Write the file and rename it; return its mapping."""
        try:
            await write(self)
            with _as_not_shared():
                return self._named()
        except BaseException:
            self.give_up()
            raise

    def finished(self) -> memoryview:
        """Return its mapping, before it has the name under which others find it."""
        mapped = self._sealed()
        mapped.is_draft = True
        return memoryview(mapped)

    def _named(self) -> memoryview:
        mapped = self._sealed()
        _half(self._place).rename(self._place)
        return memoryview(mapped)

    def _sealed(self) -> MappedFile:
        """Make it read-only and map it; from now on the mapping holds its lock."""
        os.fchmod(self._lock, stat.S_IRUSR)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        mapped = _map(self._lock, self._num_bytes, self._place)
        os.close(self._lock)
        return mapped

    def give_up(self) -> None:
        """Remove the file; the next actor starts again."""
        with contextlib.suppress(OSError):
            _half(self._place).unlink()
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _give_up(begun: "memoryview | UnfinishedFile | None") -> None:
    if isinstance(begun, UnfinishedFile):
        begun.give_up()


def own_folder(root: Path = MEMORY_FOLDER) -> Path:
    """Return this user's folder, created if missing; OSError if it is not safe."""
    folder = root / f"tinkermq-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def sweep(keep_s: float = _KEEP_S, root: Path = MEMORY_FOLDER) -> None:
    """Remove unmapped files not requested in the last `keep_s`; failures are harmless."""
    with contextlib.suppress(OSError):
        for file in _files(own_folder(root), ""):
            if time.time() - file.stat().st_mtime >= keep_s:
                _removed(file)


async def _made(num_bytes: int, fill: Fill) -> memoryview:
    """Return the bytes in this process's memory; numpy is not imported by a sweeping node."""
    import numpy as np

    buffer = np.empty(num_bytes, np.uint8).data  # not zeroed: it is overwritten anyway
    await fill(buffer)
    return buffer


def _files(folder: Path, prefix: str) -> Iterator[Path]:
    return (file for file in folder.iterdir() if file.name.startswith(prefix))


def _half(place: Path) -> Path:
    return place.with_name(f"{place.name}{_HALF}")


def _mapped(place: Path, num_bytes: int) -> memoryview | None:
    """Map a finished file; None if it does not exist or is being removed."""
    try:
        file = os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(file)
        return memoryview(_map(file, num_bytes, place))
    except BlockingIOError:
        return None
    finally:
        os.close(file)  # the mapping has its own descriptor, and with it the lock


def _map(file: int, num_bytes: int, place: Path) -> MappedFile:
    status = os.fstat(file)
    if status.st_uid != os.geteuid() or status.st_size != num_bytes:
        raise _NotShared(f"{place} has {status.st_size:,} bytes instead of {num_bytes:,}")
    mapped = MappedFile(file, num_bytes, access=mmap.ACCESS_COPY)
    mapped.path, mapped.is_in_memory = place, True
    return mapped


def _claimed(place: Path) -> int | None:
    """Return an abandoned unfinished file, locked; None if it is being written or finished."""
    half = _half(place)
    file = os.open(half, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = half.stat().st_ino == os.fstat(file).st_ino  # else it was renamed meanwhile
        if is_there and not place.exists():
            file, claimed = -1, file
            return claimed
        if is_there:
            half.unlink()
    except (BlockingIOError, FileNotFoundError):
        return None
    finally:
        if file >= 0:
            os.close(file)
    return None


def _removed(file: Path) -> bool:
    """Remove a file unless it is mapped or being written; return whether it was removed."""
    try:
        lock = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(lock)
    return True


@contextlib.contextmanager
def _as_not_shared() -> Iterator[None]:
    """Raise _NotShared if shared memory cannot be used; actors then read for themselves."""
    try:
        yield
    except OSError as error:
        raise _NotShared(str(error)) from error
