"""A run outlives its trackers: their folders and their service processes."""

import asyncio
import json
import shutil
from pathlib import Path

import psutil
import pytest

from tests.support.configs import small_job
from tests.support.gate import Gate
from tests.support.jobs import Job
from tests.support.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.full]


def steps_of(job: Job) -> list[int]:
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    return [one["step"] for one in told if "training/global_step" in one]


async def test_a_run_outlives_tensorboards_folder_and_wandbs_service(
    stack: Stack, model: Path, gate: Gate
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    trackers = {"logger_backends": ["tensorboard", "wandb-offline"]}
    job = await stack.submit({**small_job(model, env=gate.env(2)), **trackers})
    await job.until_step(2)
    learner = psutil.Process(await job.pid("learner"))

    async def services() -> list[psutil.Process]:
        return [one for one in learner.children(recursive=True) if "wandb" in one.name()]

    folder = job.run_dir / "tensorboard"
    await job.eventually(lambda: asyncio.to_thread(folder.is_dir), "TensorBoard's folder")
    for one in await job.eventually(services, "the process of wandb"):
        one.kill()
    shutil.rmtree(folder)
    gate.open()
    record = await job.until("COMPLETED")
    assert all(actor.restarts == 0 for actor in record.actors)
    told = [event.data["tracker"] for event in await job.events("tracker_lost")]
    assert sorted(told) == ["tensorboard", "wandb-offline"]
    assert steps_of(job) == list(range(1, 13))
