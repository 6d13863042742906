"""Games that are held until something has happened, however slow the machine is.

A gate holds a run where the test acts. Stragglers wait until other episodes have begun.

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

from tests.support.games import EchoGame, SlowBandit, SlowGuess

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

    async def holds(self) -> bool:
        """Return whether an episode that is not let has begun."""
        return self.file.with_suffix(".begun").stat().st_size > float(self.file.read_text())

    def _write(self, num_episodes: float) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(str(num_episodes))
        new.replace(self.file)


def count_in(file: Path) -> int:
    """Return the number of a caller among all of any process that count in a file, from 1."""
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
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
        self._place = count_in(self._gate.with_suffix(".begun"))
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
        self._place = count_in(self._gate.with_suffix(".begun"))
        return super().reset(**kwargs)

    def step(self, action: str) -> StepResult:
        """Wait, then compare."""
        wait(self._gate, self._place)
        return super().step(action)


class Stragglers:
    """Decides by its number among all that begin which episode is late, and makes it wait.

    Of the first hundred each 24th is late.
    """

    def __init__(self, file: str, after: int, most_s: float) -> None:
        """`after`: episodes, counted in `file`, that must begin first if they do in `most_s`."""
        self._file, self._after, self._most_s = Path(file), after, most_s
        self._is_late = False

    def begin(self) -> None:
        """Take a number."""
        number = count_in(self._file)
        self._is_late = number < 100 and number % 24 == 5

    def wait(self) -> None:
        """Wait, if this one is late."""
        if self._is_late:
            last = self._file.stat().st_size + self._after
            deadline = time.monotonic() + self._most_s
            while self._file.stat().st_size < last and time.monotonic() < deadline:
                time.sleep(_POLL_S)


class LateBandit(SlowBandit):
    """A bandit some of whose episodes are late."""

    def __init__(self, file: str, after: int, most_s: float = 60.0) -> None:
        super().__init__(0.0)
        self._stragglers = Stragglers(file, after, most_s)

    def reset(self, *, room: int = 0, **kwargs: Any) -> str:
        """Take a number, and enter a room."""
        self._stragglers.begin()
        return super().reset(room=room, **kwargs)

    def step(self, action: str) -> StepResult:
        """Wait, if this one is late, then pull the arm."""
        self._stragglers.wait()
        return super().step(action)


class LateEcho(EchoGame):
    """Some of its episodes are late in each turn."""

    def __init__(self, file: str, after: int, most_s: float = 60.0) -> None:
        self._stragglers = Stragglers(file, after, most_s)

    def reset(self, **kwargs: Any) -> str:
        """Take a number, and begin."""
        self._stragglers.begin()
        return super().reset(**kwargs)

    def step(self, action: str) -> StepResult:
        """Wait, if this one is late, then answer."""
        self._stragglers.wait()
        return super().step(action)
