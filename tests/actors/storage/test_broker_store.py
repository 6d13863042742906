"""Checkpoints in the broker: what was stored comes back, within its bound, and full is told."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tinkermq.actors.storage.checkpoints import CheckpointMirror
from tinkermq.actors.storage.digests import check_digests, write_digests
from tinkermq.actors.storage.stores import BrokerStore
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import create_job_streams, delete_job_streams
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.errors import StorageError, StoreAwayError
from tinkermq.schemas.wire.subjects import JobScope

BIG = os.urandom(3 << 20)


@pytest.fixture
async def mirror(broker: Broker) -> AsyncIterator[CheckpointMirror]:
    scope = JobScope("local", "checkpointed")
    limits = LimitsConfig(checkpoint_bytes=16 << 20)
    await create_job_streams(broker, scope, limits, weights_bytes=1 << 20, checkpoints=True)
    yield CheckpointMirror(BrokerStore(broker, scope), keep_last=2, keep_every=4)
    await delete_job_streams(broker, scope)


def make_checkpoint(folder: Path, content: bytes = BIG) -> Path:
    (folder / "learner").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "learner" / "state.json").write_text("{}")
    (folder / "empty").write_bytes(b"")
    write_digests(folder)
    return folder


async def test_what_was_uploaded_comes_back_and_the_newest_are_kept(
    mirror: CheckpointMirror, tmp_path: Path
) -> None:
    def use() -> None:
        mirror.check()
        for step in range(2, 8):
            mirror.upload(step, make_checkpoint(tmp_path / f"made{step}"))
        assert [one.step for one in mirror.whole()] == [4, 6, 7]
        assert mirror.fetch_newest(tmp_path / "run") == []

    await asyncio.to_thread(use)
    check_digests(tmp_path / "run" / "step_000007", required=True)
    assert (tmp_path / "run" / "step_000007" / "model.safetensors").read_bytes() == BIG
    assert (tmp_path / "run" / "step_000007" / "empty").read_bytes() == b""


async def test_a_bound_that_is_too_small_is_told_and_the_checkpoint_before_stays(
    mirror: CheckpointMirror, tmp_path: Path
) -> None:
    await asyncio.to_thread(mirror.upload, 1, make_checkpoint(tmp_path / "one"))
    two = make_checkpoint(tmp_path / "two", os.urandom(15 << 20))
    with pytest.raises(StoreAwayError, match=r"broker: could not write step_000002") as full:
        await asyncio.to_thread(mirror.upload, 2, two)
    assert full.value.may_pass
    assert "limits.checkpoint_bytes must have room" in full.value.hint
    assert [one.step for one in await asyncio.to_thread(mirror.whole)] == [1]


async def test_a_store_whose_actor_ends_starts_nothing_any_more(
    mirror: CheckpointMirror,
) -> None:
    mirror.store.close()
    with pytest.raises(StorageError, match="was closed"):
        await asyncio.to_thread(mirror.whole)
