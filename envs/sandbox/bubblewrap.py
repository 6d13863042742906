"""Start programs in a `Sandbox` with bubblewrap, and end them.

Run by an ordinary user, bubblewrap makes a user namespace. Run by root it needs none, and the
program inside gets an unused user id. No control groups are needed.

`inside.py` runs first in the sandbox. It reads the program and its environment from a socket, so
they do not appear in the command line or environment of bubblewrap, and nothing runs if this
process ends before it has sent them. The first process of the sandbox ends with its program, and
every process that the program left running with it; bubblewrap ends with this process.
"""

import asyncio
import contextlib
import errno
import fcntl
import marshal
import os
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from ...schemas.local.process import finish
from ...schemas.wire.errors import SandboxError
from .sandbox import Mount, Sandbox, first_child, unprivileged_user

T = TypeVar("T")
START_S = 60.0
_NOBODY = "65534"
_NAMESPACES = ("pid", "ipc", "uts")
_PROC_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs")
_BINDS = {"read": "--ro-bind", "write": "--bind", "device": "--dev-bind"}
_INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
_CHUNK = 4096
_launcher = ThreadPoolExecutor(1, thread_name_prefix="sandbox-launcher")
"""Thread that starts sandboxes: a sandbox ends with it, so it runs as long as the process."""


class SandboxStartError(SandboxError):
    """A sandbox could not be set up."""

    def __init__(self, output: str) -> None:
        """`output` is what bubblewrap and Python printed."""
        printed = output.strip() or "it ended without output"
        super().__init__(f"the sandbox does not start: {printed}", hint=remedy(printed))
        self.output = output
        """What bubblewrap and Python printed."""


class CommandError(SandboxError):
    """A command cannot be run in its sandbox."""


@dataclass(frozen=True)
class Program:
    """A program for a sandbox: a command, or Python code that `inside.py` runs itself."""

    command: Sequence[str] = ()
    source: str = ""
    arguments: Sequence[str] = ()
    """`sys.argv[1:]` of the source."""
    environment: Mapping[str, str] | None = None
    """None: the environment of the sandbox's Python."""


class SandboxProcess:
    """A program that runs in a sandbox."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", first: int, sockets: list[socket.socket]
    ) -> None:
        """`first` is the sandbox's first process."""
        self.pid = process.pid
        """The process of bubblewrap, which leads a process group and ends with its sandbox."""
        self.first = first
        self.sockets = sockets
        """Sockets that listen inside, in the order of `Sandbox.listens`; the caller closes them."""
        self.stdin = process.stdin
        self._process = process
        self._handles = [os.pidfd_open(process.pid)]
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._handles.append(os.pidfd_open(first))

    @property
    def program(self) -> int | None:
        """The process of the program; None once it has ended."""
        return first_child(self.first)

    def terminate(self) -> None:
        """Ask the program and the processes of its group to end (SIGTERM).

        Bubblewrap does not forward signals, and its own end would kill all of them at once.
        """
        program = self.program
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if program is not None:
                is_group = os.getpgid(program) == program
                (os.killpg if is_group else os.kill)(program, signal.SIGTERM)

    def kill(self) -> None:
        """Kill every process of the sandbox; may be repeated."""
        if not self._handles:
            return
        with contextlib.suppress(ProcessLookupError):
            # a namespace ends with its first process; bubblewrap follows
            signal.pidfd_send_signal(self._handles[-1], signal.SIGKILL)

    def wait(self) -> int:
        """Block until no process of the sandbox is left; return its exit code.

        The code of a program that a signal ended is 128 plus the signal's number, or minus that
        number if bubblewrap itself was ended.
        """
        for handle in self._handles:
            _is_readable(handle, None)
        return self._process.wait()

    async def ended(self) -> int:
        """Do the same as `wait` without blocking the event loop."""
        for handle in self._handles:
            await _readable(handle)
        return self._process.wait()

    def close(self) -> None:
        """Close the files of an ended sandbox; may be repeated."""
        for handle in self._handles:
            os.close(handle)
        self._handles = []
        if self.stdin is not None:
            self.stdin.close()


