"""Runs whose weights travel from memory to memory: `weights.transport: nccl`.

Nothing here has a GPU, so the process groups speak gloo; what they send, and when, is the same.
"""

from pathlib import Path

import pytest
from tinkermq.actors.weights.store import WeightStore
from tinkermq.clients import AsyncInferenceSchedulerClient, run_inference_async
from tinkermq.envs.games.bandit import BanditGame

from tests.support.configs import UNHURRIED, example, small_job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="session"),
]
NCCL = {"transport": "nccl"}


@pytest.mark.learns
@pytest.mark.long
async def test_a_model_learns_whatever_dies(stack: Stack) -> None:
    config = example("bandit", f"model.path={warm_model('bandit')}")
    config |= {"weights": NCCL}
    config["generator"] = {**config.get("generator", {}), "count": 2, "ack_wait_s": 3}
    config["training"] |= {"save_freq": 20, "num_steps": 100, "test_freq": 50}
    config["evaluation"] = {**config.get("evaluation", {}), "slots": 1}
    job = await stack.submit(config)
    await job.until_step(10)
    await job.kill("generator-0")
    await job.until_step(31)
    await job.kill("learner")
    await job.until_step(60)
    await job.kill("evaluator-0")
    await job.until("COMPLETED", deadline_s=600)
    results = await job.validations()
    assert sorted(results) == [0, 50, 100]
    assert results[0]["val/mean_score"] <= 0.4
    assert results[100]["val/mean_score"] >= 0.65
    sent = await WeightStore(stack.broker, job.scope, "nccl").latest()
    assert sent is not None
    assert (sent.transport, sent.version) == ("nccl", 100)
    groups = [entry.group for entry in await job.entries() if entry.group is not None]
    versions = {one.min_version for one in groups}
    assert len(versions) > 50
    assert {one.source for one in groups} == {"generator-0", "generator-1"}
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    assert await job.events("actor_failed") == []


async def test_a_learner_of_two_ranks_sends_to_a_server_that_follows(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    learner = {"slots": 2, "ranks": 2}
    training = {"num_steps": 500}
    config = small_job(model, env=UNHURRIED, training=training, learner=learner, weights=NCCL)
    live = await stack.submit(config)
    await live.until_step(1)
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        job = await client.submit_inference_job(
            live.record.name, config={"output_dir": str(tmp_path)}
        )

        async def newest(least: int) -> int | None:
            report = await run_inference_async(
                job["vllm_server_url"], game_class=BanditGame, max_samples=4
            )
            version = max(int(one.model.rpartition("@")[2]) for one in report.results)
            return version if version >= least else None

        first = await eventually(lambda: newest(1), "a version")
        assert await eventually(lambda: newest(first + 1), "a newer version") > first
        await client.cancel_job(job["job_id"])
