"""The engine shows a model its images: what it generates, shares, keeps and refuses."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.generator.engine import Sampling
from tinkermq.actors.generator.transformers_engine import TransformersEngine
from tinkermq.actors.vision import load_image_reader
from tinkermq.schemas.errors import DataError, ModelError, TinkermqError

from tests.images import IMAGE_ID, KINDS, load, make_vision_model, png, seeing_logprobs

torch.set_num_threads(1)
SMALL, TALL, WIDE = png(16, 16), png(24, 40, 1), png(32, 8, 2)
TWO = np.array([3, 70, *[IMAGE_ID] * 4, 80, *[IMAGE_ID] * 15, 81, 82], np.int32)
ONE = np.array([3, *[IMAGE_ID] * 4, 90, 91, 92], np.int32)
TEXT = np.array([3, 70, 80, 90, 100], np.int32)


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model of each class."""
    return make_vision_model(tmp_path_factory.mktemp("seeing"), request.param)


@pytest.fixture
async def eyes(seeing: Path) -> AsyncIterator[TransformersEngine]:
    """An engine that runs it."""
    engine = await TransformersEngine.start(str(seeing), max_slots=8, max_context=160)
    yield engine
    await engine.close()


async def test_logprobs_are_those_of_the_models_own_pass_over_all_turns(
    eyes: TransformersEngine, seeing: Path
) -> None:
    """Prompts of one, two and no images together; shared, parked, resumed and swapped under."""
    model, reader = load(seeing), load_image_reader(str(seeing))
    assert reader is not None
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
            expected = seeing_logprobs(model, reader, prompt, one.token_ids, images)
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)
        if turn == 0:
            first = eyes.stats()
            assert first.reused_tokens == len(ONE)  # equal prompts with equal images, only
            assert first.parked == len(asked)
        if turn == 1:
            kept = sum(len(prompt) - 5 for prompt in prompts)  # all but the last token, and 4 new
            assert eyes.stats().reused_tokens == first.reused_tokens + kept
            await eyes.load_weights(1, dict(model.state_dict()))  # the same: caches are given up
        more = [np.array([1, 60 + turn, IMAGE_ID, 5], np.int32)] * len(asked)  # a stray image token
        prompts = [
            np.concatenate([prompt, one.token_ids, tail])
            for prompt, one, tail in zip(prompts, drawn, more, strict=True)
        ]


async def test_a_swap_that_computes_the_cache_anew_shows_the_images_again(
    eyes: TransformersEngine, seeing: Path
) -> None:
    model, reader = load(seeing), load_image_reader(str(seeing))
    assert reader is not None
    running = asyncio.ensure_future(
        eyes.generate(ONE, Sampling(100, seed=3), request_id="a", images=[SMALL])
    )
    await asyncio.sleep(0.05)
    await eyes.load_weights(1, dict(model.state_dict()), "recompute")
    one = await running
    expected = seeing_logprobs(model, reader, ONE, one.token_ids, (SMALL,))
    np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)
    assert set(one.versions.tolist()) <= {0, 1}


@pytest.mark.parametrize(
    ("prompt", "images", "kind", "words"),
    [
        (TEXT, [SMALL], DataError, "take 4 tokens"),
        (ONE, [TALL], DataError, "take 15 tokens"),
        (np.array([3, IMAGE_ID, IMAGE_ID, 5, IMAGE_ID, IMAGE_ID, 6]), [SMALL], DataError, "piece"),
        (np.array([3, *[IMAGE_ID] * 8, 6]), [SMALL, WIDE], DataError, "side by side"),
        (ONE, [b"no image"], DataError, "cannot be opened"),
        (ONE, [SMALL[:100]], DataError, "damaged"),
    ],
)
async def test_images_that_do_not_fit_are_refused_and_the_engine_goes_on(
    eyes: TransformersEngine,
    prompt: np.ndarray,
    images: list[bytes],
    kind: type[TinkermqError],
    words: str,
) -> None:
    with pytest.raises(kind, match=words):
        await eyes.generate(prompt, Sampling(4), request_id="bad", images=images)
    fine = await eyes.generate(ONE, Sampling(4), request_id="bad", images=[SMALL])
    assert len(fine.token_ids) == 4


async def test_a_model_that_reads_text_alone_says_so(engine: TransformersEngine) -> None:
    with pytest.raises(ModelError, match="reads text alone"):
        await engine.generate(TEXT, Sampling(4), request_id="a", images=[SMALL])
