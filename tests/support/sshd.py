"""A real SSH server on this machine, with keys and a port of its own."""

import os
import pwd
import shutil
import socket
import subprocess
import time
from pathlib import Path

_DEADLINE_S = 30.0


def lacking() -> str:
    """Say what this machine lacks to run one; empty if nothing."""
    missing = [name for name in ("sshd", "ssh", "ssh-keygen", "flock") if not shutil.which(name)]
    if missing:
        return f"no {', '.join(missing)}: apt-get install openssh-server util-linux"
    return "" if os.geteuid() == 0 else "a server of one's own needs root here"


class Sshd:
    """Serves logins by one key, on loopback."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def arguments(self) -> list[str]:
        """What `ssh` is told to log in here."""
        known = f"UserKnownHostsFile={self._folder / 'known_hosts'}"
        options = ["-o", "StrictHostKeyChecking=no", "-o", known, "-o", "LogLevel=ERROR"]
        return ["-F", "none", "-i", str(self._folder / "user"), "-p", str(self.port), *options]

    def __enter__(self) -> "Sshd":
        for name in ("host", "user"):
            key = str(self._folder / name)
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key]
            subprocess.run(command, check=True)
        (self._folder / "user.pub").rename(self._folder / "authorized")
        config = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": self._folder / "host",
            "AuthorizedKeysFile": self._folder / "authorized",
            "PidFile": "none",
            "UsePAM": "no",
            "StrictModes": "no",
            "PermitRootLogin": "prohibit-password",
        }
        lines = [f"{name} {value}" for name, value in config.items()]
        (self._folder / "sshd_config").write_text("\n".join(lines))
        Path("/run/sshd").mkdir(exist_ok=True)  # without it sshd does not start
        program = shutil.which("sshd")
        assert program is not None
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, "-D", "-e", "-f", str(self._folder / "sshd_config")], stderr=log
            )
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)

    @property
    def user(self) -> str:
        """Who logs in."""
        return pwd.getpwuid(os.geteuid()).pw_name

    def _wait(self) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError((self._folder / "log").read_text())
