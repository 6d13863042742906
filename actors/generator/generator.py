"""The generator: pulls tasks, runs their episodes, appends groups, follows the weights.

A task is acked only after its group is confirmed in the log, or somebody else's is found there.
Many groups run at once, so that a slow environment never idles the engine: the bound is the
number of episodes. When it is told to stop it pulls no more, finishes what it can within a grace
time, and hands the rest back.
"""

import asyncio
import contextlib
import secrets
import time

import structlog

from ...broker.feed import publish_dead
from ...broker.rollouts import RolloutLog
from ...broker.tasks import Lease, TaskQueue
from ...envs.remote import Environments
from ...schemas.config import JobConfig
from ...schemas.job import JobRecord
from ...schemas.task import DeadLetter
from ..job_weights import open_weights
from ..model_folder import (
    check_tokenizer,
    load_model_config,
    load_stop_token_ids,
    load_tokenizer,
)
from ..runtime import JobContext, settle_memory
from ..vision import load_image_reader
from .agent_loop import AgentLoop, EpisodeSampling
from .chat import ChatTokenizer
from .engine import Engine, EngineStats
from .following import WeightFollower
from .groups import GroupFailed, GroupRunner
from .transformers_engine import TransformersEngine

_PULL_TIMEOUT_S = 2.0
_DRAIN_S = 10.0
_STATS_S = 1.0
_log = structlog.get_logger()


async def start_engine(config: JobConfig, version: int = 0) -> Engine:
    """Start the engine that the configuration asks for; its weights are those of `version`."""
    return await TransformersEngine.start(
        config.model.path,
        max_slots=config.generator.max_requests,
        max_context=config.generator.max_context or config.rollout.max_tokens,
        dtype=config.generator.dtype,
        trust_remote_code=config.model.trust_remote_code,
        version=version,
        max_waiting=4 * config.generator.max_episodes,
    )


def tell_engine(context: JobContext, stats: EngineStats, **more: float) -> None:
    """Put the engine's figures, and more, into the heartbeat."""
    context.presence = context.presence.model_copy(update={"version": stats.version})
    context.numbers.update(
        tokens_per_s=stats.tokens_per_s,
        busy_share=stats.busy_share,
        running=stats.running,
        waiting=stats.waiting,
        last_pause_s=stats.last_pause_s,
        **more,
    )


def config_of_checkpoint(record: JobRecord, config: JobConfig) -> JobConfig:
    """Return the configuration with the checkpoint that a job starts from, if any, as its model."""
    if not record.fork_dir:
        return config
    model = config.model.model_copy(update={"path": record.fork_dir, "tokenizer": None})
    return config.model_copy(update={"model": model})


def make_chat(config: JobConfig) -> ChatTokenizer:
    """Load the tokenizer and prove that its chat template only appends."""
    model = config.model
    trust = model.trust_remote_code
    tokenizer = load_tokenizer(model.tokenizer or model.path, trust_remote_code=trust)
    check_tokenizer(tokenizer, load_model_config(model.path, trust_remote_code=trust), model.path)
    chat = ChatTokenizer(
        tokenizer,
        config.model.template_kwargs,
        load_stop_token_ids(config.model.path),
        load_image_reader(config.model.path, trust_remote_code=trust),
    )
    chat.check_template(multi_turn=config.rollout.max_turns > 1)
    return chat


async def run_generator(context: JobContext) -> None:
    """Run a generator until it is told to stop."""
    config = context.config
    chat = make_chat(config)
    engine = await start_engine(config)
    store = open_weights(context)
    follower = WeightFollower(store, engine, config.generator.kv_on_swap)
    environments = Environments(context.broker, context.scope, config.env, context.waiting)
    loop = AgentLoop(engine, chat, environments, config.rollout, EpisodeSampling.of(config.rollout))
    generator = Generator(context, engine, follower, GroupRunner(loop, config, context.name))
    await context.serve_control()
    try:
        await generator.run()
    finally:
        await engine.close()


