"""Log-probs and entropies of tokens from hidden states, without all logits in memory at once.

The output layer and the softmax are one operation (fused linear cross-entropy, as in Liger, arXiv
2410.10989), with any number of tokens looked at in each row and a gradient for each of their
log-probs. Rows are computed in chunks, forward and again backward, and a chunk's logits are gone
when the next one begins. Gradients of the weights add up over chunks in float32. Where all rows are
one chunk, its log-softmax is kept instead of computed again. The gradient of the weights may be
added to those that are there at once, which saves a tensor as large as the layer, and its way
through autograd.

Shape letters: U rows, D hidden size, V vocabulary, M tokens that are looked at, K likeliest ones.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from ..policy.devices import TRAINED_WEIGHTS, can_use_onednn, multiply

_PART_OF_VOCABULARY = 4096


@dataclass(frozen=True)
class OutputLayer:
    """The computation of log-probs from hidden states."""

    weight_VD: Tensor | None = None
    """Weight of the layer; None: the states are already logits."""
    bias_V: Tensor | None = None
    temperature: float = 1.0
    chunk_rows: int = 1 << 30
    """Number of rows whose logits are held at once."""
    adds_to_gradient: bool = False
    """Whether to add the weight's gradient to its float32 `grad` instead of returning it to
    autograd: only for a leaf whose gradient is computed by `backward` alone."""


class RowScores(NamedTuple):
    """Scores of the scored tokens and of their rows."""

    logprobs_M: Tensor
    entropy_U: Tensor
    top_logprobs_UK: Tensor
    top_ids_UK: Tensor


def score_tokens(
    states_UD: Tensor,
    layer: OutputLayer,
    row_M: Tensor,
    token_M: Tensor,
    entropy_gradient: bool = False,
    top_k: int = 0,
) -> RowScores:
    """Return the log-prob of token m in row `row_M[m]`, and the entropy of each row, in float32.

    Entropies have a gradient only with `entropy_gradient`; the log-probs of a row's `top_k`
    likeliest tokens never have one.
    """
    order_M = row_M.argsort(stable=True)
    scores = cast(
        "tuple[Tensor, Tensor, Tensor, Tensor]",
        _ScoreTokens.apply(
            states_UD,
            layer.weight_VD,
            layer.bias_V,
            row_M[order_M],
            token_M[order_M],
            (layer, entropy_gradient, top_k),
        ),
    )
    logprobs_M = torch.empty_like(scores[0]).index_copy(0, order_M, scores[0])
    return RowScores(logprobs_M, *scores[1:])


def row_chunks(
    row_M: Tensor, num_rows: int, chunk_rows: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, end, first token, end) of each chunk; the tokens are sorted by row."""
    starts = [*range(0, num_rows, chunk_rows), num_rows]
    if len(starts) <= 2:
        yield 0, num_rows, 0, len(row_M)
        return
    bounds = cast("list[int]", torch.searchsorted(row_M, row_M.new_tensor(starts)).tolist())
    yield from zip(starts, starts[1:], bounds, bounds[1:], strict=False)


class _ScoreTokens(torch.autograd.Function):
    """See `score_tokens`; the scored tokens are sorted by row."""

    @staticmethod
    def forward(
        ctx: Any,
        states_UD: Tensor,
        weight_VD: Tensor | None,
        bias_V: Tensor | None,
        row_M: Tensor,
        token_M: Tensor,
        settings: tuple[OutputLayer, bool, int],
    ) -> tuple[Tensor, ...]:
        layer, ctx.entropy_gradient, top_k = settings
        num_rows = len(states_UD)
        numbers: dict[str, Any] = {"dtype": torch.float32, "device": states_UD.device}
        logprobs_M, entropy_U = torch.empty(len(row_M), **numbers), torch.empty(num_rows, **numbers)
        top_UK = torch.empty(num_rows, top_k, **numbers)
        top_ids_UK = torch.empty(num_rows, top_k, dtype=torch.int64, device=states_UD.device)
        ctx.chunks = list(row_chunks(row_M, num_rows, layer.chunk_rows))
        whole: Tensor | None = None
        for first, end, first_m, end_m in ctx.chunks:
            log_softmax_UV = _log_softmax(states_UD[first:end], weight_VD, bias_V, layer)
            own_M = row_M[first_m:end_m] - first
            logprobs_M[first_m:end_m] = log_softmax_UV[own_M, token_M[first_m:end_m]]
            if top_k:
                top = log_softmax_UV.topk(top_k, -1)
                top_UK[first:end], top_ids_UK[first:end] = top.values, top.indices
            # Products of -inf (a masked token) and 0 count as 0.
            terms_UV = log_softmax_UV.exp().mul_(log_softmax_UV).nan_to_num_(nan=0.0)
            entropy_U[first:end] = -terms_UV.sum(-1)
            whole = log_softmax_UV if len(ctx.chunks) == 1 else None
        ctx.layer = layer
        ctx.save_for_backward(states_UD, weight_VD, bias_V, row_M, token_M, entropy_U, whole)
        without = [top_UK, top_ids_UK, *([] if ctx.entropy_gradient else [entropy_U])]
        ctx.mark_non_differentiable(*without)
        return logprobs_M, entropy_U, top_UK, top_ids_UK

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        states_UD, weight_VD, bias_V, row_M, token_M, entropy_U, whole = ctx.saved_tensors
        slope_M, slope_U = grad_outputs[0], grad_outputs[1]
        of_states, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_UD = torch.empty_like(states_UD) if of_states else None
        grad_VD = _weight_gradient(weight_VD, ctx.layer) if of_weight else None
        grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if of_bias else None
        half = None if weight_VD is None else weight_VD.to(states_UD.dtype)
        fast = weight_VD is not None and _is_fast(states_UD, weight_VD)
        for first, end, first_m, end_m in ctx.chunks:
            part_UD = states_UD[first:end]
            log_softmax_UV = whole
            if whole is None:
                log_softmax_UV = _log_softmax(part_UD, half, bias_V, ctx.layer)
            by_entropy_UV: Tensor | None = None
            if ctx.entropy_gradient:
                log_and_entropy_UV: Tensor = log_softmax_UV + entropy_U[first:end, None]
                by_entropy_UV = log_and_entropy_UV.mul_(slope_U[first:end, None])
            slope_UV = _slope_of_logits(
                log_softmax_UV.exp(),
                row_M[first_m:end_m] - first,
                token_M[first_m:end_m],
                slope_M[first_m:end_m],
                by_entropy_UV,
            )
            slope_UV = slope_UV.div_(ctx.layer.temperature).to(states_UD.dtype)
            if grad_UD is not None:
                if fast:
                    grad_UD[first:end] = multiply(slope_UV, weight_VD.t())
                else:
                    grad_UD[first:end] = slope_UV if half is None else slope_UV @ half
            if grad_VD is not None:
                _add_product(grad_VD, slope_UV, part_UD, fast=fast)
            if grad_V is not None:
                grad_V += slope_UV.sum(0, dtype=torch.float32)
        if grad_VD is not None:
            grad_VD = None if ctx.layer.adds_to_gradient else grad_VD.to(weight_VD.dtype)
        if grad_V is not None:
            grad_V = grad_V.to(bias_V.dtype)
        return grad_UD, grad_VD, grad_V, None, None, None


