"""What a job costs: slot-seconds by role, kept in its record as its actors come and go. Pure."""

from collections import Counter

from ...schemas.job import HOLDING_STATES, JobRecord


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
