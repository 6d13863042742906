"""Validation: tasks that name a version, played by engines with exactly that version.

A generator plays them between its training tasks; an evaluator plays only these. Tasks are leased
and redelivered like training tasks. The weights of a version stay loaded while its tasks are queued
or played; episodes of training groups continue with them.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ...broker.tasks import Lease, TaskQueue, ValidationLog
from ...envs.evaluation import score_of
from ...envs.host_client import Environments, Start
from ...schemas.config.job import JobConfig
from ...schemas.metric import EpisodeScore, ValidationResult
from ...schemas.profile import TimeUse
from ...schemas.rollout import Trajectory
from ...schemas.task import Blame, Task
from ...schemas.wire.errors import TinkermqError
from ..engine.engine import Engine
from ..policy.chat import ChatTokenizer
from ..policy.policies import MAIN
from ..runtime import JobContext
from ..weights.follower import WeightFollower
from .agent_loop import EpisodeFailed, EpisodePlan, EpisodeSampling, until_played
from .groups import play_table
from .players import Players
from .program_loop import ProgramLoop

# -- episodes --------------------------------------------------------------------------------------

_INFRASTRUCTURE = ("engine", "broker", "sandbox")
"""Boundaries whose failures are not the model's fault."""
_TIME_KIND = "validation"


def is_infrastructure(failed: EpisodeFailed) -> bool:
    """Whether an episode failed for a reason other than the model; then it is not counted."""
    return failed.blame.boundary in _INFRASTRUCTURE or failed.cause.boundary in _INFRASTRUCTURE


def join_rows(rows: Sequence[Trajectory]) -> Trajectory:
    """Concatenate the rows of an episode; other fields are those of the main row."""
    lengths = np.array([len(item.mask) for item in rows])
    starts = np.repeat(np.cumsum(lengths) - lengths, [len(item.turn_ends) for item in rows])
    joined = {
        name: np.concatenate([getattr(item, name) for item in rows])
        for name in ("token_ids", "mask", "logprobs", "versions", "turn_ends", "rewards")
    }
    joined["turn_ends"] = (joined["turn_ends"] + starts).astype(np.int32)
    return rows[0].model_copy(
        update={
            **joined,
            "finish_reasons": [why for item in rows for why in item.finish_reasons],
            "turn_times": [at for item in rows for at in item.turn_times],
        }
    )


def failed_episode(blame: Blame) -> Trajectory:
    """Return the record of a program's failed episode: without tokens, with reward 0."""
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


