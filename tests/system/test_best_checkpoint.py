"""The best checkpoint by validation stays, is named `best`, and is forked under that name."""

from pathlib import Path

import pytest
from tinkermq.actors.storage.run_folders import checkpoint_folders
from tinkermq.broker.feed import best_of, read_scores
from tinkermq.schemas.wire.errors import ConfigError, NotFoundError

from tests.support.configs import small_job
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.long
async def test_the_best_is_kept_and_forked_by_name(stack: Stack, model: Path) -> None:
    training = {"num_steps": 9, "save_freq": 0, "test_freq": 2, "keep_best": True, "keep_last": 1}
    config = small_job(model, env={"num_val": 4}, training=training)
    run = await stack.submit(config)
    await run.until("COMPLETED")
    scores = await read_scores(stack.broker, run.scope)
    assert set(scores) >= {0, 9}
    kept = checkpoint_folders(run.record.run_dir)
    best = best_of(scores, set(scores) - {0})
    assert set(kept) == {9, best}
    assert (run.run_dir / "best").resolve() == kept[best or 0]

    fork = await stack.submit(
        small_job(model, training={"num_steps": 10}), fork_of=f"{run.record.name}@best"
    )
    assert fork.record.fork_of == f"{run.record.name}@{best}"
    await fork.until("COMPLETED")

    with pytest.raises(NotFoundError, match=r"no checkpoint that run .* was validated"):
        await stack.submit(small_job(model), fork_of=f"{fork.record.name}@best")
    with pytest.raises(ConfigError, match="keep_best"):
        await stack.submit(small_job(model, training={"keep_best": True, "test_freq": 0}))
