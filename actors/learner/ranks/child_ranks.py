"""Ranks that are child processes of rank 0, on its machine: for a replay, and to check a machine.

They are told each piece of work through a pipe. They die with rank 0; one that ends by itself fails
it.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import structlog

from ....broker.service_process import die_with
from ....schemas.config.job import JobConfig
from ....schemas.wire.errors import EngineError, OutOfMemoryError, TinkermqError
from ...runtime import EXIT_OUT_OF_MEMORY
from ...training.rank_commands import Order, Ranks

_END_S = 5.0
"""How long a rank may take to end after it was told to; it has nothing to write then."""
_SEEN_END_S = 5.0
"""How long after a failure here the end of another rank may be seen to have caused it."""
_LOOK_S = 0.2
_MOST_TOLD = 4096
_log = structlog.get_logger()


@dataclass(frozen=True)
class RankProcess:
    """A process that is a rank; it ends with the pipe."""

    rank: int
    process: subprocess.Popen[bytes]
    orders: Connection
    status_fd: int
    """Descriptor of what it tells of its end."""

    @classmethod
    def start(cls, rank: int) -> "RankProcess":
        """Start one; on the main thread, whose end is its own."""
        reading, writing = os.pipe()
        status_fd, telling = os.pipe()
        module = "tinkermq.actors.learner.ranks.worker"
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(telling)],
                stdin=reading,
                pass_fds=[telling],
                preexec_fn=die_with(os.getpid()),
            )
        finally:
            os.close(reading)
            os.close(telling)
        return cls(rank, process, Connection(writing, readable=False), status_fd)

    @property
    def has_ended(self) -> bool:
        """Whether it is no more."""
        return self.process.poll() is not None

    @property
    def was_out_of_memory(self) -> bool:
        """Whether it has ended because its GPU did not hold a step."""
        return self.process.poll() == EXIT_OUT_OF_MEMORY

    def why_ended(self) -> str:
        """Say how it has ended; to be asked once."""
        last = os.read(self.status_fd, _MOST_TOLD).decode(errors="replace")
        return f"its process ended with code {self.process.returncode}" + (last and f": {last}")

    def close(self, patience_s: float = _END_S) -> None:
        """Tell it to end, and see to it; blocks for `patience_s` at most."""
        if not self.orders.closed:
            self.orders.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            _log.warning("rank_killed", rank=self.rank, after_s=patience_s)
            self.process.kill()
            self.process.wait()
        os.close(self.status_fd)


class ChildRanks(Ranks):
    """The ranks of one machine, as child processes."""

    def __init__(self, config: JobConfig, children: Sequence[RankProcess]) -> None:
        """Speak to processes that have been started."""
        super().__init__(config)
        self._children = children

    @classmethod
    def start(cls, config: JobConfig) -> "ChildRanks":
        """Start what the configuration asks for; on the main thread, whose end is theirs."""
        return cls(config, [RankProcess.start(rank) for rank in range(1, config.learner.ranks)])

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank from 1."""
        return [child.process.pid for child in self._children]

    @contextlib.contextmanager
    def doing(self, order: Order) -> Iterator[None]:
        """Tell all ranks to do something while it is done here.

        Raises EngineError if one of them has ended.
        """
        with self.explaining(order):
            for child in self._children:
                order.send(child.orders)
            yield

    @contextlib.contextmanager
    def explaining(self, order: Order) -> Iterator[None]:
        """Raise EngineError in place of another error of something all do, if a rank has ended."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            if self._children and (ended := self._wait_for_end()) is not None:
                raise _ended(ended, order) from error
            raise

    async def watch(self) -> None:
        """Raise EngineError as soon as a rank ends."""
        while True:
            if (ended := self._first_ended()) is not None:
                raise _ended(ended, None)
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """End all ranks."""
        for child in self._children:
            child.orders.close()
        super().close()
        for child in self._children:
            child.close()

    def _first_ended(self) -> RankProcess | None:
        return next((child for child in self._children if child.has_ended), None)

    def _wait_for_end(self) -> RankProcess | None:
        """A broken connection is noticed before the end of the process that it led to."""
        deadline = time.monotonic() + _SEEN_END_S
        while (ended := self._first_ended()) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return ended


def _ended(child: RankProcess, order: Order | None) -> TinkermqError:
    doing = "waiting" if order is None else order.do
    text = f"rank {child.rank} of the learner (process {child.process.pid}) is gone at {doing!r}: "
    if child.was_out_of_memory:
        return rank_out_of_memory(f"{text}{child.why_ended()}", order)
    return EngineError(
        f"{text}{child.why_ended()}",
        hint="its own lines in the learner's log say why; a code of -9 without one is often a "
        "machine out of memory",
    )


def rank_out_of_memory(text: str, order: Order | None) -> OutOfMemoryError:
    """Return the error of a rank whose GPU did not hold what it was ordered to do."""
    error = OutOfMemoryError(text, hint="lower learner.microbatch_tokens")
    if order is not None and order.do == "step":
        error.step = order.fields["step"]
        error.microbatch_tokens = order.fields["microbatch_tokens"]
    return error
