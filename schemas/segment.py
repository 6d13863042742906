"""Segments of an episode that is being played: what another generator needs to go on with it."""

from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from .wire.array import FloatVector, IntVector, MaskVector
from .wire.message import Message
from .wire.subjects import NAME_PATTERN


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
