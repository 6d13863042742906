"""`asample` as it travels: a JSON request, and its protobuf result."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from ....schemas.tinker import wire
from ....schemas.tinker.wire import TinkerBody
from ....schemas.wire.bounds import MAX_TOP_K
from ....schemas.wire.errors import DataError
from ...engine.engine import PromptScores

MAX_SAMPLES = 1024
_STOP, _LENGTH = 0, 1
_NOTHING = -99999.0
"""Log-prob of a place that holds nothing."""


class ChunkBody(BaseModel):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = Field(default_factory=list[int])


class PromptBody(BaseModel):
    """A prompt."""

    chunks: list[ChunkBody]

    def token_ids(self, vocab: int) -> NDArray[np.int32]:
        """Return its tokens; raises DataError for other parts, and tokens that there are not."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise DataError(
                    f"the prompt holds a chunk of type {chunk.type}", hint="send encoded_text"
                )
        tokens = [token for chunk in self.chunks for token in chunk.tokens]
        if not tokens:
            raise DataError("the prompt is empty", hint="send at least one token")
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < vocab:
                raise DataError(
                    f"token {token} of the prompt is outside the vocabulary",
                    hint=f"the model has {vocab:,} tokens, from 0 on",
                )
        return np.array(tokens, np.int32)


class SamplingParamsBody(BaseModel):
    """How to draw."""

    model_config = ConfigDict(extra="forbid")
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(TinkerBody):
    """`asample`."""

    defaults: ClassVar[dict[str, Any]] = {
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
    }
    remedies: ClassVar[dict[str, str]] = {
        "record_stability_info": "it is for loss_fn stable_reinforce, which is not offered either: "
        "train with loss_fn=importance_sampling, ppo or cispo"
    }
    sampling_session_id: str
    seq_id: int
    prompt: PromptBody
    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    sampling_params: SamplingParamsBody = Field(default_factory=SamplingParamsBody)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_K)


@dataclass(frozen=True)
class Sampled:
    """One continuation."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ended: Literal["stop", "length"]


def write_samples(
    sequences: list[Sampled], scores: PromptScores | None = None, *, with_logprobs: bool = False
) -> bytes:
    """Return continuations as clients read them, and what is known of the prompt.

    `with_logprobs` tells that its tokens' log-probs are wanted, beside the likeliest.
    """
    message = wire.SampleResponse()
    for one in sequences:
        message.sequences.add(
            stop_reason=_STOP if one.ended == "stop" else _LENGTH,
            tokens=one.tokens.astype("<i4").tobytes(),
            logprobs=one.logprobs.astype("<f4").tobytes(),
        )
    if scores is not None and with_logprobs:
        message.prompt_logprobs = scores.logprobs.astype("<f4").tobytes()
    if scores is not None and scores.top_ids.shape[1]:
        top = message.topk_prompt_logprobs
        top.length, top.k = scores.top_ids.shape
        top.token_ids = scores.top_ids.astype("<i4").tobytes()
        logprobs = np.nan_to_num(scores.top_logprobs, nan=_NOTHING, neginf=_NOTHING)
        top.logprobs = logprobs.astype("<f4").tobytes()
    return message.SerializeToString()
