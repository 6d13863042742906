"""Sampling for a whole batch, with separate parameters and random streams per row.

Random numbers are counter-based: the number of a token is a hash of the request's seed and the
token's index (SplitMix64, Steele et al. 2014), so a row's tokens do not depend on the rest of the
batch, and requests need no generator objects. One uniform number selects the token from the
cumulative distribution. Top-p and top-k draw from the whole distribution and redraw until the token
is a kept one: the same distribution as renormalising over the kept tokens, without sorting the
vocabulary. Rows for which this takes too long are sorted.

Grammars, allowed tokens, bad words and `min_tokens` exclude tokens; biases and penalties change how
likely they are. All change the logits from which a token is drawn. Recorded and trained log-probs
are those of the unchanged logits, as a learner computes them without such constraints.

Shape letters: B rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...schemas.wire.array import IntVector
from ..policy.grammar import GrammarState, MaskFiller
from .engine import Sampling

# -- grammars, biases and penalties ----------------------------------------------------------------

_NONE_LEFT = "allowed_token_ids, bad_words, min_tokens and the required form exclude every token"
_EXCLUDED = float("-inf")


class RowConstraint:
    """Grammar, biases and penalties of one answer, and its tokens so far."""

    def __init__(self, sampling: Sampling, prompt: IntVector) -> None:
        """Start after a prompt; its last `sampling.num_drawn` tokens belong to the answer."""
        begun = len(prompt) - sampling.num_drawn
        drawn = prompt[begun:].tolist()
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._repetition = sampling.repetition_penalty
        self._counts: dict[int, int] = {}
        self._seen = set[int](prompt[:begun].tolist()) if self._repetition != 1 else set[int]()
        self._sampling = sampling
        self._drawn: list[int] = []
        self._error = ""
        self.state: GrammarState | None = None
        if sampling.grammar is not None:
            self.state = sampling.grammar.begin()
        for token in drawn:
            self.accept_token(token)

    @staticmethod
    def of(sampling: Sampling, prompt: IntVector) -> "RowConstraint | None":
        """Return the constraint of a request's answer; None: none."""
        return RowConstraint(sampling, prompt) if sampling.is_constrained else None

    @property
    def error(self) -> str:
        """Why the answer cannot continue; empty: it can."""
        return self._error or ("" if self.state is None else self.state.error)

    def accept_token(self, token: int) -> None:
        """Add a token to the answer."""
        self._drawn.append(token)
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._repetition != 1:
            self._seen.add(token)
        if self.state is not None:
            self.state.accept_token(token)

    def penalize(self, logits_V: torch.Tensor) -> None:
        """Lower the logits of drawn tokens, as vLLM and OpenAI define it."""
        if self._repetition != 1 and self._seen:
            at = torch.as_tensor(list(self._seen), device=logits_V.device)
            own = logits_V[at]
            logits_V[at] = torch.where(own > 0, own / self._repetition, own * self._repetition)
        if (self._presence or self._frequency) and self._counts:
            at = torch.as_tensor(list(self._counts), device=logits_V.device)
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            lower = torch.as_tensor(self._presence + self._frequency * counts)
            logits_V[at] -= lower.to(logits_V.device, logits_V.dtype)

    def bias(self, logits_V: torch.Tensor) -> None:
        """Add the biases, and exclude tokens, as vLLM does before penalties."""
        sampling = self._sampling
        if sampling.logit_bias:
            ids, biases = zip(*sampling.logit_bias, strict=True)
            at = torch.as_tensor(ids, device=logits_V.device)
            logits_V[at] += torch.as_tensor(biases, device=logits_V.device, dtype=logits_V.dtype)
        if sampling.allowed_token_ids:
            at = torch.as_tensor(sampling.allowed_token_ids, device=logits_V.device)
            own = logits_V[at]
            logits_V.fill_(_EXCLUDED)
            logits_V[at] = own
        excluded = [
            word[-1]
            for word in sampling.bad_words
            if len(word) == 1 or self._drawn[1 - len(word) :] == list(word[:-1])
        ]
        if len(self._drawn) < sampling.min_tokens:
            excluded += (stop for stop in sampling.stop_token_ids if 0 <= stop < len(logits_V))
        if excluded:
            logits_V[torch.as_tensor(excluded, device=logits_V.device)] = _EXCLUDED

    def filter(self, logits_V: torch.Tensor, own_V: torch.Tensor) -> None:
        """Exclude tokens by `min_p`; if none is left at all, set `error` and restore `own_V`."""
        sampling = self._sampling
        if not (
            sampling.min_p
            or sampling.min_tokens
            or sampling.bad_words
            or sampling.allowed_token_ids
        ):
            return
        best = float(logits_V.max())
        if best == _EXCLUDED:
            self._error = _NONE_LEFT
            logits_V.copy_(own_V)
        elif sampling.min_p and sampling.temperature:
            least = best + sampling.temperature * math.log(sampling.min_p)
            logits_V.masked_fill_(logits_V < least, _EXCLUDED)


