"""Evaluations: tasks, scores with their uncertainty, metrics, comparisons.

Pure functions over played episodes. Episodes of one task are not independent, so means and
intervals are over tasks.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schemas.config.job import JobConfig
from ..schemas.env import DescribeReply
from ..schemas.metric import EpisodeScore
from ..schemas.rollout import Trajectory
from ..schemas.task import Task
from ..schemas.wire.errors import ConfigError

_Z95 = 1.959964
_RESAMPLES = 2000
_DRAWS_AT_ONCE = 1 << 18
_OUTCOME = re.compile("[a-z_]{1,32}")
_TYPE_KEYS = ("type", "task_type")
_MAX_NAME = 200
"""Characters of a type, or of a name in `info` that becomes a metric."""
_MAX_NAMES = 1000
"""Names in `info` that become metrics, at most."""
_METRIC_BYTES = 14
"""Bytes of a metric in a message, besides its name."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The results of one episode that scores use."""

    task: int
    """Row of the data, or seed of a generated game."""
    sample: int
    """Number of the episode within the task."""
    reward: float
    """Return of the episode."""
    success: bool
    """Whether it is solved."""
    kind: str = ""
    """Type of the task; empty if all tasks are alike."""


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


def evaluation_tasks(config: JobConfig, described: DescribeReply, version: int) -> list[Task]:
    """Return the tasks that evaluate a version: rows, or the seeds of a generated game.

    The number of a task, and so its random draws, is that of the row or of the generated state; a
    listed task of a generated game is its seed. Raises ConfigError for rows that do not exist.
    """
    settings, has_rows = config.evaluation, described.num_train is not None
    num = described.num_train if settings.data == "train" else described.num_val
    if settings.tasks is None and num is None:
        raise ConfigError(
            "evaluation.data=train needs rows, and the game generates its states",
            hint="give seeds: evaluation.tasks, or `tinkermq eval --tasks`",
        )
    numbers = list(dict.fromkeys(range(num or 0) if settings.tasks is None else settings.tasks))
    wrong = [number for number in numbers if num is not None and number >= num]
    if wrong and has_rows:
        raise ConfigError(
            f"row {wrong[0]} of evaluation.tasks does not exist: there are {num}",
            hint="rows are counted from 0",
        )
    are_seeds = settings.tasks is not None and not has_rows
    return [
        Task(
            task=number,
            sample=None if are_seeds else number,
            seed=number if are_seeds else task_seed(config.seed, number),
            version=version,
            group_size=settings.samples,
            reset_kwargs=settings.reset_kwargs,
        )
        for number in numbers
    ]


def is_success(reward: float, info: Mapping[str, Any], above: float) -> bool:
    """Return whether an episode is solved, by `info["success"]` or else by its return."""
    success = number_of(info.get("success"))
    return success if isinstance(success, bool) else reward > above


def number_of(value: Any) -> bool | int | float | None:
    """Return a number of `info`, None for any other value.

    A NumPy number arrives as an array without dimensions and counts.
    """
    plain = value.item() if getattr(value, "shape", None) == () else value
    return plain if isinstance(plain, bool | int | float) else None


def kind_of(info: Mapping[str, Any], data_source: str) -> str:
    """Return the type of a task: `info["type"]`, else the data source."""
    for key in _TYPE_KEYS:
        if isinstance(info.get(key), str):
            return info[key][:_MAX_NAME]
    return data_source[:_MAX_NAME]


