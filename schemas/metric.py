"""Metrics, events, log lines, evaluations and heartbeats."""

from typing import Any, Literal, cast

from pydantic import Field

from .task import Blame
from .wire.bounds import Moment
from .wire.codec import read_json
from .wire.message import Message, with_last

EQUAL_SHARE = "rollout/equal_reward_share"
"""Metric: share of the step's groups whose rewards are all equal."""
WHY_EQUAL = (
    "Usually the task is too hard or too easy for the model, the reward has only one value, or "
    "rollout.group_size is too small"
)
_PLAIN_FIELDS = ("timestamp", "level", "event", "role", "actor", "job")


class Metric(Message):
    """Metrics of one step, on `metric`."""

    step: int = Field(ge=0)
    """Training step; 0 is before training."""
    values: dict[str, float]
    """NaN: could not be computed."""
    time: Moment
    """Seconds since the epoch."""

    @property
    def is_unlearnt(self) -> bool:
        """Whether the step's gradient is 0, and all its groups have equal rewards."""
        equal, norm = self.values.get(EQUAL_SHARE), self.values.get("actor/grad_norm")
        return equal == 1.0 and norm == 0.0


class Event(Message):
    """An event of the job, on `event`."""

    kind: str
    """Kind of event, such as `job_started` or `checkpoint_saved`."""
    source: str
    message: str = ""
    """Text for people."""
    data: dict[str, Any] = Field(default_factory=dict[str, Any])
    time: Moment
    """Seconds since the epoch."""


class LogLines(Message):
    """Output of an actor, on `log.<actor>`."""

    actor: str
    attempt: int = Field(ge=1)
    """Number of the actor's start."""
    lines: list[str]
    time: Moment
    """Seconds since the epoch."""

    def named_at(self, at: str) -> str:
        """Return the subject of its actor."""
        return with_last(at, self.actor)


class EvalRecord(Message):
    """One evaluation of one version, in the KV bucket of evaluations."""

    version: int = Field(ge=0)
    step: int = Field(ge=0)
    """Training step at which the result is reported."""
    state: Literal["requested", "running", "done", "failed", "reported", "given_up"] = "requested"
    """The learner turns done into reported, failed into given_up."""
    values: dict[str, float] = Field(default_factory=dict[str, float])
    """Results: `val/mean_score`, `val/pass@k` …"""
    blame: str = ""

    def named_at(self, at: str) -> str:
        """Return the key of its version."""
        return with_last(at, self.version)


class EpisodeScore(Message):
    """What a validation counts of one episode; in a game with roles, of one role."""

    reward: float
    success: bool
    num_tokens: int = Field(ge=0)
    """Generated tokens; 0: a program's episode that failed."""
    num_turns: int = Field(ge=0)
    kind: str = ""
    """Type of its task; in a game with roles, the role."""
    is_program: bool = False
    outcome: str = ""
    """How a program's episode ended."""
    figures: dict[str, float] = Field(default_factory=dict[str, float])
    """Numbers that the game put into `info`."""


class ValidationResult(Message):
    """What a validation task became, on `validation.result.<version>.<n>`."""

    version: int = Field(ge=0)
    task: int = Field(ge=0)
    episodes: list[EpisodeScore | None] = Field(default_factory=list[EpisodeScore | None])
    """Its episodes; null for one whose tries all failed."""
    blame: Blame | None = None
    """Why the version cannot be validated; null: it was played."""
    source: str
    started: float
    """When it began, in seconds since the epoch."""
    finished: float

    def named_at(self, at: str) -> str:
        """Return the subject of its version and number."""
        return f"{with_last(at.rpartition('.')[0], self.version)}.{self.task}"


LOST_STEPS = "lost_steps"
"""Number in a learner's heartbeat: steps that the broker's store has lost before its start."""


class Presence(Message):
    """An actor's heartbeat, in the KV bucket of actors; expires after 10 s."""

    actor: str
    """Name within the job, or of the node or scheduler."""
    role: str
    """learner, generator, evaluator, environment, scheduler or node."""
    host: str
    pid: int
    release: str = ""
    """tinkermq's version in its process; empty: older than 0.1.0."""
    state: str
    waits_for: str = ""
    """Name of its current wait, and the other side."""
    missing_since: Moment | None = None
    """Time since when it waits for something outside the pool: a client's game, or room on a
    disk."""
    version: int | None = None
    """Policy version in use."""
    progress: int = Field(default=0, ge=0)
    """Finished work: steps, groups, evaluations, answers."""
    numbers: dict[str, float] = Field(default_factory=dict[str, float])
    """Its figures: tokens/s, running episodes, share of time busy …"""
    time: Moment
    """Seconds since the epoch."""

    def named_at(self, at: str) -> str:
        """Return the key of its actor."""
        return with_last(at, self.actor)


def readable(line: str) -> str:
    """Return a structured log line as text; any other line unchanged."""
    try:
        entry = read_json(line)
    except ValueError:
        return line
    if not isinstance(entry, dict):
        return line
    fields = cast("dict[str, Any]", entry)
    clock = str(fields.get("timestamp", ""))[11:19]
    rest = [f"{key}={value}" for key, value in fields.items() if key not in _PLAIN_FIELDS]
    words = [clock, str(fields.get("level", "")), str(fields.get("event", "")), *rest]
    return " ".join(word for word in words if word)
