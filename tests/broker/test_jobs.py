"""Records of jobs, heartbeats of actors, and what jobs cost."""

import asyncio
import itertools
import time
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import VALIDATION, list_values, read_events
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.streams import (
    bucket_config,
    create_job_streams,
    delete_job_streams,
    ensure_stream,
)
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.presence import PresenceBeat, list_presences
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import (
    FINAL_STATES,
    MAY_FOLLOW,
    ActorPlacement,
    JobRecord,
    JobState,
    Role,
    held_slots,
    metered,
    slot_seconds,
)
from tinkermq.schemas.metric import Presence
from tinkermq.schemas.wire.errors import ConflictError, NotFoundError, StateError
from tinkermq.schemas.wire.subjects import BUCKET_ACTORS, BUCKET_COPIES, BUCKET_JOBS, JobScope

from tests.support.waiting import PATIENCE_S, until

_numbers = itertools.count(1)


def record(user: str, job: str, state: str = "QUEUED", **changes: Any) -> JobRecord:
    fields: dict[str, Any] = {
        "job": job,
        "name": f"run-{job}",
        "user": user,
        "state": state,
        "config": {},
        "created": time.time(),
    }
    return JobRecord.model_validate({**fields, **changes})


@pytest.fixture
def user() -> str:
    """A user of the test's own, on the shared server."""
    return f"jobs-{next(_numbers)}"


@pytest.fixture
def store(broker: Broker) -> JobStore:
    return JobStore(broker)


async def made(broker: Broker, user: str, job: str = "j1", **changes: Any) -> JobRecord:
    await create_job_streams(broker, JobScope(user, job), LimitsConfig())
    return await JobStore(broker).create(record(user, job, **changes), "scheduler")


async def test_a_job_is_found_by_its_id_and_by_the_name_of_its_run(
    broker: Broker, store: JobStore, user: str
) -> None:
    job = await made(broker, user)
    assert await store.get(user, "j1") == job
    assert await store.get(user, "run-j1") == job
    with pytest.raises(NotFoundError, match="has no run 'j2'"):
        await store.get(user, "j2")
    with pytest.raises(NotFoundError):
        await store.get("somebody-else", "j1")


async def test_jobs_are_listed_newest_first_and_the_live_ones_oldest_first(
    broker: Broker, store: JobStore, user: str
) -> None:
    for number, state in enumerate(["QUEUED", "COMPLETED", "RUNNING"]):
        await made(broker, user, f"j{number}", state=state, created=float(number))
    assert [job.job for job in await store.list_jobs(user)] == ["j2", "j1", "j0"]
    assert [job.job for job in await store.live() if job.user == user] == ["j0", "j2"]


async def test_every_move_is_an_event_with_reason_teller_and_time(
    broker: Broker, store: JobStore, user: str
) -> None:
    job = await made(broker, user)
    assert [event.kind for event in job.untold] == ["job_queued"]
    job = await store.transition(job, "STARTING", "placed on n1", "scheduler", has_streams=True)
    job = await store.transition(job, "RUNNING", "all actors run", "scheduler", version=3)
    assert job.version == 3
    assert job.started is not None
    await store.publish_events(job)
    job = await store.mark_published(job)
    assert job.untold == []
    job = await store.transition(job, "CANCELLED", "enough", "user ada")
    assert job.finished is not None
    again = await store.transition(job, "QUEUED", "resumed", "user ada", attempt=2)
    assert (again.attempt, again.finished, again.started) == (2, None, job.started)
    await store.publish_events(job)
    left = await store.mark_published(job)  # what came meanwhile stays
    assert [event.message for event in left.untold] == ["resumed"]
    await store.publish_events(again)  # by a writer with an old record: it is stored once
    events = await read_events(broker, JobScope(user, "j1"))
    assert [(event.kind, event.source, event.message) for event in events] == [
        ("job_queued", "scheduler", ""),
        ("job_starting", "scheduler", "placed on n1"),
        ("job_running", "scheduler", "all actors run"),
        ("job_cancelled", "user ada", "enough"),
        ("job_queued", "user ada", "resumed"),
    ]
    assert events[2].data == {"state": "RUNNING", "before": "STARTING", "attempt": 1}
    assert abs(events[2].time - time.time()) < 60


async def test_a_move_that_the_states_do_not_allow_is_refused(
    broker: Broker, store: JobStore, user: str
) -> None:
    job = await made(broker, user)
    with pytest.raises(StateError, match=r"is QUEUED and cannot become PAUSED(.|\n)*STARTING"):
        await store.transition(job, "PAUSED", "", "test")
    assert (await store.get(user, "j1")).state == "QUEUED"


