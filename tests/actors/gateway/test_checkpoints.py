"""Checkpoints are listed and packed; nothing beside them is."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.gateway.data.jobs import check_here, list_checkpoints, pack
from tinkermq.actors.storage.checkpoints import CheckpointMirror
from tinkermq.actors.storage.digests import write_digests
from tinkermq.actors.storage.stores import Stores
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.wire.errors import NotFoundError

from tests.actors.gateway.test_records import record


@pytest.fixture
def run(tmp_path: Path) -> Any:
    folder = tmp_path
    for step in (3, 12):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
        (folder / "learner").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
        (folder / "learner" / "state.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "run" / "checkpoints" / "latest").symlink_to(folder)
    (tmp_path / "run" / "checkpoints" / "step_000099").symlink_to(tmp_path)
    return record(1, run_dir=str(tmp_path / "run"))


@pytest.fixture
async def stores(broker: Broker) -> Stores:
    return Stores(broker)


async def test_checkpoints_are_listed_newest_first_links_left_out(run: Any, stores: Stores) -> None:
    found = list_checkpoints(run, stores)
    assert [one["step"] for one in found] == [12, 3]
    assert found[0]["files"] == ["model.safetensors", "learner/state.json"]
    assert found[0]["bytes"] == 256 * 5000 + 2


async def test_a_checkpoint_is_packed_as_an_ordinary_tar_archive(run: Any, stores: Stores) -> None:
    check_here(run, 12, stores)
    packed = b"".join(pack(run.run_dir, 12, "run-12"))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = archive.getnames()
        weights = archive.extractfile("run-12/model.safetensors")
        assert weights is not None
        assert weights.read() == bytes(range(256)) * 5000
    assert names == ["run-12/model.safetensors", "run-12/learner/state.json"]


@pytest.mark.parametrize("step", [7, 99])
async def test_a_checkpoint_that_is_not_there_is_named(run: Any, step: int, stores: Stores) -> None:
    with pytest.raises(NotFoundError, match=f"step {step}"):
        check_here(run, step, stores)


async def test_linked_folders_of_others_are_no_checkpoints_of_a_run(
    run: Any, tmp_path: Path, stores: Stores
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "checkpoints").symlink_to(Path(run.run_dir) / "checkpoints")
    linked = record(2, run_dir=str(mine))
    assert list_checkpoints(linked, stores) == []
    with pytest.raises(NotFoundError, match="step 12"):
        check_here(linked, 12, stores)
    with pytest.raises(NotADirectoryError):
        list(pack(str(mine), 12, "run-12"))


async def test_a_run_with_a_store_lists_what_is_there(tmp_path: Path, stores: Stores) -> None:
    url = f"file://{tmp_path}/store"
    run = record(1, config={"storage": {"url": url}})
    mirror = CheckpointMirror.of_run(url, run.scope, keep_last=1, keep_every=0)
    made = tmp_path / "made"
    (made / "learner").mkdir(parents=True)
    (made / "learner" / "state.json").write_text("{}")
    write_digests(made)
    mirror.upload(8, made)
    (one,) = list_checkpoints(run, stores)
    assert (one["step"], one["files"]) == (8, ["SHA256SUMS", "learner/state.json"])
    assert one["path"].startswith(f"{mirror.store.url}/step_000008-")
    with pytest.raises(NotFoundError, match=f"of step 8 .* is in its store: {url}"):
        check_here(run, 8, stores)
    with pytest.raises(NotFoundError, match="step 7"):
        check_here(run, 7, stores)


async def test_a_run_without_folder_has_no_checkpoints(stores: Stores) -> None:
    assert list_checkpoints(record(1), stores) == []
    assert list_checkpoints(record(1, run_dir="/nonexistent"), stores) == []
