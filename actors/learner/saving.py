"""The checkpoints of a learner: writes and uploads them, and trims the log behind them.

Training waits for the copy from which a checkpoint is written, and for the previous checkpoint if
it is still being written; the rest happens in the background.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from ...broker.kept_rollouts import RolloutKeeper
from ...broker.rollouts import RolloutLog
from ...schemas.config.sections import BROKER
from ...schemas.local.disk import in_thread, with_room
from ...schemas.wire.errors import ModelError, StorageError, TinkermqError
from ..runtime import JobContext
from ..storage.adapters import name_bases_by_url
from ..storage.checkpoints import CheckpointMirror
from ..storage.files import link_tree
from ..storage.stores import BrokerStore
from ..training.checkpoint import CheckpointStore, keep_weights
from ..training.checkpoint_copy import CheckpointCopy
from ..training.state import LearnerState
from .compute import Compute
from .intake import Intake

_FINAL_TRIES = 12
_LAST_ROLLOUTS_BYTES = 16 << 20
"""Bytes of the log that stay readable after the end of a run."""
_PAUSE_S = 5.0
_WRITING_SHARE = 10
_UPLOAD_S = 600.0
_UPLOAD_TRIES = 3
"""Tries of a request before its failure is reported; the upload is then retried forever."""
_DRAIN_S = 8.0
"""Nodes give draining actors 20 s. Steps that are not in the store by then are trained again."""
_CLOSE_S = 8.0
"""How long a failed learner waits for the checkpoint that it is writing."""


class CheckpointAge:
    """The time since a checkpoint was written. Pure: the caller passes the time, in seconds."""

    def __init__(self, most_s: float, now: float) -> None:
        """A checkpoint is due after `most_s` (0: never); the run begins at `now`."""
        self._most_s = most_s
        self._since = now
        self._took_s = 0.0

    def saved(self, began: float, ended: float) -> None:
        """Record that a checkpoint was written."""
        self._since, self._took_s = ended, ended - began

    def is_over(self, now: float) -> bool:
        """Return whether a checkpoint is due; writing takes at most a tenth of the time."""
        patience = max(self._most_s, _WRITING_SHARE * self._took_s)
        return bool(self._most_s) and now - self._since >= patience


class StatePart(Protocol):
    """A part of the learner whose state is part of checkpoints."""

    def write_to(self, state: LearnerState) -> None:
        """Write the part's state into the state of a checkpoint."""
        ...


