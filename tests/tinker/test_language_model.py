"""The cookbook's recipes, unchanged, on SmolLM2: a real vocabulary, chat marks and size."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tinkermq.actors import get_model
from tinkermq.schemas.model_catalogue import catalogue_folder

from tests.tinker.sdks import SdkProgram, lacking
from tests.tinker.service import TinkerService, tinker_service

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(lacking("newest")), reason=lacking("newest")),
]
PATIENCE_S = 600.0
RENDERER = "renderer_name=qwen3_instruct"
"""Writes ChatML, as SmolLM2's template does."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TinkerService]:
    model = catalogue_folder("smollm2")
    if not model.is_dir():
        get_model.get("smollm2", model, "float32")
    async with tinker_service(tmp_path_factory.mktemp("service"), str(model)) as running:
        yield running


def metrics(log: Path, name: str) -> list[float]:
    lines = (log / "metrics.jsonl").read_text().splitlines()
    return [line[name] for line in map(json.loads, lines) if name in line]


async def run(service: TinkerService, recipe: str, log: Path, *words: str) -> None:
    base = str(catalogue_folder("smollm2"))
    program = SdkProgram.start(
        "newest",
        service.gateway.url,
        service.folder,
        "-m",
        f"tinker_cookbook.recipes.{recipe}.train",
        f"model_name={base}",
        f"log_path={log}",
        RENDERER,
        *words,
    )
    await program.done(PATIENCE_S)


async def test_sampler_and_trainer_agree_and_turns_end_where_the_chat_mark_says(
    service: TinkerService,
) -> None:
    log = service.folder / "arithmetic"
    words = (
        "env=arithmetic loss_fn=importance_sampling group_size=8 groups_per_batch=2 max_steps=2 "
        "max_tokens=16 lora_rank=8 learning_rate=1e-4 eval_every=0 save_every=0"
    )
    await run(service, "math_rl", log, *words.split())
    assert len(metrics(log, "env/all/reward/total")) == 2
    assert max(map(abs, metrics(log, "optim/kl_sample_train_v1"))) < 1e-3
    assert all(0 < share <= 1 for share in metrics(log, "env/all/format"))


async def test_conversations_are_learnt(service: TinkerService) -> None:
    log, chats = service.folder / "chats", service.folder / "chats.jsonl"
    asked = {"role": "user", "content": "What is 47 + 38? Reply with the number only."}
    row = {"messages": [asked, {"role": "assistant", "content": "85"}]}
    chats.write_text((json.dumps(row) + "\n") * 16)
    words = "batch_size=4 max_length=128 max_steps=4 learning_rate=1e-3 lora_rank=8"
    await run(service, "chat_sl", log, f"dataset={chats}", *words.split())
    losses = metrics(log, "train_mean_nll")
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2, losses
