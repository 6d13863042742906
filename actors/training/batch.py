"""Convert the groups of a batch to the flat arrays that advantages and losses use.

The calls of an agent's episode form a tree; the turns of a game follow each other. Each call leads
to at most one other call, so rewards of later calls reach it along one path, a chain. Chains end at
the episode's last call, or at an unused answer. The last call of a chain has the episode's own
reward, or, in a branch with a reward of its own, the branch's reward.

A sample is the unit of rewards and weights: the whole episode, or each of its turns. The prompt of
a turn is the conversation before it. Every turn only appends to that conversation, so the log-probs
come from the episode's one forward pass; only rewards, advantages and sums by sequence are taken by
turn. Turns are compared with those of the same number in the group's other episodes, so that long
episodes do not weigh more. An episode of several rows is one sample: its tokens follow each other,
row by row.

Shape letters: N generated tokens, S sequences (rows), E episodes, K calls, B branches, M samples.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...envs.evaluation import number_of
from ...schemas.agent import CallPlaces
from ...schemas.rollout import Group, Teaching, Trajectory, episodes_of, return_of
from ...schemas.wire.errors import DataError
from ...schemas.wire.images import images_of, shows_later
from ..policy.vision import ImageReader
from .micro_batch import TokenSequence
from .sequences import (
    by_sequence,
    is_last_of_sequence,
    lengths_by_sequence,
    reward_to_go,
    sum_by_sequence,
)

_LARGEST = float(np.finfo(np.float32).max)

# -- calls of agents -------------------------------------------------------------------------------

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
    """The calls of one batch, in the order of its tokens, and the branches with rewards."""

    call_N: Tensor
    """int64: the call of each generated token."""
    next_K: Tensor
    """int64: the call that each call led to; -1: none."""
    key_K: Tensor
    """int64: key of each call; calls of one task, role and depth have equal keys and are
    compared."""
    episode_K: Tensor
    """int64: the episode of each call."""
    group_K: Tensor
    """int64: the task of each call."""
    group_size_K: Tensor
    """int64: number of episodes of its task."""
    observed_K: Tensor
    """int64: tokens before the call that were new to the model."""
    rewards_K: Tensor
    """float64: the reward posted for the call."""
    outcome_K: Tensor
    """float64: the reward of its episode."""
    branch_K: Tensor
    """int64: the innermost branch with a reward that contains the call; -1: none."""
    branch_reward_B: Tensor
    """float64: the reward posted for the branch."""
    branch_key_B: Tensor
    """int64: key of each branch; branches of one task and role have equal keys and are compared."""
    branch_episode_B: Tensor
    """int64: the episode of the branch."""

    @property
    def num(self) -> int:
        """Number of calls."""
        return len(self.next_K)

    def to(self, device: torch.device) -> "BatchCalls":
        """Copy every tensor to a device."""
        return BatchCalls(
            **{field.name: getattr(self, field.name).to(device) for field in fields(self)}
        )

    def own_chains(self) -> "BatchCalls":
        """Return the calls with chains that end with their branches, with the branches' rewards.

        A chain outside of branches ends where it leads into a branch, with the episode's reward.
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
        names = [field.name for field in fields(self) if field.name.endswith("_K")]
        columns = {name: getattr(self, name)[old_k] for name in names}
        return replace(self, **{**columns, "call_N": call_n, "next_K": number_K[columns["next_K"]]})

    def of_episodes(self, number_E: Tensor) -> "BatchCalls":
        """Renumber the episodes, whose calls are all here, and drop the others' branches (−1)."""
        stays_B = number_E[self.branch_episode_B] >= 0
        number_B = torch.where(stays_B, torch.cumsum(stays_B, 0) - 1, -1)
        inside_K = self.branch_K >= 0
        branch_K = self.branch_K.clone()
        branch_K[inside_K] = number_B[self.branch_K[inside_K]]
        branches = {
            name: getattr(self, name)[stays_B]
            for name in ("branch_reward_B", "branch_key_B", "branch_episode_B")
        }
        branches["branch_episode_B"] = number_E[branches["branch_episode_B"]]
        own = {"branch_K": branch_K, "episode_K": number_E[self.episode_K]}
        return replace(self, **own, **branches)

    def token_rewards(self, further_N: Tensor) -> Tensor:
        """Return the reward of each token: `further_N`, plus posted rewards at ends of calls."""
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
        """R_c = r_c + γ R of the next call: float64[K]."""
        rewards_K = rewards_N.new_zeros(self.num, dtype=torch.float64)
        rewards_K = rewards_K.index_add(0, self.call_N, rewards_N.double())
        return self._over_chains(rewards_K, torch.full_like(rewards_K, gamma))

    def next_values(self, values_N: Tensor) -> Tensor:
        """Return the value after each token: the value before the chain's next token, or 0."""
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
        """Add to each call its factor times the result of the next call.

        The next call is later in time, but its row may come first.
        """
        values, factors = (cast("list[float]", array.tolist()) for array in (values_K, factor_K))
        nexts = cast("list[int]", self.next_K.tolist())
        for call in reversed(_in_order(nexts)):
            if nexts[call] >= 0:
                values[call] += factors[call] * values[nexts[call]]
        return torch.tensor(values, dtype=torch.float64, device=values_K.device)


