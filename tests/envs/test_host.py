"""The environment host over a real broker, and games with roles at it."""

import asyncio
import random
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

import opentinker_games
import pytest
from hosting import ISOLATIONS, error_of, hosting
from structlog.testing import capture_logs
from tinkermq.broker.client.rpc import call
from tinkermq.envs import host_client
from tinkermq.envs.check import check_game
from tinkermq.envs.games import addition
from tinkermq.envs.host import EnvironmentHost, HostGone
from tinkermq.envs.host_client import Environments, RoleAddress, Start
from tinkermq.envs.prompt import open_game
from tinkermq.envs.write_data import verl_row, write_rows
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.env import StepReply, StepRequest
from tinkermq.schemas.wire.errors import (
    DataError,
    GameError,
    MessageError,
    NotFoundError,
    ReleaseError,
    SandboxError,
    StateError,
)

from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, eventually, until


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_an_episode_from_reset_to_done(broker, scope, isolation):
    async with hosting(broker, scope, isolation=isolation, workers=2) as client:
        reply = await client.reset("a", seed=5)
        assert reply.host == client.host.name
        assert [m["role"] for m in reply.messages] == ["system", "user"]
        answers = [await client.step("a", turn) for turn in range(3)]
        assert [answer.done for answer in answers] == [False, False, True]
        again = await client.reset("b", seed=5)
        assert again.messages == reply.messages
        assert [await client.step("b", turn) for turn in range(3)] == answers


@ISOLATIONS
async def test_asking_again_gets_the_same_answer_and_plays_once(broker, scope, isolation):
    async with hosting(broker, scope, isolation=isolation, workers=1) as client:
        first, second = await asyncio.gather(client.reset("a", seed=1), client.reset("a", seed=1))
        assert first == second == await client.reset("a", seed=1)
        one, two = await asyncio.gather(client.step("a", 0), client.step("a", 0))
        assert one == two == await client.step("a", 0)
        assert (await client.step("a", 1)).observation.startswith("go 2 ")
        assert (client.host.counts.resets, client.host.counts.steps) == (1, 2)


async def test_a_turn_out_of_order_is_refused(broker, scope):
    async with hosting(broker, scope) as client:
        await client.reset("a")
        error = await error_of(client.step("a", 2), StateError)
        assert error.message == "turn 2 is out of order: the next turn of this episode is 0"
        assert await client.play_to_the_end("a") == 3
        error = await error_of(client.step("a", 3), StateError)
        assert error.message == "the episode has ended after turn 2"
        assert (await client.step("a", 2)).done


async def test_an_episode_that_is_not_held_is_not_found(broker, scope):
    async with hosting(broker, scope) as client:
        error = await error_of(client.step("ghost", 0), NotFoundError)
        assert error.message == f"host {client.host.name} holds no episode 'ghost'"
        await client.reset("a")
        await client.close("a")
        await client.close("a")
        await error_of(client.step("a", 0), NotFoundError)


async def test_describe_tells_generated_games_from_data(broker, scope, tmp_path):
    async with hosting(broker, scope, num_val=9) as client:
        described = await client.describe()
        assert (described.game, described.num_train, described.num_val) == ("counting", None, 9)
    train, val = addition.make_data(tmp_path, 30, 20, seed=1)
    data = {"train_data": [str(train)], "val_data": [str(val)], "num_val": 12}
    async with hosting(broker, scope, "addition", **data) as client:
        described = await client.describe()
        assert (described.game, described.num_train, described.num_val) == ("addition", 30, 12)


@ISOLATIONS
async def test_a_dataset_game_is_opened_with_its_row(broker, scope, tmp_path, isolation):
    train, val = addition.make_data(tmp_path, 30, 20, seed=1)
    data = {"train_data": [str(train)], "val_data": [str(val)], "isolation": isolation}
    async with hosting(broker, scope, "addition", workers=1, **data) as client:
        reply = await client.reset("a", sample=3)
        question = reply.messages[0]["content"]
        a, b = question.rstrip("=").split("+")
        assert (await client.step("a", 0, str(int(a) + int(b)))).reward == 1.0
        error = await error_of(client.reset("b", sample=30), DataError)
        assert "row 30 does not exist" in error.message


@ISOLATIONS
async def test_the_gold_answer_reaches_neither_prompt_nor_observation(
    broker, scope, tmp_path, isolation
):
    truth = "the-gold-answer"
    row = verl_row("6*7", truth, data_source="telling", split="train", index=0)
    path = write_rows(tmp_path / "rows.jsonl", [row])
    data = {"train_data": [str(path)], "val_data": [str(path)], "isolation": isolation}
    async with hosting(broker, scope, "broken_games:TellingGame", workers=1, **data) as client:
        assert truth not in str(await client.reset_reply("a", sample=0))
        for turn in range(2):  # a first step, and the last one of the episode
            result = await client.step("a", turn, "wrong")
            assert truth not in result.observation
            assert result.info == {"ground_truth": truth}  # for the record, never for the model


