"""What is trained is kept where a checkpoint cannot be written."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.configs import small_job
from tests.support.gate import Gate
from tests.support.stack import Stack
from tests.support.waiting import eventually

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
    await job.until_event("checkpoint_failed")

    async def kept_as_told() -> Path | None:  # of each later failure anew
        messages = [event.message for event in await job.events("checkpoint_failed")]
        folders = job.run_dir.glob("kept_weights_step_*")
        return next((one for one in folders if any(str(one) in text for text in messages)), None)

    kept = await eventually(kept_as_told, "the weights that are told of")
    assert load_file(kept / "model.safetensors")
    folder.unlink()
    (job.run_dir / "aside").rename(folder)
    await job.until("COMPLETED")
