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


class Difference(Message):
    """What makes one version of another."""

    base: int = Field(ge=0)
    """The other version."""
    base_digest: str
    """SHA-256 of its payload: a difference fits nothing else."""
    num_bytes: int = Field(ge=0)
    """Size."""
    digest: str
    """SHA-256 of the difference itself."""
    location: str
    """Object name, or path of the file."""


class Manifest(Message):
    """What one version is made of, in the KV bucket of the job's weights."""

    version: int = Field(ge=0)
    """The policy's number."""
    kind: Literal["full", "delta", "lora"] = "full"
    """What is stored: the payload, that of an adapter, or differences from other versions."""
    tensors: list[TensorEntry]
    """Layout of the payload."""
    num_bytes: int = Field(ge=0)
    """Size of the payload."""
    digest: str
    """SHA-256 of the payload, hexadecimal; of a delta, of what it makes."""
    transport: Literal["object", "file"]
    """How it is fetched."""
    location: str = ""
    """Object name, or path of the file; empty for a delta."""
    differences: list[Difference] = Field(default_factory=list[Difference])
    """Of a delta: from the version before, then, unless that is the same, from the newest whole
    one, its anchor."""
    published: float
    """Seconds since the epoch."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that were stored for it."""
        return sum(one.num_bytes for one in self.differences) or self.num_bytes


class WeightsAnnouncement(Message):
    """A new version is out, on `weights`."""

    version: int = Field(ge=0)
    """The version whose manifest is in KV."""
