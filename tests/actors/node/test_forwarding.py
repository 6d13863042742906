"""The way of a learner without a network to its broker, and that there is no other."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tinkermq.actors.node.forwarding import MAX_CONNECTIONS, URL_VARIABLE, Forwarder
from tinkermq.actors.node.sandbox import SandboxedActor, SandboxStarter
from tinkermq.broker.client.login import CA_VARIABLE, CERTIFICATE_HOSTS_VARIABLE
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.node import WantedActor

from tests.support.certificates import Certificate, self_signed
from tests.support.secured import environment
from tests.support.waiting import PATIENCE_S

TRANSFER = """
import asyncio, json, os
import numpy as np
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.weights.store import TensorBytes, WeightStore
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.subjects import JobScope

async def main():
    scope = JobScope("local", "j")
    async with await connect(os.environ["TINKERMQ_NATS_URL"], name="learner") as broker:
        await create_job_streams(broker, scope, LimitsConfig())
        data = np.arange(4_000_000, dtype=np.float32)
        store = WeightStore(broker, scope)
        manifest = await store.publish(1, {"w": TensorBytes("float32", data.shape, data.data)})
        fetched = await store.fetch(manifest)
        same = bytes(fetched["w"].data) == data.tobytes()
        print(json.dumps([same, os.environ["TINKERMQ_NATS_URL"]]))

asyncio.run(main())
"""

CONNECT = """
import asyncio, json, os
from tinkermq.broker.client.connection import connect
from tinkermq.schemas.wire.errors import BrokerError

async def main():
    try:
        async with await connect(os.environ["TINKERMQ_NATS_URL"], name="learner", deadline_s=20):
            print(json.dumps("connected"))
    except BrokerError as error:
        assert "certificate" in str(error), error
        print(json.dumps("refused"))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate for this machine."""
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def encrypted(
    certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NatsServer]:
    """A broker that demands TLS."""
    with NatsServer(tmp_path_factory.mktemp("nats"), tls=certificate) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A broker without TLS."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


async def sandboxed(run_dir: Path, url: str, *command: str, out: int = 1) -> SandboxedActor:
    """Start a program as a learner that runs functions of its owner."""
    await asyncio.to_thread(run_dir.mkdir, exist_ok=True)
    fields = {"user": "ada", "job": "j1", "name": "learner", "role": "learner", "own_code": []}
    wanted = WantedActor.model_validate({**fields, "run_dir": str(run_dir)})
    return await SandboxStarter().start(command, wanted, {URL_VARIABLE: url}, out)


async def said(run_dir: Path, url: str, code: str, *words: str) -> object:
    """Run a program as such a learner and return what it says, as JSON."""
    reading, writing = os.pipe()
    try:
        child = await sandboxed(run_dir, url, sys.executable, "-c", code, *words, out=writing)
    finally:
        os.close(writing)
    with os.fdopen(reading) as told:
        text = await asyncio.wait_for(asyncio.to_thread(told.read), PATIENCE_S)
    assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 0, text
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_weights_travel_encrypted_and_the_certificate_is_checked(
    encrypted: NatsServer, certificate: Certificate, tmp_path: Path, host: str
) -> None:
    url = encrypted.url.replace("127.0.0.1", host)
    with environment(**{CA_VARIABLE: str(certificate.certificate)}):
        assert await said(tmp_path / "run", url, TRANSFER) == [True, url]


async def test_one_of_several_servers_is_enough(plain: NatsServer, tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:4,{plain.url.removeprefix('nats://')}"
    same, told = await said(tmp_path / "run", url, TRANSFER)  # type: ignore[misc]
    assert (same, told) == (True, f"nats://127.0.0.1:4222,nats://{plain.url[7:]}")


LOOK = """
import json, socket, sys
def reaches(family, address):
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.settimeout(5)
            one.connect(address)
    except OSError:
        return False
    return True
port, abstract, broker, own = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
print(json.dumps([
    reaches(socket.AF_INET, ("127.0.0.1", broker)),
    reaches(socket.AF_INET, ("127.0.0.1", port)),
    reaches(socket.AF_INET, (own, port)),
    reaches(socket.AF_INET6, ("::1", port)),
    reaches(socket.AF_UNIX, chr(0) + abstract),
    [one[1] for one in socket.if_nameindex()],
]))
"""


async def test_it_reaches_its_broker_and_nothing_else_of_the_machine(
    plain: NatsServer, tmp_path: Path
) -> None:
    abstract = f"tinkermq-test-{os.getpid()}"
    with socket.socket() as other, socket.socket(socket.AF_UNIX) as unix:
        other.bind(("0.0.0.0", 0))
        other.listen()
        unix.bind(f"\0{abstract}")
        unix.listen()
        port = other.getsockname()[1]
        broker = plain.url.rpartition(":")[2]
        own = socket.gethostbyname(socket.gethostname())
        words = (str(port), abstract, broker, own)
        reached = await said(tmp_path / "run", plain.url, LOOK, *words)
    assert reached == [True, False, False, False, False, ["lo"]]


FLOOD = """
import json, socket, sys
ends, held = 0, []
for _ in range(int(sys.argv[2])):
    one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    one.settimeout(10)
    held.append(one)
