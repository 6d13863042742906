"""Staleness: how far generation may run ahead of training, and which groups form a batch.

A credit is the right to issue one task. Each version adds `batch_size` credits, and each group that
will never be trained (dropped, filtered, given up) returns its credit: otherwise a batch would lack
groups that may not be generated. The *slot* of a task is the number of tasks issued before it minus
the credits returned before it. All rules use slots in place of task numbers, because numbers grow
with each return and slots do not: under the gate `slot // batch_size <= version + max_staleness`,
so `min_version` never requires a version that the learner has not made, and there is no deadlock.

The lag of a group is the learner's version minus the oldest version of its tokens. A batch is
formed by a deterministic rule over what the rollout log holds, by policy:
- `drop`: groups over the bound are dropped (each credit returns); the rest in log order.
- `train`: nothing is dropped for its age; log order.
- `mask`: groups without a token within the bound are dropped; log order. Of the others the tokens
  over the bound are not trained (`oldest_trained`), as the record of the batch says.
- `wait`: the oldest first, and no batch is formed that would push another group over the bound.

Why `wait` neither breaks the bound nor deadlocks. A group of oldest version m has the deadline m +
η, the last version that may train it. Each version trains one batch of B, so the groups still to be
trained fit if, for every d, at most B·(d − v + 1) of them have a deadline ≤ d (v: the current
version). The staleness gate issues only what fits: a task in slot s has a deadline of at least s //
B. Training the earliest deadlines first preserves this, and so does any other batch that leaves at
most B·(d − v) groups with a deadline ≤ d. A batch that would leave more waits for the tasks in
generation, which finish without the learner. If waiting cannot help (the bound was lowered during a
run, an external agent sent old tokens), training continues, and groups over the bound are dropped.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from ...schemas.config.job import TrainingConfig
from ...schemas.profile import mean_share, profile_of
from ...schemas.task import DropReason
from ...schemas.wire.trace import StepTrace

# -- the gate -------------------------------------------------------------------------------------


def num_admissible(
    version: int,
    max_staleness: int,
    batch_size: int,
    returned_credits: int,
    total_steps: int | None = None,
) -> int:
    """Count the tasks that may have been issued since the start of the job.

    With `total_steps`, no tasks are issued beyond the last step.
    """
    steps = version + max_staleness + 1
    if total_steps is not None:
        steps = min(steps, total_steps)
    return steps * batch_size + returned_credits


def min_version(slot: int, batch_size: int, max_staleness: int) -> int:
    """Return the oldest version that may generate the task in `slot`."""
    return max(0, slot // batch_size - max_staleness)


# -- forming a batch -------------------------------------------------------------------------------

StalenessPolicy = Literal["drop", "wait", "train", "mask"]


@dataclass(frozen=True)
class Candidate:
    """An entry of the rollout log that was neither trained nor dropped."""

    seq: int
    """Sequence number in the log."""
    number: int | None
    """Task number; None for a malformed entry without one."""
    min_token_version: int = 0
    """Oldest version of its tokens."""
    rewards: tuple[float, ...] = ()
    """Return of each episode; empty if all are equal, compared within each role."""
    unusable: Literal["failed", "malformed"] | None = None
    """The task was given up, or the entry cannot be read."""
    max_token_version: int | None = None
    """Newest version of its tokens, if it is not the oldest."""
    filtered: bool = False
    """Whether the user's filter leaves it out."""

    def version_that_counts(self, policy: StalenessPolicy) -> int:
        """Return the version that counts for its age: its oldest token's, or its newest's."""
        if policy != "mask" or self.max_token_version is None:
            return self.min_token_version
        return self.max_token_version


def oldest_trained(version: int, training: TrainingConfig) -> int:
    """Return the oldest version whose tokens the step after `version` trains; 0: all versions."""
    masks = training.staleness_policy == "mask"
    return max(0, version - training.largest_staleness) if masks else 0


def returns_credit(reason: DropReason) -> bool:
    """Return whether dropping the entry returns its credit, for another task.

    The task of a duplicate was decided before, and its credit used or returned.
    """
    return reason != "duplicate"


