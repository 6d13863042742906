"""A Tinker service: usage and shares of its users, and what the dashboard shows of it."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..wire.message import Message, Request
from .operation import ModelInfo


class TrainerUsage(Request):
    """A trainer or sampler reports its users' usage and requests their shares."""

    job: str
    """Its job, of the requesting user."""
    sampler: str = Field(default="", max_length=80)
    """The reporting sampler; empty: the trainer."""
    since: float = 0.0
    """Start of that sampler, from which its tokens count."""
    tokens: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict[str, int], max_length=1000
    )
    """By user: of a trainer in the service's life, of a sampler since its start."""


class SamplerTokens(Message):
    """Last report of one sampler."""

    since: float
    tokens: dict[str, int]
    """Since then, prompts included, by user."""


class TenantShare(Message):
    """One user's share of a service."""

    weight: float = 1.0
    """Weight among the users."""
    tokens_left: int | None = None
    """null: no bound."""


class TenantShares(Message):
    """Shares of the users that a trainer named."""

    users: dict[str, TenantShare] = Field(default_factory=dict[str, TenantShare])


# -- what the dashboard shows of a service ---------------------------------------------------------


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
