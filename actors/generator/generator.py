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
from typing import TYPE_CHECKING

import structlog

from ...broker.rollouts import RolloutLog
from ...broker.tasks import Lease, TaskQueue
from ...envs.remote import Environments
from ...schemas.config import JobConfig
from ...schemas.job import JobRecord
from ...schemas.lora import LoraConfig
from ..job_weights import open_weights
from ..lora import config_of, is_adapter
from ..model_folder import (
    check_tokenizer,
    load_model_config,
    load_stop_token_ids,
    load_tokenizer,
)
from ..runtime import JobContext, settle_memory
from .agent_loop import AgentLoop, EpisodeSampling
from .chat import ChatTokenizer
from .engine import Engine, EngineStats
from .following import WeightFollower
from .groups import GroupFailed, GroupRunner, append_given_up
from .transformers_engine import TransformersEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PULL_TIMEOUT_S = 2.0
_DRAIN_S = 10.0
_STATS_S = 1.0
_log = structlog.get_logger()


async def start_engine(
    config: JobConfig, version: int = 0, base: "PreTrainedModel | None" = None
) -> Engine:
    """Start the engine that the configuration asks for; its weights are those of `version`.

    `base` is a model in memory whose weights the adapter of the configuration is put beside.
    """
    return await TransformersEngine.start(
        config.model.path,
        max_slots=config.generator.max_requests,
        max_context=config.generator.max_context or config.rollout.max_tokens,
        dtype=config.generator.dtype,
        trust_remote_code=config.model.trust_remote_code,
        lora=config.lora,
        base=base,
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
    return config_of_folder(config, record.fork_dir) if record.fork_dir else config


def config_of_folder(config: JobConfig, folder: str) -> JobConfig:
    """Return the configuration with a folder as its model; an adapter is put beside its base."""
    lora = config_of(folder) if is_adapter(folder) else LoraConfig()
    return config.with_model(folder).model_copy(update={"lora": lora})


def make_chat(config: JobConfig) -> ChatTokenizer:
    """Load the tokenizer and prove that its chat template only appends."""
    chat = load_chat(config)
    chat.check_template(multi_turn=config.rollout.max_turns > 1)
    return chat


def load_chat(config: JobConfig) -> ChatTokenizer:
    """Load the tokenizer, which must belong to the model."""
    model = config.model
    trust = model.trust_remote_code
    tokenizer = load_tokenizer(model.tokenizer or model.path, trust_remote_code=trust)
    check_tokenizer(tokenizer, load_model_config(model.path, trust_remote_code=trust), model.path)
    return ChatTokenizer(
        tokenizer, config.model.template_kwargs, load_stop_token_ids(config.model.path)
    )


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
            won = await self._log.append(await self._runner.run(task, attempt))
        except GroupFailed as failure:
            won = await append_given_up(self._context, self._log, failure)
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
