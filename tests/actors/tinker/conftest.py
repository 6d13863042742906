"""Fixtures: a tiny base model, and a trainer on it at a broker of the test's own."""

from pathlib import Path

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig

from tests.support.models import make_tiny_model
from tests.support.tinker_service import SCOPE, Trainer


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, which no test changes."""
    return make_tiny_model(tmp_path_factory.mktemp("tinker") / "base")


@pytest.fixture
async def trainer(
    own_server: NatsServer, own_broker: Broker, base: Path, tmp_path: Path
) -> Trainer:
    """A trainer's service, not yet started."""
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    return Trainer(own_server.url, own_broker, base, tmp_path / "states")
