"""Maps positions of the job's data order to rows and seeds.

Every epoch visits each row once, in a shuffled order of its own. Both are functions of the job's
seed and the position only, so a restart continues at the same place.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...schemas.config.job import TrainingConfig
from ...schemas.rollout import Group
from ...schemas.task import DropReason, Task
from ...schemas.wire.errors import ConfigError, DataError
from ..training.state import LearnerState


@dataclass(frozen=True)
class Chosen:
    """The task at a position of the data order."""

    sample: int | None
    """Row of the data, or None for a generated game."""
    seed: int
    """Seed of its episodes."""
    item: int | None = None
    """The choice of a curriculum: a row, or a seed's number."""
    chosen_at: int | None = None
    """Version after which the curriculum chose it."""


class TaskOrder(Protocol):
    """Maps positions to tasks; may adapt to the results of played tasks."""

    def choose(self, index: int, version: int) -> Chosen:
        """Return the task at a position, chosen at the learner's version."""
        ...

    def task_seed(self, index: int) -> int:
        """Return the seed of the task at a position: 62 bits."""
        ...

    def pass_over(self, group: Group, reason: DropReason) -> None:
        """Record a group that is not trained; it counts from the next step on."""
        ...

    def keep(self, task: Task) -> None:
        """Record a task that will be issued again."""
        ...

    def learn(self, trained: Iterable[Group]) -> None:
        """Record the groups that a step has trained."""
        ...

    def numbers(self) -> dict[str, float]:
        """Return metrics of the order."""
        ...

    def write_to(self, state: LearnerState) -> None:
        """Write the order's state into the state of a checkpoint."""
        ...


@dataclass(frozen=True)
class DataOrder:
    """Each sample once per epoch; `num_rows` is None for a game that generates its states."""

    seed: int
    num_rows: int | None

    def choose(self, index: int, version: int) -> Chosen:
        """Return the task at a position; it is the same at every version."""
        return Chosen(self.sample(index), self.task_seed(index))

    def sample(self, index: int) -> int | None:
        """Return the row at a position, or None for a generated game."""
        if self.num_rows is None:
            return None
        epoch, place = divmod(index, self.num_rows)
        return int(_permutation(self.seed, epoch, self.num_rows)[place])

    def task_seed(self, index: int) -> int:
        """Return the seed of the task at a position: 62 bits."""
        return int(np.random.SeedSequence([self.seed, index]).generate_state(1, np.uint64)[0] >> 2)

    def pass_over(self, group: Group, reason: DropReason) -> None:
        """Do nothing: the order does not adapt."""

    def keep(self, task: Task) -> None:
        """Do nothing: a position has the same task whenever it is issued."""

    def learn(self, trained: Iterable[Group]) -> None:
        """Do nothing: the order does not adapt."""

    def numbers(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def write_to(self, state: LearnerState) -> None:
        """Do nothing: the order has no state."""


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, num_rows: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def total_steps(training: TrainingConfig, num_rows: int | None) -> int:
    """Return the number of the job's steps.

    Without `num_steps` and `num_epochs`, one epoch. Raises ConfigError for a game
    without data if neither is given, DataError for data that does not fill one batch.
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
