"""The description of a sandbox: the mounts, rights and limits of a program.

A `Sandbox` is plain data; `bubblewrap.py` turns it into a command and starts it. It is used for
Python code that a model writes (`interpreters.py`), for programs of agent jobs
(`envs/agents/programs`), for hosted games (`actors/node`) and for functions of users in algorithms
(`actors/training/functions`).

Every sandbox has its own processes, IPC and host name, a user without rights, no new privileges, a
filter of system calls and its own environment. Of the host only the mounts are visible.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

_FIRST_USER, _NUM_USERS = 1 << 30, 1 << 28
_LEAST_USER = 1000
_NUM_MAPPED = 5000
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
SYSTEM_FOLDERS = (*_SYSTEM, "libx32", "etc", "boot")
"""The system's folders in `/`, which programs do not write."""
SYSTEM_ETC = (
    *("alternatives", "ca-certificates", "fonts", "host.conf", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "pki", "protocols"),
    *("services", "ssl", "timezone"),
)
"""Files of /etc that programs read and that name no users or hosts."""


@dataclass(frozen=True)
class Mount:
    """A path in the sandbox, and its content."""

    kind: Literal["read", "write", "device", "tmpfs", "folder", "link"]
    """A file, folder or device of the host, memory, an empty folder, or a symbolic link."""
    path: str
    source: str = ""
    """The path on the host; the target of a link."""
    is_optional: bool = False
    """Skip it if the host does not have it."""
    mode: int = 0o755
    """Mode of a folder or a tmpfs."""
    size_bytes: int = 0
    """Size of a tmpfs; 0: the kernel's default."""
    fd: int | None = None
    """Descriptor of what is mounted, whatever is at its path meanwhile; nothing runs if the sandbox
    shows something else."""


@dataclass(frozen=True)
class Sandbox:
    """The mounts, rights and limits of a program."""

    python: Sequence[str]
    """The command of Python inside, with its options; it runs `inside.py` first."""
    mounts: Sequence[Mount]
    """In the order in which they are mounted; folders above them are made."""
    folder: str
    """The working folder."""
    root: Path | None = None
    """A folder of the host that becomes `/`; without one `/` holds the mounts alone."""
    is_read_only: bool = True
    """Whether `/` itself is read-only."""
    has_proc: bool = True
    hostname: str = ""
    """Empty: the host's."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of Python at its start."""
    limits: Mapping[str, int] = field(default_factory=dict[str, int])
    """By the names of setrlimit(2): `NPROC`, `FSIZE`, ..."""
    is_ended_first: bool = True
    """Whether the kernel ends it before other processes when memory runs out."""
    user: int | None = None
    """The user id for a root process; None: another unused one at each start."""
    has_network: bool = False
    """Whether it shares the host's network; else it has an empty one."""
    listens: Sequence[str] = ()
    """`host:port` of its own network where `inside.py` listens; its starter gets the
    sockets."""
    has_internet_sockets: bool = True
    """Whether it may make sockets other than Unix ones."""
    has_memory_files: bool = False
    """Whether it may use memory that no limit counts: unnamed files, System V segments."""


def unprivileged_user() -> int | None:
    """Return an unused user id, another one at each call, for processes that root starts.

    None for a process that is not root, and for one without other user ids.
    """
    if os.getuid() != 0:
        return None
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    end = max(int(line.split()[0]) + int(line.split()[2]) for line in lines)
    if end >= _FIRST_USER + _NUM_USERS:
        return _FIRST_USER + secrets.randbelow(_NUM_USERS)
    # in a container with its own user ids; the last two mean "nobody" and an error
    least = max(_LEAST_USER, end - _NUM_MAPPED)
    return least + secrets.randbelow(end - 2 - least) if end - 2 > least else None


def python_variables() -> dict[str, str]:
    """Return the variables of this process that its interpreter needs to start."""
    return {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}


def readable(path: str | Path, source: str | Path = "", *, is_optional: bool = False) -> Mount:
    """Return the mount of a file or folder that can be read; `source` defaults to `path`."""
    return Mount("read", str(path), str(source or path), is_optional)


