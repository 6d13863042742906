"""The process behind `tinkermq up`: broker, auth service, scheduler, node, gateway, kept alive.

It runs by itself (`python -m tinkermq.clients.cli.pool.supervisor`), in a session of its own, so
that it outlives the terminal; `up` reads one line of JSON from its standard output that says
whether the stack came up. SIGTERM and SIGINT stop the children in order: node, scheduler, broker.
If this process is killed the kernel kills its children.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ....broker.client.login import CREDENTIALS_VARIABLE, OF_PERSONS, without_secrets
from ....broker.credentials import SECRETS_VARIABLE, PoolSecrets
from ....broker.nats_server import NatsServer
from ....broker.service_process import erase_variable
from ....schemas.wire.errors import BrokerError, DeadlineError, TinkermqError
from ...home import URL_VARIABLE, Home, StackState
from .child import StackProcess

POLL_S = 0.2
HEALTH_S = 2.0
TROUBLED_LOOKS = 2
"""A broker that does not store is started again, once there is room, not before the third look."""
HEALTHY_LOOKS = 10
"""After a restart so many looks more are waited for: it may be reading a large store."""
STORE_DEADLINE_S = 600.0
"""A broker with a large store reads it before it listens."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
"""Between two tries to start a broker that does not come up."""
READY_DEADLINE_S = 30.0
NODE_STOP_S = 30.0
SCHEDULER_STOP_S = 10.0
MACHINES_STOP_S = 50.0


@dataclass(frozen=True)
class StackOptions:
    """What `up` was asked for."""

    home: Path
    """Folder of the stack."""
    nats_url: str | None = None
    """A broker that runs already; None starts one."""
    host: str = "127.0.0.1"
    """Address that the broker listens on."""
    port: int | None = None
    """Port of the broker that is started; None takes a free one."""
    tls_cert: Path | None = None
    """Certificate of the broker; None: connections are not encrypted."""
    tls_key: Path | None = None
    """Its private key."""
    slots: int | None = None
    """Slots of the node; None lets it count."""
    node: str | None = None
    """Name of the node; None: that of this machine."""
    on: str | None = None
    """Where machines come from as the queue needs them; None: this machine is the one node."""
    gateway_port: int | None = None
    """Port of the dashboard, on loopback; 0 takes a free one, None starts none."""

    def arguments(self) -> list[str]:
        """Return the command line that gives a supervisor these options."""
        words = ["--home", str(self.home)]
        for flag, value in (
            ("--nats-url", self.nats_url),
            ("--host", self.host),
            ("--port", self.port),
            ("--tls-cert", self.tls_cert),
            ("--tls-key", self.tls_key),
            ("--slots", self.slots),
            ("--node", self.node),
            ("--on", self.on),
            ("--gateway-port", self.gateway_port),
        ):
            words += [flag, str(value)] if value is not None else []
        return words


