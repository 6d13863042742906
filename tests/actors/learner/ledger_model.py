"""A learner without a model, for tests of its ledger.

It issues, generators finish tasks in any order, fail or dawdle, batches are formed, recorded and
checkpointed. It may be killed at any point, in the middle of publishing tasks too; what survives is
the queue, the log behind the last checkpoint, the batch records and the checkpoint.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from tinkermq.actors.learner.staleness import (
    Candidate,
    StalenessPolicy,
    form_batch,
    min_version,
    num_admissible,
)
from tinkermq.actors.learner.tasks import Ledger
from tinkermq.actors.training.state import LearnerState
from tinkermq.schemas.task import DropReason, Task


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
