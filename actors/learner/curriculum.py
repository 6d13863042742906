"""The curriculum: chooses the next task by the success rates of the tasks.

A task is chosen with a weight of p (1 − p), where p is the share of its episodes that were solved:
tasks that are always or never solved teach nothing (learnability, arXiv 2408.15099). Newer episodes
count more, unseen tasks have the largest weight, and a share of all choices is uniform, so that no
task is excluded for good.

The rates after step v are a function of the first v batch records and their groups. A choice is a
function of the job's seed, the position in the data order, and the rates after the task's version
`Task.chosen_at`: everything can be recomputed from the log.

Custom filters and curricula select the groups to train, and weight the tasks. Their decisions are
recorded in the batch records and in the tasks, so a replay does not call them; a restarted learner
calls them again, so they must be deterministic.

Shape letters: E episodes, I tasks.
"""

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...envs.evaluation import is_success
from ...schemas.rollout import Group, return_of
from ...schemas.task import DropReason, Task
from ..training.functions.calls import CustomFunction
from ..training.functions.wire import CurriculumInputs, FilterInputs
from ..training.state import LearnerState
from .data_order import Chosen, DataOrder

MEMORY = 0.5
"""Weight of a task's earlier episodes when new ones are counted."""
_STREAM = 3
_SOLVED = 0.9


def learnability(inputs: CurriculumInputs) -> NDArray[np.float64]:
    """Weight each task by p (1 − p)."""
    return inputs.rates_I * (1 - inputs.rates_I)


@dataclass(frozen=True)
class CurriculumConfig:
    """Settings of a curriculum."""

    num_items: int
    """Rows of the data, or seeds of a game that generates its states."""
    uniform: float
    """Share of uniform choices."""
    success_reward: float
    """A return above this value is a success, unless the game reports success."""
    weigh: Callable[[CurriculumInputs], NDArray[np.float64]] = field(
        default_factory=lambda: learnability
    )
    """Returns the weights of all tasks, float64[I]."""


class Curriculum:
    """Success rates by task, and the choices that depend on them."""

    def __init__(self, order: DataOrder, config: CurriculumConfig, state: LearnerState) -> None:
        self._order = order
        self._config = config
        self._tries = np.zeros(config.num_items)
        self._solved = np.zeros(config.num_items)
        for item, tries, solved in state.success:
            if item >= config.num_items:
                continue  # a fork may have less data
            self._tries[item], self._solved[item] = tries, solved
        self._saved_choices = {
            index: (item, version) for index, item, version in state.kept_choices
        }
        self._noted: list[Group] = []
        self._bounds = self._accumulate()

    def choose(self, index: int, version: int) -> Chosen:
        """Choose the task at a position of the data order; a stored choice comes first."""
        chosen = self._saved_choices.pop(index, None)
        if chosen is not None:
            return self._chosen(index, *chosen)
        rng = np.random.default_rng([self._order.seed, _STREAM, index])
        drawn = float(rng.random() * self._bounds[-1])
        item = min(bisect.bisect_right(self._bounds, drawn), len(self._bounds) - 1)
        return self._chosen(index, item, version)

    def task_seed(self, index: int) -> int:
        """Return the seed of the task at a position: 62 bits."""
        return self._order.task_seed(index)

    def pass_over(self, group: Group, reason: DropReason) -> None:
        """Record a group that is not trained."""
        if reason != "duplicate":
            self._noted.append(group)

    def keep(self, task: Task) -> None:
        """Store the choice of a task that will be issued again."""
        if task.index is not None and task.chosen_at is not None and self._knows(task.item):
            assert task.item is not None
            self._saved_choices[task.index] = (task.item, task.chosen_at)

    def learn(self, trained: Iterable[Group]) -> None:
        """Count the recorded groups, and the groups trained by a step, in order."""
        groups, self._noted = [*self._noted, *trained], []
        for group in groups:
            if self._knows(group.task.item):
                self._count(group)
        self._bounds = self._accumulate()

    def numbers(self) -> dict[str, float]:
        """Describe the rates as metrics."""
        seen = self._tries > 0
        if not seen.any():
            return {}
        rates = self._solved[seen] / self._tries[seen]
        return {
            "curriculum/seen_share": float(seen.mean()),
            "curriculum/success_rate": float(rates.mean()),
            "curriculum/solved_share": float((rates > _SOLVED).mean()),
            "curriculum/unsolved_share": float((rates < 1 - _SOLVED).mean()),
        }

    def write_to(self, state: LearnerState) -> None:
        """Write the rates into the state of a checkpoint."""
        seen = np.flatnonzero(self._tries)
        state.success = [
            (int(item), float(self._tries[item]), float(self._solved[item])) for item in seen
        ]
        state.kept_choices = [
            (index, *choice) for index, choice in sorted(self._saved_choices.items())
        ]

    def _knows(self, item: int | None) -> bool:
        return item is not None and item < self._config.num_items

    def _count(self, group: Group) -> None:
        item, above = group.task.item, self._config.success_reward
        solved = [is_success(return_of(rows), rows[0].info, above) for rows in group.episodes]
        self._tries[item] = MEMORY * self._tries[item] + len(solved)
        self._solved[item] = MEMORY * self._solved[item] + sum(solved)

    def _accumulate(self) -> NDArray[np.float64]:
        """Return the cumulative weights of all tasks."""
        known = (self._tries.copy(), self._solved.copy())
        for array in known:
            array.flags.writeable = False
        weights = self._config.weigh(CurriculumInputs(*known))
        uniform = self._config.uniform if weights.any() else 1.0
        shares = weights / max(weights.sum(), 1e-300)
        return ((1 - uniform) * shares + uniform / len(weights)).cumsum()

    def _chosen(self, index: int, item: int, version: int) -> Chosen:
        has_rows = self._order.num_rows is not None
        return Chosen(
            sample=item if has_rows else None,
            seed=self._order.task_seed(index if has_rows else item),
            item=item,
            chosen_at=version,
        )


# -- custom filters and curricula ------------------------------------------------------------------

MOST_IN_A_ROW = 4096
"""Consecutive groups that a filter may leave out; a run that trains no group would not end."""


class CustomFilter:
    """A user's function that decides whether to train a group."""

    def __init__(self, function: CustomFunction) -> None:
        self._function = function
        self._in_a_row = 0

    def keeps(self, group: Group) -> bool:
        """Return whether a group is trained; blocks.

        Raises ConfigError for an invalid answer, or if the filter leaves out every group.
        """
        answer = self._function.decision(filter_inputs(group))
        self._in_a_row = 0 if answer else self._in_a_row + 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise self._function.wrong(
                f"has left out the last {self._in_a_row} groups: the run would never end"
            )
        return answer


def keeps_of(function: CustomFunction | None) -> Callable[[Group], bool] | None:
    """Return the function that selects groups to train; None: train all."""
    return None if function is None else CustomFilter(function).keeps


def filter_inputs(group: Group) -> FilterInputs:
    """Return the inputs of a filter for a group."""
    episodes = group.episodes
    return FilterInputs(
        rewards_E=np.array([return_of(rows) for rows in episodes]),
        lengths_E=np.array([sum(row.num_generated for row in rows) for rows in episodes]),
        truncated_E=np.array([any(row.ended_by == "length" for row in rows) for rows in episodes]),
        infos=[dict(rows[0].info) for rows in episodes],
        data_source=episodes[0][0].data_source,
        sample=group.task.sample,
    )
