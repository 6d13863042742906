"""Speculative decoding in vLLM: its tokens, log-probs and new weights, with both proposers."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import pytest_asyncio
import torch
from tinkermq.actors.engine.engine import Drawn, Generation, Sampling
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.rollout.players import load_base, start_engine
from tinkermq.schemas.wire.errors import ConfigError, ModelError
from transformers import PreTrainedModel

from tests.support.models import adapted, changed, loaded, make_tiny_model, plain_logprobs, until
from tests.support.vllm_start import ADAPTER, configured

if TYPE_CHECKING:
    from tinkermq.actors.engine.vllm.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package")]

PROMPT = np.array([9, 10, 11, 12] * 8, np.int32)
CHI_SQUARE = 35.3
"""The value that 7 degrees of freedom exceed once in 100,000 times."""


@pytest_asyncio.fixture(scope="module", loop_scope="package", params=["lookup", "draft"])
async def engine(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator["VllmEngine"]:
    """An engine that speculates, with a cache of few requests and room for an adapter.

    The draft model has the weights with which the policy begins.
    """
    speculation: dict[str, Any] = {"num_tokens": 3}
    if request.param == "draft":
        speculation["draft"] = str(folder)
    config = configured(folder, speculation=speculation, kv_cache_mb=1, max_requests=24)
    base = await load_base(config, [ADAPTER])
    started = cast("VllmEngine", await start_engine(config, 0, base))
    yield started
    await started.close()


async def generate(engine: "VllmEngine", sampling: Sampling, number: int) -> Generation:
    return await engine.generate(PROMPT[number % 4 :], sampling, request_id=f"request-{number}")


def check(model: PreTrainedModel, made: Generation, sampling: Sampling, number: int) -> None:
    """Compare log-probs with a forward pass of the learner's model."""
    plain = plain_logprobs(model, PROMPT[number % 4 :], made.token_ids, sampling.temperature or 1.0)
    np.testing.assert_allclose(made.logprobs, plain, atol=1e-4)


async def acceptance(engine: "VllmEngine", number: int) -> float:
    """Return the share of proposed tokens that a greedy request accepts."""
    meter = engine._model.meter
    drafted, accepted = meter.drafted, meter.accepted
    await generate(engine, Sampling(40, 0.0), number)
    return (meter.accepted - accepted) / (meter.drafted - drafted)


async def test_log_probs_are_the_learners_with_each_sampling_of_a_batch(
    engine: "VllmEngine", model: PreTrainedModel
) -> None:
    await engine.load_weights(0, model.state_dict(), "recompute")
    options = [
        Sampling(40, temperature, top_p, top_k, num_top=num_top)
        for temperature, top_p, (top_k, num_top) in product(
            (0.0, 0.3, 1.7), (0.8, 1.0), ((0, 2), (5, 0))
        )
    ]
    made = await asyncio.gather(*(generate(engine, each, n) for n, each in enumerate(options)))
    for number, (sampling, result) in enumerate(zip(options, made, strict=True)):
        assert len(result.token_ids) == 40
        check(model, result, sampling, number)
        if sampling.num_top and sampling.temperature == 0:
            assert result.top_ids is not None
            assert result.top_ids[:, 0].tolist() == result.token_ids.tolist()
    meter = engine._model.meter
    assert 0 < meter.accepted < meter.drafted


async def test_tokens_are_drawn_from_the_policys_distribution(
    engine: "VllmEngine", model: PreTrainedModel
) -> None:
    await engine.load_weights(0, model.state_dict(), "recompute")
    first = (await generate(engine, Sampling(8, 0.0), 0)).token_ids
    prompt = np.concatenate([PROMPT, first, first])
    meter, number = engine._model.meter, 400
    drafted, accepted = meter.drafted, meter.accepted
    made = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(3, 1.0, top_k=2), request_id=f"draw-{n}")
            for n in range(number)
        )
    )
    counts = Counter(tuple(result.token_ids.tolist()) for result in made)
    assert number / 10 < meter.accepted - accepted < meter.drafted - drafted - number / 10

    def next_tokens(drawn: tuple[int, ...]) -> list[tuple[int, float]]:
        ids = torch.tensor([[*prompt.tolist(), *drawn]])
        with torch.no_grad():
            values, tokens = model(ids).logits[0, -1].topk(2)
        return list(zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True))

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*drawn, token): share * more
            for drawn, share in expected.items()
            for token, more in next_tokens(drawn)
        }
    assert counts.keys() <= expected.keys()
    distance = sum(
        (counts[drawn] - number * share) ** 2 / (number * share)
        for drawn, share in expected.items()
    )
    assert distance < CHI_SQUARE


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_a_new_version_reaches_the_policy_alone_and_labels_the_tokens_it_draws(
    engine: "VllmEngine", model: PreTrainedModel, kv: Any
) -> None:
    other = loaded(model, changed(model, 1))
    await engine.load_weights(0, model.state_dict(), "recompute")
    begun, streamed = engine.stats().generated_tokens, list[Drawn]()
    prompt = PROMPT[:6]
    running = asyncio.ensure_future(
        engine.generate(prompt, Sampling(100), request_id="swap", on_token=streamed.append)
    )
    await until(lambda: engine.stats().generated_tokens > begun + 20)
    await engine.load_weights(1, other.state_dict(), kv)
    result = await running
    assert [drawn.version for drawn in streamed] == result.versions.tolist()
    assert [drawn.token_id for drawn in streamed] == result.token_ids.tolist()
    assert set(result.versions.tolist()) == {0, 1}
    for version, each in ((0, model), (1, other)):
        own = (result.versions == version) & (kv == "recompute" or version == 0)
        plain = plain_logprobs(each, prompt, result.token_ids)
        np.testing.assert_allclose(result.logprobs[own], plain[own], atol=1e-4)
    after = await generate(engine, Sampling(40, 0.7), 0)
    check(other, after, Sampling(40, 0.7), 0)
    assert set(after.versions.tolist()) == {1}


