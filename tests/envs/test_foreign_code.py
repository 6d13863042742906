"""Code of users costs its own episode only, whatever it raises and whatever it returns."""

import asyncio
import os
import signal
from typing import Any

import pytest
import uvloop
from foreign_games import BLAMED, RAISED
from hosting import COUNTING, hosting, runner_of
from tinkermq.broker.client.rpc import call
from tinkermq.envs.data import HostData
from tinkermq.envs.registry import load_game
from tinkermq.envs.running.episodes import TimeLimits
from tinkermq.envs.running.local import LocalGame
from tinkermq.envs.running.process_runner import ProcessRunner
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.env import ResetReply, ResetRequest, StepReply, StepRequest
from tinkermq.schemas.wire.errors import GameError

from tests.support.waiting import PATIENCE_S

FOREIGN = [
    pytest.param({"game": "foreign_games:Foreign", "isolation": "thread"}, id="thread"),
    pytest.param({"game": "foreign_games:Foreign", "isolation": "process"}, id="process"),
    pytest.param({"game": "foreign_games:ForeignAsync"}, id="async"),
]
RAISING = [*RAISED, "RecursionError"]


async def _reset_each(client, troubles):
    """Reset an episode each; return the error message of each, empty for none."""
    messages: list[str] = []
    for number, trouble in enumerate(troubles):
        request = ResetRequest(
            episodes=[f"r{number}"],
            split="train",
            sample=None,
            seed=0,
            kwargs={"trouble": trouble},
            wait_s=9,
        )
        reply = await call(
            client.broker,
            client.scope.env_reset,
            request,
            ResetReply,
            timeout_s=PATIENCE_S,
            waiting_for="the host",
        )
        (opened,) = reply.episodes
        messages.append("" if opened.error is None else opened.error.message)
    return messages


async def _step_all(client, actions):
    """Reset an episode for each action and play all in one request; return its reply."""
    names = [f"e{number}" for number in range(len(actions))]
    for name in names:
        await client.reset(name)
    request = StepRequest(episodes=names, turns=[0] * len(names), actions=list(actions), wait_s=9)
    subject = client.scope.env(client.host.name, "step")
    return await call(
        client.broker, subject, request, StepReply, timeout_s=PATIENCE_S, waiting_for="the host"
    )


@pytest.mark.parametrize("config", FOREIGN)
async def test_whatever_a_step_raises_fails_its_own_episode_of_a_batch(broker, scope, config):
    async with hosting(broker, scope, workers=1, **config) as client:
        reply = await _step_all(client, [*RAISING, "go"])
        assert reply.observations[-1] is not None
        failed = {one.index: one.error for one in reply.failed}
        assert sorted(failed) == list(range(len(RAISING)))
        for number, name in enumerate(RAISING):
            is_pythons = name == "StopIteration" and "Async" in config["game"]
            assert (
                f"raised in step: {'RuntimeError' if is_pythons else name}"
                in failed[number].message
            )
            assert failed[number].code == "game"
            assert "foreign_games.py" in failed[number].message
        assert await client.play_to_the_end("e" + str(len(RAISING)))


@pytest.mark.parametrize("config", FOREIGN)
async def test_whatever_a_step_returns_fails_its_own_episode_of_a_batch(broker, scope, config):
    blamed = dict(BLAMED)
    if "Async" in config["game"]:
        del blamed["late"]
    async with hosting(broker, scope, workers=1, **config) as client:
        first = _process_of(client)
        reply = await _step_all(client, [*blamed, "go"])
        assert reply.observations[-1] is not None
        failed = {one.index: one.error.message for one in reply.failed}
        assert sorted(failed) == list(range(len(blamed)))
        for number, words in enumerate(blamed.values()):
            assert words in failed[number]
        assert _process_of(client) == first  # a worker has survived all of them


def _process_of(client):
    runner = runner_of(client)
    return process_of(runner).child.pid if isinstance(runner, ProcessRunner) else 0


