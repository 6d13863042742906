"""The games learn with their committed examples, through the whole stack.

The calculator does in test_quickstart.py.

Validation draws at temperature 1, as training does, so that before and after compare. The
thresholds are loose: they tell learning from not learning, not one seed from another.
"""

from pathlib import Path

import pytest
from tinkermq.envs.registry import companion, load_game

from tests.support.configs import example
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model

pytestmark = [
    pytest.mark.learns,
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.parametrize(
    ("name", "highest_before", "lowest_after"),
    [
        ("bandit", 0.4, 0.7),
        ("addition", 0.55, 0.8),
        ("lora", 0.55, 0.8),
        ("guess", 0.75, 0.8),
        ("math", 0.5, 0.7),
        ("ppo", 0.5, 0.65),
    ],
)
async def test_the_reward_of_an_example_rises(
    stack: Stack, tmp_path: Path, name: str, highest_before: float, lowest_after: float
) -> None:
    game = example(name)["env"]["game"]
    config = example(name, f"model.path={warm_model(game)}")
    if config["env"].get("train_data"):
        train, val = companion(load_game(game), "make_data")(tmp_path)
        config["env"] |= {"train_data": [str(train)], "val_data": [str(val)]}
    job = await stack.submit(config)
    await job.until("COMPLETED", deadline_s=600)
    results = await job.validations()
    before, after = results[0]["val/mean_score"], results[max(results)]["val/mean_score"]
    assert max(results) == config["training"]["num_steps"]
    assert before <= highest_before
    assert after >= lowest_after
    assert after >= before + 0.15
