"""Secrets of a job: sealed by the client, opened by the scheduler, given to one process."""

from typing import Annotated, Literal

from pydantic import Field

from .wire.message import Message, Request

SecretName = Literal["WANDB_API_KEY", "TINKERMQ_NOTIFY_URL", "TINKERMQ_TEACHER_KEY"]
"""What a user may hand over with a job: the names of environment variables."""
WANDB_KEY: SecretName = "WANDB_API_KEY"
NOTIFY_URL: SecretName = "TINKERMQ_NOTIFY_URL"
TEACHER_KEY: SecretName = "TINKERMQ_TEACHER_KEY"
MAX_SEALED_BYTES = 16 << 10


class JobSecrets(Message):
    """What a sealed text holds; never sent, stored or logged as it is."""

    user: str
    """Who sealed it: a copied text opens for nobody else's job."""
    values: dict[SecretName, Annotated[str, Field(min_length=1, max_length=4096)]]
    """The secrets, by name."""


class SealingKey(Message):
    """The public key to which secrets are sealed: reply of the scheduler's `key`."""

    public: bytes = Field(min_length=32, max_length=32)
    """An X25519 key."""


class SecretsRequest(Request):
    """Hand secrets over for a job that is there: `secrets`."""

    job: str
    """Job id or run name."""
    sealed: bytes = Field(max_length=MAX_SEALED_BYTES)
    """JobSecrets in a sealed box."""


class SealedSecrets(Message):
    """The secrets of a job, in the KV bucket of secrets until the job has ended."""

    sealed: bytes = Field(max_length=MAX_SEALED_BYTES)
    """JobSecrets in a sealed box."""


class OpenRequest(Message):
    """A node asks for what a process that it starts needs, on `rpc.node.secrets.open`."""

    user: str
    """Owner of the job."""
    job: str
    """Job id."""
    actor: str
    """Name of the actor."""
    attempt: int = Field(ge=1)
    """Attempt of the job."""


class OpenedSecrets(Message):
    """What the process gets in its environment."""

    values: dict[SecretName, str]
    """The secrets, by name; empty for a process that needs none."""
