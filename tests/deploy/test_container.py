"""The image and the compose file: everything that can be wrong without a container engine.

No engine runs in CI, so nothing is built here. Compose reads its file, and what the files name
must exist: modules, options, variables, secrets, volumes, extras and folders.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinkermq.broker.nats_server import binary_path
from tinkermq.schemas.wire.subjects import SERVICES

from tests.support.configs import REPOSITORY

pytestmark = pytest.mark.full

FOLDER = REPOSITORY / "deploy" / "container"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
ON_GPUS: dict[str, Any] = yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text())
NOT_OURS = {"GOMEMLIMIT", "HF_HOME"}
ACTORS = ("auth", "scheduler", "gateway", "node")


def steps() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile."""
    text = (FOLDER / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line and line[0] != "#"]
    return [(word, rest) for word, rest in lines]


def test_the_image_copies_what_there_is_and_installs_extras_that_exist() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    copied = [rest for word, rest in steps() if word == "COPY" and "--from" not in rest]
    locks = {text.replace("${LOCK}", name) for text in copied for name in ("container", "gpu")}
    sources = {name for rest in locks for name in rest.split()[:-1]}
    assert sources >= {"schemas", "broker", "envs", "actors", "clients", "pyproject.toml"}
    assert all((REPOSITORY / name).exists() for name in sources)
    assert project["name"] == "tinkermq"


def test_the_image_installs_what_is_locked_and_nothing_else() -> None:
    installs = [rest for word, rest in steps() if word == "RUN" and "/pip install" in rest]
    assert [one.split("install ", 1)[1] for one in installs] == [
        *("--require-hashes -r locked.txt", "--no-deps .")
    ]
    arguments = dict(rest.split("=", 1) for word, rest in steps() if word == "ARG")
    assert arguments["LOCK"] == "container"
    chosen = ON_GPUS["services"]["node"]["build"]["args"]
    assert set(chosen) <= set(arguments)
    for lock in (arguments["LOCK"], chosen["LOCK"]):
        assert (REPOSITORY / f"deploy/locks/{lock}.txt").exists()
    bases = {rest.split()[0] for word, rest in steps() if word == "FROM"}
    assert bases == {"${BASE}"}


def test_the_image_runs_as_nobody_in_particular() -> None:
    users = [rest for word, rest in steps() if word == "USER"]
    made = next(rest for word, rest in steps() if word == "RUN" and "useradd" in rest)
    assert users == ["10001:10001"]
    assert "--uid 10001" in made


def test_the_image_has_what_compilers_of_kernels_need() -> None:
    """Triton calls a C compiler, torch.compile a C++ compiler; both load what they wrote."""
    packages = next(rest for word, rest in steps() if "apt-get install" in rest).split()
    assert {"gcc", "g++", "libc6-dev"} <= set(packages)
    node = COMPOSE["services"]["node"]
    assert node["read_only"]
    assert node["tmpfs"] == ["/tmp:exec,mode=1777"]  # noexec is the default of a tmpfs
    variables = " ".join(rest for word, rest in steps() if word == "ENV")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in variables