class Constraining:
    """Applies the constraints of a batch."""

    def __init__(self) -> None:
        self._masks = MaskFiller()

    def shaped(
        self, logits_BV: torch.Tensor, constraints: Sequence[RowConstraint | None]
    ) -> torch.Tensor | None:
        """Return float32[B, V], a changed copy of the logits for drawing; None: no change.

        Excluded tokens have -inf.
        """
        if not any(constraints):
            return None
        shaped_BV = logits_BV.to(torch.float32, copy=True)
        for row, constraint in enumerate(constraints):
            if constraint is not None:
                constraint.bias(shaped_BV[row])
                constraint.penalize(shaped_BV[row])
        states = {
            row: constraint.state
            for row, constraint in enumerate(constraints)
            if constraint is not None and constraint.state is not None
        }
        if states:
            allowed = self._masks.allowed(list(states.values()), shaped_BV.shape[1])
            denied = torch.as_tensor(~allowed, device=shaped_BV.device)
            for place, row in enumerate(states):
                shaped_BV[row].masked_fill_(denied[place], _EXCLUDED)
        for row, constraint in enumerate(constraints):
            if constraint is not None:
                constraint.filter(shaped_BV[row], logits_BV[row])
        return shaped_BV


def masked_shares(probs_BV: torch.Tensor, shaped_BV: torch.Tensor) -> torch.Tensor:
    """Return float32[B]: the share of the probability that was excluded."""
    return (probs_BV * torch.isneginf(shaped_BV)).sum(-1).clamp(0, 1)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_TRIES = 8
"""Draws of a filtered row before its vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class RowParameters:
    """The sampling parameters of B rows."""

    temperature_B: NDArray[np.float32]
    top_p_B: NDArray[np.float32]
    top_k_B: NDArray[np.int64]
    seed_B: NDArray[np.uint64]
    counter_B: NDArray[np.uint64]
    """Index of the token to draw, counted from the first token drawn with the seed."""

    def pick(self, index: NDArray[np.int64]) -> "RowParameters":
        """Return the parameters of some rows."""
        return RowParameters(
            self.temperature_B[index],
            self.top_p_B[index],
            self.top_k_B[index],
            self.seed_B[index],
            self.counter_B[index],
        )


def uniforms(
    seed_B: NDArray[np.uint64], counter_B: NDArray[np.uint64], attempt: int = 0
) -> NDArray[np.float32]:
    """Return float32[B] in [0, 1), a pure function of seed, counter and attempt."""
    step_B = counter_B + np.uint64((attempt << 40) + 1)
    bits_B = _mix(_mix(seed_B) + step_B * _GOLDEN)
    return ((bits_B >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


def _mix(bits_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits_B = (bits_B ^ (bits_B >> np.uint64(30))) * _MIX_1
    bits_B = (bits_B ^ (bits_B >> np.uint64(27))) * _MIX_2
    return bits_B ^ (bits_B >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Draw:
    """The next tokens of B rows, with log-probs and other values."""

    tokens_B: NDArray[np.int64]
    logprobs_B: NDArray[np.float32]
    masked_B: NDArray[np.float32] | None = None
    """Share of the probability that was excluded; None: no logits were changed."""
    top_ids_BK: NDArray[np.int32] | None = None
    """The likeliest tokens in order, if requested."""
    top_logprobs_BK: NDArray[np.float32] | None = None


def sample(
    logits_BV: torch.Tensor, rows: RowParameters
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw one token per row from the model's own logits; see `draw`."""
    drawn = draw(logits_BV, rows)
    return drawn.tokens_B, drawn.logprobs_B


def draw(
    logits_BV: torch.Tensor,
    rows: RowParameters,
    shaped_BV: torch.Tensor | None = None,
    num_top: int = 0,
) -> Draw:
    """Draw one token per row, from `shaped_BV` if constraints changed the logits.

    The log-prob is that of softmax(logits / temperature) before any filter; a greedy row
    (temperature 0) takes the likeliest token and records its log-prob at temperature 1. Rows with
    logits that are not finite have a log-prob of NaN.
    """
    greedy_B = rows.temperature_B == 0
    scale_B = np.where(greedy_B, np.float32(1), rows.temperature_B)
    logits_BV = _scaled(logits_BV, scale_B)
    probs_BV = logits_BV.softmax(-1)
    masked_B = None
    if shaped_BV is None:
        tokens_B = _draw(logits_BV, probs_BV, rows, greedy_B)
    else:
        masked_B = masked_shares(probs_BV, shaped_BV).cpu().numpy()
        shaped_BV = _scaled(shaped_BV, scale_B)
        tokens_B = _draw(shaped_BV, shaped_BV.softmax(-1), rows, greedy_B)
    if shaped_BV is None:
        logprobs_B = probs_BV.gather(1, tokens_B[:, None])[:, 0].log()
    else:  # the probability of a token required by a grammar may underflow
        logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - logits_BV.logsumexp(-1)
    top_ids_BK = top_logprobs_BK = None
    if num_top:
        best_BK, ids_BK = logits_BV.log_softmax(-1).topk(min(num_top, logits_BV.shape[1]))
        top_ids_BK, top_logprobs_BK = ids_BK.int().cpu().numpy(), best_BK.cpu().numpy()
    return Draw(
        tokens_B.cpu().numpy(), logprobs_B.cpu().numpy(), masked_B, top_ids_BK, top_logprobs_BK
    )


