"""The evaluator: runs the validation set on chosen versions, beside training.

The learner writes down which versions it wants evaluated; their weights stay published until the
result is there. An evaluator that dies takes the same list up again. A job of kind `eval` has no
learner: its evaluator evaluates a checkpoint, or the model of its configuration, once and ends.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...broker.feed import publish_metric
from ...broker.weights.store import TensorBytes
from ...envs.evaluation import task_seed
from ...envs.serving.remote import Environments, Start
from ...schemas.env import DescribeReply
from ...schemas.metric import Metric
from ...schemas.rollout import Trajectory
from ...schemas.wire.errors import ConfigError
from ..generator.agents.program_loop import ProgramLoop
from ..generator.engine.following import load_policies
from ..generator.episodes.agent_loop import EpisodeFailed, EpisodePlan, EpisodeSampling
from ..generator.episodes.chat import make_chat
from ..generator.episodes.players import Players
from ..generator.episodes.tables import play_table
from ..generator.episodes.tries import until_played
from ..models.job_models import check_weights, config_of_checkpoint
from ..models.policies import MAIN
from ..runtime import JobContext
from .requests import Requests
from .validation_metrics import (
    Played,
    episode_columns,
    is_infrastructure,
    validation_numbers,
    whole_episode,
    worth_nothing,
)

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