def held(path: str | Path, fd: int) -> Mount:
    """Return the mount of an open file or folder that can be read."""
    return Mount("read", str(path), f"/proc/self/fd/{fd}", fd=fd)


def writable(path: str | Path, source: str | Path) -> Mount:
    """Return the mount of a file or folder that can be written."""
    return Mount("write", str(path), str(source))


def memory_folder(path: str, size_bytes: int = 0) -> Mount:
    """Return the mount of a temporary folder that everybody inside can write, in memory."""
    return Mount("tmpfs", path, mode=0o1777, size_bytes=size_bytes)


def system_mounts(names: Iterable[str] = _SYSTEM, *, above: str = "/") -> Iterator[Mount]:
    """Yield the mounts of the system's programs and libraries; links stay links."""
    for name in names:
        path = Path(above, name)
        if path.is_symlink():
            yield Mount("link", str(path), str(path.readlink()))
        else:
            yield readable(path, is_optional=True)


def etc_mounts(names: Iterable[str]) -> Iterator[Mount]:
    """Yield the mounts of files of /etc."""
    yield Mount("folder", "/etc")  # programs also search these for files that are not mounted
    for name in names:
        yield readable(f"/etc/{name}", is_optional=True)


# Use of memory and files, read from /proc without control groups.

Limit: TypeAlias = Literal["memory", "disk"]
"""Name of a limit on all processes of a sandbox together."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
MAX_FILES = 20_000
"""Files in the sandbox's /tmp: each takes memory of the kernel, however short it is."""


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and its running descendants; those that end meanwhile may be left out."""
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        try:
            if (_PROC / str(pid) / "stat").read_text().rpartition(") ")[2][0] in "ZX":
                continue
            yield pid
            for task in (_PROC / str(pid) / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it has ended


def first_child(pid: int) -> int | None:
    """Return the oldest child of a process: in a sandbox's first pid, the program that it runs."""
    try:
        children = (_PROC / str(pid) / "task" / str(pid) / "children").read_text()
    except OSError:  # it has ended
        return None
    return next(map(int, children.split()), None)


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process and all below it."""
    return sum(_resident(descendant) for descendant in descendants(pid))


def filesystem(pid: int, folder: str) -> os.statvfs_result | None:
    """Return how full a folder of a sandbox is; `pid` is a process inside.

    None for a process that has ended, and for one that still has the host's folders, like the first
    process before its sandbox is set up.
    """
    root = _PROC / str(pid) / "root"
    try:
        if root.samefile("/"):
            return None
        return os.statvfs(root / folder)
    except OSError:
        return None


def num_files(pid: int) -> int:
    """Return how many files the /tmp of a sandbox holds; `pid` is a process inside."""
    about = filesystem(pid, "tmp")
    return 0 if about is None else about.f_files - about.f_ffree


def holds_more(first: int, most_bytes: int) -> bool:
    """Whether the processes below `first`, a sandbox's first one, have more memory than a limit.

    Shared memory is first counted for each process, which is cheap; if the sum is over the limit,
    it is counted exactly.
    """
    shared = _shared_memory(first)
    if memory_bytes(first) + shared <= most_bytes:
        return False
    return sum(_proportional(descendant) for descendant in descendants(first)) + shared > most_bytes


def exceeded(first: int, most_bytes: int) -> Limit | None:
    """Return the limit that a sandbox, whose first process is `first`, exceeds, or None."""
    if holds_more(first, most_bytes):
        return "memory"
    return "disk" if num_files(first) > MAX_FILES else None


def _shared_memory(first: int) -> int:
    """Return the bytes in the /dev/shm of a sandbox."""
    about = filesystem(first, "dev/shm")
    return 0 if about is None else (about.f_blocks - about.f_bfree) * about.f_frsize


def cpu_seconds(first: int) -> float:
    """Return the CPU time of a process and all below it, with that of their ended children."""
    ticks = 0
    for pid in descendants(first):
        with contextlib.suppress(OSError, ValueError):
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / _TICKS_PER_S


def _resident(pid: int) -> int:
    """Return the resident memory of one process, 0 for one that has ended."""
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Return a process's memory, with its share of memory that it shares with others.

    If the kernel does not report it, shared memory counts in full.
    """
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return _resident(pid)
