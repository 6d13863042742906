"""Names of off-policy corrections, and their masks."""

from typing import Literal, Self

from pydantic import model_validator

from ..section import Section

CorrectionName = Literal["none", "tis", "icepop", "geometric", "mis", "veto", "decoupled", "m2po"]
OF_WHOLE_SEQUENCES = ("geometric", "mis", "veto")
"""Corrections that need a whole sequence at once."""


class CorrectionMask(Section):
    """Mask of tokens from which the policy has moved too far. w = π_o/π_b of a token: the policy
    before the update over the generating one."""

    over: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """What is dropped: a token by its own value; all of a sequence by the sum (of ratios: the
    product) or the mean (the geometric one) of its tokens' values, or as soon as one of its tokens
    is out of bounds."""
    of: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """What is bounded: w, or an estimate of KL(π_b‖π_o): k1 = −log w, k2 = (log w)²/2,
    k3 = w − 1 − log w."""
    low: float | None = None
    """Dropped below this."""
    high: float | None = None
    """Dropped above this."""
    only: Literal["all", "negative"] = "all"
    """negative: only where the advantage is negative (DeepSeek-V3.2's off-policy mask is
    `{over: sequence_mean, of: k1, high: δ, only: negative}`)."""

    @model_validator(mode="after")
    def _bounds_bound_something(self) -> Self:
        low, high = self.low, self.high
        if low is None and high is None:
            raise ValueError("a mask needs low, high, or both: without a bound it drops nothing")
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low={low:g} is not under high={high:g}: nothing would be left")
        if self.of in ("k2", "k3") and (low is not None or (high or 0) <= 0):
            raise ValueError(f"{self.of} is never negative: bound it from above, by high > 0")
        if self.of == "ratio" and any(one is not None and one <= 0 for one in (low, high)):
            raise ValueError("a ratio is never negative: bound it by low > 0 and high > 0")
        return self