class TaskEpisodes:
    """Plays the episodes of evaluation tasks with the engines of a process."""

    def __init__(
        self,
        context: JobContext,
        players: Players,
        environments: Environments,
        programs: ProgramLoop | None = None,
    ) -> None:
        """`programs` plays the episodes of a job with programs instead of a game."""
        self._config = context.config
        self._name = context.name
        self._players = players
        self._environments = environments
        self._programs = programs
        self._roles: list[str] | None = None
        self._free = asyncio.Semaphore(context.config.episodes_at_once)
        self.num_running = 0
        """Episodes that are being played."""

    @classmethod
    async def start(
        cls,
        context: JobContext,
        engines: dict[str, Engine],
        chat: ChatTokenizer,
        environments: Environments,
    ) -> "TaskEpisodes":
        """Play with started engines, with the configuration's sampling for evaluation."""
        config = context.config
        sampling = EpisodeSampling(config.evaluation.temperature, config.evaluation.top_p)
        players = Players.of_engines(engines, config, chat, environments, sampling)
        programs: ProgramLoop | None = None
        if config.agent.runs_programs:
            programs = ProgramLoop(
                context.broker, context.scope, engines[MAIN], chat, environments, config, sampling
            )
            await programs.start()
        return cls(context, players, environments, programs)

    async def close(self) -> None:
        """Stop answering calls of programs."""
        if self._programs is not None:
            await self._programs.close()

    def check_engines(self) -> None:
        """Raise an engine's failure, if one has failed."""
        self._players.check_engines()

    async def play(
        self, task: Task, late: asyncio.Event | None = None
    ) -> list[tuple[int, EpisodeScore | None]]:
        """Play the episodes of a task; return their numbers and scores.

        An episode of a game with roles has a score for each role that had a turn. An episode whose
        tries all failed, or that has not ended when `late` is set, has None. Raises an engine's
        failure.
        """
        if self._roles is None:
            self._roles = (await self._environments.describe()).roles
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._episode(self._plan(task, sample)))
                for sample in range(task.group_size)
            ]
            if late is not None:
                cutting = group.create_task(_cut(running, late))
                await asyncio.wait(running)
                cutting.cancel()
        return [
            (sample, score)
            for sample, episode in enumerate(running)
            for score in ([None] if episode.cancelled() else episode.result())
        ]

    def _plan(self, task: Task, sample: int) -> EpisodePlan:
        split = self._config.evaluation.data
        episode = f"{self._name}-{task.version}-{task.task}-{sample}-{time.time_ns():x}"
        return EpisodePlan(
            episode,
            Start(split, task.sample, task.seed, task.reset_kwargs),
            draws=f"{self._config.seed} {split} {task.task} {sample}",
        )

    async def _episode(self, plan: EpisodePlan) -> list[EpisodeScore | None]:
        """Run one episode, with retries."""
        async with self._free:
            self.num_running += 1
            try:
                played = await until_played(
                    self._try, plan, self._config.rollout.max_tries, self.check_engines
                )
            except EpisodeFailed as failed:
                if self._programs is None or is_infrastructure(failed):
                    return [None]
                played = [failed_episode(failed.blame)]
            finally:
                self.num_running -= 1
        success_reward = self._config.evaluation.success_reward
        return [score_of(trajectory, success_reward) for trajectory in played]

    async def _try(self, plan: EpisodePlan) -> list[Trajectory]:
        """Play one episode; the evaluated version plays every role."""
        if self._programs is not None:
            return [join_rows(await self._programs.run(plan))]
        if not self._roles:
            return [await self._players.main.run(plan)]
        loops = self._players.of(self._roles)
        return list((await play_table(self._environments, plan, loops)).values())


async def _cut(
    running: Sequence[asyncio.Task[list[EpisodeScore | None]]], late: asyncio.Event
) -> None:
    await late.wait()
    for episode in running:
        episode.cancel()


# -- tasks -----------------------------------------------------------------------------------------

_PULL_TIMEOUT_S = 2.0
_COUNT_S = 1.0
_Key: TypeAlias = tuple[int, int]
"""Version and number of a task."""


