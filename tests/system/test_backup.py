"""A back-up of a pool that trains, brought to a new server: the run goes on from there."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.clients.command import tinkermq
from tests.support.configs import small_job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = pytest.mark.long

SLOW = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.1}, "num_val": 0}


async def test_a_run_goes_on_from_a_back_up_after_the_broker_lost_everything(
    tmp_path: Path, model: Path
) -> None:
    saved, copied = tmp_path / "backup", tmp_path / "runs"
    async with Stack(tmp_path / "stack") as stack:
        job = await stack.submit(small_job(model, env=SLOW, training={"num_steps": 18}))
        await job.until_step(4)
        await job.pause()
        await job.until("PAUSED")
        await _run(stack, "backup", str(saved))
        shutil.copytree(stack.folder / "runs", copied, symlinks=True)
        paused_at = len(await job.batches())
        await job.resume()
        await job.until_step(paused_at + 3)

        for role in ("node", "scheduler", "nats-server"):
            stack.kill(role)
        shutil.rmtree(stack.folder / "runs")
        shutil.rmtree(stack.server.store_dir)
        shutil.copytree(copied, stack.folder / "runs", symlinks=True)
        stack.server.start()
        restored = await _run(stack, "restore", str(saved))
        assert {one["stream"] for one in restored} >= {"KV_tmq-jobs", job.scope.stream_rollout}
        assert (await job.read()).state == "PAUSED"
        assert len(await job.batches()) == paused_at
        again = await asyncio.to_thread(
            tinkermq, "restore", str(saved), "--nats-url", stack.server.url
        )
        assert again.code == 2
        assert "holds messages in" in again.err
        stack.start("scheduler")
        stack.start("node")
        await stack.until_nodes()
        await job.resume()
        await job.until("COMPLETED")
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)


async def _run(stack: Stack, verb: str, folder: str) -> list[dict[str, object]]:
    words = (verb, folder, "--json", "--nats-url", stack.server.url)
    done = await asyncio.to_thread(tinkermq, *words)
    assert done.code == 0, done.out + done.err
    return json.loads(done.out)
