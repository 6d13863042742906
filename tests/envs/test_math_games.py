"""The math and geometry games, where reasoning ends, and what actions are read."""

import asyncio
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tinkermq.envs import StepResult
from tinkermq.envs.check import check_game
from tinkermq.envs.dataset import Dataset, Record
from tinkermq.envs.games import geo3k
from tinkermq.envs.games import math as math_module
from tinkermq.envs.games import math_code as code_module
from tinkermq.envs.games.android_world import parse_answer
from tinkermq.envs.games.geo3k import Geo3KGame, Geo3KToolGame
from tinkermq.envs.games.gomoku import GomokuGame
from tinkermq.envs.games.guess import GuessGame
from tinkermq.envs.games.math import MathGame
from tinkermq.envs.games.math_code import MAX_PROGRAMS, MathCodeGame
from tinkermq.envs.host_replies import ResetAnswer, StepAnswer
from tinkermq.envs.math.grading import answer_of, think_format
from tinkermq.envs.prompt import open_game
from tinkermq.envs.reasoning import (
    MARKS,
    behind_reasoning,
    opened_by,
    tagged,
    tagged_or_last_line,
)
from tinkermq.envs.registry import load_game
from tinkermq.envs.sandbox.sandbox import descendants
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.env import StepReply
from tinkermq.schemas.wire.errors import ConfigError, DataError, GameError
from tinkermq.schemas.wire.images import images_of, plain_text

from tests.support.configs import example

PLAIN = {"packages": [], "time_s": 5}


def coding(**kwargs):
    game = MathCodeGame(**{"sandbox": PLAIN, **kwargs})
    game.reset(ground_truth="408", data_source="unknown", extra_info={"reward": 1, "step": 2})
    return game


def fenced(*programs):
    return "\n".join(f"```python\n{program}\n```" for program in programs)


def called(code, name="code_interpreter"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


@pytest.mark.parametrize(
    ("module", "kwargs"),
    [
        (math_module, {}),
        (math_module, {"rewards": {"answer": 0.9, "think": 0.1}}),
        (code_module, {"sandbox": PLAIN}),
        (code_module, {"sandbox": {**PLAIN, "keep_state": True}, "tool_format": "hermes"}),
    ],
)
def test_every_check_of_the_game_passes(module, kwargs, tmp_path):
    train, val = module.make_data(tmp_path, 4, 2, seed=3)
    name = module.__name__.rpartition(".")[2]
    config = EnvConfig(game=name, kwargs=kwargs, train_data=[str(train)], val_data=[str(val)])
    results = check_game(config)
    assert [result for result in results if not result.ok] == []
    assert "gold answers score full marks" in [result.name for result in results]


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        (r"\boxed{2}", 1),
        ("2", 0),
        (r"\boxed{0 1 2 3 4 5 6 7 8 9}", 0),
        (r"\boxed{1+1}", 0),
        (r"\boxed{1} \boxed{2} \boxed{3}", 0),
        ("", 0),
        ("\\boxed{" * 500, 0),
    ],
)
@pytest.mark.parametrize("data_source", ["math", "never heard of"])
def test_only_the_answer_scores_whatever_the_source_is_called(action, reward, data_source):
    game = MathGame()
    game.reset(ground_truth="2", data_source=data_source)
    result = game.step(action)
    assert (result.reward, result.done, result.info["success"]) == (reward, True, reward == 1)


def test_a_program_is_run_and_what_it_prints_is_the_observation():
    game = coding()
    ran = game.step(f"Let me compute.\n{fenced('a = 12', 'print(a * 34)')}")
    assert (ran.observation, ran.reward, ran.done) == ("[nothing was printed]\n408", 0.0, False)
    done = game.step(r"\boxed{408}")
    assert (done.reward, done.done) == (1.0, True)
    assert done.info["programs"] == 2


def test_a_box_in_a_program_or_in_what_it_prints_is_no_answer():
    game = coding()
    result = game.step(fenced(r"print(r'\boxed{408}')"))
    assert (result.observation, result.done) == (r"\boxed{408}", False)
    assert game.step(f"<think>\\boxed{{408}}\n{fenced('1')}").info == {"no_action": True}


def test_an_answer_beside_a_program_ends_the_episode_and_nothing_is_run():
    result = coding().step(f"{fenced('1')}\nso \\boxed{{7}}")
    assert (result.reward, result.done, result.info["programs"]) == (0.0, True, 0)


@pytest.mark.parametrize(
    "action", ["", "I do not know.", "```python\nprint(1)", "```js\n1\n```", "<think>```py\n1\n```"]
)
def test_without_program_and_answer_the_policy_is_reminded(action):
    result = coding().step(action)
    assert "neither a program nor an answer" in result.observation
    assert (result.reward, result.done, result.role) == (0.0, False, "user")


