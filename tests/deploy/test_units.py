"""The units of deploy/: sound to systemd's own tools, and their programs start as they stand.

No systemd runs in CI, so the test is its stand-in: it starts each ExecStart with the unit's
environment and folders, takes what sd_notify tells, and stops it with SIGTERM.
"""

import asyncio
import json
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
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.keys import JobIdentity, job_key
from tinkermq.broker.client.rpc import call
from tinkermq.broker.credentials import PoolSecrets
from tinkermq.broker.jobs import JobStore
from tinkermq.clients.pool import Pool
from tinkermq.schemas.env import DescribeReply, DescribeRequest
from tinkermq.schemas.job import ActorPlacement
from tinkermq.schemas.local.process import die_with
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.configs import REPOSITORY
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full

UNITS = sorted((REPOSITORY / "deploy" / "systemd").glob("*.service"))
PORT_OF_ITS_OWN = {"gateway": " --port 0"}
MOST_EXPOSED = {"node": 5.0, "environment@": 5.0}
RUN = "my-run"
NEVER_AGAIN = 2
"""The exit code after which the environment host's unit is not started again."""


def of_this_machine(text: str, root: Path) -> str:
    """Return a file of deploy/ with its folders below `root` and this environment's programs."""
    text = text.replace("/opt/tinkermq/bin", str(Path(sys.prefix) / "bin"))
    for folder in ("/etc/tinkermq", "/var/lib/tinkermq", "/var/cache/tinkermq"):
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
    assert len(units) == len(UNITS) == 6
    template = next(unit for unit in units if unit.stem.endswith("@"))
    instance = template.rename(template.with_stem(f"{template.stem}{RUN}"))
    others = [unit for unit in units if unit != template]
    done = analyzed("verify", "--recursive-errors=no", instance, *others)
    assert done.stderr.splitlines() == []
    assert done.returncode == 0


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_service_is_exposed_to_little(unit: Path, units: list[Path]) -> None:
    path = next(one for one in units if one.name == unit.name)
    done = analyzed("security", "--offline=true", path)
    found = re.search(r"Overall exposure level .*: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    name = unit.stem.removeprefix("tinkermq-")
    assert float(found[1]) <= MOST_EXPOSED.get(name, 2.0)


def test_the_node_gets_what_gpus_need() -> None:
    lines = (REPOSITORY / "deploy/systemd/tinkermq-node.service").read_text().splitlines()
    assert _values(lines, "LimitMEMLOCK") == ["infinity"]
    assert _values(lines, "CacheDirectory") == ["tinkermq"]
    (compiled,) = _values(lines, "Environment")
    assert compiled.startswith("TORCHINDUCTOR_CACHE_DIR=/var/cache/tinkermq/")
    # the node has no rights: what makes device files runs as root, and may be missing
    assert _values(lines, "CapabilityBoundingSet") == [""]
    made = [command.split() for command in _values(lines, "ExecStartPre")]
    assert [command[0] for command in made] == [
        "-+/usr/bin/nvidia-smi",
        "-+/usr/bin/nvidia-modprobe",
    ]
    for hides in ("PrivateDevices", "DevicePolicy", "DeviceAllow", "NoExecPaths"):
        assert _values(lines, hides) == []
    assert _values(lines, "MemoryDenyWriteExecute") == []  # Triton and CUDA make code


@dataclass
class Systemd:
    """What systemd does for a service: environment, folders, a socket for its messages."""

    root: Path
    with_users: bool
    key: str = ""
    """Of the admin, where there are users."""
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.root / "etc/tinkermq").mkdir(parents=True)
        (self.root / "var/lib/tinkermq").mkdir(parents=True)
        (self.root / "var/lib/tinkermq-nats").mkdir()
        self.port = _free_port()
        config = (REPOSITORY / "deploy/nats/single.conf").read_text()
        ports = {"4222": str(self.port), "8222": str(_free_port())}
        config = re.sub("4222|8222", lambda found: ports[found[0]], config)
        if self.with_users:
            config = config.replace("# include", "include")
            command = [f"{sys.prefix}/bin/tinkermq", "init", "--home", self.root / "etc/tinkermq"]
            told = subprocess.run([*command, "--json"], check=True, capture_output=True)
            self.key = json.loads(told.stdout)["api_key"]
            for name in ("auth", "scheduler", "node", "gateway"):
                text = (REPOSITORY / f"deploy/etc/{name}.env").read_text()
                (self.root / f"etc/tinkermq/{name}.env").write_text(
                    of_this_machine(text, self.root)
                )
        (self.root / "etc/tinkermq/nats.conf").write_text(of_this_machine(config, self.root))
        shared = (REPOSITORY / "deploy/etc/tinkermq.env").read_text()
        shared = shared.replace("4222", str(self.port))
        (self.root / "etc/tinkermq/tinkermq.env").write_text(shared)
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._channel.bind(str(self.root / "notify"))
        self._channel.settimeout(PATIENCE_S)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a service, or an instance of a template: `environment@RUN`."""
        service, at, instance = name.partition("@")
        unit = (REPOSITORY / "deploy/systemd" / f"tinkermq-{service}{at}.service").read_text()
        unit = unit.replace("%i", instance)
        lines = of_this_machine(unit, self.root).splitlines()
        for command in _values(lines, "ExecStartPre"):
            if command.startswith("-+"):  # as root: it would change this machine
                continue
            subprocess.run(shlex.split(command), check=True, capture_output=True)
        (command,) = _values(lines, "ExecStart")
        command += PORT_OF_ITS_OWN.get(name, "")
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
            name, _, value = pair.partition("=")
            found[name] = value
        for name in _values(lines, "EnvironmentFile"):
            path = Path(name.removeprefix("-"))
            assert path.exists() or name.startswith("-")
            text = path.read_text() if path.exists() else ""
            for line in text.splitlines():
                if line and line[0] != "#":
                    key, _, value = line.partition("=")
                    found[key] = value
        found["NOTIFY_SOCKET"] = str(self.root / "notify")
        found["WATCHDOG_USEC"] = "400000"
        return found

    def told(self) -> str:
        """Return what a service told, the oldest first."""
        return self._channel.recv(4096).decode()

    def told_next(self) -> str:
        """Return what a service told that is no sign of life."""
        said = self.told()
        while said == "WATCHDOG=1":
            said = self.told()
        return said

    def exit_code(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a process; the others' signs of life must not fill the socket."""
        while process.poll() is None:
            self.told()
        return process.returncode

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()

    def start_ready(self, name: str) -> subprocess.Popen[bytes]:
        """Start a service and wait until it says that it is ready."""
        process = self.start(name)
        assert self.told_next() == "READY=1", self.log(name)
        return process

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


