"""What the metrics of a model were at each of its steps, as its client was told."""

from collections.abc import Mapping
from typing import Any

from ..curves import Curves

MAX_POINTS = 256
_JOINS = {"max": max, "min": min}


class ModelHistory:
    """The curves of one model; of several passes before a step, values are joined by their names.

    A name ends in how a client joins the values of several passes: `loss:sum`, `ratio:max`.
    """

    def __init__(self, told: Mapping[str, Any] | None = None) -> None:
        """Begin, or go on with what `to_map` returned."""
        self.steps = int(told["steps"]) if told else 0
        """Updates so far."""
        self._curves = Curves(max_points=MAX_POINTS)
        if told:
            self._curves.restore(told["curves"])
        self._passed: dict[str, list[float]] = dict(told.get("passed", {})) if told else {}
        self._last: dict[str, float] = dict(told["last"]) if told else {}

    @property
    def last(self) -> dict[str, float]:
        """Metrics of the newest step."""
        return dict(self._last)

    def passed(self, metrics: Mapping[str, float], *, forward_only: bool) -> None:
        """Note what a pass over data has told."""
        for name, value in metrics.items():
            self._passed.setdefault(f"forward/{name}" if forward_only else name, []).append(value)

    def take_passed(self) -> dict[str, float]:
        """Return what the passes since the last update told, joined, and forget it."""
        joined = {name: _join(name, values) for name, values in self._passed.items()}
        self._passed.clear()
        return joined

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """Note an update, and what it and the passes before it have told."""
        self._last = dict(metrics)
        self._curves.add([self.steps], [metrics])
        self.steps += 1

    def points(self) -> dict[str, Any]:
        """Return what is drawn; see `Curves.points`."""
        return self._curves.points()

    def to_map(self) -> dict[str, Any]:
        """Return all of it as JSON may hold it."""
        told = {"steps": self.steps, "curves": self._curves.to_map(), "last": self._last}
        return {**told, "passed": self._passed}


def _join(name: str, values: list[float]) -> float:
    how = name.rpartition(":")[2]
    if how in _JOINS:
        return _JOINS[how](values)
    return sum(values) / (1 if how == "sum" else len(values))
