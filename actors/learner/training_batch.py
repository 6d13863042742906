"""From the groups of a batch to the flat arrays that advantages and losses work on.

Shape letters: N generated tokens, S sequences.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...schemas.rollout import Group, Trajectory
from .packing import TokenSequence


@dataclass(frozen=True)
class TrainingBatch:
    """One batch: its sequences in order, and what is known of their generated tokens."""

    sequences: list[TokenSequence]
    """Ids and mask of each sequence."""
    seq_N: Tensor
    """int64: the sequence of each generated token."""
    turn_N: Tensor
    """int64: its turn, from 0."""
    token_rewards_N: Tensor
    """float32: a turn's reward on the turn's last token, 0 elsewhere."""
    behaviour_N: Tensor
    """float32: log-prob recorded by the engine."""
    versions_N: Tensor
    """int64: version that produced the token."""
    rewards_S: Tensor
    """float32: return of each episode."""
    group_S: Tensor
    """int64: the task group of each sequence."""
    lengths_S: Tensor
    """int64: tokens after the first prompt, observations included."""
    baseline_S: Tensor | None
    """float32: return of the greedy episode of the task, where there is one."""

    def to(self, device: torch.device) -> "TrainingBatch":
        """Copy every tensor to a device."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return len(self.seq_N)

    @property
    def num_seqs(self) -> int:
        """Sequences."""
        return len(self.sequences)


def assemble(groups: Sequence[Group]) -> TrainingBatch:
    """Lay the trajectories of the groups out flat, in order; greedy baselines are not trained."""
    members = [group.sampled for group in groups]
    trajectories = [trajectory for group in members for trajectory in group]
    masks = [trajectory.mask == 1 for trajectory in trajectories]
    counts = np.array([int(mask.sum()) for mask in masks])
    first_N = np.concatenate([[0], np.cumsum(counts)])
    turns = [_turns(trajectory, mask) for trajectory, mask in zip(trajectories, masks, strict=True)]
    rewards_N = np.zeros(int(counts.sum()), dtype=np.float32)
    for start, mask, trajectory in zip(first_N, masks, trajectories, strict=False):
        at_end = np.cumsum(mask)[trajectory.turn_ends] - 1
        rewards_N[start + at_end] = trajectory.rewards
    return TrainingBatch(
        sequences=[TokenSequence(item.token_ids, item.mask) for item in trajectories],
        seq_N=torch.from_numpy(np.repeat(np.arange(len(trajectories)), counts)),
        turn_N=torch.from_numpy(np.concatenate(turns)),
        token_rewards_N=torch.from_numpy(rewards_N),
        behaviour_N=_concat([t.logprobs[m] for t, m in zip(trajectories, masks, strict=True)]),
        versions_N=_concat(
            [t.versions[m] for t, m in zip(trajectories, masks, strict=True)]
        ).long(),
        rewards_S=torch.tensor([item.reward for item in trajectories], dtype=torch.float32),
        group_S=torch.from_numpy(np.repeat(np.arange(len(groups)), [len(m) for m in members])),
        lengths_S=torch.tensor([len(m) - int(np.argmax(m)) for m in masks], dtype=torch.int64),
        baseline_S=_baselines(groups),
    )


def select(batch: TrainingBatch, keep_S: Tensor) -> tuple[list[TokenSequence], Tensor]:
    """Return the chosen sequences, and the places of their tokens in the whole batch."""
    chosen: list[int] = torch.nonzero(keep_S).flatten().tolist()
    return [batch.sequences[index] for index in chosen], torch.nonzero(
        keep_S[batch.seq_N]
    ).flatten()


def _turns(trajectory: Trajectory, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number the turn of each generated token: a turn ends where `turn_ends` says."""
    return np.searchsorted(trajectory.turn_ends, np.flatnonzero(mask), side="left")


def _concat(parts: list[NDArray[Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _baselines(groups: Sequence[Group]) -> Tensor | None:
    greedy = [[item.reward for item in group.trajectories if item.greedy] for group in groups]
    if not all(greedy):
        return None
    counts = torch.tensor([len(group.sampled) for group in groups])
    return torch.tensor([rewards[0] for rewards in greedy]).repeat_interleave(counts)
