"""A mixture of experts in each engine: new weights, whose experts are one tensor for a layer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.generator.engine.engine import Sampling
from tinkermq.actors.models.model_folder import load_causal_lm

from tests.actors.generator.conftest import StartEngine
from tests.support.models import changed, loaded, make_tiny_model, plain_logprobs, random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_swapped_experts_give_the_log_probs_of_a_plain_forward_pass(
    start: StartEngine, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, "qwen3_moe", heads=2)
    model = load_causal_lm(str(folder), dtype=torch.float32)
    engine = await start(folder)
    prompt = random_prompt(np.random.default_rng(5))
    for version in range(3):
        other = model
        if version:
            weights = changed(model, version)
            other = loaded(model, weights)
            await engine.load_weights(version, weights, "recompute")
        result = await engine.generate(prompt, Sampling(40), request_id=str(version))
        expected = plain_logprobs(other, prompt, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-3)
