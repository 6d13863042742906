"""Environments of other packages train through the whole stack."""

from pathlib import Path

import pytest

from tests.support.configs import example, small_job
from tests.support.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("name", ["gymnasium", "textarena"])
async def test_an_asynchronous_run_trains_and_tells_success_by_type(
    stack: Stack, model: Path, name: str
) -> None:
    env = {**example(name)["env"], "num_val": 6, "workers": 1}
    limits = {
        "max_turns": 2,
        "max_prompt_tokens": 1024,
        "max_turn_tokens": 8,
        "max_response_tokens": 1024,
    }
    training = {"num_steps": 2, "batch_size": 2, "test_freq": 2, "save_freq": 2}
    learner = {"max_row_tokens": 2048, "microbatch_tokens": 4096}
    job = await stack.submit(
        small_job(model, env=env, rollout=limits, learner=learner, training=training)
    )
    await job.until("COMPLETED")
    validation = (await job.validations())[2]
    assert validation["val/num_episodes"] == 6
    assert validation["val/failed_episodes"] == 0
    assert "val/success_rate" in validation
    kinds = {key for key in validation if key.endswith("/success_rate")}
    assert len(kinds) > 2 if name == "textarena" else kinds == {"val/success_rate"}
