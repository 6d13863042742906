"""Who can reach a nats-server, read from its configuration."""

from pathlib import Path

import pytest
from tinkermq.broker.credentials import PoolSecrets
from tinkermq.clients.cli.deploy import listening_host, read_nats_conf

from tests.support.configs import REPOSITORY


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("", "all addresses"),
        ("port: 4222", "all addresses"),
        ("listen: 4222", "all addresses"),
        ('listen: "127.0.0.1:4222" # "0.0.0.0:4222"', "127.0.0.1"),
        ('listen = "[::1]:4222"', "::1"),
        ("host=10.0.0.1; port=4222", "10.0.0.1"),
        ("cluster { listen: 10.0.0.2:6222 }\nhost localhost\n// host 0.0.0.0", "localhost"),
        ("routes: [\n nats://10.0.0.2:6222\n]\nlisten: $WHERE", "10.0.0.3"),
    ],
)
def test_the_address_on_which_clients_are_listened_to(tmp_path: Path, text: str, host: str) -> None:
    path = tmp_path / "nats.conf"
    path.write_text(text)
    assert listening_host(read_nats_conf(path, {"WHERE": "10.0.0.3:4222"})) == host


@pytest.mark.parametrize("name", ["single", "cluster"])
def test_our_own_configurations_are_understood(tmp_path: Path, name: str) -> None:
    text = (REPOSITORY / f"deploy/nats/{name}.conf").read_text()
    PoolSecrets(tmp_path / "secrets").create("root", 1)
    (tmp_path / "nats.conf").write_text(text.replace("# include", "include"))
    conf = read_nats_conf(tmp_path / "nats.conf", {"NATS_LISTEN": "10.0.0.1:4222"})
    assert listening_host(conf) == ("127.0.0.1" if name == "single" else "10.0.0.1")
    assert {"authorization", "accounts", "jetstream"} <= conf.keys()
    assert ("tls" in conf) == (name == "cluster")
