"""What the dashboard shows of a Tinker service."""

from typing import Any, ClassVar

from pydantic import Field

from ..wire.message import Message
from .operation import ModelInfo


class AboutSessions(Message):
    """Request the user's models and the queue."""

    max_bytes: ClassVar[int] = 1 << 10


class ModelShown(Message):
    """One of the user's models."""

    info: ModelInfo
    steps: int
    """Updates so far."""
    tokens: int = 0
    """Tokens computed in `forward` and `forward_backward`."""
    waiting: int
    """Waiting operations."""
    waiting_bytes: int
    reason: str = ""
    """What they wait for."""
    idle_s: float | None = None
    """Since its last operation; null: before the trainer started."""
    last: dict[str, float] = Field(default_factory=dict[str, float])
    """Metrics of its newest step."""


class TenantShown(Message):
    """One user of the trainer."""

    user: str
    models: int
    tokens: int = 0
    """Tokens computed for the user."""
    waiting: int
    """Waiting operations."""
    waiting_bytes: int


class SessionsShown(Message):
    """The user's models, and all users of the trainer."""

    base: str
    models: list[ModelShown] = Field(default_factory=list[ModelShown])
    tenants: list[TenantShown] = Field(default_factory=list[TenantShown])


class ModelCurves(Message):
    """The curves of one model."""

    shown: ModelShown
    points: dict[str, Any]
    """`width` steps per point, `x` their first steps, `series` by name with `y`, `low`, `high`."""
