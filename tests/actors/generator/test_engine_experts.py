"""A mixture of experts in each engine: new weights, whose experts are one tensor for a layer."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import KvOnSwap, Sampling
from tinkermq.actors.policy.experts import RouterRecorder
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.actors.rollout.transcript import Transcript

from tests.actors.generator.conftest import StartEngine
from tests.support.models import (
    changed,
    loaded,
    make_tiny_model,
    plain_logprobs,
    random_prompt,
)

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("width", [64, 48])  # the second one vLLM pads on a CPU
async def test_swapped_experts_give_the_log_probs_of_a_plain_forward_pass(
    start: StartEngine, tmp_path: Path, width: int
) -> None:
    folder = make_tiny_model(tmp_path, "qwen3_moe", heads=2)
    model = load_causal_lm(str(folder), dtype=torch.float32)
    if width != model.config.moe_intermediate_size:
        model.config.moe_intermediate_size = width
        model = type(model)(model.config).eval()
        model.save_pretrained(folder)
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


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_an_engine_tells_the_experts_of_all_tokens_however_they_came_to_be_computed(
    start: StartEngine, tmp_path: Path, kv: KvOnSwap
) -> None:
    folder = make_tiny_model(tmp_path, "qwen3_moe", heads=2)
    model = load_causal_lm(str(folder), dtype=torch.float32)
    engine = await start(folder, replays=True)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(8, 264, int(rng.integers(30, 70))) for _ in range(10)]
    prompts += [prompts[0], prompts[0]]  # one prompt for several, computed once

    async def play(number: int) -> Transcript:
        transcript = Transcript()
        transcript.begin(prompts[number].tolist(), [], "")
        for turn in range(3):
            one = await engine.generate(
                transcript.token_ids,
                Sampling(6 + number, seed=number),
                request_id=f"{number}.{turn}",
                conversation=f"{number}",
            )
            transcript.end_turn([], one)
            if number == 0:
                await engine.load_weights(turn + 1, model.state_dict(), kv)
            if turn < 2:
                transcript.add_observation([9, 10, 11], {})
        return transcript

    recorder, differs = RouterRecorder(model), list[np.ndarray]()
    for transcript in await asyncio.gather(*(play(number) for number in range(len(prompts)))):
        with torch.no_grad():
            model(input_ids=torch.tensor(transcript.token_ids[:-1])[None])
        expected, told = recorder.take_choices(), np.concatenate(transcript.experts)
        assert told.shape == expected.shape
        differs.append((np.sort(told) != np.sort(expected)).any(axis=(1, 2)))
    assert np.concatenate(differs).mean() < 0.002  # a near tie may fall otherwise
