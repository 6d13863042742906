"""Tic-tac-toe: two roles, x and o, each with its own conversation.

A free cell shows its number, and an answer is the number of one. By default the policy plays both
roles against itself; `opponent` names another player for one of them (`random`, `alphabeta:9`,
which never loses, …: see `row_games`), for evaluations. The warm start's demonstrations play at
random, from positions of all kinds, and every fifth answer names any cell: self-play first learns
the rules, then to win.
"""

import random
import re
from collections.abc import Sequence
from typing import Any

from ..conversations import converse
from ..game import AbstractGame, ChatMessage, StepResult
from .row_games import EMPTY, SYMBOLS, Board, O, X, make_player

SELF = "self"
ILLEGAL = -1.0
HABIT = 0.2
"""Share of the demonstrations' answers that name any cell, free or not."""
_ROLES = {X: "x", O: "o"}


class TicTacToeGame(AbstractGame):
    """Get three in a row; win 1, loss and illegal move -1, draw 0."""

    roles = ("x", "o")

    def __init__(self, opponent: str = SELF) -> None:
        self._default = opponent
        self._start(opponent, _ROLES[X])

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw the policy's colour, if the opponent is another player."""
        return {"policy": self.rng.choice(self.roles)}

    def reset(
        self,
        *,
        policy: str = "x",
        opponent: str | None = None,
        moves: Sequence[int] = (),
        **_: Any,
    ) -> str:
        """Begin with an empty board, or after `moves`; another opponent moves if it is its turn."""
        self._start(opponent or self._default, policy)
        for cell in moves:
            self._board.play(cell - 1)
        if self._player is not None and policy != _ROLES[self._board.turn]:
            self._board.play(self._player(self._board, self.rng))
        self.role = _ROLES[self._board.turn]
        return self._shown()

    def _start(self, opponent: str, policy: str) -> None:
        self._opponent = opponent
        self._player = None if opponent == SELF else make_player(opponent)
        self._policy = policy
        self._board = Board(3, 3)

    def step(self, action: str) -> StepResult:
        """Play the answer of the role whose turn it is, and the opponent's, if there is one."""
        mover, text = self.role, self.parse_action(action)
        if not re.fullmatch("[1-9]", text) or self._board.cells[int(text) - 1] != EMPTY:
            return StepResult("", ILLEGAL, done=True, info=self._info(illegal=True))
        self._board.play(int(text) - 1)
        if self._player is not None and not self._board.is_over:
            self._board.play(self._player(self._board, self.rng))
        if not self._board.is_over:
            self.role = _ROLES[self._board.turn]
            return StepResult(self._shown(), 0.0, done=False, info=self._info())
        winner = _ROLES.get(self._board.winner)
        rewards = {role: 0.0 if winner is None else 1.0 if role == winner else -1.0
                 for role in self.roles}  # fmt: skip
        mine = rewards.pop(mover)
        others = rewards if self._player is None else {}
        return StepResult(self._shown(), mine, done=True, info=self._info(), rewards=others)

    def _info(self, *, illegal: bool = False) -> dict[str, Any]:
        winner = _ROLES.get(self._board.winner)
        info: dict[str, Any] = {
            "x_win_rate": float(winner == "x"),
            "o_win_rate": float(winner == "o"),
            "draw_rate": float(self._board.is_full and winner is None),
            "illegal_rate": float(illegal),
        }
        if self._player is None:
            return info
        won = winner == self._policy
        lost = illegal or (winner is not None and not won)
        rates = {"win_rate": float(won), "loss_rate": float(lost)}
        return {**info, **rates, "type": self._opponent, "success": won}

    def _shown(self) -> str:
        """Return the three rows; a free cell shows its number."""
        cells = [
            SYMBOLS[stone].lower() if stone else str(number)
            for number, stone in enumerate(self._board.cells, 1)
        ]
        return "\n".join("".join(cells[row : row + 3]) for row in (0, 3, 6))

    def get_system_prompt(self) -> str:
        """Return the rules, for the role whose turn it is."""
        return f"tic-tac-toe, you are {self.role}"

    def get_state(self) -> dict[str, Any]:
        """Return the board and whose turn it is."""
        return {"board": self._shown(), "turn": self.role, "opponent": self._opponent}


def demonstrations(rng: random.Random) -> list[ChatMessage]:
    """Return one role's conversation for the warm start."""

    def act(_: str, messages: list[ChatMessage]) -> str:
        free = [symbol for symbol in messages[-1]["content"] if symbol.isdecimal()]
        return rng.choice("123456789" if rng.random() < HABIT else free)

    moves = [cell + 1 for cell in _position(rng)]
    conversations, _ = converse(
        TicTacToeGame, act, seed=rng.getrandbits(32), reset_kwargs={"moves": moves}
    )
    return conversations[rng.choice(sorted(conversations))]


def _position(rng: random.Random) -> list[int]:
    """Draw a position without a win, with any number of stones."""
    board = Board(3, 3)
    for _ in range(rng.randint(0, 6)):
        quiet = [cell for cell in board.free() if not board.completes(cell, board.turn)]
        if quiet:
            board.play(rng.choice(quiet))
    return board.moves
