"""Down-sampling: the curves of a run of any length in at most a thousand points each.

A curve is kept in buckets of equally many steps: mean, least and greatest value of each. When
there are too many buckets their width doubles, so memory and work stay bounded and no extreme is
lost. Pure: no clock, no broker.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS, MAX_NAMES = 1000, 64
_DIGITS = 5
_EMPTY = {"sum": 0.0, "count": 0, "low": np.inf, "high": -np.inf}


class Curves:
    """All curves of one run, down-sampled as they grow."""

    def __init__(
        self,
        names: Iterable[str] | None = None,
        *,
        max_points: int = MAX_POINTS,
        later_counts: bool = False,
    ) -> None:
        """Keep at most `max_points` buckets, an even number, of each name.

        Without `names` the first `MAX_NAMES` that come are kept. `later_counts`: of several values
        of one step the last is the step's (a run that was resumed); else their mean.
        """
        self._max_points = max_points
        self._later_counts = later_counts
        self._grows = names is None
        self._rows: dict[str, int] = {}
        self.width = 1
        self.last_step = -1
        self._of = {name: np.full((0, max_points), empty) for name, empty in _EMPTY.items()}
        for name in names or ():
            self._add_row(name)

    def add(self, steps: Sequence[int], values: Sequence[Mapping[str, float]]) -> None:
        """Enter what was measured at each of some steps; what is not finite is left out."""
        if not steps:
            return
        at = np.array(steps, dtype=np.int64)
        self.last_step = max(self.last_step, int(at.max()))
        while self.last_step // self.width >= self._max_points:
            self._halve()
        if self._grows:
            for name in [name for one in values for name in one if name not in self._rows]:
                self._add_row(name)
        table = np.array([[one.get(name, np.nan) for one in values] for name in self._rows])
        for row in np.flatnonzero(np.isfinite(table).any(axis=1)):
            self._enter(int(row), at // self.width, table[row])

    def _add_row(self, name: str) -> None:
        if name in self._rows or (self._grows and len(self._rows) >= MAX_NAMES):
            return
        self._rows[name] = len(self._rows)
        for key, empty in _EMPTY.items():
            row = np.full((1, self._max_points), empty)
            self._of[key] = np.concatenate([self._of[key], row])

    def _enter(self, row: int, buckets: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        there = np.isfinite(values)
        at, found = buckets[there], values[there]
        of = {key: array[row] for key, array in self._of.items()}
        if self.width == 1 and self._later_counts:
            of["sum"][at] = of["low"][at] = of["high"][at] = found
            of["count"][at] = 1
            return
        np.add.at(of["sum"], at, found)
        np.add.at(of["count"], at, 1)
        np.minimum.at(of["low"], at, found)
        np.maximum.at(of["high"], at, found)

    def _halve(self) -> None:
        """Join each two neighbours."""
        self.width *= 2
        half = self._max_points // 2
        for key, join in (
            ("sum", np.add),
            ("count", np.add),
            ("low", np.minimum),
            ("high", np.maximum),
        ):
            array = self._of[key]
            joined = join(array[:, 0::2], array[:, 1::2])
            array[:, :half] = joined
            array[:, half:] = _EMPTY[key]

    def points(self) -> dict[str, Any]:
        """Return what is drawn, ready for JSON.

        `x` holds the first step of each bucket in which something was told; `series` by name the
        means `y`, and with more than one step to a bucket also `low` and `high`; null for none.
        """
        used = np.flatnonzero(self._of["count"].any(axis=0))
        series: dict[str, dict[str, list[float | None]]] = {}
        for name, row in self._rows.items():
            total, count, low, high = (self._of[key][row, used] for key in _EMPTY)
            if not count.any():
                continue
            series[name] = {"y": _numbers(total / np.maximum(count, 1), count)}
            if self.width > 1:
                series[name] |= {"low": _numbers(low, count), "high": _numbers(high, count)}
        return {"width": self.width, "x": (used * self.width).tolist(), "series": series}

    def to_map(self) -> dict[str, Any]:
        """Return all of it as JSON may hold it; `restore` reads it."""
        lines: dict[str, dict[str, list[Any]]] = {}
        for name, row in self._rows.items():
            used = np.flatnonzero(self._of["count"][row])
            lines[name] = {key: array[row, used].tolist() for key, array in self._of.items()}
            lines[name]["at"] = used.tolist()
        return {"width": self.width, "last_step": self.last_step, "lines": lines}

    def restore(self, told: Mapping[str, Any]) -> None:
        """Become what `to_map` told of."""
        self.width, self.last_step = int(told["width"]), int(told["last_step"])
        for name, line in told["lines"].items():
            self._add_row(name)
            for key, array in self._of.items():
                array[self._rows[name], line["at"]] = line[key]


def _numbers(values: NDArray[np.float64], count: NDArray[np.int64]) -> list[float | None]:
    return [
        float(f"{value:.{_DIGITS}g}") if there else None
        for value, there in zip(values.tolist(), count.tolist(), strict=True)
    ]