def calls_of(groups: Sequence[Group], call_N: np.ndarray[Any, Any]) -> BatchCalls | None:
    """Return the calls of a batch, None without calls; `call_N` is the call of each token."""
    rows = [item for group in groups for item in group.sampled]
    if all(item.calls is None for item in rows):
        return None
    made = _Collected()
    for task, group in enumerate(groups):
        for episode in group.episodes:
            made.add_episode(task, len(group.episodes), episode)
    return made.calls(call_N)


class _Collected:
    """Collects the calls of the rows of a batch."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._branch_of: list[int] = []
        self._branches: list[tuple[float, int, int]] = []
        self._keys: dict[tuple[Any, ...], int] = {}
        self._num_episodes = 0

    def add_episode(self, task: int, num_episodes: int, rows: Sequence[Trajectory]) -> None:
        """Add the rows of one episode."""
        first = len(self._branch_of)
        places = [item.calls or _in_a_row(item) for item in rows]
        numbers = [
            (row, int(n)) for row, row_places in enumerate(places) for n in row_places.numbers
        ]
        # Rows without recorded calls number them from 0 each.
        call_places = {n: first + at for at, (row, n) in enumerate(numbers) if rows[row].calls}
        branches = self._add_branches(task, places)
        at = first
        for item, row_places in zip(rows, places, strict=True):
            own = {int(n): at + place for place, n in enumerate(row_places.numbers)}
            known = call_places if item.calls else own
            at += len(own)
            self._columns["next"] += [known.get(int(n), -1) for n in row_places.nexts]
            self._columns["key"] += [
                self._key(task, role, int(depth))
                for role, depth in zip(row_places.roles, row_places.depths, strict=True)
            ]
            self._columns["observed"] += row_places.observed.tolist()
            self._columns["rewards"] += row_places.rewards.tolist()
            self._branch_of += [branches.get(int(n), -1) for n in row_places.branches]
        num = at - first
        self._columns["episode"] += [self._num_episodes] * num
        self._columns["group"] += [task] * num
        self._columns["group_size"] += [num_episodes] * num
        self._columns["outcome"] += [sum(row_places.outcome for row_places in places)] * num
        self._num_episodes += 1

    def _add_branches(self, task: int, places: Sequence[CallPlaces]) -> dict[int, int]:
        branch_of_call: dict[int, int] = {}
        for branch in (branch for place in places for branch in place.rewarded):
            branch_of_call[branch.call] = len(self._branches)
            key = self._key(task, branch.role)
            self._branches.append((branch.reward, key, self._num_episodes))
        return branch_of_call

    def _key(self, *parts: Any) -> int:
        return self._keys.setdefault(parts, len(self._keys))

    def calls(self, call_N: np.ndarray[Any, Any]) -> BatchCalls:
        """Return all added calls."""
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
    """Return the places of a row without recorded calls, one after the other."""
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
    """Order calls so that each comes before the call that it led to."""
    waiting = [0] * len(nexts)
    for to in nexts:
        if to >= 0:
            waiting[to] += 1
    order = [call for call, num in enumerate(waiting) if not num]
    for call in order:  # the list grows during iteration
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


@dataclass(frozen=True)
class TrainingBatch:
    """One batch: its sequences in order, and the arrays of its generated tokens."""

    sequences: list[TokenSequence]
    """Ids and mask of each sequence."""
    seq_N: Tensor
    """int64: the sequence of each generated token."""
    turn_N: Tensor
    """int64: its turn, from 0; the turns of an episode's further rows are numbered on."""
    token_rewards_N: Tensor
    """float32: a turn's reward on the turn's last token, 0 elsewhere."""
    behaviour_N: Tensor
    """float32: log-prob recorded by the engine."""
    versions_N: Tensor
    """int64: version that produced the token."""
    episode_S: Tensor
    """int64: the episode of each sequence (row), ascending; most episodes have one sequence."""
    rewards_S: Tensor
    """float32: return of each sequence's episode."""
    group_S: Tensor
    """int64: the group of each sequence; sequences of one task and role are compared."""
    truncated_S: Tensor
    """bool: a token limit ended a row of the episode or truncated its last turn."""
    timed_out_S: Tensor
    """bool: a step of the episode exceeded the time limit of its game."""
    unfinished_S: Tensor
    """bool: a limit of turns or tokens ended the sequence before the end of its game."""
    fresh_N: Tensor | None
    """bool: trained tokens; the other tokens are too old, and count in rewards only. None: all
    tokens are trained."""
    teaching: list[Teaching | None]
    """Inputs for the teacher of each sequence, or its scores."""
    kinds: list[str]
    """Kind of each sequence within its episode: main, sub-agent and so on; empty: the whole
    episode."""
    sources: list[str]
    """Data source of each sequence's row; empty if it has none."""
    calls: BatchCalls | None
    """Places of the turns in trees of calls; None: turns follow each other."""
    components_EC: Tensor | None
    """float64: rewards of each episode by component; None: no components."""
    baseline_E: Tensor | None
    """float32, by episode: return of the task's greedy episode, if there is one."""

    def to(self, device: torch.device) -> "TrainingBatch":
        """Copy every tensor to a device."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved, calls=None if self.calls is None else self.calls.to(device))

    def of_sequences(self, chosen_S: Tensor) -> "TrainingBatch":
        """Return the batch of some whole episodes, with their sequences in order (bool[S])."""
        chosen_N = chosen_S[self.seq_N]
        chosen = cast("list[bool]", chosen_S.tolist())
        episode_s = self.episode_S[chosen_S]
        episodes_E, local_s = _unique(episode_s)
        numbers_S = torch.cumsum(chosen_S, 0) - 1
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        part = {
            name: value[chosen_N] if name.endswith("_N") else value[chosen_S]
            for name, value in named.items()
            if name.endswith(("_N", "_S")) and value is not None
        }
        lists = {
            name: [item for item, keep in zip(named[name], chosen, strict=True) if keep]
            for name in ("sequences", "teaching", "kinds", "sources")
        }
        part |= {"seq_N": numbers_S[part["seq_N"]], "episode_S": local_s}
        part |= {
            name: named[name][episodes_E]
            for name in ("components_EC", "baseline_E")
            if named[name] is not None
        }
        calls = None if self.calls is None else self.calls.of_tokens(chosen_N)
        if calls is not None:
            number_E = torch.full_like(episodes_E.new_empty(int(self.episode_S.max()) + 1), -1)
            number_E[episodes_E] = torch.arange(len(episodes_E), device=episodes_E.device)
            calls = calls.of_episodes(number_E)
        return replace(self, **part, **lists, calls=calls)

    def fresh_of(self, values_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return places and values of the tokens that are not too old, as one part of the batch."""
        fresh_N = self.fresh_N
        if fresh_N is None:
            fresh_N = torch.ones_like(values_N, dtype=torch.bool)
        return [(fresh_N.nonzero().squeeze(1), values_N[fresh_N])]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.seq_N)

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return len(self.sequences)