def process_of(runner: Any) -> Any:
    """Return the first process of a runner, insides and all."""
    return runner._slots[0].process


@pytest.mark.parametrize("config", FOREIGN)
async def test_whatever_a_reset_raises_or_returns_fails_its_own_episode(broker, scope, config):
    words = {name: f"raised in reset: {name}" for name in RAISED}
    if "Async" in config["game"]:
        words["StopIteration"] = "raised in reset: RuntimeError"
    words |= {
        "prompt": "get_system_prompt has half a character",
        "user": "get_initial_user_message has half a character",
        "first": "reset has half a character",
        "long": "reset takes 9,437,184 bytes",
    }
    async with hosting(broker, scope, workers=1, **config) as client:
        messages = await _reset_each(client, [*words, ""])
        for message, expected in zip(messages, words.values(), strict=False):
            assert expected in message
        assert messages[-1] == ""
        assert client.host.num_running == 1


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("cancels itself", "raised in step: CancelledError"),
        ("awaits a cancelled task", "raised in step: CancelledError"),
        ("a task of it exits", "raised in step: SystemExit: 4"),
    ],
)
async def test_an_async_game_that_ends_its_own_task_fails_alone(broker, scope, action, words):
    async with hosting(broker, scope, "foreign_games:ForeignAsync") as client:
        reply = await _step_all(client, ["go", action, "go", "go"])
        assert [one.index for one in reply.failed] == [1]
        assert words in reply.failed[0].error.message
        assert None not in (reply.observations[0], *reply.observations[2:])
        assert await client.step("e0", 1)


async def test_an_async_game_that_stops_its_loop_stops_nobody(broker, scope):
    async with hosting(broker, scope, "foreign_games:ForeignAsync") as client:
        reply = await _step_all(client, ["go", "stops the loop", "go"])
        assert not reply.failed
        assert (await client.step("e0", 1)).reward == 1


async def test_a_tenth_of_steps_with_half_a_character_leaves_the_others_whole(broker, scope):
    config = {"isolation": "process", "workers": 1}
    async with hosting(broker, scope, "foreign_games:Foreign", **config) as client:
        actions = ["half observation" if number % 10 == 3 else "go" for number in range(40)]
        reply = await _step_all(client, actions)
        assert [one.index for one in reply.failed] == [3, 13, 23, 33]
        assert sum(observation is not None for observation in reply.observations) == 36


async def test_ctrl_c_in_a_terminal_is_no_fault_of_a_game_in_a_process(broker, scope):
    async with hosting(broker, scope, "foreign_games:Interrupts", isolation="process") as client:
        await client.reset("a")
        assert await client.play_to_the_end("a") == 3


@pytest.mark.parametrize("game", ["foreign_games:Foreign", "foreign_games:ForeignAsync"])
def test_a_game_that_is_tried_by_hand_is_blamed_too(game):
    config = EnvConfig(game=game)
    data = HostData(config, seed=0)
    local = LocalGame(config, load_game(game), data)
    try:
        for name in RAISED:
            episode = local.start(1)
            with pytest.raises(GameError, match="raised in step"):
                episode.step(name)
    finally:
        local.close()
        data.close()


