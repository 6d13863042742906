"""Any number of LoRA adapters, trained on one base model in memory.

Each has a rank, layers, gradients and an optimiser of its own. They share the base and the code
that computes it, one after the other: nothing that one of them does changes a bit of another. Not
for several threads at once.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....schemas.config.job import ModelConfig
from ....schemas.config.sections import Dtype, LearnerConfig
from ....schemas.plan.model_shape import count_positions
from ....schemas.tinker.datum import AdamParams, Datum, LoraSpec, LossResult
from ....schemas.tinker.operation import Company
from ....schemas.wire.errors import ModelError, NotFoundError, StateError, TinkermqError
from ...policy.adapted_layers import AdaptedLayers
from ...policy.devices import exact_products
from ...policy.lora import check_base
from ...training.model import Scorer, load_model
from ...training.parallel import Parallel
from ...training.varlen import AttentionKey
from .adapter import (
    Adapter,
    Moments,
    SharedBase,
    num_bytes_of,
    read_suspended,
    shapes_of,
    write_suspended,
)
from .folders import MAX_RANK, AdapterOffer, read_adapter, write_adapter
from .inputs import DataReader, PendingWindow
from .loss_pass import LossPass, choose_batch_mates, compute
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

        `base_model` is its name, which distinguishes folders of adapters; `base_path` the
        folder that they name for PEFT. `microbatch_tokens` bounds the columns of one forward and
        backward pass, `logits_bytes` the logits that are held at once. The base is held and
        computes in `dtype`, adapters are float32. With `mixed` a pass may hold micro-batches of
        several adapters. Raises ModelError for a model that cannot be trained in packed rows, or
        mixed.
        """
        self.base_model = base_model
        self._base_path = base_path or base_model
        module = cast(nn.Module, model)
        modules = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
        linear = [name for name, each in modules if isinstance(each, nn.Linear)]
        module.requires_grad_(False)
        layers = AdaptedLayers(module)
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
            share_prompts=share_prompts,
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
        """Load a model folder to a device; `options` as for the constructor.

        Raises ModelError with the path and the reason when it cannot be loaded.
        """
        config = ModelConfig(path=folder, trust_remote_code=trust_remote_code)
        learner = LearnerConfig(gradient_checkpointing=gradient_checkpointing)
        model = load_model(config, learner)
        if device is not None:
            cast(nn.Module, model).to(device)
        return cls(model, base_model=base_model or folder, base_path=folder, **options)

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """Give a model a fresh adapter, which changes nothing yet.

        Its tensors depend on the seed, or without one on the model's id, and on nothing else.
        Raises ConfigError for a rank or layers that are not offered, StateError if it has one.
        """
        self._offer.check(spec)
        if model_id in self._adapters:
            raise StateError(f"model {model_id} has an adapter", hint="evict it first")
        self._adapters[model_id] = self._fresh(model_id, spec)
        self._windows[model_id] = PendingWindow()

    def evict(self, model_id: str) -> None:
        """Forget a model's adapter, its gradients and optimiser; what is to be kept is saved."""
        self._of(model_id)
        del self._adapters[model_id], self._windows[model_id]

    def suspend(self, model_id: str, file: Path) -> None:
        """Write a model down with its gradients and what is pending, and forget it.

        Raises StorageError; it stays in memory then.
        """
        write_suspended(file, self._of(model_id), self._windows[model_id])
        self.evict(model_id)

    def save_pending(self, model_id: str, file: Path) -> None:
        """Write what is pending for a model's next optim_step; raises StorageError."""
        write_suspended(file, self._of(model_id), self._windows[model_id], only_pending=True)

    def load_pending(self, model_id: str, file: Path) -> None:
        """Take back what is pending, once the adapter is loaded; raises ModelError."""
        _, rows, self._windows[model_id] = read_suspended(file)
        self._of(model_id).put_pending(rows)

    def resume(self, model_id: str, file: Path) -> None:
        """Make a model what it was when it was suspended, to the bit; raises ModelError."""
        spec, rows, window = read_suspended(file)
        adapter = self._fresh(model_id, spec)
        adapter.put_rows(rows)
        self._adapters[model_id], self._windows[model_id] = adapter, window

    @property
    def models(self) -> list[str]:
        """The models whose adapters are in memory."""
        return list(self._adapters)

    def spec(self, model_id: str) -> LoraSpec:
        """Return what makes a model's adapter, with the seed that it was drawn from."""
        return self._of(model_id).spec

    def window(self, model_id: str) -> PendingWindow:
        """Return what is pending for a model's next optim_step."""
        self._of(model_id)
        return self._windows[model_id]

    def num_steps(self, model_id: str) -> int:
        """Return the updates that a model's optimiser has made."""
        return self._of(model_id).num_steps

    def num_bytes(self, model_id: str) -> int:
        """Return the bytes that a model holds now: adapter, gradients, moments."""
        return self._of(model_id).num_bytes

    def num_bytes_of(self, spec: LoraSpec) -> int:
        """Return the most bytes that such a model will hold; ConfigError for one not offered."""
        self._offer.check(spec)
        return num_bytes_of(spec, self._offer.layers_of(spec))

    def tensors(self, model_id: str) -> dict[str, Tensor]:
        """Return copies of a model's adapter on the CPU, float32, by PEFT's names."""
        return self._of(model_id).tensors()

    def moments(self, model_id: str) -> Moments:
        """Return copies of the state of a model's optimiser, on the CPU."""
        return self._of(model_id).moments()

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
        """Check a call and lay it out; the caller computes it by its micro-batches.

        With `backward` its gradients add up with those since the last optim_step, and if it fails
        that optim_step will; `operation` is how it is called there. With the `companies` that it
        once had it comes to the same bits. Raises DataError or ConfigError that says what is wrong,
        before anything is computed.
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
        """Compute the next micro-batch of the first loss; return of which losses one is computed.

        Where micro-batches are mixed, those of other adapters are computed with it that fit. A pass
        of several that fails changes nothing: then the first is computed alone.
        """
        chosen = choose_batch_mates(self._base, losses) if self._mixed else list(losses[:1])
        if len(chosen) > 1:
            gradients = [item.adapter.gradients() for item in chosen]
            try:
                compute(self._base, chosen)
                return chosen
            except Exception:  # noqa: BLE001  only the operation at fault fails
                _log.exception("mixed_pass_failed", losses=len(chosen))
                for one, before in zip(chosen, gradients, strict=True):
                    one.adapter.put_gradients(before)
        compute(self._base, chosen[:1])
        return chosen[:1]

    def refuse(self, model_id: str, *, operation: str, reason: str) -> None:
        """Let a model's next optim_step fail: a call before it could not even be read."""
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
        """Compute a loss, and with `backward` add its gradients to the model's; see `begin`."""
        some = self.begin(model_id, data, loss_fn, config, backward=backward, operation=operation)
        while some.num_left:
            self.advance([some])
        return some.result()

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Make one update of AdamW with all gradients since the last one, and forget them.

        Returns `grad_norm:mean`, before clipping, and `skipped:sum`, 1 for a gradient that is not
        finite: it changes nothing. Raises DataError if a forward_backward since the last one
        failed: the gradients are forgotten.
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
        """Write a model's adapter as a PEFT folder, and the optimiser's state beside it.

        Gradients that are pending are not written. One that is not `lasting` is not waited for
        until it is on the disk. Raises StorageError.
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
        """Take a model's adapter from a folder; pending gradients are forgotten.

        Without the optimiser's state that begins anew. A model without an adapter in memory gets
        one as the folder says; if it was evicted, and had nothing pending, it is as it was to the
        bit. Raises ModelError for an adapter of another base, rank or other layers, or without the
        state that is asked for; NotFoundError where there is none.
        """
        stored = read_adapter(folder, with_optimizer=with_optimizer)
        known = self._adapters.get(model_id)
        spec = self._offer.spec_of(stored) if known is None else known.spec
        self._offer.check_stored(stored, spec)
        check_base(self._model, stored.folder)
        adapter = self._fresh(model_id, spec) if known is None else known
        adapter.put(stored.tensors, stored.moments)
        self._adapters[model_id] = adapter
        self._windows[model_id] = PendingWindow()

    def _check_mixed(self) -> None:
        """Prove that adapters beside each other add to their own rows; else raises ModelError.

        In 16 bits larger micro-batches round otherwise, by as much as beside the same adapter.
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
        """Return passes of two adapters that each change something, over other tokens."""
        collected: list[LossPass] = []
        for at in range(2):
            adapter = self._fresh(f"mixed-{at}", LoraSpec(rank=4))
            generator = torch.Generator().manual_seed(at)
            adapter.put(
                {
                    name: 0.02 * torch.randn(tensor.shape, generator=generator)
                    for name, tensor in adapter.tensors().items()
                },
                None,
            )
            first = self._vocab // 3 + at  # the ids before are of special tokens
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
    pairs = zip(some, others, strict=True)
    return [
        float(np.abs(one.result().logprobs[0] - other.result().logprobs[0]).max())
        for one, other in pairs
    ]
