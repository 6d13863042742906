"""Games, their data, and the host that serves them over the broker."""

if __name__ != "tinkermq.envs":
    raise ImportError("this room is a part of the package tinkermq: write `tinkermq.envs`")

from .game import AbstractGame, StepResult

__all__ = ["AbstractGame", "StepResult"]
