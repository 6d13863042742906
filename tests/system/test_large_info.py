"""A game whose `info` is more than a message holds is trained like any other."""

from pathlib import Path

import pytest

from tests.support.configs import small_job
from tests.support.proofs import assert_every_task_once
from tests.support.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


async def test_a_job_with_two_megabytes_of_info_in_each_episode_completes(
    stack: Stack, model: Path
) -> None:
    job = await stack.submit(
        small_job(
            model,
            env={"game": "tests.support.games:Talkative"},
            rollout={"group_size": 8},
            training={"num_steps": 3},
        )
    )
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    assert await job.events("group_cut")
    assert not await job.dead()
