"""The evaluator: runs the validation set on chosen versions, beside training.

The learner writes down which versions it wants evaluated; their weights stay published until the
result is there. An evaluator that dies takes the same list up again. A job of kind `eval` has no
learner: its evaluator evaluates a checkpoint, or the model of its configuration, once and ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import structlog

from ...broker.feed import publish_metric
from ...broker.jetstream.kv import Bucket, KeyChanges
from ...broker.weights.payloads import TensorBytes
from ...envs.evaluation import (
    is_success,
    kind_of,
    mean_info,
    outcome_shares,
    pass_at_k,
    task_seed,
)
from ...envs.host_client import Environments, Start
from ...schemas.config.job import EvaluationConfig
from ...schemas.env import DescribeReply
from ...schemas.metric import EvalRecord, Metric
from ...schemas.rollout import Trajectory
from ...schemas.task import Blame
from ...schemas.wire.errors import ConfigError, ConflictError, NotFoundError, TinkermqError
from ...schemas.wire.subjects import BUCKET_EVALS
from ..engine.weight_updates import load_policies
from ..policy.chat import make_chat
from ..policy.policies import MAIN, check_weights, config_of_checkpoint
from ..rollout.agent_loop import EpisodeFailed, EpisodePlan, EpisodeSampling, until_played
from ..rollout.groups import play_table
from ..rollout.players import Players
from ..rollout.program_loop import ProgramLoop
from ..runtime import JobContext
from ..weights.job_weights import open_weights

# -- metrics of a validation run (pure) ------------------------------------------------------------

_INFRASTRUCTURE = ("engine", "broker", "sandbox")
"""Who fails without telling anything of the model."""


class EvaluatedEpisode(NamedTuple):
    """One episode of an evaluation; without a trajectory when every try failed."""

    task: int
    sample: int
    trajectory: Trajectory | None


def validation_metrics(
    results: Sequence[Trajectory | None], config: EvaluationConfig
) -> dict[str, float]:
    """Summarise validation episodes, `samples` in a row for each task.

    Episodes that are missing failed: they are counted apart and never as a reward of 0; pass@k is
    over the tasks whose episodes all ran. Those of programs are missing for a failure of the
    infrastructure alone; `val_agent/outcome_*` tells how the others ended.
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
    }
    played = [item for item in done if item.num_generated]  # a failed one says nothing but that
    if played:
        values |= {
            "val/response_length": float(np.mean([item.num_generated for item in played])),
            "val/num_turns": float(np.mean([len(item.turn_ends) for item in played])),
        }
    values |= {f"val_game/{key}": mean for key, mean in mean_info(i.info for i in played).items()}
    of_programs = [item.info for item in done if item.kind or not item.num_generated]
    values |= {f"val_agent/{name}": n for name, n in outcome_shares(of_programs).items()}
    values |= _by_type(done, config)
    n = config.samples
    tasks = [results[start : start + n] for start in range(0, len(results), n)]
    counts = [
        sum(_success(item, config) for item in task if item is not None)
        for task in tasks
        if all(item is not None for item in task)
    ]
    return values | {f"val/pass@{k}": value for k, value in pass_at_k(counts, n).items()}


def is_infrastructure(failed: EpisodeFailed) -> bool:
    """Whether an episode failed by what tells nothing of the model: it is not counted."""
    return failed.blame.boundary in _INFRASTRUCTURE or failed.cause.boundary in _INFRASTRUCTURE


def join_rows(rows: Sequence[Trajectory]) -> Trajectory:
    """Return an episode of several rows as one: the rows one behind the other, told as the main."""
    lengths = np.array([len(item.mask) for item in rows])
    starts = np.repeat(np.cumsum(lengths) - lengths, [len(item.turn_ends) for item in rows])
    joined = {
        name: np.concatenate([getattr(item, name) for item in rows])
        for name in ("token_ids", "mask", "logprobs", "versions", "turn_ends", "rewards")
    }
    joined["turn_ends"] = (joined["turn_ends"] + starts).astype(np.int32)
    return rows[0].model_copy(
        update={**joined, "finish_reasons": [why for item in rows for why in item.finish_reasons]}
    )


