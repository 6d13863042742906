"""The pool of a soak: a broker, two schedulers, two nodes, a gateway, and clients with games.

All of it are processes of our own below one folder, on free ports. Who may be killed is read from
the system's table of processes, so that it is known while the broker is away, too.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.configs import REPOSITORY
from tests.support.gateway import Gateway, free_port
from tests.support.jobs import tail
from tests.support.stack import Stack

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

    def __str__(self) -> str:
        of = f" of {self.job}" if self.job else ""
        return f"{self.role} {self.name}{of} (pid {self.pid})"


class Pool(Stack):
    """A stack with two of what there may be two of, a gateway, and users' programs."""

    def __init__(self, folder: Path, *, slots: int = 16) -> None:
        """Keep everything below `folder`; nothing is started yet."""
        super().__init__(folder, slots=slots)
        self.mark = f"{os.getpid()}-{folder.name}"
        self.gateway_port = free_port()
        self.ended: list[str] = []
        """Services and programs that ended without having been asked to."""
        self._away: set[str] = set()
        os.environ[MARK] = self.mark

    async def __aenter__(self) -> "Pool":
        await super().__aenter__()
        for name in SERVICES:
            if name not in self._processes:
                self.start(name)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await super().__aexit__(*exc_info)
        os.environ.pop(MARK, None)

    # -- starting and ending -----------------------------------------------------------------

    def start(self, role: str) -> int:
        """Start a service by its name; return its process id."""
        kind = role.partition("-")[0]
        command = [sys.executable, "-m", f"tinkermq.actors.{kind}", "--nats", self.server.url]
        command += ["--name", role]
        if kind == "node":
            command += ["--slots", str(self._slots)]
        if kind == "gateway":
            command += ["--port", str(self.gateway_port)]
        return self._run(role, command)

    def start_client(self, name: str, server_url: str) -> int:
        """Start a user's program that hosts the game of a job."""
        return self._run(name, [sys.executable, "-m", "tests.faults.soak.client", server_url])

    def _run(self, name: str, command: list[str]) -> int:
        self._processes[name] = self._popen(command, name)
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
        for name in ("node", "node-b"):
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                continue
            for child in _children(process.pid):
                told = _TOLD.search(_command(child))
                if told is not None:
                    yield Target(told[1], told[3], child.pid, told[2])

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
