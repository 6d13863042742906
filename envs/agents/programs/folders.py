"""The folders of a host's programs: a new one for each try.

All are in one folder that only the host's user can open and that is locked while the host runs; the
next host on the machine removes the folder of a host that was killed.

A copy of a folder has at most a given size. Links stay links and are never followed. Blocks are
shared with the original if the file system supports it. Only files, folders and links are copied.
The copy has no set-user-id bits.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ....schemas.wire.errors import ConfigError, SandboxError, StorageError
from ...sandbox.sandbox import unprivileged_user

_PREFIX = "tinkermq-programs-"
_PARTS = ("work", "tmp", "home", "task")
_NOBODY = 65534
_LOCK = "lock"
_READABLE = 0o005
_FICLONE = 0x40049409
_CHUNK = 8 << 20


class FolderTooLarge(StorageError):
    """A folder that is larger than the room for its copy."""


class RootFiles(NamedTuple):
    """Files of a task's environment besides the system's folders."""

    template: Path
    """The folder that becomes `/`."""
    writable: tuple[str, ...]
    """Writable paths, without the first slash; each program gets a copy."""


class FolderUsage(NamedTuple):
    """The size of a program's folders."""

    num_bytes: int
    num_files: int


class ProgramFolder:
    """The writable folders of one program: its folder, its temporary folder and its home."""

    def __init__(self, path: Path, user: int | None) -> None:
        self.path = path
        self.user = user
        """The user that owns it and that the program runs as; None: the host's."""
        self._parts: list[str] = list(_PARTS)

    def __getitem__(self, part: str) -> Path:
        """Return the path of a part on the host: `work`, `tmp`, `home`, `task`, `etc` or `root`."""
        return self.path / part

    def make(self, files: Path | None, most_bytes: int, root: RootFiles | None = None) -> None:
        """Make its parts; `work` becomes a copy of `files`, and `root` of a task's environment.

        Raises FolderTooLarge for files that exceed the program's room.
        """
        self.path.mkdir(mode=0o700)
        for part in _PARTS:
            self[part].mkdir(mode=0o700)
        if files is not None:
            copy_folder(files, self["work"], most_bytes)
        if root is not None:
            self._make_root(root, most_bytes)
        self._make_etc()
        self.give_away(*_PARTS)

    def add(self, part: str, files: Path | None = None, most_bytes: int = 0) -> None:
        """Make another part, a copy of `files`, before or after the program runs."""
        self[part].mkdir(mode=0o700)
        self._parts.append(part)
        if files is not None:
            copy_folder(files, self[part], most_bytes)

    def clear_root(self) -> None:
        """Remove the links in `/` that an earlier sandbox made: bubblewrap stops at one.

        No program can write `/` itself, so all links there are from sandboxes.
        """
        for entry in os.scandir(self["root"]):
            if entry.is_symlink():
                Path(entry.path).unlink()

    def _make_root(self, root: RootFiles, most_bytes: int) -> None:
        """Copy the writable paths of `/`, and the files in `/` itself."""
        self.add("root")
        self["root"].chmod(0o755)  # the host's own files: programs cannot write `/`
        for entry in os.scandir(root.template):
            if entry.is_file(follow_symlinks=False):
                _copy_file(entry.path, str(self["root"] / entry.name))
        for name in root.writable:
            target = self["root"] / name
            target.mkdir(parents=True)
            most_bytes -= copy_folder(root.template / name, target, most_bytes)
            self.give_away(f"root/{name}")

    def give_away(self, *parts: str) -> None:
        """Let the program's user own parts of it, before anything runs."""
        if self.user is None:
            return
        waiting = [str(self[part]) for part in parts]
        while waiting:
            folder = waiting.pop()
            os.chown(folder, self.user, self.user)
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    os.lchown(entry.path, self.user, self.user)

    def usage(self, most_files: int) -> FolderUsage:
        """Return its present size, counting few more files than `most_files`.

        Files that vanish meanwhile do not count; folders that are too deep count as too large.
        """
        num_bytes = num_files = 0
        waiting = [str(self[part]) for part in self._parts]
        while waiting and num_files <= most_files:
            try:
                entries = list(os.scandir(waiting.pop()))
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    return FolderUsage(num_bytes, most_files + 1)
                continue
            num_files += len(entries)
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                with contextlib.suppress(OSError):
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        return FolderUsage(num_bytes, num_files)

    def read(self, part: str, name: str, most_bytes: int) -> bytes | None:
        """Return the beginning of a file that a program wrote; None without one."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(self[part] / name, flags)  # a link would lead out of the sandbox
        except OSError:
            return None
        try:
            is_file = stat.S_ISREG(os.fstat(file).st_mode)
            return os.read(file, most_bytes) if is_file else None
        finally:
            os.close(file)

    def remove(self) -> None:
        """Remove it after its last process has ended."""
        remove_tree(self.path)

    def _make_etc(self) -> None:
        """Write a list of users with the program's own, instead of the host's."""
        number = _NOBODY if self.user is None else self.user
        etc = self["etc"]
        etc.mkdir(mode=0o755)
        (etc / "passwd").write_text(
            f"root:x:0:0:root:/:/bin/sh\nagent:x:{number}:{number}:agent:/episode/home:/bin/sh\n"
        )
        (etc / "group").write_text(f"root:x:0:\nagent:x:{number}:\n")
        (etc / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")


class ProgramFolders:
    """The folder of all programs of a host."""

    def __init__(self) -> None:
        """Make the folder, and remove those of killed hosts; raises OSError."""
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        new = self.path / "new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)  # the file is locked before it gets its name
        self._number = 0

    def new(self, user: int | None = None) -> ProgramFolder:
        """Return a new folder, for an unused user id or a given one."""
        self._number += 1
        return ProgramFolder(self.path / str(self._number), user or unprivileged_user())

    def close(self) -> None:
        """Remove all of it."""
        remove_tree(self.path)
        os.close(self._lock)


def check_folder(key: str, value: str) -> Path:
    """Return the path of a folder in the configuration; ConfigError if it does not exist."""
    path = Path(value).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(
            f"{key}={value!r} is not a folder on this host",
            hint="name a folder that every environment host of the job can read",
        )
    if not os.access(path, os.R_OK | os.X_OK):
        raise SandboxError(f"{key}={value!r} cannot be read by this host", hint="see its rights")
    return path.resolve()


def check_shown(key: str, value: str) -> Path:
    """Return the path of a folder that programs read directly; ConfigError if they cannot."""
    path = check_folder(key, value)
    if unprivileged_user() is not None and path.stat().st_mode & _READABLE != _READABLE:
        raise ConfigError(
            f"programs may not read {key}={value!r}: they run as an unused user",
            hint=f"chmod -R o+rX {path}",
        )
    return path


def _sweep(folder: Path) -> None:
    """Remove the folders of this user's killed hosts."""
    for left in folder.glob(f"{_PREFIX}*"):
        if is_own_folder(left):
            with unused(left / _LOCK) as is_unused:
                if is_unused:
                    remove_tree(left)


