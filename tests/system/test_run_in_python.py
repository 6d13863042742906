"""A run in Python: all that the command line tells of it, and what it is worth."""

from pathlib import Path

import numpy as np
import pytest
from tinkermq.clients import AsyncRun, Run
from tinkermq.schemas.wire.errors import ConfigError, NotFoundError

from tests.support.configs import small_job
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_run_is_read(stack: Stack, model: Path) -> None:
    env = {"game": "bandit", "num_val": 8}
    job = await stack.submit(small_job(model, env=env, training={"num_steps": 6, "test_freq": 3}))
    name = (await job.until("COMPLETED")).name
    async with AsyncRun(name, stack.server.url) as run:
        numbers = await run.metrics()
        trained = numbers["step"] >= 1
        assert numbers["step"][trained].tolist() == [1, 2, 3, 4, 5, 6]
        assert np.isfinite(numbers["training_step_reward"][trained]).all()
        assert np.isfinite(numbers["val/mean_score"]).sum() == 3
        assert list(await run.metrics(["actor/lr"])) == ["step", "actor/lr"]
        with pytest.raises(ConfigError, match="the run has no metric 'lr'"):
            await run.metrics(["lr"])
        best = await run.rollouts(sort="reward", limit=4)
        rewards = [one["reward"] for one in best]
        assert rewards == sorted(rewards, reverse=True)
        assert {one["step"] for one in await run.rollouts(2)} == {2}
        with pytest.raises(NotFoundError, match="step 99"):
            await run.rollouts(99)
        assert any(line.startswith("learner | ") for line in await run.logs("learner"))
        with pytest.raises(NotFoundError, match="no actor 'learnr'"):
            await run.logs("learnr")
        assert (await run.profile()).num_steps == 6
    with Run(name, stack.server.url) as notebook:
        assert repr(notebook) == f"Run({name!r})"
        shown = notebook._repr_html_()
        assert repr(notebook) == f"Run({name!r}, COMPLETED)"
    assert name in shown
    assert "<polyline" in shown


@pytest.mark.long
async def test_checkpoints_of_a_run_are_evaluated_and_compared(stack: Stack, model: Path) -> None:
    env = {"game": "bandit", "num_val": 8}
    job = await stack.submit(small_job(model, env=env, training={"num_steps": 6, "test_freq": 3}))
    name = (await job.until("COMPLETED")).name
    async with AsyncRun(name, stack.server.url) as run:
        values = await run.evaluate(6)
        assert "val/mean_score" in values
        difference = await run.compare(6, f"{name}@3", tasks=[0, 1, 2])
        assert difference.num_tasks == 3