@pytest.mark.parametrize("engine", ["draft"], indirect=True)
async def test_a_draft_model_keeps_its_weights_while_the_policy_leaves_them_and_comes_back(
    engine: "VllmEngine", model: PreTrainedModel
) -> None:
    other = loaded(model, changed(model, 3, 0.2))
    shares: list[float] = []
    for version, each in enumerate((model, other, model)):
        await engine.load_weights(version, each.state_dict(), "recompute")
        shares.append(await acceptance(engine, version))
    assert shares[0] == shares[2] > 0.9 > 0.5 > shares[1]


async def test_an_adapter_and_its_base_speculate_side_by_side(
    engine: "VllmEngine", model: PreTrainedModel, folder: Path
) -> None:
    fresh = adapted(folder, ADAPTER, 5)
    await engine.load_weights(0, model.state_dict(), "recompute")
    config = configured(folder, speculation={"num_tokens": 3})
    beside = await start_engine(config.model_copy(update={"lora": ADAPTER}), 0, engine._model)
    await beside.load_weights(1, policy_tensors(fresh))
    sampling = Sampling(40, 0.5)
    made = await asyncio.gather(
        *(generate(cast("VllmEngine", each), sampling, 0) for each in (engine, beside))
    )
    for each, result in zip((model, fresh), made, strict=True):
        check(each, result, sampling, 0)
    await beside.close()


async def test_prompts_are_scored_and_seeds_and_ends_of_requests_hold(
    engine: "VllmEngine", model: PreTrainedModel
) -> None:
    await engine.load_weights(0, model.state_dict(), "recompute")
    scores = await engine.score(PROMPT, request_id="score", top_k=3)
    plain = plain_logprobs(model, PROMPT[:1], PROMPT[1:])
    np.testing.assert_allclose(scores.logprobs[1:], plain, atol=1e-4)
    seeded = Sampling(40, 0.7, seed=5)
    twice = [await generate(engine, seeded, 4 * number) for number in range(2)]
    assert twice[0].token_ids.tolist() == twice[1].token_ids.tolist()
    stop = int(twice[0].token_ids[20])
    ended = await generate(engine, Sampling(40, 0.7, seed=5, stop_token_ids=(stop,)), 0)
    cut = twice[0].token_ids.tolist().index(stop) + 1
    assert ended.token_ids.tolist() == twice[0].token_ids.tolist()[:cut]
    assert ended.finish_reason == "stop"
    seen = list[Drawn]()
    cancelled = asyncio.ensure_future(
        engine.generate(PROMPT[:4], Sampling(150), request_id="cancelled", on_token=seen.append)
    )
    await until(lambda: len(seen) > 5)
    engine.cancel("cancelled")
    result = await cancelled
    assert result.finish_reason == "cancelled"
    np.testing.assert_allclose(
        result.logprobs, plain_logprobs(model, PROMPT[:4], result.token_ids), atol=1e-4
    )


async def test_what_changes_the_drawn_distribution_is_refused_for_the_request(
    engine: "VllmEngine",
) -> None:
    with pytest.raises(ConfigError, match="beside speculative decoding"):
        await engine.generate(PROMPT, Sampling(4, min_p=0.1), request_id="constrained")


async def test_a_draft_of_another_vocabulary_is_refused_before_vllm_starts(
    folder: Path, tmp_path: Path
) -> None:
    draft = make_tiny_model(tmp_path, heads=2)
    values = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    (draft / "config.json").write_text(json.dumps({**values, "vocab_size": 7}), encoding="utf-8")
    config = configured(folder, speculation={"num_tokens": 2, "draft": str(draft)})
    with pytest.raises(ModelError, match="has 7 tokens"):
        await load_base(config, [])
