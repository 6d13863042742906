"""Usage and shares of a Tinker service's users."""

from typing import Annotated

from pydantic import Field

from ..wire.message import Message, Request


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
