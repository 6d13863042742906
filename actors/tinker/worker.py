"""Apply the operations of all models piece by piece, in the one thread that computes.

A result is stored before it is returned. A model's state is written when its log has grown long,
after an `optim_step` if one comes in time; then the log is trimmed.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import structlog

from ...broker.operations import OperationLog
from ...schemas.tinker.names import OperationName
from ...schemas.tinker.operation import Company, ModelOperation, OperationResult
from ...schemas.wire.errors import MessageError, ModelError, StateError, StorageError
from ..runtime import JobContext
from ..training.parallel import torch_thread
from .adapter_cache import AdapterCache, AdapterStates
from .apply import OperationApplier
from .models import Models, TrainedModel
from .operations import Piece, RunningOperation, as_failure
from .training.trainer import AdapterTrainer

# -- one piece, or the micro-batches of several models in one pass ---------------------------------


class Turn(NamedTuple):
    """An operation whose next piece may be done."""

    model: TrainedModel
    operation: ModelOperation
    companies: Sequence[Company] | None
    """Companies of an earlier computation, which is repeated to the bit; None: there was none."""


class Pieces:
    """Does pieces of operations."""

    def __init__(
        self,
        adapters: AdapterTrainer,
        applying: OperationApplier,
        cache: AdapterCache,
        *,
        micro_tokens: int,
    ) -> None:
        """Compute about `micro_tokens` in one pass over several models."""
        self._adapters = adapters
        self._applying = applying
        self._cache = cache
        self._micro_tokens = micro_tokens

    def do(self, turn: Turn, others: Sequence[Turn]) -> list[tuple[Turn, Piece]]:
        """Do the next piece of an operation; return all pieces that were done.

        If it is a micro-batch, those of `others` that fit are computed with it. Raises StorageError
        if there is not room for the model and none can be made.
        """
        piece = self._begin(turn)
        if piece is not None:
            return [(turn, piece)]
        waiting, done = self._collect_losses(turn, others)
        losses = [_running(item).loss for item in waiting]
        tokens = [loss.next_tokens for loss in losses]
        try:
            computed = self._adapters.advance(losses)
        except Exception as error:  # noqa: BLE001  it is the operation's result
            return [*done, (turn, self._update_size(turn, _running(turn).failed(error)))]
        for item, loss, num in zip(waiting, losses, tokens, strict=True):
            if loss in computed:
                _running(item).computed()
                done.append((item, num))
        return done

    def _collect_losses(
        self, turn: Turn, others: Sequence[Turn]
    ) -> tuple[list[Turn], list[tuple[Turn, Piece]]]:
        """Return turns whose micro-batches may share a pass, and pieces of others before theirs."""
        waiting: list[Turn] = [turn]
        done: list[tuple[Turn, Piece]] = []
        room = self._micro_tokens - _running(turn).loss.next_tokens
        for other in others:
            if room <= 0:
                break
            if not self._cache.fits(other.model):
                continue  # sharing a pass is not worth writing a model to disk
            piece = self._begin(other)
            if piece is not None:
                done.append((other, piece))
                continue
            waiting.append(other)
            room -= _running(other).loss.next_tokens
        return waiting, done

    def _begin(self, turn: Turn) -> Piece | None:
        """Begin an operation, or continue it; return a piece, or None before a micro-batch."""
        model = turn.model
        if model.running is None:
            try:
                self._cache.admit(model)
            except ModelError as error:
                return as_failure(error).model_copy(update={"category": "server"})
            pieces = self._applying.begin(model, turn.operation, turn.companies)
            model.running = RunningOperation(pieces)
        piece = model.running.next()
        return piece if piece is None else self._update_size(turn, piece)

    def _update_size(self, turn: Turn, piece: Piece) -> Piece:
        if isinstance(piece, OperationResult):
            self._cache.update_size(turn.model)
        return piece


def _running(turn: Turn) -> RunningOperation:
    assert turn.model.running is not None
    return turn.model.running


T = TypeVar("T")
_SAVES = frozenset({"save_weights", "save_weights_for_sampler", "save_weights_external"})
SAVE_OPERATIONS, SAVE_BYTES = 64, 32 << 20
"""A model's state is written when its log has grown so long since the last one."""
_IDLE_S = 5.0
GAP_S = 600.0
"""How long operations wait for one that has not arrived."""
_CHECK_S = 1.0
_SWEEP_S = 30.0
_NO_ROOM_S = 0.05
"""Pause before checking again for room in memory for a waiting model."""
_FULL_S = 1.0
"""Pause after a write to a full disk."""
_MAX_MATES = 32
"""Models considered for sharing a pass with another."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Worker:
    """Applies the operations of all models, one piece after the other."""

    def __init__(
        self,
        context: JobContext,
        adapters: AdapterTrainer,
        applying: OperationApplier,
        states: AdapterStates,
        models: Models,
        log: OperationLog,
        *,
        gap_s: float,
    ) -> None:
        """Apply the operations that wait in `models`."""
        self._context = context
        self._adapters = adapters
        self._states = states
        self._models = models
        self._log = log
        self._gap_s = gap_s
        tinker = context.config.tinker
        self.cache = AdapterCache(
            adapters,
            states,
            models,
            max_models=tinker.adapters_in_memory,
            max_bytes=tinker.adapters_mb << 20,
        )
        self._idle_s = tinker.idle_s
        self._mixed = tinker.mixed_micro_batches
        self._pieces = Pieces(
            adapters, applying, self.cache, micro_tokens=tinker.micro_batch_tokens
        )
        self._thread = torch_thread(context.config.learner.threads)
        self._arrived = asyncio.Event()
        self._changed = asyncio.Condition()
        self._gaps: dict[str, tuple[int, float]] = {}
        self._has_room = True

    def wake(self) -> None:
        """Wake the loop: an operation has arrived."""
        self._arrived.set()

    async def until_applied(self, model: TrainedModel, seq: int) -> None:
        """Wait until an operation of a model has taken effect, or never will."""
        async with self._changed:
            await self._changed.wait_for(lambda: model.applied >= seq or model.broken is not None)

    async def work(self, sweep: Callable[[], Awaitable[object]]) -> None:
        """Apply operations piece by piece until `stopping` is set; `sweep` runs now and then."""
        checked = swept = time.monotonic()
        while not self._context.stopping.is_set():
            if (now := time.monotonic()) - checked > _CHECK_S:
                await self._check_models(now)
                checked = now
            if now - swept > _SWEEP_S:
                await sweep()
                swept = now
            chosen = self._models.choose(self.cache.find_admissible())
            if chosen is not None:
                await self._advance(*chosen)
                continue
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NO_ROOM_S if self._models.has_ready else _CHECK_S):
                    await self._context.unless_stopping(self._arrived.wait(), None)

    async def save_all(self) -> None:
        """Write the states of all models that are in memory."""
        for model in self._models:
            await self._save(model)

    async def forget(self, model: TrainedModel) -> None:
        """Forget a model without waiting operations; its named checkpoints stay."""
        self._models.remove(model)
        await self._log.forget(model.user, model.name)
        await self._in_thread(partial(self._drop, model))

    def _drop(self, model: TrainedModel) -> None:
        self.cache.drop(model)
        self._states.forget(model)

    async def _advance(self, model: TrainedModel, operation: ModelOperation) -> None:
        """Do the next piece of an operation, and micro-batches of others in the same pass."""
        if model.running is None:
            result = await self._saved_before(model, operation)
            if operation.kind in _SAVES:
                await self._log.check_claim()
            if result is not None:
                await self._finish(model, operation, result)
                return
        turn = Turn(model, operation, await self._past_companies(model, operation))
        others: list[Turn] = []
        if self._mixed and operation.kind == "forward_backward":
            mates = self._models.find_pass_mates(model, self.cache.find_admissible())[:_MAX_MATES]
            others = [Turn(*item, await self._past_companies(*item)) for item in mates]
        try:
            done = await self._in_thread(partial(self._pieces.do, turn, others))
        except StorageError as error:  # no model can be written to disk, so memory stays full
            await self._report_no_room(error)
            await asyncio.sleep(_FULL_S)
            return
        for item, piece in done:
            if isinstance(piece, OperationResult):
                await self._finish(item.model, item.operation, piece)
            else:
                self._models.charge(item.model, piece)
                self._context.progressed()

    async def _past_companies(
        self, model: TrainedModel, operation: ModelOperation
    ) -> Sequence[Company] | None:
        """Return the companies of an operation whose result a trainer before this one stored."""
        if model.running is not None or operation.seq > model.logged:
            return None
        result = await self._stored(model, operation.name)
        return None if result is None else result.companies

    async def _finish(
        self, model: TrainedModel, operation: ModelOperation, result: OperationResult
    ) -> None:
        """Store the result of an operation, then answer waiting requests."""
        if not await self._log.put_result(model.user, operation.name, result):
            await self._compare(model, operation.name, result)
        async with self._changed:  # requests for the result are answered after this block
            self._models.applied(model, operation)
            model.running = None
            model.used = time.monotonic()
            self._context.progressed()
            try:
                if operation.kind == "load_weights" and result.state == "done":
                    await self._save(model)  # the loaded checkpoint may be deleted after the reply
            finally:
                self._changed.notify_all()
        if self._is_long(model):
            await self._save(model)

    async def _saved_before(
        self, model: TrainedModel, operation: ModelOperation
    ) -> OperationResult | None:
        """Return the result of a save that a trainer before this one stored.

        The checkpoint may have been deleted since, so it is not saved again.
        """
        if operation.kind not in _SAVES or operation.seq > model.logged:
            return None
        return await self._stored(model, operation.name)

    async def _stored(self, model: TrainedModel, name: OperationName) -> OperationResult | None:
        """Return the result in the log; None if it is missing or, with an event, unreadable."""
        try:
            return await self._log.result(model.user, name)
        except MessageError as error:
            text = f"the result of {name} of {model.user} cannot be read: {error.message}"
            await self._context.event("result_unreadable", text, operation=str(name))
            return None

    async def _compare(
        self, model: TrainedModel, name: OperationName, result: OperationResult
    ) -> None:
        """Report a repeated operation whose result differs from the stored one."""
        before = await self._stored(model, name)
        if before is not None and (before.state, before.body) != (result.state, result.body):
            text = f"operation {name} of {model.user} had another result when it was done again"
            await self._context.event("replay_differs", text, operation=str(name))

    async def _report_no_room(self, error: StorageError) -> None:
        """Report once that states cannot be written; the writes are repeated."""
        if self._has_room:
            self._has_room = False
            await self._context.event("trainer_has_no_room", f"{error.message} ({error.hint})")

    def _is_long(self, model: TrainedModel) -> bool:
        behind, num_bytes = model.applied - model.saved, model.tail_bytes
        if model.is_pending:  # wait longer: after the next step a state needs no gradients
            behind, num_bytes = behind // 2, num_bytes // 2
        return behind >= SAVE_OPERATIONS or num_bytes >= SAVE_BYTES

    async def _save(self, model: TrainedModel) -> None:
        """Write a model's state, and trim its log."""
        if model.running is not None or model.applied == model.saved:
            return  # the state in memory may be ahead of the sent results
        if not self.cache.is_in_memory(model):
            return
        if self._models.find(model.user, model.name) is not model:
            return  # `forget` removed it
        await self._log.check_claim()
        try:
            await self._in_thread(partial(self._states.save, self._adapters, model))
        except StorageError as error:  # its operations stay in the log
            await self._report_no_room(error)
            return
        self._has_room = True
        since, model.saved, model.tail_bytes = model.saved + 1, model.applied, 0
        await self._log.trim(model.user, model.name, model.saved, since)

    async def _check_models(self, now: float) -> None:
        """Save idle models, evict long idle ones, and fail operations that never arrived."""
        await self._log.check_claim()
        for model in self._models:
            if model.has_gap:
                await self._end_gap(model, now)
            else:
                self._gaps.pop(model.key, None)
            idle_s = self._idle_s if model.is_pending else _IDLE_S
            if not model.waiting and now - model.used > idle_s:
                await self._save(model)
        await self._save_suspended(now)
        await self._in_thread(partial(self.cache.evict_idle, self._idle_s))

    async def _save_suspended(self, now: float) -> None:
        """Save one suspended, unused model, so that its log can be trimmed.

        One at a time, as it is loaded into memory for that.
        """
        for model in self._models:
            is_saved = model.info is None or model.applied == model.saved
            is_used = bool(model.waiting) or now - model.used <= self._idle_s
            if is_saved or is_used or self.cache.is_in_memory(model):
                continue
            try:
                await self._in_thread(partial(self.cache.admit, model))
                await self._save(model)
            except (ModelError, StorageError) as error:
                _log.warning("model_not_saved", model=model.key, reason=error.message)
            return

    async def _end_gap(self, model: TrainedModel, now: float) -> None:
        """Fail a missing operation once those after it have waited long enough."""
        seq = model.applied + 1
        gap, since = self._gaps.setdefault(model.key, (seq, now))
        if gap != seq:
            self._gaps[model.key] = (seq, now)
        elif now - since > self._gap_s:
            await self._log.append(
                model.user, ModelOperation(kind="missing", model=str(model.name), seq=seq, body=b"")
            )
            try:
                match = await self._log.find(model.user, OperationName(model.name, seq))
            except MessageError as error:
                await self.stop_model(model, seq, error.message)
                return
            if match is None:
                raise StateError(f"operation {seq} of {model.key} is in the log and cannot be read")
            self._models.enqueue(model.user, match)
            self._arrived.set()

    async def stop_model(self, model: TrainedModel, seq: int, reason: str) -> None:
        """Stop a model at an operation that cannot be read, and report it once."""
        async with self._changed:
            if seq <= model.applied or seq in model.unreadable:
                return
            text = f"{model.key} stops at operation {seq}, which cannot be read: {reason}"
            await self._context.event("operation_unreadable", text, model=model.key)
            model.unreadable[seq] = reason
            self._changed.notify_all()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
