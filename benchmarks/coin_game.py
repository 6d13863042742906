"""A game in which every answer has an even chance: what it costs to train does not change.

Benchmarks that only look at time use it with random models: answers run to their limit, and half
of a group's rewards are 1, so that no group can be left out of the update.
"""

import zlib
from typing import Any

from tinkermq.envs import AbstractGame, StepResult


class CoinGame(AbstractGame):
    """Rewards a text for its checksum."""

    def reset(self, **_: Any) -> str:
        """Start."""
        return "Toss!"

    def step(self, action: str) -> StepResult:
        """Reward every second text."""
        return StepResult("", float(zlib.crc32(action.encode()) % 2), done=True)

    def get_system_prompt(self) -> str:
        """Return no system prompt."""
        return ""

    def get_initial_user_message(self) -> str:
        """Return nothing."""
        return ""