def assemble(
    groups: Sequence[Group], oldest: int = 0, components: Sequence[str] = ()
) -> TrainingBatch:
    """Concatenate the trajectories of the groups in order; greedy baselines are not trained.

    Tokens of versions before `oldest` are not trained either. `components` are names of numbers in
    `info`.
    """
    members = [group.sampled for group in groups]
    trajectories = [trajectory for group in members for trajectory in group]
    rows_E = np.array([len(rows) for group in groups for rows in group.episodes])
    episode_S = np.repeat(np.arange(len(rows_E)), rows_E)
    first_E = np.cumsum(rows_E) - rows_E
    lengths_S = np.array([len(item.mask) for item in trajectories])
    first_S = np.cumsum(lengths_S) - lengths_S
    turns_S = np.array([len(item.turn_ends) for item in trajectories])
    at_N = np.flatnonzero(np.concatenate([item.mask for item in trajectories]) == 1)
    seq_N = np.repeat(np.arange(len(trajectories)), lengths_S)[at_N]
    # The last token of every turn, as a place in the whole batch: ascending, like `at_N`.
    ends_K = np.concatenate([item.turn_ends for item in trajectories]) + np.repeat(first_S, turns_S)
    rewards_K = np.concatenate([item.rewards for item in trajectories])
    rewards_N = np.zeros(len(at_N), dtype=np.float32)
    rewards_N[np.searchsorted(at_N, ends_K)] = rewards_K
    first_turn_S = np.cumsum(turns_S) - turns_S
    first_turn_E = first_turn_S[first_E]
    cut_S = np.array([item.ended_by == "length" for item in trajectories])
    hung_S = np.array([item.finish == "timeout" for item in trajectories])
    limited_S = np.array([item.finish in ("turns", "length") for item in trajectories])
    versions_N = np.concatenate([item.versions for item in trajectories])[at_N]
    fresh_N = versions_N >= oldest
    turns_N = np.searchsorted(ends_K, at_N)
    return TrainingBatch(
        sequences=[
            TokenSequence(
                item.token_ids,
                item.mask,
                images_of(item.messages, group.images),
                experts=item.experts,
                branches=item.episode >= 0 or bool(item.kind) or shows_later(item.messages),
            )
            for group in groups
            for item in group.sampled
        ],
        seq_N=_tensor(seq_N),
        turn_N=_tensor(turns_N - first_turn_E[episode_S[seq_N]]),
        token_rewards_N=_tensor(rewards_N),
        behaviour_N=_tensor(np.concatenate([item.logprobs for item in trajectories])[at_N]),
        versions_N=_tensor(versions_N).long(),
        episode_S=_tensor(episode_S),
        rewards_S=_tensor(_sums(rewards_K, first_turn_E)[episode_S]),
        group_S=_tensor(_peers(members)),
        truncated_S=_tensor(np.logical_or.reduceat(cut_S, first_E)[episode_S]),
        timed_out_S=_tensor(np.logical_or.reduceat(hung_S, first_E)[episode_S]),
        unfinished_S=_tensor(limited_S),
        fresh_N=None if fresh_N.all() else _tensor(fresh_N),
        teaching=[item.teaching for item in trajectories],
        kinds=[item.kind for item in trajectories],
        sources=[item.data_source for item in trajectories],
        calls=calls_of(groups, turns_N),
        components_EC=_components(groups, components),
        baseline_E=_baselines(groups),
    )


