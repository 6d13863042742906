"""Certificates for tests."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """Files in PEM."""

    certificate: Path
    key: Path


_LOOPBACK = ("IP:127.0.0.1", "DNS:localhost")


def self_signed(folder: Path, names: Sequence[str] = _LOOPBACK) -> Certificate:
    """Make a certificate for these names, signed by itself."""
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(made.key), "-out", str(made.certificate), "-subj", "/CN=localhost"),
            *("-addext", f"subjectAltName={','.join(names)}"),
        ],
        check=True,
        capture_output=True,
    )
    return made
