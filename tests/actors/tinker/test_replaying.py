"""A session that is done again: the same results, the same bits, or what differs is said."""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from tinkermq.actors.tinker.archive import OperationArchive, place_of, read_archived
from tinkermq.actors.tinker.replay import IDENTICAL, main, replay_session
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.tinker.names import ModelName
from tinkermq.schemas.tinker.operation import ModelOperation, OperationResult
from tinkermq.schemas.wire.errors import NotFoundError

from tests.support.models import make_tiny_model
from tests.support.tinker import BASE
from tests.support.tinker_service import END, MODEL, SCOPE, Trainer, create, loss, step_body

torch.set_num_threads(1)
NAME = ModelName("s1", 0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("replaying") / "base")


def record(base: Path, run: Path) -> JobRecord:
    config = {
        "model": {"path": str(base)},
        "env": {"game": "", "hosts": 0, "num_val": 0},
        "tinker": {"base": BASE, "max_rank": 16},
    }
    told = {"job": SCOPE.job, "name": "run", "user": SCOPE.user, "state": "RUNNING", "created": 0.0}
    return JobRecord.model_validate({**told, "config": config, "run_dir": str(run)})


async def test_a_session_that_was_killed_and_loaded_is_done_again_to_the_same_bits(
    own_server: NatsServer,
    own_broker: Broker,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    trainer = Trainer(own_server.url, own_broker, base, tmp_path / "tinker")
    async with trainer.running(drains=False):
        await trainer.send("create_model", 0, create())
        await trainer.train(1, 2)
        await trainer.send("forward_backward", 5, loss(5))
        await trainer.result(5)
    async with trainer.running():  # what is not in a state is done and kept once more
        await trainer.send("optim_step", 6, step_body(6))
        await trainer.weights(7)
        await trainer.send("optim_step", 8, {"adam_params": "none"})
        path = {"model_id": MODEL, "seq_id": 9, "path": f"tinker://{END}/weights/end"}
        await trainer.send("load_weights", 9, {**path, "optimizer": True})
        await trainer.train(10, 1)
        assert (await trainer.result(11)).state == "done"
    [found] = replay_session(record(base, tmp_path), "s1")
    assert (found.identical, found.operations) == (True, 12), found.differing
    assert found.compared == [f"tinker://{END}/weights/end", "the state behind operation 11"]
    await JobStore(own_broker).create(record(base, tmp_path), "test")
    words = ["--nats", own_server.url, "--user", SCOPE.user, "--job", SCOPE.job, "--session", MODEL]
    assert await asyncio.to_thread(main, words) == IDENTICAL
    assert f"{MODEL}: 12 operations" in capsys.readouterr().err
    with pytest.raises(NotFoundError, match="no operations of 's2' were kept"):
        replay_session(record(base, tmp_path), "s2")
    _change_result(tmp_path / "tinker", seq=3)
    [found] = replay_session(record(base, tmp_path), "s1")
    assert found.differing == ["the result of operation 3"]


def _change_result(folder: Path, seq: int) -> None:
    """Let what was kept say that an operation had another result."""
    place = place_of(folder, "ada", NAME)
    kept = [one.operation for one in read_archived(place) if one.operation.seq == seq]
    OperationArchive(folder, max_bytes=1 << 30).add("ada", kept[0], OperationResult(state="done"))


def operation(session: str, seq: int, size: int = 100) -> ModelOperation:
    name = f"{session}:train:0"
    return ModelOperation(kind="optim_step", model=name, seq=seq, body=b"x" * size)


def test_a_segment_that_was_cut_off_keeps_what_is_whole(tmp_path: Path) -> None:
    place = place_of(tmp_path, "ada", NAME)
    first = OperationArchive(tmp_path, max_bytes=1 << 30)
    for seq in range(3):
        first.add("ada", operation("s1", seq), OperationResult(state="done"))
    [segment] = place.iterdir()
    segment.write_bytes(segment.read_bytes()[:-5])
    assert [one.operation.seq for one in read_archived(place)] == [0, 1]
    OperationArchive(tmp_path, max_bytes=1 << 30).add("ada", operation("s1", 2), OperationResult())
    assert [one.operation.seq for one in read_archived(place)] == [0, 1, 2]


def test_what_rests_longest_makes_room(tmp_path: Path) -> None:
    archive = OperationArchive(tmp_path, max_bytes=3000)
    for session in ("s1", "s2", "s3"):
        for seq in range(4):
            archive.add("ada", operation(session, seq, 200), OperationResult())
        for segment in place_of(tmp_path, "ada", ModelName("s1", 0)).glob("*"):
            os.utime(segment, (0, 0))
    kept = [
        len(read_archived(place_of(tmp_path, "ada", ModelName(one, 0)))) for one in ("s1", "s3")
    ]
    assert kept == [0, 4]
    nothing = OperationArchive(tmp_path / "none", max_bytes=0)
    nothing.add("ada", operation("s1", 0), OperationResult())
    assert not (tmp_path / "none").exists()
