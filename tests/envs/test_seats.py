"""Games with roles at an environment host: each role's conversation is an episode of its own."""

import asyncio
import random

import pytest
from hosting import ISOLATIONS
from test_remote import PATIENCE_S, hosting
from tinkermq.envs.host_client import RoleAddress, Start
from tinkermq.schemas.wire.errors import GameError

START = Start("train", None, 7)


async def take(caller, table, role, started):
    start = Start("train", None, 7, seat=RoleAddress(started.host, table, role))
    return await asyncio.wait_for(caller.reset(f"{table}.{role}", start), PATIENCE_S)


async def sit_down(caller, table="t", roles=("sun", "moon")):
    """Set a table; return the host and a task for each seat."""
    started = await caller.reset(table, START)
    assert started.messages == []
    return started.host, [asyncio.create_task(take(caller, table, r, started)) for r in roles]


def act(caller, host, role, turn, action, table="t"):
    return asyncio.create_task(
        caller.step(host, f"{table}.{role}", turn, action, seated=True), name=role
    )


def words(messages):
    return [(message["role"], message["content"]) for message in messages]


@ISOLATIONS
async def test_every_role_has_its_own_prompts_turns_and_rewards(broker, scope, isolation):
    async with hosting(broker, scope, "TurnsGame", isolation=isolation, workers=2) as (_, caller):
        host, (sun, moon) = await sit_down(caller)
        first = await sun
        assert words(first.messages) == [("system", "you are sun"), ("user", "begin")]
        await asyncio.sleep(0.05)
        assert not moon.done()  # it has no turn yet
        waiting = act(caller, host, "sun", 0, "one")
        opening = await moon
        assert words(opening.messages) == [("system", "you are moon"), ("user", "sun said one")]
        assert not waiting.done()
        twice = await act(caller, host, "moon", 0, "again")  # the same role once more
        # 1 for its own action, and the 10 that it was given before its first turn
        assert (twice.observation, twice.reward) == ("moon said again", 11.0)
        last = act(caller, host, "moon", 1, "two")
        heard = await waiting
        # 1 for its own action, 10 for each of moon's two
        assert (heard.observation, heard.reward, heard.done) == ("moon said two", 21.0, False)
        ended = await act(caller, host, "sun", 1, "end")
        assert (ended.reward, ended.done) == (1.0, True)
        assert ((await last).reward, (await last).done) == (1.0 + 5.0, True)


async def test_a_role_whose_turn_never_came_has_no_conversation(broker, scope):
    async with hosting(broker, scope, "TurnsGame") as (_, caller):
        host, (sun, moon) = await sit_down(caller)
        await sun
        assert (await act(caller, host, "sun", 0, "end")).done
        assert (await moon).messages == []


async def test_a_role_that_leaves_ends_the_game_for_the_others(broker, scope):
    async with hosting(broker, scope, "TurnsGame") as (served, caller):
        host, (sun, moon) = await sit_down(caller)
        await sun
        waiting = act(caller, host, "sun", 0, "one")
        await moon
        caller.close(host, "t.moon")
        left = await waiting
        assert (left.done, left.reward, left.info["left_by"]) == (True, 1.0, "moon")
        caller.close(host, "t")
        await asyncio.sleep(0.1)
        assert served.num_running == 0


async def test_a_game_that_fails_fails_all_its_seats(broker, scope):
    async with hosting(broker, scope, "TurnsGame") as (_, caller):
        host, (sun, moon) = await sit_down(caller)
        await sun
        waiting = act(caller, host, "sun", 0, "one")
        await moon
        failing = act(caller, host, "moon", 0, "raise")
        for answer in (waiting, failing):
            with pytest.raises(GameError, match="no rule for raise"):
                await answer


async def test_a_role_that_does_not_exist_is_refused(broker, scope):
    async with hosting(broker, scope, "TurnsGame") as (_, caller):
        started = await caller.reset("t", START)
        with pytest.raises(GameError, match="the game has no role 'star'"):
            await take(caller, "t", "star", started)


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("nobody", "TurnsGame.role is 'star'"),
        ("reward star", r"step's rewards is {'star': 1}"),
        ("reward nan", r"step's rewards is {'sun': nan}"),
    ],
)
async def test_turns_and_rewards_are_for_roles_that_exist(broker, scope, action, problem):
    async with hosting(broker, scope, "TurnsGame") as (_, caller):
        host, (sun, _moon) = await sit_down(caller)
        await sun
        with pytest.raises(GameError, match=problem):
            await act(caller, host, "sun", 0, action)


async def test_the_users_rewards_are_for_each_roles_own_conversation(broker, scope):
    reward = {"source": "function", "function": "reward_functions:says_all"}
    async with hosting(broker, scope, "TurnsGame", reward=reward) as (_, caller):
        host, (sun, moon) = await sit_down(caller)
        await sun
        waiting = act(caller, host, "sun", 0, "one")
        await moon
        await act(caller, host, "moon", 0, "again")
        last, heard = await act(caller, host, "moon", 1, "end"), await waiting
        # as many as the conversation has messages, in place of what the game gave
        assert (heard.reward, heard.info["game_reward"]) == (3.0, 1.0 + 10.0 + 5.0)
        assert (last.reward, last.info["game_reward"]) == (5.0, 10.0 + 1.0 + 1.0)


async def test_many_tables_are_played_at_once_and_none_is_left_behind(broker, scope):
    rng = random.Random(0)

    async def seat(caller, host, table, role):
        started = await take(caller, table, role, host)
        turn, done = 0, not started.messages
        if done:
            caller.close(host.host, f"{table}.{role}")
        while not done:
            action = "end" if rng.random() < 0.2 else "go"
            result = await act(caller, host.host, role, turn, action, table)
            turn, done = turn + 1, result.done

    async def play(caller, table):
        host = await caller.reset(table, START)
        await asyncio.gather(*(seat(caller, host, table, role) for role in ("sun", "moon")))
        caller.close(host.host, table)

    async with hosting(broker, scope, "TurnsGame") as (served, caller):
        names = [f"t{number}" for number in range(40)]
        await asyncio.wait_for(asyncio.gather(*(play(caller, n) for n in names)), PATIENCE_S)
        await asyncio.sleep(0.1)
        assert served.num_running == 0
