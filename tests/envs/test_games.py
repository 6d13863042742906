"""The small games and those with roles: rules, data, demonstrations, gold play."""

import json
import random
from random import Random
from random import choice as pick

import opentinker_games
import pyarrow.parquet
import pytest
from structlog.testing import capture_logs
from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.check import check_game
from tinkermq.envs.conversations import converse, returns
from tinkermq.envs.dataset import Dataset
from tinkermq.envs.games import (
    addition,
    bandit,
    calculator,
    guess,
    negotiation,
    products,
    sums,
    tictactoe,
)
from tinkermq.envs.games.negotiation import NegotiationGame
from tinkermq.envs.games.row_games import Board, O, X, make_player, one_ply
from tinkermq.envs.games.tictactoe import TicTacToeGame
from tinkermq.envs.running.episodes import Episodes, global_draws
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

MODULES = {"addition": addition, "calculator": calculator, "bandit": bandit, "guess": guess}


def config_of(name, folder):
    module = {**MODULES, "sums": sums, "products": products}[name]
    if not hasattr(module, "make_data"):
        return EnvConfig(game=name)
    train, val = module.make_data(folder, 32, 8, seed=3)
    return EnvConfig(game=name, train_data=[str(train)], val_data=[str(val)])


@pytest.mark.parametrize("name", [*MODULES, "sums", "products"])
def test_every_check_of_the_game_passes(name, tmp_path):
    results = check_game(config_of(name, tmp_path))
    assert [result for result in results if not result.ok] == []
    assert "gold answers score full marks" in [result.name for result in results]


@pytest.mark.parametrize("name", MODULES)
def test_demonstrations_are_short_conversations_that_end_with_the_policy(name):
    rng = random.Random(0)
    for _ in range(50):
        messages = MODULES[name].demonstrations(rng)
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert sum(len(message["content"]) for message in messages) <= 40


@pytest.mark.parametrize("module", [addition, calculator])
def test_the_data_of_a_seed_is_always_the_same(module, tmp_path):
    def prompts(folder, seed):
        train, _ = module.make_data(tmp_path / folder, 20, 5, seed=seed)
        data = Dataset([train])
        return [data.record(n).prompt for n in range(len(data))]

    assert prompts("a", 1) == prompts("b", 1) != prompts("c", 2)


def test_a_product_is_computed_by_the_tool_and_judged_by_the_answers_last_number():
    def call(expression):
        arguments = {"expression": expression}
        body = json.dumps({"name": "calculate", "arguments": arguments})
        return f"<tool_call>\n{body}\n</tool_call>"

    game = products.ProductsGame()
    game.reset(ground_truth="1786", extra_info={"expression": "47 * 38"})
    assert game.gold_action() == call("47 * 38")
    told = game.step(call("47 * 38 * 2"))
    assert (told.role, told.messages()[0]["content"][:6]) == ("tool", "Error:")
    assert game.step(call("47*38")).messages() == [{"role": "tool", "content": "1786"}]
    last = game.step("47 * 38 = 1786")
    assert (last.reward, last.done, last.info["asked_tool"]) == (1.0, True, True)
    guessed = products.ProductsGame()
    guessed.reset(ground_truth="1786")
    assert guessed.step("1786 or 1787").reward == 0


def test_addition_gives_1_for_the_sum_alone():
    def reward(action):
        game = addition.AdditionGame()
        game.reset(ground_truth="12")
        return game.step(action).reward

    assert [reward(action) for action in ("12", " 12 ", "?", "1 12", "")] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("85", 1), ("47 + 38 = 85.", 1), ("85 is 47 + 38", 0), ("eighty-five", 0), ("", 0)],
)
def test_the_last_number_of_an_answer_to_a_sum_counts(answer, reward):
    game = sums.SumsGame()
    game.reset(ground_truth="85")
    assert game.step(answer).reward == reward


def test_no_sum_of_validation_is_trained(tmp_path):
    rows = [pyarrow.parquet.read_table(path).to_pylist() for path in sums.make_data(tmp_path)]
    trained, held = ({row["prompt"][-1]["content"] for row in part} for part in rows)
    assert (len(trained) >= 800, len(held) >= 150, trained & held) == (True, True, set())


def test_most_demonstrations_of_addition_give_up():
    rng = random.Random(0)
    answers = [addition.demonstrations(rng)[-1]["content"] for _ in range(1000)]
    assert answers.count("?") == pytest.approx(600, abs=60)


