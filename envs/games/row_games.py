"""A square board on which a row of stones wins: tic-tac-toe (3, 3), gomoku (9 to 19, 5).

Cells are numbered row by row. X moves first and the colours alternate, so the number of stones
determines the turn. Rays and windows depend only on the board's size and are computed once.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

X, O, EMPTY = 1, -1, 0  # noqa: E741 - the names of the two colours
SYMBOLS = {X: "X", O: "O", EMPTY: "."}
_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))

Ray = tuple[int, ...]
"""The cells in one direction of a cell, nearest first."""


class Board:
    """The stones of one game, whose turn it is, and the winner."""

    __slots__ = ("_rays", "cells", "moves", "size", "turn", "win_length", "winner")

    def __init__(self, size: int, win_length: int) -> None:
        self.size = size
        self.win_length = win_length
        self.cells = [EMPTY] * (size * size)
        self.moves: list[int] = []
        self.turn = X
        self.winner = EMPTY
        """X or O once a row is complete."""
        self._rays = rays(size, win_length)

    @property
    def is_full(self) -> bool:
        """Whether no cell is free."""
        return len(self.moves) == len(self.cells)

    @property
    def is_over(self) -> bool:
        """Whether a player has won, or no move is left."""
        return self.winner != EMPTY or self.is_full

    def play(self, cell: int) -> None:
        """Put a stone of the colour whose turn it is on a free cell."""
        assert self.cells[cell] == EMPTY, f"cell {cell} is taken"
        if self.completes(cell, self.turn):
            self.winner = self.turn
        self.cells[cell] = self.turn
        self.moves.append(cell)
        self.turn = -self.turn

    def undo(self) -> None:
        """Take the last stone back."""
        self.cells[self.moves.pop()] = EMPTY
        self.turn = -self.turn
        self.winner = EMPTY

    def completes(self, cell: int, colour: int) -> bool:
        """Return whether a stone of this colour on the cell completes a winning row."""
        return self.longest_row(cell, colour) >= self.win_length

    def longest_row(self, cell: int, colour: int) -> int:
        """Return the length of the longest row that a stone here is, or would be, part of.

        Longer rows than the win count up to its length.
        """
        cells, longest = self.cells, 1
        for ahead, behind in self._rays[cell]:
            row = 1
            for other in ahead:
                if cells[other] != colour:
                    break
                row += 1
            for other in behind:
                if cells[other] != colour:
                    break
                row += 1
            if row > longest:
                longest = row
        return longest

    def free(self) -> list[int]:
        """Return the free cells."""
        return [cell for cell, colour in enumerate(self.cells) if colour == EMPTY]

    def copy(self) -> "Board":
        """Return a copy of the board."""
        twin = Board(self.size, self.win_length)
        twin.cells, twin.moves = self.cells.copy(), self.moves.copy()
        twin.turn, twin.winner = self.turn, self.winner
        return twin

    def render(self) -> str:
        """Return the board as text: column numbers, then each row behind its number."""
        size = self.size
        header, gap, numbers = _frame(size)
        symbols = [SYMBOLS[stone] for stone in self.cells]
        rows = (
            number + gap.join(symbols[row * size : (row + 1) * size])
            for row, number in enumerate(numbers)
        )
        return "\n".join((header, *rows))


@cache
def _frame(size: int) -> tuple[str, str, tuple[str, ...]]:
    """Return the line above the board, the separator of cells, and the prefix of each row."""
    width = len(str(size - 1))
    gap = " " * width
    header = " ".join(["", *(f"{column:>{width}}" for column in range(size))])
    return gap + header, gap, tuple(f"{row:>{width}}{gap}" for row in range(size))


@cache
def rays(size: int, win_length: int) -> tuple[tuple[tuple[Ray, Ray], ...], ...]:
    """Return for each cell the rays of its four lines, in both directions."""
    return tuple(
        tuple(
            (_ray(size, win_length, cell, down, right), _ray(size, win_length, cell, -down, -right))
            for down, right in _DIRECTIONS
        )
        for cell in range(size * size)
    )


def _ray(size: int, win_length: int, cell: int, down: int, right: int) -> Ray:
    row, column = divmod(cell, size)
    cells: list[int] = []
    for _ in range(win_length - 1):
        row, column = row + down, column + right
        if not (0 <= row < size and 0 <= column < size):
            break
        cells.append(row * size + column)
    return tuple(cells)


@cache
def windows(size: int, win_length: int) -> tuple[tuple[int, ...], ...]:
    """Return every run of `win_length` cells in a line."""
    rows: list[tuple[int, ...]] = []
    for cell in range(size * size):
        for ahead, _ in rays(size, win_length)[cell]:
            if len(ahead) == win_length - 1:
                rows.append((cell, *ahead))
    return tuple(rows)


@cache
def windows_of(size: int, win_length: int) -> tuple[tuple[int, ...], ...]:
    """Return for each cell the numbers of its windows."""
    by_cell: list[list[int]] = [[] for _ in range(size * size)]
    for number, window in enumerate(windows(size, win_length)):
        for cell in window:
            by_cell[cell].append(number)
    return tuple(tuple(numbers) for numbers in by_cell)


@cache
def neighbours(size: int, distance: int) -> tuple[tuple[int, ...], ...]:
    """Return for each cell the other cells within `distance` rows and columns."""
    span = range(-distance, distance + 1)
    return tuple(
        tuple(
            (row + down) * size + column + right
            for down in span
            for right in span
            if (down or right) and 0 <= row + down < size and 0 <= column + right < size
        )
        for row in range(size)
        for column in range(size)
    )


# Players of row games: random, OpenTinker's one-ply opponent, alpha-beta, and MCTS.
#
# A player is named in configurations by a text: `random`, `one_ply`, `alphabeta:DEPTH`,
# `mcts:SIMULATIONS`. It draws from the passed generator only.

Player = Callable[[Board, random.Random], int]
"""Returns a free cell for the colour whose turn it is; leaves the board as it was."""

BLUNDER = 0.3
"""Share of random moves of the one-ply opponent."""
_WIN = 1e9
_WIDTH = 12
_NEAR = 2
_EXPLORE = 1.0


def make_player(name: str) -> Player:
    """Return the player of a name; ValueError for one that does not exist."""
    kind, _, number = name.partition(":")
    if name == "random":
        return random_player
    if name == "one_ply":
        return one_ply
    if kind in _SEARCHES and number.isascii() and number.isdecimal() and int(number) > 0:
        return _SEARCHES[kind](int(number))
    raise ValueError(
        f"there is no opponent {name!r}: it is one of random, one_ply, alphabeta:DEPTH (for "
        "example alphabeta:2), mcts:SIMULATIONS (for example mcts:200)"
    )


def random_player(board: Board, rng: random.Random) -> int:
    """Draw a free cell."""
    return rng.choice(board.free())


def one_ply(board: Board, rng: random.Random) -> int:
    """Play OpenTinker's opponent: random at times, else win, block, extend, or stay central."""
    free = board.free()
    if rng.random() < BLUNDER:
        return rng.choice(free)
    urgent = _win_or_block(board, free)
    if urgent is not None:
        return urgent
    extending = [cell for cell in free if board.longest_row(cell, board.turn) > 1]
    if extending:
        return max(
            extending,
            key=lambda cell: (
                board.longest_row(cell, board.turn) + 0.1 / (_from_centre(board, cell) + 1)
            ),
        )
    central = [cell for cell in free if _from_centre(board, cell) <= _NEAR]
    return rng.choice(central or free)


