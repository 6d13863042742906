"""Tasks: one prompt each, rolled out `group_size` times."""

from typing import Any, Literal

from pydantic import Field, field_validator

from .wire.errors import Boundary
from .wire.foreign import clean_text
from .wire.message import MAX_CHARS, Message, with_last


class Task(Message):
    """One prompt to be rolled out, on the work-queue stream `task.<n>`.

    It names a data row or a seed. The environment host, which has the data, makes the prompt. A
    task of a validation is on `validation.task.<version>.<n>`.
    """

    task: int = Field(ge=0)
    """Its number within the job."""
    sample: int | None = None
    """Row of the training data; null: generated state."""
    seed: int = Field(ge=0)
    """Episodes derive theirs from it."""
    index: int | None = Field(default=None, ge=0)
    """Position in the data order; null: a client's own task."""
    item: int | None = Field(default=None, ge=0)
    """The curriculum's choice: a row or seed."""
    chosen_at: int | None = Field(default=None, ge=0)
    """Version of the success rates behind that choice."""
    reissue_of: int | None = Field(default=None, ge=0)
    """The dropped task that it replaces."""
    tries: int = Field(default=0, ge=0, le=100)
    """Earlier issues without a trainable result."""
    min_version: int = Field(default=0, ge=0)
    """Oldest version that may generate it."""
    version: int | None = Field(default=None, ge=0)
    """Version that it validates; null: a training task."""
    group_size: int = Field(ge=1, le=4096)
    issued: float = 0.0
    """Time at which the learner issued it; 0: a client made it."""
    greedy_baseline: bool = False
    """Add a greedy episode, for remax."""
    reset_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for the game's `reset`."""

    @property
    def identity(self) -> tuple[int | None, int | None, int | None, int]:
        """The played content, independent of number and issuer: position, row, choice and seed."""
        return self.index, self.sample, self.item, self.seed

    def named_at(self, at: str) -> str:
        """Return the subject of its number, and of the version that it validates."""
        if self.version is None:
            return with_last(at, self.task)
        return f"{with_last(at.rpartition('.')[0], self.version)}.{self.task}"


class Blame(Message):
    """Where and why something failed, with exactly one boundary."""

    boundary: Boundary
    code: str
    """Stable error code."""
    message: str
    """What happened, with which value; a game's traceback."""
    hint: str = ""
    """What to do about it."""

    @field_validator("message", "hint", mode="before")
    @classmethod
    def _travels(cls, value: Any) -> str:
        """Clean any text, since errors quote games, data and models."""
        return clean_text(value, MAX_CHARS)


Decision = Literal["repeat", "drop"]
MAX_TRIES = 3
"""Tries of a task whose groups cannot be trained; the task of a stale group is issued without
bound."""


class DeadLetter(Message):
    """A task that failed its last try, or the decision of its run's owner about it, on `dead`."""

    task: Task
    blame: Blame
    num_attempts: int = Field(ge=1)
    source: str
    """The generator that gave up."""
    time: float
    """Seconds since the epoch."""
    decision: Decision | None = None
    """What the owner decided in this second letter of the task; null: the first letter."""

    @property
    def is_final(self) -> bool:
        """Whether the learner does not issue the task again by itself."""
        return self.task.tries + 1 >= MAX_TRIES or self.blame.boundary == "task"


# Batch records: the groups of each optimiser step, written before the step.

DropReason = Literal["stale", "equal_rewards", "filtered", "failed", "duplicate", "malformed"]


class Dropped(Message):
    """A log entry that the learner did not train, and why."""

    seq: int = Field(ge=1)
    """Sequence number in the rollout log."""
    task: int | None
    """Number of the task; null: the entry is malformed."""
    reason: DropReason


class BatchRecord(Message):
    """One optimiser step, appended to `batch` before the step is done.

    The expected last sequence of the append fences off a second learner. Training the records in
    order from a checkpoint reproduces the weights.
    """

    step: int = Field(ge=1)
    """Number of the step, and of the version that it makes."""
    seqs: list[int] = Field(min_length=1)
    """Sequence numbers in the rollout log, in training order."""
    tasks: list[int]
    dropped: list[Dropped] = Field(default_factory=list[Dropped])
    """Entries skipped since the last record."""
    oldest: int = Field(default=0, ge=0)
    """Tokens of earlier versions are context only."""
    seed: int = Field(ge=0)
    microbatch_tokens: int = Field(default=0, ge=0)
    """Tokens per forward and backward pass of the step; 0: as configured."""
    digest: str
    """SHA-256 over the SHA-256 digests of the groups' payloads, in order."""
    learner: str
    """The learner process that wrote it."""
    time: float
    """Seconds since the epoch."""