def bubblewrap_program() -> str:
    """Return the path of `bwrap`; SandboxError for a machine without it."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "bubblewrap is not installed here, so programs of others cannot be sandboxed",
            hint="apt-get install bubblewrap (dnf install bubblewrap) where environment hosts run",
        )
    return program


def remedy(output: str) -> str:
    """Return the hint for an error of bubblewrap."""
    if "namespace" in output or "Operation not permitted" in output or "uid map" in output:
        return (
            "let processes make namespaces: sysctl kernel.unprivileged_userns_clone=1 (Debian), "
            "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), user.max_user_namespaces "
            "above 0; in a container: --security-opt seccomp=unconfined --security-opt "
            "systempaths=unconfined --cap-add SYS_ADMIN"
        )
    return "try `bwrap --unshare-all --ro-bind / / true` as the user of the environment host"


def start(
    sandbox: Sandbox,
    program: Program,
    *,
    stdout: int,
    stderr: int,
    stdin: int = subprocess.DEVNULL,
    keep: Sequence[int] = (),
) -> SandboxProcess:
    """Start a program in a sandbox; blocks until it runs, `START_S` at most.

    The program has the given output, `stdin` (or a pipe to it: `subprocess.PIPE`) and the
    descriptors `keep` under their own numbers, and no other open file. Raises SandboxStartError,
    CommandError for a command that cannot be run, SandboxError, and OSError.
    """
    files = _Files.make(stdout, stderr)
    try:
        process = _launcher.submit(_launch, sandbox, files, stdin, keep).result()
    except BaseException:
        files.close()
        raise
    finally:
        files.close_theirs()
    sockets: list[socket.socket] = []
    try:
        first = files.first_process()
        orders = _orders(sandbox, program, files.program_output, keep)
        refusal = files.give(orders, sockets)
        if refusal is not None or len(sockets) != len(sandbox.listens):
            raise _start_error(refusal, process, files)
        return SandboxProcess(process, first, sockets)
    except BaseException as error:
        for sock in sockets:
            sock.close()
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if isinstance(error, TimeoutError):
            raise SandboxError(
                f"a sandbox did not start within {START_S:g} s", hint="see the machine's load"
            ) from None
        if isinstance(error, EOFError | ConnectionError):
            raise _start_error("", process, files) from None
        raise
    finally:
        files.close()


async def start_in_thread(
    sandbox: Sandbox,
    program: Program,
    *,
    stdout: int,
    stderr: int,
    executor: Executor | None = None,
) -> SandboxProcess:
    """Start a program as `start` does; end it again if the start is cancelled."""
    starting = asyncio.get_running_loop().run_in_executor(
        executor, lambda: start(sandbox, program, stdout=stdout, stderr=stderr)
    )
    try:
        return await finish(starting)
    except asyncio.CancelledError:
        if starting.exception() is None:
            process = starting.result()
            for sock in process.sockets:
                sock.close()
            process.kill()
            try:
                await finish(process.ended())
            finally:
                process.close()
        raise


def command_line(sandbox: Sandbox) -> list[str]:
    """Return bubblewrap's command line up to its options on descriptors and the program."""
    words = [bubblewrap_program(), "--die-with-parent", "--new-session", "--clearenv"]
    words += [f"--unshare-{name}" for name in _NAMESPACES]
    words += ["--unshare-cgroup-try", *_rights(sandbox)]
    if not sandbox.has_network:
        words.append("--unshare-net")
    if sandbox.hostname:
        words += ["--hostname", sandbox.hostname]
    for name, value in sandbox.variables.items():
        words += ["--setenv", name, value]
    if sandbox.root is not None:  # mounted first: later mounts are below it
        words += ["--bind", str(sandbox.root), "/"]
    if sandbox.has_proc:
        words += ["--proc", "/proc"]
        for name in _PROC_SETTINGS:
            words += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    words += ["--dev", "/dev", *_mount_words(sandbox.mounts), "--remount-ro", "/dev"]
    return [*words, *(["--remount-ro", "/"] if sandbox.is_read_only else [])]


