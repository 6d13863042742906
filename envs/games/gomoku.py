"""Gomoku: five in a row on a square board, against players of several strengths.

The policy plays X or O and answers with `<move>row,col</move>`. Prompt, moves, rewards and limits
are those of OpenTinker's gomoku without its bugs: the stones on the board determine whose turn it
is, an action is played before the game ends by its length, and every key of the constructor is
used. With the opponent `self` the policy plays both colours, as two roles with a conversation each.

The warm start's demonstrations play on a small board (`SMALL`), shown as a list of its stones: most
moves are random, some look two moves ahead, a few name any cell, free or not. Repeated texts of the
game there are one token each of the tiny model (`TOKENS`), and so is each move.
"""

import random
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from ..game import AbstractGame, ChatMessage, StepResult
from ..prompt import open_game
from ..reasoning import behind_reasoning
from .row_games import SYMBOLS, Board, O, Player, X, make_player, random_player

WIN, LOSS, DRAW = 10.0, -10.0, 0.0
VALID, INVALID = 0.0, -1.0
TIMEOUT = -20.0
AFTER_THE_END = -5.0
MAX_INVALID = 100
"""Invalid actions in a row that end the game."""
MIN_SIZE, MAX_SIZE = 3, 26
SELF = "self"
COLOURS = {"x": X, "o": O}
NAMES = {X: "x", O: "o"}
SMALL: dict[str, Any] = {"board_size": 5, "win_length": 4, "board_text": "stones"}
"""The board of the demonstrations."""
CARELESS = 0.02
"""Share of the demonstrations' moves that name any cell, free or not."""
SKILLED = 0.3
"""Share of them that look two moves ahead; the others are random free cells."""
_TURNS = 4
"""Maximum number of answers of a demonstration."""
_OUTCOMES = ("win", "loss", "draw", "timeout", "incomplete")
_RATES = {
    outcome: {f"{name}_rate": float(name == outcome) for name in _OUTCOMES} for outcome in _OUTCOMES
}
"""Numbers of one episode; their means over episodes are rates."""
_EITHER = ("draw_rate", "timeout_rate", "incomplete_rate")
_FREE_CELLS = {
    "grid": "a dot is a free cell",
    "stones": "the stones are listed in the order of play, all other cells are free",
}
"""Text of the prompt for each `board_text`."""
_MOVE = re.compile(r"<move>\s*(\d{1,4})\s*,\s*(\d{1,4})\s*</move>", re.ASCII | re.IGNORECASE)
_THINKING = re.compile(r"<thinking>.*?</thinking>", re.DOTALL | re.IGNORECASE)


