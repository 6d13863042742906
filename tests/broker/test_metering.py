"""What a job costs."""

from typing import Any, TypeAlias

from tinkermq.broker.metering import held_slots, metered, slot_seconds
from tinkermq.schemas.job import ActorPlacement, JobRecord, JobState, Role


def record(state: JobState, *actors: tuple[Role, str | None, int], **more: Any) -> JobRecord:
    placed = [
        ActorPlacement(name=f"{role}-{i}", role=role, node=node, slots=slots)
        for i, (role, node, slots) in enumerate(actors)
    ]
    fields: dict[str, Any] = {
        "job": "j",
        "name": "j",
        "user": "u",
        "config": {},
        "created": 0.0,
        **more,
    }
    return JobRecord(state=state, actors=placed, **fields)


Placed: TypeAlias = tuple[Role, str | None, int]
LEARNER: Placed = ("learner", "n", 2)
GENERATOR: Placed = ("generator", "m", 1)
HOST: Placed = ("environment", "n", 0)


def test_only_placed_actors_of_a_job_with_a_node_hold_slots() -> None:
    running = record("RUNNING", LEARNER, GENERATOR, ("generator", None, 1), HOST)
    assert held_slots(running) == {"learner": 2, "generator": 1}
    assert held_slots(record("COMPLETED", LEARNER)) == {}
    assert held_slots(record("PAUSED", LEARNER)) == {"learner": 2}


def test_what_is_held_is_counted_whenever_it_changes() -> None:
    queued = record("QUEUED", ("learner", None, 2))
    started = metered(queued, record("STARTING", LEARNER), now=100.0)
    assert (started.slot_s, started.metered) == ({}, 100.0)
    running = metered(started, started.model_copy(update={"state": "RUNNING"}), now=103.0)
    assert running.metered == 100.0
    scaled = running.model_copy(update={"actors": record("RUNNING", LEARNER, GENERATOR).actors})
    scaled = metered(running, scaled, now=110.0)
    assert scaled.slot_s == {"learner": 20.0}
    assert slot_seconds(scaled, 120.0) == {"learner": 40.0, "generator": 10.0}
    ended = metered(scaled, scaled.model_copy(update={"state": "COMPLETED"}), now=130.0)
    assert ended.slot_s == {"learner": 60.0, "generator": 20.0}
    assert slot_seconds(ended, 999.0) == ended.slot_s
