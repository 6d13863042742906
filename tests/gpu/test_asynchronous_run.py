"""Asynchronous runs of the whole stack: learner and generator on GPUs of their own, or on one."""

from pathlib import Path

import pytest
import torch

from tests.gpu.material import RandomPolicy
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once
from tests.support.stack import Stack

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]
NUM_STEPS, MAX_STALENESS = 12, 2


async def lags(job: Job) -> list[int]:
    """Return by how many versions each trained group was behind."""
    steps = {seq: batch.step for batch in await job.batches() for seq in batch.seqs}
    return [
        steps[entry.seq] - 1 - entry.group.min_version
        for entry in await job.entries()
        if entry.group is not None and entry.seq in steps
    ]


@pytest.mark.parametrize(
    ("placement", "sleep"),
    [("separate", "auto"), ("colocated", "never"), ("colocated", "always")],
    ids=["apart", "one GPU, overlapping", "one GPU, in turns"],
)
async def test_a_run_trains_each_task_once_and_within_the_staleness_bound(
    policy: RandomPolicy, on_gpu: bool, tmp_path: Path, placement: str, sleep: str
) -> None:
    num_gpus = torch.cuda.device_count() if on_gpu else 0
    if num_gpus == 1 and placement == "separate":
        pytest.skip("this machine has one GPU")
    config = {
        "model": {"path": str(policy.folder)},
        "env": {"game": "bandit", "num_val": 4},
        "rollout": {
            "group_size": 4,
            "max_prompt_tokens": 32,
            "max_turn_tokens": 6,
            "max_response_tokens": 24,
        },
        "placement": placement,
        "generator": {
            "max_episodes": 32,
            "max_requests": 32,
            "dtype": policy.dtype,
            "sleep": sleep,
        },
        "learner": {
            "lr": 1e-3,
            "dtype": policy.dtype,
            "max_row_tokens": 512,
            "microbatch_tokens": 2048,
        },
        "training": {
            "num_steps": NUM_STEPS,
            "batch_size": 4,
            "max_staleness": MAX_STALENESS,
            "keep_rollouts": True,
        },
    }
    node_options = [] if num_gpus else ["--slots", "2"]
    async with Stack(tmp_path / "stack", node_options=node_options) as stack:
        job = await stack.submit(config)
        await job.until("COMPLETED", deadline_s=240)
        assert len(await job.batches()) == NUM_STEPS
        await assert_every_task_once(job)
        behind = await lags(job)
        validations = await job.validations()
    assert len(behind) == 4 * NUM_STEPS
    assert {step: one["val/num_episodes"] for step, one in validations.items()} == {
        0: 4,
        NUM_STEPS: 4,
    }
    assert max(behind) <= MAX_STALENESS
    assert max(behind) >= 1 or sleep == "always"