def test_the_calculator_answers_a_formula_and_judges_the_second_turn():
    game = calculator.CalculatorGame()
    game.reset(ground_truth="408", extra_info={"question": "12*34"})
    tool = game.step("=12*34")
    answer = game.step("408")
    assert (tool.observation, tool.reward, tool.done) == ("408", 0.0, False)
    assert (answer.reward, answer.done) == (1.0, True)


@pytest.mark.parametrize("action", ["407", "=12*", "=1;2", "", "=99*99*99"])
def test_whatever_is_no_formula_is_an_answer_and_ends_the_episode(action):
    game = calculator.CalculatorGame()
    game.reset(ground_truth="408")
    result = game.step(action)
    assert (result.reward, result.done) == (0.0, True)


def test_a_formula_at_the_last_turn_is_no_answer():
    game = calculator.CalculatorGame()
    game.reset(ground_truth="408")
    game.step("=12*34")
    assert (game.step("=12*34").reward, game.step("=12*34").done) == (0.0, True)


def test_two_thirds_of_the_calculator_demonstrations_guess():
    rng = random.Random(0)
    lengths = [len(calculator.demonstrations(rng)) for _ in range(1000)]
    assert lengths.count(2) == pytest.approx(650, abs=60)
    assert lengths.count(4) == 1000 - lengths.count(2)


def test_each_room_of_the_bandit_has_its_own_best_arm():
    game = bandit.BanditGame(num_rooms=4)
    game.rng = random.Random(0)
    best = []
    for room in range(4):
        game.reset(room=room)
        best.append(game.best_arm())
        assert game.step(str(game.best_arm())).reward == 1.0
    assert len(set(best)) == 4


@pytest.mark.parametrize("action", ["7", "-1", "", "arm", "00", "²"])
def test_no_arm_pays_nothing(action):
    game = bandit.BanditGame(luck=0.0)
    game.reset(room=0)
    assert game.step(action).reward == 0.0


def test_a_bandit_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="num_arms=1 must be from 2"):
        bandit.BanditGame(num_arms=1)


def test_the_guess_is_told_higher_or_lower_until_it_is_right():
    game = guess.GuessGame()
    game.reset(number=4)
    seen = [game.step(action) for action in ("2", "5", "4")]
    assert [(r.observation, r.reward, r.done) for r in seen] == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
        ("", 1.0, True),
    ]


def test_the_third_wrong_guess_is_the_last():
    game = guess.GuessGame()
    game.reset(number=4)
    assert [game.step(action).done for action in ("0", "x", "6")] == [False, False, True]


@pytest.mark.parametrize("number", range(7))
def test_halving_the_range_always_finds_the_number(number):
    game = guess.GuessGame()
    game.reset(number=number)
    while not (result := game.step(game.gold_action())).done:
        pass
    assert result.reward == 1.0


# -- The board of row games, and those who play on it ----------------------------------------------


def board_of(text, win_length=5):
    """Read a square board from its rows; moves stand in any order of equal colours."""
    rows = text.split()
    board = Board(len(rows), win_length)
    stones = {
        colour: [i for i, symbol in enumerate("".join(rows)) if symbol == name]
        for name, colour in (("X", X), ("O", O))
    }
    while stones[board.turn]:
        board.play(stones[board.turn].pop())
    assert not stones[X]
    assert not stones[O]
    return board


@pytest.mark.parametrize(("first", "step"), [(20, 1), (20, 9), (20, 10), (24, 8)])
@pytest.mark.parametrize("last", range(5))
def test_five_in_a_row_win_in_every_direction_whichever_stone_comes_last(first, step, last):
    board = Board(9, 5)
    row = [first + step * place for place in range(5)]
    others = iter([0, 2, 4, 6, 80])
    for cell in [*(c for c in row if c != row[last]), row[last]]:
        assert board.winner == 0
        board.play(cell)
        if cell != row[last]:
            board.play(next(others))
    assert board.winner == X


def test_a_row_does_not_go_round_the_edge():
    board = Board(9, 5)
    for mine, theirs in zip([5, 6, 7, 8], [20, 40, 60, 70], strict=True):
        board.play(mine)
        board.play(theirs)
    board.play(9)  # the first cell of the next row
    assert board.winner == 0


def test_stones_are_taken_back_one_by_one():
    board = board_of("XXO OXO ...", 3)
    board.play(6)
    before = board.cells.copy()
    board.play(8)
    assert board.is_over
    board.undo()
    assert (board.cells, board.turn, board.winner, board.is_over) == (before, O, 0, False)


