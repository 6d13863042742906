"""What each extra promises, from the wheel in an environment of its own, by pip as users call it.

`make test-install` runs this: pip resolves and installs every extra alone, which takes minutes.
"""

import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest
from tinkermq.broker.nats_server import NatsServer

from tests.support import imports
from tests.support.waiting import PATIENCE_S
from tests.support.wheel import build_wheel

pytestmark = [pytest.mark.install, pytest.mark.timeout(1800)]

PROMISES = {
    "": ("schemas.wire,schemas.config,schemas.plan,broker,clients,envs.games,envs.running", ""),
    "math": ("envs.math", "from tinkermq.envs.math import *; import math_verify"),
    "vision": ("envs.games", "import PIL.Image"),
    "agents": ("envs.agents,clients.cli.agents", ""),
    "worker": (
        "actors.learner,actors.engine.transformers,actors.node,actors.scheduler,actors.tinker",
        "",
    ),
    "gateway": ("actors.gateway", ""),
    "openenv": ("envs.adapters.openenv", "import websockets"),
    "storage": ("actors.storage", "import obstore"),
    "kubernetes": ("actors.scheduler", "import kubernetes"),
    "notify": ("actors.scheduler", "import apprise"),
    "otel": ("clients.cli", "import opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    "tensorboard": ("schemas.local", "import tensorboard.compat.proto.event_pb2"),
    "mlflow": ("schemas.local", "import mlflow"),
    "wandb": ("schemas.local", "import wandb"),
}
"""Extra -> packages of ours that import whole, and a line that runs."""
LEFT_OUT = "clients.cli.agents"
"""A module of another extra, `agents`; its command says so."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def installed(wheel: Path, folder: Path, extra: str) -> Path:
    """Install the wheel with one extra into a new environment; return its programs."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=PATIENCE_S)
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    done = subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "-q", "install", what],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def said(*words: str | Path) -> str:
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, stdin=None
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("extra", PROMISES)
def test_an_extra_alone_brings_all_that_it_promises(
    wheel: Path, tmp_path: Path, extra: str, nats_server: NatsServer
) -> None:
    programs = installed(wheel, tmp_path / "venv", extra)
    packages, line = PROMISES[extra]
    left_out = "" if extra == "agents" else LEFT_OUT
    said(programs / "python", imports.__file__, packages, left_out)
    said(programs / "python", "-c", line or "pass")
    assert "Usage: tinkermq" in said(programs / "tinkermq", "--help")
    if extra == "gateway":
        assert_gateway_answers(programs, nats_server.url)


def assert_gateway_answers(programs: Path, url: str) -> None:
    """Start a gateway on a free port and ask it for its health."""
    gateway = subprocess.Popen(
        [programs / "python", "-m", "tinkermq.actors.gateway", "--nats", url, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert gateway.stdout is not None
        lines: list[str] = []
        for line in gateway.stdout:
            lines.append(line)
            if "http://" in line:
                address = "http://" + line.split("http://")[1].split()[0].strip("'\",")
                break
        else:
            raise AssertionError("".join(lines))
        with urllib.request.urlopen(f"{address}/health", timeout=PATIENCE_S) as answer:
            assert answer.status == 200
    finally:
        gateway.terminate()
        gateway.communicate(timeout=PATIENCE_S)


RENDER = """
import email, sys
from readme_renderer.markdown import render
text = email.message_from_file(open(sys.argv[1])).get_payload()
page = render(text)
assert page and "<table>" in page and "<img" in page, page
assert 'href="docs/' not in page and 'src="docs/' not in page
"""


def test_an_index_takes_the_metadata(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("METADATA"))
        metadata = files.read(name).decode()
    needs = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert needs
    assert not [line for line in needs if " @ " in line]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    said(python, "-m", "pip", "-q", "install", "readme_renderer[md]")
    (tmp_path / "METADATA").write_text(metadata)
    said(python, "-c", RENDER, tmp_path / "METADATA")
