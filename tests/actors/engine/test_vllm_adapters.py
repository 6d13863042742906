"""Adapters that come and go in vLLM, and prompts that it scores."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from tinkermq.actors.engine.engine import AdapterEngine, Generation, Sampling
from tinkermq.actors.tinker.sampling.engines import open_engine
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.errors import ModelError, NotFoundError
from transformers import PreTrainedModel

from tests.support.models import adapted, plain_logprobs
from tests.support.vllm_start import configured

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]

LORAS = {
    "all": LoraConfig(rank=4, alpha=32),
    "some": LoraConfig(rank=8, alpha=32, targets=["q_proj", "v_proj"]),
    "head": LoraConfig(rank=2, alpha=32, targets=["down_proj", "lm_head"]),
}
PROMPT = np.arange(40, 90, dtype=np.int32)
GREEDY = Sampling(12, temperature=0)


@pytest.fixture(scope="module")
def models(folder: Path, model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The model with each adapter, to compare with; "" has none."""
    found = {name: adapted(folder, lora, seed) for seed, (name, lora) in enumerate(LORAS.items())}
    return {"": model, **found}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def engine(
    folder: Path, models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AdapterEngine]:
    """A sampler's engine with the adapters in it."""
    config = configured(folder)
    room = config.tinker.model_copy(update={"base": "org/tiny", "sampled_at_once": 3})
    config = config.model_copy(update={"tinker": room})
    sampled = await open_engine(config)
    place = tmp_path_factory.mktemp("adapters")
    for name in LORAS:
        models[name].save_pretrained(place / name)
        await sampled.engine.add_adapter(name, place / name)
    yield sampled.engine
    await sampled.engine.close()


async def say(engine: AdapterEngine, adapter: str, number: int) -> Generation:
    request = f"{adapter}-{number}"
    return await engine.generate(PROMPT[number:], GREEDY, request_id=request, adapter=adapter)


async def test_requests_of_several_adapters_decode_together(
    engine: AdapterEngine, models: dict[str, PreTrainedModel]
) -> None:
    asked = [(name, number) for number in range(2) for name in ["", *LORAS]]
    together = await asyncio.gather(*(say(engine, *one) for one in asked))
    for (name, number), made in zip(asked, together, strict=True):
        plain = plain_logprobs(models[name], PROMPT[number:], made.token_ids)
        np.testing.assert_allclose(made.logprobs, plain, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["", *LORAS])
async def test_a_prompt_is_scored_as_transformers_does(
    engine: AdapterEngine, models: dict[str, PreTrainedModel], name: str
) -> None:
    beside = asyncio.create_task(say(engine, "some", 7))
    for length in (50, 3, 1):
        request = f"score-{name}-{length}"
        prompt = PROMPT[:length]
        made = await engine.score(prompt, request_id=request, top_k=3, adapter=name)
        plain = plain_logprobs(models[name], prompt[:1], prompt[1:])
        assert np.isnan(made.logprobs[0])
        np.testing.assert_allclose(made.logprobs[1:], plain, atol=1e-5)
        with torch.no_grad():
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            top = models[name](ids).logits[0, :-1].log_softmax(-1).topk(3)
        np.testing.assert_allclose(made.top_logprobs[1:], top.values.numpy(), atol=1e-5)
        assert made.top_ids[1:].tolist() == top.indices.tolist()
    await beside


async def test_adapters_are_exchanged_while_it_works(
    engine: AdapterEngine, models: dict[str, PreTrainedModel], folder: Path, tmp_path: Path
) -> None:
    fresh = adapted(folder, LoraConfig(rank=4, alpha=32), 9)
    fresh.save_pretrained(tmp_path / "fresh")
    engine.drop_adapter("some")
    with pytest.raises(NotFoundError, match="no adapter some"):
        await say(engine, "some", 0)
    await engine.add_adapter("fresh", tmp_path / "fresh")
    made = await say(engine, "fresh", 0)
    plain = plain_logprobs(fresh, PROMPT, made.token_ids)
    np.testing.assert_allclose(made.logprobs, plain, atol=1e-5)
    for version in range(1, 9):  # a fast machine has answered before the exchange, a slow one late
        long = engine.generate(
            PROMPT, Sampling(100, temperature=0), request_id=f"long-{version}", adapter="all"
        )
        running = asyncio.create_task(long)
        await asyncio.sleep(0.02 * version)
        await engine.add_adapter("all", tmp_path / "fresh", version=version)
        seen = set((await running).versions.tolist())
        assert seen <= {version - 1, version}
        if len(seen) == 2:
            break
    assert len(seen) == 2, "no exchange fell into a request"
    again = await say(engine, "all", 0)
    assert again.token_ids.tolist() == made.token_ids.tolist()


async def test_an_adapter_that_does_not_fit_ends_nothing(
    engine: AdapterEngine, folder: Path, tmp_path: Path
) -> None:
    adapted(folder, LoraConfig(rank=65), 3).save_pretrained(tmp_path / "large")
    with pytest.raises(ModelError, match="has rank 65, there is room for 64"):
        await engine.add_adapter("large", tmp_path / "large")
    with pytest.raises(ModelError, match="cannot be read"):
        await engine.add_adapter("none", tmp_path / "none")
    assert len((await say(engine, "", 0)).token_ids) == 12
