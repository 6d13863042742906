"""What a trainer keeps on disk: without room for it, and damaged."""

import asyncio
from pathlib import Path

import pytest
import torch
from tinkermq.actors.tinker import worker
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.tinker.checkpoints import ChangeCheckpoint, TinkerCheckpoint
from tinkermq.schemas.wire.errors import ModelError, NotFoundError, StateError

from tests.support.disks import fill, small_disk
from tests.support.tinker_service import MODEL, SCOPE, Trainer, create, loss, step_body
from tests.support.waiting import PATIENCE_S

torch.set_num_threads(1)


async def test_a_full_disk_ends_no_trainer_and_a_user_makes_room(
    own_server: NatsServer,
    own_broker: Broker,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "SAVE_OPERATIONS", 2)
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    with small_disk(tmp_path / "disk", 8) as disk:
        trainer = Trainer(own_server.url, own_broker, base, disk / "states")

        async def is_told() -> bool:
            assert trainer.task is not None
            assert not trainer.task.done()
            kinds = [event.kind for event in await read_events(own_broker, SCOPE)]
            return "trainer_has_no_room" in kinds

        async with trainer.running():
            await trainer.send("create_model", 0, create())
            await trainer.train(1, 1)
            paths = [f"tinker://{MODEL}/weights/{name}" for name in ("old", "older")]
            for seq, path in enumerate(paths, 3):
                await trainer.weights(seq, path.rpartition("/")[2])
            fill(disk)
            seq = 5
            async with asyncio.timeout(PATIENCE_S):
                while not await is_told():  # a save may have begun before the disk was full
                    await trainer.train(seq, 1)
                    seq += 2
            await trainer.train(seq, 1)
            assert (await trainer.result(seq + 1)).state == "done"
            for path in paths:
                change = ChangeCheckpoint(path=path, action="delete")
                await trainer.ask("ada", "change", change, TinkerCheckpoint)
                with pytest.raises(NotFoundError):
                    await trainer.checkpoint(path)
        assert await trainer.log.read_all() == ([], [])  # all of it is in a state


async def test_what_is_damaged_of_one_user_ends_no_trainer_of_others(trainer: Trainer) -> None:
    async with trainer.running():
        for model in ("s1", "s2"):
            name = f"{model}:train:0"
            await trainer.send("create_model", 0, create(model), model=name)
            await trainer.send("forward_backward", 1, loss(1), model=name)
            await trainer.send("optim_step", 2, step_body(2), model=name)
            assert (await trainer.result(2, model=name)).state == "done"
        for seq, name in ((3, "whole"), (4, "cut")):
            await trainer.weights(seq, name)
    kept = trainer.states.folder / "ada"
    (kept / "s1.train.0" / "weights" / "cut" / "tinker.json").write_bytes(b"")
    (state,) = (kept / "s2.train.0" / "state").iterdir()
    (state / "tinker.json").write_text("null")
    (kept / "s1.train.0.copy" / "weights" / "whole").mkdir(parents=True)
    async with trainer.running():
        await trainer.train(5, 1)
        assert (await trainer.result(6)).state == "done"
        await trainer.checkpoint(f"tinker://{MODEL}/weights/whole")
        with pytest.raises(ModelError, match="weights/cut is damaged"):
            await trainer.checkpoint(f"tinker://{MODEL}/weights/cut")
        with pytest.raises(StateError, match="state/2 is damaged"):
            await trainer.send("optim_step", 3, step_body(3), model="s2:train:0")
    assert state.is_dir()
