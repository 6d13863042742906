"""A reward of several components, batches gone through twice, the most uncertain tokens alone."""

from pathlib import Path

import pytest

from tests.support.configs import small_job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.long
async def test_a_run_of_components_is_replayed_to_the_bit(stack: Stack, model: Path) -> None:
    algorithm = {
        "advantage": "gdpo",
        "reward_components": {"paid": 1.0, "short": 0.5},
        "entropy_share": 0.5,
    }
    job = await stack.submit(
        small_job(
            model,
            env={"game": "tests.support.games:ScoredBandit", "num_val": 0},
            algorithm=algorithm,
            learner={"ppo_epochs": 2, "num_minibatches": 2},
        )
    )
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


@pytest.mark.long
async def test_a_component_that_the_game_does_not_tell_is_named(stack: Stack, model: Path) -> None:
    algorithm = {"advantage": "gdpo", "reward_components": {"format": 1.0}}
    env = {"game": "tests.support.games:ScoredBandit", "num_val": 0}
    job = await stack.submit(small_job(model, env=env, algorithm=algorithm))
    failed = await job.until("FAILED")
    assert "algorithm.reward_components.format: the game told None" in failed.reason
