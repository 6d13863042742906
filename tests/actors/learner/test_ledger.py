"""The ledger decides the same after a crash: nothing twice, nothing lost, no credit invented.

The job of these tests is a learner without a model: it issues, generators finish tasks in any
order, fail or dawdle, batches are formed, recorded and checkpointed. It may be killed at any
point, in the middle of publishing tasks too; what survives is the queue, the log behind the last
checkpoint, the batch records and the checkpoint.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.actors.learner.admission import min_version, num_admissible
from tinkermq.actors.learner.batching import Candidate, StalenessPolicy, form_batch
from tinkermq.actors.learner.checkpoint import LearnerState
from tinkermq.actors.learner.ledger import MAX_TRIES, Ledger
from tinkermq.schemas.batch import DropReason
from tinkermq.schemas.task import Task


class Killed(Exception):
    """The learner dies here."""


@dataclass(frozen=True)
class Record:
    """What a batch record says."""

    step: int
    seqs: list[int]
    dropped: list[tuple[int, DropReason]]


@dataclass
class Entry:
    """An entry of the log."""

    task: Task
    oldest: int
    failed: bool = False
    unreadable: bool = False


@dataclass
class World:
    """What survives the learner."""

    rng: random.Random
    queue: dict[int, Task] = field(default_factory=dict[int, Task])
    log: dict[int, Entry] = field(default_factory=dict[int, Entry])
    tasks: dict[int, Task] = field(default_factory=dict[int, Task])
    """Every task that was ever queued."""
    done: set[int] = field(default_factory=set[int])
    """Numbers that have been in the log."""
    failures: Counter[int] = field(default_factory=Counter[int])
    """How often each position came back as nothing that can be trained."""
    unreadable: set[int] = field(default_factory=set[int])
    """Positions of which a group was unreadable."""
    records: list[Record] = field(default_factory=list[Record])
    checkpoint: str = LearnerState().model_dump_json()
    published_version: int = 0
    kill_after: int = 10**9

    def breathe(self) -> None:
        """A point at which the learner may be killed."""
        self.kill_after -= 1
        if self.kill_after < 0:
            raise Killed

    def publish(self, task: Task) -> bool:
        """Queue a task, as the stream with one message per subject does."""
        assert task.task not in self.tasks, "one number stands for two tasks"
        self.tasks[task.task] = self.queue[task.task] = task
        return True

    def generate(self, *, dawdle: float, failing: float) -> None:
        """Finish one task of the queue; its tokens are as old as it began."""
        startable = [t for t in self.queue.values() if t.min_version <= self.published_version]
        if not startable:
            return
        task = self.rng.choice(startable)
        if self.rng.random() > 0.2:  # else the generator dies between append and ack
            del self.queue[task.task]
        if task.task in self.done:
            return
        self.done.add(task.task)
        oldest = task.min_version if self.rng.random() < dawdle else self.published_version
        failed, unreadable = (self.rng.random() < failing for _ in range(2))
        assert task.index is not None
        self.failures[task.index] += failed or unreadable
        if unreadable:
            self.unreadable.add(task.index)
        self.log[self.last_seq + 1] = Entry(task, oldest, failed, unreadable)

    @property
    def last_seq(self) -> int:
        """Newest sequence of the log."""
        return max(self.log, default=0)


@dataclass
class Job:
    """A configuration of the sizes that matter here."""

    batch: int
    eta: int
    steps: int
    policy: StalenessPolicy


class Learner:
    """The learner's bookkeeping in the order in which `learner.py` does it."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        self.state = LearnerState.model_validate_json(world.checkpoint)
        self.ledger = Ledger(self.state)
        self.held: dict[int, Entry] = {}
        self.read = self.state.log_seq - 1
        self.pending: list[tuple[int, DropReason]] = []
        version = world.records[-1].step if world.records else 0
        num_read = max(0, world.last_seq - self.read)
        self.ledger.expect(
            num_admissible(version, job.eta, job.batch, self.ledger.num_credits + num_read)
        )
        self.notice()
        for task in world.queue.values():
            self.ledger.note_task(task)
        self.ledger.find_missing()
        for record in world.records[self.state.step :]:
            self.drop([item for item in record.dropped if item[0] in self.held])
            self.pending = []
            self.train(record.seqs)

    def notice(self) -> None:
        """Read what came."""
        for seq in range(self.read + 1, self.world.last_seq + 1):
            entry = self.held[seq] = self.world.log[seq]
            number = entry.task.task
            assert self.ledger.was_issued(number)
            self.ledger.note_in_log(number, None if entry.unreadable else entry.task)
        self.read = max(self.read, self.world.last_seq)

    def drop(self, dropped: list[tuple[int, DropReason]]) -> None:
        """Take the decision that entries are not trained."""
        for seq, reason in dropped:
            self.ledger.drop(self.held.pop(seq).task.task, reason)
        self.pending += dropped

    def train(self, seqs: list[int]) -> None:
        """One step."""
        self.ledger.train(self.held.pop(seq).task.task for seq in seqs)
        self.state.step += 1
        self.world.published_version = max(self.world.published_version, self.state.step)

    def issue(self) -> None:
        """Publish what the gate lets through, all at once: a kill leaves any part of it."""
        job, version = self.job, self.state.step
        num = self.ledger.num_issuable(version, job.eta, job.batch, job.steps)
        tasks: list[Task] = []
        for _ in range(num):
            issue = self.ledger.next_issue()
            oldest = min_version(issue.slot, job.batch, job.eta)
            assert oldest <= version
            tasks.append(
                Task(
                    task=issue.number,
                    index=issue.index,
                    reissue_of=issue.reissue_of,
                    tries=issue.tries,
                    seed=0,
                    min_version=oldest,
                    group_size=1,
                )
            )
        for task in tasks:
            self.ledger.note_task(task)
        self.world.rng.shuffle(tasks)
        for task in tasks:
            self.world.breathe()
            assert self.world.publish(task)

    def step(self) -> None:
        """Look once, as `_next_batch` does, and train if there is a batch."""
        job = self.job
        self.notice()
        decision = form_batch(
            [
                Candidate(
                    seq,
                    entry.task.task,
                    min_token_version=entry.oldest,
                    max_token_version=entry.oldest,
                    unusable=_unusable(entry),
                )
                for seq, entry in self.held.items()
            ],
            version=self.state.step,
            batch_size=job.batch,
            max_staleness=job.eta,
            policy=job.policy,
            decided=self.ledger,
            outstanding=self.ledger.min_versions.values(),
        )
        self.drop(decision.dropped)
        self.world.breathe()
        self.issue()
        if not decision.train:
            return
        self.world.breathe()
        self.world.records.append(Record(self.state.step + 1, decision.train, self.pending))
        self.pending = []
        self.world.breathe()
        self.train(decision.train)

    def save(self) -> None:
        """Checkpoint, then trim the log behind it."""
        self.notice()
        self.ledger.write_to(self.state)
        self.state.log_seq = min(self.held, default=self.read + 1)
        self.world.breathe()
        self.world.checkpoint = self.state.model_dump_json()
        self.world.breathe()
        # The newest entry stays: an emptied stream remembers its last sequence, a dict does not.
        for seq in [seq for seq in self.world.log if seq < self.state.log_seq]:
            if seq != self.world.last_seq:
                del self.world.log[seq]


