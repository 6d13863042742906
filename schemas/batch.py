"""Batch records: the groups of each optimiser step, written before the step."""

from typing import Literal

from pydantic import Field

from .wire.message import Message

DropReason = Literal["stale", "equal_rewards", "filtered", "failed", "duplicate", "malformed"]


class Dropped(Message):
    """A log entry that the learner did not train, and why."""

    seq: int = Field(ge=1)
    """Sequence of the entry in the rollout log."""
    task: int | None
    """Task number; null: the entry is malformed."""
    reason: DropReason
    """Why it is not trained."""


class BatchRecord(Message):
    """One optimiser step, appended to `batch` before the step is done.

    The expected last sequence of the append fences off a second learner. Training the records in
    order from a checkpoint reproduces the weights.
    """

    step: int = Field(ge=1)
    """The step, and the version that it makes."""
    seqs: list[int] = Field(min_length=1)
    """Sequences in the rollout log, in training order."""
    tasks: list[int]
    """Task numbers of `seqs`."""
    dropped: list[Dropped] = Field(default_factory=list[Dropped])
    """Entries skipped since the last record."""
    oldest: int = Field(default=0, ge=0)
    """Tokens of earlier versions are context only, not trained."""
    seed: int = Field(ge=0)
    """Seed of the step's randomness."""
    digest: str
    """SHA-256 over the SHA-256 digests of the groups' payloads, in order."""
    learner: str
    """The learner process that wrote it."""
    time: float
    """Seconds since the epoch."""