def _sums(rewards_K: NDArray[np.float32], first_E: NDArray[np.int64]) -> NDArray[np.float32]:
    """Add up the rewards of each episode; episodes begin at these places."""
    return np.add.reduceat(rewards_K.astype(np.float64), first_E).astype(np.float32)


def _peers(members: Sequence[Sequence[Trajectory]]) -> NDArray[np.int64]:
    """Number the sets of trajectories with equal task and role, in order."""
    numbers: dict[tuple[int, str], int] = {}
    keys = [(group, item.role) for group, items in enumerate(members) for item in items]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array)


def select(batch: TrainingBatch, keep_S: Tensor) -> tuple[list[TokenSequence], Tensor]:
    """Return the chosen sequences, and the indices of their tokens in the whole batch."""
    chosen = cast(list[bool], keep_S.tolist())
    sequences = [item for item, keep in zip(batch.sequences, chosen, strict=True) if keep]
    return sequences, torch.nonzero(keep_S[batch.seq_N]).flatten()


def minibatches(batch: TrainingBatch, count: int) -> list[Tensor]:
    """Split the groups into contiguous minibatches; return the sequences of each: bool[S]."""
    groups = torch.arange(int(batch.group_S.max()) + 1, device=batch.group_S.device)
    parts = torch.tensor_split(groups, count)
    return [torch.isin(batch.group_S, part) for part in parts if len(part)]


