"""The trainer's service: appends operations to the log and returns their results.

An operation is accepted once it is in the log, and applied after all before it (`worker.py`). After
a crash the operations since the newest state of a model are repeated, to the same bits.
"""

import asyncio
import time
from collections import Counter
from functools import partial
from typing import Any, cast

from ...broker.client.rpc import RequestContext, Service
from ...broker.operations import OperationLog, Unreadable
from ...schemas.config.job import JobConfig
from ...schemas.plan.cards import GpuCard
from ...schemas.plan.settings import choose_learner_settings, find_models
from ...schemas.tinker.names import ModelName, OperationName
from ...schemas.tinker.operation import (
    AboutModel,
    AboutSessions,
    AwaitResult,
    ModelCurves,
    ModelInfo,
    ModelOperation,
    ModelShown,
    OperationResult,
    OperationTaken,
    SessionsShown,
    TenantShown,
)
from ...schemas.wire.errors import BusyError, MessageError, NotFoundError, StateError
from ...schemas.wire.subjects import rpc
from ..policy.devices import own_card, own_device
from ..policy.model_folder import load_model_config
from ..runtime import JobContext, settle_memory
from ..storage.held_models import held_models
from ..storage.tinker_checkpoints import TINKER_FOLDER
from ..training.numerics import settle_numerics
from ..training.parallel import once_in_torch
from .adapter_cache import AdapterStates
from .apply import OperationApplier
from .catalogue import Catalogue
from .catalogue_service import CatalogueService
from .fair_share import ShareFollower
from .models import Models, TrainedModel
from .training.trainer import AdapterTrainer
from .worker import GAP_S, Worker

# -- models, curves and the queue, as users see them -----------------------------------------------


class Introspection:
    """Answers users' requests for their models, curves and the queue."""

    def __init__(self, models: Models, base: str) -> None:
        """Show `models`, all on one base model."""
        self._models = models
        self._base = base

    async def open(self, service: Service, name: str) -> None:
        """Answer from now on."""
        await service.endpoint("sessions", rpc("*", name, "sessions"), AboutSessions, self._list)
        await service.endpoint("curves", rpc("*", name, "curves"), AboutModel, self._curves)

    async def _list(self, _: AboutSessions, context: RequestContext) -> SessionsShown:
        mine = [self._shown(model) for model in self._models if model.user == context.user]
        return SessionsShown(
            base=self._base, models=[item for item in mine if item], tenants=self._tenants()
        )

    async def _curves(self, request: AboutModel, context: RequestContext) -> ModelCurves:
        model = self._models.find(context.user, ModelName.parse(request.model))
        shown = None if model is None else self._shown(model)
        if model is None or shown is None:
            raise NotFoundError(
                f"there is no model {request.model}", hint="see your models: `/tinker`"
            )
        return ModelCurves(shown=shown, points=model.history.points())

    def _shown(self, model: TrainedModel) -> ModelShown | None:
        """Return the public information about a model, None before it is made."""
        if model.info is None:
            return None
        return ModelShown(
            info=model.info.model_copy(update={"applied": model.applied}),
            steps=model.history.steps,
            tokens=model.tokens,
            waiting=len(model.waiting),
            waiting_bytes=_waiting_bytes(model),
            reason=self._reason(model),
            idle_s=time.monotonic() - model.used if model.used else None,
            last=model.history.last,
        )

    def _reason(self, model: TrainedModel) -> str:
        if model.has_gap:
            return f"for operation {model.applied + 1}, which has not arrived"
        before = self._models.num_before(model)
        return f"its turn; {before} other models have operations ready" if model.waiting else ""

    def _tenants(self) -> list[TenantShown]:
        models, waiting, size = Counter[str](), Counter[str](), Counter[str]()
        tokens = Counter[str]()
        for model in self._models:
            models[model.user] += 1
            tokens[model.user] += model.tokens
            waiting[model.user] += len(model.waiting)
            size[model.user] += _waiting_bytes(model)
        return [
            TenantShown(
                user=user,
                models=count,
                tokens=tokens[user],
                waiting=waiting[user],
                waiting_bytes=size[user],
            )
            for user, count in sorted(models.items())
        ]


