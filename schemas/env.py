"""What generators and environment hosts say to each other."""

from typing import Annotated, Any, Literal

from pydantic import Field

from .message import Message
from .reply import ErrorReply

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


class Opened(Message):
    """What became of the start of one episode; neither field is set while it lasts."""

    prompt: int | None = None
    """Which of the reply's prompts is the episode's."""
    error: ErrorReply | None = None
    """Why it could not be started."""


class ResetReply(Message):
    """The first prompts of episodes, and where they live."""

    host: str
    """The host that holds the episodes: steps and close go to it."""
    prompts: list[list[dict[str, Any]]]
    """Chat messages of the first prompts, each different one once."""
    episodes: list[Opened]
    """What became of each episode, in the order of the request."""
    lease_s: float
    """An episode is freed when it is neither stepped nor closed for this long."""


class Action(Message):
    """One action of the policy."""

    episode: EpisodeId
    """Id of the episode."""
    turn: int = Field(ge=0)
    """Number of the turn; asking again with the same number returns the same answer."""
    action: str
    """The generated text of the turn."""


class StepRequest(Message):
    """Actions for episodes that one host holds, on `env.<host>.step`."""

    actions: list[Action] = Field(min_length=1, max_length=4096)
    """One for each episode; to ask after one that was not ready, send it again."""
    wait_s: float = Field(default=1.0, ge=0, le=10)
    """How long the host may hold its answer back for games that are not ready."""


class Observed(Message):
    """The game's answer to one action."""

    observation: str
    """What the policy sees next."""
    reward: float
    """Reward of the turn."""
    done: bool
    """The episode has ended."""
    info: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Whatever else the game tells."""


class Stepped(Message):
    """What became of one action; neither field is set while the game is at it."""

    result: Observed | None = None
    """The game's answer."""
    error: ErrorReply | None = None
    """Why there is none; the episode has ended."""


class StepReply(Message):
    """What became of the actions of a request."""

    actions: list[Stepped]
    """In the order of the request."""


class CloseRequest(Message):
    """Free an episode, on `env.<host>.close`."""

    episode: EpisodeId
    """Id of the episode; an unknown one is fine."""
