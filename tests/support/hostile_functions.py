"""What functions of a job's owner try that want out of their sandbox, and into their learner.

`hostile.py` tries what every program in a sandbox may try; here is what a learner has: the folder
of its run, copies that others read in it, models, a broker. Each try raises where it does not come
off. Those of `_INSIDE_ONLY` would change a machine without a sandbox, so they are not tried there.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import resource
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_X86 = platform.machine() == "x86_64"
_AT_HERE = -100


class Outside(NamedTuple):
    """What is there, outside of the sandbox."""

    run: str
    """The folder of the learner's own run, with `fork/weights` in it."""
    other: str
    """A file in a run of somebody else."""
    secrets: str
    """A file of the pool."""
    model: str
    """A file of a model, which the learner is shown."""
    pid: int
    """A process that has `MARKER` in its environment."""
    port: int
    """Of the loopback interface, where somebody listens."""
    udp: int
    """Where somebody answers datagrams."""
    abstract: str
    """The name of an abstract socket of kind stream."""
    named: str
    """A Unix socket beside the secrets."""


MARKER = "OF-AN-OUTSIDER"
_told: list[Outside] = []


def outside() -> Outside:
    """Return what is there."""
    return _told[0]


def comes_off(attempt: Callable[[], object]) -> bool:
    """Whether a try comes off, in a process of its own."""
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


def _raw(x86: int, arm: int, *arguments: object) -> int:
    return _call("syscall", x86 if _X86 else arm, *arguments)


def _run(*parts: str) -> Path:
    return Path(outside().run, *parts)


def _new(name: str) -> Path:
    path = _run(f"{name}-{os.getpid()}")
    path.unlink(missing_ok=True)
    return path


def _refuse(is_so: object) -> None:
    if not is_so:
        raise OSError(errno.EPERM, "it came to nothing")


def _linked(target: str) -> None:
    link = _new("link")
    link.symlink_to(target)
    try:
        link.read_bytes()
    finally:
        link.unlink()


def _hard(target: str) -> None:
    """Give a file a second name in the run, and write through it."""
    link = _new("hard")
    os.link(target, link)
    try:
        link.open("r+b").close()
    finally:
        link.unlink()


def _renamed(path: str) -> None:
    Path(path).rename(f"{path}-moved")
    Path(f"{path}-moved").rename(path)


def _exchanged() -> None:
    """Put a link in the place of a copy that others read, in one step."""
    link = _new("swap")
    link.symlink_to(Path(outside().secrets).parent)
    try:
        _call("renameat2", _AT_HERE, bytes(link), _AT_HERE, bytes(_run("fork")), 2)
        _call("renameat2", _AT_HERE, bytes(link), _AT_HERE, bytes(_run("fork")), 2)
    finally:
        link.unlink()


def _raced() -> None:
    """Swap a folder for a link and back, while it is written below it."""
    place, aside = _run(f"race-{os.getpid()}"), _run(f"aside-{os.getpid()}")
    place.mkdir()
    wanted = Path(outside().secrets)
    try:
        for _ in range(200):
            place.rename(aside)
            place.symlink_to(wanted.parent)
            with contextlib.suppress(OSError):
                (place / wanted.name).read_bytes()
                return
            place.unlink()
            aside.rename(place)
    finally:
        if place.is_symlink():
            place.unlink()
            aside.rmdir()
        else:
            place.rmdir()
    raise OSError(errno.EPERM, "nothing was read")


def _latest() -> None:
    """Write through `checkpoints/latest`, as one who reads checkpoints would follow it."""
    folder = _run(f"checkpoints-{os.getpid()}")
    folder.mkdir()
    latest = folder / "latest"
    latest.symlink_to(Path(outside().secrets).parent)
    try:
        (latest / "written").write_text("through")
        (latest / "written").unlink()
    finally:
        latest.unlink()
        folder.rmdir()


def _of_process(name: str) -> Callable[[], None]:
    def attempt() -> None:
        data = Path(f"/proc/{outside().pid}/{name}").read_bytes()
        _refuse(MARKER.encode() in data)

    return attempt


def _by_root(pid: str) -> Callable[[], bytes]:
    return lambda: Path(f"/proc/{pid}/root{outside().secrets}").read_bytes()


def _pidfd() -> None:
    os.close(os.pidfd_open(outside().pid))


def _read_memory() -> None:
    buffer = ctypes.create_string_buffer(8)
    one = struct.pack("=QQ", ctypes.addressof(buffer), 8)
    _raw(310, 270, outside().pid, one, 1, one, 1, 0)


