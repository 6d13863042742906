"""Apply one operation to one model, in the trainer's thread; every error becomes its result.

It is applied in pieces, between which those of other models may be done.
"""

import json
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import structlog

from ...schemas.tinker import wire
from ...schemas.tinker.checkpoints import metadata_of
from ...schemas.tinker.names import CheckpointKind, CheckpointName
from ...schemas.tinker.operation import (
    ALONE,
    Company,
    ModelInfo,
    ModelOperation,
    OperationKind,
    OperationResult,
)
from ...schemas.tinker.sampling import SamplerName
from ...schemas.wire import errors
from .catalogue import Catalogue, SaveOptions
from .models import TrainedModel
from .operations import RunningPieces, as_failure
from .training.loss_pass import LossPass
from .training.trainer import AdapterTrainer

_KINDS: dict[OperationKind, CheckpointKind] = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
PIECE_TOKENS = 64
"""Cost of a piece of work without a micro-batch."""
_Pieces = Generator[int | LossPass, None, OperationResult]
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class OperationApplier:
    """Applies operations to one set of adapters."""

    def __init__(self, adapters: AdapterTrainer, catalogue: Catalogue, offer: ModelInfo) -> None:
        """Make models on the base of `offer`."""
        self._catalogue = catalogue
        self._adapters = adapters
        self._offer = offer
        self._do: dict[OperationKind, Callable[[TrainedModel, ModelOperation], bytes]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save,
            "save_weights_external": self._save,
            "missing": self._fail_missing,
        }

    def begin(
        self,
        model: TrainedModel,
        operation: ModelOperation,
        companies: Sequence[Company] | None = None,
    ) -> RunningPieces:
        """Yield the pieces of an operation, and its result at last.

        The caller computes the micro-batch of each yielded loss, and throws what that raises into
        the generator. With the `companies` of an earlier computation (empty if all micro-batches
        were alone) the result has the same bits.
        """
        try:
            yield (yield from self._pieces(model, operation, companies))
        except errors.TinkermqError as error:
            yield as_failure(error)
        except Exception as error:  # noqa: BLE001  one model's operation: the others go on
            _log.exception("operation_failed", model=model.key, seq=operation.seq)
            message = f"the trainer failed: {type(error).__name__}; its log has the details"
            yield OperationResult(state="failed", error=message, category="server")

    def _pieces(
        self, model: TrainedModel, operation: ModelOperation, companies: Sequence[Company] | None
    ) -> _Pieces:
        if model.info is None and operation.kind not in ("create_model", "load_weights"):
            raise errors.StateError(
                f"{operation.model} was never made", hint="see the result of its create_model"
            )
        if operation.kind == "forward_backward":
            return (yield from self._forward_backward(model, operation, companies))
        body = self._do[operation.kind](model, operation)
        yield PIECE_TOKENS
        return OperationResult(state="done", body=body)

    def _create(self, model: TrainedModel, operation: ModelOperation) -> bytes:
        body = wire.CreateModelBody.parse(operation.body)
        if body.base_model != self._offer.base:
            raise errors.NotFoundError(
                f"there is no base model {body.base_model!r} here",
                hint=f"this trainer has {self._offer.base}",
            )
        spec, metadata = body.lora_config.spec(), metadata_of(body.user_metadata)
        self._adapters.create(model.key, spec)
        model.info = self._offer.model_copy(
            update={
                "model": operation.model,
                "rank": spec.rank,
                "train_attn": spec.train_attn,
                "train_mlp": spec.train_mlp,
                "train_unembed": spec.train_unembed,
            }
        )
        self._catalogue.begin_run(model.user, model.info, metadata, operation.time)
        return _json({"type": "create_model", "model_id": operation.model})

    def _load(self, model: TrainedModel, operation: ModelOperation) -> bytes:
        body = wire.LoadWeightsBody.parse(operation.body)
        source = body.source()
        metadata = metadata_of(body.user_metadata)
        stored = self._catalogue.folders.find(model.user, source)
        info = stored.info
        if body.base_model not in (None, info.base) or info.base != self._offer.base:
            raise errors.ModelError(
                f"{source} is an adapter of {info.base}, not of "
                f"{body.base_model or self._offer.base}",
                hint="load it into a model of the same base",
            )
        if source.kind != "weights" and body.optimizer:
            raise errors.ConfigError(
                f"{source} does not contain an optimiser", hint="load one that save_weights made"
            )
        self._adapters.load(model.key, stored.folder, with_optimizer=body.optimizer)
        model.is_pending = False
        model.info = info.model_copy(update={"model": operation.model})
        if operation.seq == 0:
            self._catalogue.begin_run(model.user, model.info, metadata, operation.time)
        fields = {"type": "load_weights", "path": str(source), "model_id": operation.model}
        return _json(fields)

    def _forward_backward(
        self, model: TrainedModel, operation: ModelOperation, companies: Sequence[Company] | None
    ) -> _Pieces:
        request = self._read(model, operation)
        model.is_pending |= not request.forward_only
        loss_pass = self._adapters.begin(
            model.key,
            request.data,
            request.loss_fn,
            request.config,
            backward=not request.forward_only,
            operation=f"operation {operation.seq}",
            companies=companies,
        )
        while loss_pass.num_left:
            yield loss_pass
        result = loss_pass.result()
        model.tokens += sum(len(datum.tokens) for datum in request.data)
        model.history.add_pass(result.metrics, forward_only=request.forward_only)
        mixed = any(company != ALONE for company in loss_pass.companies)
        return OperationResult(
            state="done",
            body=wire.write_result(result),
            is_proto=True,
            companies=loss_pass.companies if mixed else [],
        )

    def _read(self, model: TrainedModel, operation: ModelOperation) -> wire.ForwardBackward:
        """Read a request; if that fails, so will the next optim_step."""
        is_forward = False
        try:
            body = wire.plain_body(operation.body, is_zstd=operation.is_zstd)
            message = wire.parse_request(body)
            is_forward = bool(message.forward_only)
            return wire.request_of(message)
        except errors.TinkermqError as error:
            if not is_forward:
                model.is_pending = True
                name = f"operation {operation.seq}"
                self._adapters.refuse(model.key, operation=name, reason=error.message)
            raise

    def _optim_step(self, model: TrainedModel, operation: ModelOperation) -> bytes:
        body = wire.OptimStepBody.parse(operation.body)
        of_passes = model.history.join_passes()  # also if the step fails
        params = body.params()
        try:
            metrics = self._adapters.optim_step(model.key, params)
        except errors.DataError:
            model.is_pending = False  # the gradients were cleared
            raise
        model.is_pending = False
        model.history.add_step({**of_passes, **metrics})
        # JSON has no NaN: a gradient norm that is not finite is left out; `skipped:sum` is 1 then.
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return _json({"metrics": finite})

    def _save(self, model: TrainedModel, operation: ModelOperation) -> bytes:
        body = wire.SaveWeightsBody.parse(operation.body)
        kind = _KINDS[operation.kind]
        session = body.sampling_session_seq_id
        passing = kind == "sampler_weights" and session is not None
        body.check_kind(passing=passing)
        name = f"passing-{operation.seq}" if passing else body.name()
        checkpoint = CheckpointName(operation.name.model, kind, name)
        moves = body.kind == "inflight"
        named = SamplerName.of_checkpoint
        sampler = named(operation.name.model.session, session or 0, checkpoint, moves=moves)
        options = SaveOptions(
            overwrite=body.overwrite,
            passing=passing,
            ttl_s=body.ttl_seconds,
            time=operation.time,
            user_metadata=metadata_of(body.user_metadata),
            recipients=body.age_encryption_recipients or (),
        )
        save = self._catalogue.save
        saved = save(self._adapters, model, checkpoint, operation.seq, options)
        if moves:
            self._catalogue.folders.set_newest(saved)
        if passing:
            return _json(
                {"type": operation.kind, "path": None, "sampling_session_id": str(sampler)}
            )
        fields: dict[str, Any] = {"type": operation.kind, "path": str(checkpoint)}
        if kind == "external_weights":
            fields["size_bytes"] = saved.size_bytes
        return _json(fields)

    def _fail_missing(self, _: TrainedModel, operation: ModelOperation) -> bytes:
        raise errors.StateError(
            f"operation {operation.seq} of {operation.model} never arrived",
            hint="the client died, or skipped a number; later operations continue",
        )


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()
