"""What a bad game does to its episode, and what it cannot do to the others and the host."""

import asyncio
import os
import signal

import pytest
from hosting import ISOLATIONS, error_of, hosting
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.running.runners import MAX_GIVEN_UP
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import DataError, GameError

from tests.envs.hosting import runner_of


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("broken_games:Missing", "module broken_games has no game 'Missing'"),
        ("no_such_module:Game", "game 'no_such_module:Game' cannot be imported: ModuleNotFound"),
        ("broken_games:NotAGame", "does not derive from tinkermq.envs.AbstractGame"),
        ("broken_games:RaisesInInit", "OSError: the emulator is not installed"),
    ],
)
@ISOLATIONS
async def test_a_game_that_cannot_be_made_ends_the_host_with_its_reason(
    broker, scope, isolation, game, message
):
    with pytest.raises(Exception) as group:  # noqa: PT011 - looked at below
        async with hosting(broker, scope, game, isolation=isolation, workers=1):
            pass
    error = group.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GameError)
    assert message in error.message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no dataset file"),
        (lambda path: path.write_text(""), "has no rows"),
        (lambda path: path.write_text('{"question": 1}\n'), "has no column prompt; its columns"),
    ],
)
async def test_data_that_cannot_be_used_ends_the_host_with_its_reason(
    broker, scope, tmp_path, make, message
):
    path = tmp_path / "train.jsonl"
    make(path)
    config = EnvConfig(game="addition", train_data=[str(path)])
    error = await error_of(EnvironmentHost(broker, scope, config).run(asyncio.Event()), DataError)
    assert message in error.message
    assert str(path) in error.message


@ISOLATIONS
async def test_a_game_that_raises_in_reset_fails_its_episode(broker, scope, isolation):
    game = "broken_games:RaisesInReset"
    async with hosting(broker, scope, game, isolation=isolation, workers=1) as client:
        error = await error_of(client.reset("a"))
        assert error.message.startswith("RaisesInReset raised in reset: KeyError: 'no such board'")
        assert 'raise KeyError("no such board")' in error.message
        assert (await client.describe()).game == "raisesinreset"
        assert client.host.num_running == 0


@ISOLATIONS
async def test_a_game_that_raises_in_step_fails_its_episode_alone(broker, scope, isolation):
    async with hosting(broker, scope, isolation=isolation, workers=1) as client:
        await asyncio.gather(client.reset("bad"), client.reset("good"))
        error = await error_of(client.step("bad", 0, "raise"))
        assert error.message.startswith("CountingGame raised in step: ValueError: boom at 42\n")
        assert (await error_of(client.step("bad", 0, "raise"))).message == error.message
        assert await client.play_to_the_end("good") == 3
        assert client.host.counts.failures == 1


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("ReturnsTuple", "must be a StepResult"),
        ("ReturnsNaN", "must be a finite number"),
        ("ReturnsUntravellingInfo", "info cannot travel"),
        ("QuitsThePython", "raised in step: SystemExit: 3"),
    ],
)
@ISOLATIONS
async def test_a_wrong_answer_of_a_game_fails_its_episode(broker, scope, isolation, game, message):
    game = f"broken_games:{game}"
    async with hosting(broker, scope, game, isolation=isolation, workers=1) as client:
        for episode in ("a", "b"):
            await client.reset(episode)
            assert message in (await error_of(client.step(episode, 0))).message


async def test_a_reset_that_returns_no_text_fails_its_episode(broker, scope):
    async with hosting(broker, scope, "broken_games:ReturnsNoText") as client:
        assert "reset is 7 (int), it must be a str" in (await error_of(client.reset("a"))).message


@ISOLATIONS
async def test_a_game_that_hangs_in_step_fails_while_others_go_on(broker, scope, isolation):
    config = {"isolation": isolation, "workers": 2, "step_timeout_s": 2.0}
    async with hosting(broker, scope, **config) as client:
        await client.reset("bad")
        await client.reset("good")  # in the other process
        hung = asyncio.create_task(client.step("bad", 0, "hang"))
        assert await client.play_to_the_end("good") == 3
        error = await error_of(hung)
        assert "hung in step for 2 s" in error.message
        assert "env.step_timeout_s" in error.hint
        for number in range(4):  # more than the workers: the hung one was replaced
            await client.reset(f"e{number}")
            assert await client.play_to_the_end(f"e{number}") == 3


@ISOLATIONS
async def test_a_game_that_hangs_in_reset_fails_its_episode(broker, scope, isolation):
    game = "broken_games:HangsInReset"
    config = {"isolation": isolation, "workers": 1, "reset_timeout_s": 2.0}
    async with hosting(broker, scope, game, **config) as client:
        error = await error_of(client.reset("a"))
        assert "hung in reset for 2 s" in error.message
        assert "env.reset_timeout_s" in error.hint
        assert client.host.num_running == 0


async def test_threads_hung_beyond_the_bound_are_told(broker, scope):
    config = {"workers": 2, "step_timeout_s": 0.3}
    async with hosting(broker, scope, **config) as client:
        count = MAX_GIVEN_UP + 2
        await asyncio.gather(*(client.reset(f"e{n}") for n in range(count)))
        steps = [client.step(f"e{n}", 0, "hang") for n in range(count)]
        errors = await asyncio.gather(*steps, return_exceptions=True)
        assert all("hung in step" in str(error) for error in errors)
        error = await error_of(client.reset("late"))
        assert f"{count} calls of CountingGame have hung" in error.message
        assert "env.isolation=process" in error.hint


async def test_a_process_that_is_ended_fails_its_episodes_and_is_replaced(broker, scope):
    async with hosting(broker, scope, isolation="process", workers=2) as client:
        for episode in ("bad", "elsewhere", "beside"):  # bad and beside share a process
            await client.reset(episode)
        error = await error_of(client.step("bad", 0, "exit"))
        assert "broken_games:CountingGame ended with exit code 7 in step" in error.message
        error = await error_of(client.step("beside", 0))
        assert "the process of this episode was ended because of another" in error.message
        assert await client.play_to_the_end("elsewhere") == 3
        await client.reset("next")
        assert await client.play_to_the_end("next") == 3


async def test_a_process_that_is_killed_from_outside_is_survived(broker, scope):
    async with hosting(broker, scope, isolation="process", workers=1) as client:
        await client.reset("a")
        child = runner_of(client)._slots[0].process.child
        os.kill(child.pid, signal.SIGKILL)
        error = await error_of(client.step("a", 0))
        assert "SIGKILL" in error.message
        await client.reset("b")
        assert await client.play_to_the_end("b") == 3


async def test_worker_processes_end_with_the_host(broker, scope):
    async with hosting(broker, scope, isolation="process", workers=1) as client:
        await client.reset("a")
        child = runner_of(client)._slots[0].process.child
    assert child.returncode == -signal.SIGKILL
