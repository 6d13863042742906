"""Every benchmark runs and tells its figures; what they are is for a quiet machine to say."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tinkermq.schemas.model_catalogue import catalogue_folder

from benchmarks.__main__ import NAMES
from benchmarks.page import page

pytestmark = pytest.mark.bench

ROOT = Path(__file__).resolve().parents[2]


NEEDS = {
    "against_trl": ("trl", "datasets"),
    "against_trl_environment": ("trl", "datasets"),
    "against_trl_language_model": ("trl", "datasets"),
    "against_trl_gpu": ("trl", "datasets"),
    "agent_proxy": ("fastapi", "uvicorn", "aiohttp"),
    "environment": ("fastapi", "uvicorn", "aiohttp"),
    "vllm": ("vllm",),
}
TAKES_MINUTES = {"against_trl_language_model"}
NEEDS_SMOLLM2 = {"learner_real", "real_times", "tinker_real"}


def benchmark(name: str) -> Any:
    missing = [each for each in NEEDS.get(name, ()) if importlib.util.find_spec(each) is None]
    reason = f"`make bench-quick` installs {', '.join(missing)}"
    if name == "tinker_peer":
        missing = [each for each in ("skyrl", "newest") if not (ROOT / ".tinker" / each).exists()]
        reason = f"no .tinker/{', '.join(missing)}: benchmarks/tinker_peer.py says how to make it"
    if name in NEEDS_SMOLLM2 and not catalogue_folder("smollm2").is_dir():
        missing, reason = ["smollm2"], "`tinkermq model get smollm2` fetches the model"
    if name == "openenv_speed" and not (ROOT / ".venv-openenv").exists():
        missing = [".venv-openenv"]
        reason = "no .venv-openenv: `make test-openenv` makes it"
    if name == "transfer_queue" and not (ROOT / ".transfer-queue").exists():
        missing = [".transfer-queue"]
        reason = "no .transfer-queue: benchmarks/transfer_queue.py says how to make it"
    marks = [pytest.mark.skipif(bool(missing), reason=reason)]
    if name in TAKES_MINUTES:
        marks.append(pytest.mark.long)
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [benchmark(name) for name in NAMES])
def test_a_benchmark_runs_and_tells_its_figures(name: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(file)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["name"] == name
    assert result["figures"]
    for figure in result["figures"]:
        assert figure["what"] in " ".join(done.stdout.split())


def test_the_page_says_of_every_target_whether_it_was_met() -> None:
    figures = [
        {"what": "ours over theirs", "value": 1.5, "unit": "×", "target": "≥ 1.30×", "met": True},
        {"what": "idle node", "value": 120.0, "unit": "MB", "target": "≤ 100.0 MB", "met": False},
        {"what": "shown in the table", "value": 2.5, "unit": "×", "target": "", "met": None},
        {"what": "not in the table", "value": 2.6, "unit": "×", "target": "", "met": None},
    ]
    machine = {
        "cpu": "c",
        "cores": 2,
        "memory_gib": 24,
        "system": "s",
        "packages": {},
        "commit": "x",
    }
    result = {
        "name": "against_trl",
        "title": "Against TRL",
        "command": "python -m benchmarks.against_trl",
        "date": "2026-01-01 00:00 UTC",
        "seconds": 3,
        "machine": machine,
        "tables": [{"title": "t", "columns": ["a", "b"], "rows": [["1", "2|3"], ["2.50", ""]]}],
        "figures": figures,
        "notes": ["a note"],
        "remark": "",
    }
    text = page([result])
    assert (
        "1 of 2 targets were met. The others are marked in [against-trl](#against-trl): 1." in text
    )
    assert "- not in the table: 2.60×" in text
    assert "- shown in the table" not in text
    assert "- ours over theirs: 1.50× (≥ 1.30×)" in text
    assert "- idle node: 120.0 MB (≤ 100.0 MB, **missed**)" in text
    assert "| 1 | 2\\|3 |" in text
