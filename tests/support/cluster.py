"""A pool as docs/deploying.md sets it up beyond one machine, each machine a network namespace.

Three nats-servers with deploy/nats/cluster.conf, TLS and users; two schedulers, the auth service
and two nodes, which share the folder of the runs. The test is a user, connected to all servers.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import yaml
from tinkermq.actors.node.sandbox import FOLDERS_VARIABLE
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.streams import stream_info
from tinkermq.broker.jobs import JobStore
from tinkermq.schemas.node import NodeList
from tinkermq.schemas.wire.errors import TinkermqError
from tinkermq.schemas.wire.message import Empty

from tests.support.configs import REPOSITORY
from tests.support.jobs import Job
from tests.support.namespaces import Network
from tests.support.secured import environment
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S, eventually

SERVERS = ("nats-1", "nats-2", "nats-3")
NODES = ("node-1", "node-2")
SLOTS = 2
_MACHINES = (*SERVERS, *NODES, "control", "client")
_CONTROL = {
    "auth-1": "auth",
    "auth-2": "auth",
    "scheduler-1": "scheduler",
    "scheduler-2": "scheduler",
}


class Cluster(Stack):
    """The pool; leave it and all of it has ended."""

    def __init__(self, folder: Path) -> None:
        """Keep everything below `folder`; nothing is started yet."""
        super().__init__(folder)
        self._etc = folder / "pool"
        self._user = ""
        self._network: Network | None = None

    async def __aenter__(self) -> Self:
        self._network = Network()
        try:
            for machine in _MACHINES:
                self._network.add(machine)
            self.games.mkdir(mode=0o755)
            key = self._make_secrets()
            for server in SERVERS:
                self.start_server(server)
            for name, role in _CONTROL.items():
                self._start_service(name, role, "control")
            for name in NODES:
                self._start_service(name, "node", name, "--name", name, "--slots", str(SLOTS))
            await self._enter_as_user(key)
            await self._until_nodes()
        except BaseException as error:
            await self.__aexit__()
            raise AssertionError(f"the cluster does not start: {error!r}\n{self.logs()}") from error
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._broker is not None:
            await self._broker.close()
        for process in self._processes.values():  # the actors die with their nodes
            process.kill()
            process.wait()
        if self._network is not None:
            self._network.close()

    @property
    def games(self) -> Path:
        """A folder that hosted games see, of which they see nothing else."""
        return self.folder / "games"

    @property
    def network(self) -> Network:
        """The machines."""
        assert self._network is not None, "the cluster was not entered"
        return self._network

    @property
    def url(self) -> str:
        """The URL of all servers."""
        return "tls://" + ",".join(f"{self.network.address(one)}:4222" for one in SERVERS)

    # -- processes ---------------------------------------------------------------------------

    def start_server(self, name: str) -> None:
        """Start a nats-server on its own machine, with the files of deploy/."""
        root = self.folder / name
        if not root.exists():
            self._set_up(root)
        routes = [f"nats://{self.network.address(one)}:6222" for one in SERVERS]
        address = self.network.address(name)
        env = {
            **os.environ,
            "NATS_NAME": name,
            "NATS_LISTEN": f"{address}:4222",
            "NATS_CLUSTER_LISTEN": f"{address}:6222",
            "NATS_ROUTES": json.dumps(routes),
        }
        command = [
            str(Path(sys.prefix) / "bin/nats-server"),
            "-c",
            f"{root}/etc/tinkermq/nats.conf",
        ]
        log = self.folder / f"{name}.log"
        self._processes[name] = self.network.start(name, command, log, env)

    def command_of_client(self, *words: str, key: str = "") -> str:
        """Run the command line on the client's machine; return what it prints."""
        done = subprocess.run(
            self.network.on("client", str(Path(sys.prefix) / "bin/tinkermq"), *words),
            env={**self._environment(), "TINKERMQ_API_KEY": key or self._user},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    async def submit_from_client(self, config: dict[str, Any]) -> Job:
        """Submit a job on the client's machine, which shares no connection with the test."""
        file = self.folder / "job.yaml"
        file.write_text(yaml.safe_dump({"output_dir": str(self.folder / "runs"), **config}))
        printed = await asyncio.to_thread(
            self.command_of_client, "train", str(file), "--detach", "--json"
        )
        name = json.loads(printed.splitlines()[-1])["job"]["job"]
        job = Job(self, await JobStore(self.broker).get(self.broker.user, name))
        self.jobs.append(job)
        return job

    async def leader_of(self, stream: str) -> str:
        """Return the server that leads a stream."""
        info = await stream_info(self.broker, stream)
        return str(info["cluster"]["leader"])

    async def has_all(self, server: str, stream: str) -> bool:
        """Whether a server's copy of a stream holds all that the stream does."""
        cluster = (await stream_info(self.broker, stream))["cluster"]
        copies = [cluster["leader"], *(r["name"] for r in cluster["replicas"] if r["current"])]
        return server in copies

    def logs(self) -> str:
        """Return the ends of all logs."""
        ends = [f"--- {one.name}\n{one.read_text()[-2000:]}" for one in self.folder.glob("*.log")]
        return "\n".join(ends)

    # -- setting up --------------------------------------------------------------------------

    def _make_secrets(self) -> str:
        """Make users and certificates; return the admin's key."""
        self._etc.mkdir()
        command = [f"{sys.prefix}/bin/tinkermq", "init", "--home", str(self._etc), "--json"]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        tls = self._etc / "tls"
        tls.mkdir()
        names = ",".join(f"IP:{self.network.address(one)}" for one in SERVERS)
        new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        new += ["-noenc", "-days", "2"]
        ca = ["-subj", "/CN=test", "-keyout", f"{tls}/ca.key", "-out", f"{tls}/ca.crt"]
        signed = ["-CA", f"{tls}/ca.crt", "-CAkey", f"{tls}/ca.key", "-subj", "/CN=nats"]
        signed += ["-addext", f"subjectAltName={names}", "-addext", "basicConstraints=CA:FALSE"]
        signed += ["-keyout", f"{tls}/server.key", "-out", f"{tls}/server.crt"]
        for words in (ca, signed):
            subprocess.run([*new, *words], check=True, capture_output=True)
        return str(json.loads(printed)["api_key"])

    def _set_up(self, root: Path) -> None:
        """Install what a server needs below `root`, as the guide says."""
        etc = root / "etc/tinkermq"
        (root / "var/lib/tinkermq-nats").mkdir(parents=True)
        shutil.copytree(self._etc / "tls", etc / "tls")
        shutil.copy(self._etc / "accounts.conf", etc)
        config = (REPOSITORY / "deploy/nats/cluster.conf").read_text()
        for folder in ("/etc/tinkermq", "/var/lib/tinkermq"):
            config = config.replace(f'"{folder}', f'"{root}{folder}')
        (etc / "nats.conf").write_text(config)

    def _start_service(self, name: str, role: str, machine: str, *words: str) -> None:
        command = [sys.executable, "-m", f"tinkermq.actors.{role}", *words]
        secrets = self._etc / "secrets"
        env = {
            **self._environment(),
            "TINKERMQ_CREDENTIALS": str(secrets / f"{role}.creds"),
            **({"TINKERMQ_SECRETS": str(secrets)} if role == "auth" else {}),
        }
        log = self.folder / f"{name}.log"
        self._processes[name] = self.network.start(machine, command, log, env)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "TINKERMQ_NATS_URL": self.url,
            "TINKERMQ_CA": str(self._etc / "tls/ca.crt"),
            "TINKERMQ_REPLICAS": "3",
            "TINKERMQ_OUTPUT_ROOTS": str(self.folder),
            FOLDERS_VARIABLE: str(self.games),
            "TINKERMQ_LOG_FORMAT": "json",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        }

    async def _enter_as_user(self, admin: str) -> None:
        """Let the admin make a user, and connect as that one."""

        async def let_in() -> str:
            try:
                words = ("user", "add", "ada", "--json")
                return await asyncio.to_thread(self.command_of_client, *words, key=admin)
            except AssertionError:
                return ""

        self._user = json.loads(await eventually(let_in, "the admin to make a user"))["api_key"]
        self._broker = await self._connect()

    async def _connect(self) -> Broker:
        with environment(TINKERMQ_CA=str(self._etc / "tls/ca.crt")):
            return await connect(self.url, name="test", api_key=self._user)

    async def _until_nodes(self) -> None:
        async def known() -> bool:
            try:
                found = (await self.ask("nodes", Empty(), NodeList)).nodes
            except TinkermqError:
                return False
            return len(found) == len(NODES)

        await eventually(known, "the scheduler to know both nodes")
