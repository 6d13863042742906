"""The way of a learner without a network to its broker, and that there is no other."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.node.forwarding import (
    MAX_CONNECTIONS,
    URL_VARIABLE,
    ClientMessages,
)
from tinkermq.actors.node.sandbox import SandboxedActor, SandboxStarter
from tinkermq.broker.client.keys import JobIdentity, job_key, key_hash, read_job_key
from tinkermq.broker.client.login import CA_VARIABLE, KEY_VARIABLE
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.user_records import UserStore
from tinkermq.schemas.node import WantedActor
from tinkermq.schemas.user import UserRecord
from tinkermq.schemas.wire.errors import LogInRefusedError, TinkermqError

from tests.support.certificates import Certificate, self_signed
from tests.support.secured import environment, secured
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full

TRANSFER = """
import asyncio, json, os
import numpy as np
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.subjects import JobScope

async def main():
    scope = JobScope("ada", "j1")
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
        async with await connect(os.environ["TINKERMQ_NATS_URL"], name="learner", deadline_s=5):
            print(json.dumps("connected"))
    except BrokerError as error:
        print(json.dumps("refused"))

asyncio.run(main())
"""

KEY = job_key(JobIdentity("ada", "j1", "learner", "learner", 1), b"secret")


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


async def sandboxed(
    run_dir: Path, url: str, *command: str, out: int = 1, key: str = KEY
) -> SandboxedActor:
    """Start a program as a learner that runs functions of its owner."""
    await asyncio.to_thread(run_dir.mkdir, exist_ok=True)
    fields = {"user": "ada", "job": "j1", "name": "learner", "role": "learner", "own_code": []}
    wanted = WantedActor.model_validate({**fields, "run_dir": str(run_dir)})
    given = {URL_VARIABLE: url, KEY_VARIABLE: key}
    return await SandboxStarter().start(command, wanted, given, out)


async def said(run_dir: Path, url: str, code: str, *words: str, key: str = KEY) -> Any:
    """Run a program as such a learner and return what it says, as JSON."""
    reading, writing = os.pipe()
    try:
        command = (sys.executable, "-c", code, *words)
        child = await sandboxed(run_dir, url, *command, out=writing, key=key)
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
        assert await said(tmp_path / "run", url, TRANSFER) == [True, "nats://127.0.1.1:4222"]


async def test_one_of_several_servers_is_enough(plain: NatsServer, tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:4,{plain.url.removeprefix('nats://')}"
    same, told = await said(tmp_path / "run", url, TRANSFER)
    assert (same, told) == (True, "nats://127.0.1.1:4222,nats://127.0.1.2:4222")


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
    reaches(socket.AF_INET, ("127.0.1.1", broker)),
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
        own = socket.gethostbyname(socket.gethostname())
        words = (str(port), abstract, "4222", own)
        reached = await said(tmp_path / "run", plain.url, LOOK, *words)
    assert reached == [True, False, False, False, False, ["lo"]]


FLOOD = """
import json, socket, sys
ends, held = 0, []
for _ in range(int(sys.argv[1])):
    one = socket.create_connection(("127.0.1.1", 4222))
    one.settimeout(120)
    held.append(one)
for one in held:
    try:
        ends += not one.recv(1)
    except ConnectionError:
        ends += 1
print(json.dumps(ends))
"""


async def test_connections_of_one_learner_are_bounded(plain: NatsServer, tmp_path: Path) -> None:
    ended = await said(tmp_path / "run", plain.url, FLOOD, str(MAX_CONNECTIONS + 9))
    assert ended == 9


async def test_connections_end_with_the_learner(plain: NatsServer, tmp_path: Path) -> None:
    code = """
