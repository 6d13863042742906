"""A square board on which a row of stones wins: tic-tac-toe (3, 3), gomoku (9 to 19, 5).

Cells are numbered row by row. X moves first and the colours alternate, so the number of stones
says whose turn it is. Rays and windows depend on the board's size alone and are computed once.
"""

from functools import cache

X, O, EMPTY = 1, -1, 0  # noqa: E741 - the names of the two colours
SYMBOLS = {X: "X", O: "O", EMPTY: "."}
_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))

Ray = tuple[int, ...]
"""The cells that lie in one direction of a cell, nearest first."""


class Board:
    """The stones of one game, whose turn it is, and who has won."""

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
        """Whether somebody has won, or nobody can move."""
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
        """Whether a stone of this colour on the cell makes a row that wins."""
        return self.longest_row(cell, colour) >= self.win_length

    def longest_row(self, cell: int, colour: int) -> int:
        """Return the length of the longest row that a stone here is, or would be, part of.

        Rows longer than the win are counted as far as they matter.
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
        """Return a board of its own with the same stones."""
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
    """Return the line above the board, what separates cells, and what precedes each row."""
    width = len(str(size - 1))
    gap = " " * width
    header = " ".join(["", *(f"{column:>{width}}" for column in range(size))])
    return gap + header, gap, tuple(f"{row:>{width}}{gap}" for row in range(size))


@cache
def rays(size: int, win_length: int) -> tuple[tuple[tuple[Ray, Ray], ...], ...]:
    """Return for each cell the rays of its four lines, both ways, as far as a row reaches."""
    return tuple(
        tuple(
            (_ray(size, win_length, cell, down, right), _ray(size, win_length, cell, -down, -right))
            for down, right in _DIRECTIONS
        )
        for cell in range(size * size)
    )


def _ray(size: int, win_length: int, cell: int, down: int, right: int) -> Ray:
    row, column = divmod(cell, size)
    found: list[int] = []
    for _ in range(win_length - 1):
        row, column = row + down, column + right
        if not (0 <= row < size and 0 <= column < size):
            break
        found.append(row * size + column)
    return tuple(found)


@cache
def windows(size: int, win_length: int) -> tuple[tuple[int, ...], ...]:
    """Return every run of `win_length` cells in a line: the rows that can win."""
    found: list[tuple[int, ...]] = []
    for cell in range(size * size):
        for ahead, _ in rays(size, win_length)[cell]:
            if len(ahead) == win_length - 1:
                found.append((cell, *ahead))
    return tuple(found)


@cache
def windows_of(size: int, win_length: int) -> tuple[tuple[int, ...], ...]:
    """Return for each cell the numbers of the windows that it lies in."""
    found: list[list[int]] = [[] for _ in range(size * size)]
    for number, window in enumerate(windows(size, win_length)):
        for cell in window:
            found[cell].append(number)
    return tuple(tuple(numbers) for numbers in found)


@cache
def neighbours(size: int, distance: int) -> tuple[tuple[int, ...], ...]:
    """Return for each cell those at most `distance` rows and columns away, itself excluded."""
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
