"""What machines have used of a day's budget.

Each look writes down, by machine, how long it ran today by the cluster's own clock: counting again
changes nothing, and after a scheduler that was away the machines that run are counted as if it had
not been. What ended meanwhile counts up to the last look.
"""

from collections.abc import Sequence

from ....broker.client.connection import Broker
from ....broker.jetstream.kv import Bucket, DamagedEntry
from ....schemas.machines.status import MachineSpending
from ....schemas.wire.subjects import BUCKET_MACHINES
from .source import Machine

KEY = "spent"
_DAY_S = 86400.0


class Spending:
    """The record of a day's use."""

    def __init__(self, broker: Broker) -> None:
        """Read nothing yet."""
        self._bucket = Bucket(broker, BUCKET_MACHINES, MachineSpending)
        self._known: MachineSpending | None = None

    async def note(self, machines: Sequence[Machine], now: float) -> float:
        """Note what runs at `now` (seconds since the epoch); return seconds used that day."""
        before = self._known or await self._read()
        self._known = spent(before, machines, now)
        if self._known != before and self._known.seconds:
            await self._bucket.put(KEY, self._known)
        return sum(self._known.seconds.values())

    async def _read(self) -> MachineSpending | None:
        try:
            entry = await self._bucket.get(KEY)
        except DamagedEntry:
            return None
        return None if entry is None else entry.value


def spent(
    before: MachineSpending | None, machines: Sequence[Machine], now: float
) -> MachineSpending:
    """Return what was used of the day of `now`, machines that have ended included. Pure."""
    day = int(now // _DAY_S)
    seconds = dict(before.seconds) if before is not None and before.day == day else {}
    for machine in machines:
        if machine.started is not None:
            ran_s = now - max(machine.started, day * _DAY_S)
            seconds[machine.id] = max(seconds.get(machine.id, 0.0), ran_s, 0.0)
    return MachineSpending(day=day, seconds=seconds)
