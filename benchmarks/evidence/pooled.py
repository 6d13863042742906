"""A run in a real pool, and what its rollout log and its processes say of it.

Lags are what generation and learning make them, and no two runs of a seed are the same: what a seed
fixes are the tasks and the model.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinkermq.broker.feed import read_metrics
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import BatchRecord
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.evidence.lagged import Curve
from benchmarks.stack import Run, Stack

DEADLINE_S = 400.0
_ACTORS = ("learner", "generator", "environment")


@dataclass(frozen=True)
class Played:
    """What of a run's rollout log was generated, and what was trained."""

    generated: list[Group]
    trained: list[tuple[BatchRecord, list[Group]]]
    """The groups of each step."""


async def run_pooled(job: dict[str, Any]) -> Curve:
    """Run a job on a stack of its own, with a learner and a generator; return what was measured."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        async with Stack(Path(folder), slots=4) as stack:
            run = await stack.run(job, deadline_s=DEADLINE_S)
            scope = JobScope(run.record.user, run.record.job)
            metrics = await read_metrics(stack.connection, scope)
            played = await _played(stack, scope)
    curve = Curve(seconds=time.perf_counter() - started)
    scored = {one.step: one.values for one in metrics if "val/mean_score" in one.values}
    curve.validation = {step: scored[step]["val/mean_score"] for step in sorted(scored)}
    curve.rewards = run.values("training_step_reward")
    curve.numbers = [one.values for one in run.metrics]
    curve.samples = round(sum(run.values("rollout/episodes")))
    curve.train_s = run.seconds(after=1)
    ended = {one.step: one.time - run.metrics[0].time for one in run.metrics}
    after = {f"after_s/{step}": ended[step] for step in curve.validation if step}
    curve.told = {**after, **_costs(run), **_lags(played), **_shares(run)}
    curve.told |= {**mixed_shares(played), **_pauses(played, run), **_mismatch(run)}
    return curve


async def _played(stack: Stack, scope: JobScope) -> Played:
    log, groups = RolloutLog(stack.connection, scope), dict[int, Group]()
    last = await log.last_seq()
    async with aclosing(log.read()) as entries:
        async for entry in entries:
            if entry.group is not None and entry.group.error is None:
                groups[entry.seq] = entry.group
            if entry.seq >= last:
                break
    records = [record for _, record in await BatchLog(stack.connection, scope).read_all()]
    trained = [(record, [groups[seq] for seq in record.seqs]) for record in records]
    return Played(list(groups.values()), trained)


def _costs(run: Run) -> dict[str, float]:
    """Return CPU seconds of the actors that train, but the evaluator's and the broker's."""
    last = {name: used for sample in run.samples for name, used in sample.cpu.items()}
    spent = [used for name, used in last.items() if name.startswith(_ACTORS)]
    return {"train_cpu_s": sum(used.loop_s + used.other_s for used in spent)}


def _lags(played: Played) -> dict[str, float]:
    """Return the mean and the 99th percentile of the lag of trained tokens."""
    lags = np.concatenate(
        [
            record.step - 1 - versions[versions >= record.oldest]
            for record, groups in played.trained
            for versions in map(_versions, _episodes(groups))
        ]
    )
    return {"lag_mean": float(lags.mean()), "lag_p99": float(np.percentile(lags, 99))}


def _shares(run: Run) -> dict[str, float]:
    """Return what was generated in vain, and whether it was of the long episodes."""
    last = run.metrics[-1].values
    names = {"wasted_share": "wasted", "trained_over_generated_length": "length_ratio"}
    return {ours: last.get(f"rollout/{theirs}", 0.0) for theirs, ours in names.items()}


def mixed_shares(played: Played) -> dict[str, float]:
    """Return how often new weights came in the middle of what was trained.

    `mixed_episodes`: share of the tokens whose episode is of several versions; `old_cache`: of
    those that follow a swap within their turn, whose cache is then of older weights unless it was
    computed again.
    """
    episodes = [one for _, groups in played.trained for one in _episodes(groups)]
    total = sum(one.num_generated for one in episodes)
    mixed = sum(one.num_generated for one in episodes if one.min_version < one.max_version)
    after = sum(int((turn > turn[0]).sum()) for one in episodes for turn in _turns(one))
    return {"mixed_episodes": mixed / total, "old_cache": after / total}


def _pauses(played: Played, run: Run) -> dict[str, float]:
    """Return for how long decoding stood still for new weights, in the mean of the versions."""
    paused = sum(group.time_use.get("swap", 0.0) for group in played.generated)
    return {"paused_ms": 1e3 * paused / len(run.metrics)}


def _mismatch(run: Run) -> dict[str, float]:
    """Return the distance of the learner's and the engine's log-probs at a lag of 0.

    There the weights are the same ones: what is left is of the cache. The mean of all tokens, and
    the mean of the steps' largest ratios.
    """
    fresh = [one.values for one in run.metrics if "staleness/num_tokens/lag_0" in one.values]
    if not fresh:
        return {}
    weights = [values["staleness/num_tokens/lag_0"] for values in fresh]
    distances = [values["staleness/abs_log_ratio/lag_0"] for values in fresh]
    return {
        "mismatch": float(np.average(distances, weights=weights)),
        "mismatch_max_ratio": mean(values["staleness/max_ratio/lag_0"] for values in fresh),
        "fresh_tokens": sum(weights),
    }


def _episodes(groups: list[Group]) -> Iterator[Trajectory]:
    return (one for group in groups for one in group.sampled)


def _versions(one: Trajectory) -> NDArray[np.int32]:
    """Return the version of each generated token."""
    return one.versions[one.mask == 1]


def _turns(one: Trajectory) -> Iterator[NDArray[np.int32]]:
    """Return the versions of the tokens of each turn."""
    begin = 0
    for end in one.turn_ends:
        here = slice(begin, int(end) + 1)
        yield one.versions[here][one.mask[here] == 1]
        begin = int(end) + 1
