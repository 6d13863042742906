"""Certificates for tests."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """Files in PEM."""

    certificate: Path
    key: Path


def self_signed(folder: Path) -> Certificate:
    """Make a certificate for this machine, signed by itself."""
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(made.key), "-out", str(made.certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return made
