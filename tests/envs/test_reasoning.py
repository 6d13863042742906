"""Where reasoning ends, and what the readers of answers make of one that was cut."""

import pytest
from tinkermq.envs.games.android_world import parse_answer
from tinkermq.envs.games.gomoku import GomokuGame
from tinkermq.envs.games.guess import GuessGame
from tinkermq.envs.games.math import MathGame
from tinkermq.envs.math.grading import answer_of, think_format
from tinkermq.envs.reasoning import (
    MARKS,
    behind_reasoning,
    opened_by,
    tagged,
    tagged_or_last_line,
)

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
