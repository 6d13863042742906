"""Tasks: one prompt each, to be rolled out `group_size` times."""

from typing import Any, Literal

from pydantic import Field, field_validator

from .wire.errors import Boundary
from .wire.foreign import clean_text
from .wire.message import MAX_CHARS, Message, with_last


class Task(Message):
    """One prompt to be rolled out, on the work-queue stream `task.<n>`.

    It names a dataset row or a seed, never a prompt: the prompt is made in the environment host,
    where the data is.
    """

    task: int = Field(ge=0)
    """Number of the task within its job."""
    sample: int | None = None
    """Row of the training data, or None for a game that generates its states."""
    seed: int = Field(ge=0)
    """Seed of the group's episodes; each episode derives its own from it."""
    index: int | None = Field(default=None, ge=0)
    """Position in the job's data order; None for a task of a client's own."""
    item: int | None = Field(default=None, ge=0)
    """What a curriculum chose: a row, or one of the seeds of a game that generates its states."""
    chosen_at: int | None = Field(default=None, ge=0)
    """Version after which it chose: by the success rates of the steps up to it."""
    reissue_of: int | None = Field(default=None, ge=0)
    """Number of the dropped task in whose place it stands."""
    tries: int = Field(default=0, ge=0, le=100)
    """How often it was issued before and came back as nothing that can be trained."""
    min_version: int = Field(default=0, ge=0)
    """A generator waits until its weights are at this version or newer."""
    group_size: int = Field(ge=1, le=4096)
    """Number of episodes."""
    issued: float = 0.0
    """Seconds since the epoch at which the learner issued it; 0: a client made it."""
    greedy_baseline: bool = False
    """Add one greedy episode, for the remax baseline."""
    reset_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for the game's `reset`, from a client that publishes its own tasks."""

    @property
    def identity(self) -> tuple[int | None, int | None, int | None, int]:
        """What is played, whoever issued it and whenever: position, row, choice and seed."""
        return self.index, self.sample, self.item, self.seed

    def named_at(self, at: str) -> str:
        """Return the subject of its number."""
        return with_last(at, self.task)


class Blame(Message):
    """Where and why something failed: exactly one boundary is blamed."""

    boundary: Boundary
    """The boundary at which it failed."""
    code: str
    """The error's stable code."""
    message: str
    """What happened, with which value; a game's traceback where there is one."""
    hint: str = ""
    """What to do next."""

    @field_validator("message", "hint", mode="before")
    @classmethod
    def _travels(cls, value: Any) -> str:
        """Take any text, as errors quote what games, data and models say."""
        return clean_text(value, MAX_CHARS)


class DeadLetter(Message):
    """A task given up after its last attempt, on `dead`."""

    task: Task
    """The task as it was issued."""
    blame: Blame
    """The last error."""
    num_attempts: int = Field(ge=1)
    """How often it was tried."""
    source: str
    """The generator that gave it up."""
    time: float
    """Seconds since the epoch."""


# Batch records: which groups each optimiser step trains, written before it trains them.

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
