"""Adapters that are served beside each other: what each says, and that the base is there once."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tinkermq.actors.engine.engine import Engine, Sampling
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.model_folder import load_causal_lm, load_policy
from tinkermq.actors.policy.policies import config_of_checkpoint
from tinkermq.actors.rollout.players import start_engine
from tinkermq.actors.server.server import served_step, start_engines
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.errors import ModelError

from tests.support.models import make_tiny_model, plain_logprobs

PROMPT = np.arange(40, 52, dtype=np.int32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("served") / "base")


def adapter(base: Path, folder: Path, seed: int, **lora: Any) -> str:
    """Write a checkpoint's folder with an adapter that changes something."""
    torch.manual_seed(seed)
    model = load_policy(str(base), LoraConfig(**{"rank": 4, **lora}), dtype=torch.float32)
    with torch.no_grad():
        for tensor in policy_tensors(model).values():
            tensor.normal_(std=0.1)
    model.save_pretrained(folder)
    return str(folder)


def config_of(model: str | Path) -> JobConfig:
    lengths = {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 16}
    return JobConfig.model_validate(
        {
            "model": {"path": str(model)},
            "env": {"game": "", "hosts": 0, "num_val": 0},
            "rollout": lengths,
            "generator": {"max_requests": 4},
        }
    )


def record(**fields: Any) -> JobRecord:
    plain = {"job": "j", "name": "serves", "user": "ada", "kind": "infer", "state": "RUNNING"}
    return JobRecord.model_validate({**plain, "config": {}, "created": 0.0, **fields})


async def say(engine: Engine) -> tuple[list[int], list[float], int]:
    """Generate once, end the engine; return tokens, log-probs and the version."""
    made = await engine.generate(PROMPT, Sampling(max_new_tokens=12, seed=1), request_id="r")
    return made.token_ids.tolist(), made.logprobs.tolist(), int(made.versions[0])


async def said(engines: dict[str, Engine]) -> dict[str, tuple[list[int], list[float], int]]:
    """Ask all engines at once, then end them."""
    try:
        answers = await asyncio.gather(*(say(engine) for engine in engines.values()))
    finally:
        for engine in engines.values():
            await engine.close()
    return dict(zip(engines, answers, strict=True))


async def test_base_and_adapters_served_together_say_what_each_says_alone(
    base: Path, tmp_path: Path
) -> None:
    adapters = {
        "a@3": adapter(base, tmp_path / "a", 1),
        "b@7": adapter(base, tmp_path / "b", 2, rank=8, alpha=4, targets=["q_proj", "v_proj"]),
    }
    together = await said(await start_engines(record(adapters=adapters), config_of(base)))
    alone = {"": (await said({"": await start_engine(config_of(base))}))[""]}
    for name, folder in adapters.items():
        served = record(fork_of=name, serves=name, fork_dir=folder)
        config = config_of_checkpoint(served, config_of("the job's own model"))
        engines = await start_engines(served, config)
        assert list(engines) == [""]
        assert served_step(served) == int(name[-1])
        alone[name] = (await said(engines))[""]
    assert together == alone
    assert len({tuple(tokens) for tokens, _, _ in together.values()}) == 3
    for name, folder in adapters.items():
        tokens, logprobs, version = together[name]
        assert version == int(name[-1])
        plain = load_causal_lm(str(base), dtype=torch.float32)
        peft: Any = PeftModel.from_pretrained(plain, folder)
        expected = plain_logprobs(peft, PROMPT, np.array(tokens))
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    first_is_one = record(fork_of="a@3", serves="a@3", fork_dir=adapters["a@3"], adapters=adapters)
    config = config_of_checkpoint(first_is_one, config_of(base))
    again = await said(await start_engines(first_is_one, config))
    assert again == {"": together["a@3"], "a@3": together["a@3"], "b@7": together["b@7"]}


def test_adapters_of_one_base_share_its_memory(base: Path) -> None:
    plain = load_causal_lm(str(base), dtype=torch.float32)
    shared = {tensor.data_ptr() for tensor in plain.parameters()}
    lora = LoraConfig(rank=4)
    for _ in range(2):
        model = load_policy(str(base), lora, base=plain, dtype=torch.float32)
        own = {name for name, one in model.named_parameters() if one.data_ptr() not in shared}
        assert own
        assert all(".lora_" in name for name in own)


async def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other")
    stray = record(adapters={"a@3": adapter(other, tmp_path / "a", 1)})
    with pytest.raises(ModelError, match=r"adapter a@3 belongs to .*other, what is served to"):
        await start_engines(stray, config_of(base))
