"""How episodes run: thousands at once, steps that hang, code of users that fails."""

import asyncio
import os
import random
import select
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest
import uvloop
from broken_games import Waits
from foreign_games import BLAMED, RAISED
from hosting import COUNTING, ISOLATIONS, hosting, runner_of
from test_host import START, act, hosted, take
from test_host import hosted as serving
from tinkermq.clients.base import unwrap_error_groups
from tinkermq.envs import StepResult, host_client
from tinkermq.envs.data import HostData
from tinkermq.envs.games.bandit import BanditGame
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.registry import load_game
from tinkermq.envs.running.episodes import LOOK_S, Opening, TimedOut, TimeLimits
from tinkermq.envs.running.global_random import GlobalRandom
from tinkermq.envs.running.local import LocalGame
from tinkermq.envs.running.process_runner import ProcessRunner
from tinkermq.envs.running.runners import TimedRunner, make_runner
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.profile import TimeUse
from tinkermq.schemas.wire.errors import GameError

from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full

MANY = [f"e{number}" for number in range(2000)]


async def play(caller, host, episode, first="go"):
    """Play an episode to its end; return its observations."""
    seen = []
    for turn in range(3):
        result = await caller.step(host.name, episode, turn, first if turn == 0 else "go")
        seen.append(result.observation)
    assert result.done
    return seen