def _waiting_bytes(model: TrainedModel) -> int:
    return sum(len(item.body) for item in model.waiting.values())


_MAKING_S = 20.0
"""How long a request for information about a model waits until it is made."""


class TrainerService:
    """Serves one base model's adapters to the users of the pool."""

    def __init__(
        self,
        context: JobContext,
        adapters: AdapterTrainer,
        applying: OperationApplier,
        states: AdapterStates,
        catalogue: Catalogue,
        *,
        gap_s: float = GAP_S,
    ) -> None:
        """Prepare; `run` serves."""
        self._context = context
        self._states = states
        self._catalogue = catalogue
        self._log = OperationLog(context.broker, context.scope)
        self.models = Models(quantum=context.config.tinker.micro_batch_tokens)
        self._catalogue_service = CatalogueService(catalogue, self.models)
        self.shares = ShareFollower(context, self.models.turns.weights, self.models.tokens)
        self.worker = Worker(
            context, adapters, applying, states, self.models, self._log, gap_s=gap_s
        )

    async def run(self) -> None:
        """Continue where the last trainer ended, and serve until `stopping` is set."""
        await self._recover()
        await self._open(self._context.service)
        self._context.set_state("working")
        following = asyncio.create_task(self.shares.follow(), name="shares")
        try:
            await self.worker.work(self._catalogue_service.sweep)
            await self.worker.save_all()
        finally:
            following.cancel()

    async def _recover(self) -> None:
        """Restore the models from their states, and the operations that follow in the log."""
        await self._log.claim()
        # The log is read before the states: a fenced-off trainer may still write one and trim.
        logged, unreadable = await self._log.read_all()
        await asyncio.to_thread(self._catalogue.load)
        await asyncio.to_thread(self._states.forget_suspended)
        states, damaged = await asyncio.to_thread(self._states.read_all)
        for state in states:
            model = self.models.add(state.user, state.name)
            model.info, model.applied, model.saved = state.info, state.applied, state.applied
            model.history, model.tokens = state.history, state.tokens
            model.is_pending = state.is_pending
        for user, operation in logged:
            model = self.models.enqueue(user, operation)
            model.logged = max(model.logged, operation.seq)
            if operation.seq <= model.saved:  # a crash came between state and trimming
                await self._log.trim(user, model.name, operation.seq, operation.seq)
        for entry in unreadable:
            await self._stop_unreadable(entry)
        for user, name, reason in damaged:
            await self.worker.stop_model(self.models.add(user, name), 0, reason)

    async def _stop_unreadable(self, entry: Unreadable) -> None:
        """Stop the model of a log entry that cannot be read; report one without a model."""
        if entry.name is None:
            await self._context.event("operation_unreadable", entry.reason)
            return
        if (model := self.models.find(entry.user, entry.name.model)) is not None:
            await self.worker.stop_model(model, entry.name.seq, entry.reason)

    async def _open(self, service: Service) -> None:
        job = self._context.scope.job
        name = f"tinker-{job}"
        await service.endpoint("submit", rpc("*", name, "submit"), ModelOperation, self._submit)
        await service.endpoint("result", rpc("*", name, "result"), AwaitResult, self._result)
        await service.endpoint("info", rpc("*", name, "info"), AboutModel, self._info)
        await Introspection(self.models, self._context.config.tinker.base).open(service, name)
        await self._catalogue_service.open(service, self._context.scope)

    async def _submit(self, operation: ModelOperation, context: RequestContext) -> OperationTaken:
        """Append an operation to the log, unless it is there already."""
        name = operation.name
        reply = OperationTaken(request_id=str(name))
        model = self.models.find(context.user, name.model)
        if (operation.seq == 0) != (model is None) and model is None:
            raise NotFoundError(
                f"there is no model {operation.model}",
                hint="create_model makes one; models of ended sessions are removed",
            )
        if operation.kind == "missing":
            raise MessageError(f"operation {operation.seq} of a model cannot be missing")
        operation.check_place()
        if model is None:
            self._catalogue.check_owner(context.user, name.model.session)
            await self._make_room(context.user)
        if model is not None and (operation.seq <= model.applied or operation.seq in model.waiting):
            return reply.model_copy(update={"is_new": False})
        if model is not None and model.broken is not None:
            raise self._broken(model, model.broken)
        self._catalogue.check_open(context.user, name.model.session)
        if operation.kind == "forward_backward":
            self.shares.check(context.user)
        self.models.check_room(context.user, operation)
        operation = operation.model_copy(update={"time": time.time()})
        is_new = await self._log.append(context.user, operation)
        if not is_new:  # its first form counts, which an earlier trainer may have appended
            operation = await self._first_form(context.user, name, model) or operation
        self.models.enqueue(context.user, operation)
        self.worker.wake()
        return reply.model_copy(update={"is_new": is_new})

    async def _first_form(
        self, user: str, name: OperationName, model: TrainedModel | None
    ) -> ModelOperation | None:
        """Return an operation as it is in the log; raises MessageError for an unreadable one."""
        try:
            return await self._log.find(user, name)
        except MessageError as error:
            if model is not None:
                await self.worker.stop_model(model, name.seq, error.message)
            raise

    async def _make_room(self, user: str) -> None:
        """Forget models of ended sessions while a user has the most models allowed."""
        over = partial(self._catalogue.is_over, user)
        while self.models.num_of(user) >= self.models.max_models:
            idle = [model for model in self.models if model.user == user and not model.waiting]
            ended = [
                item for item in idle if item.running is None and over(item.name.session, item.used)
            ]
            if not ended:
                return
            await self.worker.forget(min(ended, key=lambda model: model.used))

    async def _result(self, request: AwaitResult, context: RequestContext) -> OperationResult:
        """Wait for a result; return it, or what the operation waits for."""
        name = OperationName(ModelName.parse(request.model), request.seq)
        model = self.models.find(context.user, name.model)
        if model is None or not model.has_received(request.seq):
            model = await self._find_in_log(context.user, name, model) or model
        if model is None:
            raise NotFoundError(f"there is no request {name}", hint="its model was removed")
        try:
            async with asyncio.timeout(request.wait_s):
                await self.worker.until_applied(model, request.seq)
        except TimeoutError:
            return OperationResult(queue_reason=self._reason(model, request.seq))
        if model.applied < request.seq and model.broken is not None:
            error = self._broken(model, model.broken)
            return OperationResult(state="failed", error=str(error), category="server")
        reply = await self._log.result(context.user, name)
        if reply is None:
            raise NotFoundError(
                f"the result of {name} is no longer kept", hint="results are kept for a day"
            )
        return reply

    async def _find_in_log(
        self, user: str, name: OperationName, model: TrainedModel | None
    ) -> TrainedModel | None:
        """Enqueue an operation that another trainer appended after this one read the log."""
        if (operation := await self._first_form(user, name, model)) is None:
            return None
        self.worker.wake()
        return self.models.enqueue(user, operation)

    def _broken(self, model: TrainedModel, reason: str) -> StateError:
        seq = model.applied + 1
        return StateError(
            f"{model.name} has ended, since its operation {seq} cannot be read: {reason}",
            hint="continue in a new model, from a checkpoint: `create_training_client_from_state`",
        )

    def _reason(self, model: TrainedModel, seq: int) -> str:
        if seq <= model.applied:
            return f"operation {seq} is done, the state of its model is being written"
        if model.has_gap:
            return f"waits for operation {model.applied + 1}, which has not arrived"
        if seq not in model.waiting:
            return f"operation {seq} has not arrived"
        ahead = sum(item < seq for item in model.waiting)
        users = self.models.num_users_before(model.user)
        note = "" if self.worker.cache.is_in_memory(model) else "; the model is not in memory"
        return (
            f"{ahead} operations of this model come first, "
            f"{users} other users take turns with its user{note}"
        )

    async def _info(self, request: AboutModel, context: RequestContext) -> ModelInfo:
        model = self.models.find(context.user, ModelName.parse(request.model))
        if model is not None and model.applied < 0:
            await self._until_made(model)
            if model.broken is not None:
                raise self._broken(model, model.broken)
        if model is None or model.info is None:
            raise NotFoundError(
                f"there is no model {request.model}", hint="create_model returns a model's id"
            )
        return model.info.model_copy(update={"applied": model.applied})

    async def _until_made(self, model: TrainedModel) -> None:
        """Wait for the operation that makes a model, which a new trainer may repeat.

        Raises BusyError after a while.
        """
        try:
            async with asyncio.timeout(_MAKING_S):
                await self.worker.until_applied(model, 0)
        except TimeoutError:
            raise BusyError(
                f"{model.name} is not made yet: {self._reason(model, 0)}", hint="ask again"
            ) from None


