"""The other ranks of a learner: child processes that do what rank 0, the actor, does.

Rank 0 tells them each piece of torch work before it does it itself, through a pipe to each; all run
the same code on the same groups, and meet in the collectives of FSDP2. They die with rank 0; one
that ends by itself fails the learner, which is started again like any that failed.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import structlog

from ....broker.programs.process import die_with
from ....schemas.config.job import JobConfig
from ....schemas.rollout import Group
from ....schemas.wire.errors import EngineError
from .parallel import Parallel

_END_S = 5.0
"""How long a rank may take to end after it was told to; it has nothing to write then."""
_SEEN_END_S = 5.0
"""How long after a failure here the end of another rank may be seen to have caused it."""
_LOOK_S = 0.2
_log = structlog.get_logger()


@dataclass(frozen=True)
class Order:
    """One piece of work for all ranks."""

    do: Literal["begin", "step", "gather", "save"]
    fields: dict[str, Any]
    """What it needs to know, as JSON can write it."""
    groups: Sequence[Group] = ()

    def send(self, pipe: Connection) -> None:
        """Write the order into a pipe."""
        pipe.send_bytes(json.dumps([self.do, self.fields, len(self.groups)]).encode())
        for group in self.groups:
            pipe.send_bytes(group.to_bytes())

    @classmethod
    def receive(cls, pipe: Connection) -> "Order":
        """Wait for the next order; EOFError when rank 0 has none any more, or is gone."""
        do, fields, num_groups = json.loads(pipe.recv_bytes())
        return cls(do, fields, [Group.from_bytes(pipe.recv_bytes()) for _ in range(num_groups)])


@dataclass(frozen=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    orders: Connection


class Ranks:
    """The ranks beside rank 0; none of them for a learner of one process."""

    def __init__(self, config: JobConfig, children: Sequence[_Child] = ()) -> None:
        """Speak to processes that have been started."""
        self._config = config
        self._children = children
        self._parallel = Parallel()
        self._place: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def start(cls, config: JobConfig) -> "Ranks":
        """Start what the configuration asks for; on the main thread, whose end is theirs."""
        return cls(config, [_start(rank) for rank in range(1, config.learner.ranks)])

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank from 1."""
        return [child.process.pid for child in self._children]

    @contextlib.contextmanager
    def beginning(self, folder: Path | None, total_steps: int) -> Iterator[Parallel]:
        """Have all begin with a checkpoint, or the initial model; yield the place among them.

        Raises EngineError if one of them ends meanwhile.
        """
        learner = self._config.learner
        if not learner.sharded:
            yield Parallel.alone()
            return
        self._place = tempfile.TemporaryDirectory(prefix="tinkermq-ranks-")
        store = Path(self._place.name) / "store"
        fields = {
            "config": self._config.model_dump_json(exclude_unset=True),
            "folder": None if folder is None else str(folder),
            "total_steps": total_steps,
            "store": str(store),
        }
        with self.doing(Order("begin", fields)):
            self._parallel = Parallel.join(0, learner, store)
            yield self._parallel

    @contextlib.contextmanager
    def doing(self, order: Order) -> Iterator[None]:
        """Tell all ranks to do something while it is done here.

        Raises EngineError if one of them has ended.
        """
        try:
            for child in self._children:
                order.send(child.orders)
            yield
        except (OSError, RuntimeError) as error:
            if self._children and (ended := self._wait_for_end()) is not None:
                raise _ended(ended, order.do) from error
            raise

    async def watch(self) -> None:
        """Raise EngineError as soon as a rank ends."""
        while True:
            if (ended := self._first_ended()) is not None:
                raise _ended(ended, "waiting")
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """End all ranks."""
        for child in self._children:
            child.orders.close()
        self._parallel.leave()
        for child in self._children:
            try:
                child.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                _log.warning("rank_killed", rank=child.rank, after_s=_END_S)
                child.process.kill()
                child.process.wait()
        if self._place is not None:
            self._place.cleanup()

    def _first_ended(self) -> _Child | None:
        return next((one for one in self._children if one.process.poll() is not None), None)

    def _wait_for_end(self) -> _Child | None:
        """A broken connection is noticed before the end of the process that it led to."""
        deadline = time.monotonic() + _SEEN_END_S
        while (ended := self._first_ended()) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return ended


def _start(rank: int) -> _Child:
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinkermq.actors.learner.training.rank_worker", str(rank)],
            stdin=reading,
            preexec_fn=die_with(os.getpid()),
        )
    finally:
        os.close(reading)
    return _Child(rank, process, Connection(writing, readable=False))


def _ended(child: _Child, doing: str) -> EngineError:
    return EngineError(
        f"rank {child.rank} of the learner (process {child.process.pid}) ended with code "
        f"{child.process.returncode} at {doing!r}",
        hint="its own lines in the learner's log say why; a code of -9 without one is often a "
        "machine out of memory",
    )
