"""Samples: what is rewarded and weighed as one, the whole episode or each of its turns.

A turn as a sample has the conversation before it as its prompt. Every turn only appends to that
conversation, so the log-probs are those of the episode's one forward pass: only rewards,
advantages and all that is computed by sequence are taken by turn. Turns are compared with those
of the same number in the group's other episodes, so that long episodes do not weigh more. An
episode of several rows is one sample: its tokens follow each other, row by row.

Shape letters: N generated tokens, S sequences (episodes), M samples.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .calls import BatchCalls
from .sequences import is_last_of_sequence, reward_to_go, sum_by_sequence
from .training_batch import TrainingBatch


@dataclass(frozen=True)
class Samples:
    """The samples of one batch, in order."""

    sample_N: Tensor
    """int64: the sample of each generated token."""
    group_M: Tensor
    """int64: samples with an equal number are compared with each other."""
    num: int
    """Number of samples."""
    lone_M: Tensor | None = None
    """bool: what is compared with nothing though its group has more: a turn that no other episode
    reached, an episode all others of which are set apart."""


def renumber(sample_n: Tensor) -> tuple[Tensor, Tensor]:
    """Number the samples of some of the tokens from 0; also return their numbers in the batch."""
    numbers_M, local_n = _unique(sample_n)
    return local_n, numbers_M


def without_peers(samples: Samples, batch: TrainingBatch, apart_S: Tensor) -> Samples:
    """Compare the samples of some sequences (bool[S]) with no other, and no other with them."""
    seq_M = torch.zeros_like(samples.group_M).scatter(0, samples.sample_N, batch.seq_N)
    before_M = samples.group_M
    own_M = int(before_M.max()) + 1 + torch.arange(samples.num, device=before_M.device)
    group_M = torch.where(apart_S[seq_M], own_M, before_M)
    is_left_M = torch.bincount(group_M)[group_M] == 1
    lone_M = is_left_M & (torch.bincount(before_M)[before_M] > 1)
    if samples.lone_M is not None:
        lone_M |= samples.lone_M
    return replace(samples, group_M=group_M, lone_M=lone_M)


def episodes(batch: TrainingBatch) -> Samples:
    """Take each episode as one sample, however many rows it has."""
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
    """Add γ R_{t+1} to the last token of each turn, so that a turn sums up to R_t: float32[N]."""
    by_turn = turns(batch)
    rewards_M = sum_by_sequence(rewards_N.double(), by_turn.sample_N, by_turn.num)
    last_N = is_last_of_sequence(by_turn.sample_N)
    seq_M, turn_M = batch.seq_N[last_N], batch.turn_N[last_N]
    rewards_SP = rewards_M.new_zeros(batch.num_seqs, int(batch.turn_N.max()) + 1)
    rewards_SP[seq_M, turn_M] = rewards_M
    later_M = reward_to_go(rewards_SP, gamma)[seq_M, turn_M] - rewards_M
    returns_N = rewards_N.clone()
    returns_N[last_N] += later_M.to(rewards_N.dtype)
    return returns_N


def answered_states(batch: TrainingBatch) -> Tensor:
    """Number the observations that turns answer, equal ones alike: int64[N].

    The observation of the first turn is the prompt.
    """
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


def _unique(numbers_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers that occur, ascending, and the place of each among them."""
    numbers: Any = numbers_n  # torch leaves `unique` untyped
    return cast("tuple[Tensor, Tensor]", numbers.unique(return_inverse=True))
