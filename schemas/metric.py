"""Metrics, events, log lines and evaluations of a job."""

from typing import Any, Literal, cast

from pydantic import Field

from .wire.codec import read_json
from .wire.message import Message, with_last

_PLAIN_FIELDS = ("timestamp", "level", "event", "role", "actor", "job")


class Metric(Message):
    """Numbers of one step, on `metric`."""

    step: int = Field(ge=0)
    """Training step they belong to; 0 is before training."""
    values: dict[str, float]
    """Name to value; NaN marks what could not be computed."""
    time: float
    """Seconds since the epoch."""


class Event(Message):
    """Something that happened to the job, on `event`."""

    kind: str
    """Noun and verb, such as `job_started` or `checkpoint_saved`."""
    source: str
    """The actor that tells it."""
    message: str = ""
    """The reason, for people."""
    data: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Key-values."""
    time: float
    """Seconds since the epoch."""


class LogLines(Message):
    """Lines that an actor wrote, on `log.<actor>`."""

    actor: str
    """The actor's name."""
    attempt: int = Field(ge=1)
    """Which start of the actor within the run wrote them."""
    lines: list[str]
    """Lines without their line ends."""
    time: float
    """Seconds since the epoch."""

    def named_at(self, at: str) -> str:
        """Return the subject of its actor."""
        return with_last(at, self.actor)


class EvalRecord(Message):
    """One evaluation of one version, in the KV bucket of evaluations."""

    version: int = Field(ge=0)
    """The version to evaluate."""
    step: int = Field(ge=0)
    """Training step at which the result is reported."""
    state: Literal["requested", "running", "done", "failed", "reported", "given_up"] = "requested"
    """Where it stands; the learner turns done into reported and failed into given_up."""
    values: dict[str, float] = Field(default_factory=dict[str, float])
    """Results: `val/mean_score`, `val/pass@k` …"""
    blame: str = ""
    """Why it failed."""

    def named_at(self, at: str) -> str:
        """Return the key of its version."""
        return with_last(at, self.version)


class Presence(Message):
    """An actor's heartbeat, in the KV bucket of actors; gone 10 s after the last."""

    actor: str
    """Name within the job, or of the node or scheduler."""
    role: str
    """learner, generator, evaluator, environment, scheduler or node."""
    host: str
    """Host name of the machine."""
    pid: int
    """Process id there."""
    state: str
    """What it does now: `starting`, `working`, `waiting`, `paused` or `draining`."""
    waits_for: str = ""
    """Name of the wait it is in, and of whom it waits for."""
    missing_since: float | None = None
    """Since when that is not there at all, and only somebody outside can bring it: the host of a
    game that a client hosts, room on a disk. In seconds since the epoch."""
    version: int | None = None
    """Policy version it works with."""
    progress: int = Field(default=0, ge=0)
    """Pieces of work that this process has finished: steps, groups, evaluations, answers."""
    numbers: dict[str, float] = Field(default_factory=dict[str, float])
    """Its own figures: tokens/s, episodes running, share of time busy …"""
    time: float
    """Seconds since the epoch."""

    def named_at(self, at: str) -> str:
        """Return the key of its actor."""
        return with_last(at, self.actor)


def readable(line: str) -> str:
    """Return a structured log line as text; any other line as it is."""
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
