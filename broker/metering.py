"""What a job costs: slot-seconds by role, kept in its record as its actors come and go. Pure."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..schemas.job import HOLDING_STATES, JobRecord


def metered(before: JobRecord, after: JobRecord, now: float) -> JobRecord:
    """Return `after` with what was held until `now` counted, if what is held changes with it."""
    held, holds = held_slots(before), held_slots(after)
    if held == holds:
        return after
    return after.model_copy(update={"slot_s": slot_seconds(before, now), "metered": now})


def slot_seconds(record: JobRecord, now: float) -> dict[str, float]:
    """Return the slot-seconds of a job by role, up to `now`."""
    total = dict(record.slot_s)
    for role, slots in held_slots(record).items():
        total[role] = total.get(role, 0.0) + slots * max(now - record.metered, 0.0)
    return total


def held_slots(record: JobRecord) -> dict[str, int]:
    """Return the slots that a job holds now, by role."""
    held: Counter[str] = Counter()
    if record.state in HOLDING_STATES:
        for actor in record.actors:
            if actor.node is not None and actor.slots:
                held[actor.role] += actor.slots
    return dict(held)


# What an actor's time goes into: a partition of its wall time, cheap enough for every turn.


class TimeUse:
    """Divides time among what an actor does; of several things at once the first named counts.

    So the seconds of all kinds add up to the wall time. For one thread or event loop.
    """

    def __init__(
        self, *kinds: str, rest: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`rest` is what the time is called in which none of `kinds` goes on."""
        self._running = dict.fromkeys(kinds, 0)
        self._rest = rest
        self._clock = clock
        self._doing = rest
        self._since = clock()
        self._totals = dict.fromkeys((*kinds, rest), 0.0)
        self._taken = dict(self._totals)

    @contextmanager
    def doing(self, kind: str) -> Iterator[None]:
        """Count one more thing of this kind while the block runs."""
        self.begin(kind)
        try:
            yield
        finally:
            self.end(kind)

    def begin(self, kind: str) -> None:
        """Count one more thing of this kind, until `end`."""
        self._running[kind] += 1
        if self._running[kind] == 1:
            self._turn()

    def end(self, kind: str) -> None:
        """End what `begin` began."""
        self._running[kind] -= 1
        if self._running[kind] == 0:
            self._turn()

    def reassign(self, source: str, target: str, seconds: float) -> None:
        """Call seconds of `source` by another name, as many of them as were not taken yet."""
        self._settle()
        moved = min(seconds, self._totals[source] - self._taken[source])
        self._totals[source] -= moved
        self._totals[target] += moved

    def totals(self) -> dict[str, float]:
        """Return the seconds by kind since the start."""
        self._settle()
        return dict(self._totals)

    def take(self) -> dict[str, float]:
        """Return the seconds by kind since the last call; kinds without any are left out."""
        totals = self.totals()
        spent = {kind: total - self._taken[kind] for kind, total in totals.items()}
        self._taken = totals
        return {kind: seconds for kind, seconds in spent.items() if seconds > 0}

    def _turn(self) -> None:
        doing = next((kind for kind, count in self._running.items() if count), self._rest)
        if doing != self._doing:
            self._settle()
            self._doing = doing

    def _settle(self) -> None:
        now = self._clock()
        self._totals[self._doing] += now - self._since
        self._since = now