def _mount_words(mounts: Sequence[Mount]) -> Iterator[str]:
    """Yield the options for mounts and for the folders above them, which all users may enter."""
    made = {"/"}
    for mount in mounts:
        for parent in reversed(Path(mount.path).parents):
            if str(parent) not in made:
                made.add(str(parent))
                yield from ("--perms", "0755", "--dir", str(parent))
        made.add(mount.path)
        if mount.kind == "folder":
            yield from ("--perms", f"{mount.mode:04o}", "--dir", mount.path)
        elif mount.kind == "tmpfs":
            size = ("--size", str(mount.size_bytes)) if mount.size_bytes else ()
            yield from ("--perms", f"{mount.mode:04o}", *size, "--tmpfs", mount.path)
        elif mount.kind == "link":
            yield from ("--symlink", mount.source, mount.path)
        else:
            option = _BINDS[mount.kind] + ("-try" if mount.is_optional else "")
            yield from (option, mount.source, mount.path)


def _rights(sandbox: Sandbox) -> list[str]:
    """Return the options that drop root's capabilities, but those to change the user."""
    if unprivileged_user() is None:
        return ["--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL"]
    rights = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
    return ["--cap-drop", "ALL", *(word for right in rights for word in ("--cap-add", right))]


def _orders(
    sandbox: Sandbox, program: Program, output: Sequence[int], keep: Sequence[int]
) -> bytes:
    """Return the message to `inside.py`, by marshal, which needs no slow import there."""
    user = sandbox.user or unprivileged_user() or 0
    environment = program.environment
    held = [(mount.path, os.fstat(mount.fd)) for mount in sandbox.mounts if mount.fd is not None]
    orders = {
        "held": [(path, status.st_dev, status.st_ino) for path, status in held],
        "user": user,
        "limits": dict(sandbox.limits),
        "is_ended_first": sandbox.is_ended_first,
        "listens": list(sandbox.listens),
        "folder": sandbox.folder,
        "output": list(output),
        "keep": list(keep),
        "command": list(program.command),
        "source": program.source,
        "arguments": list(program.arguments),
        "environment": None if environment is None else dict(environment),
    }
    return marshal.dumps(orders)


def _held(sandbox: Sandbox) -> Iterator[int]:
    return (mount.fd for mount in sandbox.mounts if mount.fd is not None)


def _launch(
    sandbox: Sandbox, files: "_Files", stdin: int, keep: Sequence[int]
) -> "subprocess.Popen[bytes]":
    """Start bubblewrap; runs in the launcher's thread."""
    rules = os.memfd_create("system-calls")
    try:
        os.write(
            rules,
            system_call_filter(
                internet_sockets=sandbox.has_internet_sockets,
                memory_files=sandbox.has_memory_files,
            ),
        )
        os.lseek(rules, 0, os.SEEK_SET)
        options = ["--seccomp", str(rules), "--info-fd", str(files.about_in), "--"]
        inside = [*sandbox.python, "-c", _INSIDE, str(files.theirs.fileno())]
        passed = {rules, files.about_in, files.theirs.fileno(), *files.program_output}
        return subprocess.Popen(
            [*command_line(sandbox), *options, *inside],
            bufsize=0,
            stdin=stdin,
            stdout=files.output_in,
            stderr=files.output_in,
            pass_fds=sorted(passed | {*keep, *_held(sandbox)}),
            env={},
            start_new_session=True,
        )
    finally:
        os.close(rules)


