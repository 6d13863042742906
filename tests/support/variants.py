"""Parameters of tests whose variants are left to the full tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def variants(values: Iterable[Any], *core: Any) -> list[Any]:
    """Return the values, tuples for several parameters, marked `full` but for the core's."""
    return [one if one in core else _full(one) for one in values]


def _full(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.full)