class Saver:
    """Writes the checkpoints of a learner in the background, and trims the log behind them."""

    def __init__(
        self,
        context: JobContext,
        checkpoints: CheckpointStore,
        state: LearnerState,
        intake: Intake,
        compute: Compute,
        parts: Sequence[StatePart],
    ) -> None:
        """`compute` copies the models; `parts` update `state` before it is copied."""
        self._context = context
        self._checkpoints = checkpoints
        self._state = state
        self._intake = intake
        self._compute = compute
        self._parts = parts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: asyncio.Task[str | None] | None = None
        self._kept_weights: tuple[int, Path] | None = None
        self._saved_seq = state.log_seq
        self._due_bytes = context.config.limits.rollout_bytes // 4
        self._most_bytes = context.config.limits.rollout_bytes * 3 // 4
        self._failed: StorageError | None = None
        self._next_try = 0.0
        self._keep_bytes = 0
        run_dir, kept_bytes = context.run_dir, context.config.training.kept_rollout_bytes
        self._keeper = RolloutKeeper(context.broker, context.scope, run_dir, kept_bytes)
        self._age = CheckpointAge(context.config.training.save_minutes * 60, time.monotonic())
        mirror = open_mirror(context, tries=_UPLOAD_TRIES)
        if mirror is not None and checkpoints.judged is not None:
            mirror.spared = checkpoints.judged.spared
        self._uploads = None if mirror is None else Uploads(context, mirror, self._trim)

    async def upload(self) -> None:
        """Upload checkpoints to the job's store, if it has one, forever."""
        if self._uploads is None:
            return
        local = await asyncio.to_thread(self._checkpoints.first_seqs)
        for step in await self._uploads.begin(local):
            await self._uploads.add_checkpoint(step, local[step], self._checkpoints.path(step))
        await self._uploads.upload_all()

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due after this step, or the log must be trimmed."""
        training, step = self._context.config.training, self._state.step
        if step == self._state.total_steps:
            return False  # the last one is written at the end
        log_is_filling = self._intake.bytes_held > self._due_bytes and not training.keep_rollouts
        is_old = self._age.is_over(time.monotonic())
        every = [training.save_freq, training.test_freq if training.keep_best else 0]
        if any(freq and step % freq == 0 for freq in every):
            return True
        return not self.is_writing and (log_is_filling or is_old)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    @property
    def missing(self) -> str:
        """What checkpoints lack, so that the log cannot be trimmed; empty if they lack nothing."""
        if self.lacks_room:
            return "room on the disk for a checkpoint"
        stuck = self._uploads is not None and self._uploads.trouble is not None
        return self._uploads.missing if self._uploads is not None and stuck else ""

    @property
    def lacks_room(self) -> bool:
        """Whether the last checkpoint was not written because its disk is full."""
        return self._failed is not None and self._failed.is_full

    @property
    def is_to_be_tried_again(self) -> bool:
        """Whether it is time to retry a checkpoint that did not fit on the disk."""
        return self.lacks_room and not self.is_writing and time.monotonic() >= self._next_try

    async def save(self, *, keep_bytes: int = 0) -> str | None:
        """Write a checkpoint, wait for it, and return its folder; see `begin`."""
        await self.begin(keep_bytes=keep_bytes)
        return await self.finish()

    async def begin(self, *, keep_bytes: int = 0) -> None:
        """Copy a checkpoint, write it in the background, and trim the log behind it.

        A checkpoint that is still being written is finished first. `keep_bytes` of trained groups
        stay in the log; they are not trained again, since the checkpoint has its place in the log.
        A full disk does not end the run: the first failure is reported as an event.
        """
        await self.finish()
        held_bytes = self._intake.bytes_held
        for part in self._parts:
            part.write_to(self._state)
        state = self._state.model_copy(deep=True)
        copied = await self._compute.copy()
        self._keep_bytes = keep_bytes
        self._writing = asyncio.create_task(
            self._write(state, copied, held_bytes), name=f"checkpoint {state.step}"
        )

    async def finish(self) -> str | None:
        """Wait for the checkpoint in progress; return its folder, None without one.

        Raises the error of a checkpoint that could not be written, unless its disk is full.
        """
        if self._writing is None:
            return None
        with self._context.waiting("the last checkpoint, which is being written"):
            folder = await asyncio.shield(self._writing)  # the end of a run must not interrupt it
        self._writing = None
        return folder

    async def check(self) -> None:
        """Raise the error of the last checkpoint, if it has failed."""
        if self._writing is not None and not self.is_writing:
            await self.finish()

    async def close(self) -> None:
        """Wait a few seconds for the checkpoint in progress."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_CLOSE_S)
            if not self._writing.done():
                self._writing.cancel()
            elif not self._writing.cancelled():
                self._writing.exception()  # raised by `finish`, or the run had failed before
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _write(
        self, state: LearnerState, copied: CheckpointCopy, held_bytes: int
    ) -> str | None:
        """Write a copy, and trim the log; return the checkpoint's folder, None if it failed."""
        context, began = self._context, time.monotonic()
        try:
            write = partial(self._checkpoints.save, state, copied.write)
            folder = await self._in_thread(write)
        except StorageError as error:
            await self._note_failure(state.step, copied, error)
            return None
        except TinkermqError:
            raise
        except Exception as error:  # a library's, or code that came with the model
            outcome = await self._keep_weights(state.step, copied)
            raise ModelError(
                f"a checkpoint could not be saved: {type(error).__name__}: {error}; {outcome}",
                hint="complete the model's folder; a new run can start from the weights",
            ) from error
        copied.release()
        self._failed, self._saved_seq = None, state.log_seq
        self._age.saved(began, time.monotonic())
        await context.event("checkpoint_saved", str(folder), step=state.step)
        self._intake.bytes_held -= held_bytes
        await self._keeper.sample(state.batch_seq)
        if self._uploads is not None:
            await self._uploads.add_checkpoint(state.step, state.log_seq, folder)
        else:
            await self._trim()
        return str(folder)

    async def _note_failure(self, step: int, copied: CheckpointCopy, error: StorageError) -> None:
        """Report the first failure to write a checkpoint, which is retried."""
        first, self._failed = self._failed is None, error
        self._next_try = time.monotonic() + _PAUSE_S
        if not error.is_full:
            outcome = await self._keep_weights(step, copied)
            self._failed = StorageError(f"{error.message}; {outcome}", hint=error.hint)
        if first:
            await self._context.event("checkpoint_failed", str(self._failed), step=step)

    async def _keep_weights(self, step: int, copied: CheckpointCopy) -> str:
        """Save the weights of a step without a checkpoint, once; return a sentence about it."""
        if self._kept_weights is None or self._kept_weights[0] != step:
            run_dir, job = self._context.run_dir, self._context.scope.job
            places = [run_dir, Path(tempfile.gettempdir()) / job]

            def keep() -> Path:
                return keep_weights(places, step, copied.weights(), self._compute.write_form)

            try:
                self._kept_weights = step, await self._in_thread(keep)
            except TinkermqError as error:
                return error.message
        return f"the weights of step {step} are in {self._kept_weights[1]}, as safetensors"

    async def _in_thread(self, work: Callable[[], Path]) -> Path:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _trim(self) -> None:
        """Trim the log behind the second newest checkpoint, since the newest may be damaged.

        If the log is too full for that, trim it behind the newest. With a store, only stored
        checkpoints count.
        """
        if self._context.config.training.keep_rollouts:
            return
        log, keep = RolloutLog(self._context.broker, self._context.scope), self._keep_bytes
        before, newest = await asyncio.to_thread(self._first_needed)
        if before > 1:
            await log.trim(before, keep_bytes=keep)
        if before < newest and await log.num_bytes() > self._most_bytes:
            await log.trim(newest, keep_bytes=keep)

    def _first_needed(self) -> tuple[int, int]:
        """Return the first entry behind the second newest checkpoint, and behind the newest."""
        if self._uploads is None:
            return self._first_needed_here(), self._saved_seq
        seqs = [1, *(seq for _, seq in sorted(self._uploads.first_seqs.items()))]
        return seqs[-2 if self._checkpoints.keeps_one_before else -1], seqs[-1]

    def _first_needed_here(self) -> int:
        if not self._checkpoints.keeps_one_before:
            return self._saved_seq
        try:
            before = self._checkpoints.before_latest()
        except StorageError:
            return self._saved_seq
        return 1 if before is None else before.log_seq

    async def save_at_the_end(self) -> str:
        """Write the last checkpoint, waiting for room on the disk; return its folder.

        Raises StorageError if it has failed for a minute for another reason.
        """
        kept_bytes = min(_LAST_ROLLOUTS_BYTES, self._context.config.limits.rollout_bytes // 4)
        left = _FINAL_TRIES
        while left:
            folder = await self.save(keep_bytes=kept_bytes)
            if folder is not None:
                await self._keeper.keep_newest()
                await self._until_uploaded()
                return folder
            left -= not self.lacks_room
            with self._context.missing("room on the disk for the last checkpoint"):
                await asyncio.sleep(_PAUSE_S)
        why = "" if self._failed is None else f": {self._failed.message}"
        raise StorageError(
            f"the last checkpoint of step {self._state.step} could not be written{why}",
            hint=f"free space under {self._checkpoints.folder}, then `tinkermq resume` the run",
        )

    async def _until_uploaded(self) -> None:
        """Wait until the last checkpoint is in the store; a draining learner waits only seconds.

        Raises StorageError.
        """
        if self._uploads is None:
            return
        ends = self._state.step == self._state.total_steps or self._context.stop_asked
        if await self._uploads.finished(_UPLOAD_S if ends else _DRAIN_S) or not ends:
            return
        raise StorageError(
            f"the last checkpoint of step {self._state.step} is only in {self._checkpoints.folder} "
            f"of this machine: {self._uploads.trouble or 'its upload took too long'}",
            hint="check the store, then `tinkermq resume` the run",
        )


def open_mirror(context: JobContext, *, tries: int = 6) -> CheckpointMirror | None:
    """Open the store of a job's checkpoints, on the loop; return None for a job without.

    Raises StorageError.
    """
    training, url = context.config.training, context.config.storage.url
    if url is None:
        return None
    if url == BROKER:
        store = BrokerStore(context.broker, context.scope)
        return CheckpointMirror(store, keep_last=training.keep_last, keep_every=training.keep_every)
    return CheckpointMirror.of_run(
        url,
        context.scope,
        keep_last=training.keep_last,
        keep_every=training.keep_every,
        tries=tries,
    )


# -- uploads of a learner --------------------------------------------------------------------------
#
# Checkpoints are uploaded while training continues, one at a time. Waiting ones are hard links in
# `uploading/` of the run's folder, since the run may remove its own meanwhile. Only the newest and
# those that are kept for good wait; the newest goes first. A failed upload is repeated until it
# succeeds: until a checkpoint is in the store, the log is not trimmed behind it.


class _Upload(NamedTuple):
    step: int
    first_seq: int
    held: Path


class Uploads:
    """The checkpoints of one learner on their way to the store."""

    def __init__(
        self,
        context: JobContext,
        mirror: CheckpointMirror,
        uploaded: Callable[[], Awaitable[None]],
    ) -> None:
        """`uploaded` is called after each upload of a checkpoint."""
        self._context = context
        self._mirror = mirror
        self._uploaded = uploaded
        self._folder = context.run_dir / "uploading"
        self._waiting: list[_Upload] = []
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._begun = asyncio.Event()
        self.trouble: TinkermqError | OSError | None = None
        self.first_seqs: dict[int, int] = {}
        """First log entry behind each checkpoint in the store, by step."""

    @property
    def missing(self) -> str:
        """Name of the wait while an upload fails."""
        return f"the store {self._mirror.store.url} for a checkpoint"

    async def begin(self, local: dict[int, int]) -> list[int]:
        """Return the local checkpoints (step: first log entry) that are not in the store.

        Raises StorageError for a store that cannot be written.
        """
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        there = {checkpoint.step for checkpoint in await asyncio.to_thread(self._mirror.whole)}
        self.first_seqs = {step: seq for step, seq in local.items() if step in there}
        self._idle.set()
        self._begun.set()
        return [step for step in local if step not in there]

    async def add_checkpoint(self, step: int, first_seq: int, folder: Path) -> None:
        """Upload a checkpoint in its turn; its folder may be removed meanwhile."""
        await self._begun.wait()
        held = self._folder / f"{folder.name}.{first_seq}"

        def hold() -> None:
            link_tree(folder, held)
            name_bases_by_url(held)

        await with_room(in_thread(hold), "a checkpoint to upload", self._context.missing)
        waiting, steps = self._waiting, self._kept_steps()
        self._waiting = [item for item in waiting if item.step in steps and item.held != held]
        self._waiting.append(_Upload(step, first_seq, held))
        self._idle.clear()
        self._changed.set()
        for item in waiting:
            if item.step not in steps and item.held != held:
                await asyncio.to_thread(shutil.rmtree, item.held, ignore_errors=True)

    async def upload_all(self) -> None:
        """Upload the waiting checkpoints, forever."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                while self._waiting:
                    await self._upload(self._waiting.pop())
                self._idle.set()
        finally:
            self._mirror.store.close()

    async def _upload(self, upload: _Upload) -> None:
        """Upload a checkpoint, retrying until it is stored or a newer one waits."""
        step, first_seq, held = upload
        while True:
            try:
                await asyncio.to_thread(self._mirror.upload, step, held)
            except (TinkermqError, OSError) as error:
                await self._failed(step, error)
                if not any(item.step >= step for item in self._waiting):
                    continue
                if isinstance(error, TinkermqError) and step in self._kept_steps(step):
                    self._waiting.insert(0, upload)
                    return
                break
            self.trouble = None
            self.first_seqs[step] = first_seq
            await self._context.event("checkpoint_uploaded", self._mirror.store.url, step=step)
            await self._uploaded()
            break
        await asyncio.to_thread(shutil.rmtree, held, ignore_errors=True)

    def _kept_steps(self, *more: int) -> set[int]:
        """Return which of the stored, waiting and further steps are kept permanently."""
        waiting = (item.step for item in self._waiting)
        return self._mirror.kept(sorted({*self.first_seqs, *waiting, *more}))

    async def _failed(self, step: int, error: TinkermqError | OSError) -> None:
        first, self.trouble = self.trouble is None, error
        if first:
            await self._context.event("checkpoint_upload_failed", str(error), step=step)
        with self._context.missing(self.missing):
            await asyncio.sleep(_PAUSE_S)

    async def finished(self, deadline_s: float) -> bool:
        """Wait until all added checkpoints are in the store; return whether they are."""
        try:
            async with asyncio.timeout(deadline_s):
                with self._context.waiting(f"the upload to {self._mirror.store.url}"):
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True
