"""Where processes of several machines meet before they form a group: a TCPStore on the learner.

It listens on the one address by which the learner's machine reaches the broker.
"""

# torch leaves its stores out of `__all__`.
# pyright: reportPrivateImportUsage=false

import socket
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

from ...broker.client.connection import Broker
from ...schemas.wire.errors import BrokerError

MEET_S = 20.0
"""A member that is not there after so long is done without."""


class ProcessGroupFailed(BrokerError):
    """A round that came to nothing: a member was missing, died, or was too slow."""


Store: TypeAlias = dist.TCPStore
"""A place to meet."""


def own_address(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches another; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def open_store(address: str) -> Store:
    """Serve a place to meet, on one address of this machine and a port that is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen()
    port = int(listener.getsockname()[1])
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=MEET_S),
        master_listen_fd=listener.detach(),
    )


def reach_store(address: str, port: int, instead: str = "") -> Store:
    """Connect to the learner's place to meet; ProcessGroupFailed where it cannot be reached.

    `instead`: what else one can do.
    """
    try:
        socket.create_connection((address, port), MEET_S).close()
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=MEET_S))
    except (OSError, RuntimeError) as error:
        raise ProcessGroupFailed(
            f"the learner is to be met at {address}:{port}, which cannot be reached from here: "
            f"{error}",
            hint="let machines of the pool connect to each other on any port, and start the "
            f"learner's node with the broker's address in that network, not 127.0.0.1{instead}",
        ) from error


def server_of(broker: Broker) -> tuple[str, int]:
    """Return host and port of the server that a connection is at; BrokerError where it is down."""
    url = broker.nc.connected_url
    if url is None or url.hostname is None or url.port is None:
        raise BrokerError("the connection to the broker is down", hint="start the learner again")
    return url.hostname, url.port
