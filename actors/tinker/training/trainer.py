"""Any number of LoRA adapters, trained on one base model in memory.

Each has its own rank, layers, gradients and optimiser. They share the base model: no adapter
changes a bit of another. Not thread-safe.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....schemas.checks import CheckSkipped
from ....schemas.config.job import ModelConfig
from ....schemas.config.sections import Dtype, LearnerConfig
from ....schemas.plan.model_shape import count_positions
from ....schemas.tinker.datum import AdamParams, Datum, LoraSpec, LossResult
from ....schemas.tinker.operation import Company
from ....schemas.wire.errors import ModelError, NotFoundError, StateError, TinkermqError
from ...policy.adapted_layers import AdaptedLayers
from ...policy.devices import exact_products
from ...policy.lora import check_base
from ...policy.model_folder import load_model_config
from ...storage.held_models import held_models
from ...training.model import Scorer, load_model, try_rows
from ...training.parallel import Parallel
from ...training.varlen import AttentionKey
from .adapter import (
    Adapter,
    SharedBase,
    num_bytes_of,
    read_suspended,
    shapes_of,
    write_suspended,
)
from .folders import MAX_RANK, AdapterOffer, read_adapter, write_adapter
from .inputs import DataReader, PendingWindow
from .loss_pass import LossPass, choose_pass_mates, compute
from .losses import find_loss, read_config

_LOGITS_BYTES = 64 * 2**20
_MIXED_TOLERANCE, _BF16_TOLERANCE = 1e-3, 0.1
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class AdapterTrainer:
    """The adapters of many models on one base, by model id."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        base_model: str,
        base_path: str = "",
        microbatch_tokens: int = 16384,
        max_rank: int = MAX_RANK,
        share_prompts: bool = True,
        dtype: Dtype = "float32",
        attention: AttentionKey = "sdpa",
        logits_bytes: int = _LOGITS_BYTES,
        mixed: bool = False,
    ) -> None:
        """Take over a model, which is frozen and whose linear layers get hooks.

        `base_model` is the name by which folders of adapters identify it, `base_path` the path in
        PEFT's configuration. `microbatch_tokens` bounds the columns of one forward and backward
        pass, `logits_bytes` the logits in memory. The base is stored and computed in `dtype`,
        adapters are float32. With `mixed` a pass may contain micro-batches of several adapters.
        Raises ModelError for a model that cannot be trained in packed rows, or mixed.
        """
        self.base_model = base_model
        self._base_path = base_path or base_model
        module = cast(nn.Module, model)
        modules = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
        linear = [name for name, each in modules if isinstance(each, nn.Linear)]
        module.requires_grad_(False)
        layers = AdaptedLayers(module, flatten=True)
        layers.open()
        shapes = shapes_of(layers, cast(Any, model).get_output_embeddings())
        self._model = module
        self._offer = AdapterOffer(base_model, self._base_path, shapes, linear, max_rank)
        inside = Parallel().place(module, LearnerConfig(dtype=dtype), attention)
        scorer = Scorer(module, temperature=1.0, inside=inside)
        config: Any = cast(Any, model).config.get_text_config()
        vocab = self._vocab = int(config.vocab_size)
        self._base = SharedBase(
            scorer,
            layers,
            microbatch_tokens,
            logits_columns=max(1, logits_bytes // (4 * vocab)),
            share_prompts=share_prompts and scorer.shares_columns,
        )
        self._reader = DataReader(vocab=vocab, max_tokens=count_positions(config.to_dict()) or None)
        self._adapters: dict[str, Adapter] = {}
        self._windows: dict[str, PendingWindow] = {}
        self._mixed = mixed
        if mixed:
            with exact_products():
                self._check_mixed()

    @classmethod
    def open(
        cls,
        folder: str,
        *,
        base_model: str = "",
        trust_remote_code: bool = False,
        gradient_checkpointing: bool = False,
        device: torch.device | None = None,
        **options: Any,
    ) -> "AdapterTrainer":
        """Load a model folder to a device; `options` as for the constructor. Raises ModelError."""
        config = ModelConfig(path=folder, trust_remote_code=trust_remote_code)
        learner = LearnerConfig(gradient_checkpointing=gradient_checkpointing)
        with contextlib.suppress(CheckSkipped):
            try_rows(load_model_config(folder, trust_remote_code=trust_remote_code))
        model = load_model(config, learner)
        if device is not None:
            cast(nn.Module, model).to(device)
        return cls(
            model, base_model=base_model or folder, base_path=held_models.named(folder), **options
        )

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """Give a model a new adapter, which does not change the base model's results.

        Its tensors depend only on the seed, or on the model's id if there is none. Raises
        ConfigError for a rank or layers that are not offered, StateError if the model has one.
        """
        self._offer.check(spec)
        if model_id in self._adapters:
            raise StateError(f"model {model_id} has an adapter", hint="evict it first")
        self._adapters[model_id] = self._fresh(model_id, spec)
        self._windows[model_id] = PendingWindow()

    def evict(self, model_id: str) -> None:
        """Forget a model's adapter, gradients and optimiser."""
        self._of(model_id)
        del self._adapters[model_id], self._windows[model_id]

    def suspend(self, model_id: str, file: Path) -> None:
        """Write a model with its gradients and window to a file, and evict it.

        Raises StorageError; the model stays in memory then.
        """
        write_suspended(file, self._of(model_id), self._windows[model_id])
        self.evict(model_id)

    def save_pending(self, model_id: str, file: Path) -> None:
        """Write gradients and failures for a model's next optim_step; raises StorageError."""
        write_suspended(file, self._of(model_id), self._windows[model_id], only_pending=True)

    def load_pending(self, model_id: str, file: Path) -> None:
        """Restore what `save_pending` wrote, after `load`; raises ModelError."""
        _, rows, self._windows[model_id] = read_suspended(file)
        self._of(model_id).set_pending(rows)

    def resume(self, model_id: str, file: Path) -> None:
        """Restore a suspended model, to the bit; raises ModelError."""
        spec, rows, window = read_suspended(file)
        adapter = self._fresh(model_id, spec)
        adapter.set_rows(rows)
        self._adapters[model_id], self._windows[model_id] = adapter, window

    @property
    def models(self) -> list[str]:
        """The models in memory."""
        return list(self._adapters)

    def spec(self, model_id: str) -> LoraSpec:
        """Return a model's specification, with the seed of its tensors."""
        return self._of(model_id).spec

    def window(self, model_id: str) -> PendingWindow:
        """Return the losses that a model's next optim_step will apply."""
        self._of(model_id)
        return self._windows[model_id]

    def num_steps(self, model_id: str) -> int:
        """Return the number of updates of a model's optimiser."""
        return self._of(model_id).num_steps

    def num_bytes(self, model_id: str) -> int:
        """Return the bytes of a model now: adapter, gradients, moments."""
        return self._of(model_id).num_bytes

    def num_bytes_of(self, spec: LoraSpec) -> int:
        """Return the most bytes that such a model takes; ConfigError if it is not offered."""
        self._offer.check(spec)
        return num_bytes_of(spec, self._offer.layers_of(spec))

    def tensors(self, model_id: str) -> dict[str, Tensor]:
        """Return copies of a model's adapter on the CPU, float32, by PEFT's names."""
        return self._of(model_id).tensors()

    def begin(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None = None,
        *,
        backward: bool = True,
        operation: str = "",
        companies: Sequence[Company] | None = None,
    ) -> LossPass:
        """Check a loss and pack its data; the caller computes it by micro-batches (`advance`).

        With `backward` its gradients are added to those since the last optim_step; if it fails, the
        next optim_step fails, too, with an error that names it by `operation`. With the `companies`
        of an earlier computation it gives the same bits. Raises DataError or ConfigError before
        anything is computed.
        """
        adapter, window = self._of(model_id), self._windows[model_id]
        name = window.begin(operation) if backward else ""
        try:
            settings = read_config(loss_fn, config)
            loss = find_loss(loss_fn)
            batch = self._reader.read(data, loss_fn, loss, backward=backward)
            at_end = partial(window.end, name) if backward else None
            return LossPass(
                self._base, adapter, batch, loss, settings, at_end=at_end, companies=companies
            )
        except TinkermqError as error:
            if backward:
                window.fail(name, error.message)
            raise

    def advance(self, losses: Sequence[LossPass]) -> list[LossPass]:
        """Compute the next micro-batch of the first loss; return the losses that advanced.

        If micro-batches are mixed, those of other adapters that fit are computed in the same pass.
        If that pass fails, its changes are undone and the first is computed alone.
        """
        chosen = choose_pass_mates(self._base, losses) if self._mixed else list(losses[:1])
        if len(chosen) > 1:
            gradients = [item.adapter.gradients() for item in chosen]
            try:
                compute(self._base, chosen)
                return chosen
            except Exception:  # noqa: BLE001  only the operation that caused it fails
                _log.exception("mixed_pass_failed", losses=len(chosen))
                for loss, before in zip(chosen, gradients, strict=True):
                    loss.adapter.set_gradients(before)
        compute(self._base, chosen[:1])
        return chosen[:1]

    def refuse(self, model_id: str, *, operation: str, reason: str) -> None:
        """Fail a model's next optim_step because of a loss that could not be read."""
        window = self.window(model_id)
        window.fail(window.begin(operation), reason)

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None = None,
        *,
        backward: bool = True,
        operation: str = "",
    ) -> LossResult:
        """Compute a whole loss; see `begin`."""
        loss = self.begin(model_id, data, loss_fn, config, backward=backward, operation=operation)
        while loss.num_left:
            self.advance([loss])
        return loss.result()

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Make one update of AdamW with all gradients since the last one, and clear them.

        Returns `grad_norm:mean`, before clipping, and `skipped:sum`, 1 if the gradients are not
        finite, when weights stay. Raises DataError, and clears the gradients, if a loss since the
        last update failed.
        """
        adapter = self._of(model_id)
        try:
            self._windows[model_id].close()
        except TinkermqError:
            adapter.clear()
            raise
        return adapter.step(params)

    def save(
        self, model_id: str, folder: Path, *, with_optimizer: bool, lasting: bool = True
    ) -> None:
        """Write a model's adapter as a PEFT folder, with the optimiser's state if asked for.

        Pending gradients are not written. One that is not `lasting` is not synced to disk. Raises
        StorageError.
        """
        adapter = self._of(model_id)
        write_adapter(
            folder,
            base_model=self.base_model,
            base_path=self._base_path,
            targets=self._offer.target_names(adapter.spec),
            spec=adapter.spec,
            tensors=adapter.tensors(),
            steps=adapter.num_steps,
            moments=adapter.moments() if with_optimizer else None,
            lasting=lasting,
        )

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Load a model's adapter from a folder; pending gradients are dropped.

        Without the optimiser's state the optimiser is reset. A model that is not in memory gets the
        rank and layers of the folder; what `save` wrote is restored to the bit. Raises ModelError
        for another base, rank or other layers, or a missing optimiser state; NotFoundError for a
        missing folder.
        """
        stored = read_adapter(folder, with_optimizer=with_optimizer)
        known = self._adapters.get(model_id)
        spec = self._offer.spec_of(stored) if known is None else known.spec
        self._offer.check_stored(stored, spec)
        check_base(self._model, stored.folder)
        adapter = self._fresh(model_id, spec) if known is None else known
        adapter.set_tensors(stored.tensors, stored.moments)
        self._adapters[model_id] = adapter
        self._windows[model_id] = PendingWindow()

    def _check_mixed(self) -> None:
        """Raise ModelError unless adapters in one pass change only their own rows.

        In 16 bits larger micro-batches round differently: the tolerance is what two equal adapters
        differ by.
        """
        alone, mixed = self._two_passes(), self._two_passes()
        for item in alone:
            compute(self._base, [item])
        compute(self._base, mixed)
        worst, tolerance = max(_differences(alone, mixed)), _MIXED_TOLERANCE
        if self._base.scorer.inside.dtype != torch.float32:
            same = [self._two_passes()[0] for _ in range(2)]
            compute(self._base, same)
            tolerance = max(_BF16_TOLERANCE, 3 * max(_differences(alone[:1], same[:1])))
        if not worst <= tolerance:
            raise ModelError(
                f"micro-batches of several adapters change each other's log-probs by {worst:.2g} "
                f"on {self.base_model}",
                hint="set tinker.mixed_micro_batches=false for it",
            )

    def _two_passes(self) -> list[LossPass]:
        """Return passes of two adapters with random weights, over different tokens."""
        collected: list[LossPass] = []
        for at in range(2):
            adapter = self._fresh(f"mixed-{at}", LoraSpec(rank=4))
            generator = torch.Generator().manual_seed(at)
            adapter.set_tensors(
                {
                    name: 0.02 * torch.randn(tensor.shape, generator=generator)
                    for name, tensor in adapter.tensors().items()
                },
                None,
            )
            first = self._vocab // 3 + at  # lower ids may be special tokens
            tokens = np.arange(first, first + 6 + at, dtype=np.int32) % self._vocab
            datum = Datum(tokens, {"target_tokens": tokens.astype(np.int64)})
            loss = find_loss("cross_entropy")
            batch = self._reader.read([datum], "cross_entropy", loss, backward=False)
            collected.append(LossPass(self._base, adapter, batch, loss, {}, at_end=None))
        return collected

    def _of(self, model_id: str) -> Adapter:
        if model_id not in self._adapters:
            raise NotFoundError(
                f"model {model_id} has no adapter in memory", hint="create or load it first"
            )
        return self._adapters[model_id]

    def _fresh(self, model_id: str, spec: LoraSpec) -> Adapter:
        return Adapter(model_id, spec, self._offer.layers_of(spec), self._base.scorer.device)


def _differences(some: Sequence[LossPass], others: Sequence[LossPass]) -> list[float]:
    """Return the largest difference of a log-prob for each pair of passes."""
    return [
        float(np.abs(first.result().logprobs[0] - second.result().logprobs[0]).max())
        for first, second in zip(some, others, strict=True)
    ]
