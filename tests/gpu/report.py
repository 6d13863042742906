"""What the tests of GPUs measured: a line for each figure at once, a table, and a JSON report.

    python -m tests.gpu.report FOLDER

Tests record figures with the fixture `record`, which appends them to the file that FIGURES names.
`LINES` has the unit of each figure and what is expected on a GPU, most worth first. The last value
of a name counts: larger sizes come later. `tinkermq plan --measured` reads the report.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tinkermq.schemas.plan.plan import Efficiencies, read_efficiencies

EFFICIENCIES = tuple(field.name for field in fields(Efficiencies) if field.name != "source")
MAX_TABLE_LINES = 25
MAX_REASONS = 5
Recorder = Callable[..., None]
"""`record(name, value, unit="")`; the unit is that of `LINES` where the name stands there."""


@dataclass(frozen=True)
class Line:
    """How a figure is shown, and what is expected of it on a GPU."""

    unit: str = ""
    least: float | None = None
    most: float | None = None
    source: str = ""
    """Where an expectation is from, unless it is this project's own."""
    anywhere: bool = True
    """Whether machines without a GPU measure it, too."""

    @property
    def expected(self) -> str:
        """The bounds, for people."""
        bounds = [
            f"{sign} {bound:.4g}"
            for sign, bound in (("≥", self.least), ("≤", self.most))
            if bound is not None
        ]
        return ", ".join(bounds) + (f" ({self.source})" if self.source else "") or "-"

    def verdict(self, value: object) -> str:
        """Return whether a value is as expected; of a CPU and of texts nothing is."""
        if not isinstance(value, int | float) or os.environ.get("DEVICE") == "cpu":
            return "-"
        if self.least is not None and value < self.least:
            return "low"
        if self.most is not None and value > self.most:
            return "high"
        return "-" if self.least is None and self.most is None else "ok"


PRIME_RL = "prime-rl, one H100"
ROWS = ("16k", "4k", "32k")
"""Tokens of a sequence in the steps that are compared; 16k is what prime-rl published."""
LINES: dict[str, Line] = {
    "send_idle_s": Line("s"),
    "send_amid_step_s": Line("s"),
    "send_amid_over_idle": Line("", most=3.0),
    "weights_bytes_per_s": Line("bytes/s", least=5e9),
    "full_16k_tokens_per_s": Line("tokens/s", least=11_900, source=PRIME_RL),
    "full_16k_peer_mfu": Line("", least=0.111, source=PRIME_RL),
    "lora_16k_tokens_per_s": Line("tokens/s", least=6_200, source=PRIME_RL),
    "lora_16k_peer_mfu": Line("", least=0.217, source=PRIME_RL),
    "full_4k_mfu": Line(),
    "full_32k_mfu": Line(),
    "lora_4k_mfu": Line(),
    "lora_32k_mfu": Line(),
    "snapshot_gb_per_s": Line("GB/s", least=10),
    "fingerprint_gb_per_s": Line("GB/s", least=100),
    "checkpoint_copy_gb_per_s": Line("GB/s", least=20),
    "pinning_gb_per_s": Line("GB/s", anywhere=False),
    "swap_pause_s": Line("s", most=1.0),
    "step_to_new_tokens_s": Line("s", most=10.0),
    "loop_over_engine": Line("", least=0.9),
    "vision_step_s": Line("s"),
    "varlen_backward_difference": Line("", most=0.02),
    "deterministic_difference": Line("", most=0.0),
    "memory_predicted_over_measured": Line("", least=0.9, most=1.1),
    "step_over_transformers": Line("", least=1.5),
    "learner_of_matrix_product": Line("", least=0.2),
    "learner_of_peak": Line("", least=0.4),
    "decode_of_bandwidth": Line("", least=0.5),
}
"""Figures by name, most worth first; others that tests record follow in the report alone."""


def append(path: Path, **line: object) -> None:
    """Append a line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def figure(name: str, value: Any, unit: str = "") -> dict[str, Any]:
    """Return a figure with what is expected of it."""
    line = LINES.get(name, Line(unit))
    return {
        "figure": name,
        "value": value,
        "unit": line.unit,
        "expected": line.expected,
        "verdict": line.verdict(value),
    }


def as_text(line: Mapping[str, Any]) -> str:
    """Return `name value unit expected verdict`."""
    value = line["value"]
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    return (
        f"{line['figure']:<32} {shown:>10} {line['unit']:<10} {line['expected']:<32} "
        f"{line['verdict']}"
    ).rstrip()


def make_report(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report of what tests recorded, in order."""
    found = {entry["figure"]: dict(entry) for entry in entries if "figure" in entry}
    order = [name for name in LINES if name in found]
    order += [name for name in found if name not in LINES]
    return {
        "device": _device(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "vllm")},
        "figures": [found[name] for name in order],
        "efficiencies": {name: found[name]["value"] for name in EFFICIENCIES if name in found},
        "tests": [entry for entry in entries if "outcome" in entry],
    }


def missing_figures(report: Mapping[str, Any]) -> list[str]:
    """Return the names of what no test measured."""
    there = {one["figure"] for one in report["figures"]}
    on_gpu = os.environ.get("DEVICE") != "cpu"
    return [name for name, line in LINES.items() if name not in there and (on_gpu or line.anywhere)]


def left_out(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tests that did not run to their end, by the reason."""
    reasons: dict[str, list[str]] = {}
    for test in report["tests"]:
        if test["outcome"] != "passed":
            reason = f"{test['outcome']}: {test['reason']}"
            reasons.setdefault(reason, []).append(test["test"].rpartition("/")[2])
    return reasons


def table(report: Mapping[str, Any]) -> list[str]:
    """Return the table, `MAX_TABLE_LINES` at most; its end says what failed or was left out."""
    reasons = [f"{why} — {', '.join(tests)}" for why, tests in left_out(report).items()]
    reasons.sort(key=lambda line: not line.startswith("failed"))
    if len(reasons) > MAX_REASONS:
        reasons[MAX_REASONS - 1 :] = [f"{len(reasons) - MAX_REASONS + 1} reasons more: the report"]
    shown = [as_text(one) for one in report["figures"] if one["figure"] in LINES]
    return shown[: MAX_TABLE_LINES - len(reasons)] + [line[:160] for line in reasons]


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
    """Write the report and print its table; return 1 if it lacks what a plan reads.

    Without a GPU no figure may be missing; with one, tests may have been left out.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where figures.jsonl is, and report.json goes")
    arguments = parser.parse_args(words)
    figures, path = arguments.folder / "figures.jsonl", arguments.folder / "report.json"
    if not figures.exists():
        print(f"no test has written to {figures}", file=sys.stderr)
        return 1
    entries = [json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines()]
    report = make_report(entries)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(*table(report), sep="\n")
    if missing := missing_figures(report):
        print(f"not measured: {', '.join(missing)}")
    print(f"report: {path}")
    if report["efficiencies"]:
        read_efficiencies(path)  # refuses values that a plan cannot use
    complete = not missing or (os.environ.get("DEVICE") != "cpu" and report["efficiencies"])
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
