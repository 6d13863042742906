"""Engines generate, agree with the learner, and load new weights in running answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Engine, Generation, Sampling
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.devices import own_card
from tinkermq.actors.policy.grammar import OutputGrammars
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.rollout.players import start_engine
from tinkermq.actors.training.micro_batch import TokenSequence
from tinkermq.schemas.output_format import OutputFormat
from tinkermq.schemas.wire.array import IntVector

from tests.gpu.material import RandomPolicy, ScoringLearner, with_noise
from tests.gpu.report import Recorder

NUM_REQUESTS = 16
LEVELS = {True: "level 1", False: "level 2"}
"""Of sleep: weights are kept, or dropped."""
SWAP_AFTER = 4 * NUM_REQUESTS
"""Tokens of all requests between two swaps."""
VLLM = {"engine": "vllm", "kv_cache_mb": 256, "sleep": "always"}


@dataclass(frozen=True)
class Kind:
    """An engine with some of its options."""

    name: str
    generator: dict[str, Any]
    lora_rank: int = 0
    max_mean: float = 0.02
    """Mean difference of log-probs from the learner's, on a GPU."""


KINDS = (
    Kind("transformers", {}),
    Kind("vLLM with CUDA graphs", VLLM),
    Kind("vLLM, eager", VLLM | {"compile": False}),
    Kind("vLLM with LoRA", VLLM, lora_rank=8),
    Kind("vLLM in FP8", VLLM | {"quantization": "fp8"}, max_mean=0.2),
)
pytestmark = [
    pytest.mark.gpu_machine,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name),
]


@pytest.fixture(autouse=True)
def runs_here(kind: Kind, on_gpu: bool) -> None:
    """Skip kinds of engines that this machine lacks."""
    card = own_card()
    if "engine" in kind.generator and find_spec("vllm") is None:
        pytest.skip("pip install 'tinkermq[vllm]'")
    if "quantization" in kind.generator and not (card and card.has_fp8):
        pytest.skip("the GPU has no kernels for FP8")


@contextlib.asynccontextmanager
async def started(policy: RandomPolicy, kind: Kind) -> AsyncIterator[Engine]:
    generator = kind.generator | {"dtype": policy.dtype, "max_requests": NUM_REQUESTS}
    engine = await start_engine(policy.config(generator=generator, lora={"rank": kind.lora_rank}))
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
    engine: Engine, prompts: Sequence[IntVector], num_tokens: int, held: Sampling | None = None
) -> list[Generation]:
    """Ask for all answers at once; every fourth is sampled as `held`."""
    free = Sampling(num_tokens)
    return await asyncio.gather(
        *(
            engine.generate(prompt, free if number % 4 else held or free, request_id=str(number))
            for number, prompt in enumerate(prompts)
        )
    )


async def held_to_json(policy: RandomPolicy, num_tokens: int) -> Sampling:
    """Return the sampling of answers that are a list of words in JSON."""
    chat = ChatTokenizer(load_tokenizer(str(policy.folder)))
    schema = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": num_tokens}
    grammar = await OutputGrammars(chat).of(OutputFormat(json_schema=schema), [])
    return Sampling(num_tokens, grammar=grammar, stop_token_ids=chat.stop_token_ids)


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


def assert_only_rounding(differences: torch.Tensor, kind: Kind, *, on_gpu: bool) -> None:
    max_mean, max_single = (kind.max_mean, 15 * kind.max_mean) if on_gpu else (1e-5, 1e-4)
    assert differences.mean() <= max_mean
    assert differences.max() <= max_single