class GomokuGame(AbstractGame):
    """Get five stones in a row before the opponent does."""

    def __init__(
        self,
        board_size: int = 9,
        win_length: int = 5,
        max_total_steps: int | None = None,
        max_initial_moves: int | None = None,
        empty_board_prob: float | None = None,
        opponent: str | Sequence[str] = "one_ply",
        colour: str = "both",
        board_text: str = "grid",
    ) -> None:
        """Set the rules.

        `max_total_steps` actions at most (40), the invalid ones included. A game starts from an
        empty board with `empty_board_prob` (0.2), else with up to `max_initial_moves` (6) stones.
        `opponent` is a player's name, or several to draw from for each task, or `self`: then the
        policy plays both roles. Otherwise `colour` is the policy's: `x`, `o`, or `both` for a
        random one. `board_text` is how a board is shown: as a `grid`, or as the list of its
        `stones`.
        """
        self._size = board_size
        self._win_length = win_length
        self._max_steps = 40 if max_total_steps is None else max_total_steps
        self._max_initial = 6 if max_initial_moves is None else max_initial_moves
        self._empty_prob = 0.2 if empty_board_prob is None else empty_board_prob
        self._opponents = names_of(opponent)
        self._colour = colour
        self._board_text = board_text
        if self._opponents == [SELF]:
            self.roles = tuple(COLOURS)
        self._check()
        self._start([], "x", self._opponents[0])

    def _check(self) -> None:
        if not (MIN_SIZE <= self._size <= MAX_SIZE and 3 <= self._win_length <= self._size):
            raise ValueError(
                f"board_size={self._size} must be from {MIN_SIZE} to {MAX_SIZE}, "
                f"win_length={self._win_length} from 3 to board_size"
            )
        if self._max_steps < 1 or not 0 <= self._max_initial <= self._size**2 - 2:
            raise ValueError(
                f"max_total_steps={self._max_steps} must be at least 1, "
                f"max_initial_moves={self._max_initial} from 0 to {self._size**2 - 2}"
            )
        if not 0 <= self._empty_prob <= 1:
            raise ValueError(f"empty_board_prob={self._empty_prob} must be from 0 to 1")
        if self._colour not in (*COLOURS, "both"):
            raise ValueError(f"colour={self._colour!r} must be x, o or both")
        if self._board_text not in _FREE_CELLS:
            raise ValueError(f"board_text={self._board_text!r} must be grid or stones")
        if not self.roles:
            for name in self._opponents:
                make_player(name)

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw the stones on the board and the policy's colour."""
        empty = self.rng.random() < self._empty_prob
        count = 0 if empty else self.rng.randint(0, self._max_initial)
        colour = self.rng.choice(list(COLOURS)) if self._colour == "both" else self._colour
        return {
            "moves": draw_position(self._size, self._win_length, count, self.rng),
            "colour": colour,
        }

    def reset(
        self,
        *,
        moves: Sequence[Sequence[int]] = (),
        colour: str = "x",
        opponent: str | Sequence[str] | None = None,
        **_: Any,
    ) -> str:
        """Put stones on the board, X first, and let the opponent move if it is its turn.

        One of several opponents is drawn.
        """
        names = self._opponents if opponent is None else names_of(opponent)
        self._start(moves, colour, self.rng.choice(names))
        if self._player is None:
            self._mine = self._board.turn
        elif self._board.turn != self._mine:
            self._answer(self._player)
        self.role = NAMES[self._mine] if self.roles else ""
        return self._shown()

    def _start(self, moves: Sequence[Sequence[int]], colour: str, opponent: str) -> None:
        itself = bool(self.roles) and opponent == SELF
        self._opponent, self._player = opponent, None if itself else make_player(opponent)
        self._mine = COLOURS[colour]
        self._steps = {X: 0, O: 0}
        self._invalid = self._invalid_in_a_row = 0
        self._outcome = "incomplete"
        self._board = Board(self._size, self._win_length)
        for row, column in moves:
            self._board.play(row * self._size + column)

    def step(self, action: str) -> StepResult:
        """Play one action of the policy, and the opponent's answer."""
        if self._outcome != "incomplete":
            return StepResult("The game is over.", AFTER_THE_END, done=True, info=self._info())
        self._steps[self._mine] += 1
        cell, problem = self._cell(action)
        if cell is None:
            return self._refuse(problem)
        self._invalid_in_a_row = 0
        self._board.play(cell)
        if self._player is not None and not self._board.is_over:
            self._answer(self._player)
        if self._board.is_over:
            winner = self._board.winner
            self._outcome = "draw" if not winner else "win" if winner == self._mine else "loss"
            reward = {"win": WIN, "loss": LOSS, "draw": DRAW}[self._outcome]
            return self._over(reward, -reward)
        if self._steps[self._mine] >= self._max_steps:
            return self._time_out()
        if self._player is None:
            self._mine = self._board.turn
            self.role = NAMES[self._mine]
        return StepResult(self._shown(), VALID, done=False, info=self._info())

    def _cell(self, action: str) -> tuple[int | None, str]:
        """Return the free cell of an action, or the problem of the action."""
        match = _MOVE.search(_THINKING.sub("", behind_reasoning(action)))
        if match is None:
            return None, "Invalid format: answer with <move>row,col</move>."
        row, column = int(match[1]), int(match[2])
        if row >= self._size or column >= self._size:
            highest = self._size - 1
            return None, f"Invalid move {row},{column}: rows and columns go from 0 to {highest}."
        cell = row * self._size + column
        if self._board.cells[cell]:
            return None, f"Invalid move {row},{column}: the cell is taken."
        return cell, ""

    def _refuse(self, problem: str) -> StepResult:
        self._invalid += 1
        self._invalid_in_a_row += 1
        if self._invalid_in_a_row >= MAX_INVALID or self._steps[self._mine] >= self._max_steps:
            return self._time_out()
        return StepResult(f"{problem}\n\n{self._shown()}", INVALID, done=False, info=self._info())

    def _answer(self, player: Player) -> None:
        self._board.play(player(self._board, self.rng))

    def _time_out(self) -> StepResult:
        self._outcome = "timeout"
        return self._over(TIMEOUT, TIMEOUT)

    def _over(self, reward: float, other: float) -> StepResult:
        """End the game; `other` is the other role's reward, if there is one."""
        rewards = {NAMES[-self._mine]: other} if self._player is None else {}
        return StepResult(self._told(), reward, done=True, info=self._info(), rewards=rewards)

    def _info(self) -> dict[str, Any]:
        """Return the outcome as rates over episodes: in total, and against this opponent.

        In self-play the policy always wins, so the winning colour is reported.
        """
        counted = {"invalid_moves": self._invalid, "steps": sum(self._steps.values())}
        if self._player is None:
            won_by = self._board.winner
            colours = {f"{name}_win_rate": float(won_by == COLOURS[name]) for name in COLOURS}
            rates = _RATES[self._outcome]
            return colours | {key: rates[key] for key in _EITHER} | counted
        won = float(self._outcome == "win")
        return {
            "type": self._opponent,
            "success": self._outcome == "win",
            **_RATES[self._outcome],
            f"win_rate/{self._opponent}": won,
            **counted,
        }

    def _shown(self) -> str:
        return f"{self._told()}\n\nYou play {SYMBOLS[self._mine]}. Your move."

    def _told(self) -> str:
        if self._board_text == "grid":
            return self._board.render()
        cells = [(self._board.cells[cell], divmod(cell, self._size)) for cell in self._board.moves]
        moves = [f"{SYMBOLS[colour]}{row},{column}" for colour, (row, column) in cells]
        return f"Stones: {' '.join(moves) or 'none'}"

    def demonstrate(self, skilled: Player, rng: random.Random) -> str:
        """Return the next answer of a demonstration: any cell, a good one, or a free one."""
        drawn, cells = rng.random(), range(self._size**2)
        if drawn < CARELESS:
            cell = rng.choice(cells)
        else:
            cell = (skilled if drawn < CARELESS + SKILLED else random_player)(self._board, rng)
        row, column = divmod(cell, self._size)
        return f"<move>{row},{column}</move>"

    def get_system_prompt(self) -> str:
        """Return the rules and the format of an answer."""
        free = _FREE_CELLS[self._board_text]
        return (
            f"You play Gomoku on a {self._size}x{self._size} board. X moves first, the players "
            f"take turns, and {self._win_length} stones of one colour in an unbroken row, column "
            f"or diagonal win. Rows and columns are numbered from 0; {free}.\n"
            "Think in <thinking></thinking>, then give your move as <move>row,col</move>."
        )

    def get_initial_user_message(self) -> str:
        """Return the text before the first board."""
        return "The board:"

    def get_state(self) -> dict[str, Any]:
        """Return the board, the policy's colour, the opponent and the outcome."""
        return {
            "board": self._board.render(),
            "colour": SYMBOLS[self._mine],
            "opponent": self._opponent,
            "outcome": self._outcome,
            "steps": sum(self._steps.values()),
        }


