"""Teachers: log-probs taken before an episode enters the log."""

from typing import Self

import numpy as np
from pydantic import model_validator

from .wire.array import FloatMatrix, FloatVector, IntMatrix, IntVector
from .wire.message import Message


class Teaching(Message):
    """Teacher data of a trajectory with N generated tokens."""

    prompt: IntVector | None = None
    """int32[P]: the first prompt for the teacher; null: the policy's."""
    logprobs: FloatVector | None = None
    """float32[N]: the teacher's log-prob of each generated token; null: the learner computes it."""
    top_ids: IntMatrix | None = None
    """int32[N, K]: the teacher's likeliest tokens at each position, if requested."""
    top_logprobs: FloatMatrix | None = None
    """float32[N, K]: their log-probs."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.top_ids is None) != (self.top_logprobs is None):
            raise ValueError("top_ids and top_logprobs belong together")
        if self.top_ids is not None and self.top_logprobs is not None:
            sizes = self.top_ids.shape, self.top_logprobs.shape
            if sizes[0] != sizes[1] or self.logprobs is None or len(self.logprobs) != sizes[0][0]:
                raise ValueError("top_ids and top_logprobs have a row for each of logprobs")
        return self

    def fits(self, num_generated: int) -> bool:
        """Whether it belongs to a trajectory with this many generated tokens."""
        return self.logprobs is None or len(self.logprobs) == num_generated

    def wrong(self, vocab_size: int) -> str:
        """Return what is wrong with its arrays' elements; empty: nothing."""
        known = [one for one in (self.prompt, self.top_ids) if one is not None]
        if any(((one < 0) | (one >= vocab_size)).any() for one in known):
            return f"a teacher's token ids must be from 0 to {vocab_size - 1}"
        told = [one for one in (self.logprobs, self.top_logprobs) if one is not None]
        if not all((np.isfinite(one) & (one <= 1e-3)).all() for one in told):
            return "a teacher's logprobs must be finite and at most 0"
        return ""