@dataclass
class _Files:
    """The pipes and sockets to a sandbox that starts, and their other ends."""

    channel: socket.socket
    theirs: socket.socket
    about: int
    """Pipe on which bubblewrap reports the first process."""
    about_in: int
    output: int
    """Pipe for output until the program runs."""
    output_in: int
    program_output: Sequence[int]
    """The program's own output and errors, once it runs."""
    deadline: float

    @classmethod
    def make(cls, stdout: int, stderr: int) -> "_Files":
        """Open them."""
        own = [fcntl.fcntl(output, fcntl.F_DUPFD_CLOEXEC, 3) for output in (stdout, stderr)]
        deadline = time.monotonic() + START_S
        return cls(*socket.socketpair(), *os.pipe(), *os.pipe(), own, deadline)

    def first_process(self) -> int:
        """Return the first process of the sandbox; EOFError if bubblewrap reports none."""
        report = b""
        while b"}" not in report:
            self._wait_for(self.about)
            chunk = os.read(self.about, _CHUNK)
            if not chunk:
                raise EOFError
            report += chunk
        return int(report.split(b'"child-pid":')[1].split(b",")[0].strip(b" \n}"))

    def give(self, orders: bytes, sockets: list[socket.socket]) -> str | None:
        """Send the message to `inside.py` once it runs, and receive the sockets that listen inside.

        Returns None once the program runs, else the reason why it cannot. Raises EOFError.
        """
        if self._receive(sockets) != b"R":  # bubblewrap ends with this process from here on
            raise EOFError
        self.channel.settimeout(max(0.0, self.deadline - time.monotonic()))
        self.channel.sendall(len(orders).to_bytes(4, "little") + orders)
        while received := self._receive(sockets):
            if received != b"L":
                return received.removeprefix(b"!").decode(errors="replace")
        return None

    def _receive(self, sockets: list[socket.socket]) -> bytes:
        self._wait_for(self.channel.fileno())
        data, fds, _, _ = socket.recv_fds(self.channel, _CHUNK, 16)
        sockets += [socket.socket(fileno=fd) for fd in fds]
        return data

    def printed(self) -> str:
        """Return the output, after all processes that could print have ended."""
        os.set_blocking(self.output, False)
        with contextlib.suppress(BlockingIOError):
            return os.read(self.output, 1 << 16).decode(errors="replace")
        return ""

    def close_theirs(self) -> None:
        """Close the sandbox's ends."""
        self.theirs.close()
        for file in (self.about_in, self.output_in, *self.program_output):
            os.close(file)

    def close(self) -> None:
        """Close our ends; may be repeated."""
        if self.channel.fileno() >= 0:
            self.channel.close()
            for file in (self.about, self.output):
                os.close(file)

    def _wait_for(self, file: int) -> None:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0 or not _is_readable(file, left_s):
            raise TimeoutError


def _is_readable(file: int, timeout_s: float | None) -> bool:
    """Wait until a descriptor can be read or its other end is closed; return whether it is."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _start_error(
    refusal: str | None, process: "subprocess.Popen[bytes]", files: _Files
) -> SandboxError:
    """Return the error for a program that does not run, and kill what was started."""
    process.kill()
    process.wait()
    if refusal:
        return CommandError(
            f"the program cannot be run: {refusal}",
            hint="see its command, and which folders it sees",
        )
    return SandboxStartError(files.printed())


async def _readable(file: int) -> None:
    """Wait until a descriptor can be read; a process's descriptor can be read after its end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def set_ready() -> None:
        loop.remove_reader(file)
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(file, set_ready)
    try:
        await ready
    finally:
        loop.remove_reader(file)


# The filter of system calls, a BPF program. See seccomp(2); the numbers are those of asm/unistd.h.
#
# Refused in all sandboxes: new namespaces and mounts, access to other processes, kernel interfaces
# that no game needs, and files that run as their owner or group. Programs with limits on memory may
# not use memory files and System V segments, which evade them. A model's code may use Unix sockets
# only; agent programs and hosted games also IP sockets.

_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_FROM, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_NETWORK = (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK)
_NEW_NAMESPACES = 0x7E020080
_X32 = 0x40000000


_SET_ID = 0o6000
_CREATES = 0o100 | 0o20000000
"""O_CREAT and O_TMPFILE: with other flags the mode is not used."""
_OPENAT2 = 437
"""System call whose mode is in memory, which no filter can read."""


class _Machine(NamedTuple):
    audit: int
    socket: tuple[int, int]
    """Numbers of socket and socketpair."""
    clone: int
    refused: tuple[int, ...]
    past_limits: tuple[int, ...]
    """System calls that evade limits on memory; refused to programs with such limits."""
    modes: tuple[tuple[int, int], ...]
    """System calls that set the mode of a file, and the index of the argument `mode`."""
    opens: tuple[tuple[int, int], ...]
    """System calls that open files, and the index of the argument `flags`; `mode` follows."""


