"""The trainer's service: takes operations into the log, does each in its turn, tells the results.

An operation is answered for once it is in the log. It is done when all before it are, in the one
thread that computes; its result is stored before anybody hears of it. A model's state is written
behind an `optim_step`, and the log is trimmed there: after a crash what stands behind the newest
state is done again, to the same bits.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ...broker.client.rpc import RequestContext, Service
from ...broker.operations import OperationLog
from ...schemas.tinker.names import ModelName, OperationName
from ...schemas.tinker.operation import (
    AboutModel,
    AwaitResult,
    ModelInfo,
    ModelOperation,
    OperationResult,
    OperationTaken,
)
from ...schemas.wire.errors import MessageError, NotFoundError, StateError
from ...schemas.wire.subjects import rpc
from ..runtime import JobContext
from .adapters import Adapters
from .applying import Applying
from .checkpoints.kept import KeptByTrainer
from .models import Models, TrainedModel
from .showing import Showing
from .states import States

T = TypeVar("T")
_FIRST = frozenset({"create_model", "load_weights"})
_SAVES = frozenset({"save_weights", "save_weights_for_sampler", "save_weights_external"})
SAVE_OPERATIONS, SAVE_BYTES = 64, 32 << 20
"""A model's state is written when so much stands in the log behind the last one."""
_IDLE_S = 5.0
GAP_S = 600.0
"""How long operations wait for one that has not come."""
_LOOK_S = 1.0
_SWEEP_S = 30.0


