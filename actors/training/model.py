"""The trained model: loading it, and the log-probs of generated tokens.

Shape letters: B rows, T columns of a row, N generated tokens, U columns that predict some of them,
D hidden size, V vocabulary, K scored tokens at the position of each.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule
from torch.utils import checkpoint
from transformers import PreTrainedModel

from ...schemas.checks import CheckSkipped
from ...schemas.config.job import JobConfig, ModelConfig
from ...schemas.config.sections import LearnerConfig, LoraConfig
from ...schemas.plan.memory import LOGITS_BYTES
from ...schemas.plan.model_refusals import refuse_in_vllm
from ...schemas.wire.errors import ModelError
from ..policy.devices import exact_products
from ..policy.experts import RouterReplay, routers_of
from ..policy.layers import (
    columns_as_positions,
    decoder_of,
    is_recurrent,
    needs_masks,
    reach_of,
)
from ..policy.model_folder import class_of, load_causal_lm, load_model_config, load_policy
from ..policy.small_copy import make_small_copy
from ..policy.vision import embed
from ..storage.adapters import root_of
from .micro_batch import MicroBatch, TokenSequence
from .output_layer import OutputLayer, RowScores, row_chunks, score_tokens
from .packing import block_causal_mask, pack
from .parallel import Inside, check_divisible, compile_layers
from .varlen import (
    choose_attention,
    flatten,
    kernel_arguments,
    reads_flat_rows,
    set_attention,
    with_runs,
)

_KERNEL_ERRORS = (ValueError, TypeError, IndexError, RuntimeError, AssertionError)
"""Errors of kernels, which are others' code, for rows that they cannot read."""
_log = structlog.get_logger()
_EXACT = 1e-3
"""Largest difference of log-probs that is attributed to float32 rounding."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of the generated tokens of a micro-batch."""

    logprobs_N: Tensor
    """log π of each token at the sampling temperature."""
    entropy_N: Tensor
    """Entropy in nats of the distribution from which each token was drawn."""
    others_NK: Tensor | None = None
    """log π of other tokens at its position: the requested tokens, or the likeliest in order."""
    top_ids_NK: Tensor | None = None
    """int64: the likeliest tokens, if requested."""


@dataclass(frozen=True)
class ScoreOptions:
    """What to compute in addition to the log-probs."""

    entropy_gradient: bool = False
    """Whether to compute entropies with gradient."""
    others_NK: Tensor | None = None
    """int64: tokens to score at the position of each token, with gradient."""
    top_k: int = 0
    """Number of likeliest tokens to return at each position, without gradient; 0: none."""


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
    """Load a causal language model with float32 master weights, from `folder` if given.

    With a rank in `lora` it is the configured model with an adapter: the folder's, or a new one
    initialised from the seed. It stays in evaluation mode: dropout would make log-probs differ from
    the generators'. With `hollow` no weights are read (`load_causal_lm`). Raises ModelError with
    the path and the reason if it cannot be loaded.
    """
    path = str(folder or config.path)
    if lora is not None and lora.rank:
        model = load_policy(
            config.path,
            lora,
            adapter=folder,
            seed=seed,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            hollow=hollow,
        )
    else:
        model = _load(config, path, hollow=hollow)
        if not (hollow or config.trust_remote_code):  # a model's own code may need its weights
            _freeze_as_its_class(model, config, path)
    return _prepare(model, learner, path)


def _prepare(model: PreTrainedModel, learner: LearnerConfig, path: str) -> PreTrainedModel:
    """Configure how the model's layers compute; ModelError if they do not support it.

    The model stays in evaluation mode, except for recomputed layers.
    """
    if learner.recomputes:
        _refuse_dropout(model, path)
        cast(Any, model).gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        if learner.offloads:
            _set_checkpointing(model, _checkpoint_in_host_memory)
        # transformers recomputes in training mode only; submodules of layers stay in evaluation
        # mode, without the noise that some routers add in training.
        for module in model.modules():
            module.training = hasattr(module, "gradient_checkpointing")
    if learner.compile:
        compile_layers(model)
    return model


