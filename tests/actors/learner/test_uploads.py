"""A learner's checkpoints on their way to a store that is away, or from a disk without room."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tinkermq.actors.learner import saving
from tinkermq.actors.learner.saving import Uploads
from tinkermq.actors.runtime import JobContext
from tinkermq.actors.storage.cache import fetch_model
from tinkermq.actors.storage.checkpoints import CheckpointMirror
from tinkermq.actors.storage.files import write_digests
from tinkermq.actors.storage.run_folders import checkpoint_name
from tinkermq.actors.storage.stores import UrlStore
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.contexts import job_context
from tests.support.disks import fill, small_disk
from tests.support.waiting import PATIENCE_S, eventually


async def _nothing() -> None:
    pass


@contextlib.asynccontextmanager
async def _uploading(context: JobContext, store: Path) -> AsyncIterator[Uploads]:
    mirror = CheckpointMirror(UrlStore(f"file://{store}", tries=1), keep_last=1, keep_every=2)
    uploads = Uploads(context, mirror, _nothing)
    await uploads.begin({})
    task = asyncio.create_task(uploads.upload_all())
    yield uploads
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def context(broker: Broker, scope: JobScope, tmp_path: Path) -> JobContext:
    config = JobConfig.model_validate({"model": {"path": "m"}, "env": {"game": "bandit"}})
    made = await job_context(broker, scope, "learner", config)
    made.record = made.record.model_copy(update={"run_dir": str(tmp_path / "run")})
    return made


def _make(run: Path, step: int, base: str = "b") -> Path:
    folder = run / "checkpoints" / checkpoint_name(step)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    write_digests(folder)
    return folder


async def test_what_is_kept_for_good_comes_into_a_store_that_was_away(
    context: JobContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_PAUSE_S", 0.01)
    store = tmp_path / "store"

    async def is_away() -> bool:
        return uploads.trouble is not None

    async with _uploading(context, store) as uploads:
        store.rmdir()
        store.touch()
        for step in range(1, 6):
            await uploads.add_checkpoint(step, step, _make(context.run_dir, step))
            await eventually(is_away, "the store to be missed")
        store.unlink()
        store.mkdir()
        assert await uploads.finished(PATIENCE_S)
    assert {2, 4, 5} <= set(uploads.first_seqs)  # one between may be on its way as it comes back
    names = {path.name.partition("-")[0] for path in store.iterdir()}
    assert names - {checkpoint_name(3)} == {checkpoint_name(step) for step in (2, 4, 5)}
    assert list((context.run_dir / "uploading").iterdir()) == []


async def test_a_checkpoint_waits_for_the_room_that_its_upload_needs(
    context: JobContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKERMQ_CACHE", str(tmp_path / "cache"))
    (tmp_path / "models" / "base").mkdir(parents=True)
    (tmp_path / "models" / "base" / "config.json").write_text("{}")
    base = fetch_model(f"file://{tmp_path}/models/base")  # by which the uploaded adapter names it
    with small_disk(context.run_dir, 1):

        async def is_missed() -> bool:
            return context.misses

        async with _uploading(context, tmp_path / "store") as uploads:
            folder = _make(context.run_dir, 1, base)
            ballast = fill(context.run_dir)
            adding = asyncio.create_task(uploads.add_checkpoint(1, 1, folder))
            await eventually(is_missed, "room to be missed")
            ballast.unlink()
            await adding
            assert await uploads.finished(PATIENCE_S)
    assert uploads.first_seqs == {1: 1}
