"""The pool of a soak: a broker, two schedulers, two nodes, a gateway, and clients with games.

All of it are processes of our own below one folder, on free ports. Who may be killed is read from
the system's table of processes, so that it is known while the broker is away, too. Each node, and
with it all its actors, reaches the broker through a proxy that can cut it off. A pool with users
has an auth service, and all that runs in it proves who it is; the soak itself is the admin, and
looks at what is stored as a user of the broker's configuration who may do everything.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from tinkermq.actors.node.process import SILENCE_VARIABLE
from tinkermq.actors.storage.access import MODELS_VARIABLE, ROOTS_VARIABLE
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.login import CREDENTIALS_VARIABLE, KEY_VARIABLE
from tinkermq.broker.credentials import SECRETS_VARIABLE, PoolSecrets
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.wire.errors import BrokerError

from tests.support.configs import REPOSITORY
from tests.support.gateway import Gateway, free_port
from tests.support.jobs import tail
from tests.support.partition import Partitions
from tests.support.stack import Stack
from tests.support.waiting import eventually

NODES = ("node", "node-b")
SILENCE_S = 40.0
"""For how long an actor may tell no heartbeat: its default is of minutes."""
SHIFT_VARIABLE = "TINKERMQ_SOAK_SHIFT_S"
_SHIFTED = Path(__file__).parent / "shifted"
_LOOKS = "soak"
SERVICES = ("scheduler", "scheduler-b", "node", "node-b", "gateway")
BROKER = "nats-server"
MARK = "TINKERMQ_SOAK"
"""Environment variable that all processes of a soak inherit, to find those that are left over."""
_TOLD = re.compile(r"tinkermq\.actors\.(\w+) .*--job (\S+) --name (\S+)")
_TERM_S = 40.0


@dataclass(frozen=True)
class Target:
    """A process that may be killed."""

    role: str
    name: str
    pid: int
    job: str = ""
    node: str = ""
    """Where it runs, if it is an actor of a job."""

    def __str__(self) -> str:
        of = f" of {self.job}" if self.job else ""
        return f"{self.role} {self.name}{of} (pid {self.pid})"


class Pool(Stack):
    """A stack with two of what there may be two of, a gateway, and users' programs."""

    def __init__(self, folder: Path, *, slots: int = 16, users: bool = False) -> None:
        """Keep everything below `folder`; nothing is started yet. `users`: keys are asked for."""
        super().__init__(folder, slots=slots)
        self.partitions = {name: Partitions(lambda: self.server.port) for name in NODES}
        self.secrets = PoolSecrets(folder / "secrets") if users else None
        self.looking_url = ""
        """Where the soak looks at what is stored, once the broker runs."""
        self._given = {SILENCE_VARIABLE: str(SILENCE_S)}
        if self.secrets is not None:
            self._given |= {MODELS_VARIABLE: str(folder), ROOTS_VARIABLE: str(folder)}
            self._given[KEY_VARIABLE] = self.secrets.create("root", 1)
            self.server = NatsServer(
                folder / "nats", extra_config=_with_looker(self.secrets.server_config())
            )
        self.mark = f"{os.getpid()}-{folder.name}"
        self.gateway_port = free_port()
        self.ended: list[str] = []
        """Services and programs that ended without having been asked to."""
        self._away: set[str] = set()
        os.environ[MARK] = self.mark

    async def __aenter__(self) -> "Pool":
        os.environ.update(self._given)
        for one in self.partitions.values():
            await one.__aenter__()
        self.server.start()  # on a port that stays
        login = f"{_LOOKS}:{_LOOKS}@" if self.secrets else ""
        self.looking_url = f"nats://{login}127.0.0.1:{self.server.port}"
        if self.secrets is not None:
            self.start("auth")
            await eventually(self._lets_in, "the auth service to let the admin in")
        await super().__aenter__()
        for name in SERVICES:
            if name not in self._processes:
                self.start(name)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await super().__aexit__(*exc_info)
        for one in self.partitions.values():
            await one.__aexit__()
        for name in (MARK, *self._given):
            os.environ.pop(name, None)

    async def _lets_in(self) -> bool:
        try:
            await (await connect(self.server.url, name="probe")).close()
        except BrokerError:
            return False
        return True

    def url_for(self, name: str) -> str:
        """Return how a service reaches the broker, and with a node all its actors."""
        return self.partitions[name].url if name in self.partitions else self.server.url

    # -- starting and ending -----------------------------------------------------------------

    def start(
        self,
        role: str,
        name: str = "",
        variables: Mapping[str, str] | None = None,
        *,
        shift_s: float = 0.0,
    ) -> int:
        """Start a service by its name; return its process id.

        `shift_s`: its clock goes by so much before the machine's.
        """
        assert not name, "a service has the name of its role here"
        kind = role.partition("-")[0]
        command = [sys.executable, "-m", f"tinkermq.actors.{kind}", "--nats", self.url_for(role)]
        command += ["--name", role]
        if kind == "node":
            command += self._node_options
        if kind == "gateway":
            command += ["--port", str(self.gateway_port)]
        settings = dict(variables or {})
        if self.secrets is not None:
            settings[CREDENTIALS_VARIABLE] = str(self.secrets.credentials(kind))
            settings[KEY_VARIABLE] = ""
        if kind == "auth":
            settings[SECRETS_VARIABLE] = str(self.secrets.folder if self.secrets else "")
        if shift_s:
            settings[SHIFT_VARIABLE] = str(shift_s)
            given = os.environ.get("PYTHONPATH", "")
            settings["PYTHONPATH"] = os.pathsep.join([str(_SHIFTED), str(REPOSITORY), given])
        return self._run(role, command, settings)

    def start_client(self, name: str, server_url: str) -> int:
        """Start a user's program that hosts the game of a job."""
        return self._run(name, [sys.executable, "-m", "benchmarks.soak.client", server_url])

    def _run(self, name: str, command: list[str], variables: dict[str, str] | None = None) -> int:
        self._processes[name] = self._popen(command, name, variables)
        self._away.discard(name)
        return self._processes[name].pid

    def away(self, name: str) -> None:
        """Know that a process will end, or has ended, by our own doing."""
        self._away.add(name)

    async def end(self, name: str) -> None:
        """SIGTERM a service or program and wait for its end."""
        self.away(name)
        process = self._processes[name]
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _TERM_S)
        except subprocess.TimeoutExpired:
            self.ended.append(f"{name} did not end within {_TERM_S:g} s of SIGTERM")
            process.kill()
            await asyncio.to_thread(process.wait)

    def runs(self, name: str) -> bool:
        """Whether a service or program runs."""
        process = self._processes.get(name)
        return process is not None and process.poll() is None

    def gateway(self) -> Gateway:
        """Return the gateway, to ask it something."""
        url = f"http://127.0.0.1:{self.gateway_port}"
        return Gateway(url, self._processes["gateway"], self.folder / "gateway.log")

    async def until_gone(self, name: str) -> None:
        """Wait until a service or program has ended that was killed."""
        if (process := self._processes.get(name)) is not None:
            await asyncio.to_thread(process.wait)

    def forget(self, name: str) -> None:
        """Forget a program that has ended for good."""
        self._processes.pop(name)

    def tend(self) -> list[str]:
        """Return the names of what has ended by itself, with its last words in `ended`."""
        found = [
            name
            for name, process in self._processes.items()
            if name not in self._away and process.poll() is not None
        ]
        for name in found:
            code = self._processes[name].returncode
            words = " | ".join(tail(self.folder / f"{name}.log")[-3:])
            self.ended.append(f"{name} ended by itself with code {code}: {words[-600:]}")
            self.away(name)
        return found

    # -- who may be killed -------------------------------------------------------------------

    def targets(self) -> list[Target]:
        """Return all processes that may be killed now, in a fixed order."""
        found = list(self._actors())
        if self.server.pid is not None:
            found.append(Target(BROKER, BROKER, self.server.pid))
        for name, process in self._processes.items():
            if name not in self._away and process.poll() is None:
                found.append(Target(name.partition("-")[0], name, process.pid))
        return sorted(found, key=lambda one: (one.role, one.job, one.name))

    def _actors(self) -> Iterator[Target]:
        """Find the actors of jobs among what the nodes have started."""
        for name in NODES:
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                continue
            for child in _children(process.pid):
                told = _TOLD.search(_command(child))
                if told is not None:
                    yield Target(told[1], told[3], child.pid, told[2], name)

    def left_over(self) -> list[str]:
        """Return the processes of this soak that still run beside this one."""
        found: list[str] = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(MARK) == self.mark
                runs = process.status() != psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if is_ours and runs and process.pid != os.getpid():
                found.append(f"{process.pid} {_command(process)[:120]}")
        return found


def family(pid: int) -> list[int]:
    """Return a process with all that it has started."""
    return [pid, *(child.pid for child in _children(pid))]


def _with_looker(config: str) -> str:
    """Add a user to a server's configuration whom the auth service is not asked about."""
    lines = dict(line.split(": ", 1) for line in config.splitlines())
    accounts, authorization = json.loads(lines["accounts"]), json.loads(lines["authorization"])
    accounts["TMQ"]["users"].append({"user": _LOOKS, "password": _LOOKS})
    authorization["auth_callout"]["auth_users"].append(_LOOKS)
    lines |= {"accounts": json.dumps(accounts), "authorization": json.dumps(authorization)}
    return "\n".join(f"{key}: {value}" for key, value in lines.items())


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def tinkermq(url: str, *words: str) -> subprocess.Popen[bytes]:
    """Start a command of the command line, its output in a pipe."""
    program = "import sys; from tinkermq.clients.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=REPOSITORY,
        env={**os.environ, "TINKERMQ_NATS_URL": url, "TINKERMQ_HOME": "/nonexistent"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
