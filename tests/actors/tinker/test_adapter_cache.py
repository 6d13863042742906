"""Adapters out of memory: they come back by themselves, to the same bits."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.tinker.datum import AdamParams, LoraSpec
from tinkermq.schemas.tinker.names import CheckpointName, ModelName
from tinkermq.schemas.tinker.operation import OperationKind
from tinkermq.schemas.wire.errors import DataError, ModelError

from tests.support.models import make_tiny_model
from tests.support.tinker import group, open_trainer, same_bits
from tests.support.tinker_service import SCOPE, Trainer, create, loss

torch.set_num_threads(1)
SESSIONS = [f"s{number}" for number in range(4)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("residence") / "base")


def steps(trainer: AdapterTrainer, file: Path | None) -> None:
    """Train two steps; with a file the model is out of memory between all calls."""
    for seed in range(4):
        trainer.forward_backward("m", group(seed), "ppo")
        if file is not None:
            trainer.suspend("m", file)
            assert trainer.models == []
            trainer.resume("m", file)
        if seed % 2:
            trainer.optim_step("m", AdamParams(0.01))


def test_what_is_written_down_is_pending_gradients_too(base: Path, tmp_path: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for file in (None, tmp_path / "m"):
        trainer = open_trainer(base)
        trainer.create("m", LoraSpec(4, seed=3))
        steps(trainer, file)
        found.append(trainer.tensors("m"))
    assert same_bits(*found)


def test_a_step_behind_a_call_that_failed_fails_after_it_was_written_down(
    base: Path, tmp_path: Path
) -> None:
    trainer = open_trainer(base)
    trainer.create("m", LoraSpec(4))
    with pytest.raises(DataError):
        trainer.forward_backward("m", [], "ppo", operation="operation 1")
    trainer.suspend("m", tmp_path / "m")
    trainer.resume("m", tmp_path / "m")
    with pytest.raises(DataError, match="since operation 1 failed"):
        trainer.optim_step("m", AdamParams(0.01))


def test_a_file_that_is_damaged_is_said_to_be(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        open_trainer(base).resume("m", file)


async def run_sessions(trainer: Trainer) -> dict[str, bytes]:
    """Train all sessions at the same time; return the adapters that they save."""
    await asyncio.gather(*(_run_session(trainer, session) for session in SESSIONS))
    return {session: _saved(trainer, session) for session in SESSIONS}


async def _run_session(trainer: Trainer, session: str) -> None:
    model = f"{session}:train:0"
    kinds: list[OperationKind] = ["forward_backward", "optim_step"] * 2
    await trainer.send("create_model", 0, create(session), model=model)
    for seq, kind in enumerate(kinds, 1):
        body = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.01}}
        raw = loss(seq + ord(session[1])) if kind == "forward_backward" else json.dumps(body)
        await trainer.send(kind, seq, raw if isinstance(raw, bytes) else raw.encode(), model=model)
        assert (await trainer.result(seq, model=model)).state == "done"
    body = {"model_id": model, "seq_id": 5, "path": "end"}
    await trainer.send("save_weights", 5, body, model=model)
    assert (await trainer.result(5, model=model)).state == "done"


def _saved(trainer: Trainer, session: str) -> bytes:
    name = CheckpointName(ModelName(session, 0), "weights", "end")
    return (trainer.states.place_of("ada", name) / "adapter_model.safetensors").read_bytes()


async def test_sessions_on_room_for_fewer_adapters_end_as_those_with_room_for_all(
    own_server: NatsServer, own_broker: Broker, base: Path, tmp_path: Path
) -> None:
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    trainer = Trainer(own_server.url, own_broker, base, tmp_path / "states")
    async with trainer.running() as service:
        undisturbed = await run_sessions(trainer)
        assert service.worker.cache.num_suspended == 0
    trainer.begin_anew()
    for session in SESSIONS:
        await trainer.log.forget("ada", ModelName(session, 0))
    async with trainer.running(adapters_in_memory=2) as service:
        assert await run_sessions(trainer) == undisturbed
        assert service.worker.cache.num_suspended > 0
    async with trainer.running(adapters_in_memory=1):  # what was not in a state is done again
        for session in SESSIONS:
            name = f"{session}:train:0"
            await trainer.send("optim_step", 6, {"model_id": name, "seq_id": 6}, model=name)
            assert (await trainer.result(6, model=name)).category == "user"
    assert "replay_differs" not in {event.kind for event in await read_events(own_broker, SCOPE)}
