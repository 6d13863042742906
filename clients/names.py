"""Names that people type: `RUN@STEP`, and the closest known one to a wrong one."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from ..schemas.errors import ConfigError
from ..schemas.job import JobRecord


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


def run_and_step(name: str) -> tuple[str, int | None]:
    """Return run and step of `RUN@STEP`, and None for the step of `RUN`; raises ConfigError."""
    run, at, step = name.partition("@")
    if at and not step.isdecimal():
        raise ConfigError(f"{name!r} names no step", hint="write RUN@STEP, such as my-run@40")
    return run, int(step) if at else None


def checkpoints_of(record: JobRecord) -> dict[int, Path]:
    """Return the folders of a run's checkpoints by step, as far as this machine sees them."""
    folders = (Path(record.run_dir) / "checkpoints").glob("step_*")
    return {int(one.name.removeprefix("step_")): one for one in sorted(folders)}
