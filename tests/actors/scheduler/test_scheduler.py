"""A job's way through scheduler and node, with toy actors."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.feed import publish_metric
from tinkermq.broker.jetstream.streams import stream_info
from tinkermq.broker.presence import presences
from tinkermq.broker.user_records import UserStore, create_user_stores
from tinkermq.clients.cli import evaluation
from tinkermq.clients.pool import Pool
from tinkermq.clients.run import EvaluationSettings, evaluate
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import (
    JobRecord,
    JobRequest,
    PriorityRequest,
    ResumeRequest,
    ScaleRequest,
    StopRequest,
    TenantShares,
    TrainerUsage,
)
from tinkermq.schemas.metric import Metric, Presence
from tinkermq.schemas.user import UserRecord
from tinkermq.schemas.wire.errors import ConfigError, JobFailedError, QuotaError, StateError

from tests.actors.scheduler.conftest import Stack
from tests.support.hollow_model import hollow_model
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.full

STRAYING = [("RUNNING", "paused", "resume"), ("PAUSED", "working", "pause")]
"""The state of a job, what its learner's heartbeat says, and what the learner is told."""


async def test_a_job_runs_to_its_end_and_leaves_no_actor(stack: Stack) -> None:
    job = await stack.running(env={"game": "bandit"})
    assert {actor.name: actor.node for actor in job.actors} == dict.fromkeys(
        ["learner", "generator-0", "environment-0"], "n1"
    )
    await stack.until_logged(job, "generator-0", ["up"])  # it can be drained
    stack.do(job, "learner", "done")
    ended = await stack.until(job, "COMPLETED")
    assert ended.started is not None
    assert ended.finished is not None
    events = await stack.events(job)
    moves = [(event.kind, event.source) for event in events if event.kind.startswith("job_")]
    assert moves == [
        ("job_queued", "user local"),
        *((f"job_{state}", "scheduler") for state in ("starting", "running", "completed")),
    ]
    await stack.until_actors()
    await stack.until_logged(job, "generator-0", ["up", "drained"])


async def test_an_end_that_cannot_be_told_yet_is_told_later(stack: Stack) -> None:
    job = await stack.running()
    await stack.events(job)
    stream = job.scope.stream_feed
    config = (await stream_info(stack.broker, stream))["config"]
    await stack.broker.api(f"STREAM.UPDATE.{stream}", config | {"max_msg_size": 1})
    stack.do(job, "learner", "done")
    ended = await stack.until(job, "COMPLETED")
    assert [event.kind for event in ended.untold] == ["job_completed"]
    await stack.until_actors()
    await stack.broker.api(f"STREAM.UPDATE.{stream}", config)
    assert (await stack.events(job))[-1].kind == "job_completed"
    settled = await stream_info(stack.broker, stream)
    assert settled["config"]["max_bytes"] < config["max_bytes"]


async def test_a_failure_for_good_is_the_jobs_reason(stack: Stack) -> None:
    job = await stack.running()
    stack.do(job, "generator-0", "fail")
    failed = await stack.until(job, "FAILED")
    assert failed.reason == "generator-0 failed: model: no model\n  make one"


async def test_a_killed_actor_is_started_again_and_the_job_goes_on(stack: Stack) -> None:
    job = await stack.running()
    stack.do(job, "learner", "crash")
    await stack.until(job, lambda now: now.actors[0].restarts == 1 and now.state == "RUNNING")


async def test_the_learners_heartbeat_tells_the_version(stack: Stack) -> None:
    job = await stack.running()
    beat = Presence(
        actor="learner", role="learner", host="h", pid=1, state="working", version=7, time=0.0
    )
    await presences(stack.broker).put(f"local.{job.job}.learner", beat)
    await stack.until(job, lambda now: now.version == 7)


