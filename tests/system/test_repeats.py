"""Two runs with the same seed, trained on policy, play the same episodes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinkermq.schemas.rollout import Trajectory

from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def assert_repeats(stack: Stack, config: dict[str, Any], deadline_s: float = 120) -> None:
    """Train twice with a seed and once with another, and compare what was played."""
    first, again, other = [
        await _played(await stack.submit(one), deadline_s)
        for one in (config, config, {**config, "seed": 7})
    ]
    assert len(first) == 4 * config["training"]["num_steps"]
    assert _said(first) == _said(again)
    assert _said(first) != _said(other)
    for task, rows in first.items():
        for mine, theirs in zip(rows, again[task], strict=True):
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


async def _played(job: Job, deadline_s: float) -> dict[int, list[Trajectory]]:
    await job.until("COMPLETED", deadline_s=deadline_s)
    groups = [entry.group for entry in await job.entries()]
    return {group.task.task: group.trajectories for group in groups if group is not None}


def _said(tasks: dict[int, list[Trajectory]]) -> dict[int, list[tuple[list[int], list[float]]]]:
    """Return all that does not hang on which requests shared a forward pass."""
    return {
        task: [(one.token_ids.tolist(), one.rewards.tolist()) for one in rows]
        for task, rows in tasks.items()
    }


@pytest.mark.long
async def test_the_rollouts_of_a_seed_repeat(stack: Stack, model: Path) -> None:
    training = {"max_staleness": 0, "num_steps": 12, "test_freq": 3}
    validated = {"num_val": 4}  # by the same engine, between the tasks of training
    config = small_job(model, env=validated, training=training, learner={"lr": 1e-2})
    await assert_repeats(stack, config)
