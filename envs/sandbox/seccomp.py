"""The system calls that a program in the sandbox may not make, as a BPF program for bubblewrap.

What is refused: calls that reach past the limits on memory (memory files, System V segments),
sockets other than Unix ones (AF_VSOCK is in no network namespace), new namespaces and mounts,
looking into other processes, and corners of the kernel that no program of a model needs. See
seccomp(2); the numbers are those of asm/unistd.h.
"""

import errno
import platform
import struct
from typing import NamedTuple

from ...schemas.errors import SandboxError

_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_FROM, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_AF_UNIX = 1
_NEW_NAMESPACES = 0x7E020080
_X32 = 0x40000000


class _Machine(NamedTuple):
    audit: int
    socket: tuple[int, int]
    """Numbers of socket and socketpair."""
    clone: int
    refused: tuple[int, ...]


_COMMON = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442, 447)
"""io_uring, mounting by file descriptors, secret memory: numbered alike everywhere."""
_CLONE3 = 435
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        (41, 53),
        56,
        # memory: shmget shmat shmctl memfd_create userfaultfd; messages: semget msgget mq_open
        # processes: ptrace process_vm_readv process_vm_writev kcmp personality
        # mounts: mount umount2 pivot_root chroot unshare setns swapon swapoff quotactl acct
        # kernel: bpf perf_event_open keyctl add_key request_key init_module delete_module
        # finit_module kexec_load kexec_file_load open_by_handle_at fanotify_init syslog reboot
        (
            *(29, 30, 31, 319, 323, 64, 68, 240, 101, 310, 311, 312, 135),
            *(165, 166, 155, 161, 272, 308, 167, 168, 179, 163),
            *(321, 298, 250, 248, 249, 175, 176, 313, 246, 320, 304, 300, 103, 169),
            *_COMMON,
        ),
    ),
    "aarch64": _Machine(
        0xC00000B7,
        (198, 199),
        220,
        (
            *(194, 196, 195, 279, 282, 190, 186, 180, 117, 270, 271, 272, 92),
            *(40, 39, 41, 51, 97, 268, 224, 225, 60, 89),
            *(280, 241, 219, 217, 218, 105, 106, 273, 104, 294, 265, 262, 116, 142),
            *_COMMON,
        ),
    ),
}


def seccomp_filter() -> bytes:
    """Return the filter for this machine; SandboxError for a kind of machine that has none."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise SandboxError(
            f"the sandbox has no table of system calls for {platform.machine()}",
            hint=f"run the environment host on {' or '.join(_MACHINES)}",
        )
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
    ]
    for number in machine.refused:
        program += [_step(_JUMP_EQUAL, number, 0, 1), refuse]
    for number in machine.socket:
        program += [
            _step(_JUMP_EQUAL, number, 0, 4),
            _step(_LOAD, _FIRST_ARGUMENT),
            _step(_JUMP_EQUAL, _AF_UNIX, 1, 0),
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
