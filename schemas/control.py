"""Control requests to one actor of a job, on `ctl.<actor>`."""

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
