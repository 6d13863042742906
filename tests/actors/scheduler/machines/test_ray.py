"""What Ray is asked for, what is told when nobody answers, and how a node there hears signals."""

import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from tinkermq.actors.scheduler.machines.ray import RaySource, address, submission
from tinkermq.schemas.machines import MachinesConfig, machines_config
from tinkermq.schemas.wire.errors import ConfigError, PlacementError

from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full

NODE = """
import signal, sys, time
heard = open(sys.argv[1], "a")
def hear(*_):
    heard.write("told ")
    heard.flush()
signal.signal(signal.SIGTERM, hear)
print("up", file=heard, flush=True)
while "told" not in open(sys.argv[1]).read():
    time.sleep(0.05)
time.sleep(1)
"""


def test_an_address_is_that_of_the_dashboard() -> None:
    assert address(machines_config("ray:")) == "http://127.0.0.1:8265"
    assert address(machines_config("ray:head:8265")) == "http://head:8265"
    assert address(machines_config("ray:https://head/ray/")) == "https://head/ray"
    assert machines_config("ray:head:8265").on == "ray:head:8265"
    for wrong in ("ray:ftp://head", "ray:http://me:secret@head:8265"):
        with pytest.raises(ConfigError, match="address: must match"):
            machines_config(wrong)


def test_what_the_owner_adds_to_a_submission_wins() -> None:
    own = {"entrypoint_num_cpus": 4, "runtime_env": {"env_vars": {"A": "b"}}}
    asked = submission(MachinesConfig(kind="ray", slots=8, gpus=True, ray=own), "tmq-1.1", "node")
    assert asked["submission_id"] == "tmq-1.1"
    assert (asked["entrypoint_num_gpus"], asked["entrypoint_num_cpus"]) == (8, 4)
    variables = asked["runtime_env"]["env_vars"]
    assert variables == {"RAY_JOB_STOP_WAIT_TIME_S": "120", "A": "b"}


async def test_a_cluster_that_is_gone_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    source = RaySource(machines_config(f"ray:127.0.0.1:{port}"), "nats://127.0.0.1:1")
    with pytest.raises(PlacementError, match=f"{port}/api/jobs/ cannot be reached: ") as told:
        await source.list_machines()
    assert "is the Ray cluster up" in told.value.hint


class Page(http.server.BaseHTTPRequestHandler):
    """A server that is no Ray."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>a page</html>")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


async def test_what_answers_and_is_no_ray_is_told() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = RaySource(machines_config(f"ray:127.0.0.1:{server.server_port}"), "nats://x:1")
        with pytest.raises(PlacementError, match="not from a Ray dashboard: '<html>a page"):
            await source.list_machines()
        server.shutdown()


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_node_on_ray_hears_one_signal_however_its_job_ends(tmp_path: Path, killed: bool) -> None:
    heard, program = tmp_path / "heard", tmp_path / "node.py"
    program.write_text(NODE)
    entry = submission(MachinesConfig(kind="ray"), "tmq-1.1", f"{sys.executable} {program} {heard}")
    job = subprocess.Popen(str(entry["entrypoint"]), shell=True, start_new_session=True)
    try:
        wait_for(heard, "up")
        below = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        for process in below:  # as Ray's supervisor does, or as its watcher does
            with contextlib.suppress(ProcessLookupError):  # it ended with one before it
                os.kill(process.pid, signal.SIGKILL if killed else signal.SIGTERM)
        job.wait(PATIENCE_S)
        wait_for(heard, "told")
    finally:
        job.kill()
    assert heard.read_text().count("told") == 1


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.1, 0.4])
def test_a_job_of_ray_that_is_stopped_as_it_begins_leaves_no_node(
    tmp_path: Path, after_s: float
) -> None:
    heard, program = tmp_path / "heard", tmp_path / "node.py"
    program.write_text(NODE)
    entry = submission(MachinesConfig(kind="ray"), "tmq-1.1", f"{sys.executable} {program} {heard}")
    job = subprocess.Popen(str(entry["entrypoint"]), shell=True, start_new_session=True)
    time.sleep(after_s)
    for process in [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    job.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while nodes := [one for one in psutil.process_iter(["cmdline"]) if is_node(one, program)]:
        assert time.monotonic() < deadline, nodes
        time.sleep(0.05)


def is_node(process: psutil.Process, program: Path) -> bool:
    return str(program) in (process.info["cmdline"] or []) and process.status() != "zombie"


def wait_for(file: Path, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline, f"no {text} came"
        time.sleep(0.05)
