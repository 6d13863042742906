"""Trajectories and groups: what generators and external agents append to the rollout log."""

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from .array import FloatVector, IntVector, MaskVector
from .errors import MessageError
from .message import Message
from .task import Blame, Task


class Trajectory(Message):
    """The token-level record of one episode.

    The four vectors have one entry per token of the whole conversation, prompt included.
    """

    token_ids: IntVector
    """int32[T]: prompt, then generated tokens and observations in order."""
    mask: MaskVector
    """uint8[T]: 1 where the policy generated the token, 0 elsewhere."""
    logprobs: FloatVector
    """float32[T]: behaviour log-prob of each generated token before top-p/top-k; 0 elsewhere."""
    versions: IntVector
    """int32[T]: policy version that produced each generated token; -1 elsewhere."""
    turn_ends: IntVector
    """int32[K]: position of the last generated token of each turn, ascending."""
    rewards: FloatVector
    """float32[K]: the game's reward for each turn."""
    finish: Literal["done", "turns", "length"] = "done"
    """Why the episode ended: the game said so, the turn limit, or the token limit."""
    greedy: bool = False
    """This episode is the greedy baseline of remax: it is not trained."""
    seed: int = Field(default=0, ge=0)
    """Seed of the game's random generator in this episode."""
    messages: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """The conversation as chat messages, for people to read."""
    info: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What the game said in `info` at its last step."""
    host: str = ""
    """The environment host that ran the game."""
    num_tries: int = Field(default=1, ge=1)
    """1 + the number of earlier tries of this episode that failed."""
    failures: list[Blame] = Field(default_factory=list[Blame])
    """Why the earlier tries failed."""
    generate_s: float = 0.0
    """Seconds spent waiting for the engine."""
    environment_s: float = 0.0
    """Seconds spent waiting for the environment."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        length = len(self.token_ids)
        for name in ("mask", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries, token_ids has {length}"
                )
        if len(self.turn_ends) != len(self.rewards) or not len(self.turn_ends):
            raise ValueError(
                f"turn_ends has {len(self.turn_ends)} entries and rewards {len(self.rewards)}: "
                "they must be equal and at least 1"
            )
        return self

    @property
    def reward(self) -> float:
        """The episode's return: the sum of its rewards."""
        return float(self.rewards.sum())

    @property
    def num_generated(self) -> int:
        """Number of tokens the policy generated."""
        return int(self.mask.sum())

    @property
    def min_version(self) -> int:
        """Oldest version that produced one of the generated tokens."""
        return int(self.versions[self.mask == 1].min())

    @property
    def max_version(self) -> int:
        """Newest version that produced one of the generated tokens."""
        return int(self.versions.max())


class Group(Message):
    """All trajectories of one task, on `rollout.<n>`; appended once, by whoever is first.

    A task that was given up has `error` set and no trajectories, so that the log holds the fate
    of every number.
    """

    task: Task
    """The task as it was issued."""
    trajectories: list[Trajectory] = Field(default_factory=list[Trajectory], max_length=4097)
    """One per episode; the greedy baseline, where asked for, stands last."""
    error: Blame | None = None
    """Why the task was given up."""
    source: str
    """The generator or external agent that appended it."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """What the engine did with the cache of running requests at a weight swap."""
    started: float = 0.0
    """Seconds since the epoch at which the first episode began."""
    finished: float = 0.0
    """Seconds since the epoch at which the last episode ended."""
    tokens_wasted: int = Field(default=0, ge=0)
    """Generated tokens of tries that failed and are not in `trajectories`."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.error is None) == (not self.trajectories):
            raise ValueError("a group has trajectories, or an error and none")
        greedy = [trajectory.greedy for trajectory in self.trajectories]
        expected = self.task.group_size
        if self.trajectories and greedy.count(False) != expected:
            raise ValueError(
                f"a group of task {self.task.task} has {expected} episodes, this has "
                f"{greedy.count(False)}"
            )
        if self.trajectories and any(greedy) != self.task.greedy_baseline:
            raise ValueError("the greedy baseline is missing or was not asked for")
        return self

    @property
    def sampled(self) -> list[Trajectory]:
        """The trajectories that are trained: all but the greedy baseline."""
        return [trajectory for trajectory in self.trajectories if not trajectory.greedy]

    @property
    def min_version(self) -> int:
        """Oldest version that produced one of the group's generated tokens."""
        return min(trajectory.min_version for trajectory in self.sampled)


def check_group(group: Group, *, vocab_size: int, max_tokens: int, version: int) -> None:
    """Check the elements of a group's arrays, which validation at the boundary leaves alone.

    Raises MessageError naming the first rule that is broken.
    """
    for trajectory in group.trajectories:
        length = len(trajectory.token_ids)
        if not 2 <= length <= max_tokens:
            raise MessageError(f"a trajectory has {length} tokens, allowed are 2 to {max_tokens}")
        if trajectory.mask[0]:
            raise MessageError("the first token must be part of a prompt (mask 0)")
        ends = trajectory.turn_ends
        if ends[0] < 0 or ends[-1] >= length or bool(np.any(np.diff(ends) <= 0)):
            raise MessageError("turn_ends must ascend within the sequence")
        if not trajectory.mask[ends].all() or trajectory.mask[ends[-1] + 1 :].any():
            raise MessageError("each turn ends on a generated token, and none comes after the last")
    ids, mask, logprobs, versions = (
        np.concatenate([getattr(trajectory, name) for trajectory in group.trajectories])
        for name in ("token_ids", "mask", "logprobs", "versions")
    )
    generated = mask == 1
    rewards = np.concatenate([trajectory.rewards for trajectory in group.trajectories])
    rules = {
        f"token_ids must be from 0 to {vocab_size - 1}": (ids >= 0) & (ids < vocab_size),
        "mask may hold 0 and 1 only": mask <= 1,
        "logprobs of generated tokens must be finite and at most 0": (
            np.isfinite(logprobs[generated]) & (logprobs[generated] <= 1e-3)
        ),
        f"versions of generated tokens must be from 0 to {version}": (
            (versions[generated] >= 0) & (versions[generated] <= version)
        ),
        "rewards must be finite": np.isfinite(rewards),
    }
    for rule, holds in rules.items():
        if not holds.all():
            raise MessageError(f"a group of task {group.task.task} is refused: {rule}")
