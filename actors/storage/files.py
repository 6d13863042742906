"""The files of checkpoints: their digests, so that a damaged one is noticed and named; flushing.

`SHA256SUMS` stands in the folder, in the form of `sha256sum`: `sha256sum -c SHA256SUMS` checks it,
too. Its first line is the digest of the others, so that a damaged table is noticed itself. A copy
may leave the learner's state out (`learner/`); what is there must be whole.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from ...schemas.local.disk import FREE_SPACE, remedy
from ...schemas.local.folder import Folder
from ...schemas.wire.errors import StorageError, StoreAwayError

TABLE = "SHA256SUMS"
_LEFT_OUT = "learner"
_CHUNK_BYTES = 4 * 2**20
_THREADS = 4
_SELF = "# sha256 of the lines below: "
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_verified: dict[Path, tuple[int, int]] = {}


def write_digests(folder: Path) -> None:
    """Write the table of a folder's files into it."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != TABLE]
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = list(threads.map(digest_of, paths))
    lines = [
        f"{digest}  {path.relative_to(folder).as_posix()}"
        for digest, path in zip(digests, paths, strict=True)
    ]
    body = "".join(f"{line}\n" for line in lines)
    (folder / TABLE).write_text(f"{_self_of(body)}\n{body}")


def permit_as_folder(folder: Path) -> None:
    """Let those read a folder's weights who may read the folder, which the umask has decided.

    safetensors leaves its files to their owner alone.
    """
    for file in folder.rglob("*.safetensors"):
        file.chmod(file.parent.stat().st_mode & 0o666)


def check_digests(folder: Path, *, required: bool = False) -> None:
    """Compare a folder's files with its table; without one nothing is known, and nothing said.

    What was whole is not read again by this process. Raises StorageError that names a damaged file,
    StoreAwayError one that cannot be read now: such a one may be whole.
    """
    table = folder / TABLE
    if not table.is_file():
        if required:
            raise _damaged(folder, TABLE, "is missing")
        return
    seen = table.stat()
    stamp = (seen.st_mtime_ns, seen.st_ino)
    if _verified.get(folder) == stamp:
        return
    wanted = dict(_wanted(folder))
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = list(threads.map(_digest_there, [folder / name for name in wanted]))
    for (name, digest), there in zip(wanted.items(), digests, strict=True):
        if there is None:
            raise _damaged(folder, name, "is missing")
        if there != digest:
            size = (folder / name).stat().st_size
            raise _damaged(folder, name, f"is not as it was written ({size:,} bytes)")
    _verified[folder] = stamp


def read_table(folder: Path) -> dict[str, str]:
    """Return the digest of each file that the table of a folder names.

    Raises StorageError for a table that is not as it was written.
    """
    try:
        first, _, body = read_file(folder, TABLE).decode().partition("\n")
    except UnicodeDecodeError as error:
        raise _damaged(folder, TABLE, f"cannot be read ({error})") from error
    lines = [_LINE.fullmatch(line) for line in body.splitlines()]
    if first != _self_of(body) or None in lines:
        raise _damaged(folder, TABLE, "is not as it was written")
    return {line[2]: line[1] for line in lines if line is not None}


def _wanted(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each file that has to be there."""
    for name, digest in read_table(folder).items():
        if not _is_left_out(folder, Path(name)):
            yield name, digest


def _self_of(body: str) -> str:
    return f"{_SELF}{hashlib.sha256(body.encode()).hexdigest()}"


def is_state(name: str) -> bool:
    """Whether a file of a checkpoint is of its learner's state, which copies may be without."""
    return _LEFT_OUT in PurePosixPath(name).parts[:-1]


def _is_left_out(folder: Path, name: Path) -> bool:
    parents = [parent for parent in name.parents if parent.name == _LEFT_OUT]
    return any(not (folder / parent).exists() for parent in parents)


def read_file(folder: Path, name: str) -> bytes:
    """Return the bytes of a small file of a checkpoint; raises as `check_digests`."""
    try:
        return (folder / name).read_bytes()
    except _GONE as error:
        raise _damaged(folder, name, "is missing") from error
    except OSError as error:
        raise _unreadable(folder / name, error) from error


def _digest_there(path: Path) -> str | None:
    try:
        return digest_of(path)
    except _GONE:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _unreadable(path: Path, error: OSError) -> StoreAwayError:
    """A disk that is away, rights, too many open files: nothing is known of the file."""
    return StoreAwayError(
        f"{path} cannot be read: {error.strerror}",
        hint="see its disk and its rights; where that stays, move its folder away",
    )


def _damaged(folder: Path, name: str, how: str) -> StorageError:
    return StorageError(
        f"checkpoint {folder} is damaged: {name} {how}",
        hint="take another checkpoint of the run (`RUN@STEP`), or restore the file",
    )


# -- folders that are whole on the disk before they get their names --------------------------------


def flush(folder: Path) -> None:
    """Bring a folder to the disk, with all that is in it, before it gets its final name."""
    for path in (*folder.rglob("*"), folder):
        flush_entries(path)


def flush_entries(path: Path) -> None:
    """Bring to the disk which files a folder has, or what a file holds, which may be read-only."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def storage_error(
    final: Path, error: Exception, *libraries: type[Exception]
) -> StorageError | None:
    """Say why a checkpoint could not be written; None for an error that is not the disk's.

    A full disk makes the libraries raise errors of many kinds: `libraries` are those that are
    neither OSError nor RuntimeError.
    """
    free = shutil.disk_usage(final.parent if final.parent.exists() else Path("/")).free
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or free < 2**20
    if not is_full and not isinstance(error, (OSError, RuntimeError, *libraries)):
        return None
    reason = "the disk is full" if is_full else str(error)
    failure = StorageError(
        f"checkpoint {final} could not be written: {reason} ({free / 2**20:,.0f} MiB free)",
        hint=FREE_SPACE if is_full else remedy(error, final),
    )
    failure.is_full = is_full
    return failure


def link_tree(source: Path, target: Path) -> None:
    """Give all files of a folder a second name in a new folder. Raises OSError, StorageError."""
    shutil.rmtree(target, ignore_errors=True)
    with Folder(source.parent) as here, Folder(target.parent, make=True) as there:
        here.copy(source.name, there, target.name, link=True)