@dataclass(frozen=True)
class BatchDecision:
    """The current decision; it does not depend on later entries."""

    train: list[int] = field(default_factory=list[int])
    """Log sequences to train, in the order of their tasks; empty while more groups are needed."""
    dropped: list[tuple[int, DropReason]] = field(default_factory=list[tuple[int, DropReason]])
    """Log sequences that will never be trained, with the reason; also without a batch."""


def _drop_reason(
    candidate: Candidate, is_known: bool, is_stale: bool, filter_equal_rewards: bool
) -> DropReason | None:
    if is_known:
        return "duplicate"
    if candidate.unusable is not None:
        return candidate.unusable
    if is_stale:
        return "stale"
    if filter_equal_rewards and len(set(candidate.rewards)) <= 1:
        return "equal_rewards"
    return "filtered" if candidate.filtered else None


def triage(
    candidates: Iterable[Candidate],
    *,
    version: int,
    max_staleness: int,
    policy: StalenessPolicy,
    filter_equal_rewards: bool = False,
    decided: Container[int] = (),
) -> tuple[list[Candidate], list[tuple[int, DropReason]]]:
    """Separate trainable entries from those never to be trained, in log order.

    `decided` holds the task numbers that were trained or dropped before; of two entries with the
    same number the first in the log counts.
    """
    oldest = 0 if policy == "train" else version - max_staleness
    usable: list[Candidate] = []
    dropped: list[tuple[int, DropReason]] = []
    seen: set[int] = set()
    for candidate in sorted(candidates, key=lambda candidate: candidate.seq):
        number = candidate.number
        is_known = number is not None and (number in seen or number in decided)
        is_stale = candidate.version_that_counts(policy) < oldest
        reason = _drop_reason(candidate, is_known, is_stale, filter_equal_rewards)
        if reason is None:
            usable.append(candidate)
        else:
            dropped.append((candidate.seq, reason))
        if number is not None:
            seen.add(number)
    return usable, dropped


def _must_wait(
    train: Sequence[Candidate],
    outstanding: Iterable[int],
    version: int,
    batch_size: int,
    bound: int,
) -> bool:
    """Return whether training this batch would push an outstanding task over the bound.

    The batch holds the earliest deadlines of the available groups. If it also holds a deadline
    later than d, all other groups with a deadline ≤ d are outstanding, and after waiting they are
    in the batch.
    """
    latest = max(candidate.min_token_version for candidate in train) + bound
    per_deadline = Counter(version_of_task + bound for version_of_task in outstanding)
    deadlines = sorted(deadline for deadline in per_deadline if deadline < latest)
    left = accumulate(per_deadline[deadline] for deadline in deadlines)
    return any(
        num_left > batch_size * max(deadline - version, 0)
        for deadline, num_left in zip(deadlines, left, strict=True)
    )


def form_batch(
    candidates: Iterable[Candidate],
    *,
    version: int,
    batch_size: int,
    max_staleness: int,
    policy: StalenessPolicy,
    filter_equal_rewards: bool = False,
    decided: Container[int] = (),
    outstanding: Iterable[int] = (),
) -> BatchDecision:
    """Decide what to train at `version` and what to drop.

    `outstanding` holds, for every issued task that is not in the log yet, the oldest version that
    its tokens may have (its `min_version`); only `wait` reads it. Under the other policies the
    batch depends only on the log and the version, not on how much of the log has been read.
    """
    usable, dropped = triage(
        candidates,
        version=version,
        max_staleness=max_staleness,
        policy=policy,
        filter_equal_rewards=filter_equal_rewards,
        decided=decided,
    )
    if len(usable) < batch_size:
        return BatchDecision(dropped=dropped)
    if policy == "wait":
        usable.sort(key=lambda candidate: (candidate.min_token_version, candidate.seq))
    train = usable[:batch_size]
    if policy == "wait" and _must_wait(train, outstanding, version, batch_size, max_staleness):
        return BatchDecision(dropped=dropped)
    train.sort(key=_in_order_of_tasks)
    return BatchDecision([candidate.seq for candidate in train], dropped)


def _in_order_of_tasks(candidate: Candidate) -> tuple[bool, int, int]:
    """Order a batch by its task numbers; entries without a number are last."""
    return candidate.number is None, candidate.number or 0, candidate.seq


