"""When the learner writes a checkpoint, and what it does with the log behind one."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ...broker.rollouts import RolloutLog
from ...schemas.wire.errors import StorageError
from ..runtime import JobContext
from .tasks.intake import Intake
from .tasks.state import LearnerState
from .training.checkpoint import CheckpointStore

_FINAL_TRIES = 12
_LAST_ROLLOUTS_BYTES = 16 << 20
"""Of the log of a run that has ended so much stays, to be read by people."""
_PAUSE_S = 5.0


class Saver:
    """Writes the checkpoints of one learner and trims the rollout log behind them."""

    def __init__(
        self,
        context: JobContext,
        checkpoints: CheckpointStore,
        state: LearnerState,
        intake: Intake,
        write: Callable[[], Awaitable[Path]],
    ) -> None:
        """`write` brings the state up to date and writes a checkpoint; it returns its folder."""
        self._context = context
        self._checkpoints = checkpoints
        self._state = state
        self._intake = intake
        self._write = write
        self._due_bytes = context.config.limits.rollout_bytes // 4
        self._most_bytes = context.config.limits.rollout_bytes * 3 // 4
        self._failed: StorageError | None = None
        self._next_try = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due after this step, or the log must be trimmed."""
        training, step = self._context.config.training, self._state.step
        if step == self._state.total_steps:
            return False  # the last one is written when the learner ends
        log_is_filling = self._intake.bytes_held > self._due_bytes and not training.keep_rollouts
        return log_is_filling or bool(training.save_freq and step % training.save_freq == 0)

    @property
    def lacks_room(self) -> bool:
        """Whether the last checkpoint is missing because its disk is full."""
        return self._failed is not None and self._failed.is_full

    @property
    def is_to_be_tried_again(self) -> bool:
        """Whether a checkpoint for which there was no room may be tried again now."""
        return self.lacks_room and time.monotonic() >= self._next_try

    async def save(self, *, keep_bytes: int = 0) -> str | None:
        """Write a checkpoint and trim the log behind it; return its folder.

        Of what was trained so many bytes stay in the log; nobody trains them again, since the
        checkpoint says from where on the log counts.
        A full disk does not end the run: the first failure is an event, and None is returned.
        """
        context, state = self._context, self._state
        try:
            folder = await self._write()
        except StorageError as error:
            first, self._failed = self._failed is None, error
            self._next_try = time.monotonic() + _PAUSE_S
            if first:
                await context.event("checkpoint_failed", str(error), step=state.step)
            return None
        self._failed = None
        await context.event("checkpoint_saved", str(folder), step=state.step)
        self._intake.bytes_held = 0
        if not context.config.training.keep_rollouts:
            await self._trim(keep_bytes)
        return str(folder)

    async def _trim(self, keep_bytes: int) -> None:
        """Trim the log behind the checkpoint before this one, which may turn out to be damaged.

        Where the log has no room for that, behind this one.
        """
        log = RolloutLog(self._context.broker, self._context.scope)
        before = await asyncio.to_thread(self._first_needed)
        if before > 1:
            await log.trim(before, keep_bytes=keep_bytes)
        if before < self._state.log_seq and await log.num_bytes() > self._most_bytes:
            await log.trim(self._state.log_seq, keep_bytes=keep_bytes)

    def _first_needed(self) -> int:
        """Return the first entry of the log that training again may need."""
        if not self._checkpoints.keeps_one_before:
            return self._state.log_seq
        try:
            before = self._checkpoints.before_latest()
        except StorageError:
            return self._state.log_seq
        return 1 if before is None else before.log_seq

    async def save_at_the_end(self) -> str:
        """Write the last checkpoint, waiting for room on the disk; return its folder.

        Raises StorageError when something else than room is missing for a minute.
        """
        kept = min(_LAST_ROLLOUTS_BYTES, self._context.config.limits.rollout_bytes // 4)
        left = _FINAL_TRIES
        while left:
            folder = await self.save(keep_bytes=kept)
            if folder is not None:
                return folder
            left -= not self.lacks_room
            with self._context.missing("room on the disk for the last checkpoint"):
                await asyncio.sleep(_PAUSE_S)
        raise StorageError(
            f"the last checkpoint of step {self._state.step} could not be written",
            hint=f"free space under {self._checkpoints.folder}, then `tinkermq resume` the run",
        )
