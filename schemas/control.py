"""Control requests to one actor of a job, on `ctl.<actor>`, and a learner's orders to its ranks."""

from typing import Any, Literal

from pydantic import Field

from .wire.message import Message

MAX_TRACED_STEPS = 32


class ControlRequest(Message):
    """Ask an actor to do something."""

    verb: Literal["pause", "resume", "checkpoint", "profile", "stop", "hand_over", "status"]
    """pause and resume the work; write a checkpoint now, or torch's traces of the next steps; drain
    and end; end as on SIGTERM, because the job goes on elsewhere; tell."""
    reason: str = ""
    """Why, for the event."""
    steps: int = Field(default=1, ge=1, le=MAX_TRACED_STEPS)
    """How many steps to trace."""


class ControlReply(Message):
    """What the actor did."""

    actor: str
    """The actor that answers."""
    step: int | None = None
    """Training step it is at."""
    detail: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further key-values: the path of a checkpoint, those of traces."""


class ReserveRequest(Message):
    """An external agent asks the learner for task numbers, on `ctl.learner.reserve`."""

    count: int = Field(ge=1, le=10_000)
    """How many groups it will append."""
    source: str
    """Name of the agent."""
    deadline_s: float = Field(default=60.0, gt=0, le=3600)
    """Numbers not used by then are given up."""


class ReserveReply(Message):
    """Task numbers for an external agent."""

    tasks: list[int]
    """Numbers to append groups under."""
    group_size: int
    """Trajectories that each group must have."""
    version: int
    """The learner's present version."""
    vocab_size: int
    """Token ids must be below this."""
    max_tokens: int
    """Longest trajectory, in tokens."""


class TaskSpec(Message):
    """One plain task: what to reset the game with."""

    sample: int | None = Field(default=None, ge=0)
    """Row of the training data."""
    seed: int | None = Field(default=None, ge=0)
    """Seed; None: derived from the task's number."""
    reset_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments for the game's `reset`."""


class PublishTasksRequest(Message):
    """A client's own tasks for a job, on `ctl.learner.tasks`."""

    tasks: list[TaskSpec] = Field(min_length=1, max_length=10_000)
    """The tasks, in the order in which they are issued."""


class PublishTasksReply(Message):
    """Tasks taken."""

    queued: int
    """How many of the client's tasks now wait for the staleness gate."""


class RankOrder(Message):
    """One piece of work for a rank; it does one after the other.

    The first one, `begin`, goes to `rank.<actor>.begin`, the rest to `rank.<actor>.order-<process>`
    of whoever answered that: of a rank that was replaced, and does not know it, two may listen.
    """

    learner: str
    """Which process of the learner asks: a new one begins anew."""
    number: int = Field(ge=0)
    """Which of its orders this is, from 0: one that comes again was taken before."""
    do: Literal["begin", "step", "gather", "save", "end"]
    """Load everything and meet the others, train a batch, gather the weights, write a
    checkpoint, do nothing more for this process."""
    fields: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What it needs to know for that."""
    seqs: list[int] = Field(default_factory=list[int])
    """Entries of the rollout log that are the batch; each rank reads them itself."""


class RankState(Message):
    """How a rank is: reply to each order, and on `rank.<actor>.look-<process>`."""

    rank: int = Field(ge=1)
    """Its number."""
    process: str
    """Which process of the rank's actor this is."""
    learner: str = ""
    """Which process of the learner it serves; none yet."""
    host: str = ""
    """Host name of its machine."""
    works: bool = False
    """Whether the process that computes is there."""
    error: str = ""
    """Why it is not."""
    draining: bool = False
    """Whether it was told to end: it does once the learner has."""


def rank_of(actor: str) -> int:
    """Return the number of the rank that an actor of this name is: 3 for `rank-3`."""
    return int(actor.removeprefix("rank-"))


def rank_name(rank: int) -> str:
    """Return the name of the actor that is a rank."""
    return f"rank-{rank}"
