"""A sweep with a real pool: killed in the middle, the same command makes no run twice."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
import yaml
from tinkermq.broker.jobs import JobStore

from tests.clients.command import command
from tests.support.configs import small_job
from tests.support.stack import Stack
from tests.support.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


async def test_a_sweep_that_was_killed_goes_on_and_ends_in_a_table(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bandit.yaml"
    training = {"num_steps": 3, "save_freq": 0}
    config = small_job(model, training=training, env={"num_val": 4})
    file.write_text(yaml.safe_dump({**config, "output_dir": str(tmp_path / "runs")}))
    words = ["sweep", str(file), "seed=1,2", "learner.lr=1e-3,1e-4", "--name", "four"]
    words += ["--at-once", "1", "--json", "--nats-url", stack.server.url]
    jobs = JobStore(stack.broker)

    async def made() -> list[str]:
        return sorted(one.name for one in await jobs.list_jobs("local") if one.group == "four")

    first = await asyncio.to_thread(subprocess.Popen, command(words), stdout=subprocess.DEVNULL)

    async def two() -> bool:
        return len(await made()) >= 2

    await eventually(two, "the second run of the sweep")
    first.kill()
    await asyncio.to_thread(first.wait)
    assert len(await made()) < 4

    done = await asyncio.to_thread(
        subprocess.run, command(words), capture_output=True, check=True, text=True
    )
    assert await made() == [f"four-{number:03d}" for number in range(4)]
    rows = json.loads(done.stdout)
    assert {(row["seed"], row["learner.lr"]) for row in rows} == {
        (seed, rate) for seed in "12" for rate in ("1e-3", "1e-4")
    }
    assert {(row["state"], row["step"]) for row in rows} == {("COMPLETED", 3)}
    scores = [row["val/mean_score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
