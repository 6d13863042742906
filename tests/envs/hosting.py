"""An environment host in the test's process, and a caller of it."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from tinkermq.broker.client.rpc import call
from tinkermq.envs import StepResult
from tinkermq.envs.host import MAX_ACTION_BYTES, EnvironmentHost
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.env import (
    CloseRequest,
    DescribeReply,
    DescribeRequest,
    ResetReply,
    ResetRequest,
    Split,
    StepReply,
    StepRequest,
)
from tinkermq.schemas.wire.errors import GameError
from tinkermq.schemas.wire.message import Empty

from tests.support.variants import variants
from tests.support.waiting import PATIENCE_S, eventually

E = TypeVar("E", bound=BaseException)
COUNTING = "broken_games:CountingGame"
ISOLATIONS = pytest.mark.parametrize("isolation", variants(["thread", "process"], "thread"))


class Client:
    """What a generator does: it asks again for what is not ready, and retries nothing."""

    def __init__(self, broker, scope, host):
        self.broker, self.scope, self.host = broker, scope, host
        self.traceparent = ""
        self.stopping: asyncio.Event
        self.running: asyncio.Task[Any]

    async def _call(self, subject, request, reply_model):
        return await call(
            self.broker,
            subject,
            request,
            reply_model,
            timeout_s=PATIENCE_S,
            waiting_for="the host",
            traceparent=self.traceparent,
        )

    async def describe(self):
        return await self._call(self.scope.env_describe, DescribeRequest(), DescribeReply)

    async def reset_reply(self, episode, sample=None, seed=0, split: Split = "train", **kwargs):
        request = ResetRequest(
            episodes=[episode], split=split, sample=sample, seed=seed, kwargs=kwargs, wait_s=9
        )
        subject = self.scope.env_reset

        async def ready() -> ResetReply | None:
            nonlocal subject
            reply = await self._call(subject, request, ResetReply)
            subject = self.scope.env(reply.host, "reset")
            (opened,) = reply.episodes
            return None if opened.prompt is None and opened.error is None else reply

        return await eventually(ready, f"episode {episode} to begin")

    async def reset(self, episode, *arguments, **kwargs):
        reply = await self.reset_reply(episode, *arguments, **kwargs)
        (opened,) = reply.episodes
        if opened.error is not None:
            raise opened.error.to_error()
        assert opened.prompt is not None
        return SimpleNamespace(
            host=reply.host, lease_s=reply.lease_s, messages=reply.prompts[opened.prompt]
        )

    async def finish(self, episode, turn):
        return await self.step(episode, turn, "", final=True)

    async def step(self, episode, turn, action="go", host=None, final=False):
        reply = await self.step_reply([episode], turn, [action], host=host, final=final)
        for failed in reply.failed:
            raise failed.error.to_error()
        (observation,) = reply.observations
        assert observation is not None
        return StepResult(observation, reply.rewards[0], reply.done[0], reply.infos[0])

    async def step_reply(self, episodes, turn, actions, host=None, final=False):
        """Play a turn of several episodes; return the reply in which all are ready."""
        subject = self.scope.env(host or self.host.name, "step")
        num = len(episodes)
        request = StepRequest(
            episodes=episodes, turns=[turn] * num, actions=actions, final=[final] * num, wait_s=9
        )

        async def ready() -> StepReply | None:
            reply = await self._call(subject, request, StepReply)
            num_ready = sum(one is not None for one in reply.observations) + len(reply.failed)
            return reply if num_ready == num else None

        return await eventually(ready, f"turn {turn} of {episodes}")

    async def close(self, episode):
        subject = self.scope.env(self.host.name, "close")
        return await self._call(subject, CloseRequest(episode=episode), Empty)

    async def play_to_the_end(self, episode):
        turn = 0
        while not (await self.step(episode, turn)).done:
            turn += 1
        return turn + 1


@contextlib.asynccontextmanager
async def hosting(
    broker,
    scope,
    game=COUNTING,
    *,
    seed: Any = 0,
    judge_job=None,
    max_episodes: Any = 100,
    max_action_bytes: int = MAX_ACTION_BYTES,
    drain_s: float = 5,
    **config: Any,
):
    host = EnvironmentHost(
        broker,
        scope,
        EnvConfig(game=game, **{"reset_timeout_s": PATIENCE_S, **config}),
        seed=seed,
        judge_job=judge_job,
        max_episodes=max_episodes,
        max_action_bytes=max_action_bytes,
        drain_s=drain_s,
    )
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(host.run(stopping))
        ready = tasks.create_task(host.ready.wait())
        await asyncio.wait(
            {running, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S
        )
        ready.cancel()
        client = Client(broker, scope, host)
        client.stopping, client.running = stopping, running
        if host.ready.is_set():
            try:
                yield client
            finally:
                host._drain_s = min(host._drain_s, 0.01 if not stopping.is_set() else drain_s)
                stopping.set()
        else:
            await running


def runner_of(client: Client) -> Any:
    """Return what runs the games of a host, insides and all."""
    return client.host._runner


async def error_of(awaitable, kind: type[E] = GameError) -> E:
    with pytest.raises(kind) as error:
        await awaitable
    assert type(error.value) is kind
    return error.value
