"""A bandit that a test holds: the run stands where the test acts, however slow the machine is.

A run of `small_job` has episodes of up to twelve groups under way. So a number of episodes that
must reach a step counts those that may be spent on groups which are not complete yet.
"""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkermq.envs import StepResult

from tests.support.games import SlowBandit, SlowGuess

EPISODES_OF_STEP = 16
"""Of `small_job`: a batch of four groups of four."""
EPISODES_OF_INCOMPLETE_GROUPS = 36
_POLL_S = 0.02


@dataclass(frozen=True)
class Gate:
    """The number of episodes that may end, in a file."""

    file: Path

    def env(self, step: int, game: str = "HeldBandit", **kwargs: Any) -> dict[str, Any]:
        """Return the section `env` of a run of `small_job` that is let up to a step at first."""
        self.let(step)
        return {
            "game": f"tests.support.gate:{game}",
            "kwargs": {"gate": str(self.file), **kwargs},
            "num_val": 0,
            "step_timeout_s": 3600,
        }

    def let(self, step: int, more: int = 0) -> None:
        """Let the run reach a step, and at most two more; `more` episodes are no training's."""
        self._write(EPISODES_OF_STEP * step + EPISODES_OF_INCOMPLETE_GROUPS + more)

    def open(self) -> None:
        """Hold nothing any more."""
        self._write(math.inf)

    def _write(self, num_episodes: float) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(str(num_episodes))
        new.replace(self.file)


def enter(gate: Path) -> int:
    """Return the place of an episode among all that began before a gate, from 1."""
    descriptor = os.open(gate.with_suffix(".begun"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, b".")
        return os.lseek(descriptor, 0, os.SEEK_CUR)
    finally:
        os.close(descriptor)


def wait(gate: Path, place: int) -> None:
    """Wait until an episode may end."""
    while place > float(gate.read_text()):
        time.sleep(_POLL_S)


class HeldBandit(SlowBandit):
    """A bandit whose episodes end as a gate lets them."""

    def __init__(self, gate: str, delay_s: float = 0.0, **kwargs: Any) -> None:
        super().__init__(delay_s, **kwargs)
        self._gate = Path(gate)
        self._place = 0

    def reset(self, *, room: int = 0, **kwargs: Any) -> str:
        """Take a place, and enter a room."""
        self._place = enter(self._gate)
        return super().reset(room=room, **kwargs)

    def step(self, action: str) -> StepResult:
        """Wait, then pull the arm."""
        wait(self._gate, self._place)
        return super().step(action)


class HeldGuess(SlowGuess):
    """Guess the number, as a gate lets one."""

    def __init__(self, gate: str, **kwargs: Any) -> None:
        super().__init__(0.0, **kwargs)
        self._gate = Path(gate)
        self._place = 0

    def reset(self, **kwargs: Any) -> str:
        """Take a place, and begin."""
        self._place = enter(self._gate)
        return super().reset(**kwargs)

    def step(self, action: str) -> StepResult:
        """Wait, then compare."""
        wait(self._gate, self._place)
        return super().step(action)