def test_a_call_of_the_tool_is_answered_by_the_tool():
    game = coding(tool_format="hermes")
    (tool,) = game.get_tools()
    assert tool["function"]["name"] == "code_interpreter"
    assert tool["function"]["parameters"]["required"] == ["code"]
    result = game.step(f"I compute. {called('print(12 * 34)')}")
    assert (result.observation, result.role) == ("408", "tool")
    assert game.step(fenced("1")).info == {"no_action": True}


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "code_interpreter", "arguments": "{"}</tool_call>',
        '<tool_call>{"name": "code_interpreter", "arguments": {"code": 3}}</tool_call>',
        '<tool_call>{"name": "code_interpreter", "arguments": [1]}</tool_call>',
        called("1", name="shell"),
    ],
)
def test_a_call_that_is_none_is_told_so(call):
    result = coding(tool_format="hermes").step(call)
    assert "no call of a tool" in result.observation
    assert (result.role, result.info["failed_programs"]) == ("tool", 1)


def test_variables_last_one_turn_unless_they_are_kept():
    before = sandboxes()  # of earlier tests
    forgetful, keeping = coding(), coding(sandbox={**PLAIN, "keep_state": True})
    for game, words in ((forgetful, "NameError"), (keeping, "3")):
        assert game.step(fenced("x = 3", "x")).observation.endswith("3")
        assert words in game.step(fenced("x")).observation
    keeping.close()
    assert sandboxes() <= before


def sandboxes():
    found = set()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text() == "bwrap\n":
                found.add(pid)
    return found


def test_a_turn_is_bounded_in_programs_time_and_what_is_shown():
    patient = coding(sandbox={**PLAIN, "time_s": 120}, max_output_chars=40)
    many = patient.step(fenced(*["1"] * (MAX_PROGRAMS + 1))).observation
    assert many == "\n".join(
        ["1"] * MAX_PROGRAMS + [f"[only {MAX_PROGRAMS} programs are run in one turn]"]
    )
    hurried = coding(sandbox={**PLAIN, "time_s": 0.5})
    slow = hurried.step(fenced("while True: pass", "1")).observation
    over = "[not run: the time of this turn is over]"
    assert slow == f"[stopped: it took too much CPU time]\n{over}"
    waiting = coding(sandbox={**PLAIN, "clock_s": 0.5}).step(fenced("import time; time.sleep(99)"))
    assert waiting.observation == "[stopped: it ran for too long]"
    long = patient.step(fenced("'a' * 100 + 'b' * 100")).observation
    assert long == f"{'a' * 20}\n[160 characters left out]\n{'b' * 20}"


@pytest.mark.parametrize("name", ["math", "gsm8k", "math_code", "gsm8k_code"])
def test_the_game_of_an_example_can_be_made(name):
    env = parse_config(example(name)).env
    game = load_game(env.game)(**env.kwargs)
    assert bool(game.get_tools()) == ("hermes" in env.kwargs.values())


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"tool_format": "xml"}, "tool_format is 'xml'"),
        ({"sandbox": {"memory": 1}}, "env.kwargs.sandbox.memory"),
        ({"rewards": {"luck": 1}}, "env.kwargs.rewards.luck"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(kwargs, words):
    with pytest.raises(ConfigError, match=words):
        MathCodeGame(**kwargs)


# -- The two geometry3k games: what answers and tries are worth, and the data with its drawings ----


RIGHT, WRONG = r"So \boxed{3}", r"So \boxed{4}"


@pytest.mark.parametrize("name", ["geo3k", "geo3k_tool"])
def test_every_check_of_the_geometry_games_passes(name, tmp_path):
    train, val = geo3k.make_data(tmp_path, 4, 2, seed=3)
    results = check_game(EnvConfig(game=name, train_data=[str(train)], val_data=[str(val)]))
    assert [result for result in results if not result.ok] == []
    assert "gold answers score full marks" in [result.name for result in results]


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        (r"<think>three sides</think>\boxed{3}", 1.0),
        (RIGHT, 0.9),
        (r"<think>three sides</think>\boxed{4}", 0.1),
        (WRONG, 0.0),
        ("It is 3.", 0.0),  # the right answer within a text earns nothing
    ],
)
def test_one_turn_earns_accuracy_and_format(action, reward):
    game = Geo3KGame()
    game.reset(ground_truth="3")
    result = game.step(action)
    assert result.done
    assert result.reward == pytest.approx(reward)
    assert result.info["success"] == (reward >= 0.9)


@pytest.mark.parametrize(
    ("actions", "rewards"),
    [
        ([RIGHT], [1.0]),
        ([WRONG, RIGHT], [-0.05, 1.0]),
        ([WRONG, "no", RIGHT], [-0.05, -0.05, 1.0]),
        ([WRONG, WRONG, WRONG], [-0.05, -0.05, 0.0]),
    ],
)
def test_each_try_that_is_no_better_costs_something(actions, rewards):
    game = Geo3KToolGame()
    game.reset(ground_truth="3")
    results = [game.step(action) for action in actions]
    assert [result.reward for result in results] == pytest.approx(rewards)
    assert [result.done for result in results] == [False] * (len(actions) - 1) + [True]
    assert results[-1].info["tries"] == len(actions)


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (WRONG, "4"),
        (r"\boxed{\frac{1}{2}} or \boxed{2\sqrt{3}}", r"2\sqrt{3}"),
        ("4", "(no boxed answer)"),
    ],
)
def test_the_policy_is_told_what_was_read_of_its_answer(action, answer):
    game = Geo3KToolGame()
    game.reset(ground_truth="3")
    assert game.step(action).observation == f"Current parsed answer={answer} reward=0.0"