_COMMON = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring, mounting by file descriptors, files of other processes, secret memory: numbered alike
everywhere."""
_CLONE3 = 435
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        (41, 53),
        56,
        # processes: ptrace process_vm_readv process_vm_writev kcmp
        # mounts: mount umount2 pivot_root chroot unshare setns swapon swapoff quotactl acct
        # kernel: bpf perf_event_open keyctl add_key request_key init_module delete_module
        # finit_module kexec_load kexec_file_load open_by_handle_at fanotify_init syslog reboot
        # userfaultfd
        (
            *(101, 310, 311, 312),
            *(165, 166, 155, 161, 272, 308, 167, 168, 179, 163),
            *(321, 298, 250, 248, 249, 175, 176, 313, 246, 320, 304, 300, 103, 169, 323),
            *_COMMON,
        ),
        # memory: shmget shmat shmctl memfd_create; messages: semget msgget mq_open; personality
        (29, 30, 31, 319, 64, 68, 240, 135),
        # chmod fchmod fchmodat fchmodat2 creat mknod mknodat mkdir mkdirat
        ((90, 1), (91, 1), (268, 2), (452, 2), (85, 1), (133, 1), (259, 2), (83, 1), (258, 2)),
        # open openat
        ((2, 1), (257, 2)),
    ),
    "aarch64": _Machine(
        0xC00000B7,
        (198, 199),
        220,
        (
            *(117, 270, 271, 272),
            *(40, 39, 41, 51, 97, 268, 224, 225, 60, 89),
            *(280, 241, 219, 217, 218, 105, 106, 273, 104, 294, 265, 262, 116, 142, 282),
            *_COMMON,
        ),
        (194, 196, 195, 279, 190, 186, 180, 92),
        # fchmod fchmodat fchmodat2 mknodat mkdirat
        ((52, 1), (53, 2), (452, 2), (33, 2), (34, 2)),
        ((56, 2),),
    ),
}


def system_call_filter(*, internet_sockets: bool, memory_files: bool) -> bytes:
    """Return the filter of a sandbox; SandboxError for another kind of machine.

    `internet_sockets` allows sockets other than Unix ones, `memory_files` files in memory, which
    no limit of a process counts.
    """
    machine = _machine()
    refused = machine.refused if memory_files else machine.refused + machine.past_limits
    return _filter(machine, refused, _NETWORK if internet_sockets else (_AF_UNIX,))


def _machine() -> _Machine:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise SandboxError(
            f"system calls of {platform.machine()} are unknown, so programs of others cannot be "
            "sandboxed",
            hint=f"run the environment host on {' or '.join(_MACHINES)}",
        )
    return machine


def _filter(machine: _Machine, refused: tuple[int, ...], families: tuple[int, ...]) -> bytes:
    refuse = _step(_RETURN, _ERRNO | errno.EPERM)
    absent = _step(_RETURN, _ERRNO | errno.ENOSYS)
    program = [
        _step(_LOAD, _ARCH),
        _step(_JUMP_EQUAL, machine.audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_JUMP_FROM, _X32, 0, 1),
        absent,
        _step(_JUMP_EQUAL, _CLONE3, 0, 1),
        absent,  # the C library then calls clone, whose flags can be checked
        _step(_JUMP_EQUAL, _OPENAT2, 0, 1),
        absent,  # programs fall back to openat
    ]
    for number in refused:
        program += [_step(_JUMP_EQUAL, number, 0, 1), refuse]
    for number in machine.socket:
        program += [
            _step(_JUMP_EQUAL, number, 0, len(families) + 3),
            _step(_LOAD, _FIRST_ARGUMENT),
            *(_step(_JUMP_EQUAL, family, len(families) - n) for n, family in enumerate(families)),
            refuse,
            _step(_RETURN, _ALLOW),
        ]
    for number, mode in machine.modes:
        program += [
            _step(_JUMP_EQUAL, number, 0, 4),
            _step(_LOAD, _FIRST_ARGUMENT + 8 * mode),
            _step(_JUMP_ANY_BIT, _SET_ID, 0, 1),
            refuse,
            _step(_RETURN, _ALLOW),
        ]
    for number, flags in machine.opens:
        program += [
            _step(_JUMP_EQUAL, number, 0, 6),
            _step(_LOAD, _FIRST_ARGUMENT + 8 * flags),
            _step(_JUMP_ANY_BIT, _CREATES, 0, 3),
            _step(_LOAD, _FIRST_ARGUMENT + 8 * (flags + 1)),
            _step(_JUMP_ANY_BIT, _SET_ID, 0, 1),
            refuse,
            _step(_RETURN, _ALLOW),
        ]
    program += [
        _step(_JUMP_EQUAL, machine.clone, 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        refuse,
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
