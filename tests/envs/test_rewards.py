"""Rewards from functions, endpoints and judges."""

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
from tinkermq.broker.client.rpc import Service
from tinkermq.envs.reward_sources import read_judgement, read_score, refused_field
from tinkermq.envs.rewards import load_function
from tinkermq.envs.write_data import verl_row, write_rows
from tinkermq.schemas.config.sections import RewardConfig, check_judge_prompt
from tinkermq.schemas.generation import Delta
from tinkermq.schemas.infer import ChatRequest, InferPart
from tinkermq.schemas.wire.errors import BusyError, ConfigError, RewardError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full


def _function(name, **more):
    return {"source": "function", "function": f"reward_functions:{name}", **more}


async def _play(client, episode="a", turns=3, sample=None):
    await client.reset(episode, sample=sample)
    return [await client.step(episode, turn) for turn in range(turns)]


async def _finish(client, episode, turn):
    """Say that the policy plays no more, as a generator does at a limit."""
    result = await client.finish(episode, turn)
    return result.reward, result.info


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


async def test_what_the_game_gives_for_an_episode_that_a_limit_ends_is_added(broker, scope):
    reward = _function("says_all", weight=10, game_weight=0.5)
    async with hosting(broker, scope, "tests.support.games:EndsEarly", reward=reward) as client:
        total, info = await _finish_of_another(client)
        assert total == 10 * 4 + 0.5 * 11
        assert (info["game_reward"], info["cut_after"]) == (11, 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "reward_functions:raises raised KeyError: 'no rubric'"),
        ("says_nothing", "answered None, which is not a finite reward"),
        ("says_text", "answered '1.0', which is not a finite reward"),
        ("says_nan", "answered nan, which is not a finite reward"),
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
        ((200, {"points": 3}), "which is not a finite reward", 1),
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
        text = "Score: 4" if request.messages[0].content == ("go of 8",) else "I cannot say"
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


# What a judge writes is read in one form, and what its endpoint refuses is told or adapted to.


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7.5", 7.5),
        ("score: 0", 0),
        ("SCORE:10", 10),
        ("Score: .5", 0.5),
        ("Score: 10.0\n\n  ", 10),
        ("It is right.\r\nScore: 8\r\n", 8),
        ("<think>score 3</think>\nScore: 9", 9),
        ("<think>Score: 3</think>Score: 9", 9),
        ("<thinking>Score: 1\n</thinking>\nSo.\nScore: 9", 9),
        ("Score: 3, perhaps?</think>\nScore: 9", 9),  # the template opened the thinking
        ("A score of 3 out of 10 would be too low.\nScore: 8", 8),
    ],
)
def test_the_last_line_gives_the_score(reply, score):
    assert read_judgement(reply, 10) == pytest.approx(score / 10)


@pytest.mark.parametrize(
    "reply",
    [
        *("Score: -3", "Score: −3", "Score (0-10): 8", "Score: 0-10: 8", "Score: 8/10"),
        *("Score: 8 / 10", "Score: 8 out of 10", "Score: 80%", "Score: 8 or 9", "Score: 7,5"),
        *("Score: nan", "Score: inf", "Score: Infinity", "Score: 1e1", "Score: 1_0", "Score: +8"),
        *("Score: 11", "Score: 10.001", "Score: 99999999999999999999", "Score: ٣", "Score: 八"),
        *("Score: eight", "Score: ", "Score:", "Score 8", "Score = 8", "8", "9\n", "", "  \n"),
        *("Score: 8\nbecause it is right", "Score: 8. Well done!", "Score: 8 (good)", "8 Score:"),
        *("Score: 3\nScore: 8", "Score: 3 Score: 8", "Score: N", "Final score: 8", "**Score: 8**"),
        *("<think>score 3</think>\n9", "<think>Score: 3</think>", "<think>maybe\nScore: 3"),
        *("<reasoning>Score: 3", "thinking\nScore: 3</think>", '{"score": 8}', "Score: 8\n```"),
    ],
)
def test_anything_else_is_no_score(reply):
    with pytest.raises(ValueError, match=r"says|ends|holds|gives|has no text"):
        read_judgement(reply, 10)


def _says(text, finish="stop"):
    message = {"role": "assistant", "content": text}
    return (200, {"choices": [{"message": message, "finish_reason": finish}]})


def _refuses(field, status=400):
    error = {
        "message": "no",
        "type": "invalid_request_error",
        "param": field,
        "code": "unsupported",
    }
    return (status, {"error": error})


def _judge(url, **more):
    return {"source": "judge", "url": f"{url}/v1", "judge": "grader", "per": "turn", **more}


async def _errors(broker, scope, answers, num=1, **more):
    """Return the errors of so many episodes of one turn, and the requests that were made."""
    with http_server(*answers) as (url, heard):
        async with hosting(broker, scope, reward=_judge(url, **more)) as client:
            found = []
            for number in range(num):
                await client.reset(f"e{number}")
                found.append(await error_of(client.step(f"e{number}", 0), RewardError))
    return found, heard


async def test_the_default_prompt_demands_the_form(broker, scope):
    with http_server(_says("Score: 5")) as (url, heard):
        async with hosting(broker, scope, reward=_judge(url, judge_scale=20)) as client:
            await client.reset("a")
            assert (await client.step("a", 0)).reward == 0.25
    prompt = heard[0][1]["messages"][0]["content"]
    assert prompt.endswith("a number such as 7 or 7.5, from 0 (wrong) to 20 (right).")
    assert "`Score: N`" in prompt


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_says("Score: -3"), "which is not `Score: N`"),
        (_says("Score: 1", finish="length"), "was cut at 256 tokens"),
        (_says(None), "has no text"),
        (_says([{"type": "text", "text": "Score: 3"}]), "content is not a text"),
        ((200, {"choices": []}), "answered no chat completion"),
        ((200, ["Score: 3"]), "answered no chat completion"),
    ],
)
async def test_a_reply_without_a_score_fails_its_episode(broker, scope, answer, words):
    (error,), heard = await _errors(broker, scope, [answer])
    assert words in error.message
    assert len(heard) == 1


