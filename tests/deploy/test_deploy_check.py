"""`tinkermq deploy check`, on a folder that stands for a machine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.credentials import PoolSecrets
from tinkermq.broker.nats_server import NatsServer

from tests.support.configs import REPOSITORY

DEPLOY = REPOSITORY / "deploy"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine that was set up as the guide says."""
    root = tmp_path / "root"
    units = root / "etc/systemd/system"
    shutil.copytree(DEPLOY / "systemd", units)
    (root / "etc/tinkermq").mkdir()
    shutil.copy(DEPLOY / "etc/tinkermq.env", root / "etc/tinkermq")
    (root / "etc/tinkermq/tinkermq.env").chmod(0o640)
    PoolSecrets(root / "etc/tinkermq/secrets").create("root", 0)
    config = (DEPLOY / "nats/single.conf").read_text()
    config = config.replace("/var/lib/tinkermq-nats", str(root / "var/lib/tinkermq-nats"))
    (root / "etc/tinkermq/nats.conf").write_text(config)
    (root / "etc/tinkermq/nats.conf").chmod(0o640)
    users = ("tinkermq-nats", "tinkermq-scheduler", "tinkermq-node")
    (root / "etc/passwd").write_text("".join(f"{name}:x:990:990::/:\n" for name in users))
    (root / "etc/group").write_text("".join(f"{name}:x:990:\n" for name in (*users, "tinkermq")))
    for program in ("python", "nats-server", "tinkermq"):
        make_program(root / "opt/tinkermq/bin" / program)
    make_program(root / "bin/kill")
    (root / "var/lib/tinkermq").mkdir(parents=True)
    return root


def make_program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)


def findings(root: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    command = [f"{sys.prefix}/bin/tinkermq", "deploy", "check", "--json"]
    done = subprocess.run(
        [*command, "--root", str(root)], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)["checks"]}


def test_a_machine_that_is_set_up_as_the_guide_says_is_found_well(root: Path) -> None:
    code, found = findings(root)
    wrong = {name: one for name, one in found.items() if not one["ok"]}
    assert not wrong
    assert code == 0
    assert "tinkermq-scheduler" in found["units"]["detail"]


def test_what_systemd_and_the_server_accept_is_accepted(root: Path) -> None:
    env, unit = "etc/tinkermq/tinkermq.env", root / "etc/systemd/system/tinkermq-node.service"
    url = 'TINKERMQ_NATS_URL="nats://127.0.0.1:4222"\n'
    (root / env).write_text(f"; of caf\xe9\n{url}", encoding="latin-1")
    unit.write_text(unit.read_text().replace("ExecStart=/opt", "ExecStart=\nExecStart=-/opt"))
    for file in ("etc/passwd", "etc/tinkermq/nats.conf"):
        with (root / file).open("ab") as appended:
            appended.write(b"# caf\xe9\n")
    code, found = findings(root)
    assert not [one for one in found.values() if not one["ok"]]
    assert code == 0


def test_without_systemd_analyze_the_units_are_reported_as_not_verified(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _, found = findings(root)
    assert "units not verified" in found["systemd"]["detail"]
    assert "tinkermq-node" not in found


def test_a_server_that_other_machines_reach_needs_users_and_tls(root: Path, tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", host="0.0.0.0")
    server.start()
    try:
        (root / "etc/tinkermq/tinkermq.env").write_text(f"TINKERMQ_NATS_URL={server.url}\n")
        code, found = findings(root)
    finally:
        server.stop()
    assert code == 1
    assert found["nats access"]["detail"] == "the server listens on 0.0.0.0 without users and TLS"
    assert "accounts.conf" in found["nats access"]["hint"]


def test_a_server_that_does_not_run_is_not_judged(root: Path, tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    server.stop()
    (root / "etc/tinkermq/tinkermq.env").write_text(f"TINKERMQ_NATS_URL={server.url}\n")
    _, found = findings(root)
    assert found["nats access"]["ok"]
    assert "no NATS server answers" in found["nats access"]["detail"]


def test_everything_that_is_wrong_is_said_with_its_remedy(root: Path) -> None:
    (root / "opt/tinkermq/bin/python").unlink()
    node = root / "etc/systemd/system/tinkermq-node.service"
    node.write_text(node.read_text().replace("-m tinkermq", '-m "tinkermq'))
    (root / "etc/passwd").write_text("root:x:0:0::/:\n")
    (root / "etc/tinkermq/tinkermq.env").write_text("TINKERMQ_REPLICAS=2\n")
    (root / "etc/tinkermq/tinkermq.env").chmod(0o644)
    config = root / "etc/tinkermq/nats.conf"
    with config.open("a") as file:
        file.write("no_such_key: 1\n")
    (root / "etc/tinkermq/tls").mkdir()
    (root / "etc/tinkermq/tls/server.crt").write_text("no certificate")
    code, found = findings(root)
    assert code == 1
    wrong = {name: str(one["detail"]) for name, one in found.items() if not one["ok"]}
    assert "/opt/tinkermq/bin/python is not executable" in wrong["tinkermq-scheduler"]
    assert "Unbalanced quoting" in wrong["tinkermq-node"]
    assert "no user or group tinkermq-nats, tinkermq-node" in wrong["accounts"]
    assert "TINKERMQ_NATS_URL is not set" in wrong["environment"]
    assert "everybody may read" in wrong["secrets"]
    assert "no_such_key" in wrong["nats.conf"]
    assert "tls server" in wrong
    assert all(found[name]["hint"] for name in wrong)


def test_a_machine_with_the_node_s_secrets_alone_can_be_a_node(root: Path) -> None:
    secrets = root / "etc/tinkermq/secrets"
    for path in secrets.iterdir():
        if path.name != "node.creds":
            path.unlink()
    _, found = findings(root)
    assert found["credentials"]["ok"]
    assert "tinkermq-auth (/etc/tinkermq/secrets/auth.creds)" in found["credentials"]["detail"]
    (secrets / "node.creds").chmod(0o640)
    _, found = findings(root)
    assert "a group may read" in found["secrets"]["detail"]
    assert "chmod go= " in found["secrets"]["hint"]
    (secrets / "node.creds").unlink()
    _, found = findings(root)
    assert not found["credentials"]["ok"]
    assert "tinkermq init" in found["credentials"]["hint"]


def test_a_machine_without_anything_is_told_where_to_begin(tmp_path: Path) -> None:
    code, found = findings(tmp_path)
    assert code == 1
    assert "cp deploy/systemd/*" in str(found["units"]["hint"])
