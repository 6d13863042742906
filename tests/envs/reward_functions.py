"""Reward functions, good and bad ones; importable, so that environment hosts find them by name."""

import math
import time
from typing import Any


def verl_style(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Judge as verl's functions do: a map with the score and what else is known."""
    right = solution_str == ground_truth
    return {"score": float(right), "source": data_source, "level": (extra_info or {}).get("level")}


def says_all(**told: Any) -> dict[str, Any]:
    """Earn the number of messages, and tell what there is to know."""
    return {"reward": len(told["messages"]), "known": sorted(told)}


def raises(**_: Any) -> float:
    """Fail."""
    raise KeyError("no rubric")


def hangs(**_: Any) -> float:
    """Take too long."""
    time.sleep(3)
    return 1.0


def says_nothing(**_: Any) -> None:
    """Return no reward."""


def says_text(**_: Any) -> str:
    """Return a text that looks like a number."""
    return "1.0"


def says_nan(**_: Any) -> float:
    """Return what no sum survives."""
    return math.nan


not_a_function = 7
