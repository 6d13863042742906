"""Encrypted connections: checked against an authority, and never without."""

from pathlib import Path

import numpy as np
import pytest
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.login import CA_VARIABLE
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.weights.payloads import TensorBytes
from tinkermq.broker.weights.store import WeightStore
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.errors import BrokerError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.certificates import Certificate, self_signed
from tests.support.models import bytes_of
from tests.support.secured import environment, secured


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate for this machine."""
    return self_signed(tmp_path_factory.mktemp("tls"))


async def test_users_connect_encrypted_and_large_objects_are_read_so(
    tmp_path: Path, certificate: Certificate
) -> None:
    with environment(**{CA_VARIABLE: str(certificate.certificate)}):
        async with secured(tmp_path, tls=certificate) as pool:
            assert pool.server.url.startswith("tls://")
            ada = await pool.user("ada")
            scope = await pool.job("ada", "01tls")
            learner = await pool.process(scope, "learner")
            data = np.arange(1_000_000, dtype=np.float32)
            tensors = {"w": TensorBytes("float32", (1_000_000,), data.data)}
            manifest = await WeightStore(learner, scope).publish(1, tensors)
            fetched = await WeightStore(ada, scope).fetch(manifest)
            assert bytes_of(fetched["w"]) == data.tobytes()


async def test_a_server_of_an_unknown_authority_is_refused(
    tmp_path: Path, certificate: Certificate
) -> None:
    with NatsServer(tmp_path / "nats", tls=certificate) as server:
        with pytest.raises(BrokerError, match=r"(?i)certificate|no NATS server"):
            await connect(server.url, name="test", deadline_s=3)
        with environment(**{CA_VARIABLE: str(certificate.certificate)}):
            async with await connect(server.url, name="test") as broker:
                await create_job_streams(broker, JobScope("local", "j"), LimitsConfig())


async def test_a_key_is_not_sent_in_clear_text_to_a_url_that_demands_encryption(
    tmp_path: Path,
) -> None:
    with NatsServer(tmp_path / "nats") as server:
        url = server.url.replace("nats://", "tls://")
        with pytest.raises(BrokerError, match="does not encrypt"):
            await connect(url, name="test", api_key="tmq_ada_" + "x" * 43, deadline_s=3)


async def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with (
        environment(**{CA_VARIABLE: str(tmp_path / "missing.pem")}),
        pytest.raises(BrokerError, match=r"missing\.pem cannot be read"),
    ):
        await connect("tls://127.0.0.1:1", name="test", deadline_s=3)
