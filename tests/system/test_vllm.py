"""A job whose generator runs vLLM, through the whole stack; all of it in vLLM's environment."""

from statistics import mean

import pytest

from tests.configs import example
from tests.proofs import assert_every_task_once
from tests.stack import Stack
from tests.stack_fixtures import warm_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(560),
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_a_job_learns_from_what_vllm_generates(stack: Stack) -> None:
    overrides = (
        f"model.path={warm_model('guess')}",
        "env={game: guess, num_val: 0}",
        "generator={engine: vllm, compile: false, kv_cache_mb: 64, kv_on_swap: recompute}",
        "training.num_steps=60",
        "training.test_freq=0",
    )
    job = await stack.submit(example("guess", *overrides))
    await job.until("COMPLETED", deadline_s=500)
    metrics = [metric.values for metric in await job.metrics()]
    rewards = [values["training_step_reward"] for values in metrics]
    assert len(rewards) == 60
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1
    fresh = [values for values in metrics if "staleness/abs_log_ratio/lag_0" in values]
    assert fresh
    mismatch = max(values["staleness/abs_log_ratio/lag_0"] for values in fresh)
    print(f"log-probs of engine and learner differ by {mismatch:.1e} in the mean of a step at most")
    assert mismatch < 1e-3
    await assert_every_task_once(job)
