"""The units of deploy/: sound to systemd's own tools, and their programs start as they stand.

No systemd runs in CI, so the test is its stand-in: it starts each ExecStart with the unit's
environment and folders, takes what sd_notify tells, and stops it with SIGTERM.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tinkermq.broker.process import die_with

from tests.configs import REPOSITORY
from tests.waiting import PATIENCE_S

UNITS = sorted((REPOSITORY / "deploy" / "systemd").glob("*.service"))
SERVICES = ("scheduler", "node")
MOST_EXPOSED = {"node": 5.0, "environment@": 5.0}


def of_this_machine(text: str, root: Path) -> str:
    """Return a file of deploy/ with its folders below `root` and this environment's programs."""
    text = text.replace("/opt/tinkermq/bin", str(Path(sys.prefix) / "bin"))
    for folder in ("/etc/tinkermq", "/var/lib/tinkermq"):
        text = text.replace(folder, f"{root}{folder}")
    return text


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units as an operator would install them here."""
    folder = tmp_path / "units"
    folder.mkdir()
    for unit in UNITS:
        text = unit.read_text()
        (folder / unit.name).write_text(
            text.replace("/opt/tinkermq/bin", str(Path(sys.prefix) / "bin"))
        )
    return sorted(folder.iterdir())


def analyzed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    assert program, "systemd-analyze is missing: apt-get install systemd"
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_systemd_finds_nothing_wrong(units: list[Path]) -> None:
    assert len(units) == 6
    done = analyzed("verify", "--recursive-errors=no", *units)
    ours = [line for line in done.stderr.splitlines() if "tinkermq" in line]
    complaints = [line for line in ours if "environment@" not in line]  # it needs an instance
    assert complaints == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_service_is_exposed_to_little(unit: Path, units: list[Path]) -> None:
    path = next(one for one in units if one.name == unit.name)
    done = analyzed("security", "--offline=true", path)
    found = re.search(r"Overall exposure level .*: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    name = unit.stem.removeprefix("tinkermq-")
    assert float(found[1]) <= MOST_EXPOSED.get(name, 2.0)


@dataclass
class Systemd:
    """What systemd does for a service: environment, folders, a socket for its messages."""

    root: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.root / "etc/tinkermq").mkdir(parents=True)
        (self.root / "var/lib/tinkermq").mkdir(parents=True)
        (self.root / "var/lib/tinkermq-nats").mkdir()
        self.port = _free_port()
        config = (REPOSITORY / "deploy/nats/single.conf").read_text()
        config = config.replace("4222", str(self.port)).replace("8222", str(_free_port()))
        (self.root / "etc/tinkermq/nats.conf").write_text(of_this_machine(config, self.root))
        shared = (REPOSITORY / "deploy/etc/tinkermq.env").read_text()
        shared = shared.replace("4222", str(self.port))
        (self.root / "etc/tinkermq/tinkermq.env").write_text(shared)
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._channel.bind(str(self.root / "notify"))
        self._channel.settimeout(PATIENCE_S)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        unit = (REPOSITORY / "deploy/systemd" / f"tinkermq-{name}.service").read_text()
        lines = of_this_machine(unit, self.root).splitlines()
        for command in _values(lines, "ExecStartPre"):
            subprocess.run(shlex.split(command), check=True, capture_output=True)
        (command,) = _values(lines, "ExecStart")
        with (self.root / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                shlex.split(command),
                env=self._environment(lines),
                cwd=next(iter(_values(lines, "WorkingDirectory")), self.root),
                stdout=log,
                stderr=log,
                preexec_fn=die_with(os.getpid()),
            )
        self.running.append(process)
        return process

    def _environment(self, lines: list[str]) -> dict[str, str]:
        found = {"PATH": os.environ["PATH"], "HOME": str(self.root)}
        for pair in _values(lines, "Environment"):
            found.update([pair.split("=", 1)])
        for name in _values(lines, "EnvironmentFile"):
            path = Path(name.removeprefix("-"))
            assert path.exists() or name.startswith("-")
            text = path.read_text() if path.exists() else ""
            found.update(
                line.split("=", 1) for line in text.splitlines() if line and line[0] != "#"
            )
        found["NOTIFY_SOCKET"] = str(self.root / "notify")
        found["WATCHDOG_USEC"] = "400000"
        return found

    def told(self) -> str:
        return self._channel.recv(4096).decode()

    def close(self) -> None:
        for process in reversed(self.running):
            process.kill()
            process.wait()
        self._channel.close()


def _values(lines: list[str], key: str) -> list[str]:
    return [line.split("=", 1)[1] for line in lines if line.startswith(f"{key}=")]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(tmp_path / "root")
    yield made
    made.close()


def test_every_service_starts_says_so_and_stops_at_sigterm(systemd: Systemd) -> None:
    nats = systemd.start("nats")
    for name in SERVICES:
        process = systemd.start(name)
        log = systemd.root / f"{name}.log"
        assert systemd.told() == "READY=1", log.read_text()
        assert [systemd.told() for _ in range(3)] == ["WATCHDOG=1"] * 3
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, log.read_text()
        said = systemd.told()
        while said == "WATCHDOG=1":
            said = systemd.told()
        assert said == "STOPPING=1"
    nats.terminate()
    assert nats.wait(PATIENCE_S) in (0, 1)
