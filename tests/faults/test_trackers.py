"""A run outlives its trackers: their folders and their service processes."""

import json
import shutil
from pathlib import Path

import psutil
import pytest

from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.full]
SLOW = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.1}, "num_val": 0}


def steps_of(job: Job) -> list[int]:
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    return [one["step"] for one in told if "training/global_step" in one]


async def test_a_run_outlives_tensorboards_folder_and_wandbs_service(
    stack: Stack, model: Path
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    job = await stack.submit(
        {**small_job(model, env=SLOW), "logger_backends": ["tensorboard", "wandb-offline"]}
    )
    await job.until_step(2)
    learner = psutil.Process((await job.actors())["learner"].pid)
    services = [one for one in learner.children(recursive=True) if "wandb" in one.name()]
    assert services
    for one in services:
        one.kill()
    shutil.rmtree(job.run_dir / "tensorboard")
    record = await job.until("COMPLETED")
    assert all(actor.restarts == 0 for actor in record.actors)
    told = [event.data["tracker"] for event in await job.events("tracker_lost")]
    assert sorted(told) == ["tensorboard", "wandb-offline"]
    assert steps_of(job) == list(range(1, 13))
