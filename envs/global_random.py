"""Give each episode its own state of the process-wide random generators.

Packages that draw from `random` or `numpy.random` themselves make episodes depend on each other.
While such a package works for an episode, the generators have that episode's state; afterwards
they are as they were. One episode works at a time: run such games in processes.
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

_working = threading.RLock()


class GlobalRandom:
    """One episode's state of `random` and `numpy.random`."""

    def __init__(self, seed: int) -> None:
        """Start from a seed."""
        self._own: tuple[Any, Any] = (
            random.Random(seed).getstate(),  # noqa: S311 - a game's dice, not a secret
            np.random.RandomState(seed % 2**32).get_state(legacy=False),
        )

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Let the block draw from this episode's state."""
        with _working:
            outside = _states()
            _set_states(self._own)
            try:
                yield
            finally:
                self._own = _states()
                _set_states(outside)


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
