"""The process behind `tinkermq up`: broker, auth service, scheduler, node, gateway, kept alive.

It runs by itself (`python -m tinkermq.clients.cli.supervisor OPTIONS`), in a session of its own, so
that it outlives the terminal; `up` reads one line of JSON from its standard output: whether the
stack has started. SIGTERM and SIGINT stop the children in order: node, scheduler, broker. If this
process is killed the kernel kills its children.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import cast

from pydantic import BaseModel

from ...broker.client.login import CREDENTIALS_VARIABLE, erase_login, without_secrets
from ...broker.credentials import SECRETS_VARIABLE, PoolSecrets
from ...broker.nats_server import NatsServer
from ...schemas.local.process import die_with
from ...schemas.wire import errors
from ..home import URL_VARIABLE, Home, StackState

# A child process of the supervisor, restarted when it dies.

FIRST_RESTART_PAUSE_S = 0.5
LAST_RESTART_PAUSE_S = 10.0
HEALTHY_S = 30.0


class StackProcess:
    """A process that is restarted when it dies."""

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]
    ) -> None:
        """Set the command of a process, which `start` starts. Its output is appended to `log`."""
        self.name = name
        self.log = log
        self.restarts = 0
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause_s = FIRST_RESTART_PAUSE_S

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """Exit code of a process that has ended."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start the process; the kernel kills it when the supervisor dies."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        self._started = time.monotonic()

    def revive(self) -> bool:
        """Restart it if it has died and its pause is over; return whether this started it."""
        if self.pid is not None:
            return False
        alive_s = time.monotonic() - self._started
        if alive_s >= HEALTHY_S:
            self._pause_s = FIRST_RESTART_PAUSE_S
        if alive_s < self._pause_s:
            return False
        self._pause_s = min(2 * self._pause_s, LAST_RESTART_PAUSE_S)
        self.restarts += 1
        self.start()
        return True

    def stop(self, deadline_s: float) -> None:
        """Stop it with SIGTERM, and with SIGKILL once the deadline is over."""
        if self._process is None or self.pid is None:
            return
        self._process.terminate()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> errors.TinkermqError:
        """Return the error in the last lines of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in reversed(lines):
            message = _read_message(line)
            if message is not None:
                return message
        last_lines = "\n".join([line for line in lines if line.strip()][-5:]) or "it said nothing"
        return errors.TinkermqError(
            f"the {self.name} ended with code {self.exit_code}: {last_lines}",
            hint=f"see {self.log}",
        )


def _read_message(line: str) -> errors.TinkermqError | None:
    """Return the error in an actor's last log line (`actor_failed`), if this is one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    fields = cast("dict[str, str]", entry)
    if fields.get("event") != "actor_failed":
        return None
    return errors.error_from_reply(fields["code"], fields["message"], fields.get("hint", ""))


LOG_BYTES = 32 * 2**20


def bound_log(log: Path) -> None:
    """Move the content of a log to `<name>.1` once it is larger than `LOG_BYTES`.

    The process keeps appending to the same file; lines written during the copy are lost. If the
    disk has no room for the copy, the whole content is lost.
    """
    try:
        if log.stat().st_size <= LOG_BYTES:
            return
    except FileNotFoundError:
        return
    older = _older(log)
    try:
        shutil.copyfile(log, older)
    except OSError as error:
        older.unlink(missing_ok=True)
        _log(f"{log} is too large and cannot be copied, so it begins anew: {error}")
    os.truncate(log, 0)


