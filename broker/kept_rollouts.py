"""Rollouts kept in the run's folder, where they outlive the broker.

The log is trimmed behind checkpoints, and is removed when a run is archived. So at each checkpoint
some groups trained since the previous one are copied into the run's folder, and at the end the
newest of the log, within a bound in bytes: beyond it, every other one of the older half is removed,
so that the rest is spread over the run. Each is a file `rollouts/SEQ-STEP-TASK.group` with the
entry's bytes; STEP is 0 for a group that was not trained.
"""

import asyncio
import contextlib
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import structlog

from ..schemas.local.folder import Folder
from ..schemas.task import BatchRecord
from ..schemas.wire.errors import NotFoundError, StorageError, TinkermqError
from ..schemas.wire.subjects import JobScope
from .client.connection import Broker
from .jetstream.direct_get import StoredMessage
from .rollouts import BatchLog, LogEntry, RolloutLog, read_entry

FOLDER = "rollouts"
_NAME = re.compile(r"(\d{1,18})-(\d{1,18})-(\d{1,18})\.group")
_LARGEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptAt:
    """A group in a run's folder."""

    seq: int
    """Its sequence in the log."""
    step: int | None
    """The step that trained it."""
    task: int
    num_bytes: int
    run_dir: Path
    name: str
    """Its path relative to the run's folder."""

    def message(self) -> StoredMessage | None:
        """Return its log entry; None if the file is gone or invalid."""
        try:
            with Folder(self.run_dir) as folder:
                payload = folder.read(self.name, _LARGEST_BYTES)
        except (OSError, StorageError):
            return None
        return StoredMessage(f"rollout.{self.task}", self.seq, payload, {})


def kept_rollouts(run_dir: str | Path) -> list[KeptAt]:
    """Return the groups in a run's folder, in the order of the log; links are skipped.

    Returns none if the folder is not on this machine or cannot be read.
    """
    files: list[KeptAt] = []
    if not run_dir:
        return files
    with contextlib.suppress(OSError, StorageError), Folder(run_dir) as folder:
        for entry in folder.entries(FOLDER):
            match = _NAME.fullmatch(entry.name)
            if match is None or entry.is_folder:
                continue
            seq, step, task = map(int, match.groups())
            files.append(
                KeptAt(seq, step or None, task, entry.num_bytes, Path(run_dir), entry.path)
            )
    return sorted(files, key=lambda entry: entry.seq)


def keep_rollout(run_dir: Path, seq: int, payload: bytes, task: int, step: int | None) -> None:
    """Write a log entry into a run's folder, atomically.

    Raises OSError when it cannot be written.
    """
    with Folder(run_dir, make=True) as folder:
        folder.write(f"{FOLDER}/{seq}-{step or 0}-{task}.group", payload)


