"""A job's game, its engines and what rolls out its tasks, in the test's own process."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkermq.actors.engine.engine import Engine
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.rollout.agent_loop import EpisodeSampling
from tinkermq.actors.rollout.groups import GroupRunner
from tinkermq.actors.rollout.players import Players
from tinkermq.actors.rollout.recording import TaskSegments
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Segment
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.waiting import eventually


@dataclass
class Playing:
    """What one test plays with."""

    broker: Broker
    scope: JobScope
    config: JobConfig
    hosts: Environments
    engine: Engine
    runner: GroupRunner
    attempts: Iterator[int] = field(default_factory=itertools.count)
    hosting: dict[EnvironmentHost, tuple[asyncio.Event, asyncio.Task[None]]] = field(
        default_factory=dict
    )

    async def start_host(self) -> EnvironmentHost:
        """Start one more environment host."""
        host = EnvironmentHost(self.broker, self.scope, self.config.env, drain_s=0.01)
        stopping = asyncio.Event()
        self.hosting[host] = stopping, asyncio.create_task(host.run(stopping))
        await host.ready.wait()
        return host

    async def stop_host(self, host: EnvironmentHost) -> None:
        """Let a host leave with whatever it holds."""
        stopping, running = self.hosting.pop(host)
        stopping.set()
        await running

    def recorder(self, task: Task, delivery: int) -> TaskSegments:
        """Return what writes a delivery of a task down."""
        every = self.config.generator.segment_tokens
        name = f"holder-{delivery}"
        return TaskSegments(self.broker, self.scope, self.hosts, task, delivery, name, every)

    async def run(self, task: Task, delivery: int = 1) -> Group:
        """Roll a task out as the holder of one of its deliveries, written down."""
        recorder = self.recorder(task, delivery)
        return await self.runner.run_group(task, f"try-{next(self.attempts)}", recorder=recorder)

    async def stored(self, task: Task) -> list[list[Segment]]:
        """Return the segments of the task's episodes."""
        found = list[list[Segment]]()
        for number in range(task.group_size + self.config.rollout.oversample):
            subject = self.scope.segment(task.task, number)
            messages = await get_all(self.broker, self.scope.stream_segment, subject)
            found.append([Segment.from_bytes(message.payload) for message in messages])
        return found

    async def num_stored(self, task: Task) -> int:
        """Count the generated tokens that are written down."""
        return sum(int(one.mask.sum()) for some in await self.stored(task) for one in some)

    async def until_stored(self, task: Task, num: int) -> None:
        """Wait until so many generated tokens are written down."""

        async def there() -> bool:
            return await self.num_stored(task) >= num

        await eventually(there, f"{num} tokens to be written down")


@asynccontextmanager
async def playing(
    broker: Broker, scope: JobScope, folder: Path, game: str, **sections: Any
) -> AsyncIterator[Playing]:
    """Host a game and yield what plays it; `scope` has the stream of segments."""
    rollout = {"max_prompt_tokens": 48, "max_turn_tokens": 24, "max_response_tokens": 192}
    config = JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": f"tests.support.games:{game}"},
            "generator": {"max_requests": 16, "segment_tokens": 4},
            **sections,
            "rollout": {"group_size": 3, "max_turns": 4, **rollout, **sections.get("rollout", {})},
        }
    )
    hosts = Environments(broker, scope, config.env, lambda _: nullcontext())
    chat = ChatTokenizer(load_tokenizer(str(folder)))
    players = await Players.start(config, chat, hosts, EpisodeSampling.of(config.rollout))
    runner = GroupRunner(players, hosts, config, "test")
    made = Playing(broker, scope, config, hosts, players.engines[""], runner)
    await made.start_host()
    try:
        yield made
    finally:
        for host in list(made.hosting):
            await made.stop_host(host)
        await players.close()
