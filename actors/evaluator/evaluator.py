"""The evaluator: runs the validation set on chosen versions, beside training.

The learner writes down which versions it wants evaluated; their weights stay published until the
result is there. An evaluator that dies takes the same list up again. A job of kind `eval` has no
learner: its evaluator evaluates a checkpoint, or the model of its configuration, once and ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog

from ...broker.feed import publish_metric
from ...broker.jetstream.kv import Bucket, KeyChanges
from ...broker.weights.payloads import TensorBytes
from ...envs.evaluation import task_seed
from ...envs.host_client import Environments, Start
from ...schemas.env import DescribeReply
from ...schemas.metric import EvalRecord, Metric
from ...schemas.rollout import Trajectory
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
from .validation_metrics import (
    Played,
    episode_columns,
    is_infrastructure,
    validation_numbers,
    whole_episode,
    worth_nothing,
)

# The evaluations that are asked for, done one after the other.

Measure = Callable[[int, Mapping[str, TensorBytes]], Awaitable[dict[str, float]]]
"""Measures a version, of which it is given the weights."""

_LOOK_S = 2.0
"""The longest time without a look for what is asked, or for weights that are not there yet."""
_MAX_BLAME_CHARS = 8192
_log = structlog.get_logger()


class Requests:
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
        await Requests(self._context, self._measure, check).serve()

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
        told: dict[str, Any] = {**values}
        await context.event("evaluation_done", **told)

    def _numbers(self, results: Sequence[Played]) -> dict[str, float]:
        config = self._context.config.evaluation
        if self._there is not None and self._there.roles:
            # An episode has as many conversations as roles that had a turn: each counts by itself.
            config = config.model_copy(update={"samples": 1})
        values = validation_numbers([one.trajectory for one in results], config)
        return {**values, "timing_s/testing": time.perf_counter() - self._started}

    async def _play(self, version: int) -> list[Played]:
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
            Played(task, sample, conversation)
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
                return [worth_nothing(failed.blame)]

    async def _try(self, plan: EpisodePlan) -> list[Trajectory]:
        """Play one episode; the version that is evaluated plays every role."""
        assert self._there is not None
        if self._programs is not None:
            return [whole_episode(await self._programs.run(plan))]
        if not self._there.roles:
            return [await self._players.main.run(plan)]
        loops = self._players.of(self._there.roles)
        return list((await play_table(self._environments, plan, loops)).values())