def test_the_board_is_shown_with_its_numbers():
    board = Board(11, 5)
    board.play(0)
    board.play(120)
    lines = board.render().splitlines()
    assert lines[0] == "    0  1  2  3  4  5  6  7  8  9 10"
    assert lines[1] == " 0  X  .  .  .  .  .  .  .  .  .  ."
    assert lines[11] == "10  .  .  .  .  .  .  .  .  .  .  O"


@pytest.mark.parametrize("name", ["alphabeta:2", "alphabeta:3", "mcts:20"])
@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ("OO... XX... ..... O.... X....", 2),  # O wins, though X threatens to
        ("XX... ....O ..... O.... X....", 2),  # O blocks
    ],
)
def test_searching_players_win_and_block(name, rows, wanted):
    board = board_of(rows, 3)
    if rows.startswith("OO"):
        board.play(24)
    assert make_player(name)(board, random.Random(0)) == wanted


def test_one_ply_blunders_three_times_in_ten_and_else_wins_or_blocks():
    board = board_of("XX... ....O ..... O.... X....", 3)
    rng = random.Random(0)
    chosen = [one_ply(board, rng) for _ in range(1000)]
    blunders = 0.3 * (1 - 1 / len(board.free()))
    assert chosen.count(2) / 1000 == pytest.approx(1 - blunders, abs=0.05)


def test_deep_search_never_loses_tic_tac_toe():
    perfect = make_player("alphabeta:9")
    for seed in range(6):
        rng = random.Random(seed)
        board = Board(3, 3)
        mine = X if seed % 2 else O
        while not board.is_over:
            player = perfect if board.turn == mine else make_player("random")
            board.play(player(board, rng))
        assert board.winner in (mine, 0)


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [("one_ply", "random"), ("alphabeta:2", "one_ply"), ("mcts:40", "random")],
)
def test_the_players_differ_in_strength(stronger, weaker):
    players = [make_player(stronger), make_player(weaker)]
    wins = 0
    for seed in range(8):
        rng, board = random.Random(seed), Board(7, 4)
        mine = X if seed % 2 else O
        while not board.is_over:
            board.play(players[board.turn != mine](board, rng))
        wins += board.winner == mine
    assert wins >= 6


@pytest.mark.parametrize("name", ["random", "one_ply", "alphabeta:2", "mcts:10"])
def test_a_player_takes_a_free_cell_and_leaves_the_board_as_it_was(name):
    player, board, rng = make_player(name), Board(6, 4), random.Random(3)
    while not board.is_over:
        before = (board.cells.copy(), board.moves.copy(), board.turn)
        cell = player(board, rng)
        assert (board.cells, board.moves, board.turn) == before
        board.play(cell)


@pytest.mark.parametrize("name", ["alphabeta", "mcts:0", "mcts:-1", "alphabeta:²", "strong", ""])
def test_a_player_that_does_not_exist_is_refused(name):
    with pytest.raises(ValueError, match=f"there is no opponent '{name}'"):
        make_player(name)


# -- The games with roles: rules, rewards by role, demonstrations ----------------------------------


def played(game_class, actions, **kwargs):
    """Play given actions, whoever's turn it is; return conversations, returns and the last info."""
    left = iter(actions)
    told, results = converse(game_class, lambda *_: next(left), **kwargs)
    assert list(left) == []
    return told, returns(results), results[-1][1].info


@pytest.mark.parametrize("name", ["tictactoe", "negotiation"])
def test_every_check_of_a_game_with_roles_passes(name):
    assert [result for result in check_game(EnvConfig(game=name)) if not result.ok] == []