def test_a_node_on_gpus_sees_them_and_may_pin_memory() -> None:
    node = ON_GPUS["services"]["node"]
    assert set(ON_GPUS["services"]) == {"node"}
    (devices,) = node["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["count"], devices["capabilities"]) == ("all", ["gpu"])
    assert node["ulimits"]["memlock"] == -1
    assert node["image"] != COMPOSE["services"]["node"]["image"]


@pytest.mark.parametrize("name", ACTORS)
def test_a_service_starts_a_program_with_options_that_it_has(name: str) -> None:
    program, flag, module, *options = COMPOSE["services"][name]["command"]
    assert (program, flag) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    shown = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert [one for one in options if one.startswith("--") and one not in shown] == []


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_given_variables_that_are_read_and_files_that_are_mounted(name: str) -> None:
    service = COMPOSE["services"][name]
    variables = service.get("environment", {})
    unread = {one for one in variables if one not in NOT_OURS and one not in _read_by_us()}
    assert not unread
    assert not {one for one in variables if re.search("KEY|SEED|PASSWORD", one)}
    for path in variables.values():
        if path.startswith("/run/secrets/"):
            assert path.removeprefix("/run/secrets/") in service["secrets"]
    for one in service.get("secrets", []):
        assert one in COMPOSE["secrets"]
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        assert source.startswith("./") or source in COMPOSE["volumes"]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"]
    assert service["security_opt"][0] == "no-new-privileges:true"
    assert {"mem_limit", "pids_limit"} <= service.keys()
    assert "privileged" not in service
    loosened = service["security_opt"][1:]
    assert not loosened or name == "node"
    page = (REPOSITORY / "docs" / "deploying.md").read_text()
    assert [one for one in loosened if f"`{one}`" not in page] == []


def test_auth_gets_its_own_secrets_everywhere() -> None:
    """The unit's test shows that it needs no others."""
    unit = (REPOSITORY / "deploy" / "systemd" / "tinkermq-auth.service").read_text()
    own = set(re.findall(r"^LoadCredential=([^:]+):", unit, re.M))
    assert set(COMPOSE["services"]["auth"]["secrets"]) == own | {"ca.crt"}
    page = (REPOSITORY / "docs" / "clusters.md").read_text()
    (copied,) = re.findall(r"for name in (auth\.creds .*); do", page)
    assert set(copied.split()) == own


def _read_by_us() -> set[str]:
    """Return all variables that stand in the code."""
    rooms = ("schemas", "broker", "envs", "actors", "clients")
    files = [file for room in rooms for file in (REPOSITORY / room).rglob("*.py")]
    return {name for file in files for name in re.findall(r"TINKERMQ_[A-Z_]+", file.read_text())}


def test_the_secrets_are_those_that_init_writes_and_stay_out_of_the_image() -> None:
    for name, secret in COMPOSE["secrets"].items():
        if name != "ca.crt":
            assert not name.endswith(".creds") or name.removesuffix(".creds") in SERVICES
            assert secret["file"] == f"./pool/secrets/{name}"
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert {"deploy/container/pool", "deploy/container/tls"} <= set(ignored)


def test_the_server_of_the_containers_takes_its_configuration(tmp_path: Path) -> None:
    init = [f"{sys.prefix}/bin/tinkermq", "init", "--home", str(tmp_path / "pool")]
    subprocess.run(init, check=True, capture_output=True)
    tls = tmp_path / "tls"
    tls.mkdir()
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-noenc", "-subj", "/CN=nats"]
    files = ["-keyout", str(tls / "server.key"), "-out", str(tls / "server.crt")]
    subprocess.run([*new, *files], check=True, capture_output=True)
    text = (FOLDER / "nats.conf").read_text().replace("/etc/tinkermq", str(tmp_path))
    (tmp_path / "nats.conf").write_text(
        text.replace("/var/lib/tinkermq-nats", str(tmp_path / "store"))
    )
    done = subprocess.run(
        [str(binary_path()), "-t", "-c", str(tmp_path / "nats.conf")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("more", [[], [FOLDER / "compose.gpu.yaml"]], ids=["cpu", "gpu"])
def test_compose_itself_understands_the_files(tmp_path: Path, more: list[Path]) -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("needs docker-compose: apt-get install docker-compose, as root")
    text = (FOLDER / "compose.yaml").read_text()
    older = tmp_path / "compose.yaml"  # Debian's compose is older than the key `name`
    older.write_text(re.sub("^name: tinkermq\n", "", text, count=1, flags=re.MULTILINE))
    done = subprocess.run(
        [
            *("docker-compose", "--project-directory", str(FOLDER), "-f", str(older)),
            *(text for file in more for text in ("-f", str(file))),
            "config",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    merged = yaml.safe_load(done.stdout)["services"]
    assert set(merged) == set(COMPOSE["services"])
    assert merged["node"]["image"] == ("tinkermq-gpu" if more else "tinkermq")
    assert merged["node"]["build"]["dockerfile"] == "deploy/container/Containerfile"
