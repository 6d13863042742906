"""The first program of every sandbox: it reads what to run, then becomes the program.

Started as `python -c <this file> FD` by `bubblewrap.py`; it imports no module of tinkermq and few
others, since each start waits for it. It reads a marshalled message after a length of four bytes,
from a socket that closes as the program begins; a reply before that, after a `!`, is the reason why
the program cannot run. If the program must reach an address outside of its network, this file
listens inside and passes the sockets out: connections are accepted outside.
"""

import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DROP_FROM_BOUNDING_SET = 24
_CAPABILITIES_3 = 0x20080522
_MANY_FILES = 1 << 20


def main() -> None:
    """Read what to run and become the program."""
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    os.write(channel, b"R")
    orders = received(channel)
    try:
        if orders["listens"]:
            hand_out(channel, orders["listens"])
        if orders["is_ended_first"]:
            be_ended_first()
        if orders["user"]:
            become(orders["user"])
        check_held(orders["held"])
        take_limits(orders["limits"])
        lead_session()
        os.chdir(orders["folder"])
        take_files(channel, orders["output"], orders["keep"])
        if orders["command"]:
            environment = orders["environment"]
            environment = dict(os.environ) if environment is None else environment
            os.execvpe(orders["command"][0], orders["command"], environment)
    except (OSError, ValueError) as error:
        os.write(channel, f"!{error}".encode(errors="replace")[:2000])
        sys.exit(127)
    if orders["environment"] is not None:
        os.environ.clear()
        os.environ.update(orders["environment"])
    os.close(channel)
    sys.argv[1:] = orders["arguments"]
    exec(compile(orders["source"], "<string>", "exec"), {"__name__": "__main__"})


def received(channel: int) -> "dict[str, Any]":
    """Read the message; exit if the parent has ended."""
    head = read_exactly(channel, 4)
    return marshal.loads(read_exactly(channel, int.from_bytes(head, "little")))


def read_exactly(channel: int, length: int) -> bytes:
    """Read so many bytes."""
    data = b""
    while len(data) < length:
        chunk = os.read(channel, length - len(data))
        if not chunk:
            sys.exit("the process that started the sandbox has ended")
        data += chunk
    return data


def check_held(held: "list[tuple[str, int, int]]") -> None:
    """Raise OSError unless these paths show what was open outside.

    bubblewrap mounts by path, and a link may have taken the place of a folder meanwhile. What this
    user cannot reach shows nothing.
    """
    for path, device, inode in held:
        try:
            status = os.stat(path)
        except PermissionError:
            continue
        if (status.st_dev, status.st_ino) != (device, inode):
            raise OSError(f"{path} was replaced while the sandbox was made")


def hand_out(channel: int, places: "list[str]") -> None:
    """Listen inside, and pass the sockets to the outside."""
    import socket

    listening: list[socket.socket] = []
    for place in places:
        host, _, port = place.rpartition(":")
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.bind((host, int(port)))
        sock.listen(128)
        listening.append(sock)
    with socket.socket(fileno=os.dup(channel)) as out:
        socket.send_fds(out, [b"L"], [sock.fileno() for sock in listening])
    for sock in listening:
        sock.close()


def be_ended_first() -> None:
    """Let the kernel end this process before the host's when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def become(user: int) -> None:
    """Give up root's user id and every capability."""
    import ctypes

    libc, right = ctypes.CDLL(None), 0
    while not libc.prctl(_DROP_FROM_BOUNDING_SET, right, 0, 0, 0):
        right += 1
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    libc.capset((ctypes.c_uint * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint * 6)())


def take_limits(limits: "dict[str, int]") -> None:
    """Set the kernel's limits; a lower limit is not raised."""
    for name, most in limits.items():
        which = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def lead_session() -> None:
    """Become the leader of a session and a process group."""
    try:
        os.setsid()
    except OSError:
        pass  # it does already


def take_files(channel: int, output: "list[int]", keep: "list[int]") -> None:
    """Leave open the program's output and the files it keeps, and close all others.

    Open folders of bubblewrap would lead out of the sandbox by `..`.
    """
    os.dup2(output[0], 1)
    os.dup2(output[1], 2)
    first = 3
    for file in sorted({channel, *keep}):
        os.closerange(first, file)
        first = file + 1
    os.closerange(first, _MANY_FILES)


if __name__ == "__main__":
    main()
