"""Rewards from functions, endpoints and judges: what they are told, and how they fail."""

import asyncio
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hosting import error_of, hosting
from pydantic import ValidationError
from reward_functions import RAISED, TOLD
from tinkermq.broker.client.parts import PartsService
from tinkermq.broker.client.rpc import Service, call
from tinkermq.envs.reward_sources import read_score
from tinkermq.envs.rewards import load_function
from tinkermq.envs.write_data import verl_row, write_rows
from tinkermq.schemas.config.sections import RewardConfig
from tinkermq.schemas.env import StepReply, StepRequest
from tinkermq.schemas.infer import ChatRequest, Delta, InferPart
from tinkermq.schemas.wire.errors import BusyError, ConfigError, RewardError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.waiting import PATIENCE_S


def _function(name, **more):
    return {"source": "function", "function": f"reward_functions:{name}", **more}


async def _play(client, episode="a", turns=3, sample=None):
    await client.reset(episode, sample=sample)
    return [await client.step(episode, turn) for turn in range(turns)]


async def _finish(client, episode, turn):
    """Say that the policy plays no more, as a generator does at a limit."""
    request = StepRequest(episodes=[episode], turns=[turn], actions=[""], final=[True], wait_s=9)
    subject = client.scope.env(client.host.name, "step")
    reply = await call(
        client.broker, subject, request, StepReply, timeout_s=PATIENCE_S, waiting_for="the host"
    )
    for failed in reply.failed:
        raise failed.error.to_error()
    return reply.rewards[0], reply.infos[0]


@contextlib.contextmanager
def http_server(*answers):
    """Answer requests one after the other with (status, body); the last one over and over."""
    heard = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            heard.append((self.path, body, self.headers.get("Authorization")))
            status, answer = answers[min(len(heard), len(answers)) - 1]
            if status is None:
                return  # hang up without a word
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", heard
        finally:
            server.shutdown()


async def test_a_function_is_called_as_verl_calls_its_own(broker, scope, tmp_path):
    row = verl_row("2+2?", "go", data_source="sums", split="train", index=0)
    row["extra_info"]["level"] = 5
    data = str(write_rows(tmp_path / "rows.parquet", [row]))
    options = {"train_data": [data], "reward": _function("verl_style")}
    async with hosting(broker, scope, **options) as client:
        first, second, last = await _play(client, sample=0)
        assert (first.reward, second.reward, last.reward) == (0, 0, 1)
        assert last.info == {"source": "sums", "level": 5, "game_reward": 3.0}
        assert first.info == {"game_reward": 1.0}


async def test_a_reward_by_turn_is_added_to_the_games_own(broker, scope):
    reward = _function("says_all", per="turn", weight=10, game_weight=0.5)
    async with hosting(broker, scope, reward=reward) as client:
        answers = await _play(client)
        # after system prompt and first user message: the policy's 1st, 2nd, 3rd answer
        assert [answer.reward for answer in answers] == [30.5, 50.5, 70.5]
        known = ["data_source", "extra_info", "ground_truth", "info", "messages", "solution_str"]
        assert answers[0].info["known"] == known
        assert (await _finish_of_another(client))[0] == 0


async def _finish_of_another(client):
    await client.reset("b")
    await client.step("b", 0)
    return await _finish(client, "b", 1)


async def test_an_episode_that_a_limit_ends_is_rewarded_all_the_same(broker, scope):
    async with hosting(broker, scope, reward=_function("says_all")) as client:
        reward, info = await _finish_of_another(client)
        assert reward == 4
        assert info["game_reward"] == 1
        assert await _finish(client, "b", 1) == (reward, info)  # asked again


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "reward_functions:raises raised KeyError: 'no rubric'"),
        ("says_nothing", "answered None, which is no finite reward"),
        ("says_text", "answered '1.0', which is no finite reward"),
        ("says_nan", "answered nan, which is no finite reward"),
        ("hangs", "no reward came within 2 s"),
    ],
)
async def test_a_function_that_fails_is_no_reward_of_0(broker, scope, name, words):
    reward = _function(name, per="turn", timeout_s=2.0 if name == "hangs" else PATIENCE_S)
    async with hosting(broker, scope, reward=reward) as client:
        await client.reset("a")
        error = await error_of(client.step("a", 0), RewardError)
        assert words in error.message
        await client.reset("b")  # the host lives