async def test_the_step_is_that_of_the_metrics_whatever_a_learner_calls_its_numbers(
    stack: Stack,
) -> None:
    job = await stack.running()
    for number in (float("nan"), float("inf"), 1e300):
        metric = Metric(step=3, values={"step": number}, time=1.0)
        await publish_metric(stack.broker, job.scope, metric)
    stack.do(job, "learner", "done")
    ended = await stack.until(job, lambda now: now.state == "COMPLETED" and not now.untold)
    assert ended.version == 3


async def test_stop_drains_the_learner_and_cancels(stack: Stack) -> None:
    job = await stack.running()
    await stack.answer_as_learner(job)
    await stack.ask("stop", StopRequest(job=job.name))
    ended = await stack.until(job, "CANCELLED")
    assert ended.reason == "stopped with a checkpoint"
    assert stack.told == ["stop"]
    again = await stack.ask("stop", StopRequest(job=job.name))
    assert again.state == "CANCELLED"


async def test_stop_may_complete_a_job(stack: Stack) -> None:
    job = await stack.running()
    await stack.answer_as_learner(job)
    await stack.ask("stop", StopRequest(job=job.name, complete=True))
    await stack.until(job, "COMPLETED")


async def test_a_stop_waits_for_a_learner_that_does_not_listen_yet(stack: Stack) -> None:
    job = await stack.running()
    record = await stack.ask("stop", StopRequest(job=job.name))
    assert (record.state, record.stop) == ("RUNNING", "drain")
    await stack.answer_as_learner(job)
    await stack.until(job, "CANCELLED")


async def test_stop_now_kills_what_would_not_drain(stack: Stack) -> None:
    job = await stack.running()
    await stack.until_logged(job, "learner", ["up"])
    stack.do(job, "generator-0", "hang")
    await stack.until_obeyed(job, "generator-0")
    await stack.ask("stop", StopRequest(job=job.job, now=True))
    await stack.until(job, "CANCELLED")
    await stack.until_actors()
    assert (Path(job.run_dir) / "logs/attempt_1/learner.log").read_text() == "up\n"


async def test_a_queued_job_can_be_stopped(stack: Stack) -> None:
    await stack.scheduler()
    job = await stack.submit()
    await stack.ask("stop", StopRequest(job=job.job))
    await stack.until(job, "CANCELLED")


async def test_a_paused_learner_that_restarts_is_paused_again(stack: Stack) -> None:
    job = await stack.running()
    await stack.answer_as_learner(job)
    paused = await stack.ask("pause", JobRequest(job=job.job))
    assert paused.state == "PAUSED"

    async def told_twice() -> bool:  # by the request, and by the loop that keeps it so
        return len(stack.told) == 2

    await eventually(told_twice, "two requests")
    stack.do(job, "learner", "crash")

    async def told_again() -> bool:
        return len(stack.told) == 3

    await eventually(told_again, "another request")
    assert set(stack.told) == {"pause"}
    record = await stack.ask("unpause", JobRequest(job=job.job))
    assert record.state == "RUNNING"
    assert stack.told[-1] == "resume"


@pytest.mark.parametrize(("state", "beats", "verb"), STRAYING)
async def test_a_learner_whose_heartbeat_contradicts_the_record_is_told_again(
    stack: Stack, state: str, beats: str, verb: str
) -> None:
    """It heard a pause after that was given up, or a scheduler died before it passed one on."""
    job = await stack.running()
    await stack.answer_as_learner(job)
    if state == "PAUSED":
        await stack.ask("pause", JobRequest(job=job.job))
        await until(lambda: len(stack.told) == 2, "the request, and that of the loop")
        stack.told.clear()
    beat = Presence(actor="learner", role="learner", host="h", pid=1, state=beats, time=0.0)
    await presences(stack.broker).put(f"local.{job.job}.learner", beat)
    await until(lambda: bool(stack.told), "another request")
    assert set(stack.told) == {verb}
    assert (await stack.get(job)).state == state


