"""Random groups of a task, as a generator would append them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tinkermq.schemas.rollout import Group, Trajectory, episodes_of
from tinkermq.schemas.task import Task


def make_trajectory(
    prompt: Sequence[int],
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    rewards: Sequence[float],
    *,
    logprobs: Sequence[float] | None = None,
    versions: int | Sequence[int] = 0,
    **fields: Any,
) -> Trajectory:
    """Lay out a prompt and turns of (generated tokens, observation tokens after them).

    `logprobs` and `versions` are those of the generated tokens, in order.
    """
    ids, mask, ends = list(prompt), [0] * len(prompt), []
    for generated, observed in turns:
        ids += generated
        mask += [1] * len(generated)
        ends.append(len(ids) - 1)
        ids += observed
        mask += [0] * len(observed)
    made = np.array(mask, dtype=np.uint8) == 1
    recorded = np.zeros(len(ids), dtype=np.float32)
    recorded[made] = -1.0 if logprobs is None else logprobs
    produced = np.full(len(ids), -1, dtype=np.int32)
    produced[made] = versions
    return Trajectory(
        token_ids=np.array(ids, dtype=np.int32),
        mask=made.astype(np.uint8),
        logprobs=recorded,
        versions=produced,
        turn_ends=np.array(ends, dtype=np.int32),
        rewards=np.array(rewards, dtype=np.float32),
        **fields,
    )


def make_group(trajectories: Sequence[Trajectory], number: int = 0, **fields: Any) -> Group:
    """Make the group of a task from its trajectories."""
    task = Task(
        task=number,
        index=fields.pop("index", number),
        seed=0,
        group_size=len(episodes_of(item for item in trajectories if not item.greedy)),
        greedy_baseline=any(item.greedy for item in trajectories),
        min_version=fields.pop("min_version", 0),
        reissue_of=fields.pop("reissue_of", None),
    )
    return Group(task=task, trajectories=list(trajectories), source="test", **fields)


def random_group(
    rng: np.random.Generator,
    number: int = 0,
    *,
    size: int = 4,
    turns: int = 2,
    longest: int = 5,
    version: int = 0,
    greedy: bool = False,
    vocab: int = 264,
) -> Group:
    """Make a group with one prompt, ragged turns, and rewards that differ by episode."""

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(8, vocab, int(rng.integers(low, high + 1))).tolist()

    prompt = tokens(3, 9)
    episodes: list[Trajectory] = []
    for place in range(size + greedy):
        num_turns = int(rng.integers(1, turns + 1))
        parts = [(tokens(1, longest), tokens(1, 4)) for _ in range(num_turns)]
        parts[-1] = (parts[-1][0], [])
        num_made = sum(len(generated) for generated, _ in parts)
        episodes.append(
            make_trajectory(
                prompt,
                parts,
                rng.integers(0, 3, num_turns).tolist(),
                logprobs=rng.uniform(-9, -2, num_made).tolist(),
                versions=rng.integers(max(0, version - 2), version + 1, num_made).tolist(),
                greedy=place == size,
            )
        )
    return make_group(episodes, number)
