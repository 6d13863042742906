"""Putting rollouts of a run into its folder: some at each checkpoint, the newest at its end."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from ..schemas.batch import BatchRecord
from ..schemas.wire.errors import TinkermqError
from ..schemas.wire.subjects import JobScope
from .batches import BatchLog
from .client.connection import Broker
from .kept_rollouts import keep_rollout, kept_rollouts, spread, thin_out
from .rollouts import LogEntry, RolloutLog

_PER_CHECKPOINT = 8
_AT_ONCE = 8
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class RolloutKeeper:
    """Keeps rollouts of one run in its folder, for people: what it cannot keep it does without."""

    def __init__(self, broker: Broker, scope: JobScope, run_dir: Path, most_bytes: int) -> None:
        """Keep at most `most_bytes`; 0: nothing."""
        self._log = RolloutLog(broker, scope)
        self._batches = BatchLog(broker, scope)
        self._run_dir = run_dir
        self._most_bytes = most_bytes
        self._batch_seq = 0

    async def sample(self, batch_seq: int) -> None:
        """Keep some groups of the steps since the last call, up to this record of the batch log."""
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
        """Put entries into the folder, the first ones first, until they have so many bytes."""
        there = {one.seq for one in await asyncio.to_thread(kept_rollouts, self._run_dir)}
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