def target_logprobs(logits_UV: Tensor, row_M: Tensor, token_M: Tensor) -> Tensor:
    """Return the log-prob of token m in row `row_M[m]` of logits: float32[M].

    It allocates no second tensor of the logits' size: the backward pass, which runs once,
    overwrites the logits, so they must not be shared.
    """
    return cast(Tensor, _TargetLogprobs.apply(logits_UV.float(), row_M, token_M))


class _TargetLogprobs(torch.autograd.Function):
    """See `target_logprobs`."""

    @staticmethod
    def forward(ctx: Any, logits_UV: Tensor, row_M: Tensor, token_M: Tensor) -> Tensor:
        norm_U = logits_UV.logsumexp(-1)
        ctx.save_for_backward(logits_UV, norm_U, row_M, token_M)
        return logits_UV[row_M, token_M] - norm_U[row_M]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        logits_UV, norm_U, row_M, token_M = ctx.saved_tensors
        probs_UV = logits_UV.sub_(norm_U[:, None]).exp_()
        return _slope_of_logits(probs_UV, row_M, token_M, grad_outputs[0]), None, None


def _weight_gradient(weight_VD: Tensor, layer: OutputLayer) -> Tensor:
    """Return the tensor to which the weight's gradient is added."""
    if not layer.adds_to_gradient:
        return torch.zeros_like(weight_VD, dtype=torch.float32)
    weight = cast(Tensor, layer.weight_VD)  # autograd may save another object for the same tensor
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _log_softmax(
    states_UD: Tensor, weight_VD: Tensor | None, bias_V: Tensor | None, layer: OutputLayer
) -> Tensor:
    """Return a new float32[U, V] tensor."""
    if weight_VD is None:
        logits_UV = states_UD
    elif _is_fast(states_UD, weight_VD):
        logits_UV = multiply(states_UD, weight_VD, bias_V)
    else:
        bias_V = None if bias_V is None else bias_V.to(states_UD.dtype)
        logits_UV = functional.linear(states_UD, weight_VD.to(states_UD.dtype), bias_V)
    logits_UV = logits_UV.float()
    if layer.temperature != 1.0:
        logits_UV = logits_UV / layer.temperature
    return logits_UV.log_softmax(-1)


def _slope_of_logits(
    probs_UV: Tensor,
    row_M: Tensor,
    token_M: Tensor,
    slope_M: Tensor,
    by_entropy_UV: Tensor | None = None,
) -> Tensor:
    """Return the gradient of logits in the memory of their probabilities.

    It is Σ g (1[token] − p) for log-probs, plus −g p (log p + H) for entropies; `by_entropy_UV`
    holds g (log p + H).
    """
    sum_U = add_at(torch.zeros_like(probs_UV[:, 0]), row_M, slope_M)
    if by_entropy_UV is None:
        slope_UV = probs_UV.mul_(-sum_U[:, None])
    else:
        slope_UV = probs_UV.mul_(by_entropy_UV.add_(sum_U[:, None])).neg_().nan_to_num_(nan=0.0)
    add_at(slope_UV.view(-1), row_M * slope_UV.shape[1] + token_M, slope_M)
    return slope_UV


def add_at(row: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add values to a row at indices, in place and in a fixed order."""
    if row.device.type == "cpu":  # sequential there with any number of threads
        return row.index_add_(0, index, values)
    return row.index_put_((index,), values, accumulate=True)  # sorted there


def _is_fast(states_UD: Tensor, weight_VD: Tensor) -> bool:
    return weight_VD.numel() >= TRAINED_WEIGHTS and can_use_onednn(states_UD, weight_VD)


def _add_product(total_VD: Tensor, slope_UV: Tensor, states_UD: Tensor, *, fast: bool) -> None:
    if fast:
        # In parts of the vocabulary, as the full product would have the layer's size.
        for first in range(0, len(total_VD), _PART_OF_VOCABULARY):
            part = slice(first, first + _PART_OF_VOCABULARY)
            total_VD[part] += multiply(slope_UV[:, part].t(), states_UD.t())
    elif states_UD.dtype == torch.float32:
        total_VD.addmm_(slope_UV.t(), states_UD)
    else:
        total_VD += slope_UV.t() @ states_UD
