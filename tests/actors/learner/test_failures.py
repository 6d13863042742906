"""A job is given up when nothing but failed tasks or useless groups come, and only then."""

import itertools

import pytest
from tinkermq.actors.learner.failures import (
    LEAST_ALIKE,
    LEAST_IN_A_ROW,
    Failures,
    Untrainable,
)
from tinkermq.schemas.task import Blame, Dropped, DropReason
from tinkermq.schemas.wire.errors import (
    ConfigError,
    DataError,
    EngineError,
    GameError,
    RewardError,
    TinkermqError,
)

_numbers = itertools.count()


def blame(boundary: str = "environment", code: str = "game", message: str = "") -> Blame:
    """A failure; one without a message is unlike all others."""
    message = message or f"no rule {next(_numbers)}"
    return Blame.model_validate(
        {"boundary": boundary, "code": code, "message": message, "hint": "write one"}
    )


def test_many_failed_tasks_in_a_row_end_the_job_with_the_last_reason() -> None:
    failures = Failures(batch_size=4, idle_s=60)
    for _ in range(LEAST_IN_A_ROW - 1):
        failures.note_task(blame())
    with pytest.raises(GameError, match="32 tasks in a row failed, the last one: no rule") as told:
        failures.note_task(blame())
    assert told.value.hint == "write one"


@pytest.mark.parametrize("boundary", ["environment", "reward", "task"])
def test_the_first_tasks_that_all_fail_alike_end_the_job_early(boundary: str) -> None:
    failures = Failures(batch_size=100, idle_s=60)
    for _ in range(LEAST_ALIKE - 1):
        failures.note_task(blame(boundary, message="no rule"))
    with pytest.raises(TinkermqError, match="the first 8 tasks in a row failed with one error: no"):
        failures.note_task(blame(boundary, message="no rule"))


@pytest.mark.parametrize(
    ("is_new", "first"),
    [(False, None), (True, None), (True, blame()), (True, blame("engine", message="no rule"))],
)
def test_tasks_that_failed_otherwise_or_succeeded_before_do_not(
    is_new: bool, first: Blame | None
) -> None:
    failures = Failures(batch_size=4, idle_s=60, is_new=is_new)
    failures.note_task(first)
    for _ in range(LEAST_IN_A_ROW - 2):
        failures.note_task(blame(message="no rule"))


def test_one_task_that_succeeds_between_keeps_the_job_alive() -> None:
    failures = Failures(batch_size=4, idle_s=60)
    for _ in range(10):
        for _ in range(LEAST_IN_A_ROW - 1):
            failures.note_task(blame())
        failures.note_task(None)


def test_large_batches_are_given_two_batches_of_failures() -> None:
    failures = Failures(batch_size=100, idle_s=60)
    for _ in range(199):
        failures.note_task(blame())
    with pytest.raises(GameError):
        failures.note_task(blame())


@pytest.mark.parametrize(("boundary", "error"), [("task", DataError), ("engine", EngineError)])
def test_the_boundary_to_blame_decides_the_error(boundary: str, error: type[Exception]) -> None:
    failures = Failures(batch_size=1, idle_s=60)
    for _ in range(LEAST_IN_A_ROW - 1):
        failures.note_task(blame(boundary))
    with pytest.raises(error):
        failures.note_task(blame(boundary))


def test_reservations_that_ran_out_are_no_failures() -> None:
    failures = Failures(batch_size=1, idle_s=60)
    for _ in range(10 * LEAST_IN_A_ROW):
        failures.note_task(blame("task", "reservation_expired"))


def test_a_job_of_which_nothing_is_heard_is_given_up() -> None:
    now = 100.0
    failures = Failures(batch_size=1, idle_s=60, clock=lambda: now)
    now = 130.0
    failures.note_task(None)
    now = 189.0
    assert failures.idle() is None
    failures.note_progress()
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


def dropped(*seqs: int, reason: DropReason = "equal_rewards") -> list[Dropped]:
    return [Dropped(seq=seq, task=seq, reason=reason) for seq in seqs]


