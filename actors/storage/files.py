"""Files of checkpoints: digests, which detect damaged files; small records; flushing.

A folder contains `SHA256SUMS` in the format of `sha256sum -c`. Its first line is the digest of the
others, so that a damaged table is noticed, too. A copy may lack the learner's state (`learner/`).
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from ...schemas.local.disk import FREE_SPACE, remedy
from ...schemas.local.folder import Folder, is_inside
from ...schemas.wire.errors import StorageError, StoreAwayError
from .held_models import held_models

TABLE = "SHA256SUMS"
_LEFT_OUT = "learner"
_CHUNK_BYTES = 4 * 2**20
_THREADS = 4
_MAX_SMALL_BYTES = 64 << 20
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
    """Give a folder's weights the permissions of the folder, which come from the umask.

    safetensors makes its files readable for their owner only.
    """
    for file in folder.rglob("*.safetensors"):
        file.chmod(file.parent.stat().st_mode & 0o666)


def check_digests(folder: Path, *, required: bool = False) -> None:
    """Compare a folder's files with its table; without a table nothing is checked.

    This process reads a folder once. Raises StorageError that names a damaged file, StoreAwayError
    for one that cannot be read at the moment and may be undamaged.
    """
    if not (folder / TABLE).is_file():
        if required:
            raise _damaged(folder, TABLE, "is missing")
        return
    with _opened(folder) as opened:
        seen = opened.status(TABLE)
        stamp = (seen.st_mtime_ns, seen.st_ino)
        if _verified.get(folder) == stamp:
            return
        expected = dict(_required(folder))
        with ThreadPoolExecutor(_THREADS) as threads:
            present = list(threads.map(partial(_digest_there, opened), expected))
    for (name, digest), there in zip(expected.items(), present, strict=True):
        if there is None:
            raise _absent(folder, name)
        if there[0] != digest:
            raise _damaged(folder, name, f"differs from what was written ({there[1]:,} bytes)")
    _verified[folder] = stamp


def read_table(folder: Path) -> dict[str, str]:
    """Return the digest of each file in the table of a folder.

    Raises StorageError if it is damaged, or names a file outside of the folder.
    """
    try:
        first, _, body = read_file(folder, TABLE).decode().partition("\n")
    except UnicodeDecodeError as error:
        raise _damaged(folder, TABLE, "is not UTF-8 text") from error
    lines = [_LINE.fullmatch(line) for line in body.splitlines()]
    if first != _self_of(body) or None in lines:
        raise _damaged(folder, TABLE, "differs from what was written")
    digests = {line[2]: line[1] for line in lines if line is not None}
    for name in digests:
        if not is_inside(name):
            raise _damaged(folder, TABLE, f"names {name[:200]!r}, which is outside of the folder")
    return digests


def _required(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each required file."""
    for name, digest in read_table(folder).items():
        parents = [parent for parent in Path(name).parents if parent.name == _LEFT_OUT]
        if all((folder / parent).exists() for parent in parents):
            yield name, digest


def _self_of(body: str) -> str:
    return f"{_SELF}{hashlib.sha256(body.encode()).hexdigest()}"


def is_state(name: str) -> bool:
    """Whether a file belongs to the learner's state, which copies may lack."""
    return _LEFT_OUT in PurePosixPath(name).parts[:-1]


def read_file(folder: Path, name: str) -> bytes:
    """Return the bytes of a small file of a checkpoint; raises as `check_digests`."""
    try:
        with _opened(folder) as opened, _file_of(opened, name, _MAX_SMALL_BYTES) as file:
            return file.read(_MAX_SMALL_BYTES)
    except _GONE as error:
        raise _absent(folder, name) from error
    except OSError as error:
        raise _unreadable(folder / name, error) from error


def _opened(folder: Path) -> Folder:
    """Open a folder; only its own path may be a link. Raises OSError."""
    return Folder(folder.resolve())


def _digest_there(folder: Folder, name: str) -> tuple[str, int] | None:
    """Return digest and size of a regular file in a folder; None without one."""
    try:
        with _file_of(folder, name) as file:
            return _digest(file), file.tell()
    except (*_GONE, StorageError):
        return None
    except OSError as error:
        raise _unreadable(folder.path / name, error) from error


