"""The system calls that sandboxed programs may not make, as BPF programs for bubblewrap.

Refused to all: new namespaces and mounts, looking into other processes, and corners of the kernel
that no game needs. To programs with limits on memory also what reaches past them (memory files,
System V segments), and to code of a model sockets other than Unix ones; agent programs, hosted
games and learners may use IP sockets (AF_VSOCK is in no network namespace, so nobody may). Nobody
makes a file that runs as its owner or group: what is written may lie on a disk of the machine. See
seccomp(2); the numbers are those of asm/unistd.h.
"""

import errno
import platform
import struct
from typing import NamedTuple

from ...schemas.wire.errors import SandboxError

_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_FROM, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_NETWORK = (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK)
_NEW_NAMESPACES = 0x7E020080
_X32 = 0x40000000


_SET_ID = 0o6000
_CREATES = 0o100 | 0o20000000
"""O_CREAT and O_TMPFILE: with other flags nobody looks at the mode."""
_OPENAT2 = 437
"""Its mode stands in memory, where no filter can look."""


class _Machine(NamedTuple):
    audit: int
    socket: tuple[int, int]
    """Numbers of socket and socketpair."""
    clone: int
    refused: tuple[int, ...]
    past_limits: tuple[int, ...]
    """What reaches past the limits on memory: refused to programs that have such limits."""
    modes: tuple[tuple[int, int], ...]
    """What sets the mode of a file: its number, and which argument the mode is, from 0."""
    opens: tuple[tuple[int, int], ...]
    """What opens files: its number, and which argument the flags are; the mode is the next."""


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
    """Return the filter of a sandbox; SandboxError for a machine that has none.

    `internet_sockets` allows sockets other than Unix ones, `memory_files` what holds memory past
    the limits of a process.
    """
    machine = _machine()
    refused = machine.refused if memory_files else machine.refused + machine.past_limits
    return _filter(machine, refused, _NETWORK if internet_sockets else (_AF_UNIX,))


def _machine() -> _Machine:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise SandboxError(
            f"there is no table of system calls for {platform.machine()}: programs of others "
            "cannot be sandboxed",
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
        absent,  # the C library then calls clone, whose flags can be looked at
        _step(_JUMP_EQUAL, _OPENAT2, 0, 1),
        absent,  # whoever tries it calls openat then
    ]
    for number in refused:
        program += [_step(_JUMP_EQUAL, number, 0, 1), refuse]
    for number in machine.socket:
        program += [
            _step(_JUMP_EQUAL, number, 0, len(families) + 3),
            _step(_LOAD, _FIRST_ARGUMENT),
            *(_step(_JUMP_EQUAL, one, len(families) - n) for n, one in enumerate(families)),
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