# -- starting a service ----------------------------------------------------------------------------


async def run_trainer(context: JobContext) -> None:
    """Serve until stopped."""
    await context.serve_control()
    config = context.config
    settle_numerics(config.learner, on_gpu=own_device().type == "cuda")
    base = await asyncio.to_thread(_base_info, config)
    recomputes = recomputes_on(own_card(), config, shared=context.record.is_colocated)
    opening = partial(_open_trainer, config, recomputes=recomputes)
    adapters = await once_in_torch(config.learner.threads, opening)
    name = base.base
    folder = context.run_dir / TINKER_FOLDER
    states = AdapterStates(folder)
    catalogue = Catalogue(folder, max_bytes=config.tinker.checkpoint_mb << 20)
    applying = OperationApplier(adapters, catalogue, base)
    settle_memory()
    await context.event("trainer_ready", f"{name} can be trained", base=name)
    await TrainerService(context, adapters, applying, states, catalogue).run()


def _base_info(config: JobConfig) -> ModelInfo:
    """Return the information of a service's models, apart from their names and adapters."""
    folder = config.model.path
    read = load_model_config(folder, trust_remote_code=config.model.trust_remote_code)
    arch = str(cast(Any, read).get_text_config().model_type)
    base = config.tinker.base
    return ModelInfo(model="-", base=base, folder=held_models.named(folder), arch=arch, rank=1)


def recomputes_on(card: GpuCard | None, config: JobConfig, *, shared: bool) -> bool:
    """Return whether passes recompute activations; `auto` is chosen as for a learner."""
    if card is None:
        return config.learner.recomputes
    pass_tokens, rank = config.tinker.micro_batch_tokens, config.tinker.max_rank
    learner = config.learner.model_copy(update={"microbatch_tokens": pass_tokens})
    lora = config.lora.model_copy(update={"rank": rank})
    job = config.model_copy(update={"learner": learner, "lora": lora})
    settings = choose_learner_settings(job, find_models(job), card, shared=shared)
    return settings.gradient_checkpointing


def _open_trainer(config: JobConfig, *, recomputes: bool) -> AdapterTrainer:
    """Load the base model of a service; raises ModelError."""
    return AdapterTrainer.open(
        config.model.path,
        base_model=config.tinker.base,
        trust_remote_code=config.model.trust_remote_code,
        attention=config.model.attn_implementation,
        dtype=config.learner.dtype,
        gradient_checkpointing=recomputes,
        device=own_device(),
        microbatch_tokens=config.tinker.micro_batch_tokens,
        max_rank=config.tinker.max_rank,
        mixed=config.tinker.mixed_micro_batches,
    )