for one in held:
    try:
        ends += not one.recv(1)
    except ConnectionError:
        ends += 1
print(json.dumps(ends))
"""


async def test_connections_of_one_learner_are_bounded(plain: NatsServer, tmp_path: Path) -> None:
    port = plain.url.rpartition(":")[2]
    ended = await said(tmp_path / "run", plain.url, FLOOD, port, str(MAX_CONNECTIONS + 9))
    assert ended == 9


async def test_connections_end_with_the_learner(plain: NatsServer, tmp_path: Path) -> None:
    code = f"""
import socket, time
one = socket.create_connection(("127.0.0.1", {plain.url.rpartition(":")[2]}))
one.recv(1)
"""
    before = len(asyncio.all_tasks())
    child = await sandboxed(tmp_path / "run", plain.url, sys.executable, "-c", code)
    assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 0
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize(
    ("url", "within", "hosts"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222", []),
        ("nats://[::1]:4222", "nats://[::1]:4222", []),
        ("nats://localhost:5000", "nats://localhost:5000", []),
        ("tls://broker.lan:4222", "tls://broker.lan:4222", ["127.0.1.1 broker.lan"]),
        ("tls://broker.lan:443", "tls://broker.lan:4222", ["127.0.1.1 broker.lan"]),
        ("tls://broker.lan", "tls://broker.lan:4222", ["127.0.1.1 broker.lan"]),
        ("nats://10.0.0.7:4222", "nats://127.0.1.1:4222", []),
        ("nats://[2001:db8::7]:4222", "nats://127.0.1.1:4222", []),
        (
            "tls://a.lan:4222,b.lan:4222",
            "tls://a.lan:4222,tls://b.lan:4222",
            ["127.0.1.1 a.lan", "127.0.1.2 b.lan"],
        ),
        ("nats://a.lan:1,a.lan:5001", "nats://a.lan:4222,nats://a.lan:5001", ["127.0.1.1 a.lan"]),
        ("nats://me:secret@a.lan:4222", "nats://me:secret@a.lan:4222", ["127.0.1.1 a.lan"]),
        ("tls://10.0.0.7:4222", "tls://127.0.1.1:4222", []),
    ],
)
async def test_servers_keep_the_names_that_certificates_are_for(
    url: str, within: str, hosts: list[str]
) -> None:
    forwarder = Forwarder(url)
    try:
        assert forwarder.environment()[URL_VARIABLE] == within
        assert [line for line in forwarder.hosts.splitlines() if "127.0.1" in line] == hosts
    finally:
        await forwarder.close()


@pytest.mark.parametrize(
    ("url", "certificate_hosts"),
    [
        ("tls://10.0.0.7:4222", "127.0.1.1=10.0.0.7"),
        ("tls://a.lan:4222,[2001:db8::7]:4222", "127.0.1.2=2001:db8::7"),
        ("tls://a.lan:4222,127.0.0.1:4222", None),
    ],
)
async def test_the_learner_is_told_the_address_that_a_certificate_is_for(
    url: str, certificate_hosts: str | None
) -> None:
    forwarder = Forwarder(url)
    try:
        assert forwarder.environment().get(CERTIFICATE_HOSTS_VARIABLE) == certificate_hosts
    finally:
        await forwarder.close()


def own_address() -> str:
    """Return an address of this machine that others reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but the loopback one")
        return one.getsockname()[0]


async def test_weights_travel_to_an_address_that_the_certificate_is_for(tmp_path: Path) -> None:
    address = own_address()
    with broker_at(address, tmp_path, [f"IP:{address}"]) as server:
        same, _ = await said(tmp_path / "run", server.url, TRANSFER)  # type: ignore[misc]
    assert same


async def test_a_certificate_for_another_address_is_refused(tmp_path: Path) -> None:
    with broker_at(own_address(), tmp_path, ["IP:192.0.2.77", "IP:127.0.1.1"]) as server:
        assert await said(tmp_path / "run", server.url, CONNECT) == "refused"


@contextmanager
def broker_at(address: str, folder: Path, names: list[str]) -> Iterator[NatsServer]:
    """Run a broker that demands TLS with a certificate for these names, which the node trusts."""
    (folder / "tls").mkdir()
    certificate = self_signed(folder / "tls", names)
    with (
        NatsServer(folder / "nats", host=address, tls=certificate) as server,
        environment(**{CA_VARIABLE: str(certificate.certificate)}),
    ):
        yield server
