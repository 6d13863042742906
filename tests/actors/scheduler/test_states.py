"""A job's next state."""

from typing import Any

import pytest
from tinkermq.actors.scheduler.jobs.states import Transition, next_state, with_statuses
from tinkermq.schemas.job import FINAL_STATES, MAY_FOLLOW, ActorPlacement, JobRecord
from tinkermq.schemas.node import ActorStatus

MAX_LOSSES = 2
NOBODY: frozenset[str] = frozenset()


def record(state: str, **changes: Any) -> JobRecord:
    fields: dict[str, Any] = {
        "job": "j1",
        "name": "run",
        "user": "local",
        "state": state,
        "config": {},
        "created": 0.0,
        "actors": [
            ActorPlacement(name="learner", role="learner", node="n1"),
            ActorPlacement(name="generator-0", role="generator", node="n2"),
        ],
    }
    return JobRecord.model_validate({**fields, **changes})


def said(name: str, state: str, **changes: Any) -> ActorStatus:
    fields = {"user": "local", "job": "j1", "name": name, "attempt": 1, "state": state}
    return ActorStatus.model_validate({**fields, **changes})


def after(job: JobRecord, *statuses: ActorStatus, silent: frozenset[str] = NOBODY) -> str | None:
    step = next_state(job, {status.name: status for status in statuses}, silent, MAX_LOSSES)
    if step is None:
        return None
    assert step.state in MAY_FOLLOW[job.state]
    return step.state


def test_a_starting_job_runs_once_all_its_actors_do() -> None:
    job = record("STARTING")
    assert after(job) is None
    assert after(job, said("learner", "running")) is None
    assert after(job, said("learner", "running"), said("generator-0", "restarting")) is None
    assert after(job, said("learner", "running"), said("generator-0", "running")) == "RUNNING"


def test_a_learner_is_lost_with_the_node_of_any_of_its_ranks() -> None:
    actors = [
        ActorPlacement(name="learner", role="learner", node="n1"),
        ActorPlacement(name="rank-1", role="rank", node="n2"),
        ActorPlacement(name="generator-0", role="generator", node="n3"),
    ]
    job = record("RUNNING", actors=actors)
    assert after(job, silent=frozenset({"n2"})) == "LOST"
    assert after(job, silent=frozenset({"n3"})) is None
    told = with_statuses(job, {}, frozenset({"n2", "n3"}))
    assert [actor.node for actor in told] == ["n1", "n2", None]


def test_an_actor_that_waits_for_a_node_does_not_hold_up_the_start() -> None:
    actors = [
        ActorPlacement(name="learner", role="learner", node="n1"),
        ActorPlacement(name="generator-0", role="generator"),
    ]
    assert after(record("STARTING", actors=actors), said("learner", "running")) == "RUNNING"


def test_what_a_node_says_of_an_older_attempt_is_ignored() -> None:
    old = [said("learner", "exited"), said("generator-0", "failed")]
    assert after(record("RUNNING", attempt=2), *old) is None


def test_a_job_is_completed_when_its_learner_is_done() -> None:
    assert after(record("RUNNING"), said("learner", "exited")) == "COMPLETED"
    assert after(record("PAUSED"), said("learner", "exited")) == "COMPLETED"


def test_a_learner_that_is_done_before_the_job_was_seen_running_runs_first() -> None:
    assert after(record("STARTING"), said("learner", "exited")) == "RUNNING"


def test_other_actors_may_end_without_ending_the_job() -> None:
    assert after(record("RUNNING"), said("generator-0", "exited")) is None


@pytest.mark.parametrize("state", ["STARTING", "RUNNING", "PAUSED"])
def test_an_actor_that_failed_for_good_fails_the_job_with_its_error(state: str) -> None:
    status = said("generator-0", "failed", exit_code=2, error="model: no such folder\n  hint")
    step = next_state(record(state), {"generator-0": status}, NOBODY, MAX_LOSSES)
    assert step == Transition("FAILED", "generator-0 failed: model: no such folder\n  hint")


