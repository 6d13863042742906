"""A mixture of experts learns with the choices of its generator's routers, from log to replay."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.models import make_tiny_model
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]

RATIO = "staleness/abs_log_ratio/lag_0"


async def test_a_job_trains_with_its_generators_experts_and_is_replayed_to_the_bit(
    stack: Stack, tmp_path: Path
) -> None:
    job = await trained_with_experts(stack, tmp_path)
    await assert_replay_is_identical(job)


async def trained_with_experts(stack: Stack, folder: Path, **generator: Any) -> Job:
    """Train a tiny mixture of experts; each token tells its experts, and log-probs agree."""
    model = make_tiny_model(folder, "qwen3_moe", heads=2)
    config = small_job(
        model,
        algorithm={"router_replay": True},
        generator=generator,
        training={"num_steps": 4, "max_staleness": 1},
    )
    job = await stack.submit(config)
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    for entry in await job.entries():
        assert entry.group is not None
        for item in entry.group.sampled:
            assert item.experts is not None
            assert item.experts.shape == (len(item.token_ids) - 1, 2, 2)
            assert (np.diff(np.sort(item.experts)) > 0).all()
    ratios = [one.values[RATIO] for one in await job.metrics() if RATIO in one.values]
    assert ratios
    assert max(ratios) < 1e-3, ratios
    return job
