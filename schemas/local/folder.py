"""Access of services to folders that jobs can write: no links, regular files, bounded sizes.

Code of a job's owner may have made anything below the folder of a run: links, devices, pipes, files
without an end. Code outside of that job's sandbox must open each name there relative to its folder,
follow no link, and open only regular files of a bounded size. Product code does so only through
`Folder` (a test checks this). A link anywhere in a path raises OSError (ENOTDIR or ELOOP), and is
never written through.
"""

import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import BinaryIO, Self

from ..wire.errors import StorageError

MAX_FILES = 100_000
"""Maximum number of files in a folder's tree."""
MAX_DEPTH = 16
"""Maximum depth of a folder's tree."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_ANY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY_BYTES = 1 << 22
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A regular file or a folder below a `Folder`."""

    path: str
    """Relative to the folder, joined by `/`."""
    is_folder: bool
    num_bytes: int
    changed: float
    """Seconds since the epoch."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]


class Folder:
    """An open folder; all names are relative to it and cannot leave it.

    Parts of names are joined by `/`. An absolute name or one with `..` raises ValueError. Methods
    raise OSError, as functions of `os` do.
    """

    _fd = -1

    def __init__(self, path: str | Path, *, make: bool = False) -> None:
        """Open a folder, which may not be a link; with `make`, create it and its parents."""
        if make:
            Path(path).mkdir(parents=True, exist_ok=True)
        self.path = Path(path)
        """Its path when it was opened: for messages only, not for opening."""
        self._fd = os.open(path, _FOLDER)

    @classmethod
    def held(cls, path: str | Path) -> Self:
        """Open a folder whose path may have links; they are followed now and never again.

        Its `path` is the real one, so what is decided on it holds for what was opened. Raises
        OSError, also if a link has taken the place of a part meanwhile.
        """
        folder = cls.__new__(cls)
        folder._fd, folder.path = hold(path, _FOLDER)
        return folder

    def __enter__(self) -> Self:
        """Return the folder."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the folder; harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """Close the folder with the last of what holds it."""
        self.close()

    def fileno(self) -> int:
        """Return the descriptor of the folder, which closes with it."""
        return self._fd

    def open(self, name: str, *, max_bytes: int | None = None) -> BinaryIO:
        """Open a regular file to read.

        Raises StorageError for anything except a regular file of at most `max_bytes`.
        """
        with self._parent(name) as (parent, last):
            fd = os.open(last, os.O_RDONLY | _FILE, dir_fd=parent)
        try:
            self._check_regular(fd, name, max_bytes)
            return os.fdopen(fd, "rb")
        except BaseException:
            os.close(fd)
            raise

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the bytes of a regular file of at most `max_bytes`; raises as `open`."""
        with self.open(name, max_bytes=max_bytes) as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:  # it has grown since
            raise self._too_large(name, len(data), max_bytes)
        return data

    def status(self, name: str) -> os.stat_result:
        """Return the status of a name; of a link, that of the link itself."""
        with self._parent(name) as (parent, last):
            return os.stat(last, dir_fd=parent, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Return whether the name exists, as a file of any kind."""
        try:
            self.status(name)
        except OSError:
            return False
        return True

    def has_folder(self, name: str) -> bool:
        """Return whether a name is a folder, not a link to one."""
        try:
            return stat.S_ISDIR(self.status(name).st_mode)
        except OSError:
            return False

    def entries(self, name: str = ".") -> list[FolderEntry]:
        """Return the regular files and folders of one folder, sorted by name.

        Names that are not UTF-8 are skipped. Raises StorageError for more than `MAX_FILES`.
        """
        with self.folder(name) as inner, os.scandir(inner.fileno()) as scanned:
            listed = [_entry(item) for item in itertools.islice(scanned, MAX_FILES + 1)]
        if len(listed) > MAX_FILES:
            raise self._too_much(name)
        below = "" if name == "." else f"{name}/"
        entries = (_moved(entry, below) for entry in listed if entry is not None)
        return sorted(entries, key=lambda entry: entry.path)

    def names(self) -> Iterator[str]:
        """Yield the names of its direct contents, in any number, unordered."""
        with os.scandir(self.fileno()) as scanned:
            yield from (item.name for item in scanned)

    def files(self, name: str = ".") -> Iterator[FolderEntry]:
        """Yield the regular files at any depth below a folder, in order.

        Raises StorageError for more than `MAX_FILES` or deeper than `MAX_DEPTH`.
        """
        waiting, num_files = [(name, 0)], 0
        while waiting:
            here, depth = waiting.pop()
            inside = self.entries(here)
            num_files += len(inside)
            if num_files > MAX_FILES or depth > MAX_DEPTH:
                raise self._too_much(name)
            yield from (entry for entry in inside if not entry.is_folder)
            waiting += [(entry.path, depth + 1) for entry in reversed(inside) if entry.is_folder]

    def strange(self, allowed: Sequence[str] = ()) -> Iterator[str]:
        """Yield paths of neither regular files nor folders, at any depth, except `allowed` names.

        Names that are not UTF-8 are yielded with their bytes escaped. Raises StorageError as
        `files` does.
        """
        for here in [".", *self._folders(".")]:
            with self.folder(here) as inner, os.scandir(inner.fileno()) as scanned:
                for item in scanned:
                    path = item.name if here == "." else f"{here}/{item.name}"
                    if _entry(item) is None and path not in allowed:
                        yield os.fsencode(path).decode(errors="backslashreplace")

    def _folders(self, name: str, depth: int = 0) -> Iterator[str]:
        if depth > MAX_DEPTH:
            raise StorageError(f"{self.path / name} lies more than {MAX_DEPTH} folders deep")
        for entry in self.entries(name):
            if entry.is_folder:
                yield entry.path
                yield from self._folders(entry.path, depth + 1)

    def folder(self, name: str, *, make: bool = False) -> "Folder":
        """Open a folder below this one; with `make`, create it and its parents."""
        fd = os.dup(self._fd)
        try:
            for part in _parts(name):
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fd)
                inner = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        opened = Folder.__new__(Folder)
        opened.path, opened._fd = self.path / name, fd
        return opened

    def create(self, name: str) -> BinaryIO:
        """Create a new file to write; FileExistsError if the name exists."""
        with self._parent(name, make=True) as (parent, last):
            fd = os.open(last, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o666, dir_fd=parent)
        return os.fdopen(fd, "wb")

    def append(self, name: str) -> int:
        """Return a regular file's descriptor for appending and reading; create a missing file."""
        with self._parent(name, make=True) as (parent, last):
            fd = os.open(last, os.O_RDWR | os.O_CREAT | os.O_APPEND | _FILE, 0o666, dir_fd=parent)
        try:
            self._check_regular(fd, name, None)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically, replacing one of the same name."""
        part = f"{name}.{uuid.uuid4().hex[:8]}.part"
        try:
            with self.create(part) as file:
                file.write(data)
            self.rename(part, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(part)
            raise

    def rename(self, name: str, other: str) -> None:
        """Rename a file or folder, replacing a file or an empty folder of the new name."""
        with self._parent(name) as (parent, last), self._parent(other) as (new_parent, new):
            os.rename(last, new, src_dir_fd=parent, dst_dir_fd=new_parent)

    def unlink(self, name: str) -> None:
        """Remove a file, or a link itself; harmless when it is gone."""
        with contextlib.suppress(FileNotFoundError), self._parent(name) as (parent, last):
            os.unlink(last, dir_fd=parent)

    def remove(self, name: str) -> None:
        """Remove a file of any kind, or a folder with its contents; harmless when it is gone.

        The folder may have any depth, names and access rights.
        """
        with contextlib.suppress(FileNotFoundError), self._parent(name) as (parent, last):
            if stat.S_ISDIR(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
                _remove_folder(last, parent)
            else:
                os.unlink(last, dir_fd=parent)

    def copy(
        self,
        name: str,
        target: "Folder",
        place: str,
        *,
        link: bool = False,
        leave_out: Sequence[str] = (),
    ) -> None:
        """Copy the regular files of a folder to a new one of another `Folder`.

        With `link`, files are hard-linked instead if the disk supports it: only for folders of one
        owner, since a write to one then changes the other. Files and folders named in `leave_out`
        are not copied, nor are names that are not UTF-8. Raises FileExistsError if `place` has such
        a file, StorageError for a link or another kind of file, and if the disk lacks room.
        """
        give = _link if link else _copy_file
        with self.folder(name) as source, target.folder(place, make=True) as made:
            for odd in source.strange():
                if source.has(odd) and set(leave_out).isdisjoint(PurePosixPath(odd).parts):
                    raise StorageError(
                        f"{source.path / odd} is a link, or no regular file, and is not copied",
                        hint="copy what it leads to in its place",
                    )
            copied = [e for e in source.files() if set(leave_out).isdisjoint(_parts(e.path))]
            num_bytes, free = sum(entry.num_bytes for entry in copied), _free_bytes(made)
            if not link and num_bytes > free:  # sparse files are written in full
                raise StorageError(
                    f"{self.path / name} has {num_bytes:,} bytes, and there is room for {free:,}",
                    hint="make room on the disk of the run folders",
                )
            for entry in copied:
                with source._parent(entry.path) as here, made._parent(entry.path, True) as there:
                    give(source, entry.path, here, there)

    @contextlib.contextmanager
    def _parent(self, name: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder that contains a name; yields its descriptor and the last part."""
        *above, last = _parts(name) or [""]
        if not last:
            raise ValueError(f"{name!r} names no file below a folder")
        with self.folder("/".join(above) or ".", make=make) as holder:
            yield holder.fileno(), last

    def _check_regular(self, fd: int, name: str, max_bytes: int | None) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(
                f"{self.path / name} is not a regular file",
                hint="remove it: services read and write regular files of a run alone",
            )
        if max_bytes is not None and status.st_size > max_bytes:
            raise self._too_large(name, status.st_size, max_bytes)

    def _too_much(self, name: str) -> StorageError:
        return StorageError(
            f"{self.path / name} holds more than {MAX_FILES:,} files, or folders more than "
            f"{MAX_DEPTH} deep",
            hint="a run folder holds what its learner wrote: remove what else is there",
        )

    def _too_large(self, name: str, num_bytes: int, max_bytes: int) -> StorageError:
        return StorageError(
            f"{self.path / name} has {num_bytes:,} bytes; at most {max_bytes:,} are read",
            hint="remove it, if the run's learner did not write it",
        )


def hold(path: str | Path, flags: int = _ANY) -> tuple[int, Path]:
    """Open a file or folder whose path may have links; return its descriptor and its real path.

    What is decided on that path holds for what was opened, which by default can be mounted but not
    read. Raises OSError, also if a link has taken the place of a part meanwhile.
    """
    real = os.path.realpath(path)
    changed = OSError(errno.ELOOP, "a part of its path has become a link", real)
    try:
        fd = os.open(real, flags)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise changed from error
    at = Path(f"/proc/self/fd/{fd}").readlink()
    if str(at) != real or stat.S_ISLNK(os.fstat(fd).st_mode):
        os.close(fd)
        raise changed
    return fd, at


def is_inside(name: str) -> bool:
    """Return whether a name of a file, joined by `/`, stays in the folder that it is relative to.

    Links are not looked at; `Folder` follows none.
    """
    path = PurePosixPath(name)
    return not (path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts)


def _parts(name: str) -> list[str]:
    parts = list(PurePosixPath(name).parts)
    if parts and not is_inside(name):
        raise ValueError(f"{name!r} leads out of a folder")
    return parts


def _entry(item: "os.DirEntry[str]") -> FolderEntry | None:
    """Return a regular file or folder; None for others, and for names that are not UTF-8."""
    try:
        item.name.encode()
        status = item.stat(follow_symlinks=False)
    except (OSError, UnicodeEncodeError):
        return None
    is_folder = stat.S_ISDIR(status.st_mode)
    if not is_folder and not stat.S_ISREG(status.st_mode):
        return None
    return FolderEntry(item.name, is_folder, status.st_size, status.st_mtime)


def _moved(entry: FolderEntry, below: str) -> FolderEntry:
    return FolderEntry(below + entry.path, entry.is_folder, entry.num_bytes, entry.changed)


def _remove_folder(name: str, parent: int) -> None:
    """Remove a folder with its contents, without following links.

    Subfolders are moved up into it, one level at a time: neither the stack nor the number of open
    files grows with the depth, and an interrupted removal can be repeated.
    """
    fd = _unlocked(name, parent)
    try:
        while folders := _emptied(fd, fd):
            for folder in folders:
                inner = _unlocked(folder, fd)
                try:
                    _emptied(inner, fd)
                finally:
                    os.close(inner)
                _remove_empty(folder, fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


def _emptied(fd: int, top: int) -> list[str]:
    """Remove a folder's files; return the subfolders in `top`, or move those of others there."""
    folders: list[str] = []
    with os.scandir(fd) as scanned:
        for item in scanned:
            if not item.is_dir(follow_symlinks=False):
                os.unlink(item.name, dir_fd=fd)
            elif fd == top:
                folders.append(item.name)
            else:
                os.close(_unlocked(item.name, fd))
                os.rename(item.name, uuid.uuid4().hex, src_dir_fd=fd, dst_dir_fd=top)
    return folders


def _remove_empty(name: str, parent: int) -> None:
    """Remove a folder; if it is not empty after all, leave it for the next round."""
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _unlocked(name: str, parent: int) -> int:
    """Open a folder; if its owner lacks rights to it, grant them."""
    try:
        fd = os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        locked = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{locked}", stat.S_IRWXU)  # noqa: PTH101  no link: a handle
        finally:
            os.close(locked)
        return os.open(name, _FOLDER, dir_fd=parent)
    if os.fstat(fd).st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.fchmod(fd, stat.S_IRWXU)
    return fd


def _link(source: Folder, name: str, here: tuple[int, str], there: tuple[int, str]) -> None:
    try:
        os.link(here[1], there[1], src_dir_fd=here[0], dst_dir_fd=there[0], follow_symlinks=False)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        _copy_file(source, name, here, there)
        return
    # a regular file may have been replaced since it was listed
    if not stat.S_ISREG(os.stat(there[1], dir_fd=there[0], follow_symlinks=False).st_mode):
        os.unlink(there[1], dir_fd=there[0])


def _copy_file(source: Folder, name: str, here: tuple[int, str], there: tuple[int, str]) -> None:
    with source.open(name) as file:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        with os.fdopen(os.open(there[1], flags, 0o666, dir_fd=there[0]), "wb") as copy:
            status = os.fstat(file.fileno())
            left = status.st_size  # if the file is being written, no more than its previous size
            while left and (chunk := file.read(min(left, _COPY_BYTES))):
                left -= copy.write(chunk)
            copy.flush()
            os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))


def _free_bytes(folder: Folder) -> int:
    disk = os.fstatvfs(folder.fileno())
    return disk.f_bavail * disk.f_frsize


_OF_PROCESS = re.compile(r"tinkermq-[a-z]+-([0-9]+)-\w{8}")  # as mkdtemp names


def process_folder(kind: str, root: Path | None = None) -> Path:
    """Make a folder of this process, and remove those of any kind that killed processes have left.

    It is below `root`, by default the temporary folder. Its name has the kind (lower-case letters)
    and the process id. Raises OSError.
    """
    root = root or Path(tempfile.gettempdir())
    for left in root.glob("tinkermq-*"):
        match = _OF_PROCESS.fullmatch(left.name)
        if match is not None and not Path("/proc", match[1]).is_dir():
            shutil.rmtree(left, ignore_errors=True)  # another user's stays
    return Path(tempfile.mkdtemp(prefix=f"tinkermq-{kind}-{os.getpid()}-", dir=root))


@contextlib.contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Make a folder of this process as `process_folder`, and remove it behind the block."""
    folder = process_folder(kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
