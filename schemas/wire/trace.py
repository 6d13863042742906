"""Traces: time use of training steps and their groups.

Ids follow the W3C trace context, as in OpenTelemetry: each task is a trace, created by the learner.
The header `traceparent` travels with the task, the episodes' resets, and the group in the rollout
log.
"""

import re
import secrets

from pydantic import Field

from .message import Message

TRACEPARENT = "traceparent"
"""Name of the header."""
GENERATOR_KINDS = ("swap", "generate", "environment", "validation", "weights", "other", "tasks")
"""Activities of a generator; of simultaneous ones the first counts."""
HOST_KINDS = ("full", "play", "idle")
"""Activities of a host."""
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def new_trace() -> str:
    """Return the `traceparent` of a new trace: its id and that of its first span."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def is_traceparent(value: str) -> bool:
    """Return whether this is a `traceparent` of version 00."""
    return bool(_TRACEPARENT.fullmatch(value))


def trace_of(traceparent: str) -> str:
    """Return the trace id, 32 hexadecimal digits; empty if it is not a `traceparent`."""
    return traceparent[3:35] if is_traceparent(traceparent) else ""


def span_of(traceparent: str) -> str:
    """Return the span id, 16 hexadecimal digits; empty if it is not a `traceparent`."""
    return traceparent[36:52] if is_traceparent(traceparent) else ""


class GroupTrace(Message):
    """Timing of one group of a step.

    `issued` and `arrived` are by the learner's clock; durations were measured where they occurred.
    """

    task: int
    traceparent: str = ""
    """W3C trace context of the task."""
    source: str
    """The generator or external agent."""
    issued: float
    """When the learner issued the task; 0: it did not."""
    arrived: float
    """When the group reached the learner."""
    weights_s: float = Field(ge=0)
    """Seconds that its generator waited for new enough weights."""
    rollout_s: float = Field(ge=0)
    """From the first episode's start to the last one's end."""
    generate_s: float = Field(ge=0)
    """Time that the slowest episode waited for the engine."""
    environment_s: float = Field(ge=0)
    """Time that the slowest episode waited for the game."""
    answer_s: float = Field(ge=0)
    """Mean time until the game answered."""


class StepTrace(Message):
    """Time use of one training step, on `trace`.

    Times are seconds by activity; they add up to the actor's wall time.
    """

    step: int = Field(ge=1)
    traceparent: str
    """W3C trace context of the step."""
    formed: float
    """When its batch was complete and training began."""
    ended: float
    """When it ended; sending its weights may go on."""
    learner: dict[str, float]
    """The learner, since the previous step: `wait` for groups, `train`, `publish`, `checkpoint`,
    `paused`, `other`. All but `wait`, and what preceded it, comes after `formed`."""
    send_s: float = 0.0
    """Sending the previous version, during training."""
    cores_busy: float = 0.0
    """Busy share of the machine's cores since the previous step, 0 to 1, if the learner and all
    generators are on one machine; 0: unknown."""
    generators: dict[str, dict[str, float]] = Field(default_factory=dict[str, dict[str, float]])
    """Each generator, up to its last group: `generate`, `environment` (all episodes wait for the
    game), `validation` (and nothing of training), `swap` (weights), `weights` (all tasks wait for
    newer ones), `tasks` (none available), `other`."""
    hosts: dict[str, dict[str, float]] = Field(default_factory=dict[str, dict[str, float]])
    """Each environment host of the pool: `full` (as many requests as workers), `play` (fewer),
    `idle`."""
    num_groups: int = Field(ge=0)
    groups: list[GroupTrace]
    """The last 64 of them to arrive, in order."""