def _older(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")


POLL_S = 0.2
HEALTH_S = 2.0
TROUBLED_CHECKS = 2
"""Failed checks in a row before a broker that stores nothing is restarted, if there is room."""
HEALTHY_CHECKS = 10
"""Further checks allowed after a restart: the broker may be reading a large store."""
STORE_DEADLINE_S = 600.0
"""Time limit of a start of the broker, which reads its whole store before it listens."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
"""Pause between two attempts to start the broker, doubled after each."""
READY_DEADLINE_S = 30.0
NODE_STOP_S = 30.0
SCHEDULER_STOP_S = 10.0
MACHINES_STOP_S = 50.0


class StackOptions(BaseModel, frozen=True):
    """The options of `tinkermq up`, which its supervisor receives as JSON."""

    home: Path
    """Folder of the stack."""
    nats_url: str | None = None
    """A broker that runs already; None starts one."""
    host: str = "127.0.0.1"
    """Address that the broker listens on."""
    port: int | None = None
    """Port of the broker that is started; None takes a free one."""
    sync_interval: str = "always"
    """How often the broker that is started syncs its store to the disk."""
    tls_cert: Path | None = None
    """Certificate of the broker; None: connections are not encrypted."""
    tls_key: Path | None = None
    """Its private key."""
    slots: int | None = None
    """Slots of the node; None: it counts its GPUs or cores."""
    cpu_slots: int | None = None
    """Slots of the node if the machine has no GPU; None: it counts its cores."""
    node: str | None = None
    """Name of the node; None: that of this machine."""
    on: str | None = None
    """Source of machines as the queue needs them; None: this machine is the only node."""
    gateway_port: int | None = None
    """Port of the dashboard, on loopback; 0 takes a free one, None starts none."""


@dataclass
class Supervisor:
    """Starts the stack, restarts its processes, and stops it."""

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
        self._next_check = self._next_bound = 0.0
        self._num_troubled = 0
        self._pause_s = FIRST_PAUSE_S
        self._is_starting = False

    def run(self, ready: Callable[[StackState], None]) -> None:
        """Run the stack until a signal; `ready` is called once it is up.

        Raises TinkermqError if it does not come up; nothing is left running.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        with self.home.lock():
            try:
                url = self._start()
                self._write(url)
                ready(self._state(url))
                self._watch(url)
            finally:
                self._take_down()

    def _start(self) -> str:
        for own in (self.home.logs, self.home.store):  # it contains logs and data of all jobs
            own.mkdir(parents=True, exist_ok=True)
            own.chmod(0o700)
        url = self.options.nats_url or self._start_server()
        node: list[str] = []
        for flag, value in (
            ("--name", self.options.node),
            ("--slots", self.options.slots),
            ("--cpu-slots", self.options.cpu_slots),
        ):
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
            for before in (log, _older(log)):
                before.unlink(missing_ok=True)
            command = [sys.executable, "-P", *words]
            child = StackProcess(name, command, log=log, environment=self._environment(name, url))
            child.start()
            self.children.append(child)
        self._wait_until_ready(url)
        return url

    def _machines(self) -> list[str]:
        """Return the scheduler's options for the source of machines."""
        if self.options.on is None:
            return []
        words = ["--machines", self.options.on]
        if self.secrets.exist:
            words += ["--node-credentials", str(self.secrets.credentials("node"))]
        return words

    def _environment(self, name: str, url: str) -> dict[str, str]:
        """Return the environment of a child: secrets travel as names of files."""
        inherited = without_secrets(os.environ)  # of the user who ran `up`
        environment = {**inherited, URL_VARIABLE: url, "TINKERMQ_LOG_FORMAT": "json"}
        if self.secrets.exist:
            environment[CREDENTIALS_VARIABLE] = str(self.secrets.credentials(name))
        if name == "auth":
            environment[SECRETS_VARIABLE] = str(self.secrets.folder)
        return environment

    def _start_server(self) -> str:
        options = self.options
        tls = (options.tls_cert, options.tls_key) if options.tls_cert and options.tls_key else None
        self.server = NatsServer(
            self.home.store,
            host=options.host,
            port=options.port,
            sync_interval=options.sync_interval,
            tls=tls,
            extra_config=self.secrets.server_config() if self.secrets.exist else "",
        )
        self.server.start(STORE_DEADLINE_S)
        return self.server.url

    def _wait_until_ready(self, url: str) -> None:
        deadline = time.monotonic() + READY_DEADLINE_S
        credentials = self.secrets.credentials("scheduler") if self.secrets.exist else None
        while not self.stopping:
            live_pids = asyncio.run(_list_actor_pids(url, credentials))
            missing = [child.name for child in self.children if not self._answers(child, live_pids)]
            if not missing:
                return
            for child in self.children:
                if child.exit_code is not None:
                    raise child.last_words()
            if time.monotonic() > deadline:
                raise errors.DeadlineError(
                    f"the {' and the '.join(missing)} did not answer within "
                    f"{READY_DEADLINE_S:.0f} s",
                    hint=f"see the logs in {self.home.logs}",
                )
            time.sleep(POLL_S)

    def _answers(self, child: StackProcess, live_pids: set[int]) -> bool:
        """Return whether a child has started: the gateway listens, others have a heartbeat."""
        if child.name != "gateway":
            return child.pid in live_pids
        assert self.gateway is not None
        host, _, port = self.gateway.rpartition("//")[2].rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return child.exit_code is None
        return False

    def _watch(self, url: str) -> None:
        while not self.stopping:
            self._bound_logs()
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

    def _bound_logs(self) -> None:
        if time.monotonic() < self._next_bound:
            return
        self._next_bound = time.monotonic() + HEALTH_S
        for log in self.home.logs.glob("*.log"):
            try:
                bound_log(log)
            except OSError as error:  # a failing disk must not end the stack
                _log(f"{log} cannot be bounded: {error}")

    def _keep_server(self, server: NatsServer) -> bool:
        """Restart a broker that has died, or that stopped storing on a full disk.

        Returns whether a restarted broker has started. The stack keeps running meanwhile.
        """
        is_well = server.running and not self._is_starting
        if time.monotonic() < self._next_check and (is_well or self._pause_s > FIRST_PAUSE_S):
            return False
        self._next_check = time.monotonic() + HEALTH_S
        try:
            if not server.running:
                self._begin(server, "broker had died")
            if self._is_starting:
                return self._has_come_up(server)
            trouble = server.trouble()
            if trouble and server.has_room() and self._num_troubled >= TROUBLED_CHECKS:
                server.stop()
                self._begin(server, "broker has room again")
                return False
        except (OSError, errors.BrokerError) as error:  # e.g. no space for its configuration
            self._next_check = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
            trouble = f"nats-server cannot be started: {error}"
        if trouble and not self._num_troubled:
            _log(trouble)
        self._num_troubled = self._num_troubled + 1 if trouble else 0
        return False

    def _begin(self, server: NatsServer, why: str) -> None:
        self._is_starting = False
        self.home.check_place()  # another stack may have its store at the old path
        server.begin()
        self._is_starting = True
        self.server_restarts += 1
        _log(f"{why} and is started again")

    def _has_come_up(self, server: NatsServer) -> bool:
        if not server.is_listening():
            return False
        self._is_starting = False
        self._num_troubled = -HEALTHY_CHECKS
        self._pause_s = FIRST_PAUSE_S
        _log("broker listens again")
        return True

    def _take_down(self) -> None:
        self.home.clear()
        for child in reversed(self.children):
            child.stop(NODE_STOP_S if child.name == "node" else SCHEDULER_STOP_S)
        self._release_machines()
        if self.server is not None:
            self.server.stop()

    def _release_machines(self) -> None:
        """Drain all machines while the broker still runs, so that they do not fail."""
        if self.options.on is None or self.server is None or not self.server.running:
            return
        module = "tinkermq.actors.scheduler.machines"
        where = ["--nats", self.server.url, "--machines", self.options.on]
        command = [sys.executable, "-P", "-m", module, *where]
        try:
            subprocess.run(command, check=True, timeout=MACHINES_STOP_S)
        except (subprocess.SubprocessError, OSError) as error:
            _log(f"machines may be left in {self.options.on}: {error}")

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stopping = True

    def _write(self, url: str) -> None:
        try:
            self.home.write(self._state(url))
        except OSError as error:  # a full disk must not end the stack
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
            options=self.options.model_dump(mode="json"),
            started=self.started,
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def _list_actor_pids(url: str, credentials: Path | None) -> set[int]:
    """Return the process ids of the pool's actors that have a heartbeat."""
    from ...broker.client.connection import connect
    from ...broker.presence import list_presences
    from ...schemas.wire.errors import NotFoundError

    async with await connect(url, name="tinkermq-up", credentials_file=credentials) as broker:
        try:
            return {entry.value.pid for entry in await list_presences(broker, "pool")}
        except NotFoundError:
            return set()  # the scheduler creates the bucket


def main() -> int:
    """Run a supervisor; it writes one line to its parent once the stack is up or has failed."""
    options = StackOptions.model_validate_json(sys.argv[1])
    erase_login()
    try:
        Supervisor(options).run(lambda state: _write_line({"state": state.model_dump()}))
    except errors.TinkermqError as error:
        return _fail(error)
    except OSError as error:
        return _fail(
            errors.StorageError(
                f"the stack in {options.home} failed: {error}",
                hint="give a folder that you may write to, with room: --store DIR",
            )
        )
    return 0


def _fail(error: errors.TinkermqError) -> int:
    _log(str(error))
    _write_line({"error": {"code": error.code, "message": error.message, "hint": error.hint}})
    return 1


def _write_line(message: dict[str, object]) -> None:
    """Write the line that `up` reads, then close the pipe; `up` may have ended already."""
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
