"""Compare answers with math-verify, in worker processes with hard limits.

An answer may be made to be expensive: nested powers, a thousand brackets. Whatever takes more
computing than the limit, or more memory, ends its process and is wrong; the next one gets a fresh
process.
"""

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from typing import Literal

from ...schemas.wire.errors import GameError
from .answers import MAX_ANSWER_CHARS, to_compare

Verdict = Literal["right", "wrong", "late", "failed"]
LIMIT_S = 5.0
"""Of computing, for one comparison."""
MEMORY_BYTES = 2 << 30
RENEW_AFTER = 2000
"""Comparisons after which a process is replaced: sympy's caches would grow up to its limit."""


class Grader:
    """Worker processes that compare answers; safe to use from many threads at once."""

    def __init__(
        self,
        num_workers: int,
        *,
        limit_s: float = LIMIT_S,
        memory_bytes: int = MEMORY_BYTES,
        renew_after: int = RENEW_AFTER,
    ) -> None:
        """Prepare `num_workers`, which start when they are needed.

        Raises GameError where math-verify is not installed.
        """
        if find_spec("math_verify") is None:
            raise GameError(
                "math-verify is not installed here: answers cannot be graded",
                hint="pip install 'tinkermq[math]' where environment hosts run",
            )
        self._limits = [str(limit_s), str(memory_bytes)]
        self._renew_after = renew_after
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def grade(self, gold: str, answer: str) -> Verdict:
        """Compare an answer with the right one; late and failed ones are wrong, too.

        Where the right answer is one number, only one number is right: `1+1` is not 2.
        """
        if len(answer) > MAX_ANSWER_CHARS or "\0" in answer:
            return "wrong"
        compared = to_compare(gold, answer)
        if isinstance(compared, bool):
            return "right" if compared else "wrong"
        gold, answer = compared
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._limits)
            verdict = worker.ask(gold, answer)
            if verdict in ("late", "failed") or worker.num_asked >= self._renew_after:
                worker.close()
                worker = None
            return verdict
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the workers that are idle."""
        for _ in range(self._idle.qsize()):
            if (worker := self._idle.get()) is not None:
                worker.close()
            self._idle.put(None)


class _Worker:
    def __init__(self, limits: list[str]) -> None:
        self.num_asked = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.grading_worker", *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._line() != "ready":
            self.close()
            raise GameError(
                f"a grading process ended at once, with {self._process.returncode}",
                hint="its own words are above; see whether `python -c 'import math_verify'` works",
            )

    def ask(self, gold: str, answer: str) -> Verdict:
        assert self._process.stdin is not None
        self.num_asked += 1
        try:
            self._process.stdin.write(f"{json.dumps([gold, answer])}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return "failed"
        line = self._line()
        if line in ("true", "false"):
            return "right" if line == "true" else "wrong"
        return "late" if self._process.wait() == -signal.SIGPROF else "failed"

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@cache
def shared_grader() -> Grader:
    """Return the grader that all games of this process share."""
    grader = Grader(len(os.sched_getaffinity(0)))
    atexit.register(grader.close)
    return grader