def test_a_failure_is_told_even_if_the_learner_is_done() -> None:
    statuses = [said("learner", "exited"), said("generator-0", "failed")]
    assert after(record("RUNNING"), *statuses) == "FAILED"


def test_a_stopped_job_is_cancelled_once_its_learner_has_drained() -> None:
    job = record("RUNNING", stop="drain")
    assert after(job, said("learner", "running")) is None
    assert after(job, said("learner", "exited")) == "CANCELLED"
    complete = record("RUNNING", stop="drain", stop_complete=True)
    assert after(complete, said("learner", "exited")) == "COMPLETED"
    learner = ActorPlacement(name="learner", role="learner", node="n1")
    server = ActorPlacement(name="server", role="server", node="n1")
    for kind, actor, reason in (
        ("train", learner, "stopped with a checkpoint"),
        ("infer", server, "stopped"),
    ):
        role, actors = actor.name, [actor]
        job = record("RUNNING", stop="drain", kind=kind, actors=actors)
        step = next_state(job, {role: said(role, "exited")}, NOBODY, MAX_LOSSES)
        assert step is not None
        assert step.reason == reason


def test_a_stopped_job_whose_learner_is_down_does_not_wait_for_it() -> None:
    assert after(record("RUNNING", stop="drain"), said("learner", "restarting")) == "CANCELLED"
    assert after(record("STARTING", stop="drain")) == "CANCELLED"


def test_a_job_stopped_now_waits_for_nobody() -> None:
    assert after(record("RUNNING", stop="now"), said("learner", "running")) == "CANCELLED"
    job = record("STARTING", stop="now", stop_complete=True)
    assert after(job, said("learner", "running")) == "CANCELLED"


def test_a_job_whose_learner_vanished_with_its_node_is_lost_and_queued_again() -> None:
    lost = next_state(record("RUNNING"), {}, frozenset({"n1"}), MAX_LOSSES)
    assert lost is not None
    assert lost.state == "LOST"
    assert "'n1'" in lost.reason
    assert after(record("LOST", reason=lost.reason)) == "QUEUED"


def test_a_job_is_queued_again_as_often_as_its_limit_says_and_then_fails() -> None:
    for losses in range(1, MAX_LOSSES + 1):
        assert after(record("LOST", losses=losses)) == "QUEUED"
    step = next_state(
        record("LOST", losses=MAX_LOSSES + 1, reason="node 'n1' was silent"), {}, NOBODY, MAX_LOSSES
    )
    assert step == Transition("FAILED", "lost its node 3 times: node 'n1' was silent")


def test_a_job_that_may_lose_no_node_fails_with_the_first() -> None:
    step = next_state(record("LOST", losses=1), {}, NOBODY, 0)
    assert step is not None
    assert step.state == "FAILED"


@pytest.mark.parametrize("state", ["QUEUED", "LOST"])
def test_a_job_that_waits_for_a_node_can_be_stopped(state: str) -> None:
    assert after(record(state, stop="drain")) == "CANCELLED"


def test_a_silent_node_of_a_generator_only_takes_the_generator() -> None:
    job = record("RUNNING")
    silent = frozenset({"n2"})
    assert after(job, silent=silent) is None
    told = {actor.name: actor.node for actor in with_statuses(job, {}, silent)}
    assert told == {"learner": "n1", "generator-0": None}


@pytest.mark.parametrize("state", [*sorted(FINAL_STATES), "QUEUED"])
def test_ended_and_queued_jobs_stay_as_they_are(state: str) -> None:
    assert after(record(state), said("learner", "failed"), silent=frozenset({"n1"})) is None


def test_what_nodes_say_is_entered_in_the_record() -> None:
    statuses = {"generator-0": said("generator-0", "restarting", restarts=3)}
    _, generator = with_statuses(record("RUNNING"), statuses, NOBODY)
    assert (generator.state, generator.restarts) == ("running", 3)
    assert generator.trouble == ""
    failing = said("learner", "running", restarts=2, fruitless=2, error="deadline: too late\n  x")
    learner, _ = with_statuses(record("RUNNING"), {"learner": failing}, NOBODY)
    failed = "learner failed 2 times without finishing any work: deadline: too late"
    assert learner.trouble == failed
