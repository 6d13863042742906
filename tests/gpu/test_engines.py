"""Engines generate, agree with the learner, and load new weights in running answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Engine, Generation, Sampling
from tinkermq.actors.rollout.players import start_engine
from tinkermq.actors.training.micro_batch import TokenSequence
from tinkermq.schemas.wire.array import IntVector

from tests.gpu.material import RandomPolicy, ScoringLearner, with_noise
from tests.gpu.report import Recorder

NUM_REQUESTS = 16
SWAP_AFTER = 4 * NUM_REQUESTS
"""Tokens of all requests between two swaps."""
pytestmark = [
    pytest.mark.gpu_machine,
    pytest.mark.timeout(300),
    pytest.mark.parametrize(
        "engine_name",
        [
            "transformers",
            pytest.param(
                "vllm",
                marks=pytest.mark.skipif(
                    find_spec("vllm") is None, reason="pip install 'tinkermq[vllm]'"
                ),
            ),
        ],
    ),
]


@contextlib.asynccontextmanager
async def started(policy: RandomPolicy, engine_name: str) -> AsyncIterator[Engine]:
    generator = {"engine": engine_name, "dtype": policy.dtype, "max_requests": NUM_REQUESTS}
    if engine_name == "vllm":
        generator |= {"compile": False, "kv_cache_mb": 256, "sleep": "always"}
    engine = await start_engine(policy.config(generator=generator))
    try:
        yield engine
    finally:
        await engine.close()


def free_bytes(*, on_gpu: bool) -> int:
    """Return what is free on the first GPU, as all processes see it."""
    return torch.cuda.mem_get_info()[0] if on_gpu else 0


def random_prompts() -> list[IntVector]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 60, NUM_REQUESTS)
    return [rng.integers(8, 264, int(length)).astype(np.int32) for length in lengths]


async def generate(
    engine: Engine, prompts: Sequence[IntVector], num_tokens: int
) -> list[Generation]:
    return await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(num_tokens), request_id=str(number))
            for number, prompt in enumerate(prompts)
        )
    )


async def until_generated(engine: Engine, num_tokens: int) -> None:
    async with asyncio.timeout(60):
        while engine.stats().generated_tokens < num_tokens:
            await asyncio.sleep(0.001)


def engine_logprobs(generations: Sequence[Generation]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([one.logprobs for one in generations]))


def learner_logprobs(
    learner: ScoringLearner, prompts: Sequence[IntVector], generations: Sequence[Generation]
) -> torch.Tensor:
    return learner.logprobs(
        [
            TokenSequence(
                np.concatenate([prompt, one.token_ids]).astype(np.int64),
                np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(one.token_ids)]),
            )
            for prompt, one in zip(prompts, generations, strict=True)
        ]
    )


def assert_only_rounding(differences: torch.Tensor, *, on_gpu: bool) -> None:
    max_mean, max_single = (0.02, 0.3) if on_gpu else (1e-5, 1e-4)
    assert differences.mean() <= max_mean
    assert differences.max() <= max_single


async def test_an_engine_answers_in_full_with_the_log_probs_of_the_learner(
    policy: RandomPolicy,
    engine_name: str,
    on_gpu: bool,
    record: Recorder,
) -> None:
    prompts, num_tokens = random_prompts(), 128 if on_gpu else 24
    loop = asyncio.get_running_loop()
    async with started(policy, engine_name) as engine:
        begun = loop.time()
        generations = await generate(engine, prompts, num_tokens)
        record("tokens/s", NUM_REQUESTS * num_tokens / (loop.time() - begun))
    assert [len(one.token_ids) for one in generations] == [num_tokens] * NUM_REQUESTS
    expected_N = learner_logprobs(policy.learner(), prompts, generations)
    differences_N = (engine_logprobs(generations) - expected_N).abs()
    record("mean difference of log-probs", float(differences_N.mean()))
    assert_only_rounding(differences_N, on_gpu=on_gpu)


async def test_an_engine_that_sleeps_frees_its_memory_and_goes_on(
    policy: RandomPolicy,
    engine_name: str,
    on_gpu: bool,
    record: Recorder,
) -> None:
    prompts, num_tokens = random_prompts(), 384 if on_gpu else 72
    learner = policy.learner()
    weights = learner.weights()
    loop = asyncio.get_running_loop()
    async with started(policy, engine_name) as engine:
        generating = asyncio.ensure_future(generate(engine, prompts, num_tokens))
        await until_generated(engine, SWAP_AFTER)
        free_awake = free_bytes(on_gpu=on_gpu)
        begun = loop.time()
        await engine.sleep()
        record("to sleep, s", loop.time() - begun)
        freed = free_bytes(on_gpu=on_gpu) - free_awake
        await engine.load_weights(1, with_noise(weights, 1))
        begun = loop.time()
        await engine.wake()
        record("to wake, s", loop.time() - begun)
        generations = await generating
    record("freed, MiB", freed / 2**20)
    assert not on_gpu or freed > 0
    assert [len(one.token_ids) for one in generations] == [num_tokens] * NUM_REQUESTS
    version_N = torch.from_numpy(np.concatenate([one.versions for one in generations]))
    assert set(version_N.tolist()) == {0, 1}
    learner.load(with_noise(weights, 1))
    expected_N = learner_logprobs(learner, prompts, generations)
    differences_N = (engine_logprobs(generations) - expected_N).abs()
    assert_only_rounding(differences_N[version_N == 1], on_gpu=on_gpu)


async def test_running_answers_go_on_with_new_weights(
    policy: RandomPolicy,
    engine_name: str,
    on_gpu: bool,
    record: Recorder,
) -> None:
    prompts, learner = random_prompts(), policy.learner()
    weights = learner.weights()
    versions = [weights, with_noise(weights, 1), with_noise(weights, 2)]
    async with started(policy, engine_name) as engine:
        generating = asyncio.ensure_future(generate(engine, prompts, 384 if on_gpu else 72))
        for version in (1, 2):
            await until_generated(engine, engine.stats().generated_tokens + SWAP_AFTER)
            await engine.load_weights(version, versions[version], "recompute")
        generations = await generating
        pause_s = engine.stats().last_pause_s
    record("pause, ms", 1e3 * pause_s)
    assert pause_s <= 1
    version_N = torch.from_numpy(np.concatenate([one.versions for one in generations]))
    assert set(version_N.tolist()) == {0, 1, 2}
    for version, version_weights in enumerate(versions):
        learner.load(version_weights)
        expected_N = learner_logprobs(learner, prompts, generations)
        differences_N = (engine_logprobs(generations) - expected_N).abs()
        assert_only_rounding(differences_N[version_N == version], on_gpu=on_gpu)
