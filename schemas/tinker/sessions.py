"""What a user asks a trainer to show: its models, who waits for it, and curves."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..wire.message import Message, Request
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


# What users of a Tinker service have used, and what they may use.


class TrainerUsage(Request):
    """A trainer or sampler tells what its users have used, and asks for their shares."""

    job: str
    """Its job, of the user who asks."""
    sampler: str = Field(default="", max_length=80)
    """The sampler that tells; empty: the trainer."""
    since: float = 0.0
    """When that sampler started: its tokens are those since."""
    tokens: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict[str, int], max_length=1000
    )
    """Tokens computed for each user: for models in all of the service's life, or sampled."""


class SamplerTokens(Message):
    """What one sampler has last told."""

    since: float
    """When it started."""
    tokens: dict[str, int]
    """What it has computed since, prompts included, by user."""


class TenantShare(Message):
    """What one user has of a service."""

    weight: float = 1.0
    """In relation to other users."""
    tokens_left: int | None = None
    """Tokens that the user's programs may still compute; null: no bound."""


class TenantShares(Message):
    """The shares of the users whom a trainer has named."""

    users: dict[str, TenantShare] = Field(default_factory=dict[str, TenantShare])
