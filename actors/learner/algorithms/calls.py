"""Calls of agents' episodes in a batch: a tree in place of turns that follow each other.

A call has at most one that it led to, so what later calls earned reaches it on one way, a chain.
Chains of an episode end at its last call, or where nothing came of an answer: there the episode's
own reward stands, or, within a branch that is credited with its own, that of the branch.

Shape letters: N generated tokens, S sequences (rows), E episodes, K calls, B branches.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ....schemas.agent import CallPlaces
from ....schemas.rollout import Group, Trajectory
from .sequences import by_sequence, is_last_of_sequence, lengths_by_sequence, reward_to_go

_COLUMNS = (
    "next",
    "key",
    "episode",
    "group",
    "group_size",
    "observed",
    "rewards",
    "outcome",
)


@dataclass(frozen=True)
class BatchCalls:
    """The calls of one batch, in the order of its tokens, and its branches with rewards."""

    call_N: Tensor
    """int64: the call of each generated token."""
    next_K: Tensor
    """int64: the call that each led to, -1: none."""
    key_K: Tensor
    """int64: calls with equal numbers are compared: of one task, role and depth."""
    episode_K: Tensor
    """int64: the episode of each call."""
    group_K: Tensor
    """int64: its task."""
    group_size_K: Tensor
    """int64: episodes of its task."""
    observed_K: Tensor
    """int64: tokens before it that were new to the model."""
    rewards_K: Tensor
    """float64: what was posted for it."""
    outcome_K: Tensor
    """float64: its episode's own reward."""
    branch_K: Tensor
    """int64: the innermost branch with a reward that it is in, -1: none."""
    branch_reward_B: Tensor
    """float64: what was posted for the branch."""
    branch_key_B: Tensor
    """int64: branches with equal numbers are compared: of one task and role."""
    branch_episode_B: Tensor
    """int64: its episode."""

    @property
    def num(self) -> int:
        """Number of calls."""
        return len(self.next_K)

    def to(self, device: torch.device) -> "BatchCalls":
        """Copy every tensor to a device."""
        return BatchCalls(**{one.name: getattr(self, one.name).to(device) for one in fields(self)})

    def own_chains(self) -> "BatchCalls":
        """Return the same calls with chains that end where their branches do, with their rewards.

        What is in no branch ends where it leads into one, with the episode's reward.
        """
        goes_on_K = self.next_K >= 0
        goes_on_K &= self.branch_K[self.next_K] == self.branch_K
        outcome_K = self.outcome_K
        if len(self.branch_reward_B):
            outcome_K = torch.where(
                self.branch_K >= 0, self.branch_reward_B[self.branch_K], outcome_K
            )
        return replace(self, next_K=self.next_K.masked_fill(~goes_on_K, -1), outcome_K=outcome_K)

    def of_tokens(self, kept_N: Tensor) -> "BatchCalls":
        """Return the calls of some of the tokens; no chain may lead out of them."""
        old_k, call_n = _unique(self.call_N[kept_N])
        number_K = torch.full((self.num + 1,), -1, dtype=torch.int64, device=old_k.device)
        number_K[old_k] = torch.arange(len(old_k), device=old_k.device)
        names = [one.name for one in fields(self) if one.name.endswith("_K")]
        kept = {name: getattr(self, name)[old_k] for name in names}
        return replace(self, **{**kept, "call_N": call_n, "next_K": number_K[kept["next_K"]]})

    def token_rewards(self, further_N: Tensor) -> Tensor:
        """Return what each token earns: `further_N`, and at calls' ends what was posted there."""
        rewards_K = self.rewards_K + self.outcome_K.masked_fill(self.next_K >= 0, 0.0)
        last_N = is_last_of_sequence(self.call_N)
        rewards_N = further_N.double()
        rewards_N[last_N] += rewards_K[self.call_N[last_N]]
        return rewards_N

    def to_go(self, values_N: Tensor, gamma: float) -> Tensor:
        """G_t = x_t + γ G_{t+1} over the tokens of each chain: float64[N]."""
        values_KP, place_N = by_sequence(values_N.double(), self.call_N, self.num)
        lengths_K = lengths_by_sequence(self.call_N, self.num)
        first_K = reward_to_go(values_KP, gamma)[:, 0] if len(place_N) else values_N.double()
        first_K = self._over_chains(first_K, gamma ** lengths_K.double())
        last_N = is_last_of_sequence(self.call_N)
        next_K = self.next_K[self.call_N[last_N]]
        onward = torch.where(next_K >= 0, first_K[next_K], 0.0)
        values_N = values_N.double().clone()
        values_N[last_N] += gamma * onward
        values_KP, _ = by_sequence(values_N, self.call_N, self.num)
        return reward_to_go(values_KP, gamma)[self.call_N, place_N]

    def returns_by_call(self, rewards_N: Tensor, gamma: float) -> Tensor:
        """R_c = r_c + γ R of the call that it led to: float64[K]."""
        rewards_K = rewards_N.new_zeros(self.num, dtype=torch.float64)
        rewards_K = rewards_K.index_add(0, self.call_N, rewards_N.double())
        return self._over_chains(rewards_K, torch.full_like(rewards_K, gamma))

    def next_values(self, values_N: Tensor) -> Tensor:
        """Return the value after each token: before the next one of its chain, or 0."""
        first_N = torch.ones_like(self.call_N, dtype=torch.bool)
        first_N[1:] = self.call_N[1:] != self.call_N[:-1]
        values_K = values_N[first_N]
        last_N = is_last_of_sequence(self.call_N)
        after_N = torch.zeros_like(values_N)
        after_N[:-1] = values_N[1:]
        next_K = self.next_K[self.call_N[last_N]]
        after_N[last_N] = torch.where(next_K >= 0, values_K[next_K], 0.0)
        return after_N

    def _over_chains(self, values_K: Tensor, factor_K: Tensor) -> Tensor:
        """Add to each call, times its factor, what the one that it led to came to.

        A call leads to a later one, but its row may stand before.
        """
        values, factors = (cast("list[float]", one.tolist()) for one in (values_K, factor_K))
        nexts = cast("list[int]", self.next_K.tolist())
        for call in reversed(_in_order(nexts)):
            if nexts[call] >= 0:
                values[call] += factors[call] * values[nexts[call]]
        return torch.tensor(values, dtype=torch.float64, device=values_K.device)


