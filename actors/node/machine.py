"""A node's name, its slots, and a lock against a second node of the same name."""

import fcntl
import hashlib
import os
import platform
import re
import socket
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from ...broker.client.faults import server_urls
from ...schemas.version import VERSION
from ...schemas.wire.errors import ConfigError, StateError

_PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "nvidia-cuda-runtime": "cuda",
    "nvidia-cuda-runtime-cu": "cuda",
    "nvidia-nccl-cu": "nccl",
}
"""Packages, or prefixes of their names, and their keys in the result."""


def default_name() -> str:
    """Return the host's name as a token of a subject."""
    name = re.sub(r"[^a-z0-9_-]+", "-", socket.gethostname().lower()).strip("-_")
    return name[:64] or "node"


def default_slots() -> int:
    """Return the CPU shares of this machine; a learner and a generator fit on the smallest."""
    affinity = getattr(os, "sched_getaffinity", None)
    num_cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(2, num_cores)


def package_versions() -> dict[str, str]:
    """Return the installed versions of Python and of the packages that actors compute with.

    Nothing is imported. CUDA and NCCL are those in packages, as torch's wheels bring.
    """
    versions = {"python": platform.python_version(), "tinkermq": VERSION}
    for distribution in distributions():
        for prefix, name in _PACKAGES.items():
            if distribution.name == prefix or (
                prefix.endswith("-cu") and distribution.name.startswith(prefix)
            ):
                versions[name] = distribution.version
    return versions


def check_slots(slots: int | None, gpus: str | None) -> None:
    """Raise ConfigError for slots that a node cannot have."""
    if slots is not None and slots < 1:
        raise ConfigError(
            f"--slots {slots} leaves a node without anything to give away",
            hint=f"give 1 or more, or leave it out: this machine has {default_slots()}",
        )
    if slots is not None and gpus is not None:
        raise ConfigError(
            "--slots counts CPU shares and --gpus names GPUs: a node gives away one or the other",
            hint="leave one of them out",
        )


def lock_name(name: str, nats_url: str) -> IO[str]:
    """Lock a node's name on this machine for one broker, while the file is open.

    The kernel releases the lock when the process ends in any way. Raises StateError if another
    process holds it, with its process id.
    """
    parts = urlsplit(server_urls(nats_url)[0])
    broker = hashlib.sha256(f"{parts.hostname}:{parts.port or 4222}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"tinkermq-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"node-{name}-{broker}.pid"
    file = path.open("a+", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise StateError(
            f"a node named {name!r} runs already on this machine (process {holder})",
            hint="give this one another name with --name",
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
