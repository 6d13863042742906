"""The units of deploy/: sound to systemd's own tools, and a pool runs by them as the guide says.

systemd itself runs here, in namespaces (`tests.support.systemd`): it starts the services as their
units stand, with their users, secrets, bounds and folders.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tinkermq.actors.policy.tiny_models import save_tiny_model

from tests.support.configs import REPOSITORY, small_job
from tests.support.systemd import SYSTEMD, Machine

pytestmark = pytest.mark.full

UNITS = sorted((REPOSITORY / "deploy" / "systemd").glob("*.service"))
MOST_EXPOSED = {
    "tinkermq-auth": 1.4,
    "tinkermq-environment@": 2.9,
    "tinkermq-gateway": 1.4,
    "tinkermq-nats": 1.2,
    "tinkermq-node": 3.2,
    "tinkermq-scheduler": 1.4,
}
"""The exposure level that `systemd-analyze security` gives each unit, from 0 to 10."""
RUN = "my-run"
HOSTED = "hosted-by-a-unit"
SERVICES = ("nats", "auth", "scheduler", "node", "gateway")


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


def settings(unit: str) -> list[tuple[str, str]]:
    """Return the settings of a unit, in their order."""
    text = (REPOSITORY / "deploy" / "systemd" / f"{unit}.service").read_text()
    lines = [line for line in text.splitlines() if "=" in line and line[0] != "#"]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


def values(unit: str, key: str) -> list[str]:
    return [value for name, value in settings(unit) if name == key]


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
    most = MOST_EXPOSED[unit.stem]
    done = analyzed("security", "--offline=true", f"--threshold={most * 10:.0f}", path)
    found = re.search(r"Overall exposure level .*: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= most
    assert done.returncode == 0


@pytest.mark.parametrize("unit", [unit.stem for unit in UNITS])
def test_a_service_has_a_user_a_bound_and_its_own_secrets(unit: str) -> None:
    assert values(unit, "User") or values(unit, "DynamicUser") == ["yes"]
    assert values(unit, "MemoryMax")
    assert values(unit, "TasksMax")
    assert values(unit, "NoNewPrivileges") == ["yes"]
    assert values(unit, "CapabilityBoundingSet") == [""]
    hidden = " ".join(values(unit, "InaccessiblePaths"))
    assert "-/etc/tinkermq/secrets" in hidden
    # what others of the machine may read of a process: its variables never hold a secret
    assert [pair for pair in values(unit, "Environment") if "KEY" in pair] == []


def test_the_node_gets_what_gpus_need() -> None:
    unit = "tinkermq-node"
    assert values(unit, "LimitMEMLOCK") == ["infinity"]
    assert values(unit, "CacheDirectory") == [unit]
    compiled = values(unit, "Environment")[-1]
    assert compiled.startswith(f"TORCHINDUCTOR_CACHE_DIR=/var/cache/{unit}/")
    # the node has no rights: what makes device files runs as root, and may be missing
    assert [command.split()[0] for command in values(unit, "ExecStartPre")] == [
        "-+/usr/bin/nvidia-smi",
        "-+/usr/bin/nvidia-modprobe",
    ]
    assert values(unit, "DeviceAllow")[0] == "char-nvidia* rw"
    for hides in ("PrivateDevices", "NoExecPaths"):
        assert values(unit, hides) == []
    assert values(unit, "MemoryDenyWriteExecute") == []  # Triton and CUDA make code


# -- a pool under systemd --------------------------------------------------------------------------


@dataclass
class Pool:
    """A machine that was set up as docs/deploying.md says, and the key of its admin."""

    machine: Machine
    key: str

    def tinkermq(self, *words: str) -> str:
        return self.machine.run("/opt/tinkermq/bin/tinkermq", *words, **self.variables)

    @property
    def variables(self) -> dict[str, str]:
        return {"TINKERMQ_NATS_URL": "nats://127.0.0.1:4222", "TINKERMQ_API_KEY": self.key}

    def as_service(self, unit: str, script: str) -> tuple[int, str]:
        """Run a shell script with the rights, files and processes of a running service."""
        pid = self.machine.run("systemctl", "show", "-P", "MainPID", unit).strip()
        status = self.machine.run("cat", f"/proc/{pid}/status")
        ids = dict(line.split(":", 1) for line in status.splitlines())
        uid, gid, groups = ids["Uid"].split()[0], ids["Gid"].split()[0], ids["Groups"].split()
        return self.machine.call(
            *("nsenter", "-t", pid, "-m", "setpriv", f"--reuid={uid}", f"--regid={gid}"),
            *([f"--groups={','.join(groups)}"] if groups else ["--clear-groups"]),
            *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "sh", "-c", script),
        )


def commands_of_the_guide() -> str:
    """Return the commands of docs/deploying.md that set up a machine once the package is there."""
    page = (REPOSITORY / "docs" / "deploying.md").read_text()
    section = page.split("## One machine with systemd", 1)[1]
    return section.split("```sh\n")[2].split("```")[0]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool on a machine of its own, set up by the commands of the guide."""
    if os.geteuid() or not SYSTEMD.exists():
        pytest.skip("needs root and systemd")
    shared = tmp_path_factory.mktemp("shared")
    model = save_tiny_model(shared / "tiny", width=64, layers=2, seed=1)
    job = small_job(model, env={"hosts": 1}, training={"num_steps": 2, "save_freq": 1})
    job["model"]["path"] = "/srv/tiny"
    (shared / "job.json").write_text(json.dumps(job))
    subprocess.run(["chmod", "-R", "o+rX", str(shared)], check=True)
    machine = Machine(tmp_path_factory.mktemp("machine"), shared)
    try:
        asyncio.run(machine.start())
        printed = machine.run("sh", "-euxc", commands_of_the_guide())
        yield Pool(machine, re.findall(r"tmq_root_\w+", printed)[0])
    finally:
        asyncio.run(machine.close())


