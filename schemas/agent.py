"""Agent programs: calls of the model by a program, and episodes that clients run."""

from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from .generation import RequestId, TextPart, TextRequest
from .model_apis.canonical import ModelMessage
from .wire.array import FloatVector, IntVector
from .wire.message import Message, Part

MAX_CALL_CHOICES = 16
"""Answers to one call."""
MAX_OPEN_CALLS = 64
"""Concurrent requests of one episode's program."""


class CallPart(TextPart):
    """Part of the answer to a call. After the last part all of it is in the log."""

    delivery: int = Field(default=0, ge=0)
    """Deliveries of the task when the answering generator got it; 0 in parts without content."""
    names: list[str] = Field(default_factory=list[str])
    """Prefix of each choice's tool call ids. This and the next three are set in the first part with
    content."""
    num_reused: int = 0
    """Prompt tokens taken from earlier calls."""
    parent: int | None = None
    """Number of the continued call."""
    branch: str = ""
    """Why it is not that call's only continuation (`Branch` of the generator)."""
    calls: list[int] = Field(default_factory=list[int])
    """In the last part: each choice's number among the episode's calls."""


class CallRequest(TextRequest):
    """One call of the model by a program, on `episode.<e>.call`; parts come until the last one.

    While a task changes hands two generators may answer; `delivery` says which one is later. A
    retry after a generator's death appends `-1`, `-2` … to `request` and is the same call.
    """

    messages: list[ModelMessage] = Field(min_length=1)
    """The whole history, or what follows `previous`."""
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """As the chat template takes them."""
    is_prefill: bool = False
    """The last message begins the answer."""
    previous: int | None = Field(default=None, ge=0)
    """Number of the call whose answer the messages follow."""
    without_effect: list[str] = Field(default_factory=list[str], max_length=256)
    """The program's fields without effect; reported once per episode."""
    is_retry: bool = False
    """The client sent this before and got no answer."""
    begun: CallPart | None = None
    """The part of the answer that the program has from a previous holder of the episode, merged
    into one. The new holder continues the same `parent` with these tokens and names. Its first part
    repeats the head; its deltas hold only what is new."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.decoding.num_choices > MAX_CALL_CHOICES:
            raise ValueError(
                f"n is {self.decoding.num_choices}, and a call may have {MAX_CALL_CHOICES} answers"
            )
        return self


class CancelCall(Message):
    """Cancel the rest of an answer, on `episode.<e>.cancel`."""

    request: RequestId


class CallDelivered(Message):
    """Whether the program received the end of an answer, on `episode.<e>.delivered`; sent by its
    proxy."""

    calls: list[int] = Field(max_length=MAX_CALL_CHOICES)
    """Numbers of the calls."""
    whole: bool
    """False: the program disconnected before the end."""


class EpisodeSecret(Message):
    """Secret with which a job's hosts sign episode keys; from the auth service."""

    secret: bytes = Field(min_length=32, max_length=32)
    """Derived from the pool's secret; valid for this job only."""


class ReportedCall(Message):
    """One call of a program that a gateway answered."""

    names: list[str] = Field(default_factory=list[str], max_length=MAX_CALL_CHOICES)
    """Prefix of each choice's tool call ids."""
    calls: list[int] = Field(min_length=1, max_length=MAX_CALL_CHOICES)
    """Each choice's number among the episode's calls."""


class EpisodePost(Message):
    """A gateway's message to the host of an episode, on `episode.<e>.post`.

    It carries a request for the host to answer, or only reports the program's calls, which the
    gateway sends to the generator itself.
    """

    max_bytes: ClassVar[int] = 4 << 20
    request: RequestId
    key: str = Field(max_length=512)
    """The episode's key, as sent."""
    source: RequestId
    """Id of the gateway."""
    num_open: int = Field(default=0, ge=0, le=MAX_OPEN_CALLS)
    """The program's open calls at this gateway."""
    answered: list[ReportedCall] = Field(default_factory=list[ReportedCall], max_length=1024)
    """Calls answered there; repeats count once."""
    limit: Literal["", "episode_limit", "context_length_exceeded"] = ""
    """Code of the limit that refused the last call."""
    method: Literal["", "GET", "POST"] = ""
    """HTTP method; empty: no request."""
    path: str = Field(default="", max_length=1024)
    name: str = Field(default="", max_length=256)
    """`Idempotency-Key` header."""
    body: bytes = b""


class EpisodePosted(Part):
    """The host's answer, and whether the episode goes on."""

    status: int = 0
    """HTTP status; 0: no request."""
    headers: dict[str, str] = Field(default_factory=dict[str, str])
    body: bytes = b""
    over: str = ""
    """Reason for which no further call is answered; empty: the episode goes on."""


class GiveRequest(Message):
    """Request an episode from a host in the pool, on `env.give`; for jobs with `agent.client`."""

    name: str = Field(default="", max_length=256)
    """Idempotency key of the caller: repeated, it returns the same running episode."""
    wait_s: float = Field(default=5.0, ge=0, le=10)
    """Longest delay of the answer."""


class GiveReply(Message):
    """An episode for the caller to run, or none yet."""

    episode: str = ""
    """Episode id; empty: none yet."""
    key: str = ""
    """The episode's key, for any gateway."""
    task: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The row without its gold answer."""
    prompt: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Chat messages that state the task."""
    seed: int = 0
    """Seed of the task, equal for all its episodes."""
    split: Literal["train", "val"] = "train"
    """Trained or only evaluated."""
    left_s: float = 0.0
    """Time left for it."""


class RewardedBranch(Message):
    """A branch of a program's calls with its own reward."""

    call: int = Field(ge=0)
    """First call of the branch; the branch is this call and its continuations."""
    role: str = ""
    """Branches of equal roles are compared."""
    reward: float = 0.0


class CallPlaces(Message):
    """Positions of a row's K turns among all calls of their episode."""

    numbers: IntVector
    """int32[K]: call number of each turn."""
    nexts: IntVector
    """int32[K]: number of the next trained call, perhaps in another row; -1: none."""
    depths: IntVector
    """int32[K]: earlier calls of its conversation."""
    observed: IntVector
    """int32[K]: new observation tokens right before it."""
    rewards: FloatVector
    """float32[K]: the call's own reward."""
    branches: IntVector
    """int32[K]: first call of its innermost rewarded branch; -1: none."""
    roles: list[str]
    """With turns as samples, calls of equal roles and depths are compared."""
    outcome: float = 0.0
    """The episode's own reward, in its main row; part of that row's last reward."""
    rewarded: list[RewardedBranch] = Field(default_factory=list[RewardedBranch])
    """The episode's rewarded branches, in its main row."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = ("nexts", "depths", "observed", "rewards", "branches", "roles")
        for name in names:
            if len(getattr(self, name)) != len(self.numbers):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries, numbers {len(self.numbers)}"
                )
        if np.any((self.nexts >= 0) & (self.nexts <= self.numbers)):
            raise ValueError("a call leads to one that was answered before it")
        return self
