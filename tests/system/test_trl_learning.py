"""A tiny model learns environment classes of TRL, unmodified, through the whole stack."""

import pytest

from benchmarks.against_trl_environment import job
from benchmarks.count_environment import model
from tests.support.stack import Stack
from tests.support.stack_fixtures import WARM_MODELS

pytestmark = [
    pytest.mark.learns,
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.parametrize("environment", ["count", "words"])
async def test_the_reward_of_an_environment_of_trl_rises(stack: Stack, environment: str) -> None:
    config = job(40, quick=False)
    config["env"]["num_val"] = 64
    if environment == "words":  # without rows: reset makes the task
        folder = model(WARM_MODELS / "trl_words", module="tests.support.trl_words")
        config["model"]["path"] = str(folder)
        config["env"] = {"game": "trl:tests.support.trl_words:WordEnv", "num_val": 64}
    else:
        config["env"]["val_data"] = config["env"]["train_data"]
    config["training"]["test_freq"] = 40
    config["evaluation"] = {"temperature": 1.0}
    running = await stack.submit(config)
    await running.until("COMPLETED", deadline_s=600)
    results = await running.validations()
    before, after = results[0]["val/mean_score"], results[max(results)]["val/mean_score"]
    assert before < 0.65
    assert after > before + 0.15