def test_groups_that_cannot_be_trained_are_told_after_a_batch_of_them_and_as_they_double() -> None:
    untrainable, told = Untrainable(batch_size=4, limit=0), list[int]()
    for number in range(1, 40):
        untrainable.count_dropped(dropped(*range(1, number + 1)), [])
        if untrainable.due_report():
            told.append(number)
        assert bool(untrainable.wait) == (number >= 4)
        assert untrainable.error() is None
    assert told == [4, 8, 16, 32]


@pytest.mark.parametrize(
    ("reason", "error", "why"),
    [
        ("equal_rewards", RewardError, "all returns of each group were equal"),
        ("filtered", ConfigError, "own_filter left them out"),
        ("stale", ConfigError, "older than training.max_staleness"),
        ("malformed", DataError, "they are malformed"),
    ],
)
def test_too_many_in_a_row_end_the_job_with_the_reason_and_a_remedy(
    reason: DropReason, error: type[TinkermqError], why: str
) -> None:
    untrainable = Untrainable(batch_size=2, limit=5)
    untrainable.count_dropped(dropped(1, 2, 3, 4, reason=reason), [])
    assert untrainable.error() is None
    untrainable.count_dropped(dropped(1, 2, 3, 4, 5, reason=reason), [])
    raised = untrainable.error()
    assert raised is not None
    assert type(raised) is error
    assert f"the last 5 groups could not be trained (5 {reason}): " in raised.message
    assert why in raised.message
    assert "limits.untrainable_groups" in raised.hint


def test_the_most_frequent_of_several_reasons_names_the_remedy() -> None:
    untrainable = Untrainable(batch_size=2, limit=5)
    untrainable.count_dropped([*dropped(1, 2), *dropped(3, 4, 5, reason="stale")], [])
    raised = untrainable.error()
    assert isinstance(raised, ConfigError)
    assert "(2 equal_rewards, 3 stale)" in raised.message


def test_one_group_that_waits_to_be_trained_begins_the_count_anew() -> None:
    untrainable = Untrainable(batch_size=2, limit=5)
    untrainable.count_dropped(dropped(1, 2, 3, 4, 6, 7), usable=[5])
    assert untrainable.num_in_a_row == 2
    assert untrainable.error() is None


def test_failed_tasks_and_duplicates_are_not_counted_as_untrainable() -> None:
    untrainable = Untrainable(batch_size=1, limit=2)
    untrainable.count_dropped(
        [*dropped(1, 2, 3, reason="failed"), *dropped(4, reason="duplicate")], []
    )
    assert untrainable.num_in_a_row == 0
    assert untrainable.wait == untrainable.due_report() == ""


def test_after_a_step_a_few_are_nothing_special() -> None:
    untrainable = Untrainable(batch_size=2, limit=0)
    untrainable.stepped()
    untrainable.count_dropped(dropped(*range(1, 32)), [])
    assert untrainable.wait == untrainable.due_report() == ""
    untrainable.count_dropped(dropped(*range(1, 33)), [])
    assert untrainable.due_report()


def test_a_run_that_was_given_up_begins_to_count_when_it_is_resumed() -> None:
    untrainable = Untrainable(batch_size=2, limit=3)
    untrainable.count_dropped(dropped(1, 2, 3), [])
    assert untrainable.error() is not None
    resumed = Untrainable(batch_size=2, limit=3, judged_seq=untrainable.give_up(3))
    resumed.count_dropped(dropped(1, 2, 3, 4), [])
    assert resumed.num_in_a_row == 1


@pytest.mark.parametrize(("batch_size", "bound"), [(1, 256), (8, 256), (64, 1280)])
def test_by_default_many_batches_are_waited_for(batch_size: int, bound: int) -> None:
    untrainable = Untrainable(batch_size, limit=None)
    untrainable.count_dropped(dropped(*range(1, bound)), [])
    assert untrainable.error() is None
    untrainable.count_dropped(dropped(*range(1, bound + 1)), [])
    assert untrainable.error() is not None
