"""Down-sampling: the curves of a run of any length in at most a thousand points each.

A curve consists of buckets of equally many steps, each with mean, minimum and maximum. When there
are too many buckets their width doubles, so memory and work are bounded and no extreme is lost.
Pure: no clock, no broker.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
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
        *,
        max_points: int = MAX_POINTS,
        max_names: int = MAX_NAMES,
        later_counts: bool = False,
    ) -> None:
        """Keep at most `max_points` buckets, an even number, for the first `max_names` names.

        With `later_counts` the last of several values of a step counts (after a resumption);
        otherwise their mean.
        """
        self._max_points = max_points
        self._max_names = max_names
        self._later_counts = later_counts
        self._rows: dict[str, int] = {}
        self.width = 1
        self.last_step = -1
        self._of = {name: np.full((0, max_points), empty) for name, empty in _EMPTY.items()}

    @property
    def names(self) -> list[str]:
        """Names of the curves, in the order of their first values."""
        return list(self._rows)

    @property
    def nbytes(self) -> int:
        """Memory that the curves hold."""
        return sum(array.nbytes for array in self._of.values())

    def add(self, steps: Sequence[int], values: Sequence[Mapping[str, float]]) -> None:
        """Add the values of some steps; values that are not finite are left out."""
        if not steps:
            return
        at = np.array(steps, dtype=np.int64)
        self.last_step = max(self.last_step, int(at.max()))
        while self.last_step // self.width >= self._max_points:
            self._halve()
        self._add_rows(dict.fromkeys(name for point in values for name in point))
        table = np.array([[point.get(name, np.nan) for point in values] for name in self._rows])
        for row in np.flatnonzero(np.isfinite(table).any(axis=1)):
            self._enter(int(row), at // self.width, table[row])

    def _add_rows(self, names: Iterable[str]) -> None:
        """Add rows for new names, up to `max_names`."""
        fresh = [name for name in names if name not in self._rows]
        fresh = fresh[: self._max_names - len(self._rows)]
        for name in fresh:
            self._rows[name] = len(self._rows)
        for key, empty in _EMPTY.items():
            rows = np.full((len(fresh), self._max_points), empty)
            self._of[key] = np.concatenate([self._of[key], rows])

    def _enter(self, row: int, buckets: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        there = np.isfinite(values)
        at, finite = buckets[there], values[there]
        of = {key: array[row] for key, array in self._of.items()}
        if self.width == 1 and self._later_counts:
            of["sum"][at] = of["low"][at] = of["high"][at] = finite
            of["count"][at] = 1
            return
        np.add.at(of["sum"], at, finite)
        np.add.at(of["count"], at, 1)
        np.minimum.at(of["low"], at, finite)
        np.maximum.at(of["high"], at, finite)

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

    def points(
        self, names: Container[str] | None = None, *, first: int = 0, last: int | None = None
    ) -> dict[str, Any]:
        """Return the curves of some names, or all, at steps `first` to `last`, ready for JSON.

        `x` has the first step of each bucket with a value. `series` has, by name, the means `y`,
        and with several steps per bucket also `low` and `high`; null: no value.
        """
        used = np.flatnonzero(self._of["count"].any(axis=0))
        until = self.last_step if last is None else last
        used = used[(used >= first // self.width) & (used <= until // self.width)]
        series: dict[str, dict[str, list[float | None]]] = {}
        for name, row in self._rows.items():
            if names is not None and name not in names:
                continue
            total, count, low, high = (self._of[key][row, used] for key in _EMPTY)
            if not count.any():
                continue
            series[name] = {"y": _numbers(total / np.maximum(count, 1), count)}
            if self.width > 1:
                series[name] |= {"low": _numbers(low, count), "high": _numbers(high, count)}
        return {"width": self.width, "x": (used * self.width).tolist(), "series": series}

    def means(self, name: str) -> NDArray[np.float64]:
        """Return the mean of each bucket; NaN for a bucket without a value."""
        num = self.last_step // self.width + 1
        if name not in self._rows:
            return np.full(num, np.nan)
        total, count = (self._of[key][self._rows[name], :num] for key in ("sum", "count"))
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def to_map(self) -> dict[str, Any]:
        """Return the curves as JSON values, for `restore`."""
        lines: dict[str, dict[str, list[Any]]] = {}
        for name, row in self._rows.items():
            used = np.flatnonzero(self._of["count"][row])
            lines[name] = {key: array[row, used].tolist() for key, array in self._of.items()}
            lines[name]["at"] = used.tolist()
        return {"width": self.width, "last_step": self.last_step, "lines": lines}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Restore the curves that `to_map` returned."""
        self.width, self.last_step = int(stored["width"]), int(stored["last_step"])
        self._add_rows(stored["lines"])
        for name, line in stored["lines"].items():
            for key, array in self._of.items():
                array[self._rows[name], line["at"]] = line[key]


def _numbers(values: NDArray[np.float64], count: NDArray[np.int64]) -> list[float | None]:
    return [
        float(f"{value:.{_DIGITS}g}") if there else None
        for value, there in zip(values.tolist(), count.tolist(), strict=True)
    ]