def failed_episode(blame: Blame) -> Trajectory:
    """Return what counts of a program's episode that failed: no token, and a reward of 0."""
    zero = np.zeros(1, np.int32)
    return Trajectory(
        token_ids=zero,
        mask=zero.astype(np.uint8),
        logprobs=zero.astype(np.float32),
        versions=zero - 1,
        turn_ends=zero,
        rewards=zero.astype(np.float32),
        info={"outcome": blame.code, "success": False},
    )


def _by_type(done: Sequence[Trajectory], config: EvaluationConfig) -> dict[str, float]:
    """Return the scores of each type of task, where there are several."""
    types: dict[str, list[Trajectory]] = {}
    for item in done:
        types.setdefault(_kind(item) or "other", []).append(item)
    if len(types) < 2:
        return {}
    values: dict[str, float] = {}
    for kind, items in sorted(types.items()):
        name = f"val_type/{kind}"
        values[f"{name}/mean_score"] = float(np.mean([item.reward for item in items]))
        values[f"{name}/success_rate"] = float(np.mean([_success(item, config) for item in items]))
        values[f"{name}/num_episodes"] = float(len(items))
    return values


def episode_columns(
    results: Sequence[EvaluatedEpisode], config: EvaluationConfig
) -> dict[str, list[Any]]:
    """Return what counts of each episode that ran, column by column, for an event."""
    ran = [
        (result.task, result.sample, result.trajectory)
        for result in results
        if result.trajectory is not None
    ]
    return {
        "tasks": [task for task, _, _ in ran],
        "samples": [sample for _, sample, _ in ran],
        "rewards": [item.reward for _, _, item in ran],
        "successes": [_success(item, config) for _, _, item in ran],
        "types": [_kind(item) for _, _, item in ran],
    }


def _kind(item: Trajectory) -> str:
    """Return the type of an episode's task; in a game with roles the role, unless the game says."""
    return kind_of(item.info, item.data_source or item.role)


def _success(item: Trajectory, config: EvaluationConfig) -> bool:
    return is_success(item.reward, item.info, config.success_reward)


# -- requested evaluations, one after the other ----------------------------------------------------

Measure = Callable[[int, Mapping[str, TensorBytes]], Awaitable[dict[str, float]]]
"""Measures a version, of which it is given the weights."""

_LOOK_S = 2.0
"""The longest time without a look for what is asked, or for weights that are not there yet."""
_MAX_BLAME_CHARS = 8192
_log = structlog.get_logger()


