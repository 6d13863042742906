"""What runs first behind a program's walls: it takes on limits and a user, then is the program.

Started as `python -c <this file> FD` by `process.py`; it imports nothing of ours. Its orders come
as JSON after a length of four bytes, over a socket: neither the program's environment nor its
command ever reaches what sets the walls up. Where the program is to reach the model, it listens in
the walls' own network and hands the socket out: who answers there is outside. The socket closes as
the program begins; what is said before is why it cannot.
"""

import json
import os
import resource
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main() -> None:
    """Take orders and become the program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    orders = received(channel)
    try:
        if orders["port"]:
            hand_out(channel, orders["port"])
        take_limits(orders)
        become(orders["user"])
        os.chdir(orders["folder"])
        os.execvpe(orders["command"][0], orders["command"], orders["environment"])
    except (OSError, ValueError) as error:
        channel.sendall(f"!{error}".encode(errors="replace"))
        sys.exit(127)


def received(channel: socket.socket) -> "dict[str, Any]":
    """Read the orders."""
    length = int.from_bytes(channel.recv(4, socket.MSG_WAITALL), "little")
    told = b""
    while len(told) < length:
        told += channel.recv(length - len(told))
    return json.loads(told)


def hand_out(channel: socket.socket, port: int) -> None:
    """Listen on the loopback address in here, and let whoever is outside accept."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
        socket.send_fds(channel, [b"L"], [listening.fileno()])


def take_limits(orders: "dict[str, Any]") -> None:
    """Take on what the kernel bounds."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out, it is not the host that goes
    except OSError:
        pass
    for name, most in orders["limits"].items():
        which = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def become(user: int) -> None:
    """Give up the rights of root, where it has them."""
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    try:
        os.setsid()
    except OSError:
        pass  # it leads a session already


if __name__ == "__main__":
    main()