def calls_of(groups: Sequence[Group], call_N: np.ndarray[Any, Any]) -> BatchCalls | None:
    """Return the calls of a batch, whose tokens' are given; None for episodes without."""
    rows = [item for group in groups for item in group.sampled]
    if all(item.calls is None for item in rows):
        return None
    made = _Collected()
    for task, group in enumerate(groups):
        for episode in group.episodes:
            made.add_episode(task, len(group.episodes), episode)
    return made.calls(call_N)


class _Collected:
    """Gathers what the rows of a batch say of their calls."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._branch_of: list[int] = []
        self._branches: list[tuple[float, int, int]] = []
        self._keys: dict[tuple[Any, ...], int] = {}
        self._num_episodes = 0

    def add_episode(self, task: int, num_episodes: int, rows: Sequence[Trajectory]) -> None:
        """Add the rows of one of a task's episodes."""
        first = len(self._branch_of)
        places = [item.calls or _in_a_row(item) for item in rows]
        numbers = [(row, int(n)) for row, one in enumerate(places) for n in one.numbers]
        # Rows that say nothing of their calls number them from 0 each.
        told = {n: first + at for at, (row, n) in enumerate(numbers) if rows[row].calls}
        branches = self._add_branches(task, places)
        at = first
        for item, one in zip(rows, places, strict=True):
            own = {int(n): at + place for place, n in enumerate(one.numbers)}
            known = told if item.calls else own
            at += len(own)
            self._columns["next"] += [known.get(int(n), -1) for n in one.nexts]
            self._columns["key"] += [
                self._key(task, role, int(depth))
                for role, depth in zip(one.roles, one.depths, strict=True)
            ]
            self._columns["observed"] += one.observed.tolist()
            self._columns["rewards"] += one.rewards.tolist()
            self._branch_of += [branches.get(int(n), -1) for n in one.branches]
        num = at - first
        self._columns["episode"] += [self._num_episodes] * num
        self._columns["group"] += [task] * num
        self._columns["group_size"] += [num_episodes] * num
        self._columns["outcome"] += [sum(one.outcome for one in places)] * num
        self._num_episodes += 1

    def _add_branches(self, task: int, places: Sequence[CallPlaces]) -> dict[int, int]:
        found: dict[int, int] = {}
        for branch in (branch for one in places for branch in one.rewarded):
            found[branch.call] = len(self._branches)
            key = self._key(task, branch.role)
            self._branches.append((branch.reward, key, self._num_episodes))
        return found

    def _key(self, *parts: Any) -> int:
        return self._keys.setdefault(parts, len(self._keys))

    def calls(self, call_N: np.ndarray[Any, Any]) -> BatchCalls:
        """Return all that was added."""
        rewards, keys, episodes = zip(*self._branches, strict=True) if self._branches else [()] * 3
        columns = {f"{name}_K": _numbers(values) for name, values in self._columns.items()}
        return BatchCalls(
            call_N=torch.from_numpy(call_N).long(),
            **{
                **columns,
                "rewards_K": columns["rewards_K"].double(),
                "outcome_K": columns["outcome_K"].double(),
            },
            branch_K=_numbers(self._branch_of),
            branch_reward_B=torch.tensor(rewards, dtype=torch.float64),
            branch_key_B=_numbers(keys),
            branch_episode_B=_numbers(episodes),
        )


def _in_a_row(item: Trajectory) -> CallPlaces:
    """Return the places of a row that says nothing of its calls: one after the other."""
    num = len(item.turn_ends)
    turns = np.arange(num, dtype=np.int32)
    mask = np.concatenate([item.mask, [0]])
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    befores = np.concatenate([[0], item.turn_ends[:-1] + 1])
    firsts = starts[np.searchsorted(starts, befores)] if len(starts) else befores
    return CallPlaces(
        numbers=turns,
        nexts=np.append(turns[1:], -1).astype(np.int32),
        depths=turns,
        observed=(firsts - befores).astype(np.int32),
        rewards=item.rewards,
        branches=np.full(num, -1, np.int32),
        roles=[item.kind] * num,
    )


def _in_order(nexts: Sequence[int]) -> list[int]:
    """Order calls so that each stands before the one that it led to."""
    waiting = [0] * len(nexts)
    for to in nexts:
        if to >= 0:
            waiting[to] += 1
    order = [call for call, num in enumerate(waiting) if not num]
    for call in order:  # it grows meanwhile
        to = nexts[call]
        if to >= 0:
            waiting[to] -= 1
            if not waiting[to]:
                order.append(to)
    return order


def _numbers(values: Sequence[Any]) -> Tensor:
    is_float = any(isinstance(value, float) for value in values)
    return torch.tensor(list(values), dtype=torch.float64 if is_float else torch.int64)


def _unique(numbers_n: Tensor) -> tuple[Tensor, Tensor]:
    numbers: Any = numbers_n  # torch leaves `unique` untyped
    return cast("tuple[Tensor, Tensor]", numbers.unique(return_inverse=True))