class Validator:
    """Takes validation tasks and plays them, one version after the other."""

    def __init__(
        self,
        context: JobContext,
        episodes: TaskEpisodes,
        weights: WeightFollower,
        *,
        num_sharing: int = 1,
        time_use: TimeUse | None = None,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`weights` loads versions into the engines that `episodes` plays with.

        `num_sharing` processes share a version's tasks; each holds at most its share at once.
        `time_use` measures the time of validation, `on_room` is called when a task has ended.
        """
        config = context.config
        self._context = context
        self._episodes = episodes
        self._weights = weights
        self._time_use = time_use or TimeUse(_TIME_KIND, rest="tasks")
        self._on_room = on_room
        part = -(-_num_tasks(config) // max(1, num_sharing))
        self._most = max(1, min(part, config.episodes_at_once // config.evaluation.samples))
        self._deadline_s = config.evaluation.deadline_s
        self._keep_s = config.generator.ack_wait_s / 3
        self._queue = TaskQueue(
            context.broker,
            context.scope,
            ack_wait_s=config.generator.ack_wait_s,
            validation=True,
        )
        self._log = ValidationLog(context.broker, context.scope)
        self._held: dict[_Key, Lease] = {}

    @property
    def num_running(self) -> int:
        """Episodes that are being played."""
        return self._episodes.num_running

    async def play_tasks(self) -> None:
        """Take and play tasks until cancelled; then return held tasks to the queue."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep(), name="leases of validation tasks")
                while True:
                    if not self._held:
                        await self._pull(self._most, _PULL_TIMEOUT_S)
                    if self._held:
                        with self._time_use.doing(_TIME_KIND):
                            await self._validate(min(version for version, _ in self._held))
        finally:
            for lease in self._held.values():
                await lease.give_back()
            await self._queue.close()

    async def _pull(self, num: int, timeout_s: float) -> bool:
        """Take up to `num` tasks from the queue; return whether there were any."""
        leases = await self._queue.pull(num, timeout_s)
        for lease in leases:
            assert lease.task.version is not None  # the queue has no others
            key = lease.task.version, lease.task.task
            if key in self._held:
                self._held[key].replace(lease)
            else:
                self._held[key] = lease
        return bool(leases)

    async def _validate(self, version: int) -> None:
        """Play tasks of a version until none is queued."""
        try:
            with self._context.waiting(f"the weights of version {version}"):
                await self._weights.pin(version)
        except TinkermqError as error:
            self._episodes.check_engines()
            for key in self._keys_of(version):
                await self._end(key, self._refused(key, error, time.time()))
            return
        self._context.set_state("working", version=version)
        try:
            await self._play_all(version)
        finally:
            self._weights.unpin()

    async def _play_all(self, version: int) -> None:
        late = asyncio.Event()
        running: dict[_Key, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            counting = group.create_task(self._count_down(late))
            while True:
                for key in self._keys_of(version):
                    if key not in running:
                        running[key] = group.create_task(self._play(key, late))
                is_alone = all(held == version for held, _ in self._held)
                free = self._most - len(self._held)
                if is_alone and free > 0 and await self._pull(free, 0.0):
                    continue
                if not running:
                    break
                await asyncio.wait(running.values(), return_when=asyncio.FIRST_COMPLETED)
                running = {key: task for key, task in running.items() if not task.done()}
            counting.cancel()
        if late.is_set():
            await self._context.event(
                "validation_cut",
                f"the validation of version {version} took longer than evaluation.deadline_s "
                f"({self._deadline_s:g} s): episodes that had not ended count as failed",
                version=version,
            )

    async def _count_down(self, late: asyncio.Event) -> None:
        """Set `late` after the deadline; time without broker or hosts does not count."""
        clock, left_s = self._context.broker.clock, self._deadline_s
        while left_s > 0:
            before = clock()
            await asyncio.sleep(min(left_s, _COUNT_S))
            if not self._context.misses:
                left_s -= clock() - before
        late.set()

    def _keys_of(self, version: int) -> list[_Key]:
        return [key for key in self._held if key[0] == version]

    async def _play(self, key: _Key, late: asyncio.Event) -> None:
        """Play a held task and append its result."""
        task, started = self._held[key].task, time.time()
        if await self._log.contains(*key):
            await self._end(key, None)
            return
        try:
            scores = [score for _, score in await self._episodes.play(task, late)]
        except TinkermqError as error:
            self._episodes.check_engines()
            await self._end(key, self._refused(key, error, started))
            return
        await self._end(key, self._result(key, started, scores))

    def _result(
        self,
        key: _Key,
        started: float,
        scores: list[EpisodeScore | None],
        blame: Blame | None = None,
    ) -> ValidationResult:
        return ValidationResult(
            version=key[0],
            task=key[1],
            episodes=scores,
            blame=blame,
            source=self._context.name,
            started=started,
            finished=time.time(),
        )

    def _refused(self, key: _Key, error: TinkermqError, started: float) -> ValidationResult:
        """Return the result of a task that failed as a whole."""
        blame = Blame(
            boundary=error.boundary or "task",
            code=error.code,
            message=error.message,
            hint=error.hint,
        )
        return self._result(key, started, [], blame)

    async def _end(self, key: _Key, result: ValidationResult | None) -> None:
        """Append a result, if there is one, then acknowledge its task."""
        if result is not None:
            await self._log.append(result)
            self._context.progressed()
        await self._held[key].done()
        del self._held[key]
        self._on_room()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._keep_s)
            for lease in list(self._held.values()):
                await lease.keep()


def _num_tasks(config: JobConfig) -> int:
    """Return how many tasks validate a version, by the configuration."""
    evaluation = config.evaluation
    return config.env.num_val if evaluation.tasks is None else len(evaluation.tasks)
