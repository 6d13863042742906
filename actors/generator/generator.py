"""The generator: pulls tasks, runs their episodes, appends groups, and follows the weights.

A task is acknowledged only when the log has its group, or that of another generator. Many groups
run concurrently, bounded by the number of episodes, so that a slow environment does not idle the
engine. Validation tasks go first. When stopped, it pulls no more tasks, finishes running ones
within a grace time, and returns the rest to the queue.
"""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import structlog

from ...broker.client.rpc import call
from ...broker.partial_rollouts import Fenced
from ...broker.rollouts import RolloutLog
from ...broker.tasks import Lease, TaskQueue
from ...envs.host_client import Environments
from ...schemas.config.job import JobConfig
from ...schemas.config.sections import SelfPlayConfig
from ...schemas.control import GpuTurn, GpuTurnRequest
from ...schemas.profile import TimeUse
from ...schemas.rollout import Group
from ...schemas.wire.errors import BrokerError, DeadlineError, NotFoundError
from ...schemas.wire.trace import GENERATOR_KINDS
from ..engine.engine import Engine, GroupLimit, bytes_of_engines, report_engine
from ..policy.chat import make_chat
from ..policy.policies import MAIN, check_weights, opponent_versions
from ..rollout.agent_loop import EpisodeSampling
from ..rollout.call_log import TaskCalls
from ..rollout.groups import GroupFailed, GroupRunner, append_given_up, append_group
from ..rollout.players import Players
from ..rollout.program_loop import ProgramLoop
from ..rollout.recording import TaskRecorder, TaskSegments
from ..rollout.teachers import AskedTeachers, TeacherContext
from ..rollout.validation import TaskEpisodes, Validator
from ..runtime import JobContext, settle_memory
from ..weights.follower import WeightFollower, fetch_version
from ..weights.job_weights import open_weights
from ..weights.store import WeightStore

# Opponents from earlier versions have engines of their own, one per policy. Their version changes
# as the policy advances. It is swapped in between two decode steps, and running episodes continue
# with it.

_log = structlog.get_logger()