async def test_the_owner_of_a_job_that_trains_cannot_use_up_quotas_of_others(stack: Stack) -> None:
    job = await stack.running()
    usage = TrainerUsage(job=job.job, tokens={"ada": 10**9})
    for told in (usage, usage.model_copy(update={"sampler": "sampler-0", "since": 1.0})):
        with pytest.raises(StateError, match="is of kind train and has no usage to report"):
            await stack.ask_for("tinker-usage", told, TenantShares)
    record = await stack.get(job)
    assert not record.tinker_tokens
    assert not record.tinker_sampled


async def test_resume_queues_an_ended_job_as_a_new_attempt(stack: Stack) -> None:
    job = await stack.running()
    stack.do(job, "learner", "fail")
    await stack.until(job, "FAILED")
    resumed = await stack.ask("resume", ResumeRequest(job=job.name))
    assert (resumed.attempt, resumed.finished) == (2, None)
    again = await stack.ask("resume", ResumeRequest(job=job.name))
    assert again.attempt == 2
    await stack.until(job, "RUNNING")
    stack.do(job, "learner", "done")
    await stack.until(job, "COMPLETED")
    await stack.until_logged(job, "learner", ["up"], attempt=2)


async def test_a_completed_run_goes_on_with_what_was_changed(stack: Stack) -> None:
    job = await stack.running(slots=3, training={"num_steps": 40})
    with pytest.raises(StateError, match="is RUNNING"):
        await stack.ask("resume", _changed(job, training={"num_steps": 80}))
    stack.do(job, "learner", "done")
    await stack.until(job, "COMPLETED")
    again = await stack.ask(
        "resume", _changed(job, training={"num_steps": 80}, generator={"count": 2})
    )
    assert again.attempt == 2
    assert again.config["training"]["num_steps"] == 80
    assert again.config["env"] == job.config["env"]
    assert [actor.name for actor in again.actors][:3] == ["learner", "generator-0", "generator-1"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {"batch_size": 3}}, "training.batch_size of run .* cannot be changed"),
        ({"model": {"path": "another"}}, "continues with the model of its checkpoint"),
        ({"learner": {"optimizer": "muon"}}, "the checkpoint has the state of that optimiser"),
        ({"training": {"num_step": 80}}, "num_step"),
    ],
)
async def test_what_a_checkpoint_hangs_on_stays_as_it_is(
    stack: Stack, changes: dict[str, Any], words: str
) -> None:
    job = await stack.running()
    stack.do(job, "learner", "fail")
    await stack.until(job, "FAILED")
    with pytest.raises(ConfigError, match=words):
        await stack.ask("resume", _changed(job, **changes))
    assert (await stack.get(job)).state == "FAILED"


def _changed(job: JobRecord, **changes: Any) -> ResumeRequest:
    return ResumeRequest(job=job.job, config=changes)


async def test_generators_and_hosts_come_and_go_while_the_job_runs(stack: Stack) -> None:
    job = await stack.running(slots=3, env={"game": "bandit", "num_val": 0})
    before = await stack.actors()
    await stack.ask("scale", ScaleRequest(job=job.job, role="generator", count=2))
    await stack.ask("scale", ScaleRequest(job=job.job, role="environment", count=0))
    after = await stack.until_actors("learner", "generator-0", "generator-1")
    assert after["learner"].pid == before["learner"].pid
    await stack.ask("scale", ScaleRequest(job=job.job, role="generator", count=1))
    await stack.until_actors("learner", "generator-0")
    assert (await stack.get(job)).state == "RUNNING"


async def test_a_second_job_waits_for_slots_and_says_so(stack: Stack) -> None:
    first = await stack.running()
    second = await stack.submit()
    second = await stack.until(second, lambda now: "is next" in now.reason)
    assert second.state == "QUEUED"
    assert f"; {first.name} holds 2 (`tinkermq stop {first.name}` frees them)" in second.reason
    stack.do(first, "learner", "done")
    await stack.until(second, "RUNNING")


