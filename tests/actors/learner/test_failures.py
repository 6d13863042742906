"""A job is given up when nothing but failed tasks come, and only then."""

import pytest
from tinkermq.actors.learner.tasks.failures import LEAST_IN_A_ROW, Failures
from tinkermq.schemas.task import Blame
from tinkermq.schemas.wire.errors import DataError, EngineError, GameError


def blame(boundary: str = "environment", code: str = "game") -> Blame:
    return Blame.model_validate(
        {"boundary": boundary, "code": code, "message": "no rule", "hint": "write one"}
    )


def test_many_failed_tasks_in_a_row_end_the_job_with_the_last_reason() -> None:
    failures = Failures(batch_size=4, idle_s=60)
    for _ in range(LEAST_IN_A_ROW - 1):
        failures.note(blame())
    with pytest.raises(GameError, match="32 tasks in a row failed, the last one: no rule") as told:
        failures.note(blame())
    assert told.value.hint == "write one"


def test_one_task_that_succeeds_between_keeps_the_job_alive() -> None:
    failures = Failures(batch_size=4, idle_s=60)
    for _ in range(10):
        for _ in range(LEAST_IN_A_ROW - 1):
            failures.note(blame())
        failures.note(None)


def test_large_batches_are_given_two_batches_of_failures() -> None:
    failures = Failures(batch_size=100, idle_s=60)
    for _ in range(199):
        failures.note(blame())
    with pytest.raises(GameError):
        failures.note(blame())


@pytest.mark.parametrize(("boundary", "error"), [("task", DataError), ("engine", EngineError)])
def test_the_boundary_to_blame_decides_the_error(boundary: str, error: type[Exception]) -> None:
    failures = Failures(batch_size=1, idle_s=60)
    for _ in range(LEAST_IN_A_ROW - 1):
        failures.note(blame(boundary))
    with pytest.raises(error):
        failures.note(blame(boundary))


def test_reservations_that_ran_out_are_no_failures() -> None:
    failures = Failures(batch_size=1, idle_s=60)
    for _ in range(10 * LEAST_IN_A_ROW):
        failures.note(blame("task", "reservation_expired"))


def test_a_job_of_which_nothing_is_heard_is_given_up() -> None:
    now = 100.0
    failures = Failures(batch_size=1, idle_s=60, clock=lambda: now)
    now = 130.0
    failures.note(None)
    now = 189.0
    assert failures.idle() is None
    failures.heard()
    now = 248.0
    assert failures.idle() is None
    now = 249.0
    assert "no task was finished for 60 s" in str(failures.idle())


def test_a_run_that_nobody_publishes_for_says_that_groups_are_missing() -> None:
    now = 0.0
    failures = Failures(batch_size=1, idle_s=60, clock=lambda: now, external=True)
    now = 60.0
    error = failures.idle()
    assert isinstance(error, DataError)
    assert "nobody published a task or a group for 60 s" in error.message
    assert "publish more" in error.hint