def test_the_guide_s_commands_start_every_service(pool: Pool) -> None:
    for name in SERVICES:
        shown = pool.machine.run("systemctl", "is-active", f"tinkermq-{name}")
        assert shown.strip() == "active"
    assert "node" in pool.tinkermq("doctor")


@pytest.mark.long
def test_scheduler_and_node_share_a_run_s_folder_and_a_sandbox_hosts_its_game(pool: Pool) -> None:
    pool.tinkermq("train", "/srv/job.json", f"name={RUN}")
    folder = f"/var/lib/tinkermq/outputs/root/{RUN}"
    owner = pool.machine.run("stat", "-c", "%U %G", folder, f"{folder}/checkpoints/step_000002")
    assert owner.splitlines()[1] == "tinkermq-node tinkermq"
    logs = pool.tinkermq("logs", RUN)
    assert "COMPLETED" in pool.tinkermq("ps", "--all"), logs
    pool.tinkermq("train", "/srv/job.json", "--from", f"{RUN}@1", "name=after")
    assert pool.tinkermq("ps", "--all").count("COMPLETED") == 2
    pool.tinkermq("delete", RUN, "after", "--yes")
    assert pool.machine.call("test", "-e", folder)[0] == 1


def test_a_unit_hosts_a_run_with_its_owner_s_key_and_ends_with_it(pool: Pool) -> None:
    unit = f"tinkermq-environment@{HOSTED}"
    key = f"/etc/tinkermq/environment-{HOSTED}.key"
    pool.machine.run("sh", "-c", f"umask 077; echo {pool.key} > {key}")
    pool.tinkermq("train", "/srv/job.json", f"name={HOSTED}", "env.hosts=0", "--detach")
    pool.machine.run("systemctl", "start", unit)
    # the game of a user, which may try what it likes
    assert pool.as_service(unit, f"cat /run/credentials/{unit}.service/owner.key")[0] == 0
    for path in ("/var/lib/tinkermq", key, "/etc/tinkermq/secrets", "/var/lib/tinkermq-node"):
        assert pool.as_service(unit, reading(path))[0] != 0
    for pid in pids(pool, unit):
        assert pool.as_service(unit, reading(f"/proc/{pid}/environ"))[0] != 0
    pool.tinkermq("watch", HOSTED)
    assert "COMPLETED" in pool.tinkermq("ps", "--all")
    ended(pool, unit)
    assert pool.machine.run("systemctl", "show", "-P", "Result", unit).strip() == "success"
    # the exit code after which it is not started again
    assert pool.machine.call("systemctl", "start", unit)[0] != 0
    ended(pool, unit)
    assert pool.machine.run("systemctl", "show", "-P", "ExecMainStatus", unit).strip() == "2"
    assert pool.machine.run("systemctl", "show", "-P", "NRestarts", unit).strip() == "0"