@pytest.mark.parametrize("name", ["foreign", "foreign_async"])
async def test_whatever_a_function_raises_or_returns_fails_its_own_episode(broker, scope, name):
    words = {raised: f"reward_functions:{name} raised {raised}" for raised in RAISED} | TOLD
    if name == "foreign_async":  # Python's own rule for coroutines
        words["StopIteration"] = "raised RuntimeError: coroutine raised StopIteration"
        words["cancels itself"] = "raised CancelledError"
        words["a task exits"] = "raised SystemExit: 4"
    async with hosting(broker, scope, reward=_function(name, per="turn")) as client:
        for number, (action, expected) in enumerate(words.items()):
            await client.reset(f"e{number}")
            error = await error_of(client.step(f"e{number}", 0, action), RewardError)
            assert expected in error.message
        await client.reset("good")
        assert (await client.step("good", 0)).reward == 2


@pytest.mark.parametrize(
    ("name", "reward"), [("async_object", 3), ("async_part", 2), ("async_in_disguise", 2)]
)
async def test_an_async_function_is_awaited_whatever_it_is_written_as(broker, scope, name, reward):
    async with hosting(broker, scope, reward=_function(name)) as client:
        assert (await _play(client))[-1].reward == reward


async def test_an_async_function_that_hangs_is_cancelled_and_holds_up_nobody(broker, scope):
    reward = _function("foreign_async", per="turn", timeout_s=2.0)
    async with hosting(broker, scope, reward=reward) as client:
        await client.reset("bad")
        await client.reset("good")
        hung = asyncio.create_task(client.step("bad", 0, "wait long"))
        assert (await client.step("good", 0)).reward == 2
        assert "no reward came within 2 s" in (await error_of(hung, RewardError)).message


async def test_an_async_function_that_computes_is_given_up_and_the_next_call_goes_on(broker, scope):
    reward = _function("foreign_async", per="turn", timeout_s=2.0)
    answers = []
    async with hosting(broker, scope, reward=reward) as client:
        for number, action in enumerate(("compute", *["go"] * 4)):
            await client.reset(f"e{number}")
            stepped = client.step(f"e{number}", 0, action)
            (told,) = await asyncio.gather(stepped, return_exceptions=True)
            answers.append(str(told) if isinstance(told, BaseException) else told.reward)
    assert "no reward came within 2 s" in answers[0]
    assert answers[-1] == 2


@pytest.mark.parametrize("name", ["generates", "generates_async"])
def test_a_function_that_yields_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"'reward_functions:{name}' yields"):
        load_function(f"reward_functions:{name}")