async def test_hosts_of_one_seed_agree_on_the_validation_rows(broker, scope, tmp_path):
    train, val = addition.make_data(tmp_path, 30, 200, seed=1)
    data = {"train_data": [str(train)], "val_data": [str(val)], "num_val": 5}

    async def questions(seed):
        async with hosting(broker, scope, "addition", seed=seed, **data) as client:
            replies = [await client.reset(f"v{n}", sample=n, split="val") for n in range(5)]
            return [reply.messages[0]["content"] for reply in replies]

    assert await questions(1) == await questions(1) != await questions(2)


async def test_two_hosts_share_the_resets_and_keep_their_episodes(broker, scope):
    async with hosting(broker, scope) as one, hosting(broker, scope) as other:
        replies = await asyncio.gather(*(one.reset(f"e{n}") for n in range(40)))
        homes = {reply.host for reply in replies}
        assert homes == {one.host.name, other.host.name}
        answers = [one.step(f"e{n}", 0, host=reply.host) for n, reply in enumerate(replies)]
        assert len(await asyncio.gather(*answers)) == 40


async def test_an_episode_left_alone_is_freed(broker, scope):
    async with hosting(broker, scope, lease_s=4.0) as client:
        client.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        await client.reset("left")
        await client.reset("kept")

        async def is_freed() -> bool:
            await client.step("kept", 0)
            return client.host.counts.expired > 0

        with capture_logs() as told:
            await eventually(is_freed, "the other one to be freed")
        await client.step("kept", 1)
        (expired,) = [entry for entry in told if entry["event"] == "episode_expired"]
        assert (expired["episode"], expired["trace"]) == ("left", client.traceparent[3:35])
        error = await error_of(client.step("left", 0), NotFoundError)
        assert "freed after 4 s" in error.hint
        assert client.host.counts.expired == 1


async def test_a_full_host_says_so_and_forgets_the_ended_first(broker, scope):
    async with hosting(broker, scope, max_episodes=2) as client:
        await client.reset("a")
        await client.reset("b")
        error = await error_of(client.reset("c"), StateError)
        assert error.message == f"host {client.host.name} holds 2 episodes, its limit"
        await client.play_to_the_end("a")
        await client.reset("c")


async def test_an_action_beyond_the_bytes_that_may_wait_is_refused(broker, scope):
    game = "broken_games:SlowWhenTold"
    async with hosting(broker, scope, game, max_action_bytes=2000, workers=2) as client:
        await client.reset("a")
        await client.reset("b")
        large = "x" * 2000
        request = StepRequest(
            episodes=["a", "b"], turns=[0, 0], actions=["slow", large], final=[False] * 2, wait_s=9
        )
        subject = scope.env(client.host.name, "step")
        reply = await call(
            broker, subject, request, StepReply, timeout_s=PATIENCE_S, waiting_for="the host"
        )
        (refused,) = reply.failed
        error = refused.error.to_error()
        assert isinstance(error, StateError)
        assert "bytes of actions that wait for their games, and 2,000 are its limit" in str(error)
        assert (await client.step("b", 0, large)).observation == large


async def test_a_stopping_host_takes_no_resets_but_finishes_what_it_holds(broker, scope):
    async with (
        hosting(broker, scope, drain_s=AFTER_PATIENCE_S) as old,
        hosting(broker, scope) as new,
    ):
        held = [f"e{n}" for n in range(20)]
        homes = {e: (await old.reset(e)).host for e in held}
        mine = [episode for episode in held if homes[episode] == old.host.name]
        old.stopping.set()
        await asyncio.sleep(0.2)
        assert not old.running.done()
        for number in range(10):
            assert (await new.reset(f"late{number}")).host == new.host.name
        for episode in mine:
            assert await old.play_to_the_end(episode) == 3
        await asyncio.wait_for(old.running, PATIENCE_S)