@pytest.fixture(
    params=[
        pytest.param(True, id="with users"),
        pytest.param(False, id="without users"),
    ]
)
def systemd(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Systemd]:
    made = Systemd(tmp_path / "root", request.param)
    yield made
    made.close()


def test_every_service_starts_says_so_and_stops_at_sigterm(systemd: Systemd) -> None:
    nats = systemd.start("nats")
    auth = ["auth"] if systemd.with_users else []
    names = [*auth, "scheduler", "node", "gateway"]
    started = [(name, systemd.start_ready(name)) for name in names]
    host = hosted(systemd)
    assert [systemd.told() for _ in range(9)] == ["WATCHDOG=1"] * 9
    asyncio.run(ended(systemd))
    assert systemd.told_next() == "STOPPING=1"
    assert host.wait(PATIENCE_S) == 0, systemd.log(f"environment@{RUN}")
    again = systemd.exit_code(systemd.start(f"environment@{RUN}"))
    assert again == NEVER_AGAIN, systemd.log(f"environment@{RUN}")
    for name, process in reversed(started):
        process.terminate()
        assert systemd.told_next() == "STOPPING=1"
        assert process.wait(PATIENCE_S) == 0, systemd.log(name)
    nats.terminate()
    assert nats.wait(PATIENCE_S) in (0, 1)


def hosted(systemd: Systemd) -> subprocess.Popen[bytes]:
    """Submit a run and start an environment host of it, with its owner's key."""
    asyncio.run(submitted(systemd))
    text = (REPOSITORY / "deploy/etc/environment.env").read_text()
    path = systemd.root / f"etc/tinkermq/environment-{RUN}.env"
    path.write_text(text.replace("TINKERMQ_API_KEY=", f"TINKERMQ_API_KEY={systemd.key}"))
    return systemd.start_ready(f"environment@{RUN}")


async def submitted(systemd: Systemd) -> None:
    """Submit a run that waits for its client, so that nothing but the host plays its game."""
    async with await connect(systemd.url, name="test", api_key=systemd.key or None) as broker:
        await Pool(broker).submit({"name": RUN, "env": {"game": "guess"}}, configured=False)


