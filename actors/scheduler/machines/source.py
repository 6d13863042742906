"""The seam to a cluster: say what is there, ask for a machine, give one back.

A source keeps nothing. What was asked is found again from the cluster, by names, so whoever asks
may be killed between any two calls. A machine's name is that of the node that it starts.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

_DIGITS = 8


@dataclass(frozen=True)
class Machine:
    """A machine as its cluster sees it."""

    name: str
    """Name of its node."""
    id: str
    """What the cluster calls it."""
    state: Literal["asked", "started", "leaving"]
    """leaving: the cluster takes it back."""
    started: float | None = None
    """In seconds since the epoch; None: not yet."""
    ends: float | None = None
    """When its time is up; None: never, or not known."""
    why: str = ""
    """What it waits for, in the cluster's words."""
    log: str = ""
    """What its node writes to, on the machine."""


class MachineSource(Protocol):
    """Where machines come from; errors are TinkermqError in the cluster's words."""

    async def look(self) -> list[Machine]:
        """Return all machines of this pool that the cluster knows."""
        ...

    async def ask(self, name: str) -> None:
        """Ask for a machine; of two of one name no more than one ever runs.

        Raises PlacementError if the cluster refuses it.
        """
        ...

    async def give_back(self, machine: Machine, *, drain: bool) -> None:
        """Give a machine back; harmless if it has ended.

        With `drain` its node has the time that its actors need to write checkpoints.
        """
        ...


class MachineNames:
    """The names that a pool gives its machines: `tmq-<pool>-<number>`, the pool by its URL."""

    def __init__(self, url: str) -> None:
        """Name machines of the pool whose nodes reach its broker at `url`."""
        self.prefix = f"tmq-{hashlib.sha256(url.encode()).hexdigest()[:_DIGITS]}-"

    def own(self, name: str) -> bool:
        """Whether a name is that of a machine of this pool."""
        return re.fullmatch(re.escape(self.prefix) + r"\d+", name) is not None

    def number(self, name: str) -> int:
        """Return the number of a machine of this pool."""
        return int(name.removeprefix(self.prefix))

    def free(self, taken: Iterable[str], count: int) -> list[str]:
        """Return the first names that are not taken: who asks twice asks for the same."""
        known = set(taken)
        found: list[str] = []
        number = 1
        while len(found) < count:
            name = f"{self.prefix}{number}"
            found += [] if name in known else [name]
            number += 1
        return found
