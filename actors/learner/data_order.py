"""Which row and which seed stand at a position of the job's data order.

Every epoch visits each row once, in a shuffled order of its own. Both are functions of the job's
seed and the position alone, so a restart goes on where it was.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...schemas.config import TrainingConfig
from ...schemas.errors import ConfigError, DataError


@dataclass(frozen=True)
class DataOrder:
    """The order of a job's samples; `num_rows` is None for a game that generates its states."""

    seed: int
    num_rows: int | None

    def sample(self, index: int) -> int | None:
        """Row at a position, or None for a generated game."""
        if self.num_rows is None:
            return None
        epoch, place = divmod(index, self.num_rows)
        return int(_permutation(self.seed, epoch, self.num_rows)[place])

    def task_seed(self, index: int) -> int:
        """Seed of the task at a position: 62 bits."""
        return int(np.random.SeedSequence([self.seed, index]).generate_state(1, np.uint64)[0] >> 2)


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, num_rows: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def total_steps(training: TrainingConfig, num_rows: int | None) -> int:
    """Return how many steps the job has.

    `num_steps` wins over `num_epochs`; without either, one epoch. Raises ConfigError for a game
    without data that is given neither, DataError for data that does not fill one batch.
    """
    if training.num_steps is not None:
        return training.num_steps
    if num_rows is None:
        raise ConfigError(
            "training.num_steps is not set, and a game that generates its states has no epochs",
            hint="set training.num_steps",
        )
    steps = num_rows * (training.num_epochs or 1) // training.batch_size
    if steps == 0:
        raise DataError(
            f"{num_rows} rows do not fill one batch of {training.batch_size} tasks",
            hint="lower training.batch_size, or give more data",
        )
    return steps