async def ended(systemd: Systemd) -> None:
    """Ask the host for its game, as a generator does, then cancel the run."""
    async with await connect(systemd.url, name="test", api_key=systemd.key or None) as broker:
        pool = Pool(broker)
        scope = (await pool.find(RUN)).scope
        async with await a_generator(systemd, scope) as generator:
            described = await call(
                generator,
                scope.env_describe,
                DescribeRequest(),
                DescribeReply,
                timeout_s=PATIENCE_S,
                waiting_for="the host",
            )
        assert described.game == "guess"
        await pool.stop(RUN, now=True)


async def a_generator(systemd: Systemd, scope: JobScope) -> Broker:
    """Connect as a process of the job, with the key that the auth service would sign."""
    if not systemd.with_users:
        return await connect(systemd.url, name="test")
    secrets = PoolSecrets(systemd.root / "etc/tinkermq/secrets")
    file = secrets.credentials("scheduler")
    async with await connect(systemd.url, name="test", credentials_file=file) as scheduler:
        jobs = JobStore(scheduler)
        actor = ActorPlacement(name="generator-0", role="generator")
        record = await jobs.get(scope.user, scope.job)
        await jobs.update(record, lambda now: now.model_copy(update={"actors": [actor]}))
    identity = JobIdentity(scope.user, scope.job, actor.role, actor.name, record.attempt)
    return await connect(systemd.url, name="test", api_key=job_key(identity, secrets.job_secret()))


# -- the sandbox under the units' hardening --------------------------------------------------------

SELF_TEST = (
    "from tinkermq.envs.sandbox.interpreters import LocalCodeSandbox, SandboxSettings\n"
    "print(LocalCodeSandbox(SandboxSettings(packages=[])).self_test())"
)
IN_SANDBOX = """
import asyncio, sys
from tinkermq.actors.node.sandbox import SandboxStarter
from tinkermq.schemas.node import WantedActor
program = "from tinkermq.envs.sandbox.served import shared_sandbox\\n" \
    "from tinkermq.envs.sandbox.interpreters import SandboxSettings\\n" \
    "print(shared_sandbox(SandboxSettings(packages=[])).self_test())"
wanted = {"user": "ada", "job": "j", "name": "e", "role": "environment", "run_dir": "/runs/ada/r"}
async def main():
    command = [sys.executable, "-c", program]
    child = await SandboxStarter().start(command, WantedActor.model_validate(wanted), {}, 1)
    return await child.wait()
sys.exit(asyncio.run(main()))
"""
"""The same in an environment host of a pool with users, which is in a sandbox itself."""
AS_SERVICE = ("--reuid=65534", "--regid=65534", "--clear-groups")
NO_RIGHTS = ("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
OPENED = """
set -e
mount --make-rprivate /
kept=$(mktemp -d); chmod 755 "$kept"
mount --rbind "$1" "$kept"
mount -t tmpfs -o mode=755 tmpfs "$1"
cd "$kept"
for one in * .[!.]*; do
  if [ -d "$one" ]; then mkdir "$1/$one"; mount --rbind "$one" "$1/$one"; fi
done
cd /
shift
exec "$@"
"""
"""Runs a program where everybody may enter a folder, such as /root; it is so for nobody else."""


def closed_folder(path: Path) -> Path | None:
    """Return the outermost folder above `path` that other users may not enter."""
    above = [path, *path.parents][::-1]
    return next((folder for folder in above if not folder.stat().st_mode & 0o001), None)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("node", SELF_TEST, "encloses programs (user namespaces"),
        ("node", IN_SANDBOX, "in sandboxes that enclose them"),
        ("environment@", SELF_TEST, "encloses programs (user namespaces"),
    ],
)
def test_the_sandbox_of_games_works_as_hardened_as_the_unit(
    name: str, text: str, said: str
) -> None:
    unit = (REPOSITORY / "deploy" / "systemd" / f"tinkermq-{name}.service").read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    assert settings["NoNewPrivileges"] == "yes"
    assert settings["CapabilityBoundingSet"] == ""
    needed = {"user", "pid", "net", "ipc", "uts", "mnt", "cgroup"}
    assert needed <= set(settings["RestrictNamespaces"].split())
    command = [sys.executable, "-c", text]
    if os.getuid() == 0:
        command = ["setpriv", *AS_SERVICE, *NO_RIGHTS, *command]
        for path in {Path(sys.base_prefix).resolve(), REPOSITORY}:
            if closed := closed_folder(path):
                command = ["unshare", "-m", "sh", "-c", OPENED, "sh", str(closed), *command]
    else:
        command = ["setpriv", "--no-new-privs", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert said in done.stdout, done.stderr