# -- the bound: fixed, or chosen from measured times -----------------------------------------------
# A batch takes the time L to generate and T to train, so at one batch every C seconds (L + T) / C
# batches are in progress (Little's law), and the gate admits η + 1 of them. A smaller η makes
# learner and generators wait for each other; a larger η only makes tokens older. `auto` looks for
# the smallest η without waits. C is the time of the slower side alone: T for the learner, and for
# the generators the part of each step in which they compute.
#
# Whether the games can keep up with more episodes is not known in advance. So a larger bound is a
# trial: if steps do not become shorter, the previous bound returns and stays for a while.
#
# The current bound applies to the gate. Training uses the largest bound so far, so that no group
# becomes stale because the gate was narrowed.

_MIN_WINDOW = 8
_SLACK = 0.1
_GAIN = 0.05
_HOLD = 64
_COMPUTING = ("generate", "swap", "other")


@dataclass(frozen=True)
class Pace:
    """The pace of several steps."""

    step_s: float
    """Seconds per step."""
    batches: float
    """Batches in generation or training at a time when nothing waits for the gate."""


class Staleness:
    """The staleness bound of a learner."""

    def __init__(self, training: TrainingConfig, bound: int = 0) -> None:
        """Begin with the last `bound`, or with 1 (close to on-policy) if the bound is chosen."""
        self.largest = training.largest_staleness
        """No group with a larger lag is trained (unless the policy is `train`)."""
        self._is_auto = training.max_staleness == "auto"
        self.now = min(max(bound, 1), self.largest) if self._is_auto else self.largest
        """How far generation may currently run ahead."""
        self._traces: list[StepTrace] = []
        self._trial: tuple[int, float] | None = None
        self._ceiling = self.largest
        self._hold = 0

    def adapt(self, trace: StepTrace) -> None:
        """Add the times of a step, and choose a new bound if it is `auto`."""
        if not self._is_auto:
            return
        self._hold = max(self._hold - 1, 0)
        self._traces.append(trace)
        settle = self.now + 1  # batches in progress when a bound takes effect
        window = max(_MIN_WINDOW, 2 * (self.now + 1))
        if len(self._traces) < settle + window:
            return
        self.now = self._choose(pace_of(self._traces[settle:]))
        self._traces.clear()

    def _choose(self, pace: Pace) -> int:
        """Return the next bound: the one before a trial without gain, or the required one."""
        trial, self._trial = self._trial, None
        if trial is not None and pace.step_s > trial[1] * (1 - _GAIN):
            self._ceiling, self._hold = trial[0], _HOLD
            return trial[0]
        ceiling = self._ceiling if self._hold else self.largest
        chosen = min(choose(self.now, pace.batches), max(ceiling, self.now), self.largest)
        if chosen > self.now:
            self._trial = (self.now, pace.step_s)
        return chosen


def choose(bound: int, batches: float) -> int:
    """Return the bound after `bound`, at least 1, for a number of batches in progress.

    It at most doubles, since the measurements may change with it; it falls by one, and only with
    some margin.
    """
    if batches > (bound + 1) * (1 + _SLACK):
        return min(math.ceil(batches) - 1, 2 * bound)
    if bound > 1 and batches < bound * (1 - _SLACK):
        return bound - 1
    return bound


def pace_of(traces: Sequence[StepTrace]) -> Pace:
    """Measure several steps; without generators' times, assume that more batches do not help."""
    profile = profile_of(traces)
    step_s = profile.wall_s * (1 - profile.learner.get("paused", 0.0)) / len(traces)
    own_s = step_s - profile.wall_s * profile.learner.get("wait", 0.0) / len(traces)
    rollouts = [group.rollout_s for trace in traces for group in trace.groups]
    if not rollouts or not profile.generators:
        return Pace(step_s, 0.0)
    computing = sum(mean_share(profile.generators.values(), kind) for kind in _COMPUTING)
    pace_s = max(own_s, step_s * computing, 1e-9)
    return Pace(step_s, (sum(rollouts) / len(rollouts) + own_s) / pace_s)
