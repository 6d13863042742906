"""Models that begin with a checkpoint: which may be, and that nothing hangs on it afterwards."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tinkermq.actors.storage.tinker_checkpoints import CheckpointFolders
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.tinker.checkpoints import (
    ChangeCheckpoint,
    SessionState,
    TellSession,
    TinkerCheckpoint,
)
from tinkermq.schemas.tinker.names import CheckpointName
from tinkermq.schemas.wire.errors import NotFoundError, QuotaError, SessionOverError

from tests.support.models import make_tiny_model
from tests.support.tinker_service import MODEL, SCOPE, Trainer, create

torch.set_num_threads(1)
OTHER = "s2:train:0"


@pytest.fixture
async def trainer(own_server: NatsServer, own_broker: Broker, tmp_path: Path) -> Trainer:
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    base = await asyncio.to_thread(make_tiny_model, tmp_path / "base")
    return Trainer(own_server.url, own_broker, base, tmp_path / "states")


async def save(trainer: Trainer, seq: int, name: str, model: str = MODEL) -> str:
    await trainer.send(
        "save_weights", seq, {"model_id": model, "seq_id": seq, "path": name}, model=model
    )
    assert (await trainer.result(seq, model=model)).state == "done"
    return f"tinker://{model}/weights/{name}"


async def load(trainer: Trainer, path: str, model: str = OTHER, **more: object) -> str:
    """Let a new model begin with a checkpoint; return why not."""
    session = model.split(":")[0]
    body = {"session_id": session, "model_seq_id": 0, "path": path, **more}
    await trainer.send("load_weights", 0, body, model=model)
    return (await trainer.result(0, model=model)).error


async def test_a_checkpoint_may_go_once_it_was_loaded_whatever_ends_then(trainer: Trainer) -> None:
    """A trainer that begins anew neither loads it again nor saves again what was deleted."""
    async with trainer.running(drains=False):
        await trainer.send("create_model", 0, create())
        path = await save(trainer, 1, "first")
        assert await load(trainer, path, optimizer=True) == ""
        before = await save(trainer, 1, "copied", OTHER)
        for one in (path, before):
            await trainer.ask(
                "ada", "change", ChangeCheckpoint(path=one, action="delete"), TinkerCheckpoint
            )
    async with trainer.running():
        await save(trainer, 2, "again", OTHER)
        for one in (path, before):
            with pytest.raises(NotFoundError, match="was deleted"):
                await trainer.checkpoint(one)
    kinds = {event.kind for event in await read_events(trainer.broker, SCOPE)}
    assert "replay_differs" not in kinds


async def test_what_cannot_be_loaded_is_told_by_the_result(trainer: Trainer) -> None:
    async with trainer.running():
        await trainer.send("create_model", 0, create())
        path = await save(trainer, 1, "first")
        folders = CheckpointFolders(trainer.states.place_of("ada", _name(path)).parents[4])
        words = await load(trainer, path, "s3:train:0", base_model="org/other")
        assert "is an adapter of tiny, not of org/other" in words
        stored = folders.find("ada", _name(path))
        folders.commit(replace(stored, info=stored.info.model_copy(update={"base": "org/other"})))
        assert "is an adapter of org/other, not of tiny" in await load(trainer, path, "s4:train:0")
        folders.commit(replace(stored, expires=5.0))
        assert "has expired: its time was over at 1970-01-01" in await load(trainer, path)
        none = await load(trainer, path.replace("first", "none"), "s5:train:0")
        assert "there is no checkpoint" in none
        with pytest.raises(NotFoundError, match="there is no session s1"):
            await trainer.send("create_model", 0, create("s1"), "bob", "s1:train:1")


async def test_models_of_sessions_that_are_over_make_room(trainer: Trainer) -> None:
    async def tell(session: str, event: str) -> None:
        told = TellSession.model_validate({"session": session, "event": event})
        await trainer.ask("ada", "session", told, SessionState)

    async with trainer.running() as service:
        service.models.most = 2
        for session in ("s1", "s2"):
            await tell(session, "begin")
            await trainer.send("create_model", 0, create(session), model=f"{session}:train:0")
            assert (await trainer.result(0, model=f"{session}:train:0")).state == "done"
        path = await save(trainer, 1, "kept")
        with pytest.raises(QuotaError, match="user 'ada' has 2 models here"):
            await trainer.send("create_model", 0, create("s3"), model="s3:train:0")
        await tell("s1", "finish")
        assert not (await trainer.send("create_model", 0, create("s1"))).is_new  # sent once more
        for model in ("s1:train:0", "s1:train:1"):
            kind, seq = ("optim_step", 2) if model == "s1:train:0" else ("create_model", 0)
            with pytest.raises(SessionOverError, match="session s1 is over: finished") as error:
                await trainer.send(kind, seq, create("s1"), model=model)
            assert (error.value.status, (await trainer.log.read_all())[1]) == (410, [])
        await trainer.send("create_model", 0, create("s3"), model="s3:train:0")
        assert (await trainer.result(0, model="s3:train:0")).state == "done"
        with pytest.raises(NotFoundError, match="there is no model s1:train:0"):
            await trainer.info()
        assert (await trainer.checkpoint(path)).rank == 4
    async with trainer.running():
        with pytest.raises(NotFoundError, match="there is no model s1:train:0"):
            await trainer.info()
        assert (await trainer.result(0, model="s2:train:0")).state == "done"


def _name(path: str) -> CheckpointName:
    return CheckpointName.parse(path)
