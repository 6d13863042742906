"""Engines with models that see images and mixtures of experts."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Engine, KvOnSwap, Sampling
from tinkermq.actors.policy.experts import RouterRecorder
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.actors.policy.vision import ImageReader, load_image_reader
from tinkermq.actors.rollout.players import start_engine
from tinkermq.actors.rollout.recording import Transcript
from tinkermq.schemas.wire.errors import DataError
from transformers import PreTrainedModel

from tests.actors.engine.conftest import BLOCK_TOKENS, EngineKind, InVllm, StartEngine
from tests.support.images import IMAGE_ID, load, png, seeing_logprobs
from tests.support.models import (
    adapted,
    changed,
    loaded,
    make_tiny_model,
    plain_logprobs,
    random_prompt,
    until,
)
from tests.support.vllm_start import ADAPTER, configured

pytestmark = pytest.mark.asyncio(loop_scope="package")

SMALL, TALL, WIDE = png(16, 16), png(24, 40, 1), png(32, 8, 2)
TWO = np.array([3, 70, *[IMAGE_ID] * 4, 80, *[IMAGE_ID] * 15, 81, 82], np.int32)
ONE = np.array([3, *[IMAGE_ID] * 4, 90, 91, 92], np.int32)
TEXT = np.array([3, 70, 80, 90, 100], np.int32)


@pytest.fixture(scope="module")
def sighted(seeing: Path) -> PreTrainedModel:
    """The same model, to compare with."""
    return load(seeing)


@pytest.fixture(scope="module")
def reader(seeing: Path) -> ImageReader:
    """What reads its images."""
    found = load_image_reader(str(seeing))
    assert found is not None
    return found


async def test_logprobs_are_those_of_the_models_own_pass_over_all_turns(
    eyes: Engine, engine_kind: EngineKind, sighted: PreTrainedModel, reader: ImageReader
) -> None:
    """Prompts of one, two and no images together; shared, kept, resumed and swapped under."""
    asked = [(TWO, (SMALL, TALL)), (ONE, (SMALL,)), (TEXT, ()), (ONE, (WIDE,)), (ONE, (SMALL,))]
    prompts = [prompt for prompt, _ in asked]
    for turn in range(3):
        drawn = await asyncio.gather(
            *(
                eyes.generate(
                    prompt,
                    Sampling(12, seed=number + 9 * turn),
                    request_id=f"{number}.{turn}",
                    conversation=str(number),
                    images=images,
                )
                for number, (prompt, (_, images)) in enumerate(zip(prompts, asked, strict=True))
            )
        )
        for prompt, (_, images), one in zip(prompts, asked, drawn, strict=True):
            expected = seeing_logprobs(sighted, reader, prompt, one.token_ids, images)
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)
        if turn == 0 and engine_kind == "transformers":
            first = eyes.stats()
            assert first.reused_tokens == len(ONE)  # equal prompts with equal images, only
            assert first.cached_prefixes == len(asked)
        if turn == 1:
            if engine_kind == "transformers":
                kept = sum(len(prompt) - 5 for prompt in prompts)  # all but the last, and 4 new
                assert eyes.stats().reused_tokens == first.reused_tokens + kept
            await eyes.load_weights(1, dict(sighted.state_dict()))  # the same: caches are given up
        more = [np.array([1, 60 + turn, IMAGE_ID, 5], np.int32)] * len(asked)  # a stray image token
        prompts = [
            np.concatenate([prompt, one.token_ids, tail])
            for prompt, one, tail in zip(prompts, drawn, more, strict=True)
        ]


async def test_the_prompts_of_equal_images_are_shared_and_of_others_they_are_not(
    eyes: Engine,
    engine_kind: EngineKind,
    sighted: PreTrainedModel,
    reader: ImageReader,
    seeing: Path,
    in_vllm: InVllm,
) -> None:
    """Prompts that are equal token by token: two with one image, two with another."""
    prompt = np.concatenate([ONE, np.arange(10, 110, dtype=np.int32)])
    images = [(SMALL,), (png(16, 16, 7),)] * 2
    drawn = await asyncio.gather(
        *(
            eyes.generate(prompt, Sampling(8), request_id=str(number), images=image)
            for number, image in enumerate(images)
        )
    )
    for one, image in zip(drawn, images, strict=True):
        expected = seeing_logprobs(sighted, reader, prompt, one.token_ids, image)
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)
    whole = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    shared = len(prompt) if engine_kind == "transformers" else whole
    assert eyes.stats().reused_tokens == 2 * shared
    if engine_kind == "vllm":
        llm: Any = (await in_vllm(seeing))._llm
        sent = llm.renderer.mm_processor_cache.make_stats()
        again = await asyncio.gather(
            *(
                eyes.generate(prompt, Sampling(1), request_id=str(number), images=image)
                for number, image in enumerate(images)
            )
        )
        more = llm.renderer.mm_processor_cache.make_stats()
        assert len(again) == more.total - sent.total == more.hits - sent.hits  # none is sent again


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_new_eyes_see_the_images_of_running_and_later_requests(
    eyes: Engine, sighted: PreTrainedModel, reader: ImageReader, seeing: Path, kv: KvOnSwap
) -> None:
    """The vision tower alone changes, so a picture that was remembered would show."""
    weights = {
        name: value + 0.3 * torch.randn(value.shape) if "visual" in name else value
        for name, value in sighted.state_dict().items()
    }
    other = load(seeing)
    other.load_state_dict(weights)
    running = asyncio.ensure_future(
        eyes.generate(ONE, Sampling(60, seed=3), request_id="a", images=[SMALL])
    )
    await until(lambda: eyes.stats().generated_tokens >= 10)
    await eyes.load_weights(1, weights, kv)
    later = await eyes.generate(ONE, Sampling(12, seed=4), request_id="b", images=[SMALL])
    expected = seeing_logprobs(other, reader, ONE, later.token_ids, (SMALL,))
    np.testing.assert_allclose(later.logprobs, expected, atol=1e-4)
    drawn = await running
    old = drawn.versions == 0
    assert 0 < old.sum() < 60
    expected = seeing_logprobs(sighted, reader, ONE, drawn.token_ids, (SMALL,))
    np.testing.assert_allclose(drawn.logprobs[old], expected[old], atol=1e-4)
    if kv == "recompute":
        expected = seeing_logprobs(other, reader, ONE, drawn.token_ids, (SMALL,))
        np.testing.assert_allclose(drawn.logprobs[~old], expected[~old], atol=1e-4)


async def test_images_that_do_not_fit_are_refused_and_the_engine_goes_on(eyes: Engine) -> None:
    apart = np.array([3, IMAGE_ID, IMAGE_ID, 5, IMAGE_ID, IMAGE_ID, 6])
    for prompt, images, words in (
        (TEXT, [SMALL], "take 4 tokens"),
        (ONE, [TALL], "take 15 tokens"),
        (apart, [SMALL], "piece"),
        (np.array([3, *[IMAGE_ID] * 8, 6]), [SMALL, WIDE], "are adjacent"),
        (ONE, [b"no image"], "cannot be opened"),
        (ONE, [SMALL[:100]], "damaged"),
    ):
        with pytest.raises(DataError, match=words):
            await eyes.generate(prompt, Sampling(4), request_id="bad", images=images)
    fine = await eyes.generate(ONE, Sampling(4), request_id="bad", images=[SMALL])
    assert len(fine.token_ids) == 4


@pytest.mark.vllm
async def test_an_adapter_sees_the_images_beside_its_base(
    seeing: Path, reader: ImageReader, sighted: PreTrainedModel, in_vllm: InVllm
) -> None:
    base = await in_vllm(seeing)
    model = adapted(seeing, ADAPTER, 3)
    plain = await start_engine(configured(seeing), 0, base)
    await plain.load_weights(0, sighted.state_dict(), "recompute")
    lora = configured(seeing).model_copy(update={"lora": ADAPTER})
    engine = await start_engine(lora, 0, base)
    await engine.load_weights(1, policy_tensors(model))
    both = [plain, engine]
    drawn = await asyncio.gather(
        *(one.generate(TWO, Sampling(12), request_id="a", images=[SMALL, TALL]) for one in both)
    )
    for one, each in zip(drawn, (sighted, model), strict=True):
        expected = seeing_logprobs(each, reader, TWO, one.token_ids, (SMALL, TALL))
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-3)
    for one in both:
        await one.close()


# -- A mixture of experts in each engine: new weights, whose experts are one tensor for a layer ----


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
                transcript.add_observation([9, 10, 11], [])
        return transcript

    recorder, differs = RouterRecorder(model), list[np.ndarray]()
    for transcript in await asyncio.gather(*(play(number) for number in range(len(prompts)))):
        with torch.no_grad():
            model(input_ids=torch.tensor(transcript.token_ids[:-1])[None])
        expected, told = recorder.take_choices(), np.concatenate(transcript.experts)
        assert told.shape == expected.shape
        differs.append((np.sort(told) != np.sort(expected)).any(axis=(1, 2)))
    assert np.concatenate(differs).mean() < 0.002  # a near tie may fall otherwise
