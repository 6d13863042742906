"""The environment host over a real broker: what callers see."""

import asyncio

import pytest
from hosting import ISOLATIONS, error_of, hosting
from structlog.testing import capture_logs
from tinkermq.broker.client.rpc import call
from tinkermq.envs.games import addition
from tinkermq.envs.write_data import verl_row, write_rows
from tinkermq.schemas.env import ResetReply, ResetRequest
from tinkermq.schemas.wire.errors import DataError, MessageError, NotFoundError, StateError

from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S


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


@ISOLATIONS
async def test_the_gold_answer_reaches_neither_prompt_nor_observation(
    broker, scope, tmp_path, isolation
):
    truth = "the-gold-answer"
    row = verl_row("6*7", truth, data_source="telling", split="train", index=0)
    path = write_rows(tmp_path / "rows.jsonl", [row])
    data = {"train_data": [str(path)], "val_data": [str(path)], "isolation": isolation}
    async with hosting(broker, scope, "broken_games:TellingGame", workers=1, **data) as client:
        request = ResetRequest(episodes=["a"], split="train", sample=0, seed=0, wait_s=9)
        opened = await call(
            broker,
            scope.env_reset,
            request,
            ResetReply,
            timeout_s=PATIENCE_S,
            waiting_for="the host",
        )
        assert truth not in str(opened)
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
        with capture_logs() as told:
            for turn in range(2):
                await asyncio.sleep(2.2)
                await client.step("kept", turn)
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


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa1v\x02"])
async def test_malformed_requests_get_an_error_reply_and_harm_nothing(broker, scope, payload):
    async with hosting(broker, scope) as client:
        await client.reset("a")
        for subject in (scope.env_reset, scope.env(client.host.name, "step"), scope.env_describe):
            reply = await broker.request(subject, payload)
            assert reply.headers["Nats-Service-Error-Code"] == MessageError.code
        assert await client.play_to_the_end("a") == 3