def _set_checkpointing(model: nn.Module, function: Callable[..., Any]) -> None:
    """Make recomputed layers call a function in place of torch's `checkpoint`."""
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            cast(Any, module)._gradient_checkpointing_func = function


def _checkpoint_in_host_memory(function: Callable[..., Any], *args: Any) -> Any:
    """Recompute a layer, keeping its input in pinned memory until then.

    The copies run on the compute stream: they take little time compared with a layer, and the GPU's
    memory is freed at once. transformers' own `offload` fails on a machine without a GPU.
    """
    with save_on_cpu(pin_memory=True):  # without a GPU: memory that is not pinned
        return cast(Any, checkpoint.checkpoint(function, *args, use_reentrant=False))


def load_reference(
    config: ModelConfig, learner: LearnerConfig, *, hollow: bool = False
) -> PreTrainedModel:
    """Load the frozen initial policy, the reference of a KL."""
    model = _load(config, config.path, hollow=hollow)
    if learner.compile:
        compile_layers(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def make_embedding_gradients_sparse(inside: Inside) -> list[nn.Parameter]:
    """Give trained embeddings sparse gradients, which hold only the rows that were read.

    Returns their weights, whose `grad` must be set before a backward pass. A dense gradient has the
    size of the vocabulary in each pass. GPUs, FSDP2 and weights cast on use keep dense gradients.
    """
    is_plain = inside.device.type == "cpu" and inside.dtype == torch.float32
    if not is_plain or isinstance(inside, FSDPModule):
        return []
    embeddings = [module for module in inside.modules() if type(module) is nn.Embedding]
    trained = [module for module in embeddings if module.weight.requires_grad]
    for embedding in trained:
        embedding.sparse = True
    return [cast(nn.Parameter, module.weight) for module in trained]


def _load(config: ModelConfig, path: str, *, hollow: bool) -> PreTrainedModel:
    return load_causal_lm(
        path,
        dtype=torch.float32,
        trust_remote_code=config.trust_remote_code,
        hollow=hollow,
    )


def _freeze_as_its_class(model: PreTrainedModel, config: ModelConfig, path: str) -> None:
    """Freeze the weights that a new model of this class has frozen, such as biases of routers.

    transformers loads them as trained ones, which would decay.
    """
    with torch.device("meta"):
        new = _load(config, path, hollow=True)
    for name, weight in new.named_parameters():
        if not weight.requires_grad:
            model.get_parameter(name).requires_grad_(False)


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

    Only the hidden states that predict a generated token go through the output layer. A model that
    further changes its logits (soft caps, scales) is detected at construction; its own full forward
    pass is then used.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float,
        inside: Inside | None = None,
        replay: RouterReplay | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        """`inside`: the model's placement, by default as it was loaded; `replay` uses the experts
        recorded in rows in place of those that the model's routers choose.

        Raises ModelError for a model whose log-probs depend on what is behind a sequence.
        """
        self._model = model
        self._replay = replay
        self.inside = inside or Inside(model)
        """The placement of the model; computations inside it have its full weights."""
        self._decoder = cast(Any, decoder_of(model))
        self._head: nn.Module = cast(Any, model).get_output_embeddings()
        config = cast(Any, model).config.get_text_config()
        self.attention: str = config._attn_implementation
        """Name of its text layers' attention in transformers."""
        self.flat_rows = reads_flat_rows(self.attention)
        """Whether the attention reads all rows of a micro-batch as one, without padding."""
        self.hidden_size: int = config.hidden_size
        self.shares_columns = not is_recurrent(model)
        """Whether sequences of a row may share columns: not if the model has recurrent layers."""
        self.one_per_row = False
        """Whether each row holds one sequence, since a state would go on into the next one."""
        self.most_columns = columns_as_positions(config)
        """Columns from which on a row must hold one sequence; None: it never must."""
        self._temperature = temperature
        self._chunk_bytes = chunk_bytes or LOGITS_BYTES[self.device.type == "cuda"]
        with torch.no_grad(), exact_products():
            self.full_logits = not self.inside.compute(self._head_is_all)
            self._reach = self.inside.compute(lambda: reach_of(model))
            self.one_per_row = not (self.shares_columns or self._knows_beginnings())
            self.flat_rows &= not self.one_per_row
            self._check_rows()

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.inside.device

    def score(self, packed: MicroBatch, request: ScoreOptions = _NOTHING_MORE) -> TokenScores:
        """Return log-probs (with gradient where enabled) and entropies of the N tokens."""
        logprobs_N, entropy_N, *more = self.inside.compute(lambda: self._score(packed, request))
        return TokenScores(logprobs_N, entropy_N, *more)

    def _score(self, packed: MicroBatch, request: ScoreOptions) -> tuple[Tensor, ...]:
        packed = packed.to(self.device)
        states_UD, place_N = self.states_UD(packed, logits=self.full_logits)
        row_M, token_M = place_N, packed.target_N
        others_NK = request.others_NK
        if others_NK is not None:
            others_NK = others_NK.to(self.device)
            row_M = torch.cat([place_N, place_N.repeat_interleave(others_NK.shape[1])])
            token_M = torch.cat([token_M, others_NK.flatten()])
        scores = self._score_rows(states_UD, row_M, token_M, request)
        logprobs_N, entropy_N = scores.logprobs_M, scores.entropy_U[place_N]
        if others_NK is not None:
            # Copies, since FSDP2 warns of views in a module's output.
            logprobs_N, others_N = logprobs_N.tensor_split([len(place_N)])
            return logprobs_N.clone(), entropy_N, others_N.view(others_NK.shape).clone()
        if request.top_k:
            top_NK = scores.top_logprobs_UK[place_N], scores.top_ids_UK[place_N]
            return logprobs_N, entropy_N, *top_NK
        return logprobs_N, entropy_N

    def _score_rows(
        self, states_UD: Tensor, row_M: Tensor, token_M: Tensor, request: ScoreOptions
    ) -> RowScores:
        head, options = self._head, (request.entropy_gradient, request.top_k)
        chunk_rows = max(1, self._chunk_bytes // (4 * self.vocab_size))
        logits = OutputLayer(temperature=self._temperature, chunk_rows=chunk_rows)
        if self.full_logits:
            return score_tokens(states_UD, logits, row_M, token_M, *options)
        if type(head) is nn.Linear:
            layer = replace(
                logits,
                weight_VD=head.weight,
                bias_V=head.bias,
                adds_to_gradient=self._owns_gradient(head.weight),
            )
            return score_tokens(states_UD, layer, row_M, token_M, *options)

        def through(part_UD: Tensor, row_m: Tensor, token_m: Tensor) -> RowScores:
            return score_tokens(head(part_UD), logits, row_m, token_m, *options)

        # An output layer with an adapter, or of another class, is recomputed by chunk in the
        # backward pass.
        order_M = row_M.argsort(stable=True)
        row_M, token_M = row_M[order_M], token_M[order_M]
        parts = [
            cast(
                RowScores,
                checkpoint.checkpoint(
                    through,
                    states_UD[first:end],
                    row_M[begin:stop] - first,
                    token_M[begin:stop],
                    use_reentrant=False,
                ),
            )
            for first, end, begin, stop in row_chunks(row_M, len(states_UD), chunk_rows)
        ]
        logprobs_M, *of_rows = (torch.cat(column) for column in zip(*parts, strict=True))
        return RowScores(torch.empty_like(logprobs_M).index_copy(0, order_M, logprobs_M), *of_rows)

    def _owns_gradient(self, weight: Tensor) -> bool:
        """Return whether gradients can be added to `weight.grad`; FSDP2 reduces autograd's."""
        is_whole = weight.is_leaf and weight.dtype == torch.float32
        return is_whole and weight.requires_grad and not isinstance(self.inside, FSDPModule)

    def states_UD(self, packed: MicroBatch, *, logits: bool = False) -> tuple[Tensor, Tensor]:
        """Return the decoder's hidden states (or the model's logits) at predicting columns.

        Several tokens may be predicted at one column: each column is returned once, and the second
        tensor has each token's index into the columns.
        """
        attention: dict[str, Any]
        if self.one_per_row:
            assert packed.segments == 1
            attention = {"attention_mask": None}  # causal: no token sees the padding behind it
        elif self.flat_rows:
            packed = with_runs(flatten(packed)) if packed.runs is None else packed
            attention = {"attention_mask": None, **kernel_arguments(packed)}
            if not self.shares_columns:
                attention["seq_idx"] = packed.segment_ids_BT.int()
        else:
            attention = {"attention_mask": self._masks(packed)}
        start, end = packed.columns or (0, packed.input_ids_BT.shape[1])
        column_N = packed.row_N * (end - start) + packed.source_col_N - start
        model = self._model if logits else self._decoder
        if self._replay is not None:
            experts = packed.experts_BTLK
            self._replay.use(None if experts is None else experts[:, start:end])
        output = model(**self._read_in(packed), **attention, use_cache=False)
        states_BTD: Tensor = output.logits if logits else output.last_hidden_state
        column_U, place_N = cast("tuple[Tensor, Tensor]", column_N.unique(return_inverse=True))
        return states_BTD.flatten(0, 1)[column_U], place_N

    def _read_in(self, packed: MicroBatch) -> dict[str, Tensor]:
        """Return the model's inputs: ids, or their embeddings if there are images."""
        ids_BT, images = packed.input_ids_BT, packed.images
        own = slice(*packed.columns) if packed.columns is not None else slice(None)
        if images is None:
            position_BT = packed.position_ids_BT
            if self.one_per_row:  # of padding, too: transformers then needs no mask
                position_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
            return {"input_ids": ids_BT[:, own], "position_ids": position_BT[:, own]}
        embeds_BTH = embed(self._model, ids_BT, images.column_Q, images.images)
        return {"inputs_embeds": embeds_BTH[:, own], "position_ids": images.rope_3BT[..., own]}

    def _masks(self, packed: MicroBatch) -> Tensor | dict[str, Tensor]:
        """Build the mask of a micro-batch; one for each kind of layer if they differ."""
        visible = block_causal_mask(packed.seen_until_BT)
        position_BT, full_until = packed.position_ids_BT, self._reach.full_until
        if full_until is None or packed.longest <= full_until:
            return visible
        return self._reach.masks(visible, position_BT, position_BT)

    def logits(self, states_UD: Tensor) -> Tensor:
        """Return the logits of hidden states; with `full_logits` the states are logits already."""
        return states_UD if self.full_logits else self._head(states_UD)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in its output layer."""
        return int(cast(Tensor, self._head.weight).shape[0])

    # -- tests of the model --------------------------------------------------------------------

    def _head_is_all(self) -> bool:
        """Return whether the logits are the output layer applied to the decoder's states.

        The states are scaled up so that a soft cap would have a visible effect.
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

    def _check_rows(self) -> None:
        """Raise ModelError if log-probs depend on other sequences of a pass, or on padding."""
        try:
            difference = self._changed_by_neighbours()
        except (ValueError, TypeError, IndexError) as error:
            raise ModelError(
                f"a model of type {self._kind!r} cannot be trained: its class takes no mask of the "
                "tokens that each token of a packed row sees",
                hint="use a model of another family, such as Qwen3 or Llama",
            ) from error
        if difference:
            raise ModelError(
                f"a model of type {self._kind!r} cannot be trained: sequences of one pass change "
                f"each other's log-probs by {difference:.2g}",
                hint="use a model in which a token sees only what its mask shows",
            )

    def _knows_beginnings(self) -> bool:
        """Return whether recurrent layers begin anew with each sequence of a flat row.

        Kernels do that are given the lengths (`cu_seq_lens_q`) or a number for each sequence
        (`seq_idx`); transformers' own functions in torch ignore both.
        """
        try:
            return self.flat_rows and not self._changed_by_neighbours()
        except _KERNEL_ERRORS as error:
            _log.warning("flat_rows_unusable", model=self._kind, error=str(error))
            return False

    def _changed_by_neighbours(self) -> float:
        """Return by how much sequences of one pass change each other's log-probs; 0: by rounding.

        The log-probs of a sequence must not change with its neighbours, and must equal those in a
        separate pass without padding. In 16 bits, rounding depends on the length of rows and on the
        experts' token counts: differences are compared with those of the first sequence of a row,
        which are rounding only, and with the effect of a token of the sequence itself.
        """
        ids = (self.vocab_size // 3 + np.arange(27, dtype=np.int64)) % self.vocab_size
        other = (ids + 7) % self.vocab_size
        first, second, same_prompt = ids[:11], ids[11:23], np.concatenate([ids[:7], ids[23:]])
        changed = np.concatenate([second[:4], other[15:16], second[5:]])
        scores_P = self._probe(first, second, same_prompt)
        beside_P = self._probe(np.concatenate([ids[:7], other[7:11]]), second, same_prompt)
        before_P = self._probe(first, changed, same_prompt)
        alone_P = torch.cat([self._probe(each) for each in (first, second, same_prompt)])
        own = float((before_P - scores_P)[3:6].abs().max())
        moved_P = torch.cat([(beside_P - scores_P)[3:], (before_P - scores_P)[[0, 1, 2, 6, 7, 8]]])
        apart_P = (alone_P - scores_P).abs()
        moved, apart, rounding = (
            float(each.max()) for each in (moved_P.abs(), apart_P, apart_P[:3])
        )
        in_half = self.inside.dtype != torch.float32
        allowed = max(0.1, own / 4, 3 * rounding) if in_half else _EXACT
        allowed_moved = max(0.1, own / 20) if in_half and routers_of(self._model) else _EXACT
        return 0.0 if moved <= allowed_moved and apart <= allowed else max(moved, apart)

    @property
    def _kind(self) -> str:
        return cast(Any, self._model).config.model_type

    def _probe(self, *sequences: NDArray[np.int64]) -> Tensor:
        """Return the log-probs of three tokens of each of several sequences in one micro-batch."""
        mask = np.array([0, 0, 0, 0, 1, 1, 0, 1])
        [packed] = pack(
            [TokenSequence(ids, np.pad(mask, (len(ids) - len(mask), 0))) for ids in sequences],
            max_row_tokens=32,
            microbatch_tokens=64,
            share_prompts=self.shares_columns,
            one_per_row=self.one_per_row,
        )
        return self.score(packed).logprobs_N


# -- before the weights are read -------------------------------------------------------------------


def try_model(job: JobConfig) -> None:
    """Try whether a job's model can be trained, by its configuration alone.

    Raises the ModelError or ConfigError that training it would.
    """
    model = job.model
    config = load_model_config(root_of(model.path), trust_remote_code=model.trust_remote_code)
    if job.generator.count and job.generator.engine == "vllm":
        refuse_in_vllm(model.path, config.to_dict(), adapts=job.lora.rank > 0)
    with torch.random.fork_rng(devices=[]):
        with contextlib.suppress(CheckSkipped):
            try_rows(config)
        if class_of(config) is not None:  # a model's own code may need its weights
            try_layers(job)


def try_rows(config: Any) -> bool:
    """Return whether a row must hold one sequence, tried with a small copy of a model.

    Raises ModelError for a model that cannot be trained, CheckSkipped where no copy is made.
    """
    small, cpu = make_small_copy(config), torch.device("cpu")
    chosen = choose_attention("auto", small.config, cpu, torch.float32, needs_masks(small))
    set_attention(small, chosen, cpu)
    return Scorer(small, temperature=1.0).one_per_row


def try_layers(job: JobConfig) -> None:
    """Prepare a job's model as a learner does, without its weights."""
    learner = job.learner.model_copy(update={"compile": False})
    with torch.device("meta"):
        built = load_model(job.model, learner, root_of(job.model.path), hollow=True)
    if (reason := needs_masks(built)) is not None:
        device, configured = torch.device("cpu"), job.model.attn_implementation
        choose_attention(configured, built.config, device, torch.float32, reason)
    if learner.context_parallel > 1:
        check_divisible(built, learner.context_parallel)
    if job.algorithm.router_replay:
        RouterReplay(built)
