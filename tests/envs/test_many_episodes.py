"""Thousands of episodes in one host: they all end, wait for nobody, and leave nothing behind."""

import asyncio
import os
from typing import Any

import pytest
from broken_games import Waits
from hosting import hosting
from test_remote import START
from test_remote import hosting as serving
from tinkermq.clients.base import unwrap_error_groups
from tinkermq.envs.host import EnvironmentHost
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

from tests.envs.hosting import runner_of
from tests.support.waiting import PATIENCE_S

MANY = [f"e{number}" for number in range(2000)]


async def play(caller, host, episode, first="go"):
    """Play an episode to its end; return its observations."""
    seen = []
    for turn in range(3):
        result = await caller.step(host.name, episode, turn, first if turn == 0 else "go")
        seen.append(result.observation)
    assert result.done
    return seen


async def test_one_slow_and_one_failing_episode_among_two_thousand_delay_no_other(
    broker, scope, tmp_path
):
    gate = tmp_path / "open"
    async with serving(broker, scope, "HeldBack", workers=4) as (host, caller):
        started = await asyncio.gather(*(caller.reset(episode, START) for episode in MANY))
        assert all(one.messages == started[0].messages for one in started)
        assert host.num_running == 2000
        slow = asyncio.create_task(play(caller, host, MANY[0], str(gate)))
        failing = asyncio.create_task(play(caller, host, MANY[1], "raise"))
        others = await asyncio.gather(*(play(caller, host, episode) for episode in MANY[2:]))
        assert all(seen == others[0] for seen in others)  # one seed: each has its own generator
        assert not slow.done()
        gate.touch()
        assert (await slow)[1:] == others[0][1:]
        with pytest.raises(GameError, match="boom at 42"):
            await failing
        assert host.num_running == 0
        assert (host.counts.resets, host.counts.failures) == (2000, 1)


async def test_two_thousand_async_episodes_wait_at_the_same_time(broker, scope):
    Waits.everybody, Waits.waiting = len(MANY), 0
    async with serving(broker, scope, "Waits") as (host, caller):
        await asyncio.gather(*(caller.reset(episode, START) for episode in MANY))
        seen = await asyncio.gather(*(play(caller, host, name, "together") for name in MANY))
        assert all(one == seen[0] for one in seen)
        assert Waits.waiting == len(MANY)
        assert host.num_running == 0


async def test_a_host_holds_no_more_than_its_bound_and_drops_the_games_that_ended(broker, scope):
    async with hosting(broker, scope, max_episodes=50) as client:
        for episode in MANY[:200]:
            await client.reset(episode)
            await client.play_to_the_end(episode)
        assert len(client.host._held) == 50
        assert len(runner_of(client)._episodes) == 0


async def test_an_async_episode_from_reset_to_done(broker, scope):
    for game in ("Waits", "WaitsToReset"):
        async with hosting(broker, scope, f"broken_games:{game}") as client:
            first = await client.reset("a", seed=3)
            second = await client.reset("b", seed=3)
            assert first.messages == second.messages
            answers = [[await client.step(name, turn) for turn in range(3)] for name in "ab"]
            assert answers[0] == answers[1]
            assert answers[0][-1].done


async def test_an_async_game_that_hangs_or_raises_fails_alone(broker, scope):
    async with serving(broker, scope, "Waits", step_timeout_s=2.0) as (host, caller):
        await asyncio.gather(*(caller.reset(episode, START) for episode in MANY[:20]))
        hung = asyncio.create_task(play(caller, host, MANY[0], "hang"))
        raised = asyncio.create_task(play(caller, host, MANY[1], "raise"))
        await asyncio.gather(*(play(caller, host, episode) for episode in MANY[2:20]))
        with pytest.raises(GameError, match=r"Waits hung in step for 2 s"):
            await hung
        with pytest.raises(GameError, match="Waits raised in step: ValueError: boom at 42"):
            await raised


async def test_an_async_game_that_computes_for_long_loses_its_loop_not_its_host(broker, scope):
    limits: dict[str, Any] = {"step_timeout_s": 2.0, "reset_timeout_s": 2.0}
    async with hosting(broker, scope, "broken_games:Waits", **limits) as client:
        await client.reset("bad")
        with pytest.raises(GameError, match=r"held up its event loop for 2 s") as error:
            await client.step("bad", 0, "compute")
        assert "must await" in error.value.hint
        await client.reset("next")
        assert await client.play_to_the_end("next") == 3


@pytest.mark.parametrize(
    "config", [{"game": "Waits", "isolation": "process"}, {"game": "WaitsInProcess"}]
)
async def test_an_async_game_is_refused_a_process(broker, scope, config):
    config = EnvConfig(**{**config, "game": f"broken_games:{config['game']}"})
    with (
        pytest.raises(GameError, match="is async, and isolation is process"),
        unwrap_error_groups(),
    ):
        await EnvironmentHost(broker, scope, config).run(asyncio.Event())


@pytest.mark.parametrize(("config", "own"), [({}, True), ({"isolation": "thread"}, False)])
async def test_a_game_runs_where_its_class_says_unless_the_configuration_does(
    broker, scope, config, own
):
    async with hosting(broker, scope, "broken_games:SaysWhere", workers=1, **config) as client:
        await client.reset("a")
        assert ((await client.step("a", 0)).observation != str(os.getpid())) == own


async def test_a_game_that_wants_more_memory_than_its_process_may_use_fails_alone(broker, scope):
    config = {"isolation": "process", "worker_memory_mb": 100, "workers": 1}
    async with hosting(broker, scope, "broken_games:SaysWhere", **config) as client:
        await client.reset("modest")
        await client.reset("greedy")
        where = (await client.step("modest", 0, "40")).observation
        with pytest.raises(GameError, match="raised in step: MemoryError"):
            await client.step("greedy", 0, "80")
        assert (await client.step("modest", 1)).observation == where


async def test_new_episodes_avoid_a_process_that_is_slow(broker, scope, tmp_path):
    gate = tmp_path / "open"
    config = {"isolation": "process", "workers": 2}
    async with hosting(broker, scope, "broken_games:HeldBack", **config) as client:
        for episode in ("slow", "elsewhere", "beside"):
            await client.reset(episode)
        slow = asyncio.create_task(client.step("slow", 0, str(gate)))
        await asyncio.sleep(0.6)
        for number in range(8):
            await client.reset(f"new{number}")
            assert await client.play_to_the_end(f"new{number}") == 3
        assert not slow.done()
        gate.touch()
        await asyncio.wait_for(slow, PATIENCE_S)
