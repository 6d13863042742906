"""Gomoku as the policy meets it: OpenTinker's rewards and limits, without its mistakes."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tinkermq.envs.check import check_game
from tinkermq.envs.conversations import converse, returns
from tinkermq.envs.games import gomoku
from tinkermq.envs.games.gomoku import MAX_INVALID, GomokuGame, draw_position
from tinkermq.envs.games.row_games import Board
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.config.load_config import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def move(row, column):
    return f"<move>{row},{column}</move>"


def started(seed=0, *, moves=(), colour="x", **kwargs):
    game = GomokuGame(**{"opponent": "random", **kwargs})
    game.rng = random.Random(seed)
    game.reset(moves=moves, colour=colour)
    return game


def four_against_nothing(colour):
    """Return moves after which this colour has four open stones, and is to move."""
    four, far = [(4, c) for c in range(2, 6)], [(0, 0), (0, 8), (8, 0), (8, 8)]
    if colour == "x":
        return [step for pair in zip(four, far, strict=True) for step in pair]
    return [step for pair in zip([*far, (0, 4)], [*four, None], strict=True) for step in pair][:-1]


def test_every_check_of_the_game_passes():
    results = check_game(EnvConfig(game="gomoku", kwargs={"opponent": ["one_ply", "mcts:5"]}))
    assert [result for result in results if not result.ok] == []


@pytest.mark.parametrize("colour", ["x", "o"])
def test_a_win_is_worth_10_with_either_colour(colour):
    game = started(moves=four_against_nothing(colour), colour=colour)
    result = game.step(f"<thinking>five</thinking>{move(4, 6)}")
    assert (result.reward, result.done) == (10.0, True)
    assert result.info["win_rate"] == result.info["win_rate/random"] == 1.0
    assert result.info["success"] is True


@pytest.mark.parametrize("colour", ["x", "o"])
def test_a_loss_costs_10_with_either_colour(colour):
    theirs = four_against_nothing("o" if colour == "x" else "x")
    game = started(moves=theirs[:-1], colour=colour, opponent="alphabeta:1")
    result = game.step(move(7, 4))
    assert (result.reward, result.done, result.info["loss_rate"]) == (-10.0, True, 1.0)


def test_a_full_board_is_a_draw_and_worth_nothing():
    drawn = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 0), (1, 2), (2, 1), (2, 0)]
    game = started(moves=drawn, board_size=3, win_length=3)
    result = game.step(move(2, 2))
    assert (result.reward, result.done, result.info["draw_rate"]) == (0.0, True, 1.0)


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("4,4", "Invalid format"),
        ("<move>a,b</move>", "Invalid format"),
        ("<thinking><move>1,1</move></thinking>", "Invalid format"),
        (f"<move>{'9' * 5000},1</move>", "Invalid format"),
        ("<move>٣,٣</move>", "Invalid format"),
        (move(9, 0), "from 0 to 8"),
        (move(0, 0), "the cell is taken"),
    ],
)
def test_what_is_no_move_costs_1_and_the_game_goes_on(action, problem):
    game = started(moves=[(0, 0), (1, 1)])
    result = game.step(action)
    assert (result.reward, result.done) == (-1.0, False)
    assert problem in result.observation
    valid = game.step("<MOVE> 4 , 4 </MOVE>")
    assert (valid.reward, valid.done, valid.info["invalid_moves"]) == (0.0, False, 1)


def test_a_hundred_invalid_actions_in_a_row_end_the_game():
    game = started(max_total_steps=1000)
    results = [game.step("?") for _ in range(MAX_INVALID - 1)]
    assert not any(result.done for result in results)
    game.step(move(4, 4))  # only those in a row count
    results = [game.step("?") for _ in range(MAX_INVALID)]
    assert [r.done for r in results] == [False] * (MAX_INVALID - 1) + [True]
    assert (results[-1].reward, results[-1].info["timeout_rate"]) == (-20.0, 1.0)


def test_the_last_action_is_played_before_the_time_is_over():
    game = started(moves=four_against_nothing("x"), max_total_steps=1)
    assert game.step(move(4, 6)).reward == 10.0
    game = started(max_total_steps=2)
    assert [game.step(move(4, c)).reward for c in (0, 4)] == [0.0, -20.0]
    assert "X" in game.get_state()["board"].splitlines()[5]


def test_an_action_after_the_end_costs_5():
    game = started(moves=four_against_nothing("x"))
    game.step(move(4, 6))
    result = game.step(move(0, 1))
    assert (result.reward, result.done) == (-5.0, True)


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("colour", ["x", "o"])
def test_whose_turn_it_is_follows_from_the_stones(count, colour):
    moves = draw_position(9, 5, count, random.Random(count))
    game = started(moves=moves, colour=colour)
    board = game.get_state()["board"]
    stones = board.count("X"), board.count("O")
    assert stones[0] - stones[1] == (0 if colour == "x" else 1)
    assert sum(stones) - count == ((count % 2 == 0) != (colour == "x"))


def test_a_drawn_position_leaves_nobody_a_win_at_once():
    for seed in range(200):
        moves = draw_position(5, 3, 12, random.Random(seed))
        board = Board(5, 3)
        for row, column in moves:
            board.play(row * 5 + column)
        assert not board.is_over
        assert not any(board.completes(cell, board.turn) for cell in board.free())


def test_a_board_is_told_as_a_grid_or_as_the_list_of_its_stones():
    said = started(moves=[(0, 0), (1, 1)], board_text="stones").reset(moves=[(0, 0), (1, 1)])
    assert said == "Stones: X0,0 O1,1\n\nYou play X. Your move."
    assert GomokuGame(board_text="stones").reset().startswith("Stones: none\n")
    assert GomokuGame().get_system_prompt() == (
        "You play Gomoku on a 9x9 board. X moves first, the players take turns, and 5 stones of "
        "one colour in an unbroken row, column or diagonal win. Rows and columns are numbered from "
        "0; a dot is a free cell.\nThink in <thinking></thinking>, then give your move as "
        "<move>row,col</move>."
    )
    assert "the stones are listed" in GomokuGame(board_text="stones").get_system_prompt()


def replayed(messages):
    """Return for each answer of a demonstration whether it names a free cell of its board."""
    boards = [m["content"] for m in messages if m["role"] == "user"]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    stones = [re.findall(r"[XO](\d,\d)", board) for board in boards]
    named = [answer.removeprefix("<move>").removesuffix("</move>") for answer in answers]
    assert all(re.fullmatch(r"[0-4],[0-4]", cell) for cell in named)
    return [cell not in taken for cell, taken in zip(named, stones, strict=True)]


def test_demonstrations_are_moves_of_the_game_on_the_small_board_and_nearly_all_are_legal():
    rng = random.Random(0)
    legal = []
    for _ in range(300):
        messages = gomoku.demonstrations(rng)
        assert [m["role"] for m in messages[:2]] == ["system", "user"]
        assert messages[0]["content"] == GomokuGame(**gomoku.SMALL).get_system_prompt()
        assert messages[1]["content"].startswith("The board:\n\nStones: ")
        assert messages[-1]["role"] == "assistant"
        legal += replayed(messages)
    assert 0.95 < sum(legal) / len(legal) < 1


def test_what_the_small_board_says_is_made_of_the_tokens_of_the_tiny_model():
    said = re.compile("|".join(map(re.escape, sorted(gomoku.TOKENS, key=len, reverse=True))))
    rng = random.Random(1)
    for _ in range(50):
        for message in gomoku.demonstrations(rng):
            if not message["content"].startswith("Invalid move"):
                assert said.sub("", message["content"]) == ""


@pytest.mark.parametrize("name", ["gomoku_small", "gomoku_small_self_play"])
def test_the_examples_for_the_small_board_play_what_the_demonstrations_show(name):
    config = load_config(EXAMPLES / f"{name}.yaml")
    assert config.env.kwargs.items() >= gomoku.SMALL.items()
    assert config.env.kwargs["max_total_steps"] <= config.rollout.max_turns


def test_demonstrations_of_three_in_a_row_are_written_as_conversations(tmp_path):
    script = EXAMPLES / "make_chats.py"
    words = [sys.executable, script, "gomoku", "win_length=3", "--rows", "20", "--folder", tmp_path]
    subprocess.run(words, check=True, capture_output=True)
    lines = (tmp_path / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    rules = GomokuGame(**gomoku.SMALL | {"win_length": 3}).get_system_prompt()
    assert [chat[0]["content"] for chat in chats] == [rules] * 20
    legal = [move for chat in chats for move in replayed(chat)]
    assert sum(legal) / len(legal) > 0.9


@pytest.mark.parametrize("name", ["gomoku_chats", "gomoku_smollm2"])
def test_the_examples_for_a_language_model_play_for_three_in_a_row(name):
    config = load_config(EXAMPLES / f"{name}.yaml")
    assert config.env.kwargs.items() >= (gomoku.SMALL | {"win_length": 3}).items()
    assert config.env.kwargs["max_total_steps"] <= config.rollout.max_turns


def drawn(num=60, **kwargs):
    game = GomokuGame(**kwargs)
    game.rng = random.Random(0)
    return [game.generate_initial_state() for _ in range(num)]


def test_every_key_of_the_constructor_has_its_effect():
    assert {len(s["moves"]) for s in drawn(empty_board_prob=1.0)} == {0}
    assert {len(s["moves"]) for s in drawn(empty_board_prob=0.0, max_initial_moves=3)} == {
        0, 1, 2, 3,
    }  # fmt: skip
    assert {s["colour"] for s in drawn()} == {"x", "o"}
    assert {s["colour"] for s in drawn(colour="o")} == {"o"}
    assert {started(seed, opponent=["random", "one_ply"]).get_state()["opponent"]
            for seed in range(20)} == {"random", "one_ply"}  # fmt: skip
    assert "4 stones" in GomokuGame(board_size=6, win_length=4).get_system_prompt()
    assert len(started(board_size=15).get_state()["board"].splitlines()) == 16
    assert [started(max_total_steps=n).step(move(0, 0)).done for n in (1, 2)] == [True, False]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"board_size": 2},
        {"win_length": 10},
        {"max_total_steps": 0},
        {"max_initial_moves": 81},
        {"empty_board_prob": 1.5},
        {"colour": "white"},
        {"opponent": "toy"},
        {"opponent": []},
        {"opponent": ["self", "random"]},
        {"board_text": "picture"},
    ],
)
def test_a_game_that_cannot_be_is_refused(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        GomokuGame(**kwargs)


def test_the_example_lets_the_game_end_by_its_own_rules_before_the_rollout_does():
    config = load_config(EXAMPLES / "gomoku.yaml")
    assert config.env.kwargs["max_total_steps"] <= config.rollout.max_turns


def test_against_itself_each_colour_is_a_role_with_rewards_of_its_own():
    row = iter([move(0, 0), move(1, 0), "?", move(0, 1), move(1, 1), move(0, 2)])
    told, results = converse(
        GomokuGame,
        lambda *_: next(row),
        kwargs={"board_size": 3, "win_length": 3, "opponent": "self", "empty_board_prob": 1.0},
    )
    assert [role for role, _ in results] == ["x", "o", "x", "x", "o", "x"]
    assert returns(results) == {"x": 9.0, "o": -10.0}
    assert results[-1][1].info["x_win_rate"] == 1.0
    assert "You play O." in told["o"][1]["content"]


def test_both_roles_pay_when_the_time_is_over():
    cells = iter([move(0, 0)])
    kwargs = {"opponent": "self", "empty_board_prob": 1.0, "max_total_steps": 1}
    _, results = converse(GomokuGame, lambda *_: next(cells), kwargs=kwargs)
    assert returns(results) == {"x": -20.0, "o": -20.0}


def test_a_game_against_itself_can_be_validated_against_others():
    kwargs = {"opponent": "self", "board_size": 5, "win_length": 4}
    told, results = converse(
        GomokuGame,
        lambda _, said: move(*random.Random(len(said)).choices(range(5), k=2)),
        kwargs=kwargs,
        reset_kwargs={"opponent": ["one_ply"]},
    )
    assert len(told) == 1
    assert results[-1][1].info["type"] == "one_ply"
