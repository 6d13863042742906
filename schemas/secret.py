"""Secrets of jobs: sealed by the client, opened by the scheduler."""

from typing import Annotated, Literal

from pydantic import Field

from .wire.message import Message, Request

SecretName = Literal["WANDB_API_KEY", "TINKERMQ_NOTIFY_URL", "TINKERMQ_TEACHER_KEY"]
"""Environment variables that a user may pass to a job."""
WANDB_KEY: SecretName = "WANDB_API_KEY"
NOTIFY_URL: SecretName = "TINKERMQ_NOTIFY_URL"
TEACHER_KEY: SecretName = "TINKERMQ_TEACHER_KEY"
MAX_SEALED_BYTES = 16 << 10


class JobSecrets(Message):
    """Content of a sealed box; never sent, stored or logged in the clear."""

    user: str
    """Who sealed it; a copy opens for no other user's job."""
    values: dict[SecretName, Annotated[str, Field(min_length=1, max_length=4096)]]
    """The secrets, by name."""


class SealingKey(Message):
    """Public key for sealing secrets: reply of the scheduler's `key`."""

    public: bytes = Field(min_length=32, max_length=32)
    """An X25519 key."""


class SecretsRequest(Request):
    """Set the secrets of an existing job: `secrets`."""

    job: str
    """Job id or run name."""
    sealed: bytes = Field(max_length=MAX_SEALED_BYTES)
    """JobSecrets in a sealed box."""


class SealedSecrets(Message):
    """Secrets of a job, in the KV bucket of secrets until the job ends."""

    sealed: bytes = Field(max_length=MAX_SEALED_BYTES)
    """JobSecrets in a sealed box."""


class OpenRequest(Message):
    """A node requests the secrets of a process that it starts, on `rpc.node.secrets.open`."""

    user: str
    """Owner of the job."""
    job: str
    """Job id."""
    actor: str
    """Name of the actor."""
    attempt: int = Field(ge=1)
    """Attempt of the job."""


class OpenedSecrets(Message):
    """Secrets for the process's environment."""

    values: dict[SecretName, str]
    """The secrets, by name; empty: it needs none."""