async def test_of_two_who_move_a_job_the_second_is_told(
    broker: Broker, store: JobStore, user: str
) -> None:
    job = await made(broker, user)
    await store.transition(job, "STARTING", "first", "one")
    with pytest.raises(ConflictError, match="is STARTING by now"):
        await store.transition(job, "CANCELLED", "second", "two")
    assert (await store.get(user, "j1")).reason == "first"


async def test_a_move_keeps_what_others_wrote_meanwhile(
    broker: Broker, store: JobStore, user: str
) -> None:
    job = await made(broker, user)
    await store.update(job, lambda now: now.model_copy(update={"version": 9}))
    moved = await store.transition(job, "STARTING", "", "test")
    assert moved.version == 9


async def test_updates_at_the_same_time_are_all_kept(
    broker: Broker, store: JobStore, user: str
) -> None:
    job = await made(broker, user)

    async def add() -> None:
        await store.update(job, lambda now: now.model_copy(update={"version": now.version + 1}))

    await asyncio.gather(*(add() for _ in range(8)))
    assert (await store.get(user, "j1")).version == 8


async def test_an_update_that_changes_nothing_writes_nothing(
    broker: Broker, store: JobStore, user: str
) -> None:
    job = await made(broker, user)
    bucket = Bucket(broker, BUCKET_JOBS, JobRecord)
    before = await bucket.get(f"{user}.j1")
    await store.update(job, lambda now: now.model_copy())
    assert await bucket.get(f"{user}.j1") == before


async def test_a_job_id_is_given_once(broker: Broker, store: JobStore, user: str) -> None:
    job = await made(broker, user)
    with pytest.raises(ConflictError):
        await store.create(job, "test")


async def test_one_request_id_is_one_job_and_each_user_has_ids_of_its_own(
    store: JobStore, user: str
) -> None:
    made = await asyncio.gather(*(store.job_of_request(user, "r1", f"j{i}") for i in range(5)))
    assert len(set(made)) == 1
    assert await store.job_of_request(user, "r2", "other") == "other"
    assert await store.job_of_request(f"{user}x", "r1", "theirs") == "theirs"


async def test_a_move_counts_even_if_nobody_can_be_told(
    broker: Broker, store: JobStore, user: str
) -> None:
    job = await made(broker, user)
    await delete_job_streams(broker, JobScope(user, "j1"))
    moved = await store.transition(job, "STARTING", "", "test")
    await store.publish_events(moved)
    assert (await store.mark_published(moved)).untold == []


async def test_lists_find_the_values_of_an_ended_run_in_its_record(
    broker: Broker, store: JobStore, user: str
) -> None:
    job = await made(broker, user, state="RUNNING", has_streams=True)
    values = {"step": 7.0, VALIDATION: float("nan"), "training_step_reward": 0.5, "other": 1.0}
    assert (await store.mark_published(job, values, 9)).figures == {}
    ended = await store.transition(job, "COMPLETED", "done", "scheduler")
    ended = await store.mark_published(ended, values, 9)
    assert (ended.version, ended.stored_bytes) == (7, 9)
    await delete_job_streams(broker, job.scope)
    assert await list_values(broker, ended) == {"step": 7.0, "training_step_reward": 0.5}
    assert await list_values(broker, job) == {}


async def test_records_that_a_store_has_lost_are_restored_and_deleted_ones_are_not(
    own_broker: Broker,
) -> None:
    store, bucket = JobStore(own_broker), Bucket(own_broker, BUCKET_JOBS, JobRecord)
    copies = Bucket(own_broker, BUCKET_COPIES, JobRecord)
    lost, older, deleted, fine = [await made(own_broker, "ann", f"j{n}") for n in range(4)]
    running = await store.transition(older, "STARTING", "placed", "scheduler")
    await bucket.purge(lost.scope.key)
    await bucket.put(older.scope.key, older)
    await bucket.delete(deleted.scope.key)
    await copies.purge(fine.scope.key)
    known = {fine.scope.key: fine, older.scope.key: older}
    await store.mend(known, {older.scope.key: running})
    back = {job.job: job for job in await store.list_jobs()}
    assert {name: job.state for name, job in back.items()} == {
        "j0": "QUEUED",
        "j1": "STARTING",
        "j3": "QUEUED",
    }
    assert [back[name].untold[-1].kind for name in ("j0", "j1")] == ["record_restored"] * 2
    assert back["j3"] == fine
    assert await copies.keys() == [f"ann.j{n}" for n in (0, 1, 3)]
    await store.remove(back["j0"])
    await store.mend({job.scope.key: job for job in await store.list_jobs()}, {})
    assert await store.find_by_id("ann", "j0") is None


