"""A process that imports torch and transformers once, and forks into actors.

A node starts it as `python -m tinkermq.actors.node.fork_server <fd>` and sends requests over that
socket, one per packet, with the file descriptor for the actor's output. It answers with the actor's
pid, and again when the actor has ended; a `PING` at once. It has one thread and uses no accelerator
before a fork, so a fork is safe. If a library starts a thread when imported, the server reports so
and ends: the node then starts its actors as programs. It ends with its node, and its actors with
it.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...schemas.local.process import die_with, leave

PACKET_BYTES = 256 * 1024
PING = b"{}"
"""Request that a working server answers at once."""
_HEAVY = (
    "tinkermq.actors.learner.start",
    "tinkermq.actors.generator.generator",
    "tinkermq.actors.evaluator.evaluator",
    "tinkermq.actors.server.server",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation",
    "transformers.modeling_layers",
    "transformers.processing_utils",
)


@dataclass(frozen=True)
class ForkRequest:
    """A request for an actor."""

    number: int
    """The node's number of the request."""
    module: str
    """Module whose `main(argv)` is the actor."""
    argv: list[str]
    """Its arguments."""
    environment: dict[str, str]
    """Variables to add to the environment."""

    def to_bytes(self) -> bytes:
        """Return the packet."""
        return json.dumps(asdict(self)).encode()


class _ForkServer:
    """The loop of the server's one thread."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> ForkRequest | None:
        """Fork until the node has ended; return the request in an actor, None in the server."""
        signal.signal(signal.SIGCHLD, _noted)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._channel, self._wake], [], [])
            if self._wake in ready:
                self._reap()
            if self._channel in ready:
                packet, outputs, _, _ = socket.recv_fds(self._channel, PACKET_BYTES, 1)
                if not packet:
                    return None
                if packet == PING:
                    self._channel.send(PING)
                    continue
                request = ForkRequest(**json.loads(packet))
                if self._fork(request, outputs[0]):
                    return request

    def _fork(self, request: ForkRequest, output: int) -> bool:
        """Fork; True in the child, whose output goes to `output`.

        If the machine has no room for a process, only this start fails, and no other actor ends.
        """
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(output)
            self._report(number=request.number, error=str(error))
            return False
        if pid:
            os.close(output)
            self._report(number=request.number, pid=pid)
            return False
        die_with(server)()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._channel.detach(), self._wake, self._woken):
            os.close(end)
        os.setsid()
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        return True

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 512):
                pass
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._report(pid=ended[0], exit_code=os.waitstatus_to_exitcode(ended[1]))

    def _report(self, **fields: int | str) -> None:
        self._channel.send(json.dumps(fields).encode())


def _noted(*_: object) -> None:
    """Do nothing: a signal needs a Python handler to reach the wake-up descriptor."""


def _import_heavy() -> None:
    """Import the heavy modules; an actor itself reports missing ones.

    Imported modules stay, so garbage collection meanwhile finds nothing, and would take a fifth of
    the time.
    """
    _find_title()
    gc.disable()
    for module in _HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # keeps the collector from writing to memory pages shared with all actors


def _other_threads() -> list[str]:
    """Return the names of the threads that a fork would lose."""
    tasks = Path("/proc/self/task").iterdir()
    return [(task / "comm").read_text().strip() for task in tasks if int(task.name) != os.getpid()]


def _find_title() -> None:
    """Let setproctitle find the process title now, before the environment changes."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()


def _become(request: ForkRequest) -> int:
    """Run the actor like `python -m <module> <argv>`; return the exit code."""
    os.environ.update(request.environment)
    if "setproctitle" in sys.modules:
        import setproctitle

        shown = [request.module.removesuffix(".__main__"), *request.argv]
        setproctitle.setproctitle(" ".join(shown))
    if "torch" in sys.modules:  # it read these variables when it was imported
        import torch

        torch.set_num_threads(int(request.environment["OMP_NUM_THREADS"]))
    module: Any = importlib.import_module(request.module)
    return module.main(request.argv)


def main(argv: Sequence[str]) -> int:
    """Serve until the node has ended; in a fork, run the actor."""
    channel = socket.socket(fileno=int(argv[0]))
    _import_heavy()
    if names := _other_threads():
        channel.send(json.dumps({"threads": ", ".join(names)}).encode())
        return 1
    request = _ForkServer(channel).serve()
    return 0 if request is None else _become(request)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
