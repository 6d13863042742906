"""The checks of a machine: what goes wrong in one costs its own line, and the report has it."""

import json
import re
from pathlib import Path

import pytest
from tinkermq.actors.acceptance.figures import Figure
from tinkermq.actors.acceptance.outcome import CheckOutcome
from tinkermq.actors.acceptance.plan import CHECKS, DEVICE, Check
from tinkermq.actors.acceptance.running import run_checks

from tests.clients.command import tinkermq
from tests.support.processes import alive

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def bad(name: str, deadline_s: float = 30) -> Check:
    return Check(name, f"tests.actors.acceptance.bad_checks:{name}", deadline_s, f"mend {name}")


@pytest.fixture
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", str(root))


@pytest.mark.usefixtures("in_repository")
def test_what_goes_wrong_in_one_check_costs_that_line_alone() -> None:
    checks = [*map(bad, ("slow", "meaningless", "wrong", "crash")), bad("hang", 3), bad("well")]
    made = {one.name: one for one in run_checks(checks, on_gpu=False)}
    assert {name: one.state for name, one in made.items()} == {
        "slow": "failed",
        "meaningless": "skipped",
        "wrong": "failed",
        "crash": "failed",
        "hang": "failed",
        "well": "ok",
    }
    assert made["slow"].measured == "speed 3 GB/s; lag 1"
    assert made["slow"].expected == "speed ≥ 10 GB/s; lag ≤ 2"
    assert made["slow"].reason == "speed 3 GB/s, expected ≥ 10 GB/s"
    assert (made["meaningless"].reason, made["meaningless"].remedy) == (
        "there is no card",
        "bring one",
    )
    error = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert (made["wrong"].reason, made["wrong"].remedy) == (error, "mend wrong")
    assert "and more lines" in made["wrong"].log
    assert made["crash"].reason == "its process was ended by SIGSEGV"
    assert made["hang"].reason == "it had not ended after 3 s and was killed"
    assert made["well"].facts == {"driver": "none"}
    found = re.search(r"child (\d+)", made["hang"].log)
    assert found is not None
    assert not alive(int(found[1]))


@pytest.mark.usefixtures("in_repository")
def test_all_checks_together_have_a_deadline_and_need_a_device() -> None:
    late = list(run_checks([bad("hang"), bad("well")], on_gpu=False, total_s=2))
    assert [one.state for one in late] == ["failed", "skipped"]
    assert late[1].reason == "the 2 s of all checks were over"
    device = Check(DEVICE, bad("wrong").place, 30, "")
    without = list(run_checks([device, bad("well")], on_gpu=False))
    assert [one.state for one in without] == ["failed", "skipped"]
    assert without[1].reason == "there is no device to run it on"


def test_a_figure_that_is_no_number_does_not_hold() -> None:
    assert not Figure("norm", float("nan"), at_most=1).holds
    assert not Figure("norm", float("nan")).holds


def test_without_a_gpu_the_command_says_so_and_what_to_do(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = tinkermq("doctor", "--gpu", "--report", str(report), "--json", env=NO_GPU)
    assert done.code == 1
    told = json.loads(done.out)
    assert told == json.loads(report.read_text())
    first, *others = (CheckOutcome.model_validate(one) for one in told["checks"])
    assert first.state == "failed"
    assert "--device cpu" in first.remedy
    assert {one.state for one in others} == {"skipped"}
    assert len(others) == len(CHECKS) - 1
    assert {"python", "torch", "vllm", "flash-attn"} <= told["versions"].keys()


def test_a_check_that_there_is_none_of_and_a_report_that_cannot_be_written_are_said() -> None:
    done = tinkermq("doctor", "--gpu", "--only", "speed")
    assert done.code == 2
    assert "no check is called 'speed'" in done.out
    assert "step of 0.5 B" in done.out
    done = tinkermq("doctor", "--gpu", "--report", "/nowhere/report.json")
    assert done.code == 1
    assert "the report cannot be written to /nowhere/report.json" in done.out
    assert "--report FILE" in done.out


@pytest.mark.long
def test_all_checks_hold_on_a_cpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ("doctor", "--gpu", "--device", "cpu", "--report", str(report))
    done = tinkermq(*words, timeout=590)
    assert done.code == 0, done.out
    made = {one["name"]: one for one in json.loads(report.read_text())["checks"]}
    skipped = {name for name, one in made.items() if one["state"] == "skipped"}
    without_vllm = {name for name in made if name.startswith("vllm")}
    assert {"nccl", "flash-attention"} <= skipped <= {"nccl", "flash-attention"} | without_vllm
    assert made.keys() - skipped > {"fsdp", "memory to memory", "asynchronous run"}