def ended(pool: Pool, unit: str) -> None:
    """Wait until a unit is not active any more."""
    pool.machine.run("sh", "-c", f"while systemctl -q is-active {unit}; do sleep 0.1; done")


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_reads_its_own_secrets_and_nobody_else_s(pool: Pool, service: str) -> None:
    unit = f"tinkermq-{service}"
    own = {value.partition(":")[0] for value in values(unit, "LoadCredential")}
    for name in own:
        code, output = pool.as_service(unit, f"cat /run/credentials/{unit}.service/{name}")
        assert (code, bool(output)) == (0, True)
    others = [f"/run/credentials/tinkermq-{one}.service/{one}.creds" for one in SERVICES]
    others = [path for path in others if Path(path).name not in own]
    others += ["/etc/tinkermq/secrets/job.key", "/etc/tinkermq/tinkermq.env", "/root/x"]
    if service != "nats":
        others += ["/var/lib/tinkermq-nats/jetstream"]
    if service not in ("scheduler", "node", "gateway"):
        others += ["/var/lib/tinkermq"]
    others += [f"/proc/{pid}/environ" for pid in pids(pool, unit)]
    for path in others:
        code, output = pool.as_service(unit, reading(path))
        assert code != 0, f"{path}: {output}"


def reading(path: str) -> str:
    """Return a shell script that reads a file or lists a folder."""
    return f"if [ -d {path} ]; then ls {path}; else cat {path}; fi"


def pids(pool: Pool, but: str) -> list[str]:
    """Return the main processes of the services other than one."""
    others = [f"tinkermq-{one}" for one in SERVICES if f"tinkermq-{one}" != but]
    return pool.machine.run("systemctl", "show", "-P", "MainPID", *others).split()


@pytest.mark.parametrize(
    ("service", "place"),
    [
        ("gateway", "/var/lib/tinkermq"),
        ("auth", "/etc/tinkermq"),
        ("node", "/var/lib/tinkermq-scheduler"),
        ("node", "/opt/tinkermq/lib"),
        ("scheduler", "/var/lib/tinkermq-node"),
        ("scheduler", "/etc"),
        ("nats", "/var/lib"),
    ],
)
def test_a_service_writes_nowhere_but_in_its_own_folders(
    pool: Pool, service: str, place: str
) -> None:
    code, output = pool.as_service(f"tinkermq-{service}", f"touch {place}/here")
    assert code != 0, output


def test_modules_that_the_node_leaves_in_the_run_folders_are_not_the_scheduler_s(
    pool: Pool,
) -> None:
    planted = "/var/lib/tinkermq/asyncio.py"
    code, output = pool.as_service("tinkermq-node", f"echo 'raise SystemExit(9)' > {planted}")
    assert code == 0, output
    for name in ("scheduler", "node"):
        pool.machine.run("systemctl", "restart", f"tinkermq-{name}")
    pool.machine.run("rm", planted)


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
NOT_OF_A_TEST = ("Type", "ExecStart", "ExecStartPre", "Restart", "WatchdogSec", "NotifyAccess")


@pytest.mark.parametrize(
    ("unit", "text", "said"),
    [
        ("tinkermq-node", SELF_TEST, "encloses programs (user namespaces"),
        ("tinkermq-node", IN_SANDBOX, "in sandboxes that enclose them"),
        ("tinkermq-environment@", SELF_TEST, "encloses programs (user namespaces"),
    ],
)
def test_the_sandbox_of_games_works_as_hardened_as_the_unit(
    pool: Pool, unit: str, text: str, said: str
) -> None:
    name = f"{unit.removesuffix('@')}-self-test"
    kept = [f"{key}={value}" for key, value in settings(unit) if key not in NOT_OF_A_TEST]
    kept = [line for line in kept if "LoadCredential" not in line and "%d" not in line]
    lines = [line.replace("%i", "x") for line in kept]
    at = lines.index(next(line for line in lines if line.startswith(("User", "DynamicUser"))))
    lines[at:at] = [
        "[Service]",
        "Type=oneshot",
        f"ExecStart=/opt/tinkermq/bin/python -P /run/{name}.py",
    ]
    lines = [line for line in lines[at:] if not line.startswith("WantedBy")]
    for path, content in (
        (f"/run/{name}.py", text),
        (f"/run/systemd/system/{name}.service", "\n".join(lines)),
    ):
        pool.machine.run(
            "sh",
            "-c",
            'mkdir -p "$(dirname "$1")"; printf "%s\\n" "$2" > "$1"',
            "sh",
            path,
            content,
        )
    pool.machine.run("systemctl", "daemon-reload")
    pool.machine.run("systemctl", "start", name)
    assert said in pool.machine.run("cat", f"/run/log/{name}.service")