@pytest.mark.parametrize(
    "source",
    ["raise KeyboardInterrupt", "raise SystemExit", "class B(BaseException): ...\nraise B"],
)
def test_a_module_that_raises_no_exception_is_told(tmp_path, monkeypatch, source):
    name = f"rewards_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"'{name}:f' cannot be imported: ") as raised:
        load_function(f"{name}:f")
    assert f"raised at {name}.py, line" in raised.value.hint


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("reward_functions:nowhere", "has no attribute 'nowhere'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("reward_functions:not_a_function", "is int, not a function"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(target, words):
    with pytest.raises(ConfigError) as raised:
        load_function(target)
    assert words in raised.value.message


async def test_an_endpoint_is_asked_again_while_it_is_busy(broker, scope, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "secret")
    with http_server((503, b"busy"), (None, b""), (200, {"reward": 0.25, "why": "ok"})) as (
        url,
        heard,
    ):
        reward = {"source": "endpoint", "url": f"{url}/compute_reward"}
        reward["key_variable"] = "REWARD_KEY"
        async with hosting(broker, scope, reward=reward) as client:
            last = (await _play(client))[-1]
    assert last.reward == 0.25
    assert last.info["why"] == "ok"
    assert len(heard) == 3
    path, body, key = heard[-1]
    assert (path, key) == ("/compute_reward", "Bearer secret")
    assert body["solution_str"] == "go"
    assert len(body["messages"]) == 7


@pytest.mark.parametrize(
    ("answer", "words", "num_asked"),
    [
        ((400, b"no such rubric"), "refused: status 400: no such rubric", 1),
        ((200, b"<html>"), "answered no valid JSON", 1),
        ((200, {"points": 3}), "which is no finite reward", 1),
        ((500, b"broken"), "gave no reward in 2 tries", 2),
    ],
)
async def test_an_endpoint_that_fails_is_no_reward_of_0(broker, scope, answer, words, num_asked):
    with http_server(answer) as (url, heard):
        reward = {"source": "endpoint", "url": url, "per": "turn", "tries": 2}
        async with hosting(broker, scope, reward=reward) as client:
            await client.reset("a")
            error = await error_of(client.step("a", 0), RewardError)
    assert words in error.message
    assert len(heard) == num_asked


async def test_a_judge_behind_an_api_reads_the_answer_and_writes_a_score(broker, scope):
    def says(text):
        return (200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    with http_server(says("Fine.\nScore: 7.5"), says("I cannot say"), says("Score: 11")) as (
        url,
        heard,
    ):
        reward = {"source": "judge", "url": f"{url}/v1", "judge": "grader", "per": "turn"}
        reward["judge_prompt"] = "Was $answer good for $question, $ground_truth, 0 to $scale?"
        async with hosting(broker, scope, reward=reward) as client:
            await client.reset("a", start=7)
            assert (await client.step("a", 0)).reward == 0.75
            for episode in ("b", "c"):
                await client.reset(episode)
                error = await error_of(client.step(episode, 0), RewardError)
                assert "the judge grader gave no score from 0 to 10" in error.message
    path, body, _ = heard[0]
    assert (path, body["model"], body["temperature"]) == ("/v1/chat/completions", "grader", 0)
    assert body["messages"][0]["content"] == "Was go good for Go.\n\nfrom 7, None, 0 to 10?"


async def test_a_judge_of_the_pool_is_asked_through_the_broker_and_again_while_it_is_busy(
    broker, scope
):
    heard = []

    async def judge(request, _):
        heard.append(request)
        if len(heard) == 1:
            raise BusyError("all slots are taken", hint="ask later")
        text = "Score: 4" if request.messages[0]["content"] == "go of 8" else "I cannot say"
        return InferPart(deltas=[Delta(choice=0, text=text)])

    reward = {"source": "judge", "judge": "grader", "judge_prompt": "$answer of $scale"}
    reward |= {"judge_scale": 8, "judge_tokens": 5, "game_weight": 10}
    judging = JobScope(scope.user, "j-judge")
    async with (
        await Service.start(broker, name="judge", description="judges") as service,
        hosting(broker, scope, reward=reward, judge_job=judging.job) as client,
    ):
        served = PartsService(broker, service)
        await served.endpoint("chat", judging.infer("chat"), ChatRequest, InferPart, judge)
        assert [answer.reward for answer in await _play(client)] == [10, 10, 10.5]
        await _play(client, "b", turns=2)
        error = await error_of(client.step("b", 2, "stop"), RewardError)
    assert "the judge grader gave no score from 0 to 8: 'I cannot say'" in error.message
    assert len(heard) == 3
    assert (heard[1].decoding.max_tokens, heard[1].decoding.temperature) == (5, 0)


def test_numbers_of_any_kind_are_read():
    import numpy as np

    assert read_score(np.float32(0.5), "f").value == 0.5
    assert read_score(True, "f").value == 1.0
    assert read_score({"score": np.int64(3), "n": 2}, "f").info == {"n": 2}
    with pytest.raises(RewardError, match="cannot travel"):
        read_score({"score": 1, "what": object()}, "f")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"source": "endpoint", "url": "ftp://x"}, "url"),
        ({"weight": 2}, "weight has no effect while source is 'game'"),
        ({"source": "judge", "judge": "x", "key_variable": "K"}, "no effect while url is None"),
    ],
)
def test_what_the_source_does_not_read_is_refused(values, words):
    with pytest.raises(ValidationError, match=words):
        RewardConfig.model_validate(values)