async def test_an_evaluation_that_waits_for_slots_says_who_holds_them(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await stack.running()
    records, show = list[JobRecord](), evaluation._printing(as_json=False)
    settings = EvaluationSettings(like=first.name)
    pool = Pool(stack.broker)
    asked = asyncio.create_task(evaluate(pool, hollow_model(), settings, records.append))
    await until(lambda: any("is next" in record.reason for record in records), "it to wait")
    for record in records:
        show(record)
    printed = capsys.readouterr()
    assert printed.out.count("submitted") == 1
    freed = f"{first.name} holds 2 (`tinkermq stop {first.name}` frees them)"
    assert " ".join(printed.err.split()).count(freed) == 1
    await pool.stop(records[-1].job, now=True)
    with pytest.raises(JobFailedError, match="was stopped"):
        await asked


async def test_a_job_submitted_before_any_node_waits_for_one(stack: Stack) -> None:
    await stack.scheduler()
    job = await stack.until(await stack.submit(), lambda now: "none has joined" in now.reason)
    await stack.node()
    await stack.until(job, "RUNNING")


async def test_a_node_that_drains_hands_its_jobs_to_another(stack: Stack) -> None:
    await stack.scheduler()
    first = await stack.node("n1")
    await stack.until_nodes(1)
    job = await stack.until(await stack.submit(), "RUNNING")
    await stack.node("n2")
    await stack.until_nodes(2)
    await first.drain()
    job = await stack.until(job, lambda now: now.state == "RUNNING" and now.actors[0].node == "n2")
    assert job.attempt == 1
    kinds = [e.kind for e in await stack.events(job)]
    assert kinds.count("job_lost") == 1


async def test_priority_decides_which_job_starts_next(stack: Stack) -> None:
    first = await stack.running()
    second, third = await stack.submit(), await stack.submit()
    await stack.until(third, lambda now: "behind runs before it" in now.reason)
    told = await stack.ask("get", JobRequest(job=third.name))
    assert told.reason.endswith("(2 of 2 in the queue)")
    await stack.ask("priority", PriorityRequest(job=third.name, priority=2))
    await stack.until(third, lambda now: "is next" in now.reason)
    stack.do(first, "learner", "done")
    await stack.until(third, "RUNNING")
    assert (await stack.jobs.get("local", second.job)).state == "QUEUED"


async def test_a_quota_refuses_what_can_never_be_and_holds_back_the_rest(stack: Stack) -> None:
    await create_user_stores(stack.broker)
    users = UserStore(stack.broker)
    local = UserRecord(user="local", key_hash="", created=0.0, max_slots=2, max_priority=0)
    await users.create(local)
    first = await stack.running(slots=8)
    with pytest.raises(QuotaError, match=r"needs 4 slots, the quota of user 'local' is 2"):
        await stack.submit(generator={"count": 3})
    with pytest.raises(QuotaError, match="priority 1 is above the highest"):
        await stack.ask("priority", PriorityRequest(job=first.name, priority=1))
    with pytest.raises(QuotaError, match="needs 3 slots"):
        await stack.ask("scale", ScaleRequest(job=first.job, role="generator", count=2))
    second = await stack.until(await stack.submit(), lambda now: "quota of 2" in now.reason)
    await users.change("local", lambda one: one.model_copy(update={"max_slots": 4}))
    await stack.until(second, "RUNNING")


async def test_a_job_that_has_ended_gives_its_room_in_the_broker_back(stack: Stack) -> None:
    job = await stack.running()
    scope = job.scope
    reserved = (await stack.broker.api("INFO"))["reserved_storage"]
    stack.do(job, "learner", "fail")
    await stack.until(job, "FAILED")

    async def settled() -> bool:
        return (await stack.broker.api("INFO"))["reserved_storage"] < reserved // 2

    await eventually(settled, "the streams to be settled")
    await stack.ask("resume", ResumeRequest(job=job.name))
    await stack.until(job, "RUNNING")
    info = await stream_info(stack.broker, scope.stream_rollout)
    assert info["config"]["max_bytes"] == LimitsConfig().rollout_bytes
