"""Traces: where the time of each training step and of its groups went.

Ids are those of the W3C's trace context, which OpenTelemetry speaks: each task is a trace, made by
the learner. The header `traceparent` carries it along: with the task, with the episodes' resets,
and with the group in the rollout log.
"""

import re
import secrets

from pydantic import Field

from .message import Message

TRACEPARENT = "traceparent"
"""Name of the header."""
GENERATOR_KINDS = ("swap", "generate", "environment", "weights", "other", "tasks")
"""What a generator's time goes into; of several at once the first one counts."""
HOST_KINDS = ("full", "play", "idle")
"""What a host's time goes into."""
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def new_trace() -> str:
    """Return the `traceparent` of a new trace: its id and that of its first span."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def is_traceparent(value: str) -> bool:
    """Whether this is a `traceparent` of version 00."""
    return bool(_TRACEPARENT.fullmatch(value))


def trace_of(traceparent: str) -> str:
    """Return the trace id, 32 hexadecimal digits; empty for what is no `traceparent`."""
    return traceparent[3:35] if is_traceparent(traceparent) else ""


def span_of(traceparent: str) -> str:
    """Return the span id, 16 hexadecimal digits; empty for what is no `traceparent`."""
    return traceparent[36:52] if is_traceparent(traceparent) else ""


class GroupTrace(Message):
    """How one group that a step trained came to be.

    The two moments are by the learner's clock, the lengths were measured where they passed.
    """

    task: int
    """Number of the task."""
    traceparent: str = ""
    """W3C trace context of the task."""
    source: str
    """The generator, or the external agent."""
    issued: float
    """Seconds since the epoch at which the learner issued the task; 0: it did not."""
    arrived: float
    """Seconds since the epoch at which the group was at the learner."""
    weights_s: float = Field(ge=0)
    """Its generator held the task, and waited for weights that are new enough for it."""
    rollout_s: float = Field(ge=0)
    """From the first episode's begin to the last one's end."""
    generate_s: float = Field(ge=0)
    """What the slowest episode waited for the engine."""
    environment_s: float = Field(ge=0)
    """What the slowest episode waited for the game."""
    answer_s: float = Field(ge=0)
    """What its episodes waited for one answer of the game, on average."""


class StepTrace(Message):
    """Where the time of one training step went, on `trace`.

    Times by kind are seconds, and add up to the wall time of their actor.
    """

    step: int = Field(ge=1)
    """The training step."""
    traceparent: str
    """W3C trace context of the step."""
    formed: float
    """Seconds since the epoch at which its groups were there and training began."""
    ended: float
    """Seconds since the epoch at which it was over: its weights are taken, sending them goes on."""
    learner: dict[str, float]
    """The learner, since the step before: `wait` for groups, `train`, `publish`, `checkpoint`,
    `paused`, `other`. All but `wait`, and what came before it, lies behind `formed`."""
    send_s: float = 0.0
    """Sending the version before to the broker, beside training."""
    generators: dict[str, dict[str, float]] = Field(default_factory=dict[str, dict[str, float]])
    """Each generator, up to its last group that arrived: `generate`, `environment` (all episodes
    wait for the game), `swap` (of weights, decoding stands still), `weights` (all tasks wait for
    newer ones), `tasks` (there is none to pull), `other`."""
    hosts: dict[str, dict[str, float]] = Field(default_factory=dict[str, dict[str, float]])
    """Each environment host of the pool: `full` (as many games are asked as it has workers), `play`
    (some are), `idle`."""
    num_groups: int = Field(ge=0)
    """Groups that it trained."""
    groups: list[GroupTrace]
    """Those of them that came last, at most 64, the last one last."""
