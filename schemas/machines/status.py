"""What a pool asks of a cluster, and what the scheduler says of it."""

from typing import Literal

from pydantic import Field

from ..wire.message import Message

MachineState = Literal["asked", "coming", "here", "draining"]


class MachineStatus(Message):
    """One machine that the pool has asked for."""

    name: str
    """Its name, which is that of its node."""
    state: MachineState
    """asked: the cluster has not started it; coming: it has, and no node has joined yet; here: its
    node has joined; draining: it is given back, or its time is up."""
    id: str = ""
    """What the cluster calls it."""
    started: float | None = None
    """When the cluster started it, in seconds since the epoch."""
    ends: float | None = None
    """When its time is up, in seconds since the epoch."""
    why: str = ""
    """What the cluster says it waits for."""


class MachineList(Message):
    """What came of asking for machines: reply of the scheduler's `machines`."""

    on: str = ""
    """Where machines are asked for; empty: nowhere, nodes are started by hand."""
    least: int = Field(default=0, ge=0)
    """Machines that are kept."""
    most: int = Field(default=0, ge=0)
    """Machines that there may be."""
    slots: int = Field(default=0, ge=0)
    """Slots of one machine."""
    slot_hours: float = Field(default=0.0, ge=0)
    """Used since midnight (UTC), whether anything ran on them or not."""
    slot_hours_per_day: float | None = None
    """Those that may be used in a day; None: any."""
    machines: list[MachineStatus] = Field(default_factory=list[MachineStatus])
    """By name."""
    trouble: str = ""
    """Why none come, in the cluster's words; empty while all is well."""


class MachineSpending(Message):
    """What machines have used of a day's budget, in the KV bucket of machines."""

    day: int
    """Days since the epoch (UTC)."""
    seconds: dict[str, float] = Field(default_factory=dict[str, float])
    """Seconds of that day in which each machine ran, by what the cluster calls it."""