def _connected(family: int, address: object, kind: int = socket.SOCK_STREAM) -> None:
    with socket.socket(family, kind) as one:
        one.settimeout(3)
        one.connect(address)  # type: ignore[arg-type]


def _answered() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(1)
        one.sendto(b"?", ("127.0.0.1", outside().udp))
        one.recv(1)


def _own_address() -> None:
    _connected(socket.AF_INET, (socket.gethostbyname(socket.gethostname()), outside().port))


def _reach(family: int, host: str) -> Callable[[], None]:
    return lambda: _connected(family, (host, 53), socket.SOCK_DGRAM)


def _low_port() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 79))


def _interface() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        fcntl.ioctl(one, 0x8914, request)  # SIOCSIFFLAGS: take it down


def _route() -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as one:
        body = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 4, 0, 1, 0)
        one.send(struct.pack("=IHHII", 16 + len(body), 24, 0x605, 1, 0) + body)
        answer = one.recv(4096)
        _refuse(struct.unpack("=i", answer[16:20])[0] == 0)


def _family(number: int) -> Callable[[], None]:
    return lambda: socket.socket(number, socket.SOCK_RAW if number == 15 else 5).close()


def _device(kind: int, major: int, minor: int) -> None:
    path = _new("device")
    os.mknod(path, kind | 0o600, os.makedev(major, minor))
    path.unlink()


def _opened(path: str, flags: int = os.O_RDWR) -> None:
    os.close(os.open(path, flags))


def _group_of_control() -> None:
    for folder in Path("/sys/fs/cgroup").rglob("cgroup.procs"):
        _opened(str(folder), os.O_WRONLY)
        return
    raise OSError(errno.ENOENT, "there is none")


def _capability() -> None:
    path = _new("capable")
    path.touch()
    try:
        data = struct.pack("=IIIII", 0x02000001, 1 << 21, 0, 0, 0)
        os.setxattr(path, "security.capability", data)
    finally:
        path.unlink()


def _trusted() -> None:
    path = _new("trusted")
    path.touch()
    try:
        os.setxattr(path, "trusted.overlay.opaque", b"y")
    finally:
        path.unlink()


def _given_away() -> None:
    path = _new("given")
    path.touch()
    try:
        os.chown(path, os.getuid() + 1, -1)
    finally:
        path.unlink()


def _more_rights() -> None:
    head, data = (ctypes.c_uint * 2)(0x20080522, 0), (ctypes.c_uint * 6)(1 << 21, 1 << 21)
    _call("capset", head, data)


def _handle() -> None:
    """Open what a handle names, past every mount."""
    handle = ctypes.create_string_buffer(struct.pack("=Ii", 8, 1) + bytes(8))
    root = os.open(outside().run, os.O_RDONLY)
    try:
        _raw(304, 265, root, handle, 0)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.EINVAL):
            raise  # those say that it was looked for


def _cloned() -> None:
    child = _raw(56, 220, 0x10000000 | 17, 0, 0, 0, 0)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def _joined(name: str) -> None:
    fd = os.open(f"/proc/{outside().pid}/ns/{name}", os.O_RDONLY)
    _raw(308, 268, fd, 0)


def _inherited() -> None:
    """Find a descriptor that leads out."""
    for held in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            fd = int(held.name)
            if fd > 2 and stat.S_ISDIR(os.fstat(fd).st_mode):
                os.stat("../" * 32 + outside().secrets.lstrip("/"), dir_fd=fd)
                return
    raise OSError(errno.EBADF, "there is none")


def _secret_in_environment() -> None:
    names = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_URI")
    _refuse([one for one in (*names, "https_proxy") if os.environ.get(one)])


def _appended(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND))


def _walk_up() -> None:
    """Come to the secrets by `..` from the run's folder."""
    up = os.path.relpath(outside().secrets, outside().run)
    Path(outside().run, up).read_bytes()


