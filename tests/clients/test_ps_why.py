"""`tinkermq ps` names an actor that fails again and again."""

from typing import Any

from tinkermq.clients.cli.runs import _describe_failure, _describe_reason
from tinkermq.schemas.job import ActorPlacement, JobRecord
from tinkermq.schemas.metric import Presence

TROUBLE = "learner failed 2 times with no work done: deadline: too late"


def _row(**changes: Any) -> dict[str, Any]:
    plain = {"state": "RUNNING", "reason": "all actors run", "trouble": "", "missing": ""}
    return {**plain, **changes}


def _beat(progress: int) -> Presence:
    return Presence(
        actor="learner", role="learner", host="x", pid=1, state="x", progress=progress, time=0.0
    )


def test_a_run_that_gets_on_has_nothing_to_say() -> None:
    assert _describe_reason(_row()) == ""


def test_an_actor_that_fails_again_and_again_is_told_until_it_has_done_some_work() -> None:
    record = JobRecord(
        job="j",
        name="run",
        user="u",
        state="RUNNING",
        config={},
        created=0.0,
        actors=[ActorPlacement(name="learner", role="learner", trouble=TROUBLE)],
    )
    assert _describe_failure(record, []) == TROUBLE
    assert _describe_failure(record, [_beat(0)]) == TROUBLE
    assert _describe_failure(record, [_beat(1)]) == ""
    assert _describe_reason(_row(trouble=TROUBLE)) == TROUBLE
