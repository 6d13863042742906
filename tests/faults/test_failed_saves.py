"""What is trained is kept where a checkpoint cannot be written."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.configs import small_job
from tests.support.gate import Gate
from tests.support.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.full]


async def test_a_save_that_fails_keeps_the_weights_and_says_where(
    stack: Stack, model: Path, gate: Gate
) -> None:
    job = await stack.submit(small_job(model, env=gate.env(3)))
    await job.until_event("checkpoint_saved")
    folder = job.run_dir / "checkpoints"
    folder.rename(job.run_dir / "aside")
    folder.write_text("no folder")
    gate.open()
    told = await job.until_event("checkpoint_failed")
    kept = next(job.run_dir.glob("kept_weights_step_*"))
    assert str(kept) in told.message
    assert load_file(kept / "model.safetensors")
    folder.unlink()
    (job.run_dir / "aside").rename(folder)
    await job.until("COMPLETED")
