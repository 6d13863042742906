"""An action that hangs its game is trained with a reward, or masked, as the user says."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import small_job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

HUNG = "rollout/finish_timeout"


def _job(model: Path, steps: int, **env: Any) -> dict[str, Any]:
    fragile = {"game": "tests.support.games:FragileBandit", "step_timeout_s": 0.2, "num_val": 0}
    learner = {"lr": 1e-2}
    training = {"num_steps": steps, "max_staleness": 0, "batch_size": 8}
    return small_job(model, env=fragile | env, learner=learner, training=training)


@pytest.mark.long
async def test_a_policy_learns_not_to_hang_its_game_where_that_is_a_penalty(
    stack: Stack, model: Path
) -> None:
    penalty = await stack.submit(_job(model, 24, on_step_timeout="penalty"))
    mask = await stack.submit(_job(model, 3, on_step_timeout="mask"))
    for job in (penalty, mask):
        await job.until("COMPLETED")
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)
        assert not await job.dead()
    shares = [metric.values[HUNG] for metric in await penalty.metrics()]
    assert sum(shares[-6:]) < sum(shares[:6]) / 2