def ends_of(batch: TrainingBatch, chosen_S: Tensor) -> TrainingBatch:
    """Return a batch with one generated token each, after the last token of some sequences.

    They are predicted at the sequence's end.
    """
    chosen = chosen_S.nonzero().squeeze(1)
    sequences = list(batch.sequences)
    for place in cast("list[int]", chosen.tolist()):
        sequence = sequences[place]
        end = int(np.flatnonzero(sequence.mask)[-1]) + 1
        ids = np.append(sequence.token_ids[:end], sequence.token_ids[end - 1])
        mask = np.zeros_like(ids)
        mask[-1] = 1
        sequences[place] = TokenSequence(ids, mask, sequence.images)
    return replace(batch, sequences=sequences, seq_N=chosen)


def components_of(rows: Sequence[Trajectory], names: Sequence[str]) -> list[float]:
    """Return the numbers with these names from `info` at an episode's end.

    Raises DataError for a value that is not a number in the range of float32.
    """
    info = rows[0].info
    numbers: list[float] = []
    for name in names:
        number = number_of(info.get(name))
        if number is None or not abs(number) <= _LARGEST:
            raise DataError(
                f"algorithm.reward_components.{name}: the game's `info` has {info.get(name)!r:.40} "
                "under this name at an episode's end",
                hint="it must be a finite number; the names in `info` are "
                f"{', '.join(sorted(map(str, info)))[:200]}",
            )
        numbers.append(float(number))
    return numbers


def _components(groups: Sequence[Group], names: Sequence[str]) -> Tensor | None:
    if not names:
        return None
    episodes = [rows for group in groups for rows in group.episodes]
    return torch.tensor([components_of(rows, names) for rows in episodes], dtype=torch.float64)


def _baselines(groups: Sequence[Group]) -> Tensor | None:
    greedy = [[item for item in group.trajectories if item.greedy] for group in groups]
    if not all(greedy):
        return None
    counts = torch.tensor([len(group.episodes) for group in groups])
    returns = [return_of(episodes_of(rows)[0]) for rows in greedy]
    return torch.tensor(returns).repeat_interleave(counts)


# -- groups that the model can read ----------------------------------------------------------------


def check_readable(
    group: Group, model: nn.Module, image_reader: ImageReader | None, components: Sequence[str]
) -> None:
    """Raise DataError for a group that the model cannot read.

    The reward's `components` must be in `info`. Images must be in the prompts, except for a model
    that reads text only.
    """
    for rows in group.episodes:
        components_of(rows, components)
    if image_reader is None:
        return
    for item in group.sampled:
        _check_images(item, group, model, image_reader)


def _check_images(item: Trajectory, group: Group, model: nn.Module, reader: ImageReader) -> None:
    images = images_of(item.messages, group.images)
    prompt = item.token_ids[: int(item.mask.argmax())]
    if images:
        # Images of a tool's result come after the first answer, as do some images of a
        # conversation.
        is_later = item.kind or shows_later(item.messages)
        until = int(item.turn_ends[-1]) if is_later else len(prompt)
        seen = reader.read_images(model, item.token_ids[:until], images)
        if item.mask[seen.places_Q].any():
            raise DataError(
                "the policy generated an image's token before the last image",
                hint="image tokens may only be in the policy's inputs",
            )
    elif (prompt == reader.token_id).any():
        raise DataError(
            "a prompt holds image tokens, its messages no images",
            hint="the messages of a trajectory must hold what the policy saw",
        )


# -- samples ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """The samples of one batch, in order."""

    sample_N: Tensor
    """int64: the sample of each generated token."""
    group_M: Tensor
    """int64: group of each sample; samples of one group are compared with each other."""
    num: int
    """Number of samples."""
    lone_M: Tensor | None = None
    """bool: turns that no other episode of a group of several reached."""

    @property
    def lengths_M(self) -> Tensor:
        """Number of tokens that the policy generated in each sample: int64[M]."""
        return lengths_by_sequence(self.sample_N, self.num)


