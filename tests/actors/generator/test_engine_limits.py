"""What an engine refuses, how requests end early, and what happens when it fails."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tinkermq.actors.engine.engine import Engine, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.schemas.wire.errors import ConfigError, EngineError, ModelError

from tests.actors.generator.conftest import StartEngine
from tests.support.images import png
from tests.support.models import random_prompt, until

pytestmark = pytest.mark.asyncio(loop_scope="package")
MAX_SLOTS = 8


async def test_cancel_returns_what_there_is(engine: Engine) -> None:
    prompt = np.arange(10, 20, dtype=np.int32)
    running = [
        asyncio.ensure_future(engine.generate(prompt, Sampling(140), request_id=str(i)))
        for i in range(MAX_SLOTS + 1)
    ]
    await until(lambda: engine.stats().generated_tokens >= 10 * MAX_SLOTS)
    engine.cancel("2")
    engine.cancel("unknown")
    cancelled = await running[2]
    assert cancelled.finish_reason == "cancelled"
    assert 0 < len(cancelled.token_ids) < 140
    results = await asyncio.gather(*running)
    assert [len(r.token_ids) for i, r in enumerate(results) if i != 2] == [140] * MAX_SLOTS


async def test_a_waiting_request_can_be_cancelled(engine: Engine) -> None:
    prompt = np.arange(10, 20, dtype=np.int32)
    running = [
        asyncio.ensure_future(engine.generate(prompt, Sampling(60), request_id=str(i)))
        for i in range(MAX_SLOTS)
    ]
    late = asyncio.ensure_future(engine.generate(prompt, Sampling(60), request_id="late"))
    await asyncio.sleep(0.01)
    engine.cancel("late")
    assert (await late).finish_reason == "cancelled"
    await asyncio.gather(*running)


async def test_a_caller_that_is_cancelled_frees_its_row(engine: Engine) -> None:
    prompt = np.arange(10, 20, dtype=np.int32)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await engine.generate(prompt, Sampling(150), request_id="1")
    await until(lambda: not engine.stats().running)
    assert engine.stats().generated_tokens < 150


async def test_prompts_that_cannot_run_are_refused(engine: Engine) -> None:
    async def refused(prompt: list[int], sampling: Sampling) -> str:
        with pytest.raises(ConfigError) as caught:
            await engine.generate(prompt, sampling, request_id="1")
        return caught.value.message

    assert "100 tokens and up to 61 new ones exceed the engine's 160" in await refused(
        [9] * 100, Sampling(61)
    )
    assert "no tokens" in await refused([], Sampling(1))
    assert "token 264 of a prompt is outside the model's vocabulary of 264" in await refused(
        [1, 264], Sampling(1)
    )
    assert "token -1 " in await refused([1, -1], Sampling(1))
    assert "temperature=-1" in await refused([1], Sampling(1, temperature=-1))
    assert "max_new_tokens=0" in await refused([1], Sampling(0))


async def test_a_model_that_reads_text_alone_says_so(engine: Engine) -> None:
    with pytest.raises(ModelError, match="reads text alone"):
        await engine.generate([9, 10], Sampling(4), request_id="a", images=[png(16, 16)])


async def test_a_full_queue_and_a_repeated_id_are_refused(start: StartEngine, folder: Path) -> None:
    engine = await start(folder, max_waiting=3)
    running = [
        asyncio.ensure_future(engine.generate([9, 10], Sampling(40), request_id=str(i)))
        for i in range(MAX_SLOTS + 3)
    ]
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="queue is full: 11 requests"):
        await engine.generate([9], Sampling(1), request_id="more")
    await asyncio.gather(*running[1:])
    await running[0]
    again = asyncio.ensure_future(engine.generate([9], Sampling(40), request_id="1"))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="request 1 is running already"):
        await engine.generate([9], Sampling(1), request_id="1")
    await again


async def test_a_failure_in_the_engine_fails_every_request(folder: Path) -> None:
    engine = await TransformersEngine.start(str(folder), max_slots=4, max_context=64)
    running = [
        asyncio.ensure_future(engine.generate([9, 10], Sampling(60), request_id=str(i)))
        for i in range(6)
    ]
    await asyncio.sleep(0.01)

    def break_it() -> None:
        raise RuntimeError("out of memory")

    engine._command(break_it)
    results = await asyncio.gather(*running, return_exceptions=True)
    failed = [result for result in results if isinstance(result, EngineError)]
    assert failed
    assert "RuntimeError: out of memory" in failed[0].message
    assert "RuntimeError: out of memory" in str(engine.failure)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate([9], Sampling(1), request_id="later")
    with pytest.raises(EngineError, match="out of memory"):
        await engine.load_weights(1, {})
    await engine.close()


async def test_close_fails_what_still_runs(engine: Engine) -> None:
    running = asyncio.ensure_future(engine.generate([9, 10], Sampling(150), request_id="1"))
    await asyncio.sleep(0.01)
    await engine.close()
    with pytest.raises(EngineError, match="was closed"):
        await running


@pytest.mark.long
async def test_memory_does_not_grow_with_the_number_of_requests(folder: Path) -> None:
    engine = await TransformersEngine.start(str(folder), max_slots=8, max_context=160)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    rng = np.random.default_rng(6)

    async def many(rounds: int) -> None:
        for index in range(rounds):
            await asyncio.gather(
                *(
                    engine.generate(
                        random_prompt(rng, 20),
                        Sampling(2),
                        request_id=str(number),
                        conversation=f"{index}.{number}",
                    )
                    for number in range(50)
                )
            )
            for number in range(50):
                engine.release(f"{index}.{number}")
        await until(lambda: not engine.stats().cached_prefixes)

    await many(10)
    before, cache = resident_bytes(), engine.stats().cache_bytes
    await many(40)
    assert engine.stats().cache_bytes == cache
    assert resident_bytes() - before < 8 << 20
    await engine.close()
