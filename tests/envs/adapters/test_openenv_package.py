"""Environments of OpenEnv with its real package: its template, tools, tasks, and bad days."""

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tinkermq.envs.adapters.openenv import OpenEnvGame
from tinkermq.envs.check import check_game
from tinkermq.envs.dataset import Record
from tinkermq.envs.running.episodes import Opening
from tinkermq.envs.running.runners import make_runner
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

pytestmark = pytest.mark.openenv
HERE = Path(__file__).parent
START_S = 200.0


def package(app, **variables):
    return {
        "package": app,
        "variables": {"PYTHONPATH": str(HERE), **variables},
        "start_s": START_S,
    }


def failed(kwargs):
    results = check_game(EnvConfig(game="openenv", kwargs=kwargs, reset_timeout_s=START_S))
    assert len(results) > 6
    return [result for result in results if not result.ok]


@contextlib.asynccontextmanager
async def playing(kwargs):
    runner = make_runner(EnvConfig(game="openenv", kwargs=kwargs, reset_timeout_s=START_S))
    try:
        yield runner, await runner.start()
    finally:
        await runner.stop()


async def opened(runner, episode, seed=0, **row):
    record = Record(prompt=[], ground_truth="", **row) if row else None
    (message,) = await runner.reset(Opening(episode, seed, record))
    return message["content"]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Make the environment that `openenv init` makes; return its folder."""
    folder = tmp_path_factory.mktemp("template")
    command = [Path(sys.executable).parent / "openenv", "init", "parrot"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=START_S)
    return folder


def test_every_check_of_the_template_passes(template):
    kwargs = package("parrot.server.app:app", PYTHONPATH=str(template))
    assert failed(kwargs) == []


async def test_the_template_says_after_what_the_policy_says(template):
    async with playing(package("parrot.server.app:app", PYTHONPATH=str(template))) as (
        runner,
        facts,
    ):
        assert (facts.name, facts.tools) == ("parrot", [])
        assert "environment ready!" in await opened(runner, "a")
        answer = await runner.step("a", "hello")
        assert json.loads(answer.observation) == {"echoed_message": "hello", "message_length": 5}
        assert (answer.reward, answer.done) == (0.5, False)


@pytest.mark.parametrize("app", ["openenv_environments:tools", "openenv_environments:tasks"])
def test_every_check_of_an_environment_passes(app):
    assert failed(package(app)) == []


async def test_tools_of_an_mcp_environment_are_called_and_rewarded_by_it():
    async with playing(package("openenv_environments:tools")) as (runner, facts):
        add, fail = (tool["function"] for tool in facts.tools)
        assert (add["name"], fail["name"]) == ("add", "fail")
        assert add["description"] == "Add an amount to the counter."
        assert add["parameters"]["properties"]["amount"]["type"] == "integer"
        await opened(runner, "a")
        answer = await runner.step("a", call("add", amount=1) + call("fail"))
        assert answer.tool_results[0] == "the counter is 1"
        assert answer.tool_results[1].startswith("Error: ")
        assert "this tool fails" in answer.tool_results[1]
        for _ in range(8):
            answer = await runner.step("a", call("add", amount=1))
            if answer.done:
                break
        assert (answer.done, answer.reward) == (True, 1.0)


async def test_tasks_are_chosen_by_seed_and_by_row():
    async with playing(package("openenv_environments:tasks")) as (runner, facts):
        (tool,) = facts.tools
        assert tool["function"]["description"] == "Answer the question."
        prompts = [await opened(runner, f"{n}", seed=n % 6) for n in range(12)]
        assert prompts[:6] == prompts[6:]
        assert len(set(prompts)) > 2
        info = {"split": "test", "index": 1}
        assert (await opened(runner, "row", extra_info=info)).endswith("test 1: 60 + 4 = ?")
        answer = await runner.step("row", call("act", number=64))
        assert (answer.observation, answer.reward, answer.done) == ("right", 1.0, True)
        answer = await runner.step("0", call("act", number=-1))
        assert answer.observation.startswith("Error: ")
        assert "greater than or equal to 0" in answer.observation


async def test_a_bad_day_costs_an_episode():
    async with playing(package("openenv_environments:tasks")) as (runner, _):
        for unit, said in (
            ("broken", "'EXECUTION_ERROR': 'the environment broke'"),
            ("huge", "more than 4,194,304 bytes"),
            ("dead", "ended the session during a step"),
        ):
            await opened(runner, unit)
            with pytest.raises(GameError) as error:
                await runner.step(unit, call("act", number=1, unit=unit))
            assert said in error.value.message
        assert "= ?" in await opened(runner, "after")


async def test_more_episodes_than_the_server_takes_wait_for_each_other():
    kwargs = {**package("openenv_environments:tasks", MAX_SESSIONS="2"), "wait_s": START_S}

    async def play(runner, name):
        await opened(runner, name)
        return await runner.step(name, call("act", number=1))

    with capture_logs() as logs:
        async with playing(kwargs) as (runner, _):
            played = await asyncio.gather(*(play(runner, f"{n}") for n in range(10)))
    assert [answer.done for answer in played] == [True] * 10
    assert [log["max_sessions"] for log in logs if log["event"] == "openenv_server_full"] == [2]


def test_the_interpreter_may_be_another(template):
    game = OpenEnvGame(
        **package("parrot.server.app:app", PYTHONPATH=str(template)), python=sys.executable
    )
    assert game.get_tools() == []
