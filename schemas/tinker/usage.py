"""What users of a Tinker service have used, and what they may use."""

from typing import Annotated

from pydantic import Field

from ..wire.message import Message, Request


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
