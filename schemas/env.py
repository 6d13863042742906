"""What generators and environment hosts say to each other."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .wire.message import ErrorReply, Message
from .wire.subjects import NAME_PATTERN

Split = Literal["train", "val"]
EpisodeId = Annotated[str, Field(min_length=1, max_length=128)]


class DescribeRequest(Message):
    """Ask any environment host of the job what it serves, on `env.describe`."""


class DescribeReply(Message):
    """What the environment hosts of the job serve."""

    game: str
    """Name of the game."""
    num_train: int | None
    """Rows of the training data; None for a game that generates its states."""
    num_val: int
    """Rows, or seeds, of the validation set."""
    host: str
    """The host that answered."""
    roles: list[str] = Field(default_factory=list[str])
    """Players of a game for several; empty for a game for one."""


class ResetRequest(Message):
    """Start episodes of one task, on `env.reset` (one of the hosts takes it).

    Sent again to `env.<host>.reset` it asks after those that were not ready; asking again with an
    episode's id is harmless.
    """

    episodes: list[EpisodeId] = Field(min_length=1, max_length=4096)
    """Ids of the episodes, made by the generator."""
    split: Split
    """Which data the sample is a row of."""
    sample: int | None
    """Row of the data, or None for a game that generates its states."""
    seed: int = Field(ge=0)
    """Seed of the episodes' own random generators."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments for the game's `reset`."""
    wait_s: float = Field(default=1.0, ge=0, le=10)
    """How long the host may hold its answer back for episodes that are not ready."""
    only_held: bool = False
    """Start nothing: an episode that is not held here is an error."""
    table: EpisodeId | None = None
    """In a game with roles: the episode, held by this host, at which `role` takes its seat. The
    seat is ready when its first turn comes."""
    role: str = ""
    """Role of the seat."""


class Opened(Message):
    """What became of the start of one episode; neither field is set while it lasts."""

    prompt: int | None = None
    """Which of the reply's prompts is the episode's."""
    error: ErrorReply | None = None
    """Why it could not be started."""


class ResetReply(Message):
    """The first prompts of episodes, and where they live."""

    host: str = Field(pattern=NAME_PATTERN)
    """The host that holds the episodes: steps and close go to it."""
    prompts: list[list[dict[str, Any]]]
    """Chat messages of the first prompts, each different one once; no messages for a game with
    roles, whose prompts are those of its seats, and for a seat whose turn never came."""
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Function schemas of the tools that the policy may call, for its chat template."""
    episodes: list[Opened]
    """What became of each episode, in the order of the request."""
    data_source: str = ""
    """What the row says of its origin; scores are told apart by it."""
    lease_s: float
    """An episode is freed when it is neither stepped nor closed for this long."""


class StepRequest(Message):
    """One action each for episodes that one host holds, on `env.<host>.step`, column by column.

    To ask after those that were not ready, send them again.
    """

    episodes: list[EpisodeId] = Field(min_length=1, max_length=4096)
    """Ids of the episodes."""
    turns: list[Annotated[int, Field(ge=0)]]
    """Numbers of their turns; asking again with the same number returns the same answer."""
    actions: list[str]
    """The generated texts of the turns."""
    final: list[bool] = Field(default_factory=list[bool], max_length=4096)
    """Whether the policy plays no more: the action is empty, and the episode is only rewarded.
    Left out where no action is such a one."""
    wait_s: float = Field(default=1.0, ge=0, le=10)
    """How long the host may hold its answer back for games that are not ready."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if not len(self.episodes) == len(self.turns) == len(self.actions):
            raise ValueError("episodes, turns and actions are of different lengths")
        if self.final and len(self.final) != len(self.episodes):
            raise ValueError("final and episodes are of different lengths")
        return self

    @property
    def is_final(self) -> list[bool]:
        """`final`, spelled out."""
        return self.final or [False] * len(self.episodes)


class FailedStep(Message):
    """An action that the game did not survive, or that could not be played."""

    index: int
    """Which of the request's actions."""
    error: ErrorReply
    """What happened."""


class StepReply(Message):
    """What became of the actions of a request, in its order, column by column."""

    observations: list[str | None]
    """What the policy sees next; None for an action that failed or is not ready yet."""
    rewards: list[float]
    """Rewards of the turns."""
    done: list[bool]
    """Whether the episodes have ended."""
    infos: list[dict[str, Any]]
    """Whatever else the games tell."""
    roles: list[Literal["user", "tool"]] = Field(default_factory=list[Literal["user", "tool"]])
    """Who says the observations; empty where that is the user everywhere."""
    failed: list[FailedStep] = Field(default_factory=list[FailedStep])
    """The actions that failed; their episodes have ended."""
    timed_out: list[int] = Field(default_factory=list[int])
    """Numbers of the actions whose step took too long, where that ends an episode without failing
    it (`env.on_step_timeout`)."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if not len(self.observations) == len(self.rewards) == len(self.done) == len(self.infos):
            raise ValueError("observations, rewards, done and infos are of different lengths")
        if self.roles and len(self.roles) != len(self.observations):
            raise ValueError("roles and observations are of different lengths")
        length = len(self.observations)
        if not all(
            0 <= at < length for at in (*(one.index for one in self.failed), *self.timed_out)
        ):
            raise ValueError("failed or timed_out names an action that was not asked for")
        return self


class CloseRequest(Message):
    """Free an episode, on `env.<host>.close`."""

    episode: EpisodeId
    """Id of the episode; an unknown one is fine."""
