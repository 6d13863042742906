"""The games learn with their committed examples, through the whole stack.

The calculator does in test_quickstart.py.

Validation draws at temperature 1, as training does, so that before and after compare. The
thresholds are loose: they tell learning from not learning, not one seed from another.
"""

from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.policy.tiny_models import TinyKind
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
    before, after = await learn(stack, tmp_path, example(name, f"model.path={warm_model(game)}"))
    assert before <= highest_before
    assert after >= lowest_after
    assert after >= before + 0.15


@pytest.mark.parametrize("kind", ["qwen3_5_text", "gemma3_text"])
async def test_a_hybrid_and_a_model_with_windows_learn_as_a_dense_one_does(
    stack: Stack, tmp_path: Path, kind: TinyKind
) -> None:
    """See the curves in docs/models.md."""
    model = f"model.path={warm_model('calculator', kind)}"
    config = example("calculator", model, "training.num_steps=20", "training.test_freq=20")
    before, after = await learn(stack, tmp_path, config)
    assert before <= 0.45
    assert after >= 0.65


async def learn(stack: Stack, folder: Path, config: dict[str, Any]) -> tuple[float, float]:
    """Run an example with data in `folder`; return its validation before and after."""
    if config["env"].get("train_data"):
        train, val = companion(load_game(config["env"]["game"]), "make_data")(folder)
        config["env"] |= {"train_data": [str(train)], "val_data": [str(val)]}
    job = await stack.submit(config)
    await job.until("COMPLETED", deadline_s=600)
    results = await job.validations()
    assert max(results) == config["training"]["num_steps"]
    return results[0]["val/mean_score"], results[max(results)]["val/mean_score"]
