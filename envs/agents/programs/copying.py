"""Copies of folders: what is in them and nothing else, as large as is allowed and no larger.

Links stay links and are never followed; blocks are shared with the original where the file system
can; what is neither file, folder nor link is left out. The copy has no right that the original
gives by its mode alone (set-user-id).
"""

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from ....schemas.wire.errors import StorageError

_FICLONE = 0x40049409
_CHUNK = 8 << 20


class FolderTooLarge(StorageError):
    """A folder that has no room where its copy is to lie."""


def copy_folder(source: Path, target: Path, most_bytes: int) -> int:
    """Copy what a folder holds into another, empty one; return the bytes copied.

    Raises FolderTooLarge past `most_bytes`, and OSError.
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
    """Copy one file, holes as holes; return the bytes that it takes."""
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
    with contextlib.suppress(OSError):  # another file system, or one that shares no blocks
        fcntl.ioctl(writing, _FICLONE, reading)
        return
    os.truncate(writing, size)
    at = 0
    while at < size:
        try:
            start = os.lseek(reading, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        at = min(os.lseek(reading, start, os.SEEK_HOLE), size)
        os.lseek(writing, start, os.SEEK_SET)
        while start < at:
            sent = os.sendfile(writing, reading, start, min(at - start, _CHUNK))
            if not sent:
                return  # it has become shorter meanwhile
            start += sent
