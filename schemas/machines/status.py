"""Machines: what a pool has requested from a cluster, and how the scheduler reports it."""

from typing import Literal

from pydantic import Field

from ..wire.message import Message

MachineState = Literal["asked", "coming", "here", "draining"]


class MachineStatus(Message):
    """One machine that the pool has requested."""

    name: str
    """Name, also that of its node."""
    state: MachineState
    """asked: requested, not started; coming: started, its node has not joined; here: its node has
    joined; draining: being returned, or its time is up."""
    id: str = ""
    """Id at the cluster."""
    started: float | None = None
    """Start, in seconds since the epoch."""
    ends: float | None = None
    """End of its time, in seconds since the epoch."""
    why: str = ""
    """Reason why it is waiting, in the cluster's words."""


class MachineList(Message):
    """State of the requested machines: reply of the scheduler's `machines`."""

    on: str = ""
    """Where machines are requested; empty: nowhere, nodes are started by hand."""
    least: int = Field(default=0, ge=0)
    """Machines that are kept when idle."""
    most: int = Field(default=0, ge=0)
    """Largest number of machines."""
    slots: int = Field(default=0, ge=0)
    """Slots per machine."""
    slot_hours: float = Field(default=0.0, ge=0)
    """Slot-hours used since midnight (UTC), idle or not."""
    slot_hours_per_day: float | None = None
    """Slot-hours allowed per day; null: no bound."""
    machines: list[MachineStatus] = Field(default_factory=list[MachineStatus])
    """Machines, sorted by name."""
    trouble: str = ""
    """Why none come, in the cluster's words; empty: no trouble."""


class MachineSpending(Message):
    """Use of a day's budget, in the KV bucket of machines."""

    day: int
    """Days since the epoch (UTC)."""
    seconds: dict[str, float] = Field(default_factory=dict[str, float])
    """Seconds that each machine ran on that day, by its id at the cluster."""
