"""A game that costs nothing, to measure the way to it and back."""

from typing import Any

from tinkermq.envs import AbstractGame, StepResult

TURNS = 20


class TrivialGame(AbstractGame):
    """Counts to twenty: all that is measured is the way there and back."""

    def reset(self, **_: Any) -> str:
        """Start at zero."""
        self.turn = 0
        return "count"

    def step(self, action: str) -> StepResult:
        """Count one up."""
        self.turn += 1
        return StepResult(f"{self.turn} after {action}", 0.0, self.turn >= TURNS)

    def get_system_prompt(self) -> str:
        """Return a short prompt."""
        return "Count."

    def get_initial_user_message(self) -> str:
        """Return a short message."""
        return "Go."