def renumber(sample_n: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber the samples of some tokens from 0; also return their numbers in the batch."""
    numbers_M, local_n = _unique(sample_n)
    return local_n, numbers_M


def episodes(batch: TrainingBatch) -> Samples:
    """Take each episode as one sample, whatever its number of rows."""
    episode_S = batch.episode_S
    begins_S = torch.diff(episode_S, prepend=episode_S[:1] - 1) > 0
    group_E = batch.group_S[begins_S]
    return Samples(episode_S[batch.seq_N], group_E, len(group_E))


def turns(batch: TrainingBatch) -> Samples:
    """Take each turn as one sample."""
    num_turns = int(batch.turn_N.max()) + 1
    place_M, sample_N = _unique(batch.seq_N * num_turns + batch.turn_N)
    seq_M = place_M // num_turns
    group_M = batch.group_S[seq_M] * num_turns + place_M % num_turns
    has_peers_M = torch.bincount(batch.group_S)[batch.group_S[seq_M]] > 1
    lone_M = (torch.bincount(group_M)[group_M] == 1) & has_peers_M
    return Samples(sample_N, group_M, len(place_M), lone_M)


def returns_by_turn(batch: TrainingBatch, rewards_N: Tensor, gamma: float) -> Tensor:
    """Add γ R_{t+1} to the last token of each turn, so that each turn's sum is R_t: float64[N]."""
    by_turn = turns(batch)
    rewards_M = sum_by_sequence(rewards_N.double(), by_turn.sample_N, by_turn.num)
    last_N = is_last_of_sequence(by_turn.sample_N)
    seq_M, turn_M = batch.seq_N[last_N], batch.turn_N[last_N]
    rewards_SP = rewards_M.new_zeros(batch.num_seqs, int(batch.turn_N.max()) + 1)
    rewards_SP[seq_M, turn_M] = rewards_M
    later_M = reward_to_go(rewards_SP, gamma)[seq_M, turn_M] - rewards_M
    returns_N = rewards_N.double().clone()
    returns_N[last_N] += later_M
    return returns_N


def answered_states(batch: TrainingBatch) -> Tensor:
    """Number the observations that turns answer; equal observations get one number: int64[N]."""
    known: dict[bytes, int] = {}
    if batch.calls is not None:
        return _observed_by_calls(batch, batch.calls, known)
    states: list[NDArray[np.int64]] = []
    turn_N: NDArray[np.int64] = batch.turn_N.cpu().numpy()
    ends = np.cumsum([int(item.mask.sum()) for item in batch.sequences])
    for sequence, turn_n in zip(batch.sequences, np.split(turn_N, ends[:-1]), strict=True):
        at = np.flatnonzero(sequence.mask)
        firsts = np.flatnonzero(np.diff(turn_n, prepend=-1))
        begins = np.concatenate([[0], at[firsts[1:] - 1] + 1])
        state_of_turn = [
            known.setdefault(sequence.token_ids[begin:end].tobytes(), len(known))
            for begin, end in zip(begins, at[firsts], strict=True)
        ]
        states.append(np.array(state_of_turn)[turn_n - turn_n[0]])
    return torch.from_numpy(np.concatenate(states)).to(batch.turn_N.device)


def _observed_by_calls(batch: TrainingBatch, calls: BatchCalls, known: dict[bytes, int]) -> Tensor:
    observed_K: NDArray[np.int64] = calls.observed_K.cpu().numpy()
    call_N: NDArray[np.int64] = calls.call_N.cpu().numpy()
    ends = np.cumsum([int(item.mask.sum()) for item in batch.sequences])
    states = np.zeros(len(call_N), np.int64)
    for sequence, end in zip(batch.sequences, ends, strict=True):
        at = np.flatnonzero(sequence.mask)
        call_n = call_N[end - len(at) : end]
        for first in np.flatnonzero(np.diff(call_n, prepend=-1)):
            seen = sequence.token_ids[at[first] - observed_K[call_n[first]] : at[first]]
            state = known.setdefault(seen.tobytes(), len(known))
            states[end - len(at) : end][call_n == call_n[first]] = state
    return torch.from_numpy(states).to(batch.turn_N.device)
