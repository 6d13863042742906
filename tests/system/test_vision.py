"""Geometry3k with feedback trains through the whole stack: three tries, one image."""

from pathlib import Path

import pytest
from tinkermq.envs.games.geo3k import make_data

from tests.configs import example
from tests.stack import Stack
from tests.stack_fixtures import warm_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_asynchronous_steps_train_on_tries_with_feedback(
    stack: Stack, tmp_path: Path
) -> None:
    config = example("geo3k", f"model.path={warm_model('geo3k')}")
    train, val = make_data(tmp_path, 64, 8)
    config["env"] |= {"game": "geo3k_tool", "train_data": [str(train)], "val_data": [str(val)]}
    config["env"]["num_val"] = 8
    config["rollout"] |= {"max_turns": 3, "max_response_tokens": 240}
    config["training"] |= {"num_steps": 3, "test_freq": 0, "keep_rollouts": True}
    job = await stack.submit(config)
    await job.until("COMPLETED", deadline_s=300)
    groups = [entry.group for entry in await job.entries() if entry.group is not None]
    assert {len(group.images) for group in groups} == {1}
    tries = {len(item.turn_ends) for group in groups for item in group.trajectories}
    assert tries == {1, 2, 3}
    assert {round(float(r), 2) for g in groups for t in g.trajectories for r in t.rewards} <= {
        -0.05,
        0.0,
        1.0,
    }
