"""What samplers draw with: found on the trainer's disk or fetched, and newer as it is saved."""

import json
from pathlib import Path

import pytest
import torch
from tinkermq.actors.tinker.sampling.engines import Snapshots
from tinkermq.actors.tinker.user_records import SnapshotEndpoints, mark_of
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.config.sections import ADAPTER_FILES
from tinkermq.schemas.tinker.sampling import SamplerName
from tinkermq.schemas.wire.errors import NobodyAnswersError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.models import make_tiny_model
from tests.support.tinker_service import MODEL, SCOPE, Trainer, create, step_body

torch.set_num_threads(1)


@pytest.fixture
async def trainer(own_server: NatsServer, own_broker: Broker, tmp_path: Path) -> Trainer:
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    base = make_tiny_model(tmp_path / "base")
    return Trainer(own_server.url, own_broker, base, tmp_path / "states")


async def save(trainer: Trainer, seq: int, kind: str, **more: object) -> SamplerName:
    """Save weights without a name; return what is sampled from."""
    body = {"model_id": MODEL, "seq_id": seq, "sampling_session_seq_id": seq, "kind": kind, **more}
    await trainer.send("save_weights_for_sampler", seq, body)
    result = await trainer.result(seq)
    assert result.state == "done", result.error
    return SamplerName.parse(json.loads(result.body)["sampling_session_id"])


async def test_a_sampler_finds_what_is_saved_wherever_the_disk_is(
    trainer: Trainer, tmp_path: Path
) -> None:
    states, elsewhere = tmp_path / "states", JobScope("local", "elsewhere")
    here = Snapshots(trainer.broker, SCOPE, states)
    away = Snapshots(trainer.broker, elsewhere, tmp_path / "nothing")
    (tmp_path / "nothing").mkdir()
    async with (
        trainer.running(),
        await Service.start(trainer.broker, name="parts", description="parts") as service,
    ):
        await trainer.send("create_model", 0, create())
        fixed = await save(trainer, 1, "snapshot")
        moves = await save(trainer, 2, "inflight")
        await SnapshotEndpoints(states, part_bytes=1000).open(service, elsewhere)
        assert (fixed.moves, moves.moves) == (False, True)
        for source, seq in ((fixed, 1), (moves, 2)):
            local, remote = await here.find("ada", source), await away.find("ada", source)
            assert (local.name, local.version) == (remote.name, remote.version)
            assert local.version == seq
            assert local.folder is not None
            assert remote.folder is None
            fetched = await away.fetch(remote)
            for file in ADAPTER_FILES:
                assert (fetched / file).read_bytes() == (local.folder / file).read_bytes()
            away.free(remote)
            assert not fetched.exists()
        assert (here.is_here, away.is_here) == (True, False)
        await trainer.send("optim_step", 3, step_body(3))
        await save(trainer, 4, "inflight")
        assert await versions(here, away, moves) == (4, 4)
        assert await versions(here, away, fixed) == (1, 1)
        for one in (here, away):
            with pytest.raises(NotFoundError):
                await one.find("bob", fixed)
            with pytest.raises(NotFoundError):
                await one.find("bob", moves)
        await refused_with_a_name(trainer)
    away.close()


async def versions(here: Snapshots, away: Snapshots, source: SamplerName) -> tuple[int, int]:
    """Return which operations have saved what is found."""
    return (await here.find("ada", source)).version, (await away.find("ada", source)).version


async def refused_with_a_name(trainer: Trainer) -> None:
    """Weights with a name stay what they are."""
    body = {"model_id": MODEL, "seq_id": 5, "path": "named", "kind": "inflight"}
    await trainer.send("save_weights_for_sampler", 5, body)
    result = await trainer.result(5)
    assert (result.state, result.category) == ("failed", "user")
    assert "kind='inflight' is not offered for weights with a name" in result.error


@pytest.mark.long
async def test_without_a_trainer_nothing_is_guessed(own_broker: Broker, tmp_path: Path) -> None:
    snapshots = Snapshots(own_broker, SCOPE, tmp_path)
    source = SamplerName("s1", 0, f"tinker://{MODEL}/sampler_weights/passing-1")
    with pytest.raises(NobodyAnswersError):
        await snapshots.find("ada", source)
    assert mark_of(tmp_path) == ""
