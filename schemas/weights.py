"""Manifests of published weights."""

from typing import Literal

from pydantic import Field

from .wire.message import Message

LATEST = "latest"
"""Key of the newest version's manifest."""


def manifest_key(version: int) -> str:
    """Return the key of a version's manifest in the KV bucket of the job's weights."""
    return f"v{version}"


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
    """BLAKE3 of its payload: a difference fits nothing else."""
    num_bytes: int = Field(ge=0)
    """Size."""
    digest: str
    """BLAKE3 of the difference itself."""
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
    """BLAKE3 of the payload, hexadecimal; of a delta, of what it makes; of `nccl`, a fingerprint
    that GPUs compute."""
    transport: Literal["object", "file", "nccl"]
    """How it is fetched."""
    location: str = ""
    """Of the whole payload: object name, path of the file, or what the learner calls it; empty for
    a delta."""
    differences: list[Difference] = Field(default_factory=list[Difference])
    """Of a delta: from the version before, then, unless that is the same, from the newest whole
    one, its anchor. Of an anchor, which is full: from the version before, if that is smaller."""
    published: float
    """Seconds since the epoch."""
    host: str = ""
    """The machine of the learner."""
    files: dict[str, str] = Field(default_factory=dict[str, str])
    """What it sees in the folder of the model: digests by path."""
    software: str = Field(default="", max_length=64)
    """Version of tinkermq that the learner runs; empty for one that did not tell yet."""

    def named_at(self, at: str) -> str:
        """Return the key of its version; any may be the latest."""
        return at if at == LATEST else manifest_key(self.version)

    @property
    def stored_bytes(self) -> int:
        """Bytes that were stored for it."""
        whole = self.num_bytes if self.location else 0
        return whole + sum(one.num_bytes for one in self.differences)


class WeightsAnnouncement(Message):
    """A new version is out, on `weights`."""

    version: int = Field(ge=0)
    """The version whose manifest is in KV."""


class JoinRound(Message):
    """A receiver asks the learner for a place in the next round of a version, on `weights.join`."""

    receiver: str = Field(max_length=64)
    """Name that nobody else has."""
    version: int = Field(ge=0)
    """The version."""
    location: str = Field(pattern=r"^v\d{1,18}-[0-9a-f]{8}$")
    """What the learner calls it, as the manifest tells."""
    num_bytes: int = Field(ge=0)
    """Size of the payload, as the manifest tells."""
    device: Literal["cpu", "cuda"]
    """Where the receiver would have it."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the place to meet that the receiver is connected to; 0: none."""
    group: str = Field(default="", max_length=64)
    """The group that it is still a member of, if any."""


class Round(Message):
    """The learner's answer to a receiver: its place in a group, or why it has none."""

    answer: Literal["place", "connect", "later", "removed"]
    """`connect` to the place to meet and ask again; ask again `later`, when a learner that was
    started again has trained so far; or the version was `removed`."""
    address: str
    """Address of the place to meet (a TCPStore of torch.distributed)."""
    port: int = Field(ge=1, le=65535)
    """Its port."""
    group: str = ""
    """The group that sends."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it sends from and to: `cpu` by gloo, `cuda` by NCCL."""
    rank: int = Field(default=0, ge=0)
    """The receiver's rank; the learner's is 0."""
    size: int = Field(default=0, ge=0)
    """Members of the group, with the learner."""