def _scaled(logits_BV: torch.Tensor, scale_B: NDArray[np.float32]) -> torch.Tensor:
    logits_BV = logits_BV.float()
    return logits_BV / _column(scale_B, logits_BV) if (scale_B != 1).any() else logits_BV


def _draw(
    logits_BV: torch.Tensor,
    probs_BV: torch.Tensor,
    rows: RowParameters,
    greedy_B: NDArray[np.bool_],
) -> torch.Tensor:
    if greedy_B.all():
        return logits_BV.argmax(-1)
    cdf_BV = probs_BV.cumsum(-1)
    tokens_B = _inverse_cdf(cdf_BV, _column(uniforms(rows.seed_B, rows.counter_B), probs_BV))
    filtered = np.flatnonzero(~greedy_B & ((rows.top_p_B < 1) | (rows.top_k_B > 0)))
    if len(filtered):
        _draw_again(tokens_B, probs_BV, cdf_BV, rows, filtered)
    if greedy_B.any():
        mask_B = torch.as_tensor(greedy_B, device=probs_BV.device)
        tokens_B = torch.where(mask_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B


def _column(values_B: NDArray[np.float32], like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values_B, device=like.device)[:, None]


def _inverse_cdf(cdf_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """Pick index i with probability (cdf[i] - cdf[i - 1]) / cdf[-1]; never one of weight 0."""
    total_B1 = cdf_BV[:, -1:]
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    target_B1 = torch.minimum(uniform_B1 * total_B1, below_B1)
    picked_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    return picked_B1[:, 0].clamp(max=cdf_BV.shape[1] - 1)


def _draw_again(
    tokens_B: torch.Tensor,
    probs_BV: torch.Tensor,
    cdf_BV: torch.Tensor,
    rows: RowParameters,
    filtered: NDArray[np.int64],
) -> None:
    """Redraw for filtered rows until each has a token that its filters keep."""
    device = probs_BV.device
    for attempt in range(1, _TRIES + 1):
        index = torch.as_tensor(filtered, device=device)
        probs, drawn = (
            (probs_BV, tokens_B)
            if len(filtered) == len(tokens_B)
            else (
                probs_BV[index],
                tokens_B[index],
            )
        )
        accepted = _keeps(probs, drawn, rows.top_p_B[filtered], rows.top_k_B[filtered])
        filtered = filtered[~accepted.cpu().numpy()]
        if not len(filtered):
            return
        index = torch.as_tensor(filtered, device=device)
        few = rows.pick(filtered)
        uniform = _column(uniforms(few.seed_B, few.counter_B, attempt), probs_BV)
        tokens_B[index] = _inverse_cdf(cdf_BV[index], uniform)
    few, index = rows.pick(filtered), torch.as_tensor(filtered, device=device)
    tokens_B[index] = _draw_sorted(probs_BV[index], few)


def _keeps(
    probs_BV: torch.Tensor,
    tokens_B: torch.Tensor,
    top_p_B: NDArray[np.float32],
    top_k_B: NDArray[np.int64],
) -> torch.Tensor:
    """Return the kept tokens: likelier tokens sum to less than top_p and number below top_k.

    Tokens of equal probability are kept together. A row with probabilities that are not finite
    keeps its token.
    """
    above_BV = probs_BV > probs_BV.gather(1, tokens_B[:, None])
    weight_B = (probs_BV * above_BV).sum(-1)
    kept_B = ~(weight_B >= torch.as_tensor(top_p_B, device=probs_BV.device))
    if (top_k_B > 0).any():
        limit_B = np.where(top_k_B > 0, top_k_B, probs_BV.shape[1])
        kept_B &= above_BV.sum(-1) < torch.as_tensor(limit_B, device=probs_BV.device)
    return kept_B


def _draw_sorted(probs_BV: torch.Tensor, rows: RowParameters) -> torch.Tensor:
    best_BV, index_BV = probs_BV.sort(dim=-1, descending=True)
    limit_B = np.where(rows.top_k_B > 0, rows.top_k_B, probs_BV.shape[1])
    rank_V = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    keep_BV = rank_V < torch.as_tensor(limit_B, device=probs_BV.device)[:, None]
    keep_BV &= best_BV.cumsum(-1) - best_BV < _column(rows.top_p_B, probs_BV)
    keep_BV[:, 0] = True
    uniform_B1 = _column(uniforms(rows.seed_B, rows.counter_B, _TRIES + 1), probs_BV)
    picked_B = _inverse_cdf((best_BV * keep_BV).cumsum(-1), uniform_B1)
    return index_BV.gather(1, picked_B[:, None])[:, 0]