def is_own_folder(path: Path) -> bool:
    """Return whether a folder belongs to this user; its host may remove it at any moment."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


@contextlib.contextmanager
def unused(file: Path) -> Iterator[bool]:
    """Lock a host's file, and yield whether no other host has locked it; False if there is none."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def place_folder(root: Path, path: str) -> None:
    """Make a folder below `root` as a mount point; ValueError for a link."""
    at = root
    for name in Path(path).parts[1:]:
        at = at / name
        if at.is_symlink() or (at.exists() and not at.is_dir()):
            raise ValueError(f"/{at.relative_to(root)}")
        if not at.exists():
            at.mkdir()
            at.chmod(0o755)  # whatever the umask: programs enter it


def remove_tree(path: Path) -> None:
    """Remove a folder with its contents, however deep."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", str(path)], check=False)


def copy_folder(source: Path, target: Path, most_bytes: int) -> int:
    """Copy the contents of a folder into an empty one; return the bytes copied.

    Raises FolderTooLarge beyond `most_bytes`, and OSError.
    """
    num_bytes = 0
    waiting = [(str(source), str(target))]
    while waiting:
        here, there = waiting.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                copied = f"{there}/{entry.name}"
                if entry.is_symlink():
                    Path(copied).symlink_to(Path(entry.path).readlink())
                elif entry.is_dir():
                    Path(copied).mkdir(mode=0o700)
                    waiting.append((entry.path, copied))
                elif entry.is_file():
                    num_bytes += _copy_file(entry.path, copied)
                if num_bytes > most_bytes:
                    raise FolderTooLarge(f"{source} holds more than {most_bytes >> 20} MiB")
    return num_bytes


def _copy_file(source: str, target: str) -> int:
    """Copy one file with its holes; return its bytes on disk."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    reading = os.open(source, flags)
    try:
        about = os.fstat(reading)
        mode = (stat.S_IMODE(about.st_mode) & 0o777) | stat.S_IRUSR | stat.S_IWUSR
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            os.fchmod(writing, mode)
            _copy_blocks(reading, writing, about.st_size)
            os.utime(writing, ns=(about.st_atime_ns, about.st_mtime_ns))
        finally:
            os.close(writing)
        return min(about.st_blocks * 512, about.st_size)
    finally:
        os.close(reading)


def _copy_blocks(reading: int, writing: int, size: int) -> None:
    with contextlib.suppress(OSError):  # on another file system, or on one that cannot share blocks
        fcntl.ioctl(writing, _FICLONE, reading)
        return
    os.truncate(writing, size)
    at = 0
    while at < size:
        try:
            start = os.lseek(reading, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        at = min(os.lseek(reading, start, os.SEEK_HOLE), size)
        os.lseek(writing, start, os.SEEK_SET)
        while start < at:
            sent = os.sendfile(writing, reading, start, min(at - start, _CHUNK))
            if not sent:
                return  # it has become shorter meanwhile
            start += sent
