"""Names that people type: `RUN@STEP`, and the closest known one to a wrong one."""

import difflib
from collections.abc import Iterable

from ...schemas.job import BEST_STEP, LAST_STEP
from ...schemas.tinker.names import is_path
from ...schemas.wire.errors import ConfigError


def did_you_mean(typed: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return `did you mean X?` for the closest of `known`, the known ones, or `otherwise`."""
    names = sorted(set(known))
    near = difflib.get_close_matches(typed, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    if otherwise:
        return otherwise
    if 0 < len(names) <= 12:
        return f"known are {', '.join(names)}"
    return ""


def run_and_step(name: str) -> tuple[str, str | None]:
    """Return run and step of `RUN@STEP`, `RUN@last` or `RUN@best`, and None for the step of `RUN`.

    The pool says whether there is such a checkpoint. Raises ConfigError.
    """
    run, at, step = name.partition("@")
    if at and step not in (LAST_STEP, BEST_STEP) and not step.isdecimal():
        raise ConfigError(
            f"{name!r} names no step",
            hint=f"write RUN@STEP, such as my-run@40, RUN@{LAST_STEP} or RUN@{BEST_STEP}",
        )
    return run, step if at else None


def checkpoint_named(name: str) -> str:
    """Return `RUN@STEP` for a name that people type: `RUN` means its newest checkpoint.

    A `tinker://` path stays as it is.
    """
    if is_path(name):
        return name
    run, step = run_and_step(name)
    return f"{run}@{step or LAST_STEP}"
