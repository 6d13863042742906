"""Bandit: generated states, one turn.

Each room has a row of arms, and another arm pays in each room. The policy reads `arm 0-6 in room b`
and answers with a digit. The paying arm gives 1; any other gives 1 with a small probability. The
warm start's demonstrations pull random arms: they teach only the format.
"""

import random
from typing import Any

from ..game import AbstractGame, ChatMessage, StepResult

MAX_ARMS = 10
MAX_ROOMS = 26


class BanditGame(AbstractGame):
    """Pull the arm that pays in this room."""

    def __init__(self, num_arms: int = 7, num_rooms: int = 2, luck: float = 0.05) -> None:
        if not (2 <= num_arms <= MAX_ARMS and 1 <= num_rooms <= MAX_ROOMS and 0 <= luck < 1):
            raise ValueError(
                f"num_arms={num_arms} must be from 2 to {MAX_ARMS}, num_rooms={num_rooms} from 1 "
                f"to {MAX_ROOMS}, luck={luck} from 0 to below 1"
            )
        self._num_arms = num_arms
        self._num_rooms = num_rooms
        self._luck = luck
        self._room = 0

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw a room."""
        return {"room": self.rng.randrange(self._num_rooms)}

    def reset(self, *, room: int = 0, **_: Any) -> str:
        """Enter a room."""
        self._room = room
        return f"arm 0-{self._num_arms - 1} in room {chr(ord('a') + room)}"

    def step(self, action: str) -> StepResult:
        """Pull an arm: 1 for the one that pays, 1 by luck for another, 0 for no arm at all."""
        text = self.parse_action(action)
        if not (text.isdecimal() and len(text) == 1 and int(text) < self._num_arms):
            return StepResult("", 0.0, done=True, info={"arm": None})
        best = int(text) == self.best_arm()
        paid = best or self.rng.random() < self._luck
        return StepResult("", float(paid), done=True, info={"arm": int(text), "best": best})

    def best_arm(self) -> int:
        """Return the arm that pays in this room."""
        return (3 * self._room + 2) % self._num_arms

    def get_state(self) -> dict[str, Any]:
        """Return the room and the arm that pays in it."""
        return {"room": self._room, "best_arm": self.best_arm()}

    def gold_action(self) -> str:
        """Return the arm that pays."""
        return str(self.best_arm())


def demonstrations(rng: random.Random) -> list[ChatMessage]:
    """Return one conversation for the warm start: a random arm."""
    game = BanditGame()
    game.rng = rng
    return [
        {"role": "user", "content": game.reset(**game.generate_initial_state())},
        {"role": "assistant", "content": str(rng.randrange(7))},
    ]
