"""Engines: that they generate, agree with the learner, and take new weights in between."""

# torch leaves some of its functions untyped.
# pyright: reportUnknownMemberType=false

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from typing import Literal

import numpy as np
import torch

from ....schemas.config.job import JobConfig
from ...generator.engine.engine import Engine, Generation, IntVector, Sampling
from ...generator.episodes.players import start_engine
from ...learner.packing.micro_batch import TokenSequence
from ..figures import CheckSkipped, Figure, Found, Setting
from ..material import RandomPolicy, ScoringLearner

Kind = Literal["transformers", "vllm"]
_NUM_REQUESTS = 16
_SWAP_AFTER = 4 * _NUM_REQUESTS
"""Tokens of all requests between two swaps."""
_LEAST_S = 20.0


def transformers_generates(setting: Setting) -> Found:
    """Let the transformers engine generate."""
    return asyncio.run(_generates(setting, "transformers"))


def transformers_agrees(setting: Setting) -> Found:
    """Compare its log-probs with the learner's."""
    return asyncio.run(_agrees(setting, "transformers"))


def transformers_swaps(setting: Setting) -> Found:
    """Give it new weights while it generates."""
    return asyncio.run(_swaps(setting, "transformers"))


def vllm_generates(setting: Setting) -> Found:
    """Let vLLM generate."""
    return asyncio.run(_generates(setting, "vllm"))


def vllm_agrees(setting: Setting) -> Found:
    """Compare its log-probs with the learner's."""
    return asyncio.run(_agrees(setting, "vllm"))


def vllm_swaps(setting: Setting) -> Found:
    """Give it new weights while it generates."""
    return asyncio.run(_swaps(setting, "vllm"))


async def _generates(setting: Setting, kind: Kind) -> Found:
    policy, num_tokens = RandomPolicy.make(setting), _num_tokens(setting)
    started = time.perf_counter()
    async with _engine(_config(policy, setting, kind)) as engine:
        begun = time.perf_counter()
        made = await _ask(engine, _prompts(), num_tokens)
        took_s = time.perf_counter() - begun
    complete = sum(len(one.token_ids) == num_tokens for one in made)
    return Found(
        [
            Figure("answers", complete, f"of {_NUM_REQUESTS}", at_least=_NUM_REQUESTS),
            Figure("generated", _NUM_REQUESTS * num_tokens / took_s, "tokens/s"),
            Figure("started in", begun - started, "s"),
        ]
    )


async def _agrees(setting: Setting, kind: Kind) -> Found:
    policy, prompts = RandomPolicy.make(setting), _prompts()
    async with _engine(_config(policy, setting, kind)) as engine:
        made = await _ask(engine, prompts, _num_tokens(setting))
    learner = policy.learner(_dtype(setting))
    apart = _told(made) - learner.logprobs(_sequences(prompts, made))
    return Found(_differences(apart.abs(), setting), {"log-probs compared in": _dtype(setting)})


async def _swaps(setting: Setting, kind: Kind) -> Found:
    policy, prompts = RandomPolicy.make(setting), _prompts()
    learner = policy.learner(_dtype(setting))
    original = {name: each.cpu().clone() for name, each in learner.model.state_dict().items()}
    versions = [original, learner.changed(1), learner.changed(2)]
    async with _engine(_config(policy, setting, kind)) as engine:
        asked = asyncio.ensure_future(_ask(engine, prompts, 3 * _num_tokens(setting)))
        for version, weights in enumerate(versions[1:], 1):
            await _generated(engine, version * _SWAP_AFTER)
            await engine.load_weights(version, weights, "recompute")
        made = await asked
        pause_s = engine.stats().last_pause_s
    seen = np.unique(np.concatenate([one.versions for one in made]))
    apart = _apart_by_version(learner, versions, prompts, made)
    return Found(
        [
            Figure("versions", len(seen), "in running answers", at_least=len(versions)),
            *_differences(apart, setting),
            Figure("generation paused", 1e3 * pause_s, "ms", at_most=1000),
        ]
    )


def _apart_by_version(
    learner: ScoringLearner,
    versions: Sequence[dict[str, torch.Tensor]],
    prompts: Sequence[IntVector],
    made: Sequence[Generation],
) -> torch.Tensor:
    """Return by how much each log-prob differs from that of the version which drew the token."""
    drawn_by_N = torch.from_numpy(np.concatenate([one.versions for one in made]))
    apart_N = torch.zeros(len(drawn_by_N))
    for version, weights in enumerate(versions):
        learner.load(weights)
        expected_N = learner.logprobs(_sequences(prompts, made))
        own_N = drawn_by_N == version
        apart_N[own_N] = (_told(made) - expected_N).abs()[own_N]
    return apart_N


def _differences(apart: torch.Tensor, setting: Setting) -> list[Figure]:
    """Judge differences of log-probs: rounding of the device's dtype, and nothing else."""
    on_average, at_most = (0.02, 0.3) if setting.on_gpu else (1e-5, 1e-4)
    return [
        Figure("log-probs differ by", float(apart.mean()), "on average", at_most=on_average),
        Figure("at most", float(apart.max()), at_most=at_most),
    ]


@contextlib.asynccontextmanager
async def _engine(config: JobConfig) -> AsyncIterator[Engine]:
    engine = await start_engine(config)
    try:
        yield engine
    finally:
        await engine.close()


def _config(policy: RandomPolicy, setting: Setting, kind: Kind) -> JobConfig:
    """Configure an engine. Raises CheckSkipped where it is not installed."""
    generator = {"engine": kind, "dtype": _dtype(setting), "max_requests": _NUM_REQUESTS}
    if kind == "vllm":
        if find_spec("vllm") is None:
            raise CheckSkipped(
                "vLLM is not installed",
                hint="pip install 'tinkermq[vllm]', or use generator.engine=transformers",
            )
        generator |= {"compile": False, "kv_cache_mb": 256}
    return policy.config(generator=generator)


def _dtype(setting: Setting) -> str:
    return "bfloat16" if setting.on_gpu else "float32"


def _num_tokens(setting: Setting) -> int:
    return 128 if setting.on_gpu else 24


def _prompts() -> list[IntVector]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 60, _NUM_REQUESTS)
    return [rng.integers(8, 264, int(length)).astype(np.int32) for length in lengths]


async def _ask(engine: Engine, prompts: Sequence[IntVector], num_tokens: int) -> list[Generation]:
    return await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(num_tokens), request_id=str(at))
            for at, prompt in enumerate(prompts)
        )
    )


async def _generated(engine: Engine, num_tokens: int) -> None:
    """Wait until an engine has generated so many tokens."""
    async with asyncio.timeout(_LEAST_S):
        while engine.stats().generated_tokens < num_tokens:  # noqa: ASYNC110  the engine's thread tells nobody
            await asyncio.sleep(0.001)


def _told(made: Sequence[Generation]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([one.logprobs for one in made]))


def _sequences(prompts: Sequence[IntVector], made: Sequence[Generation]) -> list[TokenSequence]:
    """Return what a learner reads of answers: prompt and generated tokens."""
    return [
        TokenSequence(
            np.concatenate([prompt, one.token_ids]).astype(np.int64),
            np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(one.token_ids)]),
        )
        for prompt, one in zip(prompts, made, strict=True)
    ]
