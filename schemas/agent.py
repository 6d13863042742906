"""What an agent program asks of the model that is trained under it, and what it is told."""

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from .output_format import MAX_TOP_LOGPROBS, OutputFormat
from .wire.array import FloatVector, IntVector
from .wire.message import Message
from .wire.reply import Part

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_OPEN_CALLS = 64
"""Requests of one episode's program at the same time."""
RequestId = Annotated[str, Field(min_length=1, max_length=64)]


class CallMessage(Message):
    """One message of a program's history, whichever API it speaks."""

    role: Literal["system", "user", "assistant", "tool"]
    content: list[str | bytes] = Field(default_factory=list[str | bytes])
    """Texts, and encoded images, in order."""
    calls: list[tuple[str, str, str]] = Field(default_factory=list[tuple[str, str, str]])
    """Tools that the assistant called: name, arguments as they were written, id."""
    reasoning: str | None = None
    """What the assistant thought before; None: not told."""
    call_id: str = ""
    """Of a tool's result: the call that it answers."""


class CallDelta(Message):
    """What one choice of an answer has gained since the part before."""

    choice: int = Field(ge=0, lt=MAX_CHOICES)
    """Number of the choice."""
    text: str = ""
    """New text."""
    token_ids: list[int] = Field(default_factory=list[int])
    """New tokens; the text of the newest may come with a later part."""
    logprobs: list[float] = Field(default_factory=list[float])
    """Behaviour log-prob of each new token."""
    versions: list[int] = Field(default_factory=list[int])
    """Policy version that drew each of them."""
    tokens: list[str] = Field(default_factory=list[str])
    """Text of each of them by itself, where asked for."""
    top_tokens: list[list[str]] = Field(default_factory=list[list[str]])
    """Texts of the likeliest tokens in the place of each, best first, where asked for; none of a
    token that was drawn for an earlier request."""
    top_logprobs: list[list[float]] = Field(default_factory=list[list[float]])
    """Their log-probs."""
    finish: Literal["stop", "length", "cancelled"] | None = None
    """Why the choice has ended; None while it goes on."""


class CallPart(Part):
    """A piece of the answer to a call; the last one says that all of it is in the log."""

    delivery: int = Field(default=0, ge=0)
    """How often the task had been handed out when who answers got it; 0 where nothing is told."""
    names: list[str] = Field(default_factory=list[str])
    """In the first part that tells anything: with what the ids of each choice's tool calls begin.
    """
    has_tools: bool = False
    """There: whether what looks like a tool call is one."""
    is_thinking: bool = False
    """There: whether the prompt has opened the reasoning of the answer."""
    num_prompt: int = 0
    """There: tokens of the prompt."""
    prompt_ids: list[int] = Field(default_factory=list[int])
    """There: their ids, where they were asked for."""
    num_reused: int = 0
    """There: how many of them stand in the calls before."""
    parent: int | None = None
    """There: number of the call that is continued; None: a root."""
    branch: str = ""
    """There: why it is not the only continuation (see the generator's `Branch`)."""
    deltas: list[CallDelta] = Field(default_factory=list[CallDelta])
    """What is new, by choice."""
    calls: list[int] = Field(default_factory=list[int])
    """In the last part: the number of each choice among the calls of the episode."""


class CallRequest(Message):
    """One call of the model by a program, on `episode.<e>.call`; parts come until the last one.

    Who plays the episode hears it; during a change of hands two may, and the parts say whose
    delivery of the task is the later.
    """

    request: RequestId
    """Id made by the program's proxy, by which the call can be cancelled. Where the proxy asks
    again, because who answered has died or was overtaken, `-1`, `-2` … follow the same id: it is
    the same call, and no new sample."""
    messages: list[CallMessage] = Field(min_length=1)
    """The whole history, or what follows `previous`."""
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Tools, as the chat template takes them."""
    num_choices: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Answers that are wanted."""
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """Tokens of an answer at most; the job's own limits bind as well."""
    stop: list[str] = Field(default_factory=list[str], max_length=MAX_STOPS)
    """Texts at which an answer ends; they are not part of it."""
    format: OutputFormat | None = None
    """The form that an answer must have; None: any."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """Tell the text of each token, and so many of the likeliest in its place; None: neither."""
    stream: bool = False
    """Tell tokens as they are generated, instead of all at the end."""
    is_prefill: bool = False
    """The last message is the beginning of the answer."""
    previous: int | None = Field(default=None, ge=0)
    """Number of the call whose answer the messages follow; None: they are the whole history."""
    sampled: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Sampling that the program asked for; what the job says goes before it."""
    without_effect: list[str] = Field(default_factory=list[str], max_length=256)
    """Fields that the program sent and that change nothing, to be told once per episode."""
    is_retry: bool = False
    """The program's client says that it has sent this before and got no answer."""
    token_ids: bool = False
    """Tell the ids of the prompt's tokens as well."""
    count_only: bool = False
    """Only count the tokens of the prompt, as it would be continued."""
    begun: CallPart | None = None
    """What the program has been told of the answer already, by one who no longer plays the episode:
    all his parts as one, with everything of each choice from its beginning. Whoever answers
    continues the same `parent` by these tokens, keeps the names, and generates behind them: his
    first part tells the head once more, and his deltas only what is new, none of a choice that has
    its `finish`. The text of the tokens begins with the text that was told."""