async def test_a_stopping_host_does_not_wait_for_ever(broker, scope):
    async with hosting(broker, scope, drain_s=0.3) as client:
        await client.reset("abandoned")
        client.stopping.set()
        async with asyncio.timeout(PATIENCE_S):
            await client.running


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        *((payload, MessageError) for payload in (b"", b"\xc1", b"\x93\x01\x02\x03")),
        (b"\x81\xa1v\x02", ReleaseError),
    ],
)
async def test_malformed_requests_get_an_error_reply_and_harm_nothing(
    broker, scope, payload, error
):
    async with hosting(broker, scope) as client:
        await client.reset("a")
        for subject in (scope.env_reset, scope.env(client.host.name, "step"), scope.env_describe):
            reply = await broker.request(subject, payload)
            assert reply.headers["Nats-Service-Error-Code"] == error.code
        assert await client.play_to_the_end("a") == 3


# -- Games with roles at an environment host: each role's conversation is an episode of its own ----


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
    async with hosted(broker, scope, "TurnsGame", isolation=isolation, workers=2) as (
        _,
        caller,
    ):
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
    async with hosted(broker, scope, "TurnsGame") as (_, caller):
        host, (sun, moon) = await sit_down(caller)
        await sun
        assert (await act(caller, host, "sun", 0, "end")).done
        assert (await moon).messages == []


async def test_a_role_that_leaves_ends_the_game_for_the_others(broker, scope):
    async with hosted(broker, scope, "TurnsGame") as (served, caller):
        host, (sun, moon) = await sit_down(caller)
        await sun
        waiting = act(caller, host, "sun", 0, "one")
        await moon
        caller.close(host, "t.moon")
        left = await waiting
        assert (left.done, left.reward, left.info["left_by"]) == (True, 1.0, "moon")
        caller.close(host, "t")
        await until(lambda: served.num_running == 0, "the table to end")


async def test_a_game_that_fails_fails_all_its_seats(broker, scope):
    async with hosted(broker, scope, "TurnsGame") as (_, caller):
        host, (sun, moon) = await sit_down(caller)
        await sun
        waiting = act(caller, host, "sun", 0, "one")
        await moon
        failing = act(caller, host, "moon", 0, "raise")
        for answer in (waiting, failing):
            with pytest.raises(GameError, match="no rule for raise"):
                await answer


async def test_a_role_that_does_not_exist_is_refused(broker, scope):
    async with hosted(broker, scope, "TurnsGame") as (_, caller):
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
    async with hosted(broker, scope, "TurnsGame") as (_, caller):
        host, (sun, _moon) = await sit_down(caller)
        await sun
        with pytest.raises(GameError, match=problem):
            await act(caller, host, "sun", 0, action)


async def test_the_users_rewards_are_for_each_roles_own_conversation(broker, scope):
    reward = {"source": "function", "function": "reward_functions:says_all"}
    async with hosted(broker, scope, "TurnsGame", reward=reward) as (_, caller):
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

    async with hosted(broker, scope, "TurnsGame") as (served, caller):
        names = [f"t{number}" for number in range(40)]
        await asyncio.wait_for(asyncio.gather(*(play(caller, n) for n in names)), PATIENCE_S)
        await until(lambda: served.num_running == 0, "all tables to end")


# -- The hosts as their callers see them: many questions in one message, slow games, dead hosts ----

MANY = [f"e{number}" for number in range(16)]


@asynccontextmanager
async def hosted(broker, scope, game, **config):
    """Serve a game of broken_games.py; yield the host and its caller."""
    settings = EnvConfig(game=f"broken_games:{game}", **config)
    async with serving(broker, scope, settings) as host_and_caller:
        yield host_and_caller


@asynccontextmanager
async def serving(broker, scope, settings):
    """Serve a game; yield the host and its caller."""
    host = EnvironmentHost(broker, scope, settings, drain_s=0.01)
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(host.run(stopping))
        await asyncio.wait_for(host.ready.wait(), PATIENCE_S)
        host_and_caller = host, Environments(broker, scope, settings, lambda _: nullcontext())
        try:
            yield host_and_caller
        finally:
            stopping.set()
            await running


async def count_messages(broker, scope):
    """Return a list that grows by the subject of each request to a host."""
    seen = []
    await broker.listen(scope.env_reset, lambda message: seen.append(message.subject))
    await broker.listen(scope.env("*", "step"), lambda message: seen.append(message.subject))
    await broker.nc.flush()
    return seen


