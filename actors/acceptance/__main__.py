"""Check a machine: `python -m tinkermq.actors.acceptance [--device gpu|cpu]`.

`tinkermq doctor --gpu` runs this. Each line is a check that ran in a process of its own; the report
is written anew after each, so that an interrupted run leaves one, too.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ...schemas.wire.errors import ConfigError, TinkermqError
from .outcome import CheckOutcome, State
from .plan import CHECKS, DEVICE, Check
from .report import AcceptanceReport
from .running import run_checks

REPORT = Path("tinkermq-acceptance.json")
_FAILED, _WRONG_USAGE, _INTERRUPTED = 1, 2, 130
_MARKS: dict[State, str] = {
    "ok": "[green]ok[/]     ",
    "failed": "[red]failed[/] ",
    "skipped": "[yellow]skipped[/]",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code: 1 if one failed."""
    given = _parser().parse_args(argv)
    console = Console(stderr=given.json, soft_wrap=True, highlight=False)
    try:
        report = accept(
            chosen(given.only), given.report, on_gpu=given.device == "gpu", console=console
        )
    except TinkermqError as error:
        console.print(str(error), style="red", markup=False)
        return _WRONG_USAGE if isinstance(error, ValueError) else _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    if given.json:
        sys.stdout.write(report.model_dump_json() + "\n")
    return 0 if report.ok else _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tinkermq.actors.acceptance")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", action="append", metavar="CHECK", help="may be repeated")
    parser.add_argument("--report", type=Path, default=REPORT, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print the report, too")
    return parser


def chosen(names: Sequence[str] | None) -> list[Check]:
    """Return the checks of these names, the device's first; all without names.

    Raises ConfigError for a name that no check has.
    """
    known = {check.name: check for check in CHECKS}
    if not names:
        return list(known.values())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no check is called {unknown[0]!r}", hint=f"one of {', '.join(known)}")
    return [check for check in CHECKS if check.name in {DEVICE, *names}]


def accept(
    checks: Sequence[Check], file: Path, *, on_gpu: bool, console: Console
) -> AcceptanceReport:
    """Run checks, tell each as it ends, and write the report into a file."""
    report = AcceptanceReport.begin(on_gpu=on_gpu)
    report.write(file)
    width = max(len(check.name) for check in checks)
    for outcome in run_checks(checks, on_gpu=on_gpu):
        report.add(outcome)
        report.write(file)
        _tell(outcome, width, console)
    console.print(f"\nreport  {escape(str(file))}: attach it to an issue where a check failed")
    return report


def _tell(outcome: CheckOutcome, width: int, console: Console) -> None:
    """Print the line of a check, with what was expected and the remedy below it."""
    first, *more = _texts(outcome)
    took = f"{outcome.seconds:4.0f} s" if outcome.seconds else " " * 6
    console.print(f"{_MARKS[outcome.state]} {outcome.name:<{width}} {took}  {escape(first)}")
    for text in more:
        console.print(f"{'':{width + 17}}[dim]{escape(text)}[/]")


def _texts(outcome: CheckOutcome) -> list[str]:
    told = {
        "": outcome.measured,
        "expected: ": outcome.expected,
        "reason: " if outcome.measured else "": outcome.reason,
        "to do: ": outcome.remedy,
    }
    if not outcome.measured:
        told = {"": outcome.reason, "to do: ": outcome.remedy}
    return [f"{label}{text}" for label, text in told.items() if text] or [""]


if __name__ == "__main__":
    sys.exit(main())
