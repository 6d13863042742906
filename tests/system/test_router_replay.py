"""A mixture of experts learns with the choices of its generator's routers, from log to replay."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.models import make_tiny_model
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]


async def test_a_job_trains_with_its_generators_experts_and_is_replayed_to_the_bit(
    stack: Stack, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path, "qwen3_moe")
    config = small_job(model, algorithm={"router_replay": True}, training={"num_steps": 4})
    job = await stack.submit(config)
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await _assert_each_token_tells_its_experts(job)
    await assert_replay_is_identical(job)
    metrics = await job.metrics()
    ratios = [one.values[RATIO] for one in metrics if RATIO in one.values]
    assert max(ratios, default=1.0) < 1e-3, ratios


RATIO = "staleness/abs_log_ratio/lag_0"


async def _assert_each_token_tells_its_experts(job: Job) -> None:
    for entry in await job.entries():
        assert entry.group is not None
        for item in entry.group.sampled:
            assert item.experts is not None
            assert item.experts.shape == (len(item.token_ids) - 1, 2, 2)
            assert (np.diff(np.sort(item.experts)) > 0).all()
            assert item.experts.max() < 4
