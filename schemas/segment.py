"""Segments: state of running episodes, from which another generator continues."""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from .agent import CallMessage
from .wire.array import FloatVector, IntVector, MaskVector
from .wire.message import Message
from .wire.subjects import NAME_PATTERN


class LoggedCall(Message):
    """One call of the model by a program; its tokens are the segment's."""

    parent: int | None = Field(default=None, ge=0)
    """Call that it continues; null: none."""
    follows: int | None = Field(default=None, ge=0)
    """Call whose history it continues after rendering it anew."""
    context: bytes
    """Digest of the tools and of what else shapes the prompt."""
    given: list[CallMessage]
    """Messages since the parent's answer."""
    num_given: int = Field(ge=0)
    """Tokens of the segment for these messages; the rest is generated."""
    name: str
    """Prefix of its tool call ids."""
    has_tools: bool
    """Whether text that looks like a tool call is one."""
    is_thinking: bool
    """Whether the prompt has opened the answer's reasoning."""
    prefill: str = ""
    """Beginning of the answer, written by the program."""
    text: str | None = None
    """Text sent to the program, if it differs from the tokens (cut at a stop text)."""
    finish: Literal["stop", "length"]
    """Why it ended."""
    num_seen: int = Field(ge=0)
    """Number of calls that had ended when it was requested."""
    branch: str = Field(default="", max_length=32)
    """Why it is not its parent's only continuation."""
    masked: float = Field(default=0.0, ge=0)
    """Sum over its tokens of the probability removed by the answer's format."""
    request: bytes
    """Digest of the request, prompt and limits; it may answer an equal request."""
    asked: str = Field(default="", max_length=64)
    """Id of the request from the program's proxy, for retries."""


class Segment(Message):
    """What one episode gained since its last segment, on `segment.<n>.<e>`.

    It is appended with the previous segment's sequence as the expected last one. A segment without
    tokens takes the episode over for its writer. The four vectors continue those of the previous
    segment; see `Trajectory`.
    """

    delivery: int = Field(ge=1)
    """How often the task had been delivered when its writer got it; never decreases."""
    writer: str
    """The generator, its process and its lease of the task."""
    episode: str = ""
    """Episode id at its environment host."""
    host: str = Field(default="", pattern=f"^$|{NAME_PATTERN}")
    """Environment host of the episode."""
    seed: int = Field(default=0, ge=0)
    """Seed of the episode's sampling; turns count up from it."""
    start: int = Field(ge=0)
    """Position of the first token in the conversation. 0: the episode starts anew, and earlier
    segments are void."""
    token_ids: IntVector
    """int32[T]: prompt, generated tokens and observations, in order."""
    mask: MaskVector
    """uint8[T]: 1 where the policy generated the token, 0 elsewhere."""
    logprobs: FloatVector
    """float32[T]: behaviour log-prob of generated tokens before top-p/top-k; 0 elsewhere."""
    versions: IntVector
    """int32[T]: policy version of generated tokens; -1 elsewhere."""
    turn_ends: list[int] = Field(default_factory=list[int])
    """Positions of the last tokens of turns that ended."""
    rewards: list[float] = Field(default_factory=list[float])
    """Rewards of answered turns."""
    observations: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Observations, as chat messages."""
    call: LoggedCall | None = None
    """For programs: the call whose tokens these are."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        lengths = {len(getattr(self, one)) for one in ("token_ids", "mask", "logprobs", "versions")}
        if len(lengths) != 1 or len(self.rewards) != len(self.observations):
            raise ValueError("the columns of a segment are of different lengths")
        return self

    @classmethod
    def empty(cls, **fields: Any) -> Self:
        """Return a segment without tokens."""
        ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
        mask = np.empty(0, np.uint8)
        return cls(token_ids=ints, mask=mask, logprobs=floats, versions=ints, **fields)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)
