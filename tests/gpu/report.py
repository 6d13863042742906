"""The JSON report of `make test-gpu`: ratios, and the efficiencies that `tinkermq plan` reads.

    python -m tests.gpu.report FIGURES REPORT

Each module of the tests is a process of its own, and appends what its tests record to FIGURES. The
last value of a name counts: larger sizes come later.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.schemas.plan.plan import Efficiencies, read_efficiencies

RATIOS = (
    "learner_of_matrix_product",
    "step_over_transformers",
    "loop_over_engine",
    "step_to_new_tokens_s",
    "memory_predicted_over_measured",
)
EFFICIENCIES = tuple(field.name for field in fields(Efficiencies) if field.name != "source")


def append_figures(path: Path, report: pytest.TestReport) -> None:
    """Append the outcome of a test and what it recorded, as a line of JSON."""
    line = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": report.duration,
        "figures": dict(report.user_properties),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def make_report(tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report of these tests, in the order in which they ran."""
    found: dict[str, Any] = {}
    for test in tests:
        found |= test["figures"]
    return {
        "device": _device(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "vllm")},
        "ratios": {name: found[name] for name in RATIOS if name in found},
        "efficiencies": {name: found[name] for name in EFFICIENCIES if name in found},
        "tests": list(tests),
    }


def missing_figures(report: Mapping[str, Any]) -> list[str]:
    """Return the names of what no test measured."""
    there = {*report["ratios"], *report["efficiencies"]}
    return [name for name in (*RATIOS, *EFFICIENCIES) if name not in there]


def _device() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"name": "cpu", "count": 0}
    of_first = torch.cuda.get_device_properties(0)
    return {
        "name": of_first.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": of_first.total_memory,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main(words: Sequence[str] | None = None) -> int:
    """Write the report and print its figures; return 1 if they are not what a plan reads.

    Without a GPU no figure may be missing; with one, tests may have been skipped for its memory.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", type=Path)
    parser.add_argument("report", type=Path)
    arguments = parser.parse_args(words)
    if not arguments.figures.exists():
        print(f"no test has written to {arguments.figures}", file=sys.stderr)
        return 1
    lines = arguments.figures.read_text(encoding="utf-8").splitlines()
    report = make_report([json.loads(line) for line in lines])
    arguments.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, value in (report["ratios"] | report["efficiencies"]).items():
        print(f"{name}: {value:.4g}")
    missing = missing_figures(report)
    if missing:
        print(f"not measured: {', '.join(missing)}")
    print(f"report: {arguments.report}")
    if report["efficiencies"]:
        read_efficiencies(arguments.report)  # refuses values that a plan cannot use
    complete = not missing or (os.environ.get("DEVICE") != "cpu" and report["efficiencies"])
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
