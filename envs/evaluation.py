"""What an evaluation is made of: seeds, successes, scores with their uncertainty, comparisons.

Pure functions over episodes that have been played. Several episodes of one task are no independent
evidence: means and intervals are over tasks.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Z95 = 1.959964
_RESAMPLES = 2000
_DRAWS_AT_ONCE = 1 << 18
_OUTCOME = re.compile("[a-z_]{1,32}")
_TYPE_KEYS = ("type", "task_type")
_MAX_NAME = 200
"""Characters of a type, or of a name in `info` that becomes a metric."""
_MAX_NAMES = 1000
"""Names in `info` that become metrics."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What counts of one episode."""

    task: int
    """Row of the data, or seed of a generated game."""
    sample: int
    """Number of the episode within the task."""
    reward: float
    """Return of the episode."""
    success: bool
    """Whether it counts as solved."""
    kind: str = ""
    """Type of the task; empty where tasks are all alike."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % confidence interval; the bounds are NaN for fewer than two tasks."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two versions on the same tasks, B minus A."""

    num_tasks: int
    """Tasks that both have played."""
    reward: Interval
    """Difference of the mean rewards."""
    accuracy: Interval
    """Difference of the shares of solved episodes."""
    better: int
    """Tasks on which B's mean reward is higher."""
    worse: int
    """Tasks on which it is lower."""


def task_seed(seed: int, task: int) -> int:
    """Return the seed of an evaluation's task, from the job's seed and the task's number."""
    return int(np.random.SeedSequence([seed, 1, task]).generate_state(1)[0])


def is_success(reward: float, info: Mapping[str, Any], above: float) -> bool:
    """Whether an episode is solved: what the game says in `info["success"]`, else its return."""
    success = info.get("success")
    return success if isinstance(success, bool) else reward > above


def kind_of(info: Mapping[str, Any], data_source: str) -> str:
    """Return the type of a task: what the game says in `info["type"]`, else the data source."""
    for key in _TYPE_KEYS:
        if isinstance(info.get(key), str):
            return info[key][:_MAX_NAME]
    return data_source[:_MAX_NAME]


def outcome_shares(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the share of programs' episodes by how they ended (`info["outcome"]`)."""
    outcomes = [info.get("outcome") for info in infos]
    counts = Counter(
        outcome for outcome in outcomes if isinstance(outcome, str) and _OUTCOME.fullmatch(outcome)
    )
    return {f"outcome_{name}": count / len(infos) for name, count in sorted(counts.items())}


def mean_info(infos: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Average what games put into `info` as numbers, each over the episodes that have it.

    Names are bounded, and so is their number: they become metrics.
    """
    by_key: dict[str, list[float]] = {}
    for info in infos:
        for key, value in info.items():
            if not isinstance(value, bool | int | float) or len(key) > _MAX_NAME:
                continue
            if key in by_key or len(by_key) < _MAX_NAMES:
                by_key.setdefault(key, []).append(float(value))
    return {key: float(np.mean(values)) for key, values in by_key.items()}


def mean_with_interval(values: Sequence[float] | NDArray[np.float64]) -> Interval:
    """Return the mean of one value per task with its normal 95 % interval."""
    array = np.asarray(values, np.float64)
    if not len(array):
        return Interval(math.nan, math.nan, math.nan)
    mean = float(array.mean())
    if len(array) < 2:
        return Interval(mean, math.nan, math.nan)
    half = _Z95 * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Interval(mean, mean - half, mean + half)


def pass_at_k(successes: Sequence[int], n: int) -> dict[int, float]:
    """Estimate pass@k for k = 1, 2, 4 … n without bias (arXiv 2107.03374).

    `successes` has one entry per task: how many of its `n` episodes solved it.
    """
    if n == 1 or not successes:
        return {}
    ks = sorted({2**power for power in range(int(math.log2(n)) + 1)} | {n})
    return {
        k: float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in successes]))
        for k in ks
    }


def summarize(episodes: Iterable[Scored], samples: int = 1) -> dict[str, Any]:
    """Return mean reward, accuracy, pass@k and the same by type, ready for JSON.

    `samples` is the number of episodes asked for per task; pass@k is over the tasks that have
    them all.
    """
    scored = list(episodes)
    summary = _scores(scored, samples)
    kinds = sorted({one.kind for one in scored})
    if len(kinds) > 1:
        summary["by_type"] = {
            kind: _scores([one for one in scored if one.kind == kind], samples) for kind in kinds
        }
    return summary


def compare(a: Iterable[Scored], b: Iterable[Scored]) -> Comparison:
    """Compare two versions task by task, with paired bootstrap intervals.

    Tasks that only one of them has played do not count.
    """
    of_a, of_b = _by_task(a), _by_task(b)
    tasks = sorted(of_a.keys() & of_b.keys())
    rewards = np.array([_mean_reward(of_b[t]) - _mean_reward(of_a[t]) for t in tasks])
    solved = np.array([_share(of_b[t]) - _share(of_a[t]) for t in tasks])
    return Comparison(
        num_tasks=len(tasks),
        reward=_bootstrap(rewards),
        accuracy=_bootstrap(solved),
        better=int((rewards > 0).sum()),
        worse=int((rewards < 0).sum()),
    )


def _scores(scored: Sequence[Scored], samples: int) -> dict[str, Any]:
    tasks = _by_task(scored)
    reward = mean_with_interval([_mean_reward(episodes) for episodes in tasks.values()])
    accuracy = mean_with_interval([_share(episodes) for episodes in tasks.values()])
    whole = [episodes for episodes in tasks.values() if len(episodes) == samples]
    counts = [sum(episode.success for episode in episodes) for episodes in whole]
    return {
        "tasks": len(tasks),
        "episodes": len(scored),
        "mean_reward": reward.mean,
        "mean_reward_ci95": [reward.low, reward.high],
        "accuracy": accuracy.mean,
        "accuracy_ci95": [accuracy.low, accuracy.high],
        **{f"pass@{k}": value for k, value in pass_at_k(counts, samples).items()},
    }


def _by_task(episodes: Iterable[Scored]) -> dict[int, list[Scored]]:
    tasks: dict[int, list[Scored]] = {}
    for episode in episodes:
        tasks.setdefault(episode.task, []).append(episode)
    return tasks


def _mean_reward(episodes: Sequence[Scored]) -> float:
    return sum(episode.reward for episode in episodes) / len(episodes)


def _share(episodes: Sequence[Scored]) -> float:
    return sum(episode.success for episode in episodes) / len(episodes)


def _bootstrap(differences: NDArray[np.float64]) -> Interval:
    """Return the mean with the middle 95 % of the means of resampled tasks; always the same."""
    if len(differences) < 2:
        return mean_with_interval(differences)
    rng = np.random.default_rng(0)
    num_tasks = len(differences)
    at_once = max(_DRAWS_AT_ONCE // num_tasks, 1)
    means: list[float] = []
    while len(means) < _RESAMPLES:
        drawn = rng.integers(num_tasks, size=(min(at_once, _RESAMPLES - len(means)), num_tasks))
        means += differences[drawn].mean(axis=1).tolist()
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(differences.mean()), float(low), float(high))
