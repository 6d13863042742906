"""The board of row games, and those who play on it."""

import random

import pytest
from tinkermq.envs.games.row_games import Board, O, X, make_player, one_ply


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
