"""Models of each kind of layer in the learner and the engine: the table of docs/models.md."""

import asyncio
import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Generation, KvOnSwap, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.engine.transformers.worker import LEAST_SHARED
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.model_folder import load_causal_lm
from transformers import PreTrainedModel

from tests.support.families import (
    FAMILIES,
    PAGE,
    QUICK,
    VOCAB,
    line_of,
    make_model,
    plain_logprobs,
    row_of,
)
from tests.support.models import until

KINDS = (
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "jamba",
    "lfm2",
    "llama4_text",
    "mamba",
    "mistral",
    "nemotron_h",
    "qwen3_5_text",
)
torch.set_num_threads(1)


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.long)
        for family in FAMILIES
    ],
)
def test_a_family_is_computed_as_its_own_pass_computes_it_or_refused_with_the_reason(
    family: str,
) -> None:
    assert line_of(family, row_of(family)) in PAGE.read_text().splitlines()


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A saved model of each kind."""
    make_model(request.param).save_pretrained(tmp_path)
    return tmp_path


async def _started(folder: Path) -> TransformersEngine:
    return await TransformersEngine.start(str(folder), max_slots=8, max_context=160)


def _check(model: PreTrainedModel, prompt: np.ndarray, drawn: Generation) -> None:
    ids = np.concatenate([prompt, drawn.token_ids])
    expected = plain_logprobs(model, ids, len(prompt))
    np.testing.assert_allclose(drawn.logprobs, expected, atol=1e-4)


@pytest.mark.full
async def test_shared_and_continued_sequences_have_the_log_probs_of_their_own_pass(
    folder: Path,
) -> None:
    """Equal prompts, prompts that begin alike or with another one, and three turns of each."""
    model = load_causal_lm(str(folder), dtype=torch.float32).eval()
    engine = await _started(folder)
    rng = np.random.default_rng(0)
    base = rng.integers(3, VOCAB, 2 * LEAST_SHARED).astype(np.int32)
    other = np.concatenate([base[:-4], rng.integers(3, VOCAB, 9)]).astype(np.int32)
    longer = np.concatenate([base, rng.integers(3, VOCAB, 5)]).astype(np.int32)
    prompts = [base, base, base, other, longer, base[:5]]
    try:
        for turn in range(3):
            drawn = await asyncio.gather(
                *(
                    engine.generate(
                        prompt,
                        Sampling(10 + number, seed=number // 2 + 9 * turn),
                        request_id=f"{number}.{turn}",
                        conversation=str(number),
                    )
                    for number, prompt in enumerate(prompts)
                )
            )
            for prompt, one in zip(prompts, drawn, strict=True):
                _check(model, prompt, one)
            more = [np.array([7, 8 + turn, 9], np.int32)] * len(prompts)
            prompts = [
                np.concatenate([prompt, one.token_ids, tail])
                for prompt, one, tail in zip(prompts, drawn, more, strict=True)
            ]
        reused = engine.stats().reused_tokens
        assert reused > sum(map(len, prompts)) // 2
    finally:
        await engine.close()


@pytest.mark.full
@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_new_weights_compute_what_follows_in_running_sequences(
    folder: Path, kv: KvOnSwap
) -> None:
    """Rows of several lengths, of which some have ended when the weights change."""
    model = load_causal_lm(str(folder), dtype=torch.float32).eval()
    other = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(1)
    for weight in other.parameters():
        weight.data += 0.02 * torch.randn(weight.shape, generator=noise)
    weights = {name: tensor.detach() for name, tensor in policy_tensors(other).items()}
    engine = await _started(folder)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, length).astype(np.int32) for length in (5, 17, 17, 30)]
    try:
        running = [
            asyncio.ensure_future(
                engine.generate(prompt, Sampling(length, seed=number), request_id=str(number))
            )
            for number, (prompt, length) in enumerate(zip(prompts, (4, 60, 60, 60), strict=True))
        ]
        await until(lambda: engine.stats().generated_tokens >= 40)
        await engine.load_weights(1, weights, kv)
        for prompt, one in zip(prompts, await asyncio.gather(*running), strict=True):
            ids = np.concatenate([prompt, one.token_ids])
            old = one.versions == 0
            before = plain_logprobs(model, ids, len(prompt)).numpy()
            np.testing.assert_allclose(one.logprobs[old], before[old], atol=1e-4)
            if kv == "recompute":
                after = plain_logprobs(other, ids, len(prompt)).numpy()
                np.testing.assert_allclose(one.logprobs[~old], after[~old], atol=1e-4)
        later = await engine.generate(prompts[3], Sampling(8, seed=1), request_id="later")
        _check(other, prompts[3], later)
        await engine.sleep(keep_weights=True)
        await engine.wake()
        _check(other, prompts[1], await engine.generate(prompts[1], Sampling(8), request_id="woke"))
    finally:
        await engine.close()
