"""How the tests configure vLLM, and its first start: `python -m tests.support.vllm_start`.

What is slow only once (byte code, imports from a cold disk, what is compiled and kept) is done
here, before tests are timed: every kind of engine that they start is started, asked for a token,
and closed. No start has a time limit of its own; all together have one.
"""

import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LoraConfig

MAX_SLOTS, MAX_CONTEXT = 8, 160
ADAPTER = LoraConfig(rank=4, targets=["q_proj", "v_proj"])
_DEADLINE_S = 1500.0


def configured(folder: Path, **generator: Any) -> JobConfig:
    """Return the configuration of a job whose generators run vLLM."""
    asked = {"compile": False, "kv_cache_mb": 64, "max_requests": MAX_SLOTS, **generator}
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "bandit"},
            "generator": {"engine": "vllm", "max_context": MAX_CONTEXT, **asked},
            "rollout": {
                "max_prompt_tokens": 20,
                "max_turn_tokens": 20,
                "max_response_tokens": 20,
            },
        }
    )


async def _start(what: str, config: JobConfig, adapters: Sequence[LoraConfig] = ()) -> None:
    from tinkermq.actors.engine.engine import Sampling
    from tinkermq.actors.engine.vllm.vllm_engine import start_vllm
    from tinkermq.actors.rollout.players import load_base

    started = time.monotonic()
    print(f"vLLM, {what}: starting", flush=True)
    base = cast("Any", await load_base(config, adapters))
    engine = await start_vllm(config, base=base)
    answer = await engine.generate([9, 10, 11], Sampling(1), request_id="first")
    await engine.close()
    del engine
    gc.collect()  # or vLLM complains of its own end when the interpreter is half gone
    assert len(answer.token_ids) == 1, answer
    print(f"vLLM, {what}: generated after {time.monotonic() - started:.0f} s", flush=True)


async def start_all(folder: Path) -> None:
    """Start each kind of engine of the tests, one after the other."""
    from tests.support.images import make_vision_model
    from tests.support.models import make_tiny_model

    text = make_tiny_model(folder / "text", heads=2)
    await _start("a model of text", configured(text))
    await _start("two workers", configured(text, slots=2, tensor_parallel=2))
    sees = make_vision_model(folder / "sees", head=32)
    await _start("a model that sees images, with an adapter", configured(sees), [ADAPTER])


def main() -> int:
    """Start all; the exit code is 1 when that took longer than anybody would wait."""
    started = time.monotonic()
    print("starting vLLM for the first time here: some minutes, once", flush=True)

    async def bounded(folder: Path) -> None:
        async with asyncio.timeout(_DEADLINE_S):
            await start_all(folder)

    with tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(bounded(Path(folder)))
        except TimeoutError:
            print(f"vLLM did not start within {_DEADLINE_S:.0f} s", file=sys.stderr)
            return 1
    print(f"vLLM starts here; this took {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
