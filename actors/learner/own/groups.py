"""Filters and curricula of the user's own: what they get, and what is made of their answers.

They decide which groups are trained, and which tasks come next. What was decided stands in the
batch records and in the tasks, so a replay asks nobody; a learner that starts again asks anew, so
they must answer the same for the same inputs.

Shape letters: E episodes, I tasks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ....schemas.rollout import Group, return_of
from ....schemas.wire.foreign import blaming, shown
from ..tasks.curriculum import CurriculumInputs
from .functions import OwnFunction, own_function

MOST_IN_A_ROW = 4096
"""Groups that a filter may leave out one after the other: a run that trains none has no end."""


@dataclass(frozen=True)
class FilterInputs:
    """What a filter reads of a group."""

    rewards_E: NDArray[np.float64]
    """Return of each episode."""
    lengths_E: NDArray[np.int64]
    """Generated tokens of each."""
    truncated_E: NDArray[np.bool_]
    """Whether a token limit ended it."""
    infos: list[dict[str, Any]]
    """What the game told in `info` at the end of each."""
    data_source: str
    """Of the row of the data; empty where it has none."""
    sample: int | None
    """The row of the data; None for a game that generates its states."""


class OwnFilter:
    """A function of the user's that says whether a group is trained."""

    def __init__(self, function: OwnFunction) -> None:
        self._function = function
        self._in_a_row = 0

    def keeps(self, group: Group) -> bool:
        """Ask it; raises ConfigError for no answer, and for one that leaves out everything."""
        answer = self.answer(filter_inputs(group))
        self._in_a_row = 0 if answer else self._in_a_row + 1
        if self._in_a_row > MOST_IN_A_ROW:
            raise self._function.wrong(
                f"has left out the last {self._in_a_row} groups: the run would never end"
            )
        return answer

    def answer(self, inputs: FilterInputs) -> bool:
        """Return what it says of a group."""
        answer = self._function.called(inputs)
        if isinstance(answer, np.ndarray | np.generic):
            answer = cast("Any", answer).tolist()
        if not isinstance(answer, bool):
            raise self._function.wrong(
                f"returned {shown(answer)} in place of True, to train the group, or False"
            )
        return answer


def keeps_of(target: str | None) -> Callable[[Group], bool] | None:
    """Return what says which groups are trained; None: all are. Raises ConfigError."""
    function = own_function("filter", target)
    return None if function is None else OwnFilter(function).keeps


def filter_inputs(group: Group) -> FilterInputs:
    """Return what a filter reads of a group."""
    episodes = group.episodes
    return FilterInputs(
        rewards_E=np.array([return_of(rows) for rows in episodes]),
        lengths_E=np.array([sum(row.num_generated for row in rows) for rows in episodes]),
        truncated_E=np.array([any(row.ended_by == "length" for row in rows) for rows in episodes]),
        infos=[dict(rows[0].info) for rows in episodes],
        data_source=episodes[0][0].data_source,
        sample=group.task.sample,
    )


class OwnCurriculum:
    """A function of the user's that weighs the tasks to choose from."""

    def __init__(self, function: OwnFunction) -> None:
        self._function = function

    def weigh(self, inputs: CurriculumInputs) -> NDArray[np.float64]:
        """Return float64[I]; raises ConfigError for what are no weights."""
        answer = self._function.called(inputs)
        with blaming(self._function.failure):
            weights_I = _numbers(answer)
        if weights_I.shape != inputs.tries_I.shape:
            raise self._function.wrong(
                f"returned weights of shape {list(weights_I.shape)} for {len(inputs.tries_I)} tasks"
            )
        if not np.isfinite(weights_I).all() or (weights_I < 0).any():
            raise self._function.wrong("returned weights that are negative, NaN or infinite")
        return weights_I


def _numbers(answer: Any) -> NDArray[np.float64]:
    """Return an answer as numbers; NaN for what are none."""
    try:
        return np.asarray(answer, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array(np.nan)