class Generator:
    """Turns tasks into groups of the rollout log."""

    def __init__(
        self,
        context: JobContext,
        engine: Engine,
        follower: WeightFollower,
        runner: GroupRunner,
    ) -> None:
        self._context = context
        self._engine = engine
        self._follower = follower
        self._runner = runner
        config = context.config
        self._queue = TaskQueue(
            context.broker, context.scope, ack_wait_s=config.generator.ack_wait_s
        )
        self._log = RolloutLog(context.broker, context.scope)
        self._group_size = config.rollout.group_size + int(config.algorithm.advantage == "remax")
        self._max_groups = max(1, config.generator.max_episodes // self._group_size)
        self._keep_s = config.generator.ack_wait_s / 3
        self._process = secrets.token_hex(4)
        self._held: dict[int, Lease] = {}
        self._freed = asyncio.Event()
        self._idle_s = 0.0
        self._num_groups = 0

    async def run(self) -> None:
        """Pull and roll out until `stopping` is set."""
        context = self._context
        async with asyncio.TaskGroup() as background:
            helpers = [
                background.create_task(self._follower.run(), name="weight follower"),
                background.create_task(self._tell(), name="statistics"),
            ]
            with context.waiting("the learner's first weights"):
                await context.unless_stopping(self._follower.wait_for(0))
            settle_memory()
            context.set_state("working", version=self._follower.version)
            await context.event("generator_ready", version=self._follower.version)
            async with asyncio.TaskGroup() as groups:
                await self._pull_until_stopping(groups)
                await self._drain()
            await self._queue.close()
            for helper in helpers:
                helper.cancel()

    async def _pull_until_stopping(self, groups: asyncio.TaskGroup) -> None:
        context = self._context
        while not context.stopping.is_set():
            free = self._max_groups - len(self._held)
            if free < 1:
                self._freed.clear()
                await context.unless_stopping(self._freed.wait())
                continue
            started = time.perf_counter()
            leases = await context.unless_stopping(self._queue.pull(free, _PULL_TIMEOUT_S))
            if not self._held:
                self._idle_s += time.perf_counter() - started
            for lease in leases or []:
                self._held[lease.task.task] = lease
                groups.create_task(self._handle(lease), name=f"task {lease.task.task}")

    async def _handle(self, lease: Lease) -> None:
        """Roll one task out and append its group, renewing the lease meanwhile."""
        number = lease.task.task
        keeper = asyncio.create_task(self._keep(lease), name=f"lease {number}")
        try:
            if not await self._log.contains(number):
                await self._wait_for_weights(lease.task.min_version)
                await self._roll_out(lease)
            await lease.done()
        except asyncio.CancelledError:
            await lease.give_back()
            raise
        finally:
            keeper.cancel()
            if self._held.get(number) is lease:
                del self._held[number]
            self._freed.set()

    async def _wait_for_weights(self, version: int) -> None:
        if self._follower.version < version:
            with self._context.waiting(f"the learner to publish version {version}"):
                await self._follower.wait_for(version)

    async def _roll_out(self, lease: Lease) -> None:
        task = lease.task
        attempt = f"{self._context.name}-{self._process}-{lease.num_delivered}"
        try:
            group = await self._runner.run(task, attempt)
        except GroupFailed as failure:
            group = failure.group
            letter = DeadLetter(
                task=task,
                blame=failure.blame,
                num_attempts=max(1, failure.num_attempts),
                source=self._context.name,
                time=time.time(),
            )
            await publish_dead(self._context.broker, self._context.scope, letter)
            await self._context.event(
                "task_given_up",
                f"task {task.task}: {failure.blame.message}",
                task=task.task,
                boundary=failure.blame.boundary,
            )
        won = await self._log.append(group.with_shared_images())
        self._num_groups += int(won)
        if not won:
            _log.info("group_was_there", task=task.task)

    async def _keep(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(self._keep_s)
            await lease.keep()

    async def _drain(self) -> None:
        """Finish what runs within the grace time, hand back the rest."""
        deadline = time.monotonic() + _DRAIN_S
        while self._held and time.monotonic() < deadline:
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), deadline - time.monotonic())
        for task in asyncio.all_tasks():
            if task.get_name().startswith("task "):
                task.cancel()

    async def _tell(self) -> None:
        """Put the engine's figures into the heartbeat."""
        context = self._context
        idle_before, time_before = 0.0, time.perf_counter()
        while True:
            await asyncio.sleep(_STATS_S)
            stats = self._engine.stats()
            now = time.perf_counter()
            tell_engine(
                context,
                stats,
                groups_held=len(self._held),
                groups_done=self._num_groups,
                idle_share=min(1.0, (self._idle_s - idle_before) / (now - time_before)),
            )
            idle_before, time_before = self._idle_s, now