async def together(*calls) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
def patient(monkeypatch):
    """Let a host answer when all is ready, however long that takes on a slow machine."""
    monkeypatch.setattr(host_client, "_HOLD_MANY_S", 10.0)
    monkeypatch.setattr(host_client, "_ANSWER_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
async def test_the_episodes_of_a_task_travel_in_one_message(broker, scope):
    async with hosted(broker, scope, "CountingGame") as (host, caller):
        seen = await count_messages(broker, scope)
        started = await together(*(caller.reset(episode, START) for episode in MANY))
        assert {one.host for one in started} == {host.name}
        assert all(one.messages == started[0].messages for one in started)
        stepped = await together(*(caller.step(host.name, name, 0, "go") for name in MANY))
        assert [one.done for one in stepped] == [False] * 16
        await broker.nc.flush()
        assert seen == [scope.env_reset, scope.env(host.name, "step")]
        assert (host.counts.resets, host.counts.steps) == (16, 16)


@pytest.mark.usefixtures("patient")
async def test_they_are_shared_out_among_the_hosts_of_the_job(broker, scope):
    async with hosted(broker, scope, "CountingGame", hosts=4) as (host, caller):
        seen = await count_messages(broker, scope)
        await together(*(caller.reset(episode, START) for episode in MANY))
        await broker.nc.flush()
        assert seen == [scope.env_reset] * 4
        assert host.counts.resets == 16


async def test_a_slow_game_holds_up_no_other(broker, scope, tmp_path):
    gate = tmp_path / "open"
    async with hosted(broker, scope, "SlowWhenTold", workers=16) as (host, caller):
        await together(*(caller.reset(episode, START) for episode in MANY))
        order = []

        async def step(name, action):
            answer = await caller.step(host.name, name, 0, action)
            order.append(action)
            if len(order) == 15:
                gate.touch()
            return answer

        actions = [str(gate), *["quick"] * 15]
        answers = await together(*map(step, MANY, actions))
        assert order == [*["quick"] * 15, str(gate)]
        assert [one.observation for one in answers] == actions


async def test_a_reset_that_takes_longer_than_an_answer_is_asked_after(broker, scope):
    async with hosted(broker, scope, "SlowToReset") as (host, caller):
        first, second = await together(caller.reset("a", START), caller.reset("b", START))
        assert first.messages == second.messages
        assert host.counts.resets == 2


async def test_one_episode_that_fails_fails_alone(broker, scope):
    async with hosted(broker, scope, "SlowWhenTold") as (host, caller):
        await together(*(caller.reset(episode, START) for episode in MANY))
        answers = await together(
            caller.step(host.name, "e0", 0, "raise"),
            caller.step(host.name, "e1", 0, "quick"),
            caller.step(host.name, "nobody", 0, "quick"),
            caller.step(host.name, "e2", 5, "quick"),
        )
        assert isinstance(answers[0], GameError)
        assert answers[1].observation == "quick"
        assert isinstance(answers[2], HostGone)
        assert "out of order" in str(answers[3])


async def test_long_answers_are_asked_after_one_by_one(broker, scope):
    async with hosted(broker, scope, "SlowWhenTold") as (host, caller):
        await together(*(caller.reset(episode, START) for episode in MANY))
        said = [f"{number:>700000}" for number in range(16)]
        got = await together(
            *(caller.step(host.name, *two) for two in zip(MANY, [0] * 16, said, strict=True))
        )
        assert [one.observation for one in got] == said


async def test_a_host_that_dies_amid_a_step_is_found_out(broker, scope):
    async with hosted(broker, scope, "SlowWhenTold", workers=4) as (host, caller):
        await caller.reset("a", START)
        stepping = asyncio.create_task(caller.step(host.name, "a", 0, "very slow"))
        await asyncio.sleep(0.2)
    with pytest.raises(HostGone):
        await asyncio.wait_for(stepping, PATIENCE_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(caller.reset("b", START), 1)


@ISOLATIONS
async def test_tools_and_their_answers_travel(broker, scope, isolation):
    kwargs = {"tool_format": "hermes", "sandbox": {"packages": [], "keep_state": True}}
    code = (
        '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
    )
    settings = {"game": "math_code", "kwargs": kwargs, "isolation": isolation}
    async with serving(broker, scope, EnvConfig(**settings)) as (host, caller):
        start = Start("train", None, 7, {"ground_truth": "42"})
        for started in await together(caller.reset("e1", start), caller.reset("e2", start)):
            assert [tool["function"]["name"] for tool in started.tools] == ["code_interpreter"]
        ran, answered = await together(
            caller.step(host.name, "e1", 0, code), caller.step(host.name, "e2", 0, r"\boxed{42}")
        )
        assert (ran.observation, ran.role) == ("42", "tool")
        assert (answered.reward, answered.role) == (1.0, "user")


@pytest.mark.parametrize(
    ("game", "isolation"),
    [
        ("Adding", "thread"),
        pytest.param("Adding", "process", marks=pytest.mark.full),
        ("AddingAsync", "thread"),
    ],
)
async def test_results_of_several_calls_travel_as_messages_of_their_own(
    broker, scope, game, isolation
):
    call = '<tool_call>{"name": "add", "arguments": {"value": 2}}</tool_call>'
    settings = EnvConfig(game=f"tool_games:{game}", isolation=isolation)
    async with serving(broker, scope, settings) as (host, caller):
        await together(caller.reset("e1", START), caller.reset("e2", START))
        two, one = await together(
            caller.step(host.name, "e1", 0, call * 2), caller.step(host.name, "e2", 0, call)
        )
    assert [message["content"] for message in two.messages()] == ["sum 2", "sum 4"]
    assert (two.observation, two.role) == ("sum 2\n\nsum 4", "tool")
    assert one.messages() == [{"role": "tool", "content": "sum 2"}]


async def test_a_host_without_a_sandbox_ends_at_once_with_the_remedy(broker, scope, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    kwargs = {"sandbox": {"packages": [], "time_s": 3}}
    host = EnvironmentHost(broker, scope, EnvConfig(game="math_code", kwargs=kwargs))
    with pytest.raises(ExceptionGroup) as ended:
        await host.run(asyncio.Event())
    (error,) = ended.value.exceptions
    assert isinstance(error, SandboxError)
    assert "apt-get install bubblewrap" in error.hint


async def test_who_waits_for_a_host_that_has_gone_names_it(broker, scope):
    settings = EnvConfig(game="broken_games:CountingGame")
    missing = asyncio.Queue()

    @contextmanager
    def waiting(what):
        missing.put_nowait(what)
        yield

    caller = Environments(broker, scope, settings, waiting)
    first = asyncio.create_task(caller.describe())
    none_yet = await asyncio.wait_for(missing.get(), PATIENCE_S)
    assert none_yet == "a host of broken_games:CountingGame (none has answered yet)"
    async with hosted(broker, scope, "CountingGame") as (host, _):
        await asyncio.wait_for(first, PATIENCE_S)
        await caller.reset("e", START)
    second = asyncio.create_task(caller.reset("f", START))
    gone = await asyncio.wait_for(missing.get(), PATIENCE_S)
    assert f"({host.name} was the last one, and has ended)" in gone
    async with hosted(broker, scope, "CountingGame"):
        await asyncio.wait_for(second, PATIENCE_S)


# -- A game class of OpenTinker's interface works after its import line has been changed -----------


GENERATED = ("OnlyReset", "ResetAndState", "Board")


def rows(folder):
    made = [
        verl_row(f"{n}+{n}?", str(2 * n), data_source="sums", split="train", index=n)
        for n in range(12)
    ]
    return [str(write_rows(folder / "rows.parquet", made))]


@pytest.mark.parametrize("name", [*GENERATED, "MathGame"])
def test_every_question_of_env_check_is_answered_well(name, tmp_path):
    data = rows(tmp_path) if name == "MathGame" else []
    results = check_game(EnvConfig(game=f"opentinker_games:{name}", train_data=data))
    assert [result for result in results if not result.ok] == []
    assert results[-1].name == "gold answers score full marks"


@ISOLATIONS
@pytest.mark.parametrize("name", GENERATED)
async def test_a_host_plays_it_and_prompt_and_game_agree(broker, scope, isolation, name):
    game = f"opentinker_games:{name}"
    async with hosting(broker, scope, game, isolation=isolation, workers=1) as client:
        for seed in range(6):
            opened = await client.reset(f"e{seed}", seed=seed)
            beside = getattr(opentinker_games, name)()
            assert open_game(beside, seed=seed, record=None, kwargs={}) == opened.messages
            assert (await client.step(f"e{seed}", 0, "nothing")).reward < 1
            result = await client.step(f"e{seed}", 1, beside.gold_action())
            assert result.done
            assert result.reward == getattr(beside, "max_return", 1)


async def test_a_state_can_be_asked_for_by_the_arguments_of_reset(broker, scope):
    async with hosting(broker, scope, "opentinker_games:ResetAndState") as client:
        opened = await client.reset("a", target=7)
        assert opened.messages[-1]["content"].endswith("at least 7.")


async def test_a_row_of_verls_columns_reaches_it(broker, scope, tmp_path):
    game, data = "opentinker_games:MathGame", rows(tmp_path)
    async with hosting(broker, scope, game, train_data=data) as client:
        opened = await client.reset("a", sample=5)
        assert [one["content"] for one in opened.messages] == [
            "Put the answer into \\boxed{}.",
            "5+5?",
        ]
        result = await client.step("a", 0, "so \\boxed{10}")
        assert (result.reward, result.done) == (1.0, True)
        expected = {"ground_truth": "10", "data_source": "sums", "split": "train", "index": 5}
        assert result.info == expected
