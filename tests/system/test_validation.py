"""Validation: who plays it in a job, and that every version that is due has its whole result."""

from pathlib import Path

import pytest
from tinkermq.broker.jetstream.streams import stream_info

from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


async def assert_validated(job: Job, due: set[int], num_episodes: int) -> None:
    """Check that each version that is due was validated whole, and nothing is left of it."""
    results = await job.validations()
    assert set(results) == due
    assert {values["val/num_episodes"] for values in results.values()} == {num_episodes}
    assert {values["val/failed_episodes"] for values in results.values()} == {0}
    left = await stream_info(job.stack.broker, job.scope.stream_validation)
    assert left["state"]["messages"] == 0


async def test_generators_validate_every_due_version_and_no_evaluator_starts(
    stack: Stack, model: Path
) -> None:
    config = small_job(
        model,
        env={"num_val": 6},
        evaluation={"samples": 2},
        generator={"count": 2},
        training={"num_steps": 7, "test_freq": 3},
    )
    job = await stack.submit(config)
    await job.until("COMPLETED")
    assert {actor.role for actor in job.record.actors} == {"learner", "generator", "environment"}
    await assert_validated(job, {0, 3, 6, 7}, 12)
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)  # nothing of a validation is in the rollout log


async def test_an_evaluator_with_slots_of_its_own_validates_where_one_is_asked_for(
    stack: Stack, model: Path
) -> None:
    config = small_job(
        model,
        env={"num_val": 4},
        evaluation={"slots": 1},
        training={"num_steps": 4, "test_freq": 2},
    )
    job = await stack.submit(config)
    await job.until("COMPLETED")
    slots = {actor.name: actor.slots for actor in job.record.actors}
    assert slots["evaluator-0"] == 1
    await assert_validated(job, {0, 2, 4}, 4)