import socket, time
one = socket.create_connection(("127.0.1.1", 4222))
one.recv(1)
"""
    before = len(asyncio.all_tasks())
    child = await sandboxed(tmp_path / "run", plain.url, sys.executable, "-c", code)
    assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 0
    assert len(asyncio.all_tasks()) == before


INBOX = b"_INBOX_job.ada.j1.learner.x"


def test_what_a_learner_sends_is_passed_on_however_it_is_cut() -> None:
    sent = (
        b"SUB " + INBOX + b".* 1\r\nPING\r\n"
        b"PUB a " + INBOX + b" 11\r\nPUB b c 3\r\n\r\n"
        b"hpub a 12 14\r\nNATS/1.0\r\n\r\nhi\r\nPUB a 0\r\n\r\nPONG\r\n"
    )
    expected = sent.replace(b"hpub", b"HPUB")
    for size in (1, 2, 7, len(sent)):
        client = ClientMessages(KEY)
        parts = (sent[at : at + size] for at in range(0, len(sent), size))
        assert b"".join(map(client.pass_on, parts)) == expected


def test_a_learner_is_logged_in_as_itself_whoever_it_says_it_is() -> None:
    said = (
        'CONNECT {"verbose":false,"user":"root","pass":"x","jwt":"y","sig":"z","USER":"root",'
        '"Pass":"x","u\u017fer":"root","pas\u017f":"x","N\u212aey":"k"}\r\n'
    ).encode()
    verb, _, options = ClientMessages(KEY).pass_on(said).partition(b" ")
    assert verb == b"CONNECT"
    assert json.loads(options) == {"verbose": False, "user": "job", "pass": KEY}


@pytest.mark.parametrize(
    "sent",
    [
        b"PUB $JS.API.DIRECT.GET.s $KV.tmq-users.user.evil 0\r\n",
        b"pub\ta\t_INBOX_job.ada.j1.learner 0\r\n",
        b"HPUB a _INBOX_root.x 12 12\r\n",
        b"PUB a b c 0\r\n",
        b"PUB 0\r\n",
        b"PUB a -1\r\n",
        b"PUB a x 1\n",
        b"RPUB a b 0\r\n",
        b"CONNECT\r\n",
        b"CONNECT []]\r\n",
        b'CONNECT "ab"\r\n',
        b"\r\n",
        b"x" * 5000,
    ],
)
def test_a_learner_has_answers_sent_nowhere_else(sent: bytes) -> None:
    with pytest.raises((TinkermqError, TypeError, ValueError)):
        ClientMessages(KEY).pass_on(sent)


ESCALATE = """
import asyncio, json, os, sys
from tinkermq.broker.client.connection import connect
from tinkermq.schemas.wire.subjects import JobScope

async def main():
    scope = JobScope("mallory", "01mine")
    async with await connect(os.environ["TINKERMQ_NATS_URL"], name="learner") as broker:
        record = bytes.fromhex(sys.argv[1])
        await broker.request(scope.rollout(5), record)
        stored = f"$JS.API.DIRECT.GET.{scope.stream_rollout}.{scope.rollout(5)}"
        answer = await broker.request(stored)
        await broker.nc.publish(stored, b"", reply="$KV.tmq-users.user.evil")
        while broker.is_connected:
            await asyncio.sleep(0.01)
        print(json.dumps([answer.data == record, os.environ.get("TINKERMQ_API_KEY", "")]))

asyncio.run(main())
"""


async def test_functions_of_a_user_do_not_make_themselves_admins(tmp_path: Path) -> None:
    async with secured(tmp_path / "pool") as pool:
        await pool.user("mallory")
        await pool.job("mallory", "01mine")
        evil = f"tmq_evil_{'a' * 43}"
        record = UserRecord(user="evil", role="admin", key_hash=key_hash(evil), created=1.0)
        identity = JobIdentity("mallory", "01mine", "learner", "learner", 1)
        key = job_key(identity, pool.secrets.job_secret())
        code, words = ESCALATE, record.to_bytes().hex()
        reads, shown = await said(tmp_path / "run", pool.server.url, code, words, key=key)
        assert reads
        assert read_job_key(shown) == identity
        with pytest.raises(LogInRefusedError):
            await pool.connected(shown)
        users = await UserStore(await pool.service("auth")).list()
        assert sorted(user.user for user in users) == ["mallory", "root"]


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
        same, _ = await said(tmp_path / "run", server.url, TRANSFER)
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
