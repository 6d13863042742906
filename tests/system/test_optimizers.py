"""Runs of Muon go on from their checkpoints and are replayed."""

from pathlib import Path
from typing import Any

import pytest
from tinkermq.schemas.job import JobReply, ResumeRequest

from tests.support.configs import small_job
from tests.support.proofs import assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.long
@pytest.mark.parametrize(
    "learner",
    [
        {"optimizer": "muon", "dtype": "bfloat16", "num_minibatches": 2},
        {"optimizer": "muon", "ranks": 2, "slots": 2},
    ],
    ids=str,
)
async def test_a_run_that_was_resumed_is_replayed_to_the_bit(
    stack: Stack, model: Path, learner: dict[str, Any]
) -> None:
    job = await stack.submit(small_job(model, learner=learner, training={"num_steps": 4}))
    await job.until("COMPLETED")
    again = ResumeRequest(job=job.scope.job, config={"training": {"num_steps": 7}})
    await stack.ask("resume", again, JobReply)
    await job.until_step(7)
    await job.until("COMPLETED")
    await assert_replay_is_identical(job)