@pytest.mark.parametrize("status", [400, 422])
async def test_fields_that_an_endpoint_names_as_refused_are_left_out_from_then_on(
    broker, scope, status
):
    answers = [_refuses("max_tokens", status), _refuses("temperature", status), _says("Score: 5")]
    with http_server(*answers) as (url, heard):
        async with hosting(broker, scope, reward=_judge(url)) as client:
            for episode in "ab":
                await client.reset(episode)
                assert (await client.step(episode, 0)).reward == 0.5
    bodies = [body for _, body, _ in heard]
    assert [("max_tokens" in one, "temperature" in one) for one in bodies] == [
        (True, True),
        (False, True),
        (False, False),
        (False, False),
    ]
    assert bodies[-1]["max_completion_tokens"] == 256


async def test_fields_of_a_judges_requests_are_the_users_to_set(broker, scope):
    request = {"max_tokens": None, "max_completion_tokens": 9, "reasoning_effort": "low"}
    with http_server(_says("Score: 5")) as (url, heard):
        async with hosting(broker, scope, reward=_judge(url, judge_request=request)) as client:
            await client.reset("a")
            await client.step("a", 0)
    body = heard[0][1]
    assert "max_tokens" not in body
    assert (body["max_completion_tokens"], body["reasoning_effort"]) == (9, "low")


@pytest.mark.parametrize(
    "answer",
    [
        _refuses("reasoning_effort"),
        (401, {"error": {"message": "wrong key"}}),
        (404, b"no such model"),
    ],
)
async def test_what_would_be_refused_for_every_conversation_ends_the_host(broker, scope, answer):
    request = {"reasoning_effort": "low"}

    async def play(url):
        async with hosting(broker, scope, reward=_judge(url, judge_request=request)) as client:
            await client.reset("a")
            error = await error_of(client.step("a", 0), ConfigError)
            assert "the judge grader cannot be asked" in error.message
            assert "judge_request" in error.hint
            await client.running

    with http_server(answer) as (url, heard), pytest.raises(ExceptionGroup) as ended:
        await play(url)
    assert ended.group_contains(ConfigError, match="cannot be asked")
    assert len(heard) == 1


async def test_a_conversation_that_is_refused_costs_its_episode_only(broker, scope):
    too_long = (400, {"error": {"param": "messages", "code": "context_length_exceeded"}})
    answers = [_says("Score: 5"), *[too_long] * 9, _says("Score: 4")]
    with http_server(*answers) as (url, _):
        async with hosting(broker, scope, reward=_judge(url)) as client:
            rewards = []
            for number in range(11):
                await client.reset(f"e{number}")
                if number in (0, 10):
                    rewards.append((await client.step(f"e{number}", 0)).reward)
                else:
                    await error_of(client.step(f"e{number}", 0), RewardError)
    assert rewards == [0.5, 0.4]


async def test_an_endpoint_that_refuses_all_without_a_reason_is_not_asked_for_ever(broker, scope):
    async def play(url):
        async with hosting(broker, scope, reward=_judge(url)) as client:
            for number in range(7):
                await client.reset(f"e{number}")
                await error_of(client.step(f"e{number}", 0), RewardError)
            await client.reset("last")
            await error_of(client.step("last", 0), ConfigError)
            await client.running

    with http_server((400, b"no")) as (url, heard), pytest.raises(ExceptionGroup) as ended:
        await play(url)
    assert ended.group_contains(ConfigError, match="cannot be asked")
    assert len(heard) == 8


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ({"error": {"param": "max_tokens"}}, "max_tokens"),
        ({"error": {"param": None, "message": "max_tokens"}}, ""),
        ({"object": "error", "param": "temperature"}, "temperature"),
        ({"detail": [{"loc": ["body", "max_tokens"], "msg": "extra"}]}, "max_tokens"),
        ({"detail": "Not Found"}, ""),
        ({"error": "bad"}, ""),
        ({"error": {"param": "messages[0].content"}}, "messages"),
        ([], ""),
        ({"detail": []}, ""),
        ({"detail": [{"loc": None}]}, ""),
        ({"error": {"param": 7}}, ""),
    ],
)
def test_the_field_that_is_refused_is_read_where_apis_write_it(answer, field):
    assert refused_field(json.dumps(answer)) == field


def test_a_prompt_that_does_not_demand_the_form_is_refused_at_submission():
    for prompt in ("Grade $answer from 0 to $scale.", "Give a score", "$formal"):
        with pytest.raises(ConfigError, match="does not demand a score"):
            check_judge_prompt(RewardConfig(source="judge", judge="x", judge_prompt=prompt))
    for prompt in ("Grade $answer. $form", "… ${form}", "End with a line `Score: N`.", None):
        check_judge_prompt(RewardConfig(source="judge", judge="x", judge_prompt=prompt))


@pytest.mark.parametrize(
    "reward",
    [
        {"source": "endpoint", "url": "http://x", "judge_request": {"top_p": 1}},
        {"source": "judge", "judge": "x", "judge_request": {"top_p": 1}},
    ],
)
def test_fields_of_requests_that_nobody_makes_are_refused(reward):
    with pytest.raises(ValidationError, match="judge_request has no effect"):
        RewardConfig.model_validate(reward)
