"""The quick checks of GPUs: what goes wrong in one costs its own line."""

import json
import re
from pathlib import Path

import pytest
from tinkermq.actors.gpu_check import (
    CHECKS,
    DEVICE,
    GpuCheck,
    run_check,
    run_checks,
)
from tinkermq.schemas.checks import CheckResult

from tests.clients.command import tinkermq
from tests.support.processes import alive

pytestmark = pytest.mark.full

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def bad(name: str, deadline_s: float = 60) -> GpuCheck:
    return GpuCheck(name, f"tests.support.bad_checks:{name}", deadline_s, f"mend {name}")


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def test_what_goes_wrong_in_one_check_costs_that_line_alone() -> None:
    checks = [*map(bad, ("skip", "fail", "crash")), bad("hang", 5), bad("pass_check")]
    results = {one.name: one for one in run_checks(checks)}
    assert {name: (one.outcome, one.detail, one.hint) for name, one in results.items()} == {
        "skip": ("skipped", "there is no card", "bring one"),
        "fail": (
            "failed",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "mend fail",
        ),
        "crash": ("failed", "its process was ended by SIGSEGV", "mend crash"),
        "hang": ("failed", "it had not ended after 5 s and was killed", "mend hang"),
        "pass_check": ("ok", "2 GPUs", ""),
    }
    assert "and more lines" in results["fail"].log
    child = re.search(r"child (\d+)", results["hang"].log)
    assert child is not None
    assert not alive(int(child[1]))


def test_without_a_device_the_other_checks_are_skipped() -> None:
    device = DEVICE._replace(place=bad("fail").place)
    results = list(run_checks([device, bad("pass_check")]))
    assert [one.outcome for one in results] == ["failed", "skipped"]


def test_the_engine_generates_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    engine = next(check for check in CHECKS if check.name == "engine")
    result = run_check(engine)
    assert result.outcome == "ok", result
    assert "answered 16 requests" in result.detail


def test_without_a_gpu_the_command_says_so_and_what_to_do() -> None:
    done = tinkermq("doctor", "--gpu", "--json", env=NO_GPU)
    assert done.code == 1
    reply = json.loads(done.out)
    versions, device, *others = (CheckResult.model_validate(one) for one in reply["checks"])
    assert device.outcome == "failed"
    assert device.hint
    assert [one.name for one in others] == ["nccl", "flash-attention", "engine"]
    assert {one.outcome for one in others} == {"skipped"}
    named = {item.split()[0] for item in versions.detail.split(", ")}
    assert {"python", "driver", "torch", "vllm", "flash-attn"} <= named
