"""A step that takes its game too long ends the episode as `env.on_step_timeout` says."""

import asyncio

import pytest
from hosting import ISOLATIONS
from test_remote import START, hosting
from test_seats import act, take
from tinkermq.envs.running.episodes import TimedOut
from tinkermq.schemas.wire.errors import GameError

HUNG_S = 2.0
"""What goes on beside a game that hangs takes less, on a slow machine, too."""
PENALTY = {"on_step_timeout": "penalty", "step_timeout_reward": -2.5, "step_timeout_s": HUNG_S}
MASK = {"on_step_timeout": "mask", "step_timeout_s": HUNG_S}


@pytest.mark.parametrize("isolation", [None, "thread", "process"])
async def test_an_action_that_hangs_is_rewarded_and_ends_its_episode(broker, scope, isolation):
    told = PENALTY | {"isolation": isolation, "workers": 2}
    async with hosting(broker, scope, "CountingGame", **told) as (served, caller):
        bad = await caller.reset("bad", START)
        good = await caller.reset("good", START)
        hung = asyncio.create_task(caller.step(bad.host, "bad", 0, "hang"))
        assert (await caller.step(good.host, "good", 0, "go")).reward >= 0
        ended = await hung
        assert isinstance(ended, TimedOut)
        assert (ended.reward, ended.done, ended.observation) == (-2.5, True, "")
        again = await caller.step(bad.host, "bad", 0, "hang")  # the same action, asked twice
        assert isinstance(again, TimedOut)
        assert again.reward == -2.5
        assert served.counts.failures == 0
        if isolation != "thread":  # a thread could only be given up
            assert not isinstance(await caller.step(good.host, "good", 1, "go"), TimedOut)


async def test_an_async_game_that_hangs_is_ended_too(broker, scope):
    async with hosting(broker, scope, "Waits", **MASK) as (_, caller):
        bad = await caller.reset("bad", START)
        ended = await caller.step(bad.host, "bad", 0, "hang")
        assert isinstance(ended, TimedOut)
        assert (ended.reward, ended.done) == (0.0, True)


@ISOLATIONS
async def test_by_default_the_episode_has_failed(broker, scope, isolation):
    told = {"isolation": isolation, "step_timeout_s": HUNG_S}
    async with hosting(broker, scope, "CountingGame", **told) as (_, caller):
        bad = await caller.reset("bad", START)
        with pytest.raises(GameError, match="hung in step"):
            await caller.step(bad.host, "bad", 0, "hang")


async def test_a_reset_that_hangs_is_nobodys_action(broker, scope):
    told = PENALTY | {"reset_timeout_s": HUNG_S}
    async with hosting(broker, scope, "HangsInReset", **told) as (_, caller):
        with pytest.raises(GameError, match="hung in reset"):
            await caller.reset("a", START)


async def test_a_reward_function_is_not_asked_about_what_hung(broker, scope):
    reward = {"source": "function", "function": "reward_functions:raises"}
    async with hosting(broker, scope, "CountingGame", reward=reward, **PENALTY) as (_, caller):
        bad = await caller.reset("bad", START)
        assert (await caller.step(bad.host, "bad", 0, "hang")).reward == -2.5


async def test_of_a_table_the_role_that_hung_is_rewarded_and_all_have_ended(broker, scope):
    async with hosting(broker, scope, "TurnsGame", **PENALTY) as (_, caller):
        started = await caller.reset("t", START)
        sun, moon = (asyncio.create_task(take(caller, "t", r, started)) for r in ("sun", "moon"))
        await sun
        waiting = act(caller, started.host, "sun", 0, "one")
        await moon
        hung = await act(caller, started.host, "moon", 0, "hang")
        others = await waiting
        assert isinstance(hung, TimedOut)
        assert isinstance(others, TimedOut)
        assert (hung.reward, hung.done) == (10.0 - 2.5, True)  # 10 for what sun did before
        assert (others.reward, others.done) == (1.0, True)