class OpponentPoolFollower:
    """Keeps engines at some earlier version."""

    def __init__(
        self,
        store: WeightStore,
        engines: Mapping[str, Engine],
        policy: WeightFollower,
        config: SelfPlayConfig,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._engines = engines
        self._policy = policy
        self._config = config
        self._rng = rng
        self._version = -1

    async def run(self) -> None:
        """Draw and load versions of the pool until cancelled."""
        while True:
            await self._policy.wait_for(0)
            drawn_at = self._policy.version
            await self._draw(drawn_at)
            await self._policy.wait_for(drawn_at + self._config.redraw_every)

    async def _draw(self, version: int) -> None:
        """Load a random version that still exists; keep the old one if none does."""
        candidates = opponent_versions(self._config, version)
        self._rng.shuffle(candidates)
        for chosen in candidates:
            if chosen == self._version or await self._load(chosen):
                return
        _log.warning("pool_is_empty", version=version)

    async def _load(self, version: int) -> bool:
        """Load a version; return False if it was removed meanwhile."""
        manifest = await self._store.manifest(version)
        if manifest is None:
            return False
        try:
            load = await fetch_version(self._store, self._engines, manifest)
            await self._policy.until_room()
            await load("recompute")
        except NotFoundError:
            return False
        self._version = version
        return True


_PULL_TIMEOUT_S = 2.0
_DRAIN_S = 10.0
_STATS_S = 1.0


async def run_generator(context: JobContext) -> None:
    """Run a generator until it is stopped."""
    config = context.config
    await asyncio.to_thread(check_weights, context.record, config)
    chat = make_chat(config).at(context.record.created)
    if config.rollout.max_turns > 1 and chat.keeps_reasoning:
        await context.event(
            "chat_template",
            "the model's chat template leaves the reasoning of earlier turns out; episodes keep it",
        )
    store = open_weights(context)
    environments = Environments(context.broker, context.scope, config.env, context.missing)
    sampling = EpisodeSampling.of(config.rollout)
    *kinds, rest = GENERATOR_KINDS
    time_use = TimeUse(*kinds, rest=rest)
    reads = TeacherContext.of(config.algorithm, chat)
    for_teacher = None if reads is None else reads.prompt
    turns = LearnerTurns(context) if context.record.is_colocated else None
    turn = None if turns is None else await context.unless_stopping(turns.begin(), None)
    if turn is not None:
        config = with_share(config, turn)
    elif turns is not None:
        return  # stopped before it had the GPU
    players = await Players.start(config, chat, environments, sampling, time_use, for_teacher)
    teachers = AskedTeachers(context, chat)
    follower = WeightFollower(store, players.engines, config.generator.kv_on_swap)
    background: list[Coroutine[Any, Any, None]] = [follower.follow_versions()]
    past: Players | None = None
    if config.self_play.past_share > 0:
        past = await Players.start(config, chat, environments, sampling, time_use)
        rng = random.Random(f"{config.seed} {context.name}")  # noqa: S311 - opponents, not secrets
        drawing = OpponentPoolFollower(store, past.engines, follower, config.self_play, rng)
        background.append(drawing.run())
    if turns is not None and turn is not None and turn.sleeps:
        engines = [*players.engines.values(), *(past.engines.values() if past else ())]
        background.append(turns.follow(engines, follower))
    engine = players.engines[MAIN]
    programs: ProgramLoop | None = None
    if config.agent.runs_programs:
        programs = ProgramLoop(
            context.broker,
            context.scope,
            engine,
            chat,
            environments,
            config,
            sampling,
            time_use,
            context.event,
        )
        await programs.start()
    validation: TaskEpisodes | None = None
    if config.validates and not config.has_evaluator:
        validation = await TaskEpisodes.start(context, players.engines, chat, environments)
    play_alone = None if programs is None else programs.run
    runner = GroupRunner(players, environments, config, context.name, past, play_alone)
    generator = Generator(
        context, engine, follower, runner, environments, background, time_use, teachers, validation
    )
    context.own_bytes = partial(bytes_of_engines, players.engines.values())
    await context.serve_control()
    try:
        await generator.run()
    finally:
        if programs is not None:
            await programs.close()
        if validation is not None:
            await validation.close()
        await teachers.close()
        await players.close()
        if past is not None:
            await past.close()


class Generator:
    """Turns tasks into groups of the rollout log."""

    def __init__(
        self,
        context: JobContext,
        engine: Engine,
        follower: WeightFollower,
        runner: GroupRunner,
        environments: Environments,
        background: Sequence[Coroutine[Any, Any, None]],
        time_use: TimeUse,
        teachers: AskedTeachers,
        validation: TaskEpisodes | None = None,
    ) -> None:
        """`background` runs beside the episodes, for example to follow the weights; `validation`
        plays validation tasks, if the job's generators do."""
        self._time_use = time_use
        self._paused_s = 0.0
        self._background = background
        self._context = context
        self._engine = engine
        self._follower = follower
        self._runner = runner
        self._teachers = teachers
        self._environments = environments
        config = context.config
        self._queue = TaskQueue(
            context.broker, context.scope, ack_wait_s=config.generator.ack_wait_s
        )
        self._log = RolloutLog(context.broker, context.scope)
        rollout, baseline = config.rollout, int(config.algorithm.advantage == "remax")
        self._group_episodes = rollout.group_size + rollout.oversample + baseline
        self._max_groups = max(1, config.episodes_at_once // self._group_episodes)
        self._adapted: GroupLimit | None = None
        if config.generator.adapt_episodes:
            group_tokens = self._group_episodes * rollout.max_tokens
            self._adapted = GroupLimit(group_tokens, self._max_groups, engine.stats())
        self._keep_s = config.generator.ack_wait_s / 3
        self._process = secrets.token_hex(4)
        self._held: dict[int, Lease] = {}
        self._handling: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._num_groups = 0
        self._validator: Validator | None = None
        if validation is not None:
            self._validator = Validator(
                context,
                validation,
                follower,
                num_sharing=config.generator.count,
                time_use=time_use,
                on_room=self._freed.set,
            )

    async def run(self) -> None:
        """Pull and roll out until `stopping` is set."""
        context = self._context
        async with asyncio.TaskGroup() as background:
            helpers = [
                *(background.create_task(work) for work in self._background),
                background.create_task(self._report_engine(), name="statistics"),
            ]
            with context.waiting("the learner's first weights"):
                await context.unless_stopping(self._follower.wait_for(0), None)
            settle_memory()
            self._time_use.take()
            context.set_state("working", version=self._follower.version)
            await context.event("generator_ready", version=self._follower.version)
            if self._validator is not None:
                validating = self._validator.play_tasks()
                helpers.append(background.create_task(validating, name="validation"))
            async with asyncio.TaskGroup() as groups:
                await self._pull_until_stopping(groups)
                await self._drain()
            await self._queue.close()
            for helper in helpers:
                helper.cancel()

    async def _pull_until_stopping(self, groups: asyncio.TaskGroup) -> None:
        context = self._context
        while not context.stopping.is_set():
            if self._follower.is_back:  # others can start these groups now
                await context.unless_stopping(self._follower.caught_up(), None)
                continue
            free = self._num_free
            if free < 1:
                self._freed.clear()
                await context.unless_stopping(self._freed.wait(), None)
                continue
            pulling = self._queue.pull(free, _PULL_TIMEOUT_S)
            for lease in await context.unless_stopping(pulling, stopped=list[Lease]()):
                if (held := self._held.get(lease.task.task)) is not None:
                    held.replace(lease)
                    continue
                self._held[lease.task.task] = lease
                handling = groups.create_task(self._handle(lease), name=f"task {lease.task.task}")
                self._handling.add(handling)
                handling.add_done_callback(self._handling.discard)

    @property
    def _num_free(self) -> int:
        """Groups that may be pulled; validation episodes count, too."""
        validating = 0 if self._validator is None else self._validator.num_running
        most = self._max_groups if self._adapted is None else self._adapted.limit
        return most - len(self._held) - -(-validating // self._group_episodes)

    async def _handle(self, lease: Lease) -> None:
        """Roll one task out and append its group, renewing the lease meanwhile."""
        number = lease.task.task
        keeper = asyncio.create_task(self._keep(lease), name=f"lease {number}")
        recorder = self._recorder(lease)
        try:
            with self._time_use.doing("other"):
                if not await self._log.contains(number):
                    await self._roll_out(lease, recorder)
                await recorder.end()
                await lease.done()
        except Fenced as fenced:  # another holder has the lease: neither ack nor return it
            await self._context.event("task_fenced", fenced.message, task=number)
        except asyncio.CancelledError:
            await lease.give_back()
            raise
        finally:
            keeper.cancel()
            self._adapt(ended=True)
            if self._held.get(number) is lease:
                del self._held[number]
            self._freed.set()

    @asynccontextmanager
    async def _weights_for(self, lease: Lease) -> AsyncIterator[float]:
        """Keep weights as new as the task requires in the block; yield the seconds of waiting."""
        version, started = lease.task.min_version, time.perf_counter()
        async with AsyncExitStack() as stack:
            waiting = self._context.waiting(f"the learner to publish version {version}")
            with waiting, self._time_use.doing("weights"):
                await stack.enter_async_context(self._follower.using(version))
            yield time.perf_counter() - started

    def _attempt(self, lease: Lease) -> str:
        return f"{self._context.name}-{self._process}-{lease.num_delivered}"

    def _recorder(self, lease: Lease) -> TaskRecorder:
        """Return the recorder of the task's episodes, which stores them if configured."""
        context, config = self._context, self._context.config
        every, attempt = config.generator.segment_tokens, self._attempt(lease)
        of = context.broker, context.scope, self._environments, lease.task, lease.num_delivered
        if config.agent.runs_programs:
            return TaskCalls(*of, attempt)
        seeded = config.generator.engine != "vllm"
        return TaskSegments(*of, attempt, every, seeded) if every else TaskRecorder()

    async def _roll_out(self, lease: Lease, recorder: TaskRecorder) -> None:
        task, attempt = lease.task, self._attempt(lease)
        try:
            async with self._weights_for(lease) as weights_s:
                group = await self._runner.run_group(task, attempt, lease.traceparent, recorder)
            times = {"weights_s": weights_s, "time_use": self._take_time_use()}
            group = await self._teachers.teach(group)
            timed = group.with_shared_images().model_copy(update=times)
            won = await append_group(self._log, timed, self._context.name, lease.traceparent)
            if won and group.tokens_continued:
                await self._report_continued(group)
        except GroupFailed as failure:
            won = await append_given_up(self._context, self._log, failure)
        self._num_groups += int(won)
        self._context.progressed()
        if not won:
            reason = f"task {task.task}: the log already has another generator's group"
            await self._context.event("task_fenced", reason, task=task.task)

    async def _report_continued(self, group: Group) -> None:
        await self._context.event(
            "task_continued",
            f"task {group.task.task}: {group.tokens_continued} tokens were recorded already",
            task=group.task.task,
            tokens=group.tokens_continued,
        )

    def _take_time_use(self) -> dict[str, float]:
        """Return the time since the last group by activity, with weight swaps apart."""
        paused_s = self._engine.stats().paused_s
        self._time_use.reassign("generate", "swap", paused_s - self._paused_s)
        self._paused_s = paused_s
        return self._time_use.take()

    async def _keep(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(self._keep_s)
            await lease.keep()

    async def _drain(self) -> None:
        """Finish running tasks within the grace time, return the rest."""
        if self._handling:
            await asyncio.wait(self._handling, timeout=_DRAIN_S)
        for handling in self._handling:
            handling.cancel()

    def _adapt(self, *, ended: bool = False) -> None:
        """Adapt the number of groups to the engine's cache."""
        if self._adapted is not None:
            self._adapted.adapt(len(self._held), self._engine.stats(), ended=ended)
            self._context.numbers["groups_limit"] = self._adapted.limit

    async def _report_engine(self) -> None:
        """Put the engine's figures into the heartbeat."""
        context = self._context
        idle_before, time_before = 0.0, time.perf_counter()
        while True:
            await asyncio.sleep(_STATS_S)
            self._adapt()
            stats = self._engine.stats()
            idle_s, now = self._time_use.totals()["tasks"], time.perf_counter()
            report_engine(
                context,
                stats,
                groups_held=len(self._held),
                groups_done=self._num_groups,
                idle_share=min(1.0, (idle_s - idle_before) / (now - time_before)),
            )
            idle_before, time_before = idle_s, now


# -- a GPU that is shared with the learner ---------------------------------------------------------
# The engines sleep when the learner asks for the GPU, see `actors/learner/memory.py`. While the
# learner is unavailable they stay as they are.

_ANSWER_S = 10.0
_PAUSE_S = 0.2
_VERSION_S = 2.0
_NONE = -1
"""A number that no turn has."""


class LearnerTurns:
    """Turns on the GPU that a generator shares with its learner."""

    def __init__(self, context: JobContext) -> None:
        """Prepare; `begin` sends the first request."""
        self._context = context
        self._seen = _NONE
        self._asleep = True
        self._num_sleeps = 0

    async def begin(self) -> GpuTurn:
        """Wait until the engines may start, and return the turn.

        By then the learner has loaded its models.
        """
        with self._context.waiting("the learner to release the GPU"):
            while True:
                turn = await self._request_turn()
                if not turn.asleep:
                    self._asleep = False
                    return turn

    async def follow(self, engines: Iterable[Engine], follower: WeightFollower) -> None:
        """Let the engines sleep and wake as the learner asks, until cancelled.

        They wake with the version that the learner has trained meanwhile, or with a pinned version.
        No weights are loaded while it trains.
        """
        engines = list(engines)
        while True:
            turn = await self._request_turn()
            if turn.asleep:
                follower.hold()
            else:
                follower.release()
            if turn.asleep and not self._asleep:
                for engine in engines:
                    # the version that the learner trains now arrives before the engine wakes
                    await engine.sleep(keep_weights=not follower.may_give_up(engine))
                self._asleep = True
                self._num_sleeps += 1
                self._context.numbers["sleeps"] = self._num_sleeps
                self._context.set_state("sleeping")
            elif not turn.asleep and self._asleep:
                if not follower.has_weights and turn.version < follower.version:
                    continue  # a restarted learner is still repeating earlier steps
                if not await _arrives(follower, turn.version) or not await follower.regain():
                    await asyncio.sleep(_PAUSE_S)
                    self._seen = _NONE  # the next request is answered at once
                    continue
                for engine in engines:
                    await engine.wake()
                self._asleep = False
                self._context.set_state("working")

    async def _request_turn(self) -> GpuTurn:
        """Request the turn; the answer comes when it changes, or after two seconds."""
        context = self._context
        while True:
            request = GpuTurnRequest(asleep=self._asleep, seen=self._seen)
            try:
                turn = await call(
                    context.broker,
                    context.scope.gpu_turn("learner"),
                    request,
                    GpuTurn,
                    timeout_s=_ANSWER_S,
                    waiting_for="the learner on this GPU",
                    idempotent=True,
                )
            except (NotFoundError, DeadlineError, BrokerError):
                await asyncio.sleep(_PAUSE_S)  # the learner is being restarted
                continue
            self._seen = turn.number
            return turn


async def _arrives(follower: WeightFollower, version: int) -> bool:
    """Wait shortly for a version; return False if it has not arrived."""
    try:
        async with asyncio.timeout(_VERSION_S):
            await follower.may_wake(version)
    except TimeoutError:
        return False
    return True


def with_share(config: JobConfig, turn: GpuTurn) -> JobConfig:
    """Return the configuration of engines that share a GPU, by the learner's turn."""
    changes = {
        "memory_share": turn.memory_share,
        "sleep": "always" if turn.sleeps else "never",
    }
    return config.model_copy(update={"generator": config.generator.model_copy(update=changes)})
