"""A run whose rewards come from a judge: a model that an inference job serves."""

from pathlib import Path

import pytest
from tinkermq.clients import AsyncInferenceSchedulerClient

from tests.support.configs import small_job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]


async def test_a_served_model_judges_every_episode(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=90) as client:
        judge = await client.submit_inference_job(
            str(warm_model("bandit")), max_model_len=64, config={"output_dir": str(tmp_path)}
        )
        # the judge was taught to answer this with a digit from 0 to 6
        says = {"judge_prompt": "arm 0-6 in room b", "judge_scale": 6, "judge_tokens": 4}
        reward = {"source": "judge", "judge": judge["name"], "game_weight": 10, **says}
        config = small_job(model, env={"reward": reward}, training={"num_steps": 3})
        job = await stack.submit(config)
        await job.until("COMPLETED")
        await client.complete_job(judge["job_id"])
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    groups = [entry.group for entry in await job.entries() if entry.group is not None]
    episodes = [item for group in groups for item in group.sampled]
    scores = {round(item.reward - 10 * item.info["game_reward"], 4) for item in episodes}
    assert len(scores) == 1  # a judge is greedy
    assert scores <= {round(digit / 6, 4) for digit in range(7)}