def thin_out(run_dir: Path, most_bytes: int) -> None:
    """Remove groups until at most `most_bytes` remain: every other one of the older half first."""
    entries: list[KeptAt] = kept_rollouts(run_dir)
    while entries and sum(entry.num_bytes for entry in entries) > most_bytes:
        older = entries[: max(1, len(entries) // 2)]
        removed = older[::2]
        with Folder(run_dir) as folder:
            for entry in removed:
                folder.unlink(entry.name)
        removed_seqs = {entry.seq for entry in removed}
        entries = [entry for entry in entries if entry.seq not in removed_seqs]


def spread(behind: int, last: int, most: int) -> list[int]:
    """Return at most `most` evenly spread numbers above `behind`, up to and including `last`."""
    every = max(1, -(-(last - behind) // most))
    return sorted(range(last, behind, -every))


# Copy rollouts of a run into its folder: some at each checkpoint, the newest at its end.

_PER_CHECKPOINT = 8
_AT_ONCE = 8
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class RolloutKeeper:
    """Copies rollouts of one run into its folder for inspection; failures are only logged."""

    def __init__(self, broker: Broker, scope: JobScope, run_dir: Path, most_bytes: int) -> None:
        """Keep at most `most_bytes`; 0: keep none."""
        self._log = RolloutLog(broker, scope)
        self._batches = BatchLog(broker, scope)
        self._run_dir = run_dir
        self._most_bytes = most_bytes
        self._batch_seq = 0

    async def sample(self, batch_seq: int) -> None:
        """Keep some groups of the steps since the last call, up to this batch record."""
        if not self._most_bytes or batch_seq <= self._batch_seq:
            return
        behind, self._batch_seq = self._batch_seq, batch_seq
        try:
            records = await self._batches.read_some(spread(behind, batch_seq, _PER_CHECKPOINT))
            steps = {_one_of(record): record.step for record in records if record.seqs}
            await self._keep(list(steps), steps, self._most_bytes)
        except (OSError, TinkermqError) as error:
            self._not_kept(error)

    async def keep_newest(self) -> None:
        """Keep the newest entries of the log, within half of the bytes."""
        if not self._most_bytes:
            return
        try:
            first, last = await self._log.first_seq(), await self._log.last_seq()
            records = await self._batches.read_all()
            steps = {seq: record.step for _, record in records for seq in record.seqs}
            await self._keep(range(last, first - 1, -1), steps, self._most_bytes // 2)
        except (OSError, TinkermqError) as error:
            self._not_kept(error)

    async def _keep(self, seqs: Sequence[int], steps: Mapping[int, int], most_bytes: int) -> None:
        """Write entries into the folder in this order, up to so many bytes."""
        there = {entry.seq for entry in await asyncio.to_thread(kept_rollouts, self._run_dir)}
        for at in range(0, len(seqs), _AT_ONCE):
            missing = (seq for seq in seqs[at : at + _AT_ONCE] if seq not in there)
            for entry in await asyncio.gather(*map(self._log.get, missing)):
                if entry is None or entry.number is None:
                    continue
                most_bytes -= len(entry.payload)
                if most_bytes < 0:
                    break
                await asyncio.to_thread(self._write, entry, entry.number, steps.get(entry.seq))
            if most_bytes < 0:
                break
        await asyncio.to_thread(thin_out, self._run_dir, self._most_bytes)

    def _write(self, entry: LogEntry, task: int, step: int | None) -> None:
        keep_rollout(self._run_dir, entry.seq, entry.payload, task, step)

    def _not_kept(self, error: Exception) -> None:
        _log.warning("rollouts_not_kept", folder=str(self._run_dir), error=str(error))


def _one_of(record: BatchRecord) -> int:
    return record.seqs[record.step % len(record.seqs)]


# The rollouts of a run: in its log, and older ones in its folder.


class RunRollouts:
    """Entries of a run's log by sequence, also after the log was trimmed, archived or lost."""

    def __init__(
        self, log: RolloutLog | None, first: int, last: int, in_folder: list[KeptAt]
    ) -> None:
        """The log holds `first` to `last`; entries `in_folder` within this range are ignored."""
        self._log = log
        self.first, self.last = first, last
        outside = [entry for entry in in_folder if not first <= entry.seq <= last]
        self._in_folder = {entry.seq: entry for entry in outside}
        inside = range(first, last + 1)
        before = sorted(seq for seq in self._in_folder if seq < first)
        behind = sorted(seq for seq in self._in_folder if seq > last)
        self._parts: tuple[Sequence[int], ...] = (before, inside, behind)

    @classmethod
    async def open(cls, broker: Broker, scope: JobScope, run_dir: str) -> "RunRollouts":
        """Open the entries of a run; if its streams were removed, only those of its folder."""
        in_folder = await asyncio.to_thread(kept_rollouts, run_dir)
        log = RolloutLog(broker, scope)
        try:
            first, last = await log.first_seq(), await log.last_seq()
        except NotFoundError:
            return cls(None, 1, 0, in_folder)
        return cls(log, first, last, in_folder)

    @classmethod
    def of_folder(cls, run_dir: str | Path) -> "RunRollouts":
        """Open the entries of a run's folder, without a broker."""
        return cls(None, 1, 0, kept_rollouts(run_dir))

    def __len__(self) -> int:
        """Return the number of entries, including those that the log lost meanwhile."""
        return sum(len(part) for part in self._parts)

    def all_seqs(self) -> Iterator[int]:
        """Return all sequences, in order."""
        return chain(*self._parts)

    def before(self, seq: int | None, most: int) -> list[int]:
        """Return the newest sequences below `seq` (None: of all), newest first."""
        seqs: list[int] = []
        for part in reversed(self._parts):
            end = len(part) if seq is None else bisect_left(part, seq)
            seqs += part[max(0, end - (most - len(seqs))) : end][::-1]
            if len(seqs) == most:
                break
        return seqs

    def after(self, seq: int) -> int | None:
        """Return the next sequence after `seq`; None at the end."""
        for part in self._parts:
            place = bisect_left(part, seq + 1)
            if place < len(part):
                return part[place]
        return None

    @property
    def steps(self) -> dict[int, int]:
        """The step that trained each entry in the folder; the batch log has those of the others."""
        return {seq: entry.step for seq, entry in self._in_folder.items() if entry.step is not None}

    async def get(self, seq: int) -> LogEntry | None:
        """Return an entry, or None if it is not there (any more)."""
        if (entry := self._in_folder.get(seq)) is not None:
            message = await asyncio.to_thread(entry.message)
            return None if message is None else read_entry(message)
        return None if self._log is None else await self._log.get(seq)
