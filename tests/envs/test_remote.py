"""The hosts as their callers see them: many questions in one message, slow games, dead hosts."""

import asyncio
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

import pytest
from tinkermq.envs.host import EnvironmentHost, HostGone
from tinkermq.envs.host_client import Environments, Start
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError, SandboxError

from tests.support.waiting import PATIENCE_S

START = Start("train", None, 7)
MANY = [f"e{number}" for number in range(16)]


@asynccontextmanager
async def hosting(broker, scope, game, **config):
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


async def test_the_episodes_of_a_task_travel_in_one_message(broker, scope):
    async with hosting(broker, scope, "CountingGame") as (host, caller):
        seen = await count_messages(broker, scope)
        started = await together(*(caller.reset(episode, START) for episode in MANY))
        assert {one.host for one in started} == {host.name}
        assert all(one.messages == started[0].messages for one in started)
        stepped = await together(*(caller.step(host.name, name, 0, "go") for name in MANY))
        assert [one.done for one in stepped] == [False] * 16
        await broker.nc.flush()
        assert seen == [scope.env_reset, scope.env(host.name, "step")]
        assert (host.counts.resets, host.counts.steps) == (16, 16)


async def test_they_are_shared_out_among_the_hosts_of_the_job(broker, scope):
    async with hosting(broker, scope, "CountingGame", hosts=4) as (host, caller):
        seen = await count_messages(broker, scope)
        await together(*(caller.reset(episode, START) for episode in MANY))
        await broker.nc.flush()
        assert seen == [scope.env_reset] * 4
        assert host.counts.resets == 16


async def test_a_slow_game_holds_up_no_other(broker, scope):
    async with hosting(broker, scope, "SlowWhenTold", workers=16) as (host, caller):
        await together(*(caller.reset(episode, START) for episode in MANY))
        order = []

        async def step(name, action):
            answer = await caller.step(host.name, name, 0, action)
            order.append(action)
            return answer

        actions = ["slow", *["quick"] * 15]
        answers = await together(*map(step, MANY, actions))
        assert order == [*["quick"] * 15, "slow"]
        assert [one.observation for one in answers] == actions


async def test_a_reset_that_takes_longer_than_an_answer_is_asked_after(broker, scope):
    async with hosting(broker, scope, "SlowToReset") as (host, caller):
        first, second = await together(caller.reset("a", START), caller.reset("b", START))
        assert first.messages == second.messages
        assert host.counts.resets == 2


async def test_one_episode_that_fails_fails_alone(broker, scope):
    async with hosting(broker, scope, "SlowWhenTold") as (host, caller):
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
    async with hosting(broker, scope, "SlowWhenTold") as (host, caller):
        await together(*(caller.reset(episode, START) for episode in MANY))
        said = [f"{number:>700000}" for number in range(16)]
        got = await together(
            *(caller.step(host.name, *two) for two in zip(MANY, [0] * 16, said, strict=True))
        )
        assert [one.observation for one in got] == said


async def test_a_host_that_dies_amid_a_step_is_found_out(broker, scope):
    async with hosting(broker, scope, "SlowWhenTold", workers=4) as (host, caller):
        await caller.reset("a", START)
        stepping = asyncio.create_task(caller.step(host.name, "a", 0, "very slow"))
        await asyncio.sleep(0.2)
    with pytest.raises(HostGone):
        await asyncio.wait_for(stepping, PATIENCE_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(caller.reset("b", START), 1)


@pytest.mark.parametrize("isolation", ["thread", "process"])
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
    async with hosting(broker, scope, "CountingGame") as (host, _):
        await asyncio.wait_for(first, PATIENCE_S)
        await caller.reset("e", START)
    second = asyncio.create_task(caller.reset("f", START))
    gone = await asyncio.wait_for(missing.get(), PATIENCE_S)
    assert f"({host.name} was the last one, and has ended)" in gone
    async with hosting(broker, scope, "CountingGame"):
        await asyncio.wait_for(second, PATIENCE_S)
