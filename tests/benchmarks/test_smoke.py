"""Every benchmark runs and tells its figures; what they are is for a quiet machine to say."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench

ROOT = Path(__file__).resolve().parents[2]


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"`make bench` installs {', '.join(missing)}")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [
        "adapters",
        pytest.param("against_trl", marks=needs("trl", "datasets")),
        "asynchrony",
        "dashboard",
        "differences",
        "engine",
        pytest.param("vllm", marks=needs("vllm")),
        "gomoku",
        pytest.param("environment", marks=needs("fastapi", "uvicorn", "aiohttp")),
        "learner",
        "logits",
        "lora",
        "memory",
        "overhead",
        "sandbox",
        "scaling",
        "scheduler",
        "weights",
    ],
)
def test_a_benchmark_runs_and_tells_its_figures(name: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(file)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["name"] == name
    assert result["figures"]
    for figure in result["figures"]:
        assert figure["what"] in " ".join(done.stdout.split())


def test_the_page_says_of_every_target_whether_it_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.page import page

    figures = [
        {"what": "ours over theirs", "value": 1.5, "unit": "×", "target": "≥ 1.30×", "met": True},
        {"what": "idle node", "value": 120.0, "unit": "MB", "target": "≤ 100.0 MB", "met": False},
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
        "tables": [{"title": "t", "columns": ["a", "b"], "rows": [["1", "2|3"]]}],
        "figures": figures,
        "notes": ["a note"],
        "remark": "",
    }
    text = page([result])
    assert "ours over theirs | **1.50×** | ≥ 1.30× | met |" in text
    assert "idle node | **120.0 MB** | ≤ 100.0 MB | **missed** |" in text
    assert "| 1 | 2\\|3 |" in text
