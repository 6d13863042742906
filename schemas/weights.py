"""Manifests of published weights."""

from typing import Literal

from pydantic import Field

from .message import Message


class TensorEntry(Message):
    """One tensor of a published version."""

    name: str
    """Parameter name, as in `state_dict()`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    shape: list[int]
    """Shape."""
    offset: int = Field(ge=0)
    """First byte within the payload."""
    num_bytes: int = Field(ge=0)
    """Number of bytes, little endian, row major."""


class Manifest(Message):
    """What one version is made of, in the KV bucket of the job's weights."""

    version: int = Field(ge=0)
    """The policy's number."""
    kind: Literal["full", "delta", "lora"] = "full"
    """What the payload holds."""
    base: int | None = None
    """Version that a delta is applied to."""
    tensors: list[TensorEntry]
    """Layout of the payload."""
    num_bytes: int = Field(ge=0)
    """Size of the payload."""
    digest: str
    """SHA-256 of the payload, hexadecimal."""
    transport: Literal["object", "file"]
    """How the payload is fetched."""
    location: str
    """Object name, or path of the file."""
    published: float
    """Seconds since the epoch."""


class WeightsAnnouncement(Message):
    """A new version is out, on `weights`."""

    version: int = Field(ge=0)
    """The version whose manifest is in KV."""
