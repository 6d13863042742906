"""Several machines on this one: network namespaces, joined by a bridge.

Each has an address of its own and its own loopback; the files are the same. The test itself is on
the bridge. Needs root and iproute2.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tinkermq.schemas.local.process import die_with


class Network:
    """A bridge and the machines on it; `close` removes all of them."""

    def __init__(self) -> None:
        """Make the bridge."""
        assert shutil.which("ip"), "there is no `ip`: apt-get install iproute2"
        assert os.geteuid() == 0, "network namespaces need root"
        self._id = os.getpid()
        self._bridge = f"tmqb{self._id}"
        self._subnet = f"10.213.{self._id % 251}"
        self._machines: dict[str, int] = {}
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._subnet}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def add(self, name: str) -> str:
        """Make a machine; return its address."""
        number = self._machines[name] = len(self._machines) + 1
        space, outside = self._space(name), self._link(name)
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outside, "master", self._bridge, "up")
        for words in (
            ("addr", "add", f"{self._subnet}.{number}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", space, *words)
        return self.address(name)

    @property
    def outside(self) -> str:
        """Address of the test itself."""
        return f"{self._subnet}.254"

    def has(self, name: str) -> bool:
        """Whether there is a machine of this name."""
        return name in self._machines

    def address(self, name: str) -> str:
        """Return the address of a machine."""
        return f"{self._subnet}.{self._machines[name]}"

    def on(self, name: str, *command: str) -> list[str]:
        """Return a command that runs on a machine."""
        return ["ip", "netns", "exec", self._space(name), *command]

    def start(
        self, name: str, command: list[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process on a machine; it ends with the test's."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.on(name, *command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=die_with(os.getpid()),
            )

    def cut(self, name: str) -> None:
        """Take a machine off the bridge."""
        _ip("link", "set", self._link(name), "down")

    def mend(self, name: str) -> None:
        """Put a machine back on the bridge."""
        _ip("link", "set", self._link(name), "up")

    def forbid(self, name: str, other: str) -> None:
        """Let a machine reach another no more, as a firewall does."""
        _ip("-n", self._space(name), "route", "add", "unreachable", f"{self.address(other)}/32")

    def close(self) -> None:
        """Remove the machines, whose processes have ended, and the bridge."""
        for name in self._machines:
            _ip("link", "del", self._link(name))
            _ip("netns", "del", self._space(name))
        _ip("link", "del", self._bridge)

    def _space(self, name: str) -> str:
        return f"tmq-{self._id}-{name}"

    def _link(self, name: str) -> str:
        return f"tmq{self._id}v{self._machines[name]}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
