"""Guess the number: generated states, several turns.

The policy reads `guess 0-6` and has three tries; the answer to a wrong one is `higher` or `lower`.
Halving the range always finds the number. About two thirds of the warm start's demonstrations guess
at random, the others halve the range; reinforcement learning selects the latter.
"""

import random
from typing import Any

from ..game import AbstractGame, ChatMessage, StepResult

HABIT = 0.65
"""Share of the demonstrations that guess at random, whatever the answers are."""


class GuessGame(AbstractGame):
    """Find a number in a few tries, with the answer higher or lower."""

    def __init__(self, highest: int = 6, max_turns: int = 3) -> None:
        if highest < 1 or max_turns < 1:
            raise ValueError(f"highest={highest} and max_turns={max_turns} must be at least 1")
        self._highest = highest
        self._max_turns = max_turns
        self._number = 0
        self._turn = 0
        self._low, self._high = 0, highest

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw the number."""
        return {"number": self.rng.randint(0, self._highest)}

    def reset(self, *, number: int = 0, **_: Any) -> str:
        """Hide a number."""
        self._number = number
        self._turn = 0
        self._low, self._high = 0, self._highest
        return f"guess 0-{self._highest}"

    def step(self, action: str) -> StepResult:
        """Compare a guess: 1 and the end when it is right; the end too after the last try."""
        self._turn += 1
        text = self.parse_action(action)
        last = self._turn >= self._max_turns
        if not (text.isdecimal() and text.isascii() and len(text) <= len(str(self._highest))):
            return StepResult("digits only", 0.0, done=last, info={"guess": None})
        guess = int(text)
        info = {"guess": guess, "tries": self._turn}
        if guess == self._number:
            return StepResult("", 1.0, done=True, info=info)
        return StepResult(self._hint(guess), 0.0, done=last, info=info)

    def _hint(self, guess: int) -> str:
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return "higher"
        self._high = min(self._high, guess - 1)
        return "lower"

    def get_state(self) -> dict[str, Any]:
        """Return the number, the remaining range, and the turn."""
        return {
            "number": self._number,
            "low": self._low,
            "high": self._high,
            "turn": self._turn,
        }

    def gold_action(self) -> str:
        """Halve the remaining range."""
        return str((self._low + self._high) // 2)


def demonstrations(rng: random.Random) -> list[ChatMessage]:
    """Return one conversation for the warm start; `HABIT` of them guess at random."""
    game = GuessGame()
    game.rng = rng
    careless = rng.random() < HABIT
    messages: list[ChatMessage] = [
        {"role": "user", "content": game.reset(**game.generate_initial_state())}
    ]
    while True:
        guess = str(rng.randint(0, 6)) if careless else game.gold_action()
        messages.append({"role": "assistant", "content": guess})
        result = game.step(guess)
        if result.done:
            return messages
        messages.append({"role": "user", "content": result.observation})