@pytest.fixture
def patient(monkeypatch):
    """Let callers wait for a host that a slow machine keeps busy with all others' questions."""
    monkeypatch.setattr(host_client, "_ANSWER_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
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


@pytest.mark.usefixtures("patient")
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


# -- Code of users costs its own episode only, whatever it raises and whatever it returns ----------


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
        reply = await client.reset_reply(f"r{number}", trouble=trouble)
        (opened,) = reply.episodes
        messages.append("" if opened.error is None else opened.error.message)
    return messages


async def _step_all(client, actions):
    """Reset an episode for each action and play all in one request; return its reply."""
    names = [f"e{number}" for number in range(len(actions))]
    for name in names:
        await client.reset(name)
    return await client.step_reply(names, 0, list(actions))


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
            for number in range(3):
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
        assert failed >= 3

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


def test_a_process_that_dies_is_noticed_though_it_has_forked_another():
    async def play():
        runner = _runner("foreign_games:Forks")
        await runner.start()
        messages = await runner.reset(_opening("a"))
        forked = int(messages[-1]["content"].split()[-1])
        try:
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(GameError, match="exit code 7"):
                    await runner.step("a", "exit")
                await runner.reset(_opening("b"))
                assert (await runner.step("b", "go")).reward == 1
                await runner.stop()
        finally:
            os.kill(forked, signal.SIGKILL)

    _run(play())


def test_a_process_is_killed_with_those_that_it_has_forked():
    async def play():
        runner = _runner("foreign_games:Forks")
        await runner.start()
        messages = await runner.reset(_opening("a"))
        forked = os.pidfd_open(int(messages[-1]["content"].split()[-1]))
        await runner.stop()
        ended, _, _ = select.select([forked], [], [], PATIENCE_S)
        os.close(forked)
        assert ended

    _run(play())


def test_a_process_starts_in_a_folder_with_a_file_named_as_a_module_of_python(
    tmp_path, monkeypatch
):
    (tmp_path / "select.py").write_text("")
    monkeypatch.chdir(tmp_path)

    async def play():
        runner = _runner()
        try:
            assert (await runner.start()).name == "counting"
        finally:
            await runner.stop()

    _run(play())


def test_a_game_may_take_the_time_of_a_reset_to_start_and_longer_to_be_imported(monkeypatch):
    async def play():
        monkeypatch.setattr("tinkermq.envs.running.episodes.IMPORT_S", 0.0)
        runner = _runner()  # a reset has 60 s
        starting = asyncio.create_task(runner.start())
        try:
            while not starting.done():
                runner.end_overdue()
                await asyncio.sleep(LOOK_S)
            assert (await starting).name == "counting"
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


# -- A host knows for how long all of its workers play, some, and none -----------------------------


class HeldBandit(BanditGame):
    """A bandit that answers when the test says so."""

    released = threading.Semaphore(0)

    def step(self, action: str) -> StepResult:
        """Wait, then pull the arm."""
        assert self.released.acquire(timeout=PATIENCE_S)
        return super().step(action)


async def test_the_workers_of_a_host_are_all_at_work_some_or_none() -> None:
    now = 0.0
    use = TimeUse("full", "play", rest="idle", clock=lambda: now)
    config = EnvConfig(game="none", workers=2)
    games = make_runner(config, HeldBandit)
    timed = TimedRunner(games, config, 2, use)
    await timed.start()
    for episode in "abc":
        await timed.reset(Opening(episode, seed=0))
    now = 1.0
    steps = [asyncio.ensure_future(timed.step(episode, "1")) for episode in "abc"]
    now = 3.0  # all three were asked; two play, and one waits for a worker
    HeldBandit.released.release()
    await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
    now = 7.0  # the two others play
    HeldBandit.released.release()
    await asyncio.wait([step for step in steps if not step.done()], return_when="FIRST_COMPLETED")
    now = 15.0  # the last one plays alone
    HeldBandit.released.release()
    await asyncio.wait(steps)
    now = 31.0
    assert use.totals() == {"full": 6.0, "play": 8.0, "idle": 17.0}
    await games.stop()


# -- Episodes that draw from the process-wide generators draw each from a state of its own ---------


def draw(dice):
    with dice.lent():
        return random.random(), np.random.random()


def test_episodes_that_take_turns_draw_what_they_would_draw_alone():
    alone = [draw(dice) for dice in [GlobalRandom(5)] for _ in range(3)]
    one, other = GlobalRandom(5), GlobalRandom(6)
    mixed = []
    for _ in range(3):
        mixed.append(draw(one))
        draw(other)
    assert mixed == alone


def test_afterwards_the_generators_are_as_before():
    before = random.getstate(), repr(np.random.get_state(legacy=False))
    dice = GlobalRandom(5)
    draw(dice)
    with pytest.raises(ValueError, match="half-way"):
        fail_half_way(dice)
    assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before


def fail_half_way(dice):
    with dice.lent():
        random.seed(1)
        raise ValueError("half-way")


# -- A step that takes its game too long ends the episode as `env.on_step_timeout` says ------------


HUNG_S = 2.0
"""What goes on beside a game that hangs takes less, on a slow machine, too."""
PENALTY = {"on_step_timeout": "penalty", "step_timeout_reward": -2.5, "step_timeout_s": HUNG_S}
MASK = {"on_step_timeout": "mask", "step_timeout_s": HUNG_S}


@pytest.mark.parametrize("isolation", [None, "thread", "process"])
async def test_an_action_that_hangs_is_rewarded_and_ends_its_episode(broker, scope, isolation):
    told = PENALTY | {"isolation": isolation, "workers": 2}
    async with hosted(broker, scope, "CountingGame", **told) as (served, caller):
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
    async with hosted(broker, scope, "Waits", **MASK) as (_, caller):
        bad = await caller.reset("bad", START)
        ended = await caller.step(bad.host, "bad", 0, "hang")
        assert isinstance(ended, TimedOut)
        assert (ended.reward, ended.done) == (0.0, True)


@ISOLATIONS
async def test_by_default_the_episode_has_failed(broker, scope, isolation):
    told = {"isolation": isolation, "step_timeout_s": HUNG_S}
    async with hosted(broker, scope, "CountingGame", **told) as (_, caller):
        bad = await caller.reset("bad", START)
        with pytest.raises(GameError, match="hung in step"):
            await caller.step(bad.host, "bad", 0, "hang")


async def test_a_reset_that_hangs_is_nobodys_action(broker, scope):
    told = PENALTY | {"reset_timeout_s": HUNG_S}
    async with hosted(broker, scope, "HangsInReset", **told) as (_, caller):
        with pytest.raises(GameError, match="hung in reset"):
            await caller.reset("a", START)


async def test_a_reward_function_is_not_asked_about_what_hung(broker, scope):
    reward = {"source": "function", "function": "reward_functions:raises"}
    async with hosted(broker, scope, "CountingGame", reward=reward, **PENALTY) as (_, caller):
        bad = await caller.reset("bad", START)
        assert (await caller.step(bad.host, "bad", 0, "hang")).reward == -2.5


async def test_of_a_table_the_role_that_hung_is_rewarded_and_all_have_ended(broker, scope):
    async with hosted(broker, scope, "TurnsGame", **PENALTY) as (_, caller):
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


NEEDY = """
from broken_games import CountingGame
from tinkermq.envs.registry import Extra

class Plain(CountingGame):
    needs = Extra("a_package_that_takes_time", "pip install it")

class Async(Plain):
    async def step(self, action):
        return super().step(action)
"""


@pytest.mark.parametrize("limit_s", [300.0, 0.01])
@pytest.mark.parametrize(
    ("name", "isolation"), [("Plain", "thread"), ("Plain", "process"), ("Async", None)]
)
def test_a_package_has_its_own_time_to_be_imported(tmp_path, monkeypatch, name, isolation, limit_s):
    (tmp_path / "needy.py").write_text(NEEDY)
    (tmp_path / "a_package_that_takes_time.py").write_text("import time\ntime.sleep(1.5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_package_that_takes_time", raising=False)
    monkeypatch.setattr("tinkermq.envs.running.episodes.IMPORT_S", limit_s)
    times = {"reset_timeout_s": 1.0, "step_timeout_s": 1.0}
    config = EnvConfig.model_validate({"game": f"needy:{name}", "isolation": isolation, **times})

    async def start():
        runner = make_runner(config)
        starting = asyncio.create_task(runner.start())
        try:
            while not starting.done():
                await asyncio.sleep(LOOK_S)
                runner.end_overdue()
            return (await starting).name
        finally:
            await runner.stop()

    if limit_s > 1:
        assert _run(start())
    else:
        with pytest.raises(GameError, match=r"the import of .* did not end within 1 s"):
            _run(start())