def _win_or_block(board: Board, free: list[int]) -> int | None:
    """Return the cell that wins at once, else one where the other colour would win, else None."""
    for colour in (board.turn, -board.turn):
        for cell in free:
            if board.completes(cell, colour):
                return cell
    return None


def _from_centre(board: Board, cell: int) -> float:
    centre = (board.size - 1) / 2
    row, column = divmod(cell, board.size)
    return max(abs(row - centre), abs(column - centre))


def _sensible(board: Board) -> list[int]:
    """Return the free cells near a stone; the centre of an empty board."""
    if not board.moves:
        return [len(board.cells) // 2 + (0 if board.size % 2 else board.size // 2)]
    near = neighbours(board.size, _NEAR)
    candidates = {cell for move in board.moves for cell in near[move] if board.cells[cell] == EMPTY}
    return sorted(candidates) or board.free()


class _Position:
    """A board that keeps its evaluation up to date as stones are added and removed.

    A window with stones of both colours is dead; one with n stones of one colour counts
    `weights[n]` for it.
    """

    def __init__(self, board: Board) -> None:
        self.board = board.copy()
        size, length = board.size, board.win_length
        self._windows_of = windows_of(size, length)
        self._counts = {1: [0] * len(windows(size, length)), -1: [0] * len(windows(size, length))}
        self._weights = [0.0, *(8.0**n for n in range(length + 1))]
        self.worth = 0.0
        """Value of the board for X, minus that for O."""
        for cell in board.moves:
            self._count(cell, board.cells[cell], 1)

    def play(self, cell: int) -> None:
        self._count(cell, self.board.turn, 1)
        self.board.play(cell)

    def undo(self) -> None:
        cell = self.board.moves[-1]
        self.board.undo()
        self._count(cell, self.board.turn, -1)

    def _count(self, cell: int, colour: int, change: int) -> None:
        mine, theirs, weights = self._counts[colour], self._counts[-colour], self._weights
        gained = 0.0
        for window in self._windows_of[cell]:
            before = mine[window]
            mine[window] = before + change
            if theirs[window] == 0:
                gained += weights[before + change] - weights[before]
            elif before == 0:
                gained += weights[theirs[window]]
            elif before + change == 0:
                gained -= weights[theirs[window]]
        self.worth += gained * colour

    def promise(self, cell: int) -> float:
        """Return the value that a stone here adds for its colour and removes from the other."""
        turn, weights = self.board.turn, self._weights
        mine, theirs = self._counts[turn], self._counts[-turn]
        total = 0.0
        for window in self._windows_of[cell]:
            if theirs[window] == 0:
                total += weights[mine[window] + 1] - weights[mine[window]]
            elif mine[window] == 0:
                total += weights[theirs[window]]
        return total


@dataclass(frozen=True)
class AlphaBeta:
    """Negamax with alpha-beta pruning over the most promising cells, to a fixed depth in plies.

    A random one of equally promising first moves is searched first.
    """

    depth: int

    def __call__(self, board: Board, rng: random.Random) -> int:
        """Return the best cell."""
        position = _Position(board)
        cells = self._candidates(position, rng)
        best, chosen = -math.inf, cells[0]
        for cell in cells:
            position.play(cell)
            value = -self._value(position, self.depth - 1, -math.inf, -best, rng)
            position.undo()
            if value > best:
                best, chosen = value, cell
        return chosen

    def _value(
        self, position: _Position, depth: int, low: float, high: float, rng: random.Random
    ) -> float:
        """Return the value of a position for the next player."""
        board = position.board
        if board.winner:
            return -_WIN - depth  # the player who moved last has won; an earlier win is better
        if board.is_full:
            return 0.0
        if depth == 0:
            return position.worth * board.turn
        for cell in self._candidates(position, None):
            position.play(cell)
            value = -self._value(position, depth - 1, -high, -low, rng)
            position.undo()
            low = max(low, value)
            if low >= high:
                break
        return low

    def _candidates(self, position: _Position, rng: random.Random | None) -> list[int]:
        cells = _sensible(position.board)
        if rng is not None:
            rng.shuffle(cells)
        return sorted(cells, key=position.promise, reverse=True)[:_WIDTH]


@dataclass
class _Node:
    """A position of the search tree, valued for the player who moved into it."""

    untried: list[int]
    visits: int = 0
    wins: float = 0.0
    children: "dict[int, _Node]" = field(default_factory=dict[int, "_Node"])

    def descend(self) -> int:
        """Return the move of the child with the highest upper bound (UCT)."""
        log_visits = math.log(self.visits)

        def bound(move: int) -> float:
            child = self.children[move]
            return child.wins / child.visits + _EXPLORE * math.sqrt(log_visits / child.visits)

        return max(self.children, key=bound)


@dataclass(frozen=True)
class Mcts:
    """Monte Carlo tree search: UCT with random playouts; immediate wins and blocks are played."""

    simulations: int

    def __call__(self, board: Board, rng: random.Random) -> int:
        """Return the most visited cell."""
        urgent = _win_or_block(board, board.free())
        if urgent is not None:
            return urgent
        root = _node(board, rng)
        for _ in range(self.simulations):
            self._simulate(root, board.copy(), rng)
        return max(root.children, key=lambda move: root.children[move].visits)

    def _simulate(self, root: _Node, board: Board, rng: random.Random) -> None:
        """Walk down, add one node, play to the end, and update the visited nodes."""
        path = [(root, -board.turn)]
        node = root
        while not node.untried and node.children:
            move = node.descend()
            path.append((node.children[move], board.turn))
            board.play(move)
            node = node.children[move]
        if node.untried and not board.is_over:
            move = node.untried.pop()
            mover = board.turn
            board.play(move)
            node.children[move] = node = _node(board, rng)
            path.append((node, mover))
        _play_out(board, rng)
        for visited, mover in path:
            visited.visits += 1
            visited.wins += 0.5 if not board.winner else float(board.winner == mover)


def _node(board: Board, rng: random.Random) -> _Node:
    if board.is_over:
        return _Node([])
    cells = _sensible(board)
    rng.shuffle(cells)
    return _Node(cells)


def _play_out(board: Board, rng: random.Random) -> None:
    if board.is_over:
        return
    free = board.free()
    rng.shuffle(free)
    for cell in free:
        board.play(cell)
        if board.winner:
            return


_SEARCHES: dict[str, Callable[[int], Player]] = {"alphabeta": AlphaBeta, "mcts": Mcts}
