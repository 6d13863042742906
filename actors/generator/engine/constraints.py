"""What changes the choice of a row's next token beside temperature, top-p and top-k.

A grammar takes tokens out of the choice; penalties make tokens that an answer has already less
likely. Both act on the logits that a token is drawn from. The log-probs that are told and trained
are those of the logits before: a learner computes them without either.

Shape letters: B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from .engine import IntVector, Sampling
from .token_grammar import GrammarState, MaskFiller


class RowConstraint:
    """What limits one answer, as far as it has come."""

    def __init__(self, sampling: Sampling, prompt: IntVector) -> None:
        """Begin behind a prompt, of which the last `sampling.num_drawn` are the answer's own."""
        begun = len(prompt) - sampling.num_drawn
        drawn = prompt[begun:].tolist()
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._repetition = sampling.repetition_penalty
        self._counts: dict[int, int] = {}
        self._seen = set[int](prompt[:begun].tolist()) if self._repetition != 1 else set[int]()
        self.state: GrammarState | None = None
        if sampling.grammar is not None:
            self.state = sampling.grammar.begin()
        for token in drawn:
            self.take(token)

    @staticmethod
    def of(sampling: Sampling, prompt: IntVector) -> "RowConstraint | None":
        """Return what limits a request's answer; None: nothing."""
        return RowConstraint(sampling, prompt) if sampling.is_constrained else None

    @property
    def error(self) -> str:
        """Why the answer cannot go on; empty: it can."""
        return "" if self.state is None else self.state.error

    def take(self, token: int) -> None:
        """Go on behind a token of the answer."""
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._repetition != 1:
            self._seen.add(token)
        if self.state is not None:
            self.state.take(token)

    def penalize(self, logits_V: torch.Tensor) -> None:
        """Lower the logits of tokens that have come, as vLLM and OpenAI define it."""
        if self._repetition != 1 and self._seen:
            at = torch.as_tensor(list(self._seen), device=logits_V.device)
            own = logits_V[at]
            logits_V[at] = torch.where(own > 0, own / self._repetition, own * self._repetition)
        if (self._presence or self._frequency) and self._counts:
            at = torch.as_tensor(list(self._counts), device=logits_V.device)
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            lower = torch.as_tensor(self._presence + self._frequency * counts)
            logits_V[at] -= lower.to(logits_V.device, logits_V.dtype)


class Constraining:
    """Applies the constraints of a batch."""

    def __init__(self) -> None:
        self._masks = MaskFiller()

    def shaped(
        self, logits_BV: torch.Tensor, constraints: Sequence[RowConstraint | None]
    ) -> torch.Tensor | None:
        """Return float32[B, V], a copy of the logits for tokens to be drawn from; None: the same.

        What a grammar does not allow is -inf there.
        """
        if not any(constraints):
            return None
        shaped_BV = logits_BV.to(torch.float32, copy=True)
        for row, one in enumerate(constraints):
            if one is not None:
                one.penalize(shaped_BV[row])
        states = {
            row: one.state
            for row, one in enumerate(constraints)
            if one is not None and one.state is not None
        }
        if states:
            allowed = self._masks.allowed(list(states.values()), shaped_BV.shape[1])
            denied = torch.as_tensor(~allowed, device=shaped_BV.device)
            for place, row in enumerate(states):
                shaped_BV[row].masked_fill_(denied[place], float("-inf"))
        return shaped_BV


def masked_shares(probs_BV: torch.Tensor, shaped_BV: torch.Tensor) -> torch.Tensor:
    """Return float32[B]: which share of the probability a grammar took out of the choice."""
    return (probs_BV * torch.isneginf(shaped_BV)).sum(-1).clamp(0, 1)
