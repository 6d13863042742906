"""The trainer's service: takes operations into the log and tells their results.

An operation is answered for once it is in the log. It is done when all before it are, see
`working`. After a crash what stands behind the newest state of its model is done again, to the same
bits.
"""

import asyncio
import time
from functools import partial

from ...broker.client.rpc import RequestContext, Service
from ...broker.operations import OperationLog, Unreadable
from ...schemas.tinker.names import ModelName, OperationName
from ...schemas.tinker.operation import (
    AboutModel,
    AwaitResult,
    ModelInfo,
    ModelOperation,
    OperationResult,
    OperationTaken,
)
from ...schemas.wire.errors import BusyError, MessageError, NotFoundError, StateError
from ...schemas.wire.subjects import rpc
from ..runtime import JobContext
from .adapters import Adapters
from .applying import Applying
from .checkpoints.kept import KeptByTrainer
from .models import Models, TrainedModel
from .replaying.archive import Archive
from .shares import Shares
from .showing import Showing
from .states import States
from .working import GAP_S, Worker

_MAKING_S = 20.0


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
        self._states = states
        self._kept = kept
        self._log = OperationLog(context.broker, context.scope)
        tinker = context.config.tinker
        self.models = Models(quantum=tinker.micro_batch_tokens)
        self.shares = Shares(context, self.models.turns.weights, self.models.tokens)
        archive = Archive(states.folder, max_bytes=tinker.history_mb << 20)
        self.worker = Worker(
            context, adapters, applying, states, self.models, self._log, archive, gap_s=gap_s
        )

    async def run(self) -> None:
        """Go on where the last trainer ended, then serve until `stopping` is set."""
        await self._recover()
        await self._open(self._context.service)
        self._context.set_state("working")
        following = asyncio.create_task(self.shares.follow(), name="shares")
        try:
            await self._context.unless_stopping(self.worker.work(self._kept.calls.sweep), None)
            await self.worker.save_all()
        finally:
            following.cancel()

    async def _recover(self) -> None:
        """Bring back the models, and what stands in the log behind their states."""
        await self._log.claim()
        # The log before the states: a trainer that is fenced off may still write one and trim.
        logged, unreadable = await self._log.read_all()
        await asyncio.to_thread(self._kept.load)
        await asyncio.to_thread(self._states.forget_suspended)
        for state in await asyncio.to_thread(self._states.read_all):
            model = self.models.add(state.user, state.name)
            model.info, model.applied, model.saved = state.info, state.applied, state.applied
            model.history, model.tokens = state.history, state.tokens
        for user, operation in logged:
            model = self.models.enqueue(user, operation)
            model.logged = max(model.logged, operation.seq)
            if operation.seq <= model.saved:  # a crash came between state and trimming
                await self._log.trim(user, model.name, operation.seq, operation.seq)
        for entry in unreadable:
            await self._leave(entry)

    async def _leave(self, entry: Unreadable) -> None:
        """Leave a model alone from what cannot be read on; pass over what is of no model."""
        if entry.name is None:
            await self._context.event("operation_unreadable", entry.reason)
            return
        if (model := self.models.find(entry.user, entry.name.model)) is not None:
            await self.worker.leave(model, entry.name.seq, entry.reason)

    async def _open(self, service: Service) -> None:
        job = self._context.scope.job
        name = f"tinker-{job}"
        await service.endpoint("submit", rpc("*", name, "submit"), ModelOperation, self._submit)
        await service.endpoint("result", rpc("*", name, "result"), AwaitResult, self._result)
        await service.endpoint("info", rpc("*", name, "info"), AboutModel, self._info)
        await Showing(self.models, self._context.config.tinker.base).open(service, name)
        await self._kept.calls.open(service, name, self.models)
        await self._kept.snapshots.open(service, self._context.scope)

    # -- what is asked -----------------------------------------------------------------------------

    async def _submit(self, operation: ModelOperation, context: RequestContext) -> OperationTaken:
        """Take an operation into the log; one that is there already is as good."""
        name = operation.name
        taken = OperationTaken(request_id=str(name))
        model = self.models.find(context.user, name.model)
        if (operation.seq == 0) != (model is None) and model is None:
            raise NotFoundError(
                f"there is no model {operation.model}",
                hint="create_model makes one; models of sessions that are over are gone",
            )
        _check_kind(operation)
        if model is None:
            self._kept.sessions.check_owner(context.user, name.model.session)
            await self._make_room(context.user)
        if model is not None and (operation.seq <= model.applied or operation.seq in model.waiting):
            return taken.model_copy(update={"is_new": False})
        if model is not None and model.broken is not None:
            raise self._broken(model, model.broken)
        self._kept.sessions.check_open(context.user, name.model.session)
        if operation.kind == "forward_backward":
            self.shares.check(context.user)
        self.models.check_room(context.user, operation)
        operation = operation.model_copy(update={"time": time.time()})
        is_new = await self._log.append(context.user, operation)
        if not is_new:  # its first form counts, which a trainer before this one may have taken
            operation = await self._first_form(context.user, name, model) or operation
        self.models.enqueue(context.user, operation)
        self.worker.wake()
        return taken.model_copy(update={"is_new": is_new})

    async def _first_form(
        self, user: str, name: OperationName, model: TrainedModel | None
    ) -> ModelOperation | None:
        """Return an operation as it stands in the log; raises MessageError if that is none."""
        try:
            return await self._log.find(user, name)
        except MessageError as error:
            if model is not None:
                await self.worker.leave(model, name.seq, error.message)
            raise

    async def _make_room(self, user: str) -> None:
        """Forget models of sessions that are over where a user has as many as one may have."""
        over = partial(self._kept.sessions.is_over, user)
        while self.models.num_of(user) >= self.models.most:
            idle = [one for one in self.models if one.user == user and not one.waiting]
            gone = [one for one in idle if one.doing is None and over(one.name.session, one.used)]
            if not gone:
                return
            await self.worker.forget(min(gone, key=lambda one: one.used))

    async def _result(self, request: AwaitResult, context: RequestContext) -> OperationResult:
        """Return a result as soon as there is one, or what the operation waits for."""
        name = OperationName(ModelName.parse(request.model), request.seq)
        model = self.models.find(context.user, name.model)
        if model is None or not model.knows(request.seq):
            model = await self._look_in_log(context.user, name, model) or model
        if model is None:
            raise NotFoundError(f"there is no request {name}", hint="its model is gone")
        try:
            async with asyncio.timeout(request.wait_s):
                await self.worker.until_applied(model, request.seq)
        except TimeoutError:
            return OperationResult(queue_reason=self._reason(model, request.seq))
        if model.applied < request.seq and model.broken is not None:
            error = self._broken(model, model.broken)
            return OperationResult(state="failed", error=str(error), category="server")
        found = await self._log.result(context.user, name)
        if found is None:
            raise NotFoundError(
                f"the result of {name} is no longer kept", hint="results are kept for a day"
            )
        return found

    async def _look_in_log(
        self, user: str, name: OperationName, model: TrainedModel | None
    ) -> TrainedModel | None:
        """Take what another trainer has put into the log after this one read it."""
        if (found := await self._first_form(user, name, model)) is None:
            return None
        self.worker.wake()
        return self.models.enqueue(user, found)

    def _broken(self, model: TrainedModel, reason: str) -> StateError:
        seq = model.applied + 1
        return StateError(
            f"nothing more of {model.name} is done, since operation {seq} is not known: {reason}",
            hint="go on in a new model, from a checkpoint: `create_training_client_from_state`",
        )

    def _reason(self, model: TrainedModel, seq: int) -> str:
        if model.has_gap:
            return f"waits for operation {model.applied + 1}, which has not come"
        if seq not in model.waiting:
            return f"operation {seq} has not come"
        ahead = sum(one < seq for one in model.waiting)
        users = self.models.num_users_before(model.user)
        written = "" if self.worker.residence.is_resident(model) else ", it is out of memory"
        return (
            f"{ahead} operations of this model come first, "
            f"{users} other users take turns with its user{written}"
        )

    async def _info(self, request: AboutModel, context: RequestContext) -> ModelInfo:
        model = self.models.find(context.user, ModelName.parse(request.model))
        if model is not None and model.applied < 0:
            await self._until_made(model)
            if model.broken is not None:
                raise self._broken(model, model.broken)
        if model is None or model.info is None:
            raise NotFoundError(f"there is no model {request.model}", hint="see create_model")
        return model.info.model_copy(update={"applied": model.applied})

    async def _until_made(self, model: TrainedModel) -> None:
        """Wait for the operation that makes a model, which a new trainer does again; BusyError."""
        try:
            async with asyncio.timeout(_MAKING_S):
                await self.worker.until_applied(model, 0)
        except TimeoutError:
            raise BusyError(
                f"{model.name} is not made yet: {self._reason(model, 0)}", hint="ask again"
            ) from None


def _check_kind(operation: ModelOperation) -> None:
    """Raise MessageError for what a client cannot ask for."""
    if operation.kind == "missing":
        raise MessageError(f"operation {operation.seq} of a model cannot be missing")
    operation.check_place()