class TrainerService:
    """Serves one base model's adapters to the users of the pool."""

    def __init__(
        self,
        context: JobContext,
        adapters: Adapters,
        applying: Applying,
        states: States,
        kept: KeptByTrainer,
        *,
        gap_s: float = GAP_S,
    ) -> None:
        """Prepare; `run` does the work."""
        self._context = context
        self._adapters = adapters
        self._applying = applying
        self._states = states
        self._kept = kept
        self._gap_s = gap_s
        self._log = OperationLog(context.broker, context.scope)
        self._models = Models()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._arrived = asyncio.Event()
        self._changed = asyncio.Condition()
        self._gaps: dict[str, tuple[int, float]] = {}

    async def run(self) -> None:
        """Go on where the last trainer ended, then serve until `stopping` is set."""
        await self._recover()
        await self._open(self._context.service)
        self._context.set_state("working")
        await self._context.unless_stopping(self._work(), None)
        for model in self._models:
            await self._save(model)

    async def _recover(self) -> None:
        """Bring back the models, and what stands in the log behind their states."""
        await asyncio.to_thread(self._kept.load)
        for state in await asyncio.to_thread(self._states.read_all):
            model = self._models.add(state.user, state.name)
            model.info, model.applied, model.saved = state.info, state.applied, state.applied
            model.history = state.history
            await self._in_thread(partial(self._states.load, self._adapters, model))
        for user, operation in await self._log.read_all():
            model = self._models.enqueue(user, operation)
            model.logged = max(model.logged, operation.seq)
            if operation.seq <= model.saved:  # a crash came between state and trimming
                await self._log.trim(user, model.name, operation.seq, operation.seq)

    async def _open(self, service: Service) -> None:
        job = self._context.scope.job
        name = f"tinker-{job}"
        await service.endpoint("submit", rpc("*", name, "submit"), ModelOperation, self._submit)
        await service.endpoint("result", rpc("*", name, "result"), AwaitResult, self._result)
        await service.endpoint("info", rpc("*", name, "info"), AboutModel, self._info)
        await Showing(self._models, self._context.config.tinker.base).open(service, name)
        await self._kept.calls.open(service, name, self._models)

    # -- what is asked -----------------------------------------------------------------------------

    async def _submit(self, operation: ModelOperation, context: RequestContext) -> OperationTaken:
        """Take an operation into the log; one that is there already is as good."""
        name = operation.name
        taken = OperationTaken(request_id=str(name))
        model = self._models.find(context.user, name.model)
        if (operation.seq == 0) != (model is None) and model is None:
            raise NotFoundError(
                f"there is no model {operation.model}",
                hint="create_model makes one; models of sessions that are over are gone",
            )
        _check_kind(operation)
        if model is None:
            self._kept.sessions.check_owner(context.user, name.model.session)
        if model is not None and (operation.seq <= model.applied or operation.seq in model.waiting):
            return taken.model_copy(update={"is_new": False})
        self._models.check_room(context.user, operation)
        operation = operation.model_copy(update={"time": time.time()})
        is_new = await self._log.append(context.user, operation)
        if not is_new:  # its first form counts, which a trainer before this one may have taken
            operation = await self._log.find(context.user, name) or operation
        self._models.enqueue(context.user, operation)
        self._arrived.set()
        return taken.model_copy(update={"is_new": is_new})

    async def _result(self, request: AwaitResult, context: RequestContext) -> OperationResult:
        """Return a result as soon as there is one, or what the operation waits for."""
        name = OperationName(ModelName.parse(request.model), request.seq)
        model = self._models.find(context.user, name.model)
        if model is None:
            raise NotFoundError(f"there is no request {name}", hint="its model is gone")
        try:
            async with asyncio.timeout(request.wait_s), self._changed:
                await self._changed.wait_for(lambda: model.applied >= request.seq)
        except TimeoutError:
            return OperationResult(queue_reason=self._reason(model, request.seq))
        found = await self._log.result(context.user, name)
        if found is None:
            raise NotFoundError(
                f"the result of {name} is no longer kept", hint="results are kept for a day"
            )
        return found

    def _reason(self, model: TrainedModel, seq: int) -> str:
        if model.has_gap:
            return f"waits for operation {model.applied + 1}, which has not come"
        if seq not in model.waiting:
            return f"operation {seq} has not come"
        before = self._models.num_before(model)
        ahead = sum(one < seq for one in model.waiting)
        return f"{ahead} operations of this model and {before} of other models come first"

    async def _info(self, request: AboutModel, context: RequestContext) -> ModelInfo:
        model = self._models.find(context.user, ModelName.parse(request.model))
        if model is None or model.info is None:
            raise NotFoundError(f"there is no model {request.model}", hint="see create_model")
        return model.info.model_copy(update={"applied": model.applied})

    # -- what is done ------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Do one operation after the other, and look after those that wait, for ever."""
        looked = swept = time.monotonic()
        while True:
            if (now := time.monotonic()) - looked > _LOOK_S:
                await self._look(now)
                looked = now
            if now - swept > _SWEEP_S:
                await self._kept.calls.sweep()
                swept = now
            chosen = self._models.choose()
            if chosen is not None:
                await self._apply(*chosen)
                continue
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._arrived.wait()

    async def _apply(self, model: TrainedModel, operation: ModelOperation) -> None:
        began = time.monotonic()
        result = await self._saved_before(model, operation)
        if result is None:
            result = await self._in_thread(partial(self._applying.apply, model, operation))
        if not await self._log.put_result(model.user, operation.name, result):
            await self._compare(model, operation.name, result)
        self._models.applied(model, operation, time.monotonic() - began)
        model.used = time.monotonic()
        self._context.progressed()
        async with self._changed:
            self._changed.notify_all()
        if operation.kind == "load_weights" and result.state == "done":
            await self._save(model, behind_step=True)  # what it has loaded may be deleted
        elif operation.kind == "optim_step" and self._is_long(model):
            await self._save(model, behind_step=True)

    async def _saved_before(
        self, model: TrainedModel, operation: ModelOperation
    ) -> OperationResult | None:
        """Return the result of a save that a trainer before this one has done.

        What it saved may have been deleted since, so it is not done again.
        """
        if operation.kind not in _SAVES or operation.seq > model.logged:
            return None
        return await self._log.result(model.user, operation.name)

    async def _compare(
        self, model: TrainedModel, name: OperationName, result: OperationResult
    ) -> None:
        """Say so where an operation that was done again had another result."""
        before = await self._log.result(model.user, name)
        if before is not None and (before.state, before.body) != (result.state, result.body):
            text = f"operation {name} of {model.user} had another result when it was done again"
            await self._context.event("replay_differs", text, operation=str(name))

    def _is_long(self, model: TrainedModel) -> bool:
        behind = model.applied - model.saved
        return behind >= SAVE_OPERATIONS or model.tail_bytes >= SAVE_BYTES

    async def _save(self, model: TrainedModel, *, behind_step: bool = False) -> None:
        """Write a model's state, if its last operation was a step, and trim its log."""
        if model.info is None or model.applied == model.saved:
            return
        if not behind_step and not await self._is_behind_step(model):
            return
        await self._in_thread(partial(self._states.save, self._adapters, model))
        since, model.saved, model.tail_bytes = model.saved + 1, model.applied, 0
        await self._log.trim(model.user, model.name, model.saved, since)

    async def _is_behind_step(self, model: TrainedModel) -> bool:
        name = OperationName(model.name, model.applied)
        last = await self._log.find(model.user, name)
        return last is not None and last.kind in ("optim_step", "load_weights")

    async def _look(self, now: float) -> None:
        """Save models that are idle, and end gaps that nobody closes."""
        for model in self._models:
            if model.has_gap:
                await self._end_gap(model, now)
            else:
                self._gaps.pop(model.key, None)
            if not model.waiting and now - model.used > _IDLE_S:
                await self._save(model)

    async def _end_gap(self, model: TrainedModel, now: float) -> None:
        """Let those behind a number that never comes go on, once they have waited long enough."""
        seq = model.applied + 1
        gap, since = self._gaps.setdefault(model.key, (seq, now))
        if gap != seq:
            self._gaps[model.key] = (seq, now)
        elif now - since > self._gap_s:
            await self._log.append(
                model.user, ModelOperation(kind="missing", model=str(model.name), seq=seq, body=b"")
            )
            found = await self._log.find(model.user, OperationName(model.name, seq))
            if found is None:
                raise StateError(f"operation {seq} of {model.key} is in the log and cannot be read")
            self._models.enqueue(model.user, found)
            self._arrived.set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _check_kind(operation: ModelOperation) -> None:
    """Raise MessageError for what cannot stand at its number."""
    kind = operation.kind
    fits = kind in _FIRST if operation.seq == 0 else kind != "create_model"
    if kind == "missing" or not fits:
        raise MessageError(
            f"operation {operation.seq} of a model cannot be {kind}",
            hint="create_model and load_weights make a model, as its operation 0",
        )
