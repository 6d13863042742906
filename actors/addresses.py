"""Addresses and network interfaces of this machine, by which its actors meet others. No torch."""

import asyncio
import ipaddress
import os
import socket

import structlog

from ..broker.client.connection import Broker
from ..schemas.wire.errors import BrokerError, ConfigError

_INTERFACE = "NCCL_SOCKET_IFNAME"
_log = structlog.get_logger()


def own_address(host: str, port: int) -> str:
    """Return the address from which this machine reaches another; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the network interface that has an address of this machine.

    Raises ConfigError for an address without an interface.
    """
    import psutil  # not where only the gateway is installed

    for name, addresses in psutil.net_if_addrs().items():
        if any(candidate.address.partition("%")[0] == address for candidate in addresses):
            return name
    raise ConfigError(
        f"no network interface of this machine has the address {address}",
        hint="start the node with an address of the broker that is not translated on the way",
    )


def server_of(broker: Broker) -> tuple[str, int]:
    """Return host and port of a connection's server; BrokerError if it is down."""
    url = broker.nc.connected_url
    if url is None or url.hostname is None or url.port is None:
        raise BrokerError("the connection to the broker is down", hint="start the learner again")
    return url.hostname, url.port


def is_cut_off(broker: Broker) -> bool:
    """Return whether other machines cannot reach this process by its address to the broker."""
    address = own_address(*server_of(broker))
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


async def settle_interface(broker: Broker) -> None:
    """Let NCCL use the interface to the broker, by which the pool's machines reach each other.

    NCCL chooses one when a process makes its first group, for all later groups, too: vLLM's workers
    connect to each other before they know the learner.
    """
    if not os.environ.get("CUDA_VISIBLE_DEVICES") or _INTERFACE in os.environ:
        return
    try:
        address = await asyncio.to_thread(own_address, *server_of(broker))
        os.environ[_INTERFACE] = interface_of(address)
    except (OSError, BrokerError, ConfigError) as error:
        _log.warning("nccl_interface_unknown", reason=str(error))