def names_of(opponent: str | Sequence[str]) -> list[str]:
    """Return the names of one opponent or several; ValueError if there is none."""
    names = [opponent] if isinstance(opponent, str) else list(opponent)
    if not names:
        raise ValueError("opponent is an empty list: name at least one")
    return names


def draw_position(
    size: int, win_length: int, count: int, rng: random.Random
) -> list[tuple[int, int]]:
    """Draw moves from an empty board, colours in turns, with no win and no winning next move."""
    board = Board(size, win_length)
    for _ in range(count):
        cells = [cell for cell in board.free() if not board.completes(cell, board.turn)]
        if not cells:
            break
        board.play(rng.choice(cells))
    while any(board.completes(cell, board.turn) for cell in board.free()):
        board.undo()
    return [divmod(cell, size) for cell in board.moves]


def demonstrations(rng: random.Random, **board: Any) -> list[ChatMessage]:
    """Return some turns of a game on the small board, or one that differs in keys of `board`."""
    small = SMALL | board
    game = GomokuGame(**small, opponent=["random", "one_ply"])
    moves = _position(rng, small["board_size"], small["win_length"])
    start = {"moves": moves, "colour": NAMES[O if len(moves) % 2 else X]}
    messages = open_game(game, seed=rng.getrandbits(32), record=None, kwargs=start)
    skilled = make_player("alphabeta:2")
    for turn in range(_TURNS):
        messages.append({"role": "assistant", "content": game.demonstrate(skilled, rng)})
        result = game.step(messages[-1]["content"])
        if result.done or turn == _TURNS - 1:
            break
        messages.append({"role": "user", "content": result.observation})
    return messages


def _position(rng: random.Random, size: int, win_length: int) -> list[tuple[int, int]]:
    """Draw moves without a win, up to boards of all densities."""
    board = Board(size, win_length)
    for _ in range(rng.randint(0, size**2 - 5)):
        quiet = [cell for cell in board.free() if not board.completes(cell, board.turn)]
        if quiet:
            board.play(rng.choice(quiet))
    return [divmod(cell, size) for cell in board.moves]


def _tokens() -> tuple[str, ...]:
    """Return the game's texts on the small board, in repeated pieces."""
    game = GomokuGame(**SMALL)
    ends = [f"\n\nYou play {SYMBOLS[colour]}. Your move." for colour in (X, O)]
    cells = [f"{row},{column}" for row, column in product(range(SMALL["board_size"]), repeat=2)]
    stones = [f" {SYMBOLS[colour]}{cell}" for colour in (X, O) for cell in cells]
    texts = [game.get_system_prompt(), f"{game.get_initial_user_message()}\n\n", "Stones:", " none"]
    refused = ["Invalid move ", ": the cell is taken.\n\n"]
    return (*texts, *ends, *stones, *(f"<move>{cell}</move>" for cell in cells), *refused)


TOKENS = _tokens()
"""Pieces of text that are one token each to the tiny model of the warm start."""