async def test_an_engine_answers_in_full_with_the_log_probs_of_the_learner(
    policy: RandomPolicy,
    kind: Kind,
    on_gpu: bool,
    record: Recorder,
) -> None:
    prompts, num_tokens = random_prompts(), 128 if on_gpu else 24
    loop = asyncio.get_running_loop()
    async with started(policy, kind) as engine:
        begun = loop.time()
        generations = await generate(engine, prompts, num_tokens)
        record(f"{kind.name}: tokens/s", NUM_REQUESTS * num_tokens / (loop.time() - begun))
    assert [len(one.token_ids) for one in generations] == [num_tokens] * NUM_REQUESTS
    expected_N = learner_logprobs(policy.learner(lora_rank=kind.lora_rank), prompts, generations)
    differences_N = (engine_logprobs(generations) - expected_N).abs()
    record(f"{kind.name}: mismatch", float(differences_N.mean()))
    assert_only_rounding(differences_N, kind, on_gpu=on_gpu)


@pytest.mark.parametrize("keep_weights", [True, False], ids=LEVELS.get)
async def test_an_engine_that_sleeps_frees_its_memory_and_goes_on(
    policy: RandomPolicy, kind: Kind, keep_weights: bool, on_gpu: bool, record: Recorder
) -> None:
    prompts, num_tokens = random_prompts(), 384 if on_gpu else 72
    learner = policy.learner(lora_rank=kind.lora_rank)
    weights = learner.weights()
    loop = asyncio.get_running_loop()
    async with started(policy, kind) as engine:
        generating = asyncio.ensure_future(generate(engine, prompts, num_tokens))
        await until_generated(engine, SWAP_AFTER)
        free_awake = free_bytes(on_gpu=on_gpu)
        begun = loop.time()
        await engine.sleep(keep_weights=keep_weights)
        record(f"{kind.name}, {LEVELS[keep_weights]}: to sleep, s", loop.time() - begun)
        freed = free_bytes(on_gpu=on_gpu) - free_awake
        await engine.load_weights(1, with_noise(weights, 1))
        begun = loop.time()
        await engine.wake()
        record(f"{kind.name}, {LEVELS[keep_weights]}: to wake, s", loop.time() - begun)
        generations = await generating
    record(f"{kind.name}, {LEVELS[keep_weights]}: freed, MiB", freed / 2**20)
    assert not on_gpu or freed > 0
    assert [len(one.token_ids) for one in generations] == [num_tokens] * NUM_REQUESTS
    version_N = torch.from_numpy(np.concatenate([one.versions for one in generations]))
    assert set(version_N.tolist()) == {0, 1}
    learner.load(with_noise(weights, 1))
    expected_N = learner_logprobs(learner, prompts, generations)
    differences_N = (engine_logprobs(generations) - expected_N).abs()
    assert_only_rounding(differences_N[version_N == 1], kind, on_gpu=on_gpu)


async def test_running_answers_go_on_with_new_weights(
    policy: RandomPolicy,
    kind: Kind,
    on_gpu: bool,
    record: Recorder,
) -> None:
    """Some of which are held to a grammar."""
    prompts, num_tokens = random_prompts(), 384 if on_gpu else 72
    learner = policy.learner(lora_rank=kind.lora_rank)
    weights = learner.weights()
    versions = [weights, with_noise(weights, 1), with_noise(weights, 2)]
    async with started(policy, kind) as engine:
        held = await held_to_json(policy, num_tokens)
        generating = asyncio.ensure_future(generate(engine, prompts, num_tokens, held))
        for version in (1, 2):
            await until_generated(engine, engine.stats().generated_tokens + SWAP_AFTER)
            await engine.load_weights(version, versions[version], "recompute")
        generations = await generating
        pause_s = engine.stats().last_pause_s
    record(f"{kind.name}: pause, ms", 1e3 * pause_s)
    assert pause_s <= 1
    version_N = torch.from_numpy(np.concatenate([one.versions for one in generations]))
    assert set(version_N.tolist()) == {0, 1, 2}
    for version, version_weights in enumerate(versions):
        learner.load(version_weights)
        expected_N = learner_logprobs(learner, prompts, generations)
        differences_N = (engine_logprobs(generations) - expected_N).abs()
        of_version = differences_N[version_N == version]
        record(f"{kind.name}: mismatch of version {version}", float(of_version.mean()))
        assert_only_rounding(of_version, kind, on_gpu=on_gpu)
