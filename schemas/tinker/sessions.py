"""What a user asks a trainer to show: its models, who waits for it, and curves."""

from typing import Any, ClassVar

from pydantic import Field

from ..wire.message import Message
from .operation import ModelInfo


class AboutSessions(Message):
    """Asks which models a user has, and who has how much to be done."""

    max_bytes: ClassVar[int] = 1 << 10


class ModelShown(Message):
    """One model of the user who asks, as it is now."""

    info: ModelInfo
    steps: int
    """Updates so far."""
    tokens: int = 0
    """Computed for it, in `forward` and `forward_backward`."""
    waiting: int
    """Operations that wait for their turn."""
    waiting_bytes: int
    reason: str = ""
    """What they wait for."""
    idle_s: float | None = None
    """Seconds since its last operation; None where that was before the trainer started."""
    last: dict[str, float] = Field(default_factory=dict[str, float])
    """Metrics of its newest step."""


class TenantShown(Message):
    """One user of the trainer."""

    user: str
    models: int
    tokens: int = 0
    """Computed for them."""
    waiting: int
    """Operations that wait for their turn."""
    waiting_bytes: int


class SessionsShown(Message):
    """The user's models, and all users that have models here."""

    base: str
    models: list[ModelShown] = Field(default_factory=list[ModelShown])
    tenants: list[TenantShown] = Field(default_factory=list[TenantShown])


class ModelCurves(Message):
    """The curves of one model."""

    shown: ModelShown
    points: dict[str, Any]
    """`width` steps to a point, `x` their first steps, `series` by name with `y`, `low`, `high`."""
