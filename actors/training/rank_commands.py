"""Commands from rank 0 of a learner to the other ranks.

All ranks run the same code on the same groups, and meet in the collectives of FSDP2. Who the others
are, and how they are told, is `ranks/`; the training step knows this module only.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from ...schemas.config.job import JobConfig
from ...schemas.rollout import Group
from .parallel import Meeting, Parallel


@dataclass(frozen=True)
class Order:
    """One piece of work for all ranks."""

    do: Literal["begin", "step", "gather", "save", "end"]
    fields: dict[str, Any]
    """What it needs to know, as JSON can write it."""
    groups: Sequence[Group] = ()
    seqs: Sequence[int] = ()
    """Where those groups stand in the rollout log, if they do."""

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


class Ranks:
    """The ranks beside rank 0: none, for a learner of one process."""

    def __init__(self, config: JobConfig) -> None:
        """Have no other rank."""
        self._config = config
        self._parallel = Parallel()

    @contextlib.contextmanager
    def beginning(self, folder: Path | None, total_steps: int) -> Iterator[Parallel]:
        """Have all begin with a checkpoint, or the initial model; yield the place among them.

        Raises EngineError if one of them ends meanwhile.
        """
        learner = self._config.learner
        if not learner.sharded:
            yield Parallel.alone()
            return
        meeting = self._meet()
        fields = {
            "config": self._config.model_dump_json(exclude_unset=True),
            "folder": None if folder is None else str(folder),
            "settings": learner.settings,
            "total_steps": total_steps,
            "meeting": meeting.to_map(),
        }
        with self.doing(Order("begin", fields)):
            self._parallel = Parallel.join(0, learner, meeting)
            yield self._parallel

    @contextlib.contextmanager
    def doing(self, order: Order) -> Iterator[None]:
        """Tell all ranks to do something while it is done here.

        Raises EngineError if one of them has ended.
        """
        yield

    @contextlib.contextmanager
    def explaining(self, order: Order) -> Iterator[None]:
        """Raise EngineError in place of torch's error while all do something, if a rank has ended.

        For another thread than that which gives orders, too.
        """
        yield

    async def watch(self) -> None:
        """Raise EngineError as soon as a rank ends."""

    def close(self) -> None:
        """End all ranks."""
        self._parallel.leave()

    def _meet(self) -> Meeting:
        return Meeting.open()
