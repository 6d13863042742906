"""The environment host over a real broker: what callers see, and what a bad game cannot harm."""

import asyncio
import contextlib
import os
import signal
import time
from types import SimpleNamespace

import pytest
from tinkermq.broker.rpc import call
from tinkermq.envs import StepResult
from tinkermq.envs.games import addition
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.thread_runner import MAX_GIVEN_UP
from tinkermq.schemas.config import EnvConfig
from tinkermq.schemas.env import (
    CloseRequest,
    DescribeReply,
    DescribeRequest,
    ResetReply,
    ResetRequest,
    StepReply,
    StepRequest,
)
from tinkermq.schemas.errors import (
    DataError,
    GameError,
    MessageError,
    NotFoundError,
    StateError,
)
from tinkermq.schemas.message import Empty

COUNTING = "broken_games:CountingGame"
ISOLATIONS = pytest.mark.parametrize("isolation", ["thread", "process"])


class Client:
    """What a generator does, without the retries."""

    def __init__(self, broker, scope, host):
        self.broker, self.scope, self.host = broker, scope, host

    async def _call(self, subject, request, reply_model):
        return await call(
            self.broker, subject, request, reply_model, timeout_s=10, waiting_for="the host"
        )

    async def describe(self):
        return await self._call(self.scope.env_describe, DescribeRequest(), DescribeReply)

    async def reset(self, episode, sample=None, seed=0, split="train", **kwargs):
        request = ResetRequest(
            episodes=[episode], split=split, sample=sample, seed=seed, kwargs=kwargs, wait_s=9
        )
        reply = await self._call(self.scope.env_reset, request, ResetReply)
        (opened,) = reply.episodes
        if opened.error is not None:
            raise opened.error.to_error()
        return SimpleNamespace(
            host=reply.host, lease_s=reply.lease_s, messages=reply.prompts[opened.prompt]
        )

    async def step(self, episode, turn, action="go", host=None):
        subject = self.scope.env(host or self.host.name, "step")
        request = StepRequest(episodes=[episode], turns=[turn], actions=[action], wait_s=9)
        reply = await self._call(subject, request, StepReply)
        for failed in reply.failed:
            raise failed.error.to_error()
        (observation,) = reply.observations
        assert observation is not None, "not ready"
        return StepResult(observation, reply.rewards[0], reply.done[0], reply.infos[0])

    async def close(self, episode):
        subject = self.scope.env(self.host.name, "close")
        return await self._call(subject, CloseRequest(episode=episode), Empty)

    async def play_to_the_end(self, episode):
        turn = 0
        while not (await self.step(episode, turn)).done:
            turn += 1
        return turn + 1


@contextlib.asynccontextmanager
async def hosting(broker, scope, game=COUNTING, *, seed=0, max_episodes=100, drain_s=5, **config):
    host = EnvironmentHost(
        broker,
        scope,
        EnvConfig(game=game, **config),
        seed=seed,
        max_episodes=max_episodes,
        drain_s=drain_s,
    )
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(host.run(stopping))
        ready = tasks.create_task(host.ready.wait())
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        ready.cancel()
        client = Client(broker, scope, host)
        client.stopping, client.running = stopping, running
        if host.ready.is_set():
            try:
                yield client
            finally:
                host._drain_s = min(host._drain_s, 0.01 if not stopping.is_set() else drain_s)
                stopping.set()
        else:
            await running


async def error_of(awaitable, kind=GameError):
    with pytest.raises(kind) as error:
        await awaitable
    assert type(error.value) is kind
    return error.value


@ISOLATIONS
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
    config = {"isolation": isolation, "workers": 2, "step_timeout_s": 0.5}
    async with hosting(broker, scope, **config) as client:
        await client.reset("bad")
        await client.reset("good")  # in the other process
        hung = asyncio.create_task(client.step("bad", 0, "hang"))
        await asyncio.sleep(0.1)
        assert await client.play_to_the_end("good") == 3
        error = await error_of(hung)
        assert "hung in step for 0.5 s" in error.message
        assert "env.step_timeout_s" in error.hint
        for number in range(4):  # more than the workers: the hung one was replaced
            await client.reset(f"e{number}")
            assert await client.play_to_the_end(f"e{number}") == 3


@ISOLATIONS
async def test_a_game_that_hangs_in_reset_fails_its_episode(broker, scope, isolation):
    game = "broken_games:HangsInReset"
    config = {"isolation": isolation, "workers": 1, "reset_timeout_s": 0.4}
    async with hosting(broker, scope, game, **config) as client:
        error = await error_of(client.reset("a"))
        assert "hung in reset for 0.4 s" in error.message
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
        assert "the process that held this episode is gone, because of another" in error.message
        assert await client.play_to_the_end("elsewhere") == 3
        await client.reset("next")
        assert await client.play_to_the_end("next") == 3


async def test_a_process_that_is_killed_from_outside_is_survived(broker, scope):
    async with hosting(broker, scope, isolation="process", workers=1) as client:
        await client.reset("a")
        child = client.host._runner._slots[0].process.child
        os.kill(child.pid, signal.SIGKILL)
        error = await error_of(client.step("a", 0))
        assert "SIGKILL" in error.message
        await client.reset("b")
        assert await client.play_to_the_end("b") == 3


async def test_worker_processes_end_with_the_host(broker, scope):
    async with hosting(broker, scope, isolation="process", workers=1) as client:
        await client.reset("a")
        child = client.host._runner._slots[0].process.child
    assert child.returncode == -signal.SIGKILL


async def test_an_episode_left_alone_is_freed(broker, scope):
    async with hosting(broker, scope, lease_s=1.0) as client:
        await client.reset("left")
        await client.reset("kept")
        for turn in range(2):
            await asyncio.sleep(0.6)
            await client.step("kept", turn)
        error = await error_of(client.step("left", 0), NotFoundError)
        assert "freed after 1 s" in error.hint
        assert client.host.counts.expired == 1


async def test_a_full_host_says_so_and_forgets_the_ended_first(broker, scope):
    async with hosting(broker, scope, max_episodes=2) as client:
        await client.reset("a")
        await client.reset("b")
        error = await error_of(client.reset("c"), StateError)
        assert error.message == f"host {client.host.name} holds 2 episodes, its limit"
        await client.play_to_the_end("a")
        await client.reset("c")


async def test_a_stopping_host_takes_no_resets_but_finishes_what_it_holds(broker, scope):
    async with hosting(broker, scope) as old, hosting(broker, scope) as new:
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
        started = time.monotonic()
        await old.running
        assert time.monotonic() - started < 2


async def test_a_stopping_host_does_not_wait_for_ever(broker, scope):
    async with hosting(broker, scope, drain_s=0.3) as client:
        await client.reset("abandoned")
        client.stopping.set()
        async with asyncio.timeout(5):
            await client.running


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa1v\x02"])
async def test_malformed_requests_get_an_error_reply_and_harm_nothing(broker, scope, payload):
    async with hosting(broker, scope) as client:
        await client.reset("a")
        for subject in (scope.env_reset, scope.env(client.host.name, "step"), scope.env_describe):
            reply = await broker.request(subject, payload)
            assert reply.headers["Nats-Service-Error-Code"] == MessageError.code
        assert await client.play_to_the_end("a") == 3
