"""What a judge writes is read in one form, and what its endpoint refuses is told or adapted to."""

import json

import pytest
from hosting import error_of, hosting
from pydantic import ValidationError
from test_rewards import http_server
from tinkermq.envs.reward_sources import read_judgement, refused_field
from tinkermq.schemas.config.sections import RewardConfig, check_judge_prompt
from tinkermq.schemas.wire.errors import ConfigError, RewardError


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
    with pytest.raises(ValueError, match=r"says|ends|holds|gives"):
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
        (_says("Score: -3"), "which is no `Score: N`"),
        (_says("Score: 1", finish="length"), "was cut at 256 tokens"),
        (_says(None), "says nothing"),
        (_says([{"type": "text", "text": "Score: 3"}]), "content is no text"),
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
        with pytest.raises(ConfigError, match="does not say how the judge is to answer"):
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