class EvaluationRequests:
    """What is asked of an evaluator, oldest version first."""

    def __init__(self, context: JobContext, measure: Measure, check: Callable[[], None]) -> None:
        """`check` raises what ends the evaluator, where a version could not be measured."""
        self._context = context
        self._measure = measure
        self._check = check
        self._store = open_weights(context)
        self._bucket = Bucket(context.broker, BUCKET_EVALS, EvalRecord)
        self._asked: dict[int, EvalRecord] = {}
        """What is asked for and has no result, by version."""
        self._revision = 0
        """Of the newest write to the job's evaluations that was read."""

    async def serve(self) -> None:
        """Take requested evaluations until `stopping` is set."""
        context = self._context
        context.set_state("waiting")
        async with KeyChanges(context.broker, BUCKET_EVALS, context.scope.key) as changes:
            while not context.stopping.is_set():
                record = await self._next()
                if record is None:
                    with context.waiting("the learner to ask for an evaluation"):
                        await context.unless_stopping(changes.wait(_LOOK_S), None)
                    continue
                context.set_state("working", version=record.version)
                await context.unless_stopping(self._evaluate(record), None)
                context.set_state("waiting")

    async def _next(self) -> EvalRecord | None:
        for entry in await self._bucket.changes(self._context.scope.key, self._revision):
            self._revision = entry.revision
            record = entry.value
            if record.state in ("requested", "running"):
                self._asked[record.version] = record
            else:
                self._asked.pop(record.version, None)
        return self._asked[min(self._asked)] if self._asked else None

    async def _evaluate(self, record: EvalRecord) -> None:
        try:
            values = await self._measure(record.version, await self._fetch(record.version))
            done = record.model_copy(update={"state": "done", "values": values})
        except TinkermqError as error:
            self._check()
            await self._context.event("evaluation_failed", str(error), version=record.version)
            blame = str(error)[:_MAX_BLAME_CHARS]
            done = record.model_copy(update={"state": "failed", "blame": blame})
        await self._finish(done)

    async def _finish(self, record: EvalRecord) -> None:
        """Write a result, unless another evaluator was first."""
        self._asked.pop(record.version, None)
        key = f"{self._context.scope.key}.{record.version}"
        entry = await self._bucket.find(key)
        if entry is None or entry.value.state not in ("requested", "running"):
            return
        self._context.progressed()
        try:
            await self._bucket.update(key, record, entry.revision)
        except ConflictError:
            _log.info("evaluation_was_there", version=record.version)

    async def _fetch(self, version: int) -> Mapping[str, TensorBytes]:
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
                await self._store.wait_newer(version - 1, timeout_s=_LOOK_S)
            manifest = await self._store.manifest(version)
        return await self._store.fetch(manifest)


_TOLD_AT_ONCE = 2000


async def run_evaluator(context: JobContext) -> None:
    """Evaluate what is asked for until told to stop."""
    config = context.config
    is_job_of_its_own = context.record.kind == "eval"
    await asyncio.to_thread(check_weights, context.record, config)
    if is_job_of_its_own:
        config = config_of_checkpoint(context.record, config)
    chat = make_chat(config).at(context.record.created)
    environments = Environments(context.broker, context.scope, config.env, context.missing)
    sampling = EpisodeSampling(config.evaluation.temperature, config.evaluation.top_p)
    players = await Players.start(config, chat, environments, sampling)
    programs: ProgramLoop | None = None
    if config.agent.runs_programs:
        programs = ProgramLoop(
            context.broker,
            context.scope,
            players.engines[MAIN],
            chat,
            environments,
            config,
            sampling,
        )
        await programs.start()
    evaluator = Evaluator(context, players, environments, programs)
    await context.serve_control()
    try:
        if is_job_of_its_own:
            await evaluator.evaluate_model()
        else:
            await evaluator.run()
    finally:
        if programs is not None:
            await programs.close()
        await players.close()


