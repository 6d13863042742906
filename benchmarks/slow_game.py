"""Calculator and sums in an environment that takes its time, as web pages, shells, sandboxes do.

Every step takes 100 ms on average, drawn from a heavy tail (Pareto, α = 2, at least 50 ms, cut at
3 s): one in a hundred takes longer than half a second. The draws come from one seeded stream of
the process, so that episodes of the same task do not share them.
"""

import random
import time

from tinkermq.envs import StepResult
from tinkermq.envs.games.calculator import CalculatorGame
from tinkermq.envs.games.sums import SumsGame

SHORTEST_S = 0.05
LONGEST_S = 3.0
_ALPHA = 2.0
_delays = random.Random(7)


def draw_delay_s() -> float:
    """Return how long the next step takes."""
    return min(SHORTEST_S * _delays.paretovariate(_ALPHA), LONGEST_S)


class SlowCalculatorGame(CalculatorGame):
    """The calculator; each step sleeps before it answers."""

    def __init__(self, max_turns: int = 2, scale: float = 1.0) -> None:
        super().__init__(max_turns)
        self._scale = scale

    def step(self, action: str) -> StepResult:
        """Wait, then play."""
        time.sleep(self._scale * draw_delay_s())
        return super().step(action)


class SlowSumsGame(SumsGame):
    """The sums; the step sleeps before it judges."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self._scale = scale

    def step(self, action: str) -> StepResult:
        """Wait, then judge."""
        time.sleep(self._scale * draw_delay_s())
        return super().step(action)
