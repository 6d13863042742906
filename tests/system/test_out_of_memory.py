"""Runs whose learner is out of memory once: each task is trained once, in smaller passes."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import small_card
from tests.support.configs import small_job
from tests.support.models import make_tiny_model
from tests.support.proofs import assert_every_task_once
from tests.support.stack import Stack

pytestmark = pytest.mark.full

LOSS = {"own_loss": "tests.support.small_card:small_card_loss"}


async def _trained(tmp_path: Path, learner: dict[str, Any]) -> list[int]:
    """Train a run to its end; return the recorded tokens of each step's passes."""
    model = make_tiny_model(tmp_path / "model")
    passes = {"max_row_tokens": 512, "microbatch_tokens": 2048}
    async with Stack(tmp_path, slots=3) as stack:
        config = small_job(model, training={"num_steps": 4, "save_freq": 2}, algorithm=LOSS)
        config["learner"] |= learner | passes
        job = await stack.submit(config)
        await job.until("COMPLETED")
        await assert_every_task_once(job)
        return [record.microbatch_tokens for record in await job.batches()]


@pytest.mark.faults
async def test_a_learner_that_is_out_of_memory_goes_on_in_smaller_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(small_card.MOST_TOKENS, "1")
    monkeypatch.setenv(small_card.FAILED_ONCE, str(tmp_path / "failed"))
    assert await _trained(tmp_path, {}) == [2048, 1024, 1024, 1024]
    assert (tmp_path / "failed").exists()


@pytest.mark.faults
async def test_ranks_of_which_one_is_out_of_memory_start_again_in_smaller_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(small_card.MOST_TOKENS, "1")
    monkeypatch.setenv(small_card.ONLY_RANK, "1")
    monkeypatch.setenv(small_card.FAILED_ONCE, str(tmp_path / "failed"))
    assert await _trained(tmp_path, {"ranks": 2, "slots": 2}) == [2048, 1024, 1024, 1024]
    assert (tmp_path / "failed").exists()
