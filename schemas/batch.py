"""Batch records: which groups each optimiser step trains, written before it trains them."""

from typing import Literal

from pydantic import Field

from .wire.message import Message

DropReason = Literal["stale", "equal_rewards", "filtered", "failed", "duplicate", "malformed"]


class Dropped(Message):
    """A log entry that the learner passed over, and why."""

    seq: int = Field(ge=1)
    """Sequence of the entry in the rollout log."""
    task: int | None
    """Its task number; None when the entry is malformed."""
    reason: DropReason
    """Why it is not trained."""


class BatchRecord(Message):
    """One optimiser step, appended to `batch` before the step is done.

    The expected last sequence of the append fences off a second learner. Training the records in
    order from a checkpoint gives the same weights again.
    """

    step: int = Field(ge=1)
    """The step that trains this batch; the version becomes `step` by it."""
    seqs: list[int] = Field(min_length=1)
    """Sequences in the rollout log, in the order in which they are trained."""
    tasks: list[int]
    """Task numbers of `seqs`."""
    dropped: list[Dropped] = Field(default_factory=list[Dropped])
    """Entries decided on since the last record that are not trained."""
    oldest: int = Field(default=0, ge=0)
    """Tokens of earlier versions are not trained in this step: they are context."""
    seed: int = Field(ge=0)
    """Seed of the step's own randomness."""
    digest: str
    """SHA-256 over the SHA-256 digests of the groups' payloads, in order."""
    learner: str
    """The learner process that wrote it."""
    time: float
    """Seconds since the epoch."""
