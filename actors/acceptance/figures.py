"""What a check measures: figures with the bounds that they are expected to keep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...schemas.wire.errors import TinkermqError


class CheckSkipped(TinkermqError):
    """A check that means nothing here; the message says why, the hint what would change it."""


@dataclass(frozen=True)
class Setting:
    """Where a check runs."""

    on_gpu: bool
    """Else on the CPU, with tiny sizes."""
    folder: Path
    """An empty folder, which is removed afterwards."""


@dataclass(frozen=True)
class Figure:
    """One number that was measured."""

    what: str
    value: float
    unit: str = ""
    at_least: float | None = None
    """The smallest value that is well; None: any."""
    at_most: float | None = None
    """The largest."""

    @property
    def holds(self) -> bool:
        """Whether it is a number within its bounds."""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return low <= self.value <= high

    @property
    def measured(self) -> str:
        """The value in words, such as `matrix product 712 TFLOP/s`."""
        return f"{self.what} {_worded(self.value, self.unit)}"

    @property
    def expected(self) -> str:
        """Its bounds in words; empty without any."""
        bounds = {"≥": self.at_least, "≤": self.at_most}
        told = [f"{sign} {_worded(b, self.unit)}" for sign, b in bounds.items() if b is not None]
        return f"{self.what} {' and '.join(told)}" if told else ""


@dataclass(frozen=True)
class Found:
    """What a check has found."""

    figures: Sequence[Figure]
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What is no number, by name: versions, devices."""


def _worded(value: float, unit: str) -> str:
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}".rstrip()
