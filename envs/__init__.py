"""What is learnt: games, their data, and the host that serves them over the broker."""

from .game import AbstractGame, StepResult

__all__ = ["AbstractGame", "StepResult"]
