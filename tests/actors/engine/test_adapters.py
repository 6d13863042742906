"""Adapters that come and go in an engine, and prompts that are scored."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import AdapterEngine, Drawn, Generation, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.errors import ConfigError, ModelError, NotFoundError
from transformers import PreTrainedModel
from transformers.models.qwen2_moe import Qwen2MoeConfig, Qwen2MoeForCausalLM

from tests.support.models import adapted, plain_logprobs, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]

LORAS = {
    "all": LoraConfig(rank=4, alpha=32),
    "some": LoraConfig(rank=8, alpha=32, targets=["q_proj", "v_proj"]),
    "head": LoraConfig(rank=2, alpha=32, targets=["down_proj", "lm_head"]),
}
PROMPT = np.arange(40, 70, dtype=np.int32)
GREEDY = Sampling(12, temperature=0)


@pytest.fixture(scope="module")
def models(folder: Path, model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The model with each adapter, to compare with; "" has none."""
    found = {name: adapted(folder, lora, seed) for seed, (name, lora) in enumerate(LORAS.items())}
    return {"": model, **found}


@pytest.fixture(scope="module")
def folders(
    models: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The adapters as PEFT writes them."""
    place = tmp_path_factory.mktemp("adapters")
    for name in LORAS:
        models[name].save_pretrained(place / name)
    return {name: place / name for name in LORAS}


async def started(
    folder: Path, folders: dict[str, Path], max_context: int = 160
) -> TransformersEngine:
    engine = await TransformersEngine.start(str(folder), max_slots=8, max_context=max_context)
    for name, place in folders.items():
        await engine.add_adapter(name, place)
    return engine


async def say(engine: AdapterEngine, adapter: str, number: int = 0) -> Generation:
    prompt = PROMPT[number:]
    return await engine.generate(prompt, GREEDY, request_id=f"{adapter}-{number}", adapter=adapter)


async def test_requests_of_several_adapters_decode_together_as_each_alone(
    folder: Path, folders: dict[str, Path], models: dict[str, PreTrainedModel]
) -> None:
    engine = await started(folder, folders)
    names = ["", *LORAS]
    alone = {name: await say(engine, name) for name in names}
    asked = [(name, number) for number in range(2) for name in names]
    together = await asyncio.gather(*(say(engine, *one) for one in asked))
    for (name, number), made in zip(asked, together, strict=True):
        plain = plain_logprobs(models[name], PROMPT[number:], made.token_ids)
        np.testing.assert_allclose(made.logprobs, plain, atol=1e-5)
        if not number:
            assert made.token_ids.tolist() == alone[name].token_ids.tolist()
            np.testing.assert_allclose(made.logprobs, alone[name].logprobs, atol=1e-5)
    assert len({tuple(one.token_ids) for one in alone.values()}) == len(names)
    await engine.close()


async def test_adapters_stay_apart_where_a_model_lays_all_tokens_behind_each_other(
    tmp_path: Path,
) -> None:
    """A mixture of experts does so, whose shared expert is a layer as any other."""
    config = Qwen2MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
    )
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path)
    models = {name: adapted(tmp_path, LoraConfig(rank=4), seed) for seed, name in enumerate("ab")}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    engine = await started(tmp_path, {name: tmp_path / name for name in models})
    asked = [(name, number) for number in range(2) for name in models]
    together = await asyncio.gather(*(say(engine, *one) for one in asked))
    for (name, number), made in zip(asked, together, strict=True):
        plain = plain_logprobs(models[name], PROMPT[number:], made.token_ids)
        np.testing.assert_allclose(made.logprobs, plain, atol=1e-5)
    await engine.close()


async def test_a_prompt_is_scored_as_transformers_does(
    folder: Path, folders: dict[str, Path], models: dict[str, PreTrainedModel]
) -> None:
    engine = await started(folder, folders)
    names = ["", *LORAS]
    lengths = [30, 3, 1, 17]
    asked = [(name, length) for name in names for length in lengths]
    beside = asyncio.create_task(say(engine, "all"))
    scored = await asyncio.gather(
        *(
            engine.score(PROMPT[:length], request_id=f"{name}-{length}", top_k=3, adapter=name)
            for name, length in asked
        )
    )
    await beside
    for (name, length), made in zip(asked, scored, strict=True):
        plain = plain_logprobs(models[name], PROMPT[:1], PROMPT[1:length])
        assert np.isnan(made.logprobs[0])
        np.testing.assert_allclose(made.logprobs[1:], plain, atol=1e-5)
        ids = torch.from_numpy(PROMPT[:length].astype(np.int64))[None]
        with torch.no_grad():
            top = models[name](ids).logits[0, :-1].log_softmax(-1).topk(3)
        assert made.top_ids[1:].tolist() == top.indices.tolist()
        np.testing.assert_allclose(made.top_logprobs[1:], top.values.numpy(), atol=1e-5)
    await engine.close()


async def test_an_adapter_takes_newer_weights_while_its_requests_run(
    folder: Path, folders: dict[str, Path]
) -> None:
    engine = await started(folder, folders, max_context=1000)
    await engine.add_adapter("moving", folders["all"], version=1)
    drawn: list[Drawn] = []
    long = engine.generate(
        PROMPT,
        Sampling(900, temperature=0),
        request_id="long",
        adapter="moving",
        on_token=drawn.append,
    )
    running = asyncio.create_task(long)
    await until(lambda: len(drawn) > 3)
    await engine.add_adapter("moving", folders["some"], version=2)
    await until(lambda: drawn[-1].version == 2)
    engine.cancel("long")
    made = await running
    assert set(made.versions.tolist()) == {1, 2}
    assert (np.diff(made.versions) >= 0).all()
    fresh = await say(engine, "moving")
    assert fresh.token_ids.tolist() == (await say(engine, "some")).token_ids.tolist()
    await engine.close()


async def test_what_is_refused(folder: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    engine = await started(folder, folders)
    with pytest.raises(NotFoundError, match="no adapter gone"):
        await say(engine, "gone")
    engine.drop_adapter("all")
    with pytest.raises(NotFoundError, match="no adapter all"):
        await engine.score(PROMPT, request_id="dropped", adapter="all")
    for top_k in (-1, 257):
        with pytest.raises(ConfigError, match="likeliest"):
            await engine.score(PROMPT, request_id="many", top_k=top_k)
    with pytest.raises(ConfigError, match="outside the model's vocabulary"):
        await engine.score([1, 264], request_id="outside")
    with pytest.raises(ConfigError, match="cannot be scored"):
        await engine.score([], request_id="empty")
    with pytest.raises(ModelError, match="cannot be read"):
        await engine.add_adapter("none", tmp_path)
    other = adapted(folder, LoraConfig(rank=2), 5)
    for name, tensor in other.named_parameters():
        if "lora_B" in name:
            tensor.data[0, 0] = float("nan")
    other.save_pretrained(tmp_path / "nan")
    with pytest.raises(ModelError, match="has values that are not finite"):
        await engine.add_adapter("nan", tmp_path / "nan")
    assert len((await say(engine, "some")).token_ids) == 12
    await engine.close()