def outcome_shares(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the shares of programs' episodes by their end (`info["outcome"]`)."""
    outcomes = [info.get("outcome") for info in infos]
    counts = Counter(
        outcome for outcome in outcomes if isinstance(outcome, str) and _OUTCOME.fullmatch(outcome)
    )
    return {f"outcome_{name}": count / len(infos) for name, count in sorted(counts.items())}


def mean_info(infos: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Average the numbers that games put into `info`, each over the episodes that have it.

    The length and number of names are bounded, since they become metrics.
    """
    by_key: dict[str, list[float]] = {}
    for info in infos:
        for key, item in info.items():
            value = number_of(item)
            if value is None or len(key) > _MAX_NAME:
                continue
            if key in by_key or len(by_key) < _MAX_NAMES:
                by_key.setdefault(key, []).append(float(value))
    return {key: float(np.mean(values)) for key, values in by_key.items()}


def score_of(item: Trajectory, success_reward: float) -> EpisodeScore:
    """Return the results of a played episode.

    A program's episode that failed has no generated token. In a game with roles the type is the
    role, unless the game sets another.
    """
    outcome = item.info.get("outcome")
    return EpisodeScore(
        reward=item.reward,
        success=is_success(item.reward, item.info, success_reward),
        num_tokens=item.num_generated,
        num_turns=len(item.turn_ends),
        kind=kind_of(item.info, item.data_source or item.role),
        is_program=bool(item.kind) or not item.num_generated,
        outcome=outcome if isinstance(outcome, str) and _OUTCOME.fullmatch(outcome) else "",
        figures=mean_info([item.info]),
    )


def validation_metrics(
    tasks: Sequence[Sequence[EpisodeScore | None]], samples: int
) -> dict[str, float]:
    """Summarise the episodes of validation tasks; `samples` of each were requested.

    Missing episodes have failed: they are counted separately, never as a reward of 0. pass@k is
    over the tasks whose episodes all ran, and left out for games with roles, where each
    conversation counts by itself. Episodes of programs are missing only after failures of the
    infrastructure; `val_agent/outcome_*` reports how the others ended.
    """
    done = [score for task in tasks for score in task if score is not None]
    values = {"val/failed_episodes": float(sum(len(task) for task in tasks) - len(done))}
    if not done:
        return values
    rewards = np.array([score.reward for score in done])
    values |= {
        "val/mean_score": float(rewards.mean()),
        "val/std_score": float(rewards.std()),
        "val/max_score": float(rewards.max()),
        "val/min_score": float(rewards.min()),
        "val/success_rate": float(np.mean([score.success for score in done])),
        "val/num_episodes": float(len(done)),
    }
    played = [score for score in done if score.num_tokens]  # a failed episode has no other data
    if played:
        values |= {
            "val/response_length": float(np.mean([score.num_tokens for score in played])),
            "val/num_turns": float(np.mean([score.num_turns for score in played])),
        }
    means = mean_info(score.figures for score in played)
    values |= {f"val_game/{key}": mean for key, mean in means.items()}
    of_programs = [{"outcome": score.outcome} for score in done if score.is_program]
    values |= {f"val_agent/{name}": share for name, share in outcome_shares(of_programs).items()}
    values |= _metrics_by_kind(done)
    whole = [[score.success for score in task if score is not None] for task in tasks]
    counts = [sum(task) for task in whole if len(task) == samples]
    return values | {f"val/pass@{k}": value for k, value in pass_at_k(counts, samples).items()}


def fitting(values: Mapping[str, float], max_bytes: int) -> dict[str, float]:
    """Return as many metrics as fit into `max_bytes`, scores over all tasks first.

    The number of task types, and of names in `info`, depends on data and game;
    `val/metrics_left_out` counts those that do not fit.
    """
    ordered = sorted(values.items(), key=lambda item: item[0].startswith("val_"))
    sizes = itertools.accumulate(len(name.encode()) + _METRIC_BYTES for name, _ in ordered)
    fitting = dict(item for item, size in zip(ordered, sizes, strict=True) if size <= max_bytes)
    left_out = len(values) - len(fitting)
    return {**fitting, "val/metrics_left_out": float(left_out)} if left_out else fitting


def _metrics_by_kind(done: Sequence[EpisodeScore]) -> dict[str, float]:
    """Return the scores of each type of task, if there are several."""
    kinds: dict[str, list[EpisodeScore]] = {}
    for score in done:
        kinds.setdefault(score.kind or "other", []).append(score)
    if len(kinds) < 2:
        return {}
    values: dict[str, float] = {}
    for kind, scores in sorted(kinds.items()):
        name = f"val_type/{kind}"
        values[f"{name}/mean_score"] = float(np.mean([score.reward for score in scores]))
        values[f"{name}/success_rate"] = float(np.mean([score.success for score in scores]))
        values[f"{name}/num_episodes"] = float(len(scores))
    return values


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


def share_with_interval(shares: Sequence[float]) -> Interval:
    """Return the mean of one share of successes per task with its 95 % interval (Wilson's).

    The interval stays between 0 and 1, and has a width even if all tasks or none are solved. It is
    wider than necessary if tasks have several episodes.
    """
    if not shares:
        return Interval(math.nan, math.nan, math.nan)
    mean, num = float(np.mean(shares)), len(shares)
    spread = _Z95**2 / num
    middle = (mean + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (mean * (1 - mean) + spread / 4)) / (1 + spread)
    return Interval(mean, max(0.0, middle - half), min(1.0, middle + half))


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
    """Return mean reward, accuracy and pass@k, in total and by type, as JSON values.

    `samples` is the number of requested episodes per task; pass@k is over the tasks that have them
    all.
    """
    scored = list(episodes)
    summary = _scores(scored, samples)
    kinds = sorted({score.kind for score in scored})
    if len(kinds) > 1:
        summary["by_type"] = {
            kind: _scores([score for score in scored if score.kind == kind], samples)
            for kind in kinds
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
    accuracy = share_with_interval([_share(episodes) for episodes in tasks.values()])
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
    """Return the mean with the middle 95 % of the means of resampled tasks, from a fixed seed."""
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
