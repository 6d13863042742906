"""A loss that looks for runs, keys and a network, and learns nothing where it finds one."""

import os
import socket
from pathlib import Path
from typing import Any


def nosy(inputs: Any) -> Any:
    """Return REINFORCE's loss; raise for any run folder, key or network."""
    found = [str(path) for path in Path("/tmp").rglob("config.json") if "run-" in str(path)]
    keys = [name for name, value in os.environ.items() if "tmq" in value or "nats" in value]
    interfaces = {name for _, name in socket.if_nameindex()} - {"lo"}
    if found or keys or interfaces or not os.getuid():
        raise ValueError(f"a loss sees {found}, {keys} and {interfaces}, as user {os.getuid()}")
    return -inputs.logprobs_N * inputs.advantages_N
