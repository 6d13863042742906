"""Forming a batch: a deterministic rule over what the rollout log holds.

The lag of a group is the learner's version minus the oldest version of its tokens. Policies:
- `drop`: groups over the bound are dropped (each credit returns); the rest in log order.
- `train`: nothing is dropped for its age; log order.
- `mask`: what has no token within the bound is dropped; log order. Of the others the tokens over
  the bound are not trained (`oldest_trained`), which is told in the record of the batch.
- `wait`: the oldest first, and no batch is formed that would push another group over the bound.

Why `wait` neither breaks the bound nor deadlocks. A group of oldest version m has the deadline
m + η: the last version that may train it. Each version trains one batch of B, so the groups still
to be trained fit if, for every d, at most B·(d − v + 1) of them have a deadline ≤ d (v: the
version now). The staleness gate issues only what fits: a task in slot s has a deadline of at
least s // B. Training the earliest deadlines first keeps that true, and so does any other batch
that leaves at most B·(d − v) groups with a deadline ≤ d. A batch that would leave more waits for
the tasks still being generated, which finish without the learner's help. Where waiting cannot
help (the bound was lowered in the middle of a run, an external agent sent old tokens), training
goes on, and what is over the bound is dropped.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from ...schemas.config.job import TrainingConfig
from ...schemas.task import DropReason

StalenessPolicy = Literal["drop", "wait", "train", "mask"]


@dataclass(frozen=True)
class Candidate:
    """An entry of the rollout log that was neither trained nor dropped."""

    seq: int
    """Sequence in the log."""
    number: int | None
    """Task number; None when a malformed entry does not tell."""
    min_token_version: int = 0
    """Oldest version that produced one of its tokens."""
    rewards: tuple[float, ...] = ()
    """Return of each episode; none where all are equal, compared within each role."""
    unusable: Literal["failed", "malformed"] | None = None
    """The task was given up, or the entry cannot be read."""
    max_token_version: int | None = None
    """Newest version that produced one of its tokens, where it is not the oldest."""
    filtered: bool = False
    """A filter of the user's own leaves it out."""

    def version_that_counts(self, policy: StalenessPolicy) -> int:
        """Return the version by which it is too old: of its oldest token, or of its newest."""
        if policy != "mask" or self.max_token_version is None:
            return self.min_token_version
        return self.max_token_version


def oldest_trained(version: int, training: TrainingConfig) -> int:
    """Return the oldest version whose tokens the step after `version` trains; 0: of all."""
    masks = training.staleness_policy == "mask"
    return max(0, version - training.largest_staleness) if masks else 0


def returns_credit(reason: DropReason) -> bool:
    """Say whether another task may be issued in place of the dropped one.

    A duplicate's task was trained or dropped, and its credit used or returned, before.
    """
    return reason != "duplicate"


@dataclass(frozen=True)
class BatchDecision:
    """What to do now; final, whatever comes later."""

    train: list[int] = field(default_factory=list[int])
    """Log sequences to train, in this order, that of their tasks; empty while more groups are
    needed."""
    dropped: list[tuple[int, DropReason]] = field(default_factory=list[tuple[int, DropReason]])
    """Log sequences that will never be trained, and why; also without a batch."""


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
    """Separate what can be trained from what never will, in log order.

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
    """Say whether training this batch now would push an outstanding task over the bound.

    The batch holds the earliest deadlines of what is ready. Where it also holds a later deadline
    than d, all that is left with a deadline ≤ d is outstanding, and waiting lets it in.
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

    `outstanding` holds, for every task that was issued and is not in the log yet, the oldest
    version that its tokens may have (its `min_version`); only `wait` reads it. Under the other
    policies the batch depends on the log and the version alone, not on how much of the log was read
    when it was formed.
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
    """Order a batch by its tasks, whichever was played first; what has no number comes last."""
    return candidate.number is None, candidate.number or 0, candidate.seq
