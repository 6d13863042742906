"""Which runs a sweep is made of: every combination of values, or some that are drawn. Pure."""

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..schemas.wire.errors import ConfigError

MAX_RUNS = 1000
_LOG_RATIO = 10.0
_RANGE = re.compile(r"(-?[0-9][0-9.eE+-]*)\.\.(-?[0-9][0-9.eE+-]*)")
_OPEN, _CLOSE = "[{", "]}"

Point = Mapping[str, str]
"""Value of each key that varies, as it is written in an override."""


class NumberRange(NamedTuple):
    """Numbers from low to high, drawn evenly; evenly in their logarithm from a factor of 10 on."""

    low: float
    high: float
    whole: bool

    def draw(self, chance: float) -> str:
        """Return the number at a share from 0 to 1 of the way."""
        if self.low > 0 and self.high / self.low >= _LOG_RATIO:
            value = self.low * math.exp(chance * math.log(self.high / self.low))
        else:
            value = self.low + chance * (self.high - self.low)
        return str(round(value)) if self.whole else f"{value:.6g}"


def parse_space(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str] | NumberRange]]:
    """Return the overrides that are the same for all runs, and the keys that vary.

    `learner.lr=1e-5,1e-4` are values, `learner.lr=1e-6..1e-4` is a range. Raises ConfigError.
    """
    same: list[str] = []
    space: dict[str, list[str] | NumberRange] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        values, span = _split(text), _RANGE.fullmatch(text.strip())
        if separator and span is not None:
            space[key.strip()] = _span(override, *span.groups())
        elif separator and len(values) > 1:
            space[key.strip()] = values
        else:
            same.append(override)
    return same, space


def points(
    space: Mapping[str, list[str] | NumberRange], runs: int | None, seed: int
) -> list[Point]:
    """Return every combination of the values, or `runs` drawn ones; the same for the same `seed`.

    Raises ConfigError for a range without `runs`, and for too many.
    """
    if not space:
        raise ConfigError(
            "nothing varies", hint="give a key several values: learner.lr=1e-5,3e-5 seed=1,2,3"
        )
    if runs is None:
        lists = {key: one for key, one in space.items() if not isinstance(one, NumberRange)}
        if len(lists) < len(space):
            ranged = next(key for key in space if key not in lists)
            raise ConfigError(
                f"{ranged} is a range: of how many runs?", hint="add --runs 20, which are drawn"
            )
        _refuse_too_many(math.prod(len(values) for values in lists.values()))
        return [dict(zip(lists, one, strict=True)) for one in itertools.product(*lists.values())]
    _refuse_too_many(runs)
    return [{key: _drawn(one, key, seed, n) for key, one in space.items()} for n in range(runs)]


def _drawn(values: list[str] | NumberRange, key: str, seed: int, number: int) -> str:
    draw = random.Random(f"{seed} {number} {key}")  # noqa: S311  no secret
    return values.draw(draw.random()) if isinstance(values, NumberRange) else draw.choice(values)


def _refuse_too_many(count: int) -> None:
    if not 1 <= count <= MAX_RUNS:
        raise ConfigError(
            f"a sweep of {count:,} runs; from 1 to {MAX_RUNS:,} are made",
            hint="vary less, or draw some: --runs 50",
        )


def _span(override: str, low: str, high: str) -> NumberRange:
    try:
        span = NumberRange(float(low), float(high), low.lstrip("-").isdigit() and high.isdigit())
    except ValueError as error:
        raise ConfigError(f"{override!r} is no range", hint="write it as 1e-6..1e-4") from error
    if not span.low < span.high:
        raise ConfigError(f"{override!r} ends before it begins", hint="write the smaller one first")
    return span


def _split(text: str) -> list[str]:
    """Divide a text at its commas, but for those within brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in _OPEN) - (char in _CLOSE)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]