def _file_of(folder: Folder, name: str, max_bytes: int | None = None) -> BinaryIO:
    """Open a regular file of a folder; in Hugging Face's cache through the links of its snapshots.

    These lead to `blobs` beside `snapshots`, and no others are followed. Raises as `Folder.open`,
    and NotADirectoryError for other links.
    """
    try:
        return folder.open(name, max_bytes=max_bytes)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        if held_models.has(folder.path):
            return (folder.path / name).open("rb")
        snapshots, blob = folder.path.parent, Path(os.path.realpath(folder.path / name))
        if snapshots.name != "snapshots" or blob.parent != snapshots.with_name("blobs"):
            raise NotADirectoryError(error.errno, error.strerror, name) from error
    with Folder(blob.parent) as blobs:
        return blobs.open(blob.name, max_bytes=max_bytes)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return _digest(file)


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _unreadable(path: Path, error: OSError) -> StoreAwayError:
    """Return the error of a file that may be undamaged: no disk, no rights, too many open files."""
    return StoreAwayError(
        f"{path} cannot be read: {error.strerror}",
        hint="check its disk and its permissions; if that does not help, move its folder away",
    )


def _absent(folder: Path, name: str) -> StorageError:
    """Return the error for a file that is missing, or is not read because it is a link."""
    for part in reversed([Path(name), *Path(name).parents[:-1]]):
        if (folder / part).is_symlink():
            raise StorageError(
                f"checkpoint {folder} cannot be used: {part} is a link, which is not followed",
                hint=f"copy what it leads to in its place: cp -rL {part}",
            )
    return _damaged(folder, name, "is missing")


def _damaged(folder: Path, name: str, how: str) -> StorageError:
    return StorageError(
        f"checkpoint {folder} is damaged: {name} {how}",
        hint="take another checkpoint of the run (`RUN@STEP`), or restore the file",
    )


# -- small JSON files, each written completely or not at all ---------------------------------------


def write_record(file: Path, value: Mapping[str, Any], *, lasting: bool = True) -> None:
    """Write a JSON file; a `lasting` one is on the disk on return. Raises StorageError."""
    hidden = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with hidden.open("w", encoding="utf-8") as opened:
            json.dump(value, opened)
            opened.flush()
            if lasting:
                os.fsync(opened.fileno())
        hidden.rename(file)
    except OSError as error:
        raise StorageError(
            f"{file} cannot be written: {error.strerror}", hint="see the disk of the pool"
        ) from error


def read_record(file: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, None if the file is missing or damaged."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


# -- folders that are synced to disk before they get their names -----------------------------------


@contextlib.contextmanager
def new_folder(
    final: Path, *libraries: type[Exception], digests: bool = True, lasting: bool = True
) -> Iterator[Path]:
    """Yield a hidden folder, which gets its name at the end of the block, or is removed.

    A folder with that name is replaced. A `lasting` one is synced to disk, with `digests` of its
    files. Raises StorageError for errors of the disk, also those of `libraries`.
    """
    hidden = final.with_name(f".{final.name}.writing")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        yield hidden
        permit_as_folder(hidden)
        if lasting:
            if digests:
                write_digests(hidden)
            flush(hidden)
        shutil.rmtree(final, ignore_errors=True)
        hidden.rename(final)
        if lasting:
            flush_entries(final.parent)
    except Exception as error:
        failure = storage_error(final, error, *libraries)  # before disk space is freed again
        shutil.rmtree(hidden, ignore_errors=True)
        if failure is None:
            raise
        raise failure from error


def flush(folder: Path) -> None:
    """Sync a folder and its content to disk, before it gets its final name."""
    for path in (*folder.rglob("*"), folder):
        flush_entries(path)


def flush_entries(path: Path) -> None:
    """Sync the entries of a folder, or the content of a file, to disk; both may be read-only."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def storage_error(
    final: Path, error: Exception, *libraries: type[Exception]
) -> StorageError | None:
    """Return the error of a checkpoint that could not be written; None for any other cause.

    On a full disk libraries raise many kinds of errors; `libraries` are those that are neither
    OSError nor RuntimeError.
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
    """Make hard links of a folder's files in a new folder. Raises OSError, StorageError."""
    shutil.rmtree(target, ignore_errors=True)
    with Folder(source.parent) as here, Folder(target.parent, make=True) as there:
        here.copy(source.name, there, target.name, link=True)
