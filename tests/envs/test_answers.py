"""What a host answers for many episodes at once: one that cannot be told fails alone."""

import asyncio
from typing import Any

import pytest
from tinkermq.envs import StepResult
from tinkermq.envs.host_replies import ResetAnswer, StepAnswer
from tinkermq.schemas.env import StepReply
from tinkermq.schemas.wire.errors import GameError


def done(outcome: Any) -> "asyncio.Future[Any]":
    """Return a future that has ended so."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    if isinstance(outcome, asyncio.CancelledError):
        future.cancel()
    elif isinstance(outcome, BaseException):
        future.set_exception(outcome)
        future.exception()
    else:
        future.set_result(outcome)
    return future


GOOD = StepResult("go on", 1.0, done=False)
MOST = 900_000
BAD = {
    "an error of the game": (GameError("it is broken"), "it is broken"),
    "an error of the host": (KeyError("no seat"), "the environment host failed: KeyError"),
    "a bare interrupt": (KeyboardInterrupt(), "the environment host failed: KeyboardInterrupt"),
    "one that was cancelled": (asyncio.CancelledError(), "was cancelled"),
    "a long observation": (
        StepResult("x" * (MOST + 1), 0.0, done=True),
        "the game has 900,001 bytes",
    ),
    "wide characters": (
        StepResult("日" * (MOST // 2), 0.0, done=True),
        "the game has 1,350,000 bytes",
    ),
    "an info of a program": (StepResult("", 0.0, True, {"x": object()}), "cannot travel"),
    "an observation of a program": (StepResult("\ud83d", 0.0, True), "cannot travel"),
}


@pytest.mark.parametrize(("bad", "words"), BAD.values(), ids=BAD)
async def test_a_bad_answer_fails_its_own_episode(bad: Any, words: str) -> None:
    answer = StepAnswer(MOST)
    for outcome in (GOOD, bad, GOOD):
        answer.add(done(outcome))
    payload = answer.reply().to_bytes()
    assert len(payload) < 1 << 20
    reply = StepReply.from_bytes(payload)
    assert reply.observations == ["go on", None, "go on"]
    (failed,) = reply.failed
    assert failed.index == 1
    assert words in failed.error.message


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([{"role": "user", "content": "x" * MOST}], "the first prompt of the game has 900,0"),
        ([{"role": "user", "content": "\ud83d"}], "cannot pack"),
        (KeyError("no seat"), "the environment host failed: KeyError"),
        (asyncio.CancelledError(), "was cancelled"),
    ],
)
async def test_a_bad_first_prompt_fails_its_own_episode(bad: Any, words: str) -> None:
    answer, good = ResetAnswer(MOST), [{"role": "user", "content": "go"}]
    for outcome in (good, bad, good):
        answer.add(done(outcome))
    assert [one.prompt for one in answer.episodes] == [0, None, 0]
    assert answer.episodes[1].error is not None
    assert words in answer.episodes[1].error.message


async def test_many_lists_of_many_episodes_still_arrive() -> None:
    answer = StepAnswer()
    result = StepResult("", 0.0, False, {"x": [[] for _ in range(9_000)]})
    for _ in range(60):
        answer.add(done(result))
    reply = StepReply.from_bytes(answer.reply().to_bytes())  # which bounds their number
    ready = [observation is not None for observation in reply.observations]
    assert 5 < sum(ready) < 60
    assert not reply.failed
