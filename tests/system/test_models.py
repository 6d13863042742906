"""Whole runs with models of other kinds of layers than full attention."""

from pathlib import Path

import pytest
from tinkermq.actors.policy.tiny_models import (
    END,
    PAD,
    SPECIAL_TOKENS,
    make_tokenizer,
    save_tiny_model,
)

from tests.support.configs import small_job
from tests.support.families import QUICK, make_model
from tests.support.models import FORGETS_REASONING
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


SOON = ("gemma3_text", "gpt_oss", "qwen3_5_text")
"""Windows, sinks and recurrent layers: the others are as long, and run by `make test-long`."""


@pytest.mark.parametrize(
    "family",
    [
        each if each in SOON else pytest.param(each, marks=pytest.mark.long)
        for each in QUICK
        if each != "recurrent_gemma"  # which the engine refuses
    ],
)
async def test_a_run_of_any_kind_of_layers_is_replayed_to_the_bit(
    stack: Stack, tmp_path: Path, family: str
) -> None:
    model = make_model(family)
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = SPECIAL_TOKENS.index(END)
        settings.pad_token_id = SPECIAL_TOKENS.index(PAD)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    job = await stack.submit(small_job(tmp_path, training={"num_steps": 10}))
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


async def test_a_run_of_several_turns_says_that_it_keeps_reasoning(
    stack: Stack, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", template=FORGETS_REASONING)
    sections = {"env": {"game": "guess"}, "rollout": {"max_turns": 2, "max_turn_tokens": 6}}
    job = await stack.submit(small_job(model, **sections, training={"num_steps": 3}))
    told = await job.until_event("chat_template")
    assert "episodes keep it" in told.message
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
