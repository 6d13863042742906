"""What a sandbox must prove before a program of a model runs in it."""

from ...schemas.wire.errors import SandboxError
from .settings import Outcome

PROBE = """
import os, socket

def refused(call, *arguments):
    try:
        call(*arguments)
    except (OSError, MemoryError):
        return True
    return False

def write_root():
    open("/written", "w").close()

def fill_disk():
    for name in ("/tmp/one", "/tmp/two"):
        with open(name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, (disk << 19) + 4096)

def connect():
    socket.create_connection(("127.0.0.1", 9), timeout=1)

def fork_on():
    children = []
    try:
        for _ in range(processes + 1):
            child = os.fork()
            if not child:
                os.read(pipe[0], 1)
                os._exit(0)
            children.append(child)
    finally:
        os.write(pipe[1], b"." * (len(children) + 1))
        for child in children:
            os.waitpid(child, 0)

pipe = os.pipe()
known = {"usr", "lib", "lib64", "python", "packages", "proc", "dev", "tmp"}
failed = [
    name
    for name, holds in (
        ("it shows files of the host", set(os.listdir("/")) <= known),
        ("it runs programs as root", os.getuid() != 0),
        ("its root can be written", refused(write_root)),
        ("memory is not limited", refused(bytearray, (memory << 20) + 1)),
        ("its disk is not limited", refused(fill_disk)),
        ("processes are not limited", refused(fork_on)),
        ("it reaches a network", refused(connect)),
    )
    if not holds
]
print("; ".join(failed) or "encloses")
"""
"""Runs inside, after `memory`, `disk` (MiB) and `processes` have been set to the limits."""


def check_answer(answer: Outcome) -> None:
    """Raise SandboxError unless the probe found every wall standing."""
    if (answer.status, answer.text) != ("ok", "encloses\n"):
        hint = "no program of a model is run here; a newer kernel or bubblewrap (0.8) may help"
        if "processes are not limited" in answer.text:
            hint = "the kernel bounds no processes of root: let an ordinary user run the node"
        raise SandboxError(
            f"the sandbox does not enclose ({answer.status}): {answer.text.strip()}", hint=hint
        )
