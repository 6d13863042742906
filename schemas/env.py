"""What generators and environment hosts say to each other."""

from typing import Any, Literal

from pydantic import Field

from .message import Message

Split = Literal["train", "val"]


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
    """Start an episode, on `env.reset` (one of the hosts takes it)."""

    episode: str = Field(min_length=1, max_length=128)
    """Id of the episode, made by the generator; asking again with it is harmless."""
    split: Split
    """Which data the sample is a row of."""
    sample: int | None
    """Row of the data, or None for a game that generates its states."""
    seed: int = Field(ge=0)
    """Seed of the episode's own random generator."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments for the game's `reset`."""


class ResetReply(Message):
    """The first prompt of an episode, and where it lives."""

    host: str
    """The host that holds the episode: steps and close go to it."""
    messages: list[dict[str, Any]]
    """Chat messages of the first prompt."""
    lease_s: float
    """The episode is freed when it is neither stepped nor closed for this long."""


class StepRequest(Message):
    """One action of the policy, on `env.<host>.step`."""

    episode: str = Field(min_length=1, max_length=128)
    """Id of the episode."""
    turn: int = Field(ge=0)
    """Number of the turn; asking again with the same number returns the same answer."""
    action: str
    """The generated text of the turn."""


class StepReply(Message):
    """The game's answer to one action."""

    observation: str
    """What the policy sees next."""
    reward: float
    """Reward of the turn."""
    done: bool
    """The episode has ended."""
    info: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Whatever else the game tells."""


class CloseRequest(Message):
    """Free an episode, on `env.<host>.close`."""

    episode: str = Field(min_length=1, max_length=128)
    """Id of the episode; an unknown one is fine."""
