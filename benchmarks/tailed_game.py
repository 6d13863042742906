"""Guess the number where each answer takes its time, from a heavy tail.

Most steps take some tens of milliseconds, one in a hundred over a second (Pareto, α = 1.2, at least
30 ms, cut at 6 s): as long as several training steps. An episode that fails takes more steps, so
episodes that last long are also those that say more tokens and earn less. The draws come from one
stream of the process: a task that is issued again is not slow again.
"""

import random
import time
from typing import Any

from tinkermq.envs import StepResult
from tinkermq.envs.games.guess import GuessGame

SHORTEST_S, LONGEST_S = 0.03, 6.0
_ALPHA = 1.2
_delays = random.Random(7)


def draw_delay_s() -> float:
    """Return how long the next step takes."""
    return min(SHORTEST_S * _delays.paretovariate(_ALPHA), LONGEST_S)


class TailedGuessGame(GuessGame):
    """Guess the number, slowly."""

    def reset(self, *, number: int = 0, waits: bool = True, **kwargs: Any) -> str:
        """Hide a number; validation says that it `waits` not."""
        self._waits = waits
        return super().reset(number=number, **kwargs)

    def step(self, action: str) -> StepResult:
        """Wait, then compare."""
        if self._waits:
            time.sleep(draw_delay_s())
        return super().step(action)
