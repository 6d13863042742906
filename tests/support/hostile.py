"""What a program tries that wants out of its sandbox; nothing of the machine is changed by it.

Settings are only written back as they were read, or opened and left alone, and each try runs in a
process of its own. `count()` says how many came off; `python -m tests.support.hostile` prints their
names.
"""

import contextlib
import ctypes
import json
import os
import platform
import signal
import socket
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

_NEW_USER, _NEW_MOUNTS, _NEW_PIDS = 0x10000000, 0x00020000, 0x20000000
_PTRACE_ATTACH, _AF_VSOCK = 16, 40
_KEYCTL, _IO_URING, _PERF = 250, 425, 298
_SETTINGS = ("kernel/core_pattern", "vm/swappiness", "kernel/hostname", "net/ipv4/ip_forward")


def count() -> int:
    """Return how many of the tries came off."""
    return len(successes())


def successes() -> list[str]:
    """Return the names of the tries that came off."""
    return [name for name, attempt in _ATTEMPTS.items() if _comes_off(attempt)]


def _comes_off(attempt: Callable[[], object]) -> bool:
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            attempt()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _call(name: str, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    answer = getattr(libc, name)(*arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), name)
    return answer


def _write_back(path: str) -> None:
    text = Path(path).read_text()
    Path(path).write_text(text)


def _open_to_write(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY))


def _write_any_of_sys() -> None:
    for folder, _, names in os.walk("/sys"):
        for name in names:
            if os.access(f"{folder}/{name}", os.W_OK):
                return
    raise OSError("nothing there can be written")


def _mount(kind: bytes) -> Path:
    folder = Path(tempfile.mkdtemp())
    try:
        _call("mount", kind, bytes(folder), kind, 0, None)
    except OSError:
        folder.rmdir()
        raise
    return folder


def _mount_and_leave() -> None:
    folder = _mount(b"tmpfs")
    _call("umount2", bytes(folder), 2)
    folder.rmdir()


def _settings_by_a_proc_of_its_own() -> None:
    _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_PIDS)
    if _comes_off(lambda: _write_back(f"{_mount(b'proc')}/sys/vm/swappiness")):
        return
    raise OSError("refused")


def _become_root() -> None:
    os.setresuid(0, 0, 0)
    os.close(os.open("/proc/1/environ", os.O_RDONLY))


def _trace_another() -> None:
    child = os.fork()
    if not child:
        signal.pause()
    try:
        _call("ptrace", _PTRACE_ATTACH, child, 0, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _read_others() -> None:
    """Read what a process was given, or has open, that is not of the same program."""
    own = Path("/proc/self/cmdline").read_bytes()
    for one in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (one / "cmdline").read_bytes()
            if line == own or b"bwrap" in line:
                continue
            if (one / "environ").read_bytes() or list((one / "fd").iterdir()):
                return
    raise OSError("nothing of others can be read")


def _make_device() -> None:
    path = Path(tempfile.mktemp())
    os.mknod(path, 0o020600, os.makedev(1, 3))
    path.unlink()


_NUMBERS = {
    "x86_64": {"open": 2, "creat": 85, "chmod": 90, "mknod": 133, "mknodat": 259},
    "aarch64": {"mknodat": 33},
}[platform.machine()]
"""Of system calls; those that are numbered alike everywhere stand where they are made."""
_FCHMODAT2, _OPENAT2, _HERE = 452, 437, -100
_OWN_ID, _OWN_GROUP = 0o4755, 0o2755
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY


def _set_id(make: Callable[[str], object]) -> None:
    """Make a file that whoever runs it runs as its owner or group."""
    path = Path(tempfile.mktemp())
    try:
        make(str(path))
        if path.stat().st_mode & 0o6000 == 0:
            raise OSError("it has an ordinary mode")
    finally:
        path.unlink(missing_ok=True)


def _changed(change: Callable[[str], object]) -> Callable[[], None]:
    """Return what changes the mode of a new file."""

    def make(path: str) -> None:
        Path(path).touch()
        change(path)

    return lambda: _set_id(make)


def _fchmod(path: str) -> None:
    with Path(path).open() as file:
        os.fchmod(file.fileno(), _OWN_ID)


def _nameless(path: str) -> None:
    file = os.open(Path(path).parent, os.O_TMPFILE | os.O_WRONLY, _OWN_ID)
    os.link(f"/proc/self/fd/{file}", path, follow_symlinks=True)


def _by_openat2(path: str) -> None:
    how = struct.pack("=QQQ", _NEW, _OWN_ID, 0)
    _call("syscall", _OPENAT2, _HERE, path.encode(), how, len(how))


def _raw(name: str, *arguments: object) -> int:
    if name not in _NUMBERS:
        raise OSError(f"there is no {name} here")
    return _call("syscall", _NUMBERS[name], *arguments)


_SET_IDS: dict[str, Callable[[], object]] = {
    "chmod": _changed(lambda path: Path(path).chmod(_OWN_ID)),
    "chmod to the group": _changed(lambda path: Path(path).chmod(_OWN_GROUP)),
    "chmod by number": _changed(lambda path: _raw("chmod", path.encode(), _OWN_ID)),
    "fchmod": _changed(_fchmod),
    "fchmodat2": _changed(
        lambda path: _call("syscall", _FCHMODAT2, _HERE, path.encode(), _OWN_ID, 0)
    ),
    "open": lambda: _set_id(lambda path: os.open(path, _NEW, _OWN_ID)),
    "open by number": lambda: _set_id(lambda path: _raw("open", path.encode(), _NEW, _OWN_ID)),
    "creat": lambda: _set_id(lambda path: _raw("creat", path.encode(), _OWN_ID)),
    "open without a name": lambda: _set_id(_nameless),
    "openat2": lambda: _set_id(_by_openat2),
    "mknod": lambda: _set_id(lambda path: os.mknod(path, stat.S_IFREG | _OWN_ID)),
    "mknod by number": lambda: _set_id(
        lambda path: _raw("mknod", path.encode(), stat.S_IFREG | _OWN_ID, 0)
    ),
    "mknodat": lambda: _set_id(
        lambda path: _raw("mknodat", _HERE, path.encode(), stat.S_IFREG | _OWN_GROUP, 0)
    ),
}

_ATTEMPTS: dict[str, Callable[[], object]] = {
    **{f"write {one}": lambda one=one: _write_back(f"/proc/sys/{one}") for one in _SETTINGS},
    "open sysrq-trigger": lambda: _open_to_write("/proc/sysrq-trigger"),
    "write below /sys": _write_any_of_sys,
    "mount": _mount_and_leave,
    "make a user namespace": lambda: _call("unshare", _NEW_USER),
    "make a mount namespace": lambda: _call("unshare", _NEW_MOUNTS),
    "write settings by another /proc": _settings_by_a_proc_of_its_own,
    "become root": _become_root,
    "trace another process": _trace_another,
    "read files of other processes": _read_others,
    "make a device": _make_device,
    "change the root": lambda: os.chroot("/tmp"),
    "raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3),
    "socket to the hypervisor": lambda: socket.socket(_AF_VSOCK, socket.SOCK_STREAM),
    "keys of the kernel": lambda: _call("syscall", _KEYCTL, 0, -3, 0),
    "rings of the kernel": lambda: _call("syscall", _IO_URING, 1, ctypes.create_string_buffer(120)),
    "write programs": lambda: _open_to_write("/usr/bin/env"),
    "write users": lambda: _open_to_write("/etc/passwd"),
    **{f"set the owner's number by {name}": attempt for name, attempt in _SET_IDS.items()},
}

if __name__ == "__main__":
    print(json.dumps(successes()))
