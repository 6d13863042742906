"""Run checks from the command line, and print their results (see `schemas/checks.py`)."""

import importlib.util
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE
from typing import Any

from ...envs.check import Exchange, conversations, has_gold
from ...envs.data import ChatData
from ...envs.registry import load_game
from ...schemas.checks import (
    LAST_LINE,
    CheckResult,
    CheckSkipped,
    Outcome,
    failed_check,
    read_result,
)
from ...schemas.config.job import JobConfig
from ...schemas.wire.codec import pack
from ...schemas.wire.errors import ModelError, TinkermqError
from .output import literal, print_json, print_text

FAILED = 1
"""Exit code if a check failed."""
DEADLINE_S = 120.0
"""Time limit of the checks of a model, or of a user's function."""
_MARKS: dict[Outcome, str] = {
    "ok": "[green]ok[/]  ",
    "note": "[dim]note[/]",
    "failed": "[red]fail[/]",
    "skipped": "[yellow]skip[/]",
}


# -- printing --------------------------------------------------------------------------------------


def print_checks(results: Sequence[CheckResult], *, as_json: bool, **extra: Any) -> int:
    """Print results, in JSON with further fields; return the exit code."""
    if as_json:
        is_ok = all(result.ok for result in results)
        checks = [{"ok": result.ok, **result.model_dump()} for result in results]
        print_json({"ok": is_ok, **extra, "checks": checks})
    else:
        width = max((len(result.name) for result in results), default=0)
        for result in results:
            print_check(result, width)
    return exit_code(results)


def print_check(result: CheckResult, width: int = 0) -> None:
    """Print one result, with a hint below it if it has one."""
    by = f"  [dim]({literal(result.by)})[/]" if result.by else ""
    name = literal(result.name.ljust(width))
    print_text(f"{_MARKS[result.outcome]} {name}  {literal(result.detail)}{by}")
    if result.hint:
        print_text(f"       [dim]{literal(result.hint)}[/]")


def exit_code(results: Iterable[CheckResult]) -> int:
    """Return the exit code of a command that only checks."""
    return 0 if all(result.ok for result in results) else FAILED


def finding(name: str, ok: bool, detail: str, hint: str = "") -> CheckResult:
    """Return a result of a check of a machine."""
    outcome: Outcome = "failed" if not ok else "note" if hint else "ok"
    return CheckResult(name=name, outcome=outcome, detail=detail, hint=hint)


def finding_of_problems(name: str, problems: Sequence[str], fine: str, hint: str) -> CheckResult:
    """Return a result that has failed with these problems and `hint`, or else says `fine`."""
    return finding(name, not problems, "; ".join(problems) or fine, hint if problems else "")


# -- checks in a process of their own --------------------------------------------------------------


def run_process(
    name: str,
    module: str,
    *arguments: str,
    error: type[TinkermqError],
    late: type[TinkermqError] | None = None,
    request: bytes = b"",
    deadline_s: float | None = DEADLINE_S,
) -> Iterator[CheckResult]:
    """Run a module's checks in a process; yield each result as soon as it arrives.

    If the process does not complete them, the last result is a check `name` with `error`; with
    `late`, if that is given and the time was over.
    """
    is_complete, is_late = False, threading.Event()
    command = [sys.executable, "-P", "-m", module, *arguments]
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=log) as process:
            timer = threading.Timer(deadline_s or 0.0, _end_late, (process, is_late))
            if deadline_s is not None:
                timer.start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(request)
                for line in process.stdout:
                    text = line.decode(errors="replace").rstrip("\n")
                    is_complete = is_complete or text == LAST_LINE
                    if (result := read_result(text)) is not None:
                        yield result
                process.wait()
            finally:
                timer.cancel()
                process.kill()
        if is_late.is_set():
            why = f"its checks did not end within {deadline_s:g} s"
            hint = "this machine, or the disk of what they read, may be slow"
            yield failed_check(name, (late or error)(why, hint=hint))
        elif not is_complete:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"exit code {process.returncode}"
            yield failed_check(name, error(f"its checks ended early: {reason}"))


def _end_late(process: subprocess.Popen[bytes], is_late: threading.Event) -> None:
    is_late.set()
    process.kill()


def can_check_model(config: JobConfig) -> bool:
    """Return whether this machine has a run's model, and the code to read it."""
    is_here = Path(config.model.path).expanduser().is_dir()
    return is_here and importlib.util.find_spec("transformers") is not None


def check_model(config: JobConfig, *, plays: bool, whole: bool = True) -> list[CheckResult]:
    """Check the model and data of a run with the code of the run.

    With `plays`, also check the conversations of its game; without `whole`, only these. Raises
    GameError or DataError if the game cannot be played.
    """
    exchanges: list[Exchange] = conversations(config.env, seed=config.seed) if plays else []
    values = config.model_dump(mode="json", exclude_unset=True)
    values["model"]["path"] = str(Path(config.model.path).expanduser())
    request = {
        "config": values,
        "exchanges": [asdict(exchange) for exchange in exchanges],
        "gold": plays and has_gold(load_game(config.env.game)),
        "whole": whole,
    }
    return _run_model_checks(request)


def check_model_kind(path: str, engine: str) -> list[CheckResult]:
    """Check a model without a run, by its configuration alone."""
    config = {"model": {"path": path}, "env": {"game": "none"}, "generator": {"engine": engine}}
    return _run_model_checks({"config": config, "alone": True})


def _run_model_checks(request: dict[str, Any]) -> list[CheckResult]:
    module = "tinkermq.actors.model_checks"
    late = CheckSkipped  # slowness says nothing about the model
    return list(run_process("model", module, error=ModelError, late=late, request=pack(request)))


# -- rows of conversations -------------------------------------------------------------------------


def check_rows(config: JobConfig) -> str:
    """Read every row of an SFT run's data; DataError for the first invalid one."""
    with closing(ChatData(config.sft.data)) as data:
        for number in range(len(data)):
            data.row(number)
        return "; ".join(filter(None, (f"{len(data)} conversations", data.note)))