def _unusable(entry: Entry) -> Literal["failed", "malformed"] | None:
    if entry.unreadable:
        return "malformed"
    return "failed" if entry.failed else None


def run(seed: int, job: Job, *, kills: int, dawdle: float, failing: float) -> World:
    """Run a job to its end through some kills; return the world."""
    rng = random.Random(seed)
    world = World(rng)
    learner, looks = None, 0
    for _ in range(40):
        world.kill_after = rng.randrange(60) if kills > 0 else 10**9
        try:
            learner = learner or Learner(world, job)
            while learner.state.step < job.steps:
                looks += 1
                assert looks < 5000, "the job waits for itself"
                learner.step()
                for _ in range(rng.randrange(3)):
                    world.generate(dawdle=dawdle, failing=failing)
                if rng.random() < 0.1:
                    learner.save()
                world.breathe()
            learner.save()
            return world
        except Killed:
            learner, kills = None, kills - 1
    raise AssertionError("the job does not end")


jobs = st.builds(
    Job,
    batch=st.integers(1, 4),
    eta=st.integers(0, 3),
    steps=st.integers(1, 8),
    policy=st.sampled_from(["drop", "wait", "train"]),
)


@settings(max_examples=150)
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
    # What a crash forgot of an unreadable group is issued again as soon as there is a credit.
    assert set(accounted) | world.unreadable >= set(range(state.next_index))
    assert max(accounted.values(), default=1) == 1
    # Nothing is given up before its last try.
    given_up = set(decided) - set(trained)
    assert all(world.failures[index] >= MAX_TRIES for index in given_up)


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
    assert not ledger.drop(0, "failed", hopeless=True)
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
    assert ledger.num_owed_tasks == 1
    again, number, slot = ledger.next_owed_task()
    assert (again.task, again.sample, again.tries, number, slot) == (0, 7, tries, 1, 0)
    ledger = Ledger(state)
    ledger.note_task(task.model_copy(update={"task": 1, "reissue_of": 0}))  # it was queued
    assert ledger.num_owed_tasks == 0


def test_a_number_that_an_agent_reserved_is_nobodys_to_issue_again() -> None:
    ledger = Ledger(LearnerState())
    number, _ = ledger.reserve()
    ledger.min_versions[number] = 0
    ledger.note_in_log(number, _task(number, None).model_copy(update={"issued": 1.0}))
    assert not ledger.drop(number, "malformed")
    assert ledger.num_owed_tasks == 0
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