def _first_process() -> None:
    """Find that the first process has more rights, and may be written."""
    _opened("/proc/1/mem")
    told = dict(one.split(":", 1) for one in Path("/proc/1/status").read_text().splitlines())
    rights = [told[name].strip() for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")]
    _refuse(set(rights) != {"0" * 16} or told["Seccomp"].strip() != "2")


def _uid_map() -> None:
    _opened("/proc/self/uid_map", os.O_WRONLY)
    Path("/proc/self/uid_map").write_text(f"0 {os.getuid()} 1")


_ATTEMPTS: dict[str, Callable[[], object]] = {
    # files
    "read a run of another": lambda: Path(outside().other).read_bytes(),
    "list a run of another": lambda: list(Path(outside().other).parent.iterdir()),
    "write into a run of another": lambda: _appended(outside().other),
    "list the runs of all": lambda: _refuse(
        Path(outside().other).parent in Path(outside().run).parents[1].glob("bob/*")
    ),
    "read the pool's secrets": lambda: Path(outside().secrets).read_bytes(),
    "list the pool's home": lambda: list(Path(outside().secrets).parent.iterdir()),
    "read secrets through a link": lambda: _linked(outside().secrets),
    "read a run of another through a link": lambda: _linked(outside().other),
    "read secrets by ..": _walk_up,
    "read secrets through a racing link": _raced,
    "write through checkpoints/latest": _latest,
    "link secrets into the run": lambda: _hard(outside().secrets),
    "link a run of another into the run": lambda: _hard(outside().other),
    "link a copy into the run": lambda: _hard(str(_run("fork/weights"))),
    "link a model into the run": lambda: _hard(outside().model),
    "write a copy": lambda: _appended(str(_run("fork/weights"))),
    "add to a copy": lambda: _opened(str(_run("fork/new")), os.O_CREAT | os.O_WRONLY),
    "change the mode of a copy": lambda: _run("fork/weights").chmod(0o644),
    "change the times of a copy": lambda: os.utime(_run("fork/weights")),
    "mark a copy": lambda: os.setxattr(_run("fork/weights"), "user.x", b"y"),
    "shorten a copy": lambda: os.truncate(_run("fork/weights"), 6),
    "rename a copy": lambda: _renamed(str(_run("fork"))),
    "exchange a copy for a link": _exchanged,
    "rename the run": lambda: _renamed(outside().run),
    "write a model": lambda: _appended(outside().model),
    "write a program": lambda: _appended(os.path.realpath("/bin/sh")),
    "write the interpreter": lambda: _appended(os.path.realpath(sys.executable)),
    "write a package": lambda: _appended(os.__file__),
    "read passwords": lambda: Path("/etc/shadow").read_bytes(),
    # processes
    "read the environment of a process": _of_process("environ"),
    "read the command of a process": _of_process("cmdline"),
    "read secrets by the root of a process": lambda: _by_root(str(outside().pid))(),
    "read secrets by the root of the first process": _by_root("1"),
    "read secrets by the root of the parent": lambda: _by_root(str(os.getppid()))(),
    "signal a process": lambda: os.kill(outside().pid, 0),
    "signal a group": lambda: os.killpg(outside().pid, 0),
    "hold a process": _pidfd,
    "find a descriptor that leads out": _inherited,
    "write the memory of a process": lambda: _opened(f"/proc/{outside().pid}/mem"),
    "have the rights of the first process": _first_process,
    "find a secret in the environment": _secret_in_environment,
    # network
    "reach another port": lambda: _connected(socket.AF_INET, ("127.0.0.1", outside().port)),
    "reach another port by another loopback address": lambda: _connected(
        socket.AF_INET, ("127.9.9.9", outside().port)
    ),
    "reach another port by any address": lambda: _connected(
        socket.AF_INET,
        ("0.0.0.0", outside().port),
    ),
    "reach another port by the machine's address": _own_address,
    "be answered a datagram": _answered,
    "reach an abstract socket": lambda: _connected(socket.AF_UNIX, f"\0{outside().abstract}"),
    "reach a named socket": lambda: _connected(socket.AF_UNIX, outside().named),
    "listen at a port of the system": _low_port,
}
"""What comes off without a sandbox, most of it."""

_INSIDE_ONLY: dict[str, Callable[[], object]] = {
    **{
        f"reach {host}": _reach(family, host)
        for family, host in (
            (socket.AF_INET, "8.8.8.8"),
            (socket.AF_INET, "169.254.169.254"),
            (socket.AF_INET, "10.0.0.1"),
            (socket.AF_INET, "255.255.255.255"),
            (socket.AF_INET6, "2001:4860:4860::8888"),
            (socket.AF_INET6, "fe80::1"),
        )
    },
    "ask the DNS": lambda: socket.getaddrinfo("example.com", 80),
    "take the interface down": _interface,
    "set a route": _route,
    **{f"socket of family {one}": _family(one) for one in (15, 29, 30, 31, 38, 40, 44)},
    "trace a process": lambda: _raw(101, 117, 16, outside().pid, 0, 0),
    "seize a process": lambda: _raw(101, 117, 0x4206, outside().pid, 0, 0),
    "be traced": lambda: _raw(101, 117, 0, 0, 0, 0),
    "read the memory of a process": _read_memory,
    "compare with a process": lambda: _raw(312, 272, os.getpid(), outside().pid, 1, 0, 0),
    "take a descriptor of a process": lambda: _raw(438, 438, 3, 0, 0),
    "advise a process": lambda: _raw(440, 440, 3, 0, 0, 0, 0),
    **{
        f"make the device {major}:{minor}": lambda k=kind, a=major, b=minor: _device(k, a, b)
        for kind, major, minor in (
            (stat.S_IFBLK, 8, 0),
            (stat.S_IFBLK, 259, 0),
            (stat.S_IFCHR, 1, 1),
            (stat.S_IFCHR, 10, 229),
        )
    },
    **{
        f"open {path}": lambda path=path: _opened(path)
        for path in (
            *("/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/net/tun", "/dev/sda"),
            *("/dev/vda", "/dev/loop-control", "/dev/tty", "/dev/vsock", "/dev/vhost-net"),
            *("/var/run/docker.sock", "/run/containerd/containerd.sock"),
            *("/proc/sysrq-trigger", "/proc/kcore", "/proc/sys/kernel/ns_last_pid"),
        )
    },
    "write to a control group": _group_of_control,
    "make a control group": lambda: Path("/sys/fs/cgroup/mine").mkdir(),
    "add a key": lambda: _raw(248, 217, b"user", b"x", b"y", 1, -4),
    "ask for a key": lambda: _raw(249, 218, b"user", b"x", None, -4),
    "read keys": lambda: _raw(250, 219, 11, -4, None, 0),
    "give a file a capability": _capability,
    "mark a file as trusted": _trusted,
    "give a file away": _given_away,
    "take rights": _more_rights,
    "take on groups": lambda: os.setgroups([0, 1]),
    "become another user": lambda: os.setresuid(1, 1, 1),
    "become another group": lambda: os.setresgid(1, 1, 1),
    "map users": _uid_map,
    "open by a handle": _handle,
    "make a namespace of mounts": lambda: _call("unshare", 0x00020000),
    "make a namespace of the network": lambda: _call("unshare", 0x40000000),
    "make a namespace of users by clone": _cloned,
    **{f"join the namespace {one}": lambda one=one: _joined(one) for one in ("mnt", "net", "user")},
    "make the copies writable": lambda: _call(
        "mount", None, bytes(_run("fork")), None, 0x1020, None
    ),
    "make all writable": lambda: _call("mount", None, b"/", None, 0x1020, None),
    "mount a folder over the run": lambda: _call("mount", b"/", bytes(_run()), None, 0x1000, None),
    "take the copies' mount away": lambda: _call("umount2", bytes(_run("fork")), 2),
    "copy a mount": lambda: _raw(428, 428, _AT_HERE, b"/", 1),
    "open a file system": lambda: _raw(430, 430, b"proc", 0),
    "change a mount": lambda: _raw(442, 442, _AT_HERE, b"/", 0, bytes(32), 32),
    "change the root": lambda: os.chroot(outside().run),
    "turn the root": lambda: _raw(155, 41, b".", b"."),
    "set the clock": lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()),
    "name the host": lambda: socket.sethostname("mine"),
    "load a program into the kernel": lambda: _raw(321, 280, 0, bytes(128), 128),
    "read the kernel's log": lambda: _raw(103, 116, 3, bytes(64), 64),
    "watch the machine": lambda: _raw(298, 241, bytes(128), -1, 0, -1, 0),
    "watch all files": lambda: _raw(300, 262, 0, 0),
    "handle faults": lambda: _raw(323, 282, 0),
    "account processes": lambda: _raw(163, 89, b"/tmp/accounts"),
    "go before others": lambda: _refuse(os.nice(-5) < 0),
    "run in real time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "outlive a lack of memory": lambda: Path("/proc/self/oom_score_adj").write_text("-1000"),
    "have more files than allowed": lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, (1 << 19, resource.getrlimit(resource.RLIMIT_NOFILE)[1] + 1)
    ),
}


def successes(*, inside: bool = True) -> list[str]:
    """Return the names of the tries that came off."""
    tries = {**_ATTEMPTS, **(_INSIDE_ONLY if inside else {})}
    return [name for name, attempt in tries.items() if comes_off(attempt)]


def inner_successes(around: Outside) -> list[str]:
    """Return the names of the tries that came off of those that need no run folder."""
    _told.append(around)
    return [name for name, attempt in _INSIDE_ONLY.items() if comes_off(attempt)]
