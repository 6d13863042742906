"""The ledger decides the same after a crash: nothing twice, nothing lost, no credit invented."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tinkermq.actors.learner.staleness import StalenessPolicy, num_admissible
from tinkermq.actors.learner.tasks import Ledger
from tinkermq.actors.training.state import LearnerState
from tinkermq.schemas.task import MAX_TRIES, DropReason, Task

from tests.actors.learner.ledger_model import Job, World, run

jobs = st.builds(
    Job,
    batch=st.integers(1, 4),
    eta=st.integers(0, 3),
    steps=st.integers(1, 8),
    policy=st.sampled_from(["drop", "wait", "train"]),
)


@settings(max_examples=150)
@example(seed=83564, job=Job(1, 3, 8, "drop"), kills=5, dawdle=0.0, failing=0.375)
@given(st.integers(0, 2**32), jobs, st.integers(0, 12), st.floats(0, 0.6), st.floats(0, 0.4))
def test_every_data_position_is_trained_once_or_given_up_whatever_is_killed(
    seed: int, job: Job, kills: int, dawdle: float, failing: float
) -> None:
    world = run(seed, job, kills=kills, dawdle=dawdle, failing=failing)
    state = LearnerState.model_validate_json(world.checkpoint)
    numbers = [seq for record in world.records for seq in record.seqs]
    assert [record.step for record in world.records] == list(range(1, job.steps + 1))
    assert len(numbers) == len(set(numbers)) == job.steps * job.batch
    ledger = Ledger(state)
    assert len(ledger.trained) == job.steps * job.batch
    assert not set(ledger.trained) & set(ledger.dropped)
    # Nothing was issued beyond the gate, and every credit stands for one dropped number.
    issued = num_admissible(job.steps, job.eta, job.batch, ledger.num_credits, job.steps)
    assert state.next_task <= issued
    trained = [world.tasks[number].index for number in ledger.trained]
    assert len(trained) == len(set(trained))
    # Data positions: those decided are trained or given up; the rest is owed or on its way.
    decided = {at for start, end in state.indices for at in range(start, end)}
    underway = [task.index for task in world.queue.values() if task.task not in ledger]
    underway += [
        entry.task.index
        for seq, entry in world.log.items()
        if seq >= state.log_seq and entry.task.task not in ledger
    ]
    accounted = Counter([*decided, *(index for _, index in state.owed), *set(underway)])
    # What a crash forgot (whose an unreadable group was, which position a number that was never
    # published stood for) is issued again as soon as there is a credit, before anything new.
    forgotten = set(range(state.next_index)) - set(accounted)
    assert forgotten <= set(_issued_again(world, state))
    assert max(accounted.values(), default=1) == 1
    # Nothing is given up before its last try.
    given_up = set(decided) - set(trained)
    assert all(world.failures[index] >= MAX_TRIES for index in given_up)


def _issued_again(world: World, state: LearnerState) -> Iterator[int]:
    """Yield the positions that a learner which starts now issues before a new one."""
    ledger = Ledger(state)
    for task in world.queue.values():
        ledger.note_task(task)
    for seq, entry in world.log.items():
        if seq >= state.log_seq:
            ledger.note_in_log(entry.task.task, None if entry.unreadable else entry.task)
    ledger.find_missing()
    while (index := ledger.next_issue().index) < state.next_index:
        yield index


@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_on_policy_training_ends_although_tasks_fail_and_dawdle(policy: StalenessPolicy) -> None:
    job = Job(batch=2, eta=0, steps=20, policy=policy)
    world = run(1, job, kills=5, dawdle=0.5, failing=0.3)
    lags = [
        record.step - 1 - world.log[seq].oldest
        for record in world.records
        for seq in record.seqs
        if seq in world.log
    ]
    assert set(lags) <= {0}


def _task(number: int, index: int | None, reissue_of: int | None = None) -> Task:
    return Task(task=number, index=index, reissue_of=reissue_of, seed=0, group_size=1)


def test_a_stale_task_is_issued_again_once_although_the_crash_forgot_the_drop() -> None:
    ledger = Ledger(LearnerState())
    ledger.expect(10)
    ledger.note_in_log(0, _task(0, 0))
    ledger.note_task(_task(1, 0, reissue_of=0))
    ledger.find_missing()
    ledger.drop(0, "stale")
    issue = ledger.next_issue()
    assert (issue.index, issue.reissue_of) == (1, None)
    assert ledger.num_credits == 1
    state = LearnerState()
    ledger.write_to(state)
    assert state.indices == []  # position 0 is still on its way, under number 1
    ledger.train([1])
    ledger.write_to(state)
    assert state.indices == [(0, 1)]


@pytest.mark.parametrize("reason", ["failed", "malformed"])
def test_a_position_whose_groups_cannot_be_trained_is_issued_three_times(
    reason: DropReason,
) -> None:
    ledger, state = Ledger(LearnerState()), LearnerState()
    for tries in range(MAX_TRIES):
        issue = ledger.next_issue()
        assert (issue.index, issue.tries) == (0, tries)
        task = _task(issue.number, issue.index, issue.reissue_of)
        ledger.note_task(task.model_copy(update={"tries": issue.tries}))
        assert ledger.drop(issue.number, reason) == (tries < MAX_TRIES - 1)
        state = LearnerState()
        ledger.write_to(state)
        ledger = Ledger(state)  # a crash in between changes nothing
        ledger.find_missing()
    assert state.indices == [(0, 1)]
    assert ledger.next_issue().index == 1
    assert ledger.num_credits == MAX_TRIES


def test_what_can_never_be_played_and_what_teaches_nothing_is_not_issued_again() -> None:
    ledger = Ledger(LearnerState())
    for _ in range(2):
        issue = ledger.next_issue()
        ledger.note_task(_task(issue.number, issue.index))
    assert not ledger.drop(0, "failed", unplayable=True)
    assert not ledger.drop(1, "equal_rewards")
    assert ledger.next_issue().index == 2


@pytest.mark.parametrize(("reason", "tries"), [("stale", 0), ("failed", 1), ("malformed", 1)])
def test_a_clients_task_that_was_dropped_is_issued_again_whatever_is_killed(
    reason: DropReason, tries: int
) -> None:
    ledger = Ledger(LearnerState())
    task = _task(ledger.reserve()[0], None).model_copy(update={"sample": 7, "issued": 1.0})
    ledger.note_task(task)
    ledger.note_in_log(0, None)
    assert ledger.drop(0, reason)
    state = LearnerState()
    ledger.write_to(state)
    ledger = Ledger(LearnerState.model_validate_json(state.model_dump_json()))
    assert ledger.num_client_reissues == 1
    again, number, slot = ledger.next_client_reissue()
    assert (again.task, again.sample, again.tries, number, slot) == (0, 7, tries, 1, 0)
    ledger = Ledger(state)
    ledger.note_task(task.model_copy(update={"task": 1, "reissue_of": 0}))  # it was queued
    assert ledger.num_client_reissues == 0


def test_a_number_that_an_agent_reserved_is_nobodys_to_issue_again() -> None:
    ledger = Ledger(LearnerState())
    number, _ = ledger.reserve()
    ledger.min_versions[number] = 0
    ledger.note_in_log(number, _task(number, None).model_copy(update={"issued": 1.0}))
    assert not ledger.drop(number, "malformed")
    assert ledger.num_client_reissues == 0
    assert ledger.num_credits == 1


def test_what_is_owed_is_part_of_a_checkpoint() -> None:
    ledger = Ledger(LearnerState())
    first = ledger.next_issue()
    ledger.note_task(_task(first.number, first.index))
    ledger.drop(first.number, "stale")
    state = LearnerState()
    ledger.write_to(state)
    again = Ledger(state)
    again.find_missing()
    issue = again.next_issue()
    assert (issue.number, issue.index, issue.reissue_of) == (1, 0, 0)


def test_what_was_trained_is_not_dropped_afterwards() -> None:
    ledger = Ledger(LearnerState())
    ledger.train([ledger.reserve()[0]])
    ledger.drop(0, "malformed")
    assert ledger.num_credits == 0
    assert list(ledger.dropped) == []


def test_a_drop_that_the_checkpoint_knows_is_not_counted_again() -> None:
    ledger = Ledger(LearnerState(next_task=3, next_index=3, dropped=[(1, 2)], indices=[(1, 2)]))
    ledger.drop(1, "stale")
    assert ledger.num_credits == 1
    ledger.drop(1, "duplicate")
    assert ledger.num_credits == 1


def test_what_was_given_out_and_is_nowhere_is_issued_again() -> None:
    ledger = Ledger(LearnerState(next_task=4, next_index=4, trained=[(0, 1)], indices=[(0, 1)]))
    ledger.note_task(_task(2, 2))
    ledger.find_missing()
    assert ledger.num_issuable(0, 0, 4, 100) == 2
    first, second = ledger.next_issue(), ledger.next_issue()
    assert [first.number, second.number] == [1, 3]
    assert [first.index, second.index] == [1, 3]
    assert ledger.next_issue().number == 4


def test_a_group_that_comes_late_for_a_missing_number_takes_its_place() -> None:
    ledger = Ledger(LearnerState(next_task=2, trained=[(0, 1)]))
    ledger.find_missing()
    ledger.note_in_log(1, None)
    assert ledger.reserve()[0] == 2


def test_a_number_that_nobody_was_given_changes_nothing_until_its_turn() -> None:
    ledger = Ledger(LearnerState())
    assert not ledger.was_issued(2)
    assert not ledger.was_issued(10**15)
    for number in (2, 10**15):
        ledger.note_in_log(number, None)
        ledger.drop(number, "malformed")
    assert ledger.next_task == 0
    assert ledger.num_credits == 0
    assert [ledger.reserve()[0] for _ in range(ledger.num_issuable(0, 0, 4, 100))] == [0, 1, 3, 4]
    assert ledger.num_credits == 1
    assert ledger.num_issuable(0, 0, 4, 100) == 0


def test_what_a_group_claims_is_not_believed_of_a_task_that_is_known() -> None:
    ledger = Ledger(LearnerState())
    issue = ledger.next_issue()
    ledger.note_task(_task(issue.number, issue.index))
    ledger.note_in_log(0, _task(0, 0, reissue_of=None).model_copy(update={"index": 10**9}))
    assert ledger.next_issue().index == 1


def test_a_position_beyond_its_number_is_not_believed_after_a_crash_either() -> None:
    ledger = Ledger(LearnerState())
    ledger.expect(5)
    ledger.note_in_log(3, _task(3, 10**9))
    ledger.find_missing()
    assert [ledger.next_issue().number for _ in range(4)] == [0, 1, 2, 4]
    assert ledger.next_issue().index == 4


def test_a_position_that_two_learners_have_issued_is_trained_once() -> None:
    ledger = Ledger(LearnerState(next_task=2, next_index=2, trained=[(0, 1)], indices=[(0, 1)]))
    ledger.expect(10)
    for number, index in ((1, 1), (2, 2), (3, 0), (4, 2), (5, 3)):
        ledger.note_task(_task(number, index))
    ledger.note_in_log(4, _task(4, 2))
    ledger.find_missing()
    assert ledger.find_repeated() == [3, 4]
    assert not ledger.drop(4, "malformed")
    ledger.withdraw(3)
    again = ledger.next_issue()
    assert (again.number, again.index) == (3, 4)
    assert ledger.next_issue().index == 5
    assert ledger.find_repeated() == []


def test_a_task_that_was_issued_again_is_no_repetition() -> None:
    ledger = Ledger(LearnerState())
    for number in range(3):
        ledger.note_task(_task(number, number))
    ledger.note_task(_task(3, 1, reissue_of=1))
    ledger.find_missing()
    assert ledger.find_repeated() == []


def test_a_group_of_another_task_than_was_issued_is_known() -> None:
    ledger = Ledger(LearnerState())
    issued = _task(0, 0)
    ledger.note_task(issued)
    assert ledger.issued_instead_of(issued.model_copy(update={"issued": 5.0, "tries": 1})) is None
    for change in ({"index": 1}, {"seed": 77}, {"sample": 3}, {"item": 2}):
        assert ledger.issued_instead_of(issued.model_copy(update=change)) == issued
    assert ledger.issued_instead_of(_task(1, 1)) is None


@pytest.mark.parametrize("times", [1, 2, 3, 7])
def test_a_task_does_not_fail_by_groups_of_other_tasks(times: int) -> None:
    ledger = Ledger(LearnerState())
    first = ledger.next_issue()
    ledger.note_task(_task(first.number, first.index))
    number = first.number
    for _ in range(times):
        assert ledger.drop(number, "malformed", of_another_task=True)
        again = ledger.next_issue()
        assert (again.index, again.reissue_of, again.tries) == (first.index, number, 0)
        number = again.number
        ledger.note_task(_task(number, again.index, reissue_of=again.reissue_of))
    for tries in (1, 2):
        assert ledger.drop(number, "malformed")
        again = ledger.next_issue()
        assert again.tries == tries
        number = again.number
        task = _task(number, again.index, reissue_of=again.reissue_of)
        ledger.note_task(task.model_copy(update={"tries": tries}))
    assert not ledger.drop(number, "malformed")
