"""The rollouts of a run, wherever they are: in its log, and older ones in its folder."""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from ..schemas.wire.errors import NotFoundError
from ..schemas.wire.subjects import JobScope
from .client.connection import Broker
from .kept_rollouts import KeptAt, kept_rollouts
from .rollouts import LogEntry, RolloutLog, read_entry


class RunRollouts:
    """Entries of a run's log by sequence, also of one that was trimmed, archived or lost."""

    def __init__(self, log: RolloutLog | None, first: int, last: int, kept: list[KeptAt]) -> None:
        """The log holds `first` to `last`; of `kept` counts what lies outside of it."""
        self._log = log
        self.first, self.last = first, last
        self._kept = {one.seq: one for one in kept if not first <= one.seq <= last}
        inside = range(first, last + 1)
        before = sorted(seq for seq in self._kept if seq < first)
        behind = sorted(seq for seq in self._kept if seq > last)
        self._parts: tuple[Sequence[int], ...] = (before, inside, behind)

    @classmethod
    async def open(cls, broker: Broker, scope: JobScope, run_dir: str) -> "RunRollouts":
        """Look what there is; a job whose streams were removed has what its folder holds."""
        kept = await asyncio.to_thread(kept_rollouts, run_dir)
        log = RolloutLog(broker, scope)
        try:
            first, last = await log.first_seq(), await log.last_seq()
        except NotFoundError:
            return cls(None, 1, 0, kept)
        return cls(log, first, last, kept)

    @classmethod
    def of_folder(cls, run_dir: str | Path) -> "RunRollouts":
        """Return what the folder of a run holds, without a broker."""
        return cls(None, 1, 0, kept_rollouts(run_dir))

    def __len__(self) -> int:
        """Return how many entries there are, those included that the log lost meanwhile."""
        return sum(len(part) for part in self._parts)

    def before(self, seq: int | None, most: int) -> list[int]:
        """Return the newest sequences below one (None: of all), newest first."""
        found: list[int] = []
        for part in reversed(self._parts):
            end = len(part) if seq is None else bisect_left(part, seq)
            found += part[max(0, end - (most - len(found))) : end][::-1]
            if len(found) == most:
                break
        return found

    def after(self, seq: int) -> int | None:
        """Return the next sequence behind one; None at the end."""
        for part in self._parts:
            place = bisect_left(part, seq + 1)
            if place < len(part):
                return part[place]
        return None

    @property
    def steps(self) -> dict[int, int]:
        """The step that trained each entry of the folder; the batch log knows of the others."""
        return {seq: one.step for seq, one in self._kept.items() if one.step is not None}

    async def get(self, seq: int) -> LogEntry | None:
        """Return an entry, or None if it is not there (any more)."""
        if (kept := self._kept.get(seq)) is not None:
            message = await asyncio.to_thread(kept.message)
            return None if message is None else read_entry(message)
        return None if self._log is None else await self._log.get(seq)
