"""The evaluator: runs the validation set on chosen versions, beside training.

The learner writes down which versions it wants evaluated; their weights stay published until the
result is there. An evaluator that dies takes the same list up again. A job of kind `eval` has no
learner: its evaluator evaluates the model of its configuration once and ends.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import structlog

from ...broker.feed import publish_metric
from ...broker.kv import Bucket
from ...envs.evaluation import is_success, pass_at_k, task_seed
from ...envs.remote import Environments, Start
from ...schemas.config import EvaluationConfig
from ...schemas.errors import ConflictError, NotFoundError, TinkermqError
from ...schemas.metric import EvalRecord, Metric
from ...schemas.rollout import Trajectory
from ...schemas.subjects import BUCKET_EVALS
from ..generator.agent_loop import AgentLoop, EpisodeFailed, EpisodePlan, EpisodeSampling
from ..generator.engine import Engine
from ..generator.generator import make_chat, start_engine
from ..job_weights import as_sources, open_weights
from ..runtime import JobContext

_POLL_S = 0.5
_log = structlog.get_logger()


async def run_evaluator(context: JobContext) -> None:
    """Evaluate what is asked for until told to stop."""
    config = context.config
    chat = make_chat(config)
    engine = await start_engine(config)
    environments = Environments(context.broker, context.scope, config.env, context.waiting)
    sampling = EpisodeSampling(config.evaluation.temperature, config.evaluation.top_p)
    loop = AgentLoop(engine, chat, environments, config.rollout, sampling)
    evaluator = Evaluator(context, engine, loop, environments)
    await context.serve_control()
    try:
        if context.record.kind == "eval":
            await evaluator.evaluate_model()
        else:
            await evaluator.run()
    finally:
        await engine.close()


class Evaluator:
    """Evaluates versions of one job."""

    def __init__(
        self, context: JobContext, engine: Engine, loop: AgentLoop, environments: Environments
    ) -> None:
        self._context = context
        self._engine = engine
        self._loop = loop
        self._environments = environments
        self._store = open_weights(context)
        self._bucket = Bucket(context.broker, BUCKET_EVALS, EvalRecord)
        self._num_val: int | None = None

    async def run(self) -> None:
        """Take requested evaluations, oldest version first, until `stopping` is set."""
        context = self._context
        context.set_state("waiting")
        while not context.stopping.is_set():
            record = await self._next()
            if record is None:
                with context.waiting("the learner to ask for an evaluation"):
                    await context.unless_stopping(asyncio.sleep(_POLL_S))
                continue
            context.set_state("working", version=record.version)
            await context.unless_stopping(self._evaluate(record))
            context.set_state("waiting")

    async def evaluate_model(self) -> None:
        """Evaluate the model of the configuration once, as version 0."""
        values = await self._context.unless_stopping(self._run_validation(0))
        if values is None:
            return
        metric = Metric(step=0, values=values, time=time.time())
        await publish_metric(self._context.broker, self._context.scope, metric)
        told: dict[str, Any] = {**values}
        await self._context.event("evaluation_done", **told)

    async def _next(self) -> EvalRecord | None:
        entries = await self._bucket.items(f"{self._context.scope.key}.")
        waiting = [e.value for e in entries if e.value.state in ("requested", "running")]
        return min(waiting, key=lambda record: record.version, default=None)

    async def _evaluate(self, record: EvalRecord) -> None:
        try:
            await self._load(record.version)
            values = await self._run_validation(record.version)
            done = record.model_copy(update={"state": "done", "values": values})
        except TinkermqError as error:
            await self._context.event("evaluation_failed", str(error), version=record.version)
            done = record.model_copy(update={"state": "failed", "blame": str(error)})
        await self._finish(done)

    async def _finish(self, record: EvalRecord) -> None:
        """Write a result, unless another evaluator was first."""
        key = f"{self._context.scope.key}.{record.version}"
        entry = await self._bucket.get(key)
        if entry is None or entry.value.state not in ("requested", "running"):
            return
        try:
            await self._bucket.update(key, record, entry.revision)
        except ConflictError:
            _log.info("evaluation_was_there", version=record.version)

    async def _load(self, version: int) -> None:
        manifest = await self._store.manifest(version)
        while manifest is None:
            latest = await self._store.latest()
            if latest is not None and latest.version > version:
                raise NotFoundError(
                    f"the weights of version {version} were removed, the newest is "
                    f"{latest.version}",
                    hint="ask for the newest version, or evaluate a checkpoint",
                )
            with self._context.waiting(f"the weights of version {version}"):
                await self._store.wait_newer(version - 1, timeout_s=_POLL_S)
            manifest = await self._store.manifest(version)
        tensors = await self._store.fetch(manifest)
        await self._engine.load_weights(version, as_sources(tensors), "recompute")

    async def _run_validation(self, version: int) -> dict[str, float]:
        """Run every validation task `samples` times, as many at once as the generator may."""
        config = self._context.config
        if self._num_val is None:
            self._num_val = (await self._environments.describe()).num_val
        started = time.perf_counter()
        free = asyncio.Semaphore(config.generator.max_episodes)
        plans = [
            self._plan(version, task, sample)
            for task in range(self._num_val)
            for sample in range(config.evaluation.samples)
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._episode(plan, free)) for plan in plans]
        results = [task.result() for task in running]
        values = validation_numbers(results, config.evaluation)
        values["timing_s/testing"] = time.perf_counter() - started
        return values

    def _plan(self, version: int, task: int, sample: int) -> EpisodePlan:
        seed = task_seed(self._context.config.seed, task)
        episode = f"{self._context.name}-{version}-{task}-{sample}-{time.time_ns():x}"
        return EpisodePlan(episode, Start("val", task, seed))

    async def _episode(self, plan: EpisodePlan, free: asyncio.Semaphore) -> Trajectory | None:
        """Run one episode, trying again; None when every try failed."""
        async with free:
            for attempt in range(self._context.config.rollout.max_tries):
                try:
                    episode = f"{plan.episode}-{attempt}"
                    return await self._loop.run(replace(plan, episode=episode))
                except EpisodeFailed as failure:
                    _log.warning("episode_failed", **failure.blame.model_dump())
        return None


def validation_numbers(
    results: Sequence[Trajectory | None], config: EvaluationConfig
) -> dict[str, float]:
    """Summarise validation episodes, `samples` in a row for each task.

    Failed episodes are counted apart and never as a reward of 0; pass@k is over the tasks whose
    episodes all ran.
    """
    done = [item for item in results if item is not None]
    values = {"val/failed_episodes": float(len(results) - len(done))}
    if not done:
        return values
    rewards = np.array([item.reward for item in done])
    values |= {
        "val/mean_score": float(rewards.mean()),
        "val/std_score": float(rewards.std()),
        "val/max_score": float(rewards.max()),
        "val/min_score": float(rewards.min()),
        "val/success_rate": float(np.mean([_success(item, config) for item in done])),
        "val/num_episodes": float(len(done)),
        "val/response_length": float(np.mean([item.num_generated for item in done])),
        "val/num_turns": float(np.mean([len(item.turn_ends) for item in done])),
    }
    found: dict[str, list[float]] = {}
    for item in done:
        for key, value in item.info.items():
            if isinstance(value, bool | int | float):
                found.setdefault(f"val_game/{key}", []).append(float(value))
    values |= {key: float(np.mean(items)) for key, items in found.items()}
    n = config.samples
    tasks = [results[start : start + n] for start in range(0, len(results), n)]
    counts = [
        sum(_success(item, config) for item in task if item is not None)
        for task in tasks
        if all(item is not None for item in task)
    ]
    return values | {f"val/pass@{k}": value for k, value in pass_at_k(counts, n).items()}


def _success(item: Trajectory, config: EvaluationConfig) -> bool:
    return is_success(item.reward, item.info, config.success_reward)