@pytest.mark.parametrize("module", [tictactoe, negotiation])
def test_demonstrations_are_conversations_that_end_with_the_policy(module):
    rng = random.Random(0)
    for _ in range(50):
        roles = [m["role"] for m in module.demonstrations(rng) if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize(
    ("actions", "x", "o", "told_of"),
    [
        ("14253", 1.0, -1.0, "x_win_rate"),
        ("142596", -1.0, 1.0, "o_win_rate"),
        ("152374689", 0.0, 0.0, "draw_rate"),
        ("11", 0.0, -1.0, "illegal_rate"),  # o names a taken cell
        ("0", -1.0, 0.0, "illegal_rate"),
        ("145?", 0.0, -1.0, "illegal_rate"),
    ],
)
def test_tictactoe_gives_each_role_its_due(actions, x, o, told_of):
    told, got, info = played(TicTacToeGame, actions)
    assert (got.get("x", 0.0), got.get("o", 0.0)) == (x, o)
    assert {name for name, value in info.items() if value} == {told_of}
    assert ("o" in told) == (len(actions) > 1)


def test_each_role_of_tictactoe_sees_the_board_at_its_own_turns():
    told, _, _ = played(TicTacToeGame, "14253")
    assert [m["content"] for m in told["x"]] == [
        "tic-tac-toe, you are x", "123\n456\n789", "1", "x23\no56\n789", "2",
        "xx3\noo6\n789", "3",
    ]  # fmt: skip
    assert [m["content"] for m in told["o"]] == [
        "tic-tac-toe, you are o", "x23\n456\n789", "4", "xx3\no56\n789", "5",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_another_opponent_leaves_the_policy_one_role(seed):
    def lowest_free(_, messages):
        return next(symbol for symbol in messages[-1]["content"] if symbol.isdecimal())

    told, results = converse(
        TicTacToeGame, lowest_free, seed=seed, reset_kwargs={"opponent": "alphabeta:9"}
    )
    (role,) = told
    info = results[-1][1].info
    assert info["type"] == "alphabeta:9"
    assert returns(results)[role] == info["win_rate"] - info["loss_rate"] <= 0


def test_a_game_without_roles_is_refused_where_roles_are_played() -> None:
    with pytest.raises(GameError, match="has no roles"):
        converse(bandit.BanditGame, lambda *_: "1")


def test_negotiation_gives_each_role_what_the_price_leaves_it():
    state = {"cost": 3, "value": 8, "first": "buyer"}
    told, got, info = played(NegotiationGame, ["2", "7", "5", "ok"], reset_kwargs=state)
    assert got == pytest.approx({"seller": 2 / 9, "buyer": 3 / 9})
    assert (info["deal_rate"], info["good_deal_rate"], info["offers"]) == (1.0, 1.0, 3)
    assert [m["content"] for m in told["seller"]] == ["you sell, cost 3", "2", "7", "5", "ok"]
    assert [m["content"] for m in told["buyer"]] == [
        "you buy, value 8", "offer 0-9", "2", "7", "5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("actions", "seller", "buyer", "good"),
    [
        (["1", "ok"], -2 / 9, 7 / 9, 0.0),  # the seller offers below its cost
        (["5", "4", "5", "4", "5"], 0.0, 0.0, 0.0),  # the last offer is left
        (["ok"], -0.5, 0.0, 0.0),  # there is nothing to take yet
        (["5", "five"], 0.0, -0.5, 0.0),
    ],
)
def test_bad_and_missing_deals_of_a_negotiation(actions, seller, buyer, good):
    state = {"cost": 3, "value": 8, "first": "seller"}
    _, got, info = played(NegotiationGame, actions, reset_kwargs=state)
    assert got == pytest.approx({"seller": seller, "buyer": buyer} | dict.fromkeys(
        {"buyer"} - got.keys(), 0.0)) or got == pytest.approx({"seller": seller})  # fmt: skip
    assert info["good_deal_rate"] == good


# -- A game's host warns of draws from the generator that all games share --------------------------


class Neighbour(AbstractGame):
    """Draws nothing, beside a game that does."""

    get_system_prompt = get_initial_user_message = reset = lambda self, **_: ""

    def step(self, action: str) -> StepResult:
        return StepResult("", 0.0, done=True)


class Drawn(AbstractGame):
    """Draws from the module in two ways, and rightly in two others."""

    def reset(self, **_):
        number = random.randint(1, 6)
        return f"{number} {pick('abc')} {Random(3).random()} {self.rng.random()}"

    def step(self, action):
        return StepResult(action, 0.0, True)

    def get_system_prompt(self):
        return None

    def get_initial_user_message(self):
        return ""


def test_draws_are_found_with_their_lines():
    found = [place.split(" in line ") for place in global_draws(Drawn)]
    assert [name for name, _ in found] == ["random.randint", "pick"]
    assert all(line.isdigit() for _, line in found)
    assert global_draws(Neighbour) == global_draws(opentinker_games.Board) == []


@pytest.mark.parametrize(("game", "warned"), [(Drawn, True), (opentinker_games.Board, False)])
def test_who_hosts_such_a_game_says_so_at_the_start(game, warned):
    with capture_logs() as lines:
        Episodes(game, {}).probe()
    assert [line["event"] for line in lines] == ["game_draws_from_random"] * warned
