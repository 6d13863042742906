"""A run with a loss of the user's own and a teacher; one whose loss is wrong ends with its name."""

from pathlib import Path

import pytest

from tests.support.configs import small_job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

OWN = {
    "own_advantage": "examples.own_algorithms:best_of_group",
    "own_loss": "examples.own_algorithms:clipped",
    "own_correction": "examples.own_algorithms:square_root",
    "own_mask": "examples.own_algorithms:certain",
    "own_filter": "tests.support.games:odd_lengths",
}
CHOSEN = {
    "curriculum": "success_rate",
    "curriculum_tasks": 16,
    "own_curriculum": "examples.own_algorithms:hardest",
}


@pytest.mark.long
async def test_a_run_with_functions_of_ones_own_and_a_teacher_is_replayed_to_the_bit(
    stack: Stack, model: Path
) -> None:
    algorithm = OWN | {"teacher": str(model), "teacher_coef": 0.5}
    job = await stack.submit(small_job(model, algorithm=algorithm, training=CHOSEN))
    wrong = {"own_loss": "examples.own_algorithms:best_of_group"}
    broken = await stack.submit(small_job(model, algorithm=wrong))
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    dropped = [item.reason for record in await job.batches() for item in record.dropped]
    assert "filtered" in dropped
    failed = await broken.until("FAILED")
    assert "algorithm.own_loss=examples.own_algorithms:best_of_group" in failed.reason
    assert failed.actors[0].restarts == 0
