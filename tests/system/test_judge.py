"""A run whose rewards come from a judge: a model that an inference job serves."""

import random
from pathlib import Path
from typing import Any

import pytest
from tinkermq.clients import AsyncInferenceSchedulerClient
from tinkermq.envs.write_data import write_rows

from tests.support.configs import small_job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "a line Score: N of 6"


def lessons(folder: Path) -> dict[str, Any]:
    """Return a job that teaches a model the one form in which a judge's score is read."""
    rng = random.Random(0)
    rows = [
        {
            "messages": [
                {"role": "user", "content": PROMPT},
                {"role": "assistant", "content": f"Score: {rng.randrange(7)}"},
            ]
        }
        for _ in range(512)
    ]
    limits = {"max_prompt_tokens": 64, "max_turn_tokens": 16, "max_response_tokens": 32}
    return {
        "name": "taught",
        "model": {"path": str(warm_model("bandit"))},
        "sft": {"data": [str(write_rows(folder / "lessons.jsonl", rows))]},
        "rollout": limits,
        "learner": {"lr": 3e-3, "max_row_tokens": 512, "microbatch_tokens": 4096},
        "training": {"num_steps": 60, "batch_size": 32, "save_freq": 30},
    }


async def test_a_served_model_judges_every_episode(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    taught = await stack.submit(lessons(tmp_path))
    await taught.until("COMPLETED")
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        judge = await client.submit_inference_job(
            "taught@last", max_model_len=64, config={"output_dir": str(tmp_path)}
        )
        says = {"judge_prompt": PROMPT, "judge_scale": 6, "judge_tokens": 16}
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