IMPORTS = {
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "exits": ("import sys\nsys.exit('no licence')", "SystemExit: no licence"),
    "is_no_exception": ("class Own(BaseException): ...\nraise Own('x')", "Own: x"),
    "stops": ("raise StopIteration", "StopIteration"),
    "cancels": ("import asyncio\nraise asyncio.CancelledError", "CancelledError"),
    "recurses": ("def f(): f()\nf()", "RecursionError"),
    "groups": ("raise BaseExceptionGroup('g', [SystemExit(1)])", "SystemExit: 1"),
    "half": ("raise ValueError('\\ud83d')", "ValueError: \\ud83d"),
    "has_no_syntax": ("def (:", "SyntaxError"),
    "asks": ("def __getattr__(name): raise KeyboardInterrupt", "KeyboardInterrupt"),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_whatever_a_module_raises_as_it_is_imported_is_told(tmp_path, monkeypatch, name):
    source, words = IMPORTS[name]
    (tmp_path / f"import_{name}.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(GameError) as error:
        load_game(f"import_{name}:Game")
    assert f"game 'import_{name}:Game' cannot be imported: " in error.value.message
    assert words in error.value.message


# -- worker processes that die -----------------------------------------------------------------


def _run(coroutine):
    """Run on the loop that actors have: its closed transports refuse what asyncio's drop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def _runner(game=COUNTING, num_workers=1):
    return ProcessRunner(game, {}, num_workers=num_workers, limits=TimeLimits(60, 60))


def _opening(name):
    from tinkermq.envs.running.episodes import Opening

    return Opening(name, 1)


def test_what_comes_while_a_process_dies_waits_for_the_next_or_fails_alone():
    async def play():
        runner = _runner()
        await runner.start()
        try:
            await asyncio.gather(*(runner.reset(_opening(f"a{n}")) for n in range(4)))
            process = process_of(runner)
            os.kill(process.child.pid, signal.SIGKILL)
            while not process.is_closing and process.death is None:
                await asyncio.sleep(0)
            steps = [runner.step(f"a{n}", "go") for n in range(4)]
            resets = [runner.reset(_opening(f"b{n}")) for n in range(4)]
            told = await asyncio.gather(*steps, *resets, return_exceptions=True)
            assert all(isinstance(error, GameError) for error in told[:4])
            assert all("SIGKILL" in str(error) for error in told[:4])
            assert all(isinstance(messages, list) for messages in told[4:])
            assert (await runner.step("b0", "go")).reward == 1
        finally:
            await runner.stop()

    _run(play())


def test_resets_are_served_however_often_processes_die():
    async def play():
        runner = _runner(num_workers=2)
        await runner.start()
        failed = 0
        try:
            for number in range(6):
                resets = [runner.reset(_opening(f"{number}-{n}")) for n in range(4)]
                told = await asyncio.gather(*resets, return_exceptions=True)
                bad = asyncio.ensure_future(runner.step(f"{number}-0", "exit"))
                steps = [runner.step(f"{number}-{n}", "go") for n in range(1, 4)]
                late = [runner.reset(_opening(f"{number}-late-{n}")) for n in range(4)]
                told += await asyncio.gather(bad, *steps, *late, return_exceptions=True)
                errors = [one for one in told if isinstance(one, BaseException)]
                assert all(isinstance(error, GameError) for error in errors), errors
                assert all(isinstance(one, list) for one in told[-4:]), told[-4:]
                failed += len(errors)
        finally:
            await runner.stop()
        assert failed >= 6

    _run(play())


def test_a_process_that_closes_its_socket_is_ended_and_replaced():
    async def play():
        runner = _runner("foreign_games:Foreign")
        await runner.start()
        try:
            await runner.reset(_opening("a"))
            with pytest.raises(GameError, match="SIGKILL after it had closed its socket in step"):
                await runner.step("a", "deaf")
            await runner.reset(_opening("b"))
            assert (await runner.step("b", "go")).reward == 1
        finally:
            await runner.stop()

    _run(play())


def test_a_process_that_cannot_be_started_fails_the_reset_alone(monkeypatch):
    async def play():
        runner = _runner()
        await runner.start()
        try:
            await runner.reset(_opening("a"))
            with pytest.raises(GameError, match="exit code 7"):
                await runner.step("a", "exit")
            with monkeypatch.context() as patched:
                patched.setattr("sys.executable", "/nowhere/python")
                with pytest.raises(GameError, match="no process could be started"):
                    await runner.reset(_opening("b"))
            await runner.reset(_opening("c"))
        finally:
            await runner.stop()

    _run(play())
