"""A real Ray on this machine, as `make ray` installs it: a head and further nodes."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from tests.support.configs import REPOSITORY

PROGRAM = REPOSITORY / ".venv-ray" / "bin" / "ray"
_DEADLINE_S = 180.0


def lacking() -> str:
    """Say what this machine lacks to run Ray; empty if nothing."""
    return "" if PROGRAM.is_file() else f"no {PROGRAM}: `make ray` installs it"


class RayNode:
    """One node of the cluster, with all its processes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def leave(self) -> None:
        """Take the node out of the cluster at once, as a machine that is preempted goes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            for process in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait(30)


class Ray:
    """A cluster: a head that runs no jobs, and nodes of two CPUs each."""

    def __init__(self, folder: Path, num_nodes: int = 2) -> None:
        self._log = folder
        folder.mkdir(parents=True)
        self._temporary = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # sockets: a short path
        self._port, self._dashboard = _free_ports(2)
        self._num_nodes = num_nodes
        self._head: RayNode | None = None
        self.nodes: list[RayNode] = []

    @property
    def address(self) -> str:
        """Where the dashboard is."""
        return f"127.0.0.1:{self._dashboard}"

    def __enter__(self) -> "Ray":
        head = ("--head", "--port", str(self._port), "--num-cpus", "0", "--dashboard-port")
        self._head = self._run("head", *head, str(self._dashboard))
        try:
            self._wait(1)
            for _ in range(self._num_nodes):
                self.add()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in [*self.nodes, self._head]:
            if node is not None:
                node.leave()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def add(self) -> RayNode:
        """Bring a node in."""
        before = self._num_alive()
        name = f"node-{len(self.nodes)}"
        node = self._run(name, "--address", f"127.0.0.1:{self._port}", "--num-cpus", "2")
        self.nodes.append(node)
        self._wait(before + 1)
        return node

    def jobs(self) -> list[tuple[str, str]]:
        """Return names and states of the jobs that Ray knows."""
        return [(one["submission_id"], one["status"]) for one in self._tell("/api/jobs/")]

    def _run(self, name: str, *words: str) -> RayNode:
        (agent,) = _free_ports(1)
        command = [str(PROGRAM), "start", "--block", "--node-ip-address", "127.0.0.1"]
        command += ["--dashboard-agent-listen-port", str(agent), "--min-worker-port", "0"]
        command += ["--max-worker-port", "0", "--object-store-memory", "100000000"]
        command += ["--disable-usage-stats", "--temp-dir", str(self._temporary), *words]
        with (self._log / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "RAY_AUTH_MODE": "disabled"},  # else by a token in the home
                start_new_session=True,
            )
        return RayNode(process)

    def _num_alive(self) -> int:
        try:
            told = self._tell("/api/v0/nodes?limit=100")
        except (OSError, ValueError):
            return 0
        return sum(one["state"] == "ALIVE" for one in told["data"]["result"]["result"])

    def _wait(self, num_nodes: int) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while self._num_alive() < num_nodes:
            assert time.monotonic() < deadline, f"Ray has no {num_nodes} nodes: see {self._log}"
            time.sleep(0.3)

    def _tell(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as answer:
            return json.load(answer)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