@dataclass
class Supervisor:
    """Starts the stack, keeps it up, and takes it down."""

    options: StackOptions
    stopping: bool = False
    children: list[StackProcess] = field(default_factory=list[StackProcess])
    server: NatsServer | None = None
    server_restarts: int = 0

    def __post_init__(self) -> None:
        self.home = Home(self.options.home)
        self.secrets = PoolSecrets(self.home.secrets)
        self.started = time.time()
        self.gateway: str | None = None
        self._next_look = 0.0
        self._num_troubled = 0
        self._pause_s = FIRST_PAUSE_S
        self._is_starting = False

    def run(self, ready: Callable[[StackState], None]) -> None:
        """Hold the stack up until a signal; `ready` is called once it is up.

        Raises TinkermqError when it does not come up; nothing is left running then.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        with self.home.locked():
            try:
                url = self._start()
                self._write(url)
                ready(self._state(url))
                self._watch(url)
            finally:
                self._take_down()

    def _start(self) -> str:
        for own in (self.home.logs, self.home.store):  # what all jobs say, and what is stored
            own.mkdir(parents=True, exist_ok=True)
            own.chmod(0o700)
        url = self.options.nats_url or self._start_server()
        node: list[str] = []
        for flag, value in (("--name", self.options.node), ("--slots", self.options.slots)):
            node += [] if value is None else [flag, str(value)]
        commands = {
            "auth": ["-m", "tinkermq.actors.auth"],
            "scheduler": ["-m", "tinkermq.actors.scheduler", *self._machines()],
            "node": ["-m", "tinkermq.actors.node", *node],
        }
        if self.options.gateway_port is not None:
            port = self.options.gateway_port or _free_port()
            self.gateway = f"http://127.0.0.1:{port}"
            commands["gateway"] = ["-m", "tinkermq.actors.gateway", "--port", str(port)]
        if not self.secrets.exist:
            del commands["auth"]
        if self.options.on is not None:
            del commands["node"]
        for name, words in commands.items():
            log = self.home.logs / f"{name}.log"
            log.unlink(missing_ok=True)
            command = [sys.executable, *words]
            child = StackProcess(name, command, log=log, environment=self._environment(name, url))
            child.start()
            self.children.append(child)
        self._wait_until_ready(url)
        return url

    def _machines(self) -> list[str]:
        """Return what the scheduler is told of where machines come from."""
        if self.options.on is None:
            return []
        words = ["--machines", self.options.on]
        if self.secrets.exist:
            words += ["--node-credentials", str(self.secrets.credentials("node"))]
        return words

    def _environment(self, name: str, url: str) -> dict[str, str]:
        """Return the environment of a child: secrets travel as names of files."""
        given = without_secrets(os.environ)  # of the user who typed `up`
        environment = {**given, URL_VARIABLE: url, "TINKERMQ_LOG_FORMAT": "json"}
        if self.secrets.exist:
            environment[CREDENTIALS_VARIABLE] = str(self.secrets.credentials(name))
        if name == "auth":
            environment[SECRETS_VARIABLE] = str(self.secrets.folder)
        return environment

    def _credentials(self) -> Path | None:
        return self.secrets.credentials("scheduler") if self.secrets.exist else None

    def _start_server(self) -> str:
        options = self.options
        tls = (options.tls_cert, options.tls_key) if options.tls_cert and options.tls_key else None
        self.server = NatsServer(
            self.home.store,
            host=options.host,
            port=options.port,
            tls=tls,
            extra_config=self.secrets.server_config() if self.secrets.exist else "",
        )
        self.server.start(STORE_DEADLINE_S)
        return self.server.url

    def _wait_until_ready(self, url: str) -> None:
        deadline = time.monotonic() + READY_DEADLINE_S
        while not self.stopping:
            heard = asyncio.run(_heard(url, self._credentials()))
            missing = [child.name for child in self.children if not self._answers(child, heard)]
            if not missing:
                return
            for child in self.children:
                if child.exit_code is not None:
                    raise child.last_words()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the {' and the '.join(missing)} did not answer within "
                    f"{READY_DEADLINE_S:.0f} s",
                    hint=f"see the logs in {self.home.logs}",
                )
            time.sleep(POLL_S)

    def _answers(self, child: StackProcess, heard: set[int]) -> bool:
        """Whether a child is up: the gateway listens, others have a heartbeat."""
        if child.name != "gateway":
            return child.pid in heard
        assert self.gateway is not None
        with contextlib.suppress(OSError), socket.create_connection(_place(self.gateway), 1):
            return child.exit_code is None
        return False

    def _watch(self, url: str) -> None:
        while not self.stopping:
            changed = False
            for child in self.children:
                if child.revive():
                    _log(f"{child.name} had died and was started again")
                    changed = True
            if self.server is not None:
                changed |= self._keep_server(self.server)
            if changed:
                self._write(url)
            time.sleep(POLL_S)

    def _keep_server(self, server: NatsServer) -> bool:
        """Start a broker again that died, or that a full disk has stopped from storing.

        It may take as long as it needs to read its store, and as many tries: the stack stays up.
        Returns whether it has come up.
        """
        is_well = server.running and not self._is_starting
        if time.monotonic() < self._next_look and (is_well or self._pause_s > FIRST_PAUSE_S):
            return False
        self._next_look = time.monotonic() + HEALTH_S
        try:
            if not server.running:
                self._begin(server, "broker had died")
            if self._is_starting:
                return self._has_come_up(server)
            trouble = server.trouble()
            if trouble and server.has_room() and self._num_troubled >= TROUBLED_LOOKS:
                server.stop()
                self._begin(server, "broker has room again")
                return False
        except (OSError, BrokerError) as error:  # such as no room even for its configuration
            self._next_look = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
            trouble = f"nats-server cannot be started: {error}"
        if trouble and not self._num_troubled:
            _log(trouble)
        self._num_troubled = self._num_troubled + 1 if trouble else 0
        return False

    def _begin(self, server: NatsServer, why: str) -> None:
        self._is_starting = False
        server.begin()
        self._is_starting = True
        self.server_restarts += 1
        _log(f"{why} and is started again")

    def _has_come_up(self, server: NatsServer) -> bool:
        if not server.is_listening():
            return False
        self._is_starting = False
        self._num_troubled = -HEALTHY_LOOKS
        self._pause_s = FIRST_PAUSE_S
        _log("broker listens again")
        return True

    def _take_down(self) -> None:
        self.home.clear()
        for child in reversed(self.children):
            child.stop(NODE_STOP_S if child.name == "node" else SCHEDULER_STOP_S)
        self._give_machines_back()
        if self.server is not None:
            self.server.stop()

    def _give_machines_back(self) -> None:
        """Have all machines drain while the broker is there to tell them apart from a failure."""
        if self.options.on is None or self.server is None or not self.server.running:
            return
        module = "tinkermq.actors.scheduler.machines"
        where = ["--nats", self.server.url, "--machines", self.options.on]
        command = [sys.executable, "-m", module, *where]
        try:
            subprocess.run(command, check=True, timeout=MACHINES_STOP_S)
        except (subprocess.SubprocessError, OSError) as error:
            _log(f"machines may be left in {self.options.on}: {error}")

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def _write(self, url: str) -> None:
        try:
            self.home.write(self._state(url))
        except OSError as error:  # its disk is full: what runs matters more
            _log(f"the state of the stack cannot be written: {error}")

    def _state(self, url: str) -> StackState:
        pids = {child.name: child.pid or 0 for child in self.children}
        restarts = {child.name: child.restarts for child in self.children}
        if self.server is not None:
            pids["broker"] = self.server.pid or 0
            restarts["broker"] = self.server_restarts
        return StackState(
            url=url,
            gateway=self.gateway,
            pid=os.getpid(),
            children=pids,
            restarts=restarts,
            home=str(self.home.folder),
            started=self.started,
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _place(url: str) -> tuple[str, int]:
    host, _, port = url.rpartition("//")[2].rpartition(":")
    return host, int(port)


async def _heard(url: str, credentials: Path | None) -> set[int]:
    """Return the process ids of the pool's actors that are heard of."""
    from ....broker.client.connection import connect
    from ....broker.presence import list_presences
    from ....schemas.wire.errors import NotFoundError

    async with await connect(url, name="tinkermq-up", credentials_file=credentials) as broker:
        try:
            return {entry.value.pid for entry in await list_presences(broker, "pool")}
        except NotFoundError:
            return set()  # the scheduler makes the bucket


def main(argv: Sequence[str] | None = None) -> int:
    """Run a supervisor that tells its parent by one line whether the stack is up."""
    options = _parse(argv)
    for name in OF_PERSONS:
        erase_variable(name)
    try:
        Supervisor(options).run(lambda state: _tell({"state": state.model_dump()}))
    except TinkermqError as error:
        _log(str(error))
        _tell({"error": {"code": error.code, "message": error.message, "hint": error.hint}})
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> StackOptions:
    parser = argparse.ArgumentParser(prog="python -m tinkermq.clients.cli.pool.supervisor")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--nats-url")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--slots", type=int)
    parser.add_argument("--node")
    parser.add_argument("--on")
    parser.add_argument("--gateway-port", type=int)
    return StackOptions(**vars(parser.parse_args(argv)))


def _tell(message: dict[str, object]) -> None:
    """Write the one line for `up`, then give its pipe back; `up` may be gone already."""
    try:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on a full disk, too
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