class Evaluator:
    """Evaluates versions of one job."""

    def __init__(
        self,
        context: JobContext,
        players: Players,
        environments: Environments,
        programs: ProgramLoop | None = None,
    ) -> None:
        """`programs` plays the episodes of a job that has programs in place of a game."""
        self._context = context
        self._players = players
        self._programs = programs
        self._environments = environments
        self._there: DescribeReply | None = None
        self._started = 0.0

    async def run(self) -> None:
        """Take requested evaluations, oldest version first, until `stopping` is set."""
        check = self._players.check_engines
        await EvaluationRequests(self._context, self._measure, check).serve()

    async def _measure(self, version: int, tensors: Mapping[str, TensorBytes]) -> dict[str, float]:
        await load_policies(self._players.engines, version, tensors, "recompute")
        return self._numbers(await self._play(version))

    async def evaluate_model(self) -> None:
        """Evaluate the job's model once, as version 0; tell every episode."""
        context = self._context
        results = await context.unless_stopping(self._play(0), stopped=None)
        if results is None:
            return
        for start in range(0, len(results), _TOLD_AT_ONCE):
            some = results[start : start + _TOLD_AT_ONCE]
            columns: dict[str, Any] = {**episode_columns(some, context.config.evaluation)}
            await context.event("evaluation_episodes", **columns)
        values = self._numbers(results)
        metric = Metric(step=0, values=values, time=time.time())
        await publish_metric(context.broker, context.scope, metric)
        fields: dict[str, Any] = {**values}
        await context.event("evaluation_done", **fields)

    def _numbers(self, results: Sequence[EvaluatedEpisode]) -> dict[str, float]:
        config = self._context.config.evaluation
        if self._there is not None and self._there.roles:
            # An episode has as many conversations as roles that had a turn: each counts by itself.
            config = config.model_copy(update={"samples": 1})
        values = validation_metrics([result.trajectory for result in results], config)
        return {**values, "timing_s/testing": time.perf_counter() - self._started}

    async def _play(self, version: int) -> list[EvaluatedEpisode]:
        """Run every task `samples` times, as many at once as the generator may."""
        config = self._context.config
        tasks = await self._tasks()
        self._started = time.perf_counter()
        free = asyncio.Semaphore(config.episodes_at_once)
        numbers = [(task, sample) for task in tasks for sample in range(config.evaluation.samples)]
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._episode(self._plan(version, task, sample), free))
                for task, sample in numbers
            ]
        return [
            EvaluatedEpisode(task, sample, conversation)
            for (task, sample), episode in zip(numbers, running, strict=True)
            for conversation in episode.result()
        ]

    async def _tasks(self) -> Sequence[int]:
        """Return the rows, or the numbers of the seeds, to evaluate."""
        config = self._context.config.evaluation
        if self._there is None:
            self._there = await self._environments.describe()
        there = self._there.num_train if config.data == "train" else self._there.num_val
        if config.tasks is None:
            if there is None:
                raise ConfigError(
                    "evaluation.data=train needs rows, and the game generates its states",
                    hint="give seeds: evaluation.tasks, or `tinkermq eval --tasks`",
                )
            return range(there)
        wrong = [task for task in config.tasks if there is not None and task >= there]
        if wrong and self._has_rows:
            raise ConfigError(
                f"row {wrong[0]} of evaluation.tasks does not exist: there are {there}",
                hint="rows are counted from 0",
            )
        return list(dict.fromkeys(config.tasks))

    @property
    def _has_rows(self) -> bool:
        assert self._there is not None
        return self._there.num_train is not None

    def _plan(self, version: int, task: int, sample: int) -> EpisodePlan:
        """Plan an episode; a listed task of a generated game is its seed."""
        config = self._context.config
        listed = config.evaluation.tasks is not None and not self._has_rows
        seed = task if listed else task_seed(config.seed, task)
        episode = f"{self._context.name}-{version}-{task}-{sample}-{time.time_ns():x}"
        kwargs = config.evaluation.reset_kwargs
        start = Start(config.evaluation.data, None if listed else task, seed, kwargs)
        return EpisodePlan(episode, start, draws=f"{config.seed} {start.split} {task} {sample}")

    async def _episode(
        self, plan: EpisodePlan, free: asyncio.Semaphore
    ) -> Sequence[Trajectory | None]:
        """Run one episode, trying again; its conversation, or its roles', or None: all failed."""
        async with free:
            max_tries = self._context.config.rollout.max_tries
            try:
                return await until_played(self._try, plan, max_tries, self._players.check_engines)
            except EpisodeFailed as failed:
                if self._programs is None or is_infrastructure(failed):
                    return [None]
                return [failed_episode(failed.blame)]

    async def _try(self, plan: EpisodePlan) -> list[Trajectory]:
        """Play one episode; the version that is evaluated plays every role."""
        assert self._there is not None
        if self._programs is not None:
            return [join_rows(await self._programs.run(plan))]
        if not self._there.roles:
            return [await self._players.main.run(plan)]
        loops = self._players.of(self._there.roles)
        return list((await play_table(self._environments, plan, loops)).values())
