"""A mixture of experts in each engine: new weights, whose experts are one tensor for a layer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.generator.engine.engine import Sampling
from tinkermq.actors.models.model_folder import load_causal_lm
from tinkermq.schemas.wire.errors import ModelError

from tests.actors.generator.conftest import EngineKind, StartEngine
from tests.support.models import changed, loaded, make_tiny_model, plain_logprobs, random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_swapped_experts_give_the_log_probs_of_a_plain_forward_pass_or_are_refused(
    start: StartEngine, engine_kind: EngineKind, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, "qwen3_moe", heads=2)
    model = load_causal_lm(str(folder), dtype=torch.float32)
    weights = changed(model, 1)
    if engine_kind == "vllm":
        with pytest.raises(ModelError, match="mixture of experts, and vLLM does not take"):
            await start(folder)  # which gives it weights
        return
    engine = await start(folder)
    prompt = random_prompt(np.random.default_rng(5))
    for version, other in ((0, model), (1, loaded(model, weights))):
        if version:
            await engine.load_weights(version, weights, "recompute")
        result = await engine.generate(prompt, Sampling(40), request_id=str(version))
        expected = plain_logprobs(other, prompt, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-3)
