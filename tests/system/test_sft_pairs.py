"""Pairs are learnt by DPO and by reward models: killed, resumed, and replayed to the bit."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.feed import read_metrics
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.job import JobReply, ResumeRequest

from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="session"),
]

STEPS = 12
WORDS = ["red", "green", "blue"]


def pair(rng: random.Random) -> dict[str, Any]:
    """A pair whose chosen answer is the word that was said, in one of the two forms."""
    word, other = rng.sample(WORDS, 2)
    said = [{"role": "assistant", "content": text} for text in (word, other)]
    if rng.random() < 0.5:
        return {"prompt": word, "chosen": word, "rejected": other}
    asked = [{"role": "user", "content": word}]
    return {"chosen": json.dumps([*asked, said[0]]), "rejected": json.dumps([*asked, said[1]])}


def pairs_job(model: Path, folder: Path, sft: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(0)
    rows: list[Mapping[str, Any]] = [pair(rng) for _ in range(128)]
    rows[7] = {"prompt": "red", "chosen": "blue", "rejected": "blue"}
    rows[9] = {"prompt": "red " * 20, "chosen": "blue", "rejected": "red"}
    config = small_job(
        model,
        learner={"lr": 3e-3},
        training={"num_steps": STEPS, "batch_size": 16, "save_freq": 4, "test_freq": 6},
        sft={
            "data": [str(write_rows(folder / "pairs.jsonl", rows))],
            "val_data": [str(write_rows(folder / "val.jsonl", [pair(rng) for _ in range(32)]))],
            **sft,
        },
    )
    del config["env"], config["rollout"]["group_size"]
    return config


async def told(job: Job, name: str) -> dict[int, float]:
    """Return a metric's values by step."""
    metrics = await read_metrics(job.stack.broker, job.scope)
    return {metric.step: metric.values[name] for metric in metrics if name in metric.values}


@pytest.mark.parametrize(
    ("sft", "prefix"),
    [
        ({"objective": "dpo", "beta": 0.5}, "dpo"),
        ({"objective": "reward"}, "reward_model"),
    ],
    ids=["dpo", "reward"],
)
async def test_pairs_are_learnt_once_whatever_is_killed(
    stack: Stack, model: Path, tmp_path: Path, sft: dict[str, Any], prefix: str
) -> None:
    job = await stack.submit(pairs_job(model, tmp_path, sft))
    assert job.record.kind == "sft"
    await job.until_event("checkpoint_saved")
    await job.kill("learner")
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    dead = {letter.task.sample: letter.blame.message for letter in await job.dead()}
    assert dead.keys() == {7, 9}, "every other row can be learnt from"
    assert "are equal" in dead[7]
    assert "tokens, rollout.max_prompt_tokens" in dead[9]
    for entry in await job.entries():
        if entry.group is not None and entry.group.error is None:
            assert [item.reward for item in entry.group.trajectories] == [1.0, 0.0]
    losses, accuracy = await told(job, "actor/pg_loss"), await told(job, f"{prefix}/accuracy")
    assert losses[1] == pytest.approx(0.693, abs=0.01)
    assert losses[STEPS] < 0.2
    assert accuracy[STEPS] > 0.9
    scores = await told(job, "val/mean_score")
    assert scores.keys() == {0, STEPS // 2, STEPS}
    assert scores[STEPS] > 0.9 > scores[0]

    again = ResumeRequest(job=job.scope.job, config={"training": {"num_steps": STEPS + 2}})
    await stack.ask("resume", again, JobReply)
    await job.until("COMPLETED")
    assert len(await job.batches()) == STEPS + 2
    await assert_replay_is_identical(job)