def test_the_drawing_of_a_row_stands_in_the_first_prompt(tmp_path):
    train, _ = geo3k.make_data(tmp_path, 3, 1)
    record = Dataset([train]).record(0)
    messages = open_game(Geo3KGame(), seed=0, record=record, kwargs={})
    assert plain_text(messages[0]["content"]) == "[image]Corners?"
    (encoded,) = images_of(messages)
    assert Image.open(io.BytesIO(encoded)).size == (geo3k.SIDE, geo3k.SIDE)


def test_an_image_that_no_tag_names_is_refused():
    record = Record([{"role": "user", "content": "<image>What?"}], "4", images=[b"a", b"b"])
    with pytest.raises(DataError, match="has 2 images, its prompt names 1"):
        record.messages()


# -- Where reasoning ends, and what the readers of answers make of one that was cut ----------------


CUT = r"<think>" + "\n" + r"maybe \boxed{5}, let me check again"


@pytest.mark.parametrize("opening", MARKS)
def test_a_prompt_opens_the_reasoning_with_its_last_words(opening: str) -> None:
    closing = MARKS[opening]
    for space in ("", "\n", " \n\n"):
        assert opened_by(f"<|assistant|>{opening}{space}") == opening + space
    for prompt in (
        f"<|assistant|>{opening}\n\n{closing}\n\n",
        f"{opening}\nhm",
        f"write {opening} first<|end|><|assistant|>",
        "",
    ):
        assert opened_by(prompt) == ""


@pytest.mark.parametrize("opening", MARKS)
def test_what_is_said_stands_behind_the_reasoning(opening: str) -> None:
    closing = MARKS[opening]
    assert behind_reasoning(f"{opening}\nhm{closing}\n\n5") == "\n\n5"
    assert behind_reasoning(f" \n{opening}a{closing}b{closing}5") == "5"
    assert behind_reasoning(f"{opening}\nhm, 5") == ""
    assert behind_reasoning(f"I {opening} 5") == f"I {opening} 5"
    assert behind_reasoning("5") == "5"


def test_math_that_was_cut_while_it_reasoned_earns_nothing() -> None:
    for rewards in ({"answer": 1.0}, {"answer": 0.9, "think": 0.1}, {"boxed": 1.0}):
        game = MathGame(rewards)
        game.reset(ground_truth="5")
        assert game.step(CUT).reward == 0.0
        game.reset(ground_truth="5")
        assert game.step(CUT + r"</think>It is \boxed{5}.").reward == pytest.approx(1.0)


@pytest.mark.parametrize("opening", MARKS)
def test_no_answer_is_found_in_reasoning_that_was_cut(opening: str) -> None:
    said = rf"{opening}maybe \boxed{{5}} <action>go</action>"
    assert answer_of(said) is None
    assert tagged(said, "action") is None
    assert tagged_or_last_line(said, "action") == ""
    whole = rf"{said}{MARKS[opening]}<action>stay</action> \boxed{{6}}"
    assert answer_of(whole) == "6"
    assert tagged(whole, "action") == tagged_or_last_line(whole, "action") == "stay"


def test_thinking_that_the_prompt_opened_has_its_format() -> None:
    assert think_format("<think>\nhm\n</think>\n\n\\boxed{5}") == 1.0
    assert think_format(CUT) == 0.0


def test_games_read_the_action_behind_the_reasoning() -> None:
    assert GuessGame().parse_action("<think>3?</think>\n 4 ") == "4"
    assert GuessGame().parse_action("<think>3") == ""
    assert parse_answer('<think>Action: {"action_type": "wait"}') is None
    assert parse_answer('<think>hm</think>Action: {"action_type": "wait"}') == {
        "action_type": "wait"
    }
    game = GomokuGame()
    assert game._cell("<think><move>1,1</move>")[0] is None


# -- The action is what stands in the last tag, or the last line -----------------------------------


@pytest.mark.parametrize(
    ("text", "inside", "action"),
    [
        ("<action> go </action>", "go", "go"),
        ("I may <action>look</action>, no: <ACTION>take\nit</ACTION>.", "take\nit", "take\nit"),
        ("thinking\ngo north\n\n", None, "go north"),
        ("<action>open", None, "<action>open"),
        ("", None, ""),
    ],
)
def test_an_action_is_found(text, inside, action):
    assert tagged(text, "action") == inside
    assert tagged_or_last_line(text, "action") == action


# -- What a host answers for many episodes at once: one that cannot be told fails alone ------------


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
