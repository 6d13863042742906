"""A vision-language model learns to look at drawings, through the whole stack.

A policy that does not look names the right one of three shapes one time in three.
"""

from pathlib import Path

import pytest
from tinkermq.envs.games.geo3k import make_data

from tests.configs import example
from tests.stack import Stack
from tests.stack_fixtures import warm_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.learns
@pytest.mark.parametrize("seed", [0, 1])
async def test_the_answers_come_to_be_those_of_the_drawings(
    stack: Stack, tmp_path: Path, seed: int
) -> None:
    train, val = make_data(tmp_path)
    config = example(
        "geo3k",
        f"seed={seed}",
        f"model.path={warm_model('geo3k')}",
        f"env.train_data=[{train}]",
        f"env.val_data=[{val}]",
    )
    job = await stack.submit(config)
    await job.until("COMPLETED", deadline_s=400)
    results = await job.validations()
    before, after = (results[step]["val/mean_score"] for step in (0, max(results)))
    assert before <= 0.65
    assert after >= 0.75
    assert after >= before + 0.2
    assert results[max(results)]["val/failed_episodes"] == 0
