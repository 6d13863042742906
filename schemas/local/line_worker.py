"""A process that answers lines of JSON: for what may compute without end or take all memory.

The kernel ends it at limits that it sets for itself. Its module has a `main` that calls
`limit_memory`, loads what it needs and ends with `answer_lines`.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


class WorkerEnded(Exception):
    """The process ended instead of answering."""

    def __init__(self, code: int) -> None:
        """Keep its exit code, which is -n for signal n."""
        super().__init__(f"the process ended with {code}")
        self.code = code


class LineWorker:
    """A module of Python that runs as such a process; not safe among threads, but for `kill`."""

    def __init__(
        self,
        module: str,
        *words: str,
        file: int | None = None,
        shows_errors: bool = False,
        in_child: Callable[[], None] | None = None,
    ) -> None:
        """Start `python -m MODULE WORDS…`, which inherits the descriptor `file`.

        With `shows_errors` it writes to this process's standard error; `in_child` is called in it
        before Python starts.
        """
        self._process = subprocess.Popen(
            # -P: a file in the working folder, such as queue.py, must not hide a module of Python
            [sys.executable, "-P", "-m", module, *words],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if shows_errors else subprocess.DEVNULL,
            pass_fds=[] if file is None else [file],
            preexec_fn=in_child,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def ask(self, message: Any, limit_s: float | None = None) -> Any:
        """Return the answer to a message, both of JSON's types.

        Raises WorkerEnded if the process ends, or has not answered after `limit_s`; it is ended.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        answer, poll = bytearray(), select.poll()
        poll.register(self._stdout, select.POLLIN)
        with contextlib.suppress(OSError):
            write_all(self._stdin.fileno(), json.dumps(message).encode() + b"\n")
            while not answer.endswith(b"\n"):
                left_s = None if until is None else max(0.0, until - time.monotonic())
                if not poll.poll(None if left_s is None else 1000 * left_s):
                    break
                if not (chunk := self._stdout.read(1 << 16)):
                    break
                answer += chunk
        if answer.endswith(b"\n"):
            return json.loads(answer)
        raise WorkerEnded(self.end())

    def kill(self) -> None:
        """Kill the process; who asks it gets WorkerEnded."""
        self._process.kill()

    def end(self) -> int:
        """End the process, and return its exit code; again harmless."""
        self._process.kill()
        code = self._process.wait()
        self._stdin.close()
        self._stdout.close()
        return code


def limit_memory(most_bytes: int) -> None:
    """Bound the address space of this process, which leaves no core file."""
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Let the kernel end this process by SIGPROF if the block takes more CPU time.

    Wall-clock time would end it because the machine is busy.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def answer_lines(answer: Callable[[Any], Any]) -> None:
    """Answer each message of standard input until it ends."""
    for line in sys.stdin:
        sys.stdout.write(f"{json.dumps(answer(json.loads(line)))}\n")
        sys.stdout.flush()


def write_all(file: int, data: bytes) -> None:
    """Write all of `data` to a descriptor."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
