"""Environment hosts: resets and steps of episodes."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .wire.message import ErrorReply, Message
from .wire.subjects import NAME_PATTERN

Split = Literal["train", "val"]
EpisodeId = Annotated[str, Field(min_length=1, max_length=128)]


class DescribeRequest(Message):
    """Ask any of the job's environment hosts what it serves, on `env.describe`."""


class DescribeReply(Message):
    """What the job's environment hosts serve."""

    game: str
    num_train: int | None
    """Rows of the training data; null: generated states."""
    num_val: int
    """Rows or seeds of the validation set."""
    host: str
    roles: list[str] = Field(default_factory=list[str])
    """Empty: a single-agent game."""


class ResetRequest(Message):
    """Start episodes of one task, on `env.reset`, which one of the hosts takes.

    Repeat it on `env.<host>.reset` for episodes that were not ready; repeating an episode's id does
    no harm.
    """

    episodes: list[EpisodeId] = Field(min_length=1, max_length=4096)
    """Episode ids, made by the generator."""
    split: Split
    """Data set of the sample."""
    sample: int | None
    """Data row; null: generated state."""
    seed: int = Field(ge=0)
    """Seed of the episodes' random generators."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments for the game's `reset`."""
    wait_s: float = Field(default=1.0, ge=0, le=10)
    """Longest delay of the answer for episodes that are not ready."""
    only_held: bool = False
    """Start nothing: an episode that this host does not hold is an error."""
    table: EpisodeId | None = None
    """In a game with roles: the episode at this host in which `role` plays. The reply is ready at
    its first turn."""
    role: str = ""


class Opened(Message):
    """Start of one episode; neither field is set while it is pending."""

    prompt: int | None = None
    """Index of its prompt in the reply."""
    error: ErrorReply | None = None
    """Why it could not start."""


class ResetReply(Message):
    """First prompts of episodes, and the host that holds them."""

    host: str = Field(pattern=NAME_PATTERN)
    """Name of the host, for steps and close."""
    prompts: list[list[dict[str, Any]]]
    """Chat messages of the different first prompts; empty for a game with roles, and for a role
    whose turn never came."""
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Function schemas of the policy's tools."""
    rewards_ends: bool = False
    """Whether an episode that a limit ends is to be stepped once more, as `final`, for a reward of
    its game."""
    episodes: list[Opened]
    """Episodes in request order."""
    data_source: str = ""
    """The row's, by which scores are reported."""
    lease_s: float
    """An episode without steps for this long is freed."""


class StepRequest(Message):
    """One action each for episodes at one host, on `env.<host>.step`, as columns. Repeat it for
    those that were not ready."""

    episodes: list[EpisodeId] = Field(min_length=1, max_length=4096)
    turns: list[Annotated[int, Field(ge=0)]]
    """A repeated number returns the same answer."""
    actions: list[str]
    """The generated texts."""
    final: list[bool] = Field(default_factory=list[bool], max_length=4096)
    """The policy plays no further: the action is empty, the episode is only rewarded. Omitted if
    false for all."""
    wait_s: float = Field(default=1.0, ge=0, le=10)
    """Longest delay of the answer for games that are not ready."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if not len(self.episodes) == len(self.turns) == len(self.actions):
            raise ValueError("episodes, turns and actions are of different lengths")
        if self.final and len(self.final) != len(self.episodes):
            raise ValueError("final and episodes are of different lengths")
        return self

    @property
    def is_final(self) -> list[bool]:
        """`final` with one value per episode."""
        return self.final or [False] * len(self.episodes)


class FailedStep(Message):
    """An action that failed in the game or could not be played."""

    index: int
    """Index of the action in the request."""
    error: ErrorReply
    """What happened."""


class StepReply(Message):
    """Results of the actions, in request order, as columns."""

    observations: list[str | None]
    """Text of each observation; null: failed, or not ready yet."""
    rewards: list[float]
    """Rewards of the turns."""
    done: list[bool]
    """Whether the episodes have ended."""
    infos: list[dict[str, Any]]
    """`info` of the games."""
    roles: list[Literal["user", "tool"]] = Field(default_factory=list[Literal["user", "tool"]])
    """Role of each observation; empty: `user` for all."""
    tool_results: list[list[str]] = Field(default_factory=list[list[str]])
    """Where a turn made several calls: the result of each, one message each, and the observation is
    empty. An empty list for any other turn; omitted if there are none."""
    failed: list[FailedStep] = Field(default_factory=list[FailedStep])
    """Failed actions; their episodes have ended."""
    timed_out: list[int] = Field(default_factory=list[int])
    """Indices of actions whose step timed out and ended the episode (`env.on_step_timeout`)."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if not len(self.observations) == len(self.rewards) == len(self.done) == len(self.infos):
            raise ValueError("observations, rewards, done and infos are of different lengths")
        if self.roles and len(self.roles) != len(self.observations):
            raise ValueError("roles and observations are of different lengths")
        if self.tool_results and len(self.tool_results) != len(self.observations):
            raise ValueError("tool_results and observations are of different lengths")
        length = len(self.observations)
        if not all(
            0 <= at < length for at in (*(item.index for item in self.failed), *self.timed_out)
        ):
            raise ValueError("failed or timed_out names an action that was not asked for")
        return self


class CloseRequest(Message):
    """Free an episode, on `env.<host>.close`."""

    episode: EpisodeId
    """An unknown one is accepted."""
