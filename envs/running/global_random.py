"""Give each episode its own state of the process-wide random generators.

Packages that draw from `random` or `numpy.random` themselves make episodes depend on each other.
While such a package runs for an episode, the generators have that episode's state; afterwards their
former state is restored. One episode runs at a time: run such games in processes.
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

_working = threading.RLock()
_numpy: Any = np.random  # the stubs lack the generator behind the module's functions


class GlobalRandom:
    """One episode's state of `random` and `numpy.random`."""

    def __init__(self, seed: int) -> None:
        """Start from a seed."""
        self._random: Any = random.Random(seed).getstate()  # noqa: S311 - dice, not a secret
        self._numpy: Any = np.random.MT19937(seed)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Use this episode's state of the generators in the block."""
        with _working:
            outside = random.getstate(), _numpy.get_bit_generator()
            random.setstate(self._random)
            _numpy.set_bit_generator(self._numpy)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outside[0])
                _numpy.set_bit_generator(outside[1])
