"""Gomoku: moves per second on one core without an opponent, and who beats whom how often.

Games are played out at random on one core: on the board alone, and through the game's `step` with
its text to read and its board to show, the opponent's part left out. Then every player meets every
other on the example's board, in both colours.

    python -m benchmarks.gomoku [--seconds 3] [--games 20]
"""

import random
import time

from tinkermq.envs.games.gomoku import GomokuGame
from tinkermq.envs.games.row_games import Board, O, X, make_player

from benchmarks.report import Report, parser

SIZE, WIN_LENGTH = 9, 5
WANTED_PER_S = 20_000
PLAYERS = ("random", "one_ply", "alphabeta:2", "alphabeta:4", "mcts:200")


def board_speed(seconds: float) -> float:
    """Return moves per second on the board alone."""
    rng, played, cells = random.Random(0), 0, list(range(SIZE**2))
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        board = Board(SIZE, WIN_LENGTH)
        rng.shuffle(cells)
        for cell in cells:
            board.play(cell)
            if board.winner:
                break
        played += len(board.moves)
    return played / (time.perf_counter() - started)


def step_speed(seconds: float) -> float:
    """Return steps per second of the whole game: parse, play, judge, render."""
    rng, played = random.Random(0), 0
    actions = [f"<move>{row},{column}</move>" for row in range(SIZE) for column in range(SIZE)]
    game = GomokuGame(SIZE, WIN_LENGTH, max_total_steps=SIZE**2, opponent="self")
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        game.reset()
        rng.shuffle(actions)
        for action in actions:
            played += 1
            if game.step(action).done:
                break
    return played / (time.perf_counter() - started)


def meet(one: str, other: str, num_games: int) -> tuple[float, float]:
    """Return the share of games that `one` wins, and its seconds per move."""
    players = {name: make_player(name) for name in (one, other)}
    wins, moves, spent = 0, 0, 0.0
    for number in range(num_games):
        rng, board = random.Random(number), Board(SIZE, WIN_LENGTH)
        mine = X if number % 2 else O
        while not board.is_over:
            name = one if board.turn == mine else other
            started = time.perf_counter()
            cell = players[name](board, rng)
            if name == one:
                spent += time.perf_counter() - started
                moves += 1
            board.play(cell)
        wins += board.winner == mine
    return wins / num_games, spent / moves


def main() -> None:
    """Measure, print and write."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--games", type=int, default=20)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.games = 0.3, 2
    report = Report("gomoku", "Gomoku: speed and strengths", quick=arguments.quick)
    unit = "moves per second"
    report.at_least("the board alone, one core", board_speed(arguments.seconds), WANTED_PER_S, unit)
    report.at_least("the whole step, one core", step_speed(arguments.seconds), WANTED_PER_S, unit)
    rows: list[list[str]] = []
    for one in PLAYERS:
        met = [meet(one, other, arguments.games) for other in PLAYERS]
        times = [f"{1000 * sum(spent for _, spent in met) / len(met):.1f}"]
        rows.append([one, *(f"{wins:.0%}" for wins, _ in met), *times])
    title = f"Share of {arguments.games} games that the row wins against the column"
    report.table(title, ["", *PLAYERS, "ms per move"], rows)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
