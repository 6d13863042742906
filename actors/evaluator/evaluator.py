"""The evaluator: plays evaluation tasks with an engine of its own.

In a training job with `evaluation.slots` it plays the validation tasks, which generators play
otherwise. A job of kind `eval` has no learner: its evaluator evaluates a checkpoint, or the
configured model, once and ends.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ...broker.feed import publish_metric
from ...envs.evaluation import evaluation_tasks, validation_metrics
from ...envs.host_client import Environments
from ...schemas.config.job import JobConfig
from ...schemas.env import DescribeReply
from ...schemas.metric import EpisodeScore, Metric
from ...schemas.task import Task
from ..engine.engine import bytes_of_engines
from ..policy.chat import make_chat
from ..policy.policies import check_weights, config_of_checkpoint
from ..rollout.players import start_engines
from ..rollout.validation import TaskEpisodes, Validator
from ..runtime import JobContext
from ..weights.follower import WeightFollower
from ..weights.job_weights import open_weights

_TOLD_AT_ONCE = 2000


async def run_evaluator(context: JobContext) -> None:
    """Evaluate the job's model, or validation tasks until stopped."""
    config = context.config
    is_job_of_its_own = context.record.kind == "eval"
    await asyncio.to_thread(check_weights, context.record, config)
    if is_job_of_its_own:
        config = config_of_checkpoint(context.record, config)
    chat = make_chat(config).at(context.record.created)
    environments = Environments(context.broker, context.scope, config.env, context.missing)
    engines = await start_engines(_with_slots(config))
    episodes = await TaskEpisodes.start(context, engines, chat, environments)
    context.own_bytes = partial(bytes_of_engines, engines.values())
    await context.serve_control()
    try:
        if is_job_of_its_own:
            evaluation = evaluate_model(context, episodes, await environments.describe())
        else:
            weights = WeightFollower(open_weights(context), engines, "recompute")
            context.set_state("working")
            evaluation = Validator(context, episodes, weights).play_tasks()
        await context.unless_stopping(evaluation, None)
    finally:
        await episodes.close()
        for engine in engines.values():
            await engine.close()


def _with_slots(config: JobConfig) -> JobConfig:
    """Return the configuration with a generator that has the evaluator's slots."""
    generator = config.generator.model_copy(update={"slots": config.evaluator_slots})
    return config.model_copy(update={"generator": generator})


class EvaluatedEpisode(NamedTuple):
    """One episode of an evaluation; without a score if every try failed."""

    task: int
    sample: int
    score: EpisodeScore | None


async def evaluate_model(
    context: JobContext, episodes: TaskEpisodes, described: DescribeReply
) -> None:
    """Evaluate the job's model once, as version 0; report every episode."""
    started = time.perf_counter()
    tasks = evaluation_tasks(context.config, described, 0)
    results = await _play(episodes, tasks)
    flat = [episode for result in results for episode in result]
    for start in range(0, len(flat), _TOLD_AT_ONCE):
        columns: dict[str, Any] = {**episode_columns(flat[start : start + _TOLD_AT_ONCE])}
        await context.event("evaluation_episodes", **columns)
    samples = 1 if described.roles else context.config.evaluation.samples
    scores = [[episode.score for episode in result] for result in results]
    values = validation_metrics(scores, samples)
    values["timing_s/testing"] = time.perf_counter() - started
    metric = Metric(step=0, values=values, time=time.time())
    await publish_metric(context.broker, context.scope, metric)
    figures: dict[str, Any] = {**values}
    await context.event("evaluation_done", **figures)


async def _play(episodes: TaskEpisodes, tasks: Sequence[Task]) -> list[list[EvaluatedEpisode]]:
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(episodes.play(task)) for task in tasks]
    return [
        [EvaluatedEpisode(task.task, sample, score) for sample, score in played.result()]
        for task, played in zip(tasks, running, strict=True)
    ]


def episode_columns(results: Sequence[EvaluatedEpisode]) -> dict[str, list[Any]]:
    """Return the scored episodes as columns, for an event."""
    ran = [(task, sample, score) for task, sample, score in results if score is not None]
    return {
        "tasks": [task for task, _, _ in ran],
        "samples": [sample for _, sample, _ in ran],
        "rewards": [score.reward for _, _, score in ran],
        "successes": [score.success for _, _, score in ran],
        "types": [score.kind for _, _, score in ran],
    }
