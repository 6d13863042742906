"""Run checks one after the other, each in a process of its own with a deadline."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ...broker.programs.process import die_with
from .outcome import CheckOutcome
from .plan import DEVICE, TOTAL_S, Check

_LOG_CHARACTERS = 4000
_AFTER_S = 1.0
"""A check with less time than this left is not begun."""


def run_checks(
    checks: Sequence[Check], *, on_gpu: bool, total_s: float = TOTAL_S
) -> Iterator[CheckOutcome]:
    """Yield the outcome of each check as soon as it is there.

    Without a device that works the others are skipped, and so is what does not fit into `total_s`
    seconds.
    """
    deadline = time.monotonic() + total_s
    lacking = ""
    for check in checks:
        left_s = deadline - time.monotonic()
        if lacking:
            yield _skipped(check, lacking, "first what the device lacks")
        elif left_s < _AFTER_S:
            alone = f"run it alone: `tinkermq doctor --gpu --only '{check.name}'`"
            yield _skipped(check, f"the {total_s:g} s of all checks were over", alone)
        else:
            outcome = run_check(check, on_gpu=on_gpu, limit_s=min(check.deadline_s, left_s))
            if check.name == DEVICE and outcome.state != "ok":
                lacking = "there is no device to run it on"
            yield outcome


def run_check(check: Check, *, on_gpu: bool, limit_s: float) -> CheckOutcome:
    """Run one check to its end, or to its deadline in seconds; nothing of it is left then."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix="tinkermq-acceptance-", ignore_cleanup_errors=True
    ) as name:
        place = Path(name)
        code = _run(check, place, on_gpu=on_gpu, limit_s=limit_s)
        outcome = _told(check, place) if code is not None else None
        if outcome is None:
            outcome = _ended(check, code, limit_s)
        failed = outcome.state == "failed"
        log = (place / "log").read_text(errors="replace")[-_LOG_CHARACTERS:] if failed else ""
    return outcome.model_copy(update={"seconds": time.monotonic() - started, "log": log})


def _run(check: Check, place: Path, *, on_gpu: bool, limit_s: float) -> int | None:
    """Return the exit code of a check's process; None past its deadline."""
    folder = place / "check"
    folder.mkdir()
    setting = json.dumps({"on_gpu": on_gpu, "folder": str(folder)})
    command = [sys.executable, "-m", "tinkermq.actors.acceptance.child"]
    command += [json.dumps(asdict(check)), setting, str(place / "outcome")]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=_environment(on_gpu=on_gpu),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a check with all that it has started; what has a session of its own dies with it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _environment(*, on_gpu: bool) -> dict[str, str]:
    """Let a check see the GPUs, or none of them and one thread."""
    return dict(os.environ) if on_gpu else {**os.environ, **_ON_CPU}


_ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _told(check: Check, place: Path) -> CheckOutcome | None:
    """Return what a process has told; None where it ended before."""
    try:
        return CheckOutcome.model_validate_json((place / "outcome").read_bytes())
    except (OSError, ValueError):
        return None


def _ended(check: Check, code: int | None, limit_s: float) -> CheckOutcome:
    """Say of a check that did not tell its outcome how it ended."""
    if code is None:
        reason = f"it had not ended after {limit_s:.0f} s and was killed"
    elif code < 0:
        reason = f"its process was ended by {signal.Signals(-code).name}"
    else:
        reason = f"its process ended with code {code}"
    return CheckOutcome(name=check.name, state="failed", reason=reason, remedy=check.remedy)


def _skipped(check: Check, reason: str, remedy: str) -> CheckOutcome:
    return CheckOutcome(name=check.name, state="skipped", reason=reason, remedy=remedy)
