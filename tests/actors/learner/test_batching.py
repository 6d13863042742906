"""Batches: rules by example, and a simulated run under every policy."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.actors.learner.staleness import (
    BatchDecision,
    Candidate,
    StalenessPolicy,
    form_batch,
    min_version,
    num_admissible,
    returns_credit,
)
from tinkermq.schemas.task import DropReason


def group(seq, oldest=0, number=None, rewards=(0.0, 1.0), **extra):
    return Candidate(seq, seq if number is None else number, oldest, rewards, **extra)


def decide(candidates, **options):
    defaults = {"version": 3, "batch_size": 2, "max_staleness": 1, "policy": "drop"}
    return form_batch(candidates, **{**defaults, **options})


def test_a_batch_is_the_first_groups_of_the_log():
    assert decide([group(9, 3), group(4, 2), group(7, 3)]) == BatchDecision([4, 7], [])


def test_no_batch_while_groups_are_missing():
    assert decide([group(1, 3)]) == BatchDecision([], [])


def test_drop_drops_what_is_over_the_bound_even_without_a_batch():
    assert decide([group(1, 1), group(2, 2)]) == BatchDecision([], [(1, "stale")])


def test_train_keeps_what_is_over_the_bound():
    assert decide([group(1, 0), group(2, 3)], policy="train") == BatchDecision([1, 2], [])


def test_groups_with_equal_rewards_are_dropped_where_asked():
    candidates = [group(1, 3, rewards=(1.0, 1.0)), group(2, 3), group(3, 3)]
    assert decide(candidates).train == [1, 2]
    expected = BatchDecision([2, 3], [(1, "equal_rewards")])
    assert decide(candidates, filter_equal_rewards=True) == expected


def test_failed_and_malformed_entries_are_never_trained():
    candidates = [
        Candidate(1, 1, unusable="failed"),
        Candidate(2, None, unusable="malformed"),
        group(3, 3),
        group(4, 3),
    ]
    assert decide(candidates) == BatchDecision([3, 4], [(1, "failed"), (2, "malformed")])


def test_of_two_groups_of_one_task_the_first_counts():
    candidates = [group(5, 3, number=8), group(2, 3, number=8), group(6, 3, number=1)]
    decision = decide(candidates, decided={1})
    assert decision == BatchDecision([], [(5, "duplicate"), (6, "duplicate")])


def test_only_a_duplicate_gives_no_credit_back():
    reasons: list[DropReason] = ["stale", "equal_rewards", "failed", "duplicate", "malformed"]
    assert [returns_credit(reason) for reason in reasons] == [True, True, True, False, True]


def test_wait_trains_the_oldest_first():
    candidates = [group(1, 3), group(2, 3), group(3, 2)]
    assert sorted(decide(candidates, policy="wait").train) == [1, 3]


def test_a_batch_is_in_the_order_of_its_tasks_whichever_was_played_first():
    candidates = [group(1, 3, number=9), group(2, 3), group(3, 3, number=4)]
    assert decide(candidates, batch_size=3).train == [2, 3, 1]


def test_wait_holds_for_a_task_that_would_exceed_the_bound():
    candidates = [group(1, 3), group(2, 3)]
    assert decide(candidates, policy="wait", outstanding=[2]).train == []
    assert decide(candidates, policy="wait", outstanding=[3, 3]).train == [1, 2]


def test_wait_holds_where_too_many_tasks_would_be_due_at_once():
    candidates = [group(1, 4), group(2, 4)]
    # version 3 and η = 1: tasks of version 3 are due at version 4, which trains two
    assert decide(candidates, policy="wait", outstanding=[3, 3]).train == [1, 2]
    assert decide(candidates, policy="wait", outstanding=[3, 3, 3]).train == []


def test_wait_goes_on_where_waiting_cannot_help():
    candidates = [group(1, 2), group(2, 2), group(3, 2)]
    assert decide(candidates, policy="wait", outstanding=[2]).train == [1, 2]


def test_wait_drops_what_arrives_over_the_bound():
    decision = decide([group(1, 0), group(2, 3), group(3, 3)], policy="wait")
    assert decision == BatchDecision([2, 3], [(1, "stale")])


@given(st.randoms(use_true_random=False), st.sampled_from(["drop", "train"]))
def test_the_batch_does_not_depend_on_how_much_of_the_log_was_read(random, policy):
    log = [
        group(seq, random.randint(0, 4), rewards=(0.0, float(random.random() < 0.7)))
        for seq in range(12)
    ]
    options = {"version": 4, "max_staleness": 2, "policy": policy, "filter_equal_rewards": True}
    formed = [decide(log[:length], **options).train for length in range(len(log) + 1)]
    assert len({tuple(train) for train in formed if train}) <= 1


@dataclass
class Job:
    """A learner and its generators, without time: one event after the other, chosen at random."""

    random: Random
    batch_size: int
    max_staleness: int
    policy: StalenessPolicy
    total_steps: int = 6
    version: int = 0
    num_issued: int = 0
    num_returned: int = 0
    outstanding: dict[int, int] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    log: dict[int, Candidate] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)

    def issue(self):
        while self.num_issued < num_admissible(
            self.version, self.max_staleness, self.batch_size, self.num_returned, self.total_steps
        ):
            slot = self.num_issued - self.num_returned
            self.outstanding[self.num_issued] = min_version(
                slot, self.batch_size, self.max_staleness
            )
            self.num_issued += 1

    def start_some(self):
        """Generators may hold any weights that the task allows."""
        for number, oldest in self.outstanding.items():
            if number not in self.started and self.random.random() < 0.5:
                self.started[number] = self.random.randint(oldest, self.version)

    def finish_one(self):
        numbers = sorted(self.outstanding)
        # Newest first as often as not: the old ones are stragglers.
        number = numbers[-1] if self.random.random() < 0.5 else self.random.choice(numbers)
        oldest = self.outstanding.pop(number)
        start = self.started.pop(number, self.random.randint(oldest, self.version))
        fate = self.random.random()
        self.log[number] = Candidate(
            seq=len(self.log) + 1,
            number=number,
            min_token_version=start,
            rewards=(0.0, 0.0) if fate < 0.15 else (0.0, 1.0),
            unusable="failed" if fate > 0.9 else None,
        )

    def learn(self):
        """Decide once; say whether anything was decided."""
        decided = set(self.trained)
        waiting = [group for group in self.log.values() if group.seq not in decided]
        decision = form_batch(
            waiting,
            version=self.version,
            batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            policy=self.policy,
            filter_equal_rewards=True,
            outstanding=self.outstanding.values(),
        )
        by_seq = {group.seq: group for group in waiting}
        self.reasons += [reason for _, reason in decision.dropped]
        self.num_returned += sum(returns_credit(reason) for _, reason in decision.dropped)
        self.trained += [seq for seq, _ in decision.dropped] + decision.train
        if decision.train:
            assert len(decision.train) == self.batch_size
            self.lags += [self.version - by_seq[seq].min_token_version for seq in decision.train]
            self.version += 1
        return bool(decision.train or decision.dropped)

    def run(self):
        while self.version < self.total_steps:
            self.issue()
            assert self.outstanding, "a deadlock: nobody generates and nobody trains"
            self.start_some()
            self.finish_one()
            while self.version < self.total_steps and self.learn():
                pass
        assert len(self.trained) == len(set(self.trained))


@settings(max_examples=300)
@given(
    st.integers(0, 1_000_000),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from(["drop", "wait", "train"]),
)
def test_every_run_finishes_within_its_bound(seed, batch_size, max_staleness, policy):
    job = Job(Random(seed), batch_size, max_staleness, policy)
    job.run()
    assert len(job.lags) == batch_size * job.total_steps
    if policy != "train":
        assert max(job.lags) <= max_staleness
    if policy != "drop":
        assert "stale" not in job.reasons


@pytest.mark.parametrize("policy", ["drop", "wait", "train"])
def test_without_staleness_every_trained_token_is_on_policy(policy):
    for seed in range(20):
        job = Job(Random(seed), batch_size=3, max_staleness=0, policy=policy)
        job.run()
        assert set(job.lags) == {0}
        assert "stale" not in job.reasons
