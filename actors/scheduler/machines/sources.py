"""Which source stands behind which configuration."""

from ....broker.client.connection import Broker
from ....schemas.machines import MachinesConfig
from ....schemas.wire.errors import PlacementError
from ..nodes import Nodes
from .keeper import MachineKeeper
from .kubernetes import KubernetesSource
from .ray import RaySource
from .slurm import SlurmSource
from .source import Machine, MachineSource
from .ssh import SSHSource


class NoSource:
    """A pool whose nodes are started by hand."""

    async def look(self) -> list[Machine]:
        """Return none."""
        return []

    async def ask(self, name: str) -> None:
        """Raise PlacementError."""
        raise PlacementError(f"there is nobody to ask for {name}", hint="start nodes by hand")

    async def give_back(self, machine: Machine, *, drain: bool) -> None:
        """Give back what nobody has asked for: nothing."""


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
