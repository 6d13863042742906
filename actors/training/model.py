"""The model that learns: loading it, and the log-probs of generated tokens.

Shape letters: B rows, T columns of a row, N generated tokens, U columns that predict some
of them, D hidden size, V vocabulary, K tokens that are looked at in the place of each.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from transformers import PreTrainedModel

from ...schemas.config.job import ModelConfig
from ...schemas.config.sections import LearnerConfig, LoraConfig
from ...schemas.wire.errors import ModelError
from ..policy.experts import RouterReplay
from ..policy.lora import set_dropout
from ..policy.model_folder import load_causal_lm, load_policy
from ..policy.vision import embed
from ..weights.tensors import DTYPES
from .attention import flatten, kernel_arguments
from .losses import entropy_from_logits
from .micro_batch import MicroBatch, TokenSequence
from .packing import block_causal_mask, pack
from .parallel import Inside, compile_layers

_LOGITS_CHUNK_BYTES = 256 * 2**20
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_PACKING_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass(frozen=True)
class TokenScores:
    """Scores of the generated tokens of a micro-batch."""

    logprobs_N: Tensor
    """log π of each token at the sampling temperature."""
    entropy_N: Tensor
    """Entropy in nats of the distribution that each token was drawn from."""
    others_NK: Tensor | None = None
    """log π of other tokens in its place: those asked for, or the likeliest, best first."""
    top_ids_NK: Tensor | None = None
    """int64: which tokens are the likeliest, where they were asked for."""


@dataclass(frozen=True)
class ScoreOptions:
    """What is asked of a scorer beside the log-probs."""

    entropy_gradient: bool = False
    """Entropies with gradient."""
    others_NK: Tensor | None = None
    """int64: tokens whose log-probs are wanted in the place of each token, with gradient."""
    top_k: int = 0
    """Likeliest tokens to tell in the place of each, without gradient; 0: none."""


_NOTHING_MORE = ScoreOptions()


def load_model(
    config: ModelConfig,
    learner: LearnerConfig,
    folder: str | Path | None = None,
    *,
    lora: LoraConfig | None = None,
    seed: int = 0,
    hollow: bool = False,
) -> PreTrainedModel:
    """Load a causal language model with float32 master weights, from `folder` if one is given.

    With a rank in `lora` it is the configured model with an adapter: that of the folder, or a fresh
    one drawn from the seed. It stays in evaluation mode: dropout would make log-probs differ from
    the generators'. With `hollow` no weights are read (`load_causal_lm`). Raises ModelError with
    the path and the reason when it cannot be loaded.
    """
    path = str(folder or config.path)
    if lora is not None and lora.rank:
        model = load_policy(
            config.path,
            lora,
            adapter=folder,
            seed=seed,
            dtype=torch.float32,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            hollow=hollow,
        )
    else:
        model = _load(config, path, hollow=hollow)
    return _prepare(model, learner, path)


def _prepare(model: PreTrainedModel, learner: LearnerConfig, path: str) -> PreTrainedModel:
    """Return a model whose layers compute as the learner is configured; ModelError if they cannot.

    It stays in evaluation mode, or without dropout in training mode where layers are recomputed.
    """
    if learner.gradient_checkpointing:
        _refuse_dropout(model, path)
        cast(Any, model).gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        model.train()  # transformers recomputes activations in training mode only
        set_dropout(model, on=False)
    if learner.compile:
        compile_layers(model)
    return model


def load_reference(
    config: ModelConfig, learner: LearnerConfig, *, hollow: bool = False
) -> PreTrainedModel:
    """Load the frozen initial policy, to which a KL is taken."""
    model = _load(config, config.path, hollow=hollow)
    if learner.compile:
        compile_layers(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def _load(config: ModelConfig, path: str, *, hollow: bool) -> PreTrainedModel:
    return load_causal_lm(
        path,
        dtype=torch.float32,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        hollow=hollow,
    )


def _refuse_dropout(model: PreTrainedModel, path: str) -> None:
    whole: dict[str, Any] = model.config.to_dict()
    parts: list[Any] = [whole, *(whole[name] for name in whole if name.endswith("_config"))]
    rates = {
        key: value
        for settings in cast("list[dict[str, Any]]", parts)
        for key, value in settings.items()
        if ("drop" in key) and isinstance(value, float) and value > 0
    }
    if rates:
        named = ", ".join(f"{key}={value}" for key, value in rates.items())
        raise ModelError(
            f"the model {path!r} has {named}, which gradient checkpointing would turn on",
            hint="set it to 0 in the model's config.json",
        )


class Scorer:
    """Computes the log-probs of generated tokens under a model, in packed rows.

    Only the hidden states that predict a generated token go through the output layer. A model
    whose logits are more than that layer (soft caps, scales) is found out at construction; its
    own full forward pass is used then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float,
        dtype: str,
        inside: Inside | None = None,
        replay: RouterReplay | None = None,
        chunk_bytes: int = _LOGITS_CHUNK_BYTES,
    ) -> None:
        """`inside`: where the model has been put, by default it is as it was loaded; `replay` puts
        the experts that rows tell in the place of those that the model's routers choose.

        Raises ModelError for a model that cannot read packed rows.
        """
        self._model = model
        self._replay = replay
        self.inside = inside or Inside(model)
        """Where the model's weights are whole."""
        self._decoder = cast(Any, model).get_decoder()
        self._head: nn.Module = cast(Any, model).get_output_embeddings()
        config = cast(Any, model).config.get_text_config()
        kernel: str | None = config._attn_implementation
        self.flat_rows = kernel is not None and "flash" in kernel
        """Whether the attention reads all rows of a micro-batch as one, without padding."""
        self.hidden_size: int = config.hidden_size
        self._window, self._masks_by_layer = _sliding_window(config)
        self._temperature = temperature
        self._dtype = dtype
        self.autocast = dtype != "float32" and self.inside.gathered_dtype is None
        """Whether products are computed in 16 bits, of weights that have 32."""
        self._chunk_bytes = chunk_bytes
        with torch.no_grad(), self._computing(autocast=self.autocast and self.flat_rows):
            self.full_logits = not self.inside.compute(self._head_is_all)
        self._check_packing()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.inside.device

    def score(self, packed: MicroBatch, request: ScoreOptions = _NOTHING_MORE) -> TokenScores:
        """Return log-probs (with gradient, where enabled) and entropies of the N tokens."""
        logprobs_N, entropy_N, *more = self.inside.compute(lambda: self._score(packed, request))
        return TokenScores(logprobs_N, entropy_N, *more)

    def _score(self, packed: MicroBatch, request: ScoreOptions) -> tuple[Tensor, ...]:
        packed = packed.to(self.device)
        states_UD, place_N = self.states_UD(packed, logits=self.full_logits)
        chunk = max(1, self._chunk_bytes // (4 * self.vocab_size))
        if len(states_UD) <= chunk:
            return self._read(states_UD, place_N, packed.target_N, request)
        columns: list[Tensor] = []
        for start in range(0, len(states_UD), chunk):
            inside_N = torch.nonzero((place_N >= start) & (place_N < start + chunk)).flatten()
            others_NK = None if request.others_NK is None else request.others_NK[inside_N]
            # The logits of a chunk are computed again in the backward pass, not kept.
            read = cast(
                "tuple[Tensor, ...]",
                checkpoint.checkpoint(
                    self._read,
                    states_UD[start : start + chunk],
                    place_N[inside_N] - start,
                    packed.target_N[inside_N],
                    replace(request, others_NK=others_NK),
                    use_reentrant=False,
                ),
            )
            columns = columns or [array.new_zeros(len(place_N), *array.shape[1:]) for array in read]
            columns = [
                whole.index_copy(0, inside_N, part)
                for whole, part in zip(columns, read, strict=True)
            ]
        return tuple(columns)

    def _read(
        self, states_UD: Tensor, place_N: Tensor, targets_N: Tensor, request: ScoreOptions
    ) -> tuple[Tensor, ...]:
        """Turn hidden states into the log-probs of the targets, entropies, and what is asked."""
        logits_UV = self.logits(states_UD).float()
        if self._temperature != 1.0:
            logits_UV = logits_UV / self._temperature
        log_softmax_UV = logits_UV.log_softmax(-1)
        logprobs_N = log_softmax_UV[place_N, targets_N]
        more: tuple[Tensor, ...] = ()
        if request.others_NK is not None:
            more = (log_softmax_UV[place_N[:, None], request.others_NK.to(self.device)],)
        elif request.top_k:
            top = log_softmax_UV.detach().topk(request.top_k, -1)
            more = (top.values[place_N], top.indices[place_N])
        if request.entropy_gradient:
            return logprobs_N, entropy_from_logits(logits_UV)[place_N], *more
        with torch.no_grad():
            # Products of -inf (a masked token) and 0 do not count.
            terms_UV = torch.nan_to_num(log_softmax_UV.exp() * log_softmax_UV, nan=0.0)
            return logprobs_N, -terms_UV.sum(-1)[place_N], *more

    def states_UD(self, packed: MicroBatch, *, logits: bool = False) -> tuple[Tensor, Tensor]:
        """Return the decoder's hidden states (or the model's logits) at the columns that predict.

        Several tokens may be predicted at one column: each column is there once, and the second
        tensor says which of them predicts each of the N tokens.
        """
        if self.flat_rows:
            packed = flatten(packed) if packed.columns is None else packed
            attention: dict[str, Any] = {"attention_mask": None, **kernel_arguments(packed)}
        else:
            attention = {"attention_mask": self._masks(packed)}
        start, end = packed.columns or (0, packed.input_ids_BT.shape[1])
        column_N = packed.row_N * (end - start) + packed.source_col_N - start
        model = self._model if logits else self._decoder
        if self._replay is not None:
            experts = packed.experts_BTLK
            self._replay.use(None if experts is None else experts[:, start:end])
        with self._computing(autocast=self.autocast):
            output = model(**self._read_in(packed), **attention, use_cache=False)
        states_BTD: Tensor = output.logits if logits else output.last_hidden_state
        column_U, place_N = cast("tuple[Tensor, Tensor]", column_N.unique(return_inverse=True))
        return states_BTD.flatten(0, 1)[column_U], place_N

    def _read_in(self, packed: MicroBatch) -> dict[str, Tensor]:
        """Return what the model reads: ids, or their embeddings where there are images."""
        ids_BT, images = packed.input_ids_BT, packed.images
        own = slice(*packed.columns) if packed.columns is not None else slice(None)
        if images is None:
            return {"input_ids": ids_BT[:, own], "position_ids": packed.position_ids_BT[:, own]}
        embeds_BTH = embed(self._model, ids_BT, images.column_Q, images.images)
        return {"inputs_embeds": embeds_BTH[:, own], "position_ids": images.rope_3BT[..., own]}

    def _computing(self, *, autocast: bool) -> torch.autocast:
        half = DTYPES[self._dtype] if autocast else None
        return torch.autocast(self.device.type, half, enabled=autocast)

    def _masks(self, packed: MicroBatch) -> Tensor | dict[str, Tensor]:
        """Build the mask of a micro-batch; one for each kind of layer where they differ."""
        full = block_causal_mask(packed.seen_until_BT)
        position_BT = packed.position_ids_BT
        if self._window is None or int(position_BT.max()) < self._window:
            return full
        distance_BTT = position_BT[:, :, None] - position_BT[:, None, :]
        sliding = full & (distance_BTT < self._window)[:, None]
        if not self._masks_by_layer:
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}

    def logits(self, states_UD: Tensor) -> Tensor:
        """Return the logits of hidden states, or of logits where `full_logits` says so."""
        if self.full_logits:
            return states_UD
        with self._computing(autocast=self.autocast):
            return self._head(states_UD)

    @property
    def vocab_size(self) -> int:
        """Number of tokens that its output layer knows."""
        return int(cast(Tensor, self._head.weight).shape[0])

    # -- what the model is found to be ---------------------------------------------------------

    def _head_is_all(self) -> bool:
        """Whether the logits are the output layer applied to the decoder's states.

        The states are made so large on the way that a soft cap would show.
        """
        seen: list[Tensor] = []

        def enlarge(_module: nn.Module, _args: Any, output: Any) -> Any:
            states = output.last_hidden_state
            seen.append(states * (100.0 / self._head(states).abs().max().clamp(min=1e-6)))
            output.last_hidden_state = seen[-1]
            return output

        ids = torch.arange(8, device=self.device).unsqueeze(0) % self.vocab_size
        hook = self._decoder.register_forward_hook(enlarge)
        try:
            whole = self._model(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        return bool(seen) and bool(torch.allclose(whole, self._head(seen[-1]), atol=1e-2))

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Prove that sequences of one row do not see each other; refuse the model otherwise."""
        autocast, self.autocast = self.autocast, self.autocast and self.flat_rows
        worst = self._packing_error()
        in_half = self.autocast or self.inside.gathered_dtype is not None
        tolerance = _PACKING_TOLERANCES[self._dtype if in_half else "float32"]
        self.autocast = autocast
        if not worst <= tolerance:
            kind = cast(Any, self._model).config.model_type
            raise ModelError(
                f"a model of type {kind!r} cannot be trained: sequences that share a row change "
                f"each other's log-probs by {worst:.2g}",
                hint="use a model whose layers are all attention",
            )

    def _packing_error(self) -> float:
        """Largest difference of a log-prob between a shared row and a row of its own."""
        ids = np.arange(20, dtype=np.int64) % self.vocab_size
        mask = np.array([0, 0, 0, 0, 1, 1, 0, 1])
        first, second = TokenSequence(ids[:8], mask), TokenSequence(ids[8:16], mask)
        same_prompt = TokenSequence(np.concatenate([ids[:4], ids[16:]]), mask)
        [together] = pack(
            [first, second, same_prompt],
            max_row_tokens=32,
            microbatch_tokens=32,
            share_prompts=not self.flat_rows,
        )
        alone = [
            self.score(pack([each], max_row_tokens=32, microbatch_tokens=32)[0]).logprobs_N
            for each in (second, same_prompt)
        ]
        error_N = self.score(together).logprobs_N[len(alone[0]) :] - torch.cat(alone)
        return float(error_N.abs().max())


def _sliding_window(config: Any) -> tuple[int | None, bool]:
    """Return the width of the attention window, if any, and whether layers differ in it."""
    kinds: set[str] = set(getattr(config, "layer_types", None) or ())
    if kinds - _LAYER_TYPES:
        raise ModelError(
            f"a model of type {config.model_type!r} has layers of kind "
            f"{', '.join(sorted(kinds - _LAYER_TYPES))}, which cannot read packed rows",
            hint="use a model whose layers are full_attention or sliding_attention",
        )
    window: int | None = getattr(config, "sliding_window", None)
    if kinds and "sliding_attention" not in kinds:
        window = None
    return window, bool(kinds)