class CancelCall(Message):
    """A program does not want the rest of an answer, on `episode.<e>.cancel`."""

    request: RequestId
    """Id of the call."""


class CallDelivered(Message):
    """Whether a program has the end of an answer, on `episode.<e>.delivered`; told by its proxy."""

    calls: list[int] = Field(max_length=MAX_CHOICES)
    """Numbers of the calls."""
    whole: bool
    """False: the program had gone before the end."""


class EpisodeSecret(Message):
    """What a job's hosts sign the keys of its episodes with; the auth service tells it to them."""

    secret: bytes = Field(min_length=32, max_length=32)
    """It follows from the pool's own, and is worth nothing for another job."""


class ReportedCall(Message):
    """One call of a program that was answered through a gateway."""

    names: list[str] = Field(default_factory=list[str], max_length=MAX_CHOICES)
    """With what the ids of each choice's tool calls begin."""
    calls: list[int] = Field(min_length=1, max_length=MAX_CHOICES)
    """Number of each choice among the calls of the episode."""


class EpisodePost(Message):
    """What a gateway tells the host of an episode, on `episode.<e>.post`.

    It holds a request of the program that is the host's to answer, or none: then it only reports
    how the program's calls go, which the gateway asks whoever plays the episode.
    """

    max_bytes: ClassVar[int] = 4 << 20
    request: RequestId
    """Id made by the gateway."""
    key: str = Field(max_length=512)
    """The episode's key, as the program has sent it."""
    source: RequestId
    """Which gateway it is."""
    num_open: int = Field(default=0, ge=0, le=MAX_OPEN_CALLS)
    """Calls of the program that wait for an answer at this gateway."""
    answered: list[ReportedCall] = Field(default_factory=list[ReportedCall], max_length=1024)
    """Calls that were answered there; one that was told before counts once."""
    limit: Literal["", "episode_limit", "context_length_exceeded"] = ""
    """Code of the limit that the last call was refused for."""
    method: Literal["", "GET", "POST"] = ""
    """Of the program's request; empty: there is none."""
    path: str = Field(default="", max_length=1024)
    """Its path, without a key."""
    name: str = Field(default="", max_length=256)
    """Its `Idempotency-Key`."""
    body: bytes = b""
    """Its body."""


class EpisodePosted(Part):
    """The host's answer: what the program is told, and whether the episode goes on."""

    status: int = 0
    """HTTP status of the answer; 0: there was no request."""
    headers: dict[str, str] = Field(default_factory=dict[str, str])
    """Its headers."""
    body: bytes = b""
    """Its body."""
    over: str = ""
    """Why no call of the program is answered any more; empty while calls are."""


class GiveRequest(Message):
    """Ask a host in the pool for an episode, on `env.give`; for jobs with `agent.client`."""

    name: str = Field(default="", max_length=256)
    """Made by who asks: the same name gets the same episode while that is under way."""
    wait_s: float = Field(default=5.0, ge=0, le=10)
    """How long the host may hold its answer back."""


class GiveReply(Message):
    """An episode to be run by who asked, or none yet."""

    episode: str = ""
    """Its id; empty: none has come."""
    key: str = ""
    """What its program proves itself by, at any gateway."""
    task: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The row of the data without its gold answer."""
    prompt: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """The chat messages by which the task is known."""
    seed: int = 0
    """The same for all episodes of a task."""
    split: Literal["train", "val"] = "train"
    """Whether it is trained or only counted."""
    left_s: float = 0.0
    """How long it may still take."""


class RewardedBranch(Message):
    """A branch of a program's calls that was given a reward of its own."""

    call: int = Field(ge=0)
    """Number of the call that it begins with; it has all that continue this one."""
    role: str = ""
    """Branches of equal roles are compared with each other."""
    reward: float = 0.0
    """What was posted for it."""


class CallPlaces(Message):
    """Where the K turns of a row stand among all calls of their episode."""

    numbers: IntVector
    """int32[K]: number of the call that each turn is."""
    nexts: IntVector
    """int32[K]: number of the trained call that it led to, perhaps in another row; -1: to none."""
    depths: IntVector
    """int32[K]: calls before it in its conversation."""
    observed: IntVector
    """int32[K]: tokens right before it that were new to the model."""
    rewards: FloatVector
    """float32[K]: what was posted for each call itself."""
    branches: IntVector
    """int32[K]: the innermost branch with a reward that it is in, by the call which that begins
    with; -1: none."""
    roles: list[str]
    """Calls of equal roles and depths are compared with each other where turns are."""
    outcome: float = 0.0
    """The episode's own reward, in its main row; it is part of that row's last reward."""
    rewarded: list[RewardedBranch] = Field(default_factory=list[RewardedBranch])
    """The branches of the episode that have a reward, in its main row."""

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
