"""Sessions of an OpenEnv server are given back, however the start of their episode ends."""

import asyncio
import contextlib
import gc
import itertools

import pytest
from openenv_server import Behaviour, serving
from tinkermq.envs.adapters.openenv_client import (
    Access,
    RemoteOpenEnv,
    SessionPool,
)
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments, Start
from tinkermq.envs.running.episodes import Opening
from tinkermq.envs.running.runners import make_runner
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

from tests.support.cancelling import cancel_everywhere
from tests.support.waiting import PATIENCE_S, until

FEW = 2


@contextlib.asynccontextmanager
async def pool_of(url, wait_s=PATIENCE_S):
    """Yield the sessions of this event loop, and their server as they know it."""
    server = RemoteOpenEnv(url)
    pool = SessionPool([server], Access(), wait_s, lambda _: None)
    try:
        yield pool, server
    finally:
        pool._guard.cancel()


async def test_a_session_cancelled_at_any_await_of_its_start_is_given_back():
    behaviour = Behaviour(max_sessions=FEW)
    with serving(behaviour) as (url,):
        async with pool_of(url) as (pool, server):

            async def play() -> None:
                session, _ = await pool.open({"seed": 1})
                await session.step({"message": "stop"})
                session.close()

            async def given_back() -> None:
                await until(
                    lambda: server.num_open == 0 and behaviour.num_open == 0,
                    "every session to be given back",
                )

            async def play_both() -> None:
                await asyncio.gather(*(play() for _ in range(FEW)))

            assert await cancel_everywhere(play, given_back) > 3
            await asyncio.wait_for(play_both(), PATIENCE_S)


async def test_one_who_waits_for_a_session_and_is_cancelled_takes_none():
    behaviour = Behaviour(max_sessions=1)
    with serving(behaviour) as (url,):
        async with pool_of(url) as (pool, server):
            held, _ = await pool.open({})

            async def wait() -> None:
                session, _ = await pool.open({})
                session.close()

            waiting = [asyncio.create_task(wait()) for _ in range(3)]
            await until(lambda: server.limit == 1, "the server to have said that it is full")
            for task in waiting[:2]:
                task.cancel()
            assert server.num_open == 1
            held.close()
            await asyncio.wait_for(waiting[2], PATIENCE_S)
            await until(lambda: server.num_open == 0 and behaviour.num_open == 0, "the sessions")


async def test_the_session_of_a_game_that_fails_is_given_back_at_once():
    behaviour = Behaviour(max_sessions=1)
    with serving(behaviour) as (url,):
        kwargs = {"url": url, "observation_field": "nowhere"}
        runner = make_runner(EnvConfig(game="openenv", kwargs=kwargs))
        await runner.start()
        gc.disable()  # a session must not wait for it
        try:
            for number in range(3):
                with pytest.raises(GameError, match="no field 'nowhere'"):
                    await runner.reset(Opening(f"{number}", number))
                await until(lambda: behaviour.num_open == 0, "the session to be given back")
        finally:
            gc.enable()
            await runner.stop()


async def test_episodes_given_up_while_they_begin_leave_their_sessions_to_the_next(broker, scope):
    slow = asyncio.Event()
    behaviour = Behaviour(max_sessions=FEW, delay_s=lambda _: 0.0 if slow.is_set() else 0.3)
    numbers = itertools.count()
    with serving(behaviour) as (url,):
        config = EnvConfig(game="openenv", kwargs={"url": url, "wait_s": PATIENCE_S}, lease_s=3600)
        host, stopping = EnvironmentHost(broker, scope, config, drain_s=0.01), asyncio.Event()
        hosting = asyncio.create_task(host.run(stopping))
        environments = Environments(broker, scope, config)

        async def begin() -> str:
            episode = f"e{next(numbers)}"
            started = await environments.reset(episode, Start("train", None, 0))
            environments.close(started.host, episode)
            return episode

        async def given_up(after_s: float) -> None:
            tasks = [asyncio.create_task(begin()) for _ in range(4 * FEW)]
            await asyncio.wait(tasks, timeout=after_s)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

        for after_s in (0.0, 0.1, 0.4):
            await given_up(after_s)
        slow.set()
        began = asyncio.gather(*(begin() for _ in range(4 * FEW)))
        assert len(await asyncio.wait_for(began, PATIENCE_S)) == 4 * FEW
        await until(lambda: not host.num_running and not behaviour.num_open, "the sessions")
        stopping.set()
        await hosting
