"""Parameters of tests whose variants are left to the full tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def variants(values: Iterable[Any], *core: Any) -> list[Any]:
    """Return the values of a parameter, marked `full` but for those of the core."""
    full = pytest.mark.full
    return [one if one in core else pytest.param(one, marks=full) for one in values]
