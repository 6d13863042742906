"""From the groups of a batch to the flat arrays that advantages and losses work on.

Shape letters: N generated tokens, S sequences.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....schemas.rollout import Group, Trajectory, episodes_of, return_of
from ....schemas.teaching import Teaching
from ....schemas.wire.errors import DataError
from ....schemas.wire.images import images_of, shows_later
from ..packing.micro_batch import TokenSequence
from .calls import BatchCalls, calls_of


@dataclass(frozen=True)
class TrainingBatch:
    """One batch: its sequences in order, and what is known of their generated tokens."""

    sequences: list[TokenSequence]
    """Ids and mask of each sequence."""
    seq_N: Tensor
    """int64: the sequence of each generated token."""
    turn_N: Tensor
    """int64: its turn, from 0; those of an episode's further rows follow."""
    token_rewards_N: Tensor
    """float32: a turn's reward on the turn's last token, 0 elsewhere."""
    behaviour_N: Tensor
    """float32: log-prob recorded by the engine."""
    versions_N: Tensor
    """int64: version that produced the token."""
    episode_S: Tensor
    """int64: the episode that each sequence is a row of, ascending; mostly its only one."""
    rewards_S: Tensor
    """float32: return of each sequence's episode."""
    group_S: Tensor
    """int64: the sequences that are compared: those of one task, and of one role in it."""
    lengths_S: Tensor
    """int64: tokens after the first prompt, observations included."""
    truncated_S: Tensor
    """bool: a token limit ended a row of the episode or cut its last turn."""
    timed_out_S: Tensor
    """bool: a step of the episode took its game too long."""
    unfinished_S: Tensor
    """bool: a limit of turns or tokens ended the sequence, and its game would have gone on."""
    fresh_N: Tensor | None
    """bool: tokens that are trained; the others are too old, and count in rewards alone. None:
    all are trained."""
    teaching: list[Teaching | None]
    """What is for the teacher of each sequence, or came from it."""
    kinds: list[str]
    """What each sequence is of its episode: main, sub-agent and so on; empty: all of it."""
    sources: list[str]
    """Data source of each sequence's row; empty where it has none."""
    calls: BatchCalls | None
    """Where the turns stand in trees of calls; None: one after the other."""
    components_EC: Tensor | None
    """float64: rewards of each episode by component; None: it has none."""
    baseline_E: Tensor | None
    """float32, by episode: return of the greedy one of the task, where there is one."""

    def to(self, device: torch.device) -> "TrainingBatch":
        """Copy every tensor to a device."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved, calls=None if self.calls is None else self.calls.to(device))

    def fresh_of(self, values_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return places and values of the tokens that are not too old, as one part."""
        fresh_N = self.fresh_N
        if fresh_N is None:
            fresh_N = torch.ones_like(values_N, dtype=torch.bool)
        return [(fresh_N.nonzero().squeeze(1), values_N[fresh_N])]

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return len(self.seq_N)

    @property
    def num_seqs(self) -> int:
        """Sequences."""
        return len(self.sequences)


def assemble(
    groups: Sequence[Group], oldest: int = 0, components: Sequence[str] = ()
) -> TrainingBatch:
    """Lay the trajectories of the groups out flat, in order; greedy baselines are not trained.

    Nor are tokens of versions before `oldest`. `components` are names of numbers in `info`.
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
    prompts_S = at_N[np.searchsorted(seq_N, np.arange(len(trajectories)))] - first_S
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
        rewards_S=_tensor(np.add.reduceat(rewards_K, first_turn_E)[episode_S]),
        group_S=_tensor(_peers(members)),
        lengths_S=_tensor(lengths_S - prompts_S),
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


def _peers(members: Sequence[Sequence[Trajectory]]) -> NDArray[np.int64]:
    """Number the sets of trajectories that share task and role, in order."""
    numbers: dict[tuple[int, str], int] = {}
    keys = [(group, item.role) for group, found in enumerate(members) for item in found]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array)


def select(batch: TrainingBatch, keep_S: Tensor) -> tuple[list[TokenSequence], Tensor]:
    """Return the chosen sequences, and the places of their tokens in the whole batch."""
    chosen = cast(list[bool], keep_S.tolist())
    sequences = [item for item, keep in zip(batch.sequences, chosen, strict=True) if keep]
    return sequences, torch.nonzero(keep_S[batch.seq_N]).flatten()


def minibatches(batch: TrainingBatch, count: int) -> list[Tensor]:
    """Split the groups into contiguous minibatches; return which sequences each has: bool[S]."""
    groups = torch.arange(int(batch.group_S.max()) + 1, device=batch.group_S.device)
    parts = torch.tensor_split(groups, count)
    return [torch.isin(batch.group_S, part) for part in parts if len(part)]


def ends_of(batch: TrainingBatch, chosen_S: Tensor) -> TrainingBatch:
    """Return a batch whose only generated tokens stand behind the last ones of some sequences.

    What is predicted of them is seen from the sequence's end.
    """
    chosen = chosen_S.nonzero().squeeze(1)
    sequences = list(batch.sequences)
    for place in cast("list[int]", chosen.tolist()):
        one = sequences[place]
        end = int(np.flatnonzero(one.mask)[-1]) + 1
        ids = np.append(one.token_ids[:end], one.token_ids[end - 1])
        mask = np.zeros_like(ids)
        mask[-1] = 1
        sequences[place] = TokenSequence(ids, mask, one.images)
    return replace(batch, sequences=sequences, seq_N=chosen)


def components_of(rows: Sequence[Trajectory], names: Sequence[str]) -> list[float]:
    """Return the numbers that an episode's game told under these names at its end.

    Raises DataError for one that is no number.
    """
    told = rows[0].info
    for name in names:
        if not isinstance(told.get(name), int | float):
            raise DataError(
                f"algorithm.reward_components.{name}: the game told {told.get(name)!r:.40} under "
                "this name in `info` at an episode's end",
                hint=f"it must be a number; there are {', '.join(sorted(map(str, told)))[:200]}",
            )
    return [float(told[name]) for name in names]


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
