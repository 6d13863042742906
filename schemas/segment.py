"""Segments of an episode that is being played: what another generator needs to go on with it."""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from .agent import CallMessage
from .wire.array import FloatVector, IntVector, MaskVector
from .wire.message import Message
from .wire.subjects import NAME_PATTERN


class LoggedCall(Message):
    """One call of the model by a program, as it is written down; its tokens are the segment's."""

    parent: int | None = Field(default=None, ge=0)
    """Number of the call that it continues; None: it is a root."""
    follows: int | None = Field(default=None, ge=0)
    """Number of the call whose history it continues, rendered anew."""
    context: bytes
    """Digest of the tools and of what else shapes the prompt."""
    given: list[CallMessage]
    """The messages since its parent's answer."""
    num_given: int = Field(ge=0)
    """Tokens of the segment that stand for them; the rest was generated."""
    name: str
    """With what the ids of its tool calls begin."""
    has_tools: bool
    """Whether what looks like a tool call is one."""
    is_thinking: bool
    """Whether the prompt has opened the reasoning."""
    prefill: str = ""
    """What the program wrote of the answer itself."""
    text: str | None = None
    """What the program was told, where that is more than its tokens say: up to a stop text."""
    finish: Literal["stop", "length"]
    """Why it ended."""
    num_seen: int = Field(ge=0)
    """Calls that had ended when it was asked for."""
    branch: str = Field(default="", max_length=32)
    """Why it is not the only continuation of its parent."""
    masked: float = Field(default=0.0, ge=0)
    """Sum over its tokens: which share of the probability the format of the answer took out of the
    choice of each."""
    request: bytes
    """Digest of what was asked for, prompt and limits: the same again may be answered by it."""
    asked: str = Field(default="", max_length=64)
    """Id of the request, as the program's proxy made it: by it the proxy may ask again."""


class Segment(Message):
    """What one episode gained since its last segment, on `segment.<n>.<e>`.

    It is appended with the sequence of the segment before it as the expected last one of its
    subject. One without tokens takes the episode over: its writer has the task now. The four
    vectors go on where those of the segment before end; see `Trajectory`.
    """

    delivery: int = Field(ge=1)
    """How often the task had been handed out when its writer got it; it never falls."""
    writer: str
    """The generator, its process and its lease of the task."""
    episode: str = ""
    """Id of the episode at its environment host."""
    host: str = Field(default="", pattern=f"^$|{NAME_PATTERN}")
    """The environment host that holds the episode."""
    seed: int = Field(default=0, ge=0)
    """Seed of the episode's sampling; its turns count up from it."""
    start: int = Field(ge=0)
    """Position of the first token in the whole conversation. 0: the episode begins anew, and what
    was appended before is void."""
    token_ids: IntVector
    """int32[T]: prompt, generated tokens and observations, in order."""
    mask: MaskVector
    """uint8[T]: 1 where the policy generated the token."""
    logprobs: FloatVector
    """float32[T]: behaviour log-prob of each generated token; 0 elsewhere."""
    versions: IntVector
    """int32[T]: policy version that produced each generated token; -1 elsewhere."""
    turn_ends: list[int] = Field(default_factory=list[int])
    """Positions of the last tokens of the turns that ended since the segment before."""
    rewards: list[float] = Field(default_factory=list[float])
    """The game's rewards for the turns that it answered since then."""
    observations: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Its answers, as chat messages."""
    call: LoggedCall | None = None
    """In the episode of a program: the call whose tokens these are."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        lengths = {len(getattr(self, one)) for one in ("token_ids", "mask", "logprobs", "versions")}
        if len(lengths) != 1 or len(self.rewards) != len(self.observations):
            raise ValueError("the columns of a segment are of different lengths")
        return self

    @classmethod
    def empty(cls, **fields: Any) -> Self:
        """Return one without tokens."""
        ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
        mask = np.empty(0, np.uint8)
        return cls(token_ids=ints, mask=mask, logprobs=floats, versions=ints, **fields)

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.token_ids)
