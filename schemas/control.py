"""Control of actors and of a learner's ranks."""

from typing import Any, Literal

from pydantic import Field

from .wire.message import Message

MAX_TRACED_STEPS = 32


class ControlRequest(Message):
    """Ask an actor to do something, on `ctl.<actor>`."""

    verb: Literal[
        "pause",
        "resume",
        "checkpoint",
        "repeat",
        "profile",
        "memory",
        "stop",
        "hand_over",
        "status",
    ]
    """checkpoint: write one now; repeat: read on `dead` which failed tasks to issue again;
    profile: record torch traces of the next steps; memory: report what the process's memory holds;
    stop: drain and exit; hand_over: exit as on SIGTERM, because the job continues elsewhere;
    status: report."""
    reason: str = ""
    steps: int = Field(default=1, ge=1, le=MAX_TRACED_STEPS)
    """Number of steps to trace."""


class ControlReply(Message):
    """Result of a control request."""

    actor: str
    step: int | None = None
    detail: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further results, such as paths of a checkpoint or of traces."""


class ReserveRequest(Message):
    """An external agent reserves task numbers, on `ctl.learner.reserve`."""

    count: int = Field(ge=1, le=10_000)
    """Groups that it will append."""
    source: str
    deadline_s: float = Field(default=60.0, gt=0, le=3600)
    """Time after which unused numbers expire."""


class ReserveReply(Message):
    """Task numbers for an external agent."""

    tasks: list[int]
    group_size: int
    """Required trajectories per group."""
    version: int
    """The learner's version."""
    vocab_size: int
    """Bound of token ids."""
    max_tokens: int
    """Longest trajectory, in tokens."""


class TaskSpec(Message):
    """One task: how to reset the game."""

    sample: int | None = Field(default=None, ge=0)
    """Row of the training data."""
    seed: int | None = Field(default=None, ge=0)
    """Seed of the task; null: derived from the task number."""
    reset_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments for the game's `reset`."""


class PublishTasksRequest(Message):
    """A client's own tasks for a job, on `ctl.learner.tasks`."""

    tasks: list[TaskSpec] = Field(min_length=1, max_length=10_000)
    """Tasks in the order of issue."""


class PublishTasksReply(Message):
    """The tasks are queued."""

    queued: int
    """The client's tasks that wait for the staleness gate."""


class GpuTurnRequest(Message):
    """A generator that shares the learner's GPU asks whose turn it is, on `ctl.learner.turn`."""

    asleep: bool
    """Whether its engines have freed the GPU or are not started yet."""
    seen: int
    """Number of the last turn that it received; -1: none."""


class GpuTurn(Message):
    """Who has the GPU that learner and generator share; the answer comes when it changes, or after
    two seconds."""

    number: int
    """Grows with each change."""
    asleep: bool
    """Whether the engines must sleep, because the learner trains."""
    version: int
    """Version with which they wake."""
    memory_share: float | None = None
    """Share of the GPU's memory for the engines; null: without a GPU."""
    sleeps: bool = False
    """Whether the engines ever have to sleep."""


class RankOrder(Message):
    """One order to a rank, which executes them one at a time.

    The first, `begin`, goes to `rank.<actor>.begin`, the others to `rank.<actor>.order-<process>`
    of the process that answered it, because a replaced rank may still listen.
    """

    learner: str
    """The learner process."""
    number: int = Field(ge=0)
    """Number of the order, from 0; a repeated one is not executed twice."""
    do: Literal["begin", "step", "gather", "save", "end"]
    """begin: load and connect to the others; step: train a batch; gather: collect the weights;
    save: write a checkpoint; end: stop serving this process."""
    fields: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the order."""
    seqs: list[int] = Field(default_factory=list[int])
    """Log entries of the batch, which each rank reads itself."""


class RankState(Message):
    """State of a rank: reply to each order, and on `rank.<actor>.look-<process>`."""

    rank: int = Field(ge=1)
    process: str
    learner: str = ""
    """The learner process that it serves."""
    host: str = ""
    """Host name of its machine."""
    works: bool = False
    """Whether the computing process runs."""
    error: str = ""
    """Why it does not run."""
    out_of_memory: bool = False
    """Whether it does not run because its GPU's memory was too small for a step."""
    is_final: bool = False
    """Whether a restart would end with the same error."""
    draining: bool = False
    """It exits after the learner."""
    silent_s: float = Field(default=0.0, ge=0)
    """Time for which no thread of the process has run."""
    collectives: int = Field(default=0, ge=0)
    """Number of collectives that it has begun, those of saves excluded."""
    saves: int = Field(default=0, ge=0)
    """Number of collectives of saves that it has begun."""
    phase: str = ""
    """Phase of its order; `start` before the first, empty between orders."""
    doing: str = ""
    """What it does, in words: `backward of step 4`."""


def rank_of(actor: str) -> int:
    """Return the rank number in an actor's name: 3 for `rank-3`."""
    return int(actor.removeprefix("rank-"))


def rank_name(rank: int) -> str:
    """Return the actor name of a rank."""
    return f"rank-{rank}"
