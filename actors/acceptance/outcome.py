"""The line of a check: what came of it, in a file between processes and in the report."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ...schemas.wire.errors import TinkermqError
from .figures import CheckSkipped, Figure, Found

State = Literal["ok", "failed", "skipped"]


class FigureRow(BaseModel):
    """A `Figure` as the report has it."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    what: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    holds: bool


class CheckOutcome(BaseModel):
    """What came of one check."""

    model_config = ConfigDict(frozen=True)

    name: str
    state: State
    measured: str = ""
    expected: str = ""
    reason: str = ""
    """Why it failed or was skipped."""
    remedy: str = ""
    """What to do then."""
    seconds: float = 0.0
    """From the start of its process to its end."""
    figures: list[FigureRow] = Field(default_factory=list[FigureRow])
    facts: dict[str, str] = Field(default_factory=dict[str, str])
    log: str = ""
    """The end of what its process wrote, where it failed."""


def found_outcome(name: str, found: Found, remedy: str) -> CheckOutcome:
    """Say whether all figures of a check hold."""
    wrong = [one for one in found.figures if not one.holds]
    reason = "; ".join(f"{one.measured}, expected {_bound(one)}" for one in wrong)
    return CheckOutcome(
        name=name,
        state="failed" if wrong else "ok",
        measured="; ".join(one.measured for one in found.figures),
        expected="; ".join(filter(None, (one.expected for one in found.figures))),
        reason=reason,
        remedy=remedy if wrong else "",
        figures=_rows(found.figures),
        facts=dict(found.facts),
    )


def error_outcome(name: str, error: Exception, remedy: str) -> CheckOutcome:
    """Say what an error of a check means: a reason to skip it, or its failure."""
    inner: Sequence[Exception] = getattr(error, "exceptions", ())
    if len(inner) == 1:  # what a TaskGroup makes of one error
        return error_outcome(name, inner[0], remedy)
    if isinstance(error, TinkermqError):
        state: State = "skipped" if isinstance(error, CheckSkipped) else "failed"
        remedy = error.hint or remedy
        return CheckOutcome(name=name, state=state, reason=error.message, remedy=remedy)
    told = str(error).strip().splitlines() or [""]
    reason = f"{type(error).__name__}: {told[0]}".rstrip(": ")
    return CheckOutcome(name=name, state="failed", reason=reason, remedy=remedy)


def _bound(figure: Figure) -> str:
    return figure.expected.removeprefix(figure.what).strip() or "a number"


def _rows(figures: Sequence[Figure]) -> list[FigureRow]:
    return [FigureRow(**vars(one), holds=one.holds) for one in figures]
