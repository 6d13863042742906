"""The source of machines for a configuration; machines that are always there, by SSH.

Over SSH a machine's number is its host's place in the list. `flock` holds a lock on the host as
long as its node runs: a second start finds it held, and a poll tries to share it. A host that does
not answer is reported with ssh's reason and not used meanwhile.
"""

import asyncio
import shlex

from ....broker.client.connection import Broker
from ....broker.client.login import CREDENTIALS_VARIABLE
from ....schemas.machines import MachinesConfig
from ....schemas.wire.errors import DeadlineError, NotFoundError, PlacementError
from ..nodes import Nodes
from .keeper import MachineKeeper
from .kubernetes import KubernetesSource
from .ray import RaySource
from .slurm import SlurmSource
from .source import CommandHints, Machine, MachineNames, MachineSource, run_command

# -- SSH -------------------------------------------------------------------------------------------

_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_FOLDER = 'cd "${TMPDIR:-/tmp}"'
_HINTS = CommandHints(
    missing="install an SSH client there",
    late="is the host up? try the same command by hand",
    refused="`ssh HOST true` must work without a password as the scheduler's user; "
    "correct `hosts:` or `ssh:` of the machines",
)


class SSHSource:
    """Runs nodes on hosts that `ssh` reaches without a password."""

    def __init__(self, config: MachinesConfig, url: str) -> None:
        """Have nodes reach the broker at `url`."""
        self._config = config
        self._url = url
        prefix = MachineNames(url).prefix
        self._hosts = {f"{prefix}{number}": host for number, host in enumerate(config.hosts, 1)}

    async def list_machines(self) -> list[Machine]:
        """Return the hosts on which a node of this pool runs, or that do not answer."""
        results = await asyncio.gather(*(self._look(name) for name in self._hosts))
        return [item for item in results if item is not None]

    async def request_machine(self, name: str) -> None:
        """Start a node in the background of its host; harmless where it runs.

        Raises PlacementError with ssh's reason, or where there are no more hosts.
        """
        if name not in self._hosts:
            raise PlacementError(
                f"all {len(self._hosts)} hosts are in use", hint="add some to `hosts:`"
            )
        node = f"echo $$ > {name}.pid; exec {self._node(name)}"
        held = shlex.join(["setsid", "flock", "-n", "-o", f"{name}.lock", "sh", "-c", node])
        log = shlex.quote(self._log(name))
        await self._run(name, f"{_FOLDER}; {held} < /dev/null >> {log} 2>&1 &")

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        """End the node, which drains whether it is asked to or not; harmless if it has ended."""
        name = machine.name
        await self._run(
            name, f"{_FOLDER}; flock -n -s {name}.lock true || kill -TERM $(cat {name}.pid)"
        )

    async def _look(self, name: str) -> Machine | None:
        host, log = self._hosts[name], self._log(name)
        tell = f"flock -n -s {name}.lock true || stat --format=%Y {name}.pid || true"
        try:
            started = (await self._run(name, f"{_FOLDER}; {tell}")).strip()
        except (PlacementError, DeadlineError, NotFoundError) as error:
            return Machine(name, host, "leaving", why=error.message, log=log)
        if not started.isdecimal():
            return None
        return Machine(name, f"{host}@{started}", "started", float(started), log=log)

    def _log(self, name: str) -> str:
        return f"{self._config.logs or '.'}/{name}.log"

    def _node(self, name: str) -> str:
        words = [self._config.python, "-m", "tinkermq.actors.node", "--nats", self._url]
        words += ["--name", name]
        words += [] if self._config.gpus else ["--slots", str(self._config.slots)]
        if self._config.credentials:
            words = ["env", f"{CREDENTIALS_VARIABLE}={self._config.credentials}", *words]
        return shlex.join(words)

    async def _run(self, name: str, command: str) -> str:
        words = ["ssh", *_OPTIONS, *self._config.ssh, self._hosts[name], command]
        return await run_command(words, _HINTS)


class NoSource:
    """A pool whose nodes are started by hand."""

    async def list_machines(self) -> list[Machine]:
        """Return none."""
        return []

    async def request_machine(self, name: str) -> None:
        """Raise PlacementError."""
        raise PlacementError(f"{name} is not available here", hint="start nodes by hand")

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        """Return nothing: nothing was requested."""


_SOURCES = {
    "slurm": SlurmSource,
    "ray": RaySource,
    "kubernetes": KubernetesSource,
    "ssh": SSHSource,
}


def machine_keeper(broker: Broker, config: MachinesConfig, pool: Nodes) -> MachineKeeper:
    """Return what keeps a pool's machines."""
    url = config.url or broker.url
    return MachineKeeper(broker, config, url, machine_source(config, url), pool)


def machine_source(config: MachinesConfig, url: str) -> MachineSource:
    """Return the seam to the cluster of a configuration; nodes reach the broker at `url`."""
    return _SOURCES[config.kind](config, url) if config.kind in _SOURCES else NoSource()
