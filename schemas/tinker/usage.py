"""What users of a Tinker service have used, and what they may use."""

from typing import Annotated

from pydantic import Field

from ..wire.message import Message, Request


class TrainerUsage(Request):
    """A trainer tells the scheduler what its users have used, and asks for their shares."""

    job: str
    """The trainer's job, of the user who asks."""
    tokens: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict[str, int], max_length=1000
    )
    """Tokens computed for each user's models, in all of the service's life."""


class TenantShare(Message):
    """What one user has of a service."""

    weight: float = 1.0
    """In relation to other users."""
    tokens_left: int | None = None
    """Tokens that the user's programs may still compute; null: no bound."""


class TenantShares(Message):
    """The shares of the users whom a trainer has named."""

    users: dict[str, TenantShare] = Field(default_factory=dict[str, TenantShare])
