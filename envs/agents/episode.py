"""The state of an agent program's episode, shared by host, proxy and API, and its errors."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias

from ...broker.client.keys import EPISODE_KEY
from ...schemas.env import Split
from ...schemas.wire.errors import GameError, TinkermqError

Outcome: TypeAlias = Literal["done", "failed", "timeout", "stuck", "crash"]
"""How a program whose episode counts has ended: done, failed by its own post, over its time limit,
without a call for too long, or with an error. Limits of the model are recorded as well."""


class EpisodeOver(TinkermqError):
    """A call came for an episode that has ended, or with the key of another try."""

    code = "episode_over"
    status = 401
    is_mistake = True


class EpisodeLimit(TinkermqError):
    """The episode has no calls or tokens left."""

    code = "episode_limit"
    status = 400
    is_mistake = True


class ContextTooLong(TinkermqError):
    """A history leaves no room for an answer in the model's context."""

    code = "context_length_exceeded"
    status = 400
    is_mistake = True

    @classmethod
    def of(cls, num_tokens: int, most: int) -> Self:
        """Return the error for a prompt with so many tokens; its text depends on the API."""
        return cls(f"{num_tokens} tokens > {most} maximum")


class NoCalls(GameError):
    """A program ended without calling the model: there is nothing to train."""

    code: ClassVar[str] = "no_calls"
    boundary = "task"


@dataclass(eq=False)
class ProgramEpisode:
    """One try of an episode: its task, its calls, and what was posted about it."""

    episode: str
    """Its id, unique in the job and for each try."""
    task_input: dict[str, Any]
    """The row of the data without its gold answer, or the arguments of the task."""
    seed: int = 0
    split: Split = "train"
    job: str = ""
    deadline: float = float("inf")
    """Monotonic time at which it is over."""
    key: str = field(default_factory=lambda: EPISODE_KEY + secrets.token_urlsafe(24))
    """The program's key, valid for this episode only."""

    num_calls: int = 0
    """Number of answered calls of the model."""
    num_open: int = 0
    """Number of calls that are being answered."""
    last_call: float = field(default_factory=time.monotonic)
    """Monotonic time at which the last call began or ended."""

    limit: str = ""
    """The model's limit that refused its last call; empty: none."""

    reward: float | None = None
    """The last reward posted for the whole episode."""
    call_rewards: dict[int, float] = field(default_factory=dict[int, float])
    """Rewards of single calls, by their numbers."""
    branch_rewards: dict[int, float] = field(default_factory=dict[int, float])
    """Rewards of branches, by the calls that they begin with."""
    untrained: set[int] = field(default_factory=set[int])
    """Calls excluded from training."""
    notes: dict[int, str] = field(default_factory=dict[int, str])
    """Names given to the branches that begin with a call."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further data posted about the episode."""
    status: Literal["", "done", "failed"] = ""
    """The end that the program has posted; empty: none."""
    said_end: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the program has posted its end."""
    over: str = ""
    """Why calls are not answered any more; empty: they are answered."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at each call and post."""

    @property
    def has_partial_rewards(self) -> bool:
        """Whether calls or branches have rewards, so that the episode needs none."""
        return bool(self.call_rewards or self.branch_rewards)

    def forget_rewards(self) -> None:
        """Drop posted rewards and success: only a grader may set them."""
        posted = len(self.call_rewards) + len(self.branch_rewards) + (self.reward is not None)
        self.reward = None
        self.call_rewards.clear()
        self.branch_rewards.clear()
        self.info.pop("success", None)
        if posted:
            self.info["uncounted_rewards"] = posted

    def to_info(self) -> dict[str, Any]:
        """Return the data on the calls for the generator, in `info`."""
        facts: dict[str, Any] = {**self.info}
        if self.call_rewards:
            facts["call_rewards"] = {
                str(call): reward for call, reward in self.call_rewards.items()
            }
        if self.branch_rewards:
            rewards = {str(call): reward for call, reward in self.branch_rewards.items()}
            facts["branch_rewards"] = rewards
        if self.untrained:
            facts["untrained_calls"] = sorted(self.untrained)
        if self.notes:
            facts["branch_names"] = {str(call): name for call, name in self.notes.items()}
        return facts