@given(st.lists(st.sampled_from(sorted(MAY_FOLLOW)), max_size=12))
def test_every_state_can_reach_an_end_and_only_a_resume_leaves_one(path: list[str]) -> None:
    for state in path:
        if state in FINAL_STATES:
            assert MAY_FOLLOW[state] == {"QUEUED"}
        else:
            assert MAY_FOLLOW[state] & FINAL_STATES


# -- Heartbeats of actors --------------------------------------------------------------------------


def _presence(name: str) -> Presence:
    return Presence(
        actor=name, role="generator", host="here", pid=1, state="working", time=time.time()
    )


async def test_an_actor_is_listed_while_it_beats_and_gone_at_its_end(broker: Broker) -> None:
    async with (
        PresenceBeat(broker, "local.one.a", lambda: _presence("a")),
        PresenceBeat(broker, "local.one.b", lambda: _presence("b")),
        PresenceBeat(broker, "local.two.c", lambda: _presence("c")),
    ):
        actors = [entry.value.actor for entry in await list_presences(broker, "local.one")]
        assert actors == ["a", "b"]
        assert len(await list_presences(broker, "local")) == 3
    assert await list_presences(broker, "local") == []


async def test_the_heartbeat_tells_what_the_actor_does_now(broker: Broker) -> None:
    beats = 0

    def beat() -> Presence:
        nonlocal beats
        beats += 1
        return _presence("a").model_copy(update={"state": f"beat{beats}"})

    async with PresenceBeat(broker, "local.one.a", beat, interval_s=0.02):
        await until(lambda: beats >= 4, "heartbeats")
        [entry] = await list_presences(broker, "local.one")
        assert entry.value.state != "beat1"


async def test_a_heartbeat_that_stops_is_gone_after_its_ttl(own_broker: Broker) -> None:
    await ensure_stream(own_broker, bucket_config(BUCKET_ACTORS, "short-lived", ttl_s=1))
    beat = PresenceBeat(own_broker, "local.one.a", lambda: _presence("a"), interval_s=60)
    async with beat:
        assert len(await list_presences(own_broker)) == 1
        async with asyncio.timeout(PATIENCE_S):
            while await list_presences(own_broker):
                await asyncio.sleep(0.05)


async def test_a_heartbeat_goes_on_after_the_server_was_killed(
    own_server: NatsServer, own_broker: Broker
) -> None:
    async with PresenceBeat(own_broker, "local.one.a", lambda: _presence("a"), interval_s=0.02):
        own_server.kill()
        own_server.start()
        restarted = time.time()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                [entry] = await list_presences(own_broker)
                if entry.value.time > restarted:
                    return
                await asyncio.sleep(0.01)


# -- What a job costs ------------------------------------------------------------------------------


def record_of(state: JobState, *actors: tuple[Role, str | None, int], **more: Any) -> JobRecord:
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
    running = record_of("RUNNING", LEARNER, GENERATOR, ("generator", None, 1), HOST)
    assert held_slots(running) == {"learner": 2, "generator": 1}
    assert held_slots(record_of("COMPLETED", LEARNER)) == {}
    assert held_slots(record_of("PAUSED", LEARNER)) == {"learner": 2}


def test_what_is_held_is_counted_whenever_it_changes() -> None:
    queued = record_of("QUEUED", ("learner", None, 2))
    started = metered(queued, record_of("STARTING", LEARNER), now=100.0)
    assert (started.slot_s, started.metered) == ({}, 100.0)
    running = metered(started, started.model_copy(update={"state": "RUNNING"}), now=103.0)
    assert running.metered == 100.0
    scaled = running.model_copy(update={"actors": record_of("RUNNING", LEARNER, GENERATOR).actors})
    scaled = metered(running, scaled, now=110.0)
    assert scaled.slot_s == {"learner": 20.0}
    assert slot_seconds(scaled, 120.0) == {"learner": 40.0, "generator": 10.0}
    ended = metered(scaled, scaled.model_copy(update={"state": "COMPLETED"}), now=130.0)
    assert ended.slot_s == {"learner": 60.0, "generator": 20.0}
    assert slot_seconds(ended, 999.0) == ended.slot_s
