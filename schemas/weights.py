"""Published weights: manifests and transfers."""

import re
import uuid
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .wire.message import Message, Request
from .wire.subjects import JobScope

LATEST = "latest"
"""Key of the newest version's manifest."""


_MAX_BYTES = 1 << 44


def manifest_key(version: int) -> str:
    """Return the key of a version's manifest in the KV bucket of the job's weights."""
    return f"v{version}"


def payload_label(version: int, base: int | None = None) -> str:
    """Return the first part of the name of a version, or of its difference from a base."""
    return f"v{version}-" if base is None else f"v{version}-from-v{base}-"


def new_location(version: int, base: int | None = None) -> str:
    """Return a new name for a version, or for its difference from a base."""
    return f"{payload_label(version, base)}{uuid.uuid4().hex[:8]}"


def weight_file(scope: JobScope, location: str) -> str:
    """Return the name of a job's weight file, in a folder that several jobs may share."""
    label, _, suffix = location.rpartition("-")
    kind = "difference" if "-from-" in label else "safetensors"
    return f"{label}-{scope.key}-{suffix}.{kind}"


def payload_of(scope: JobScope) -> re.Pattern[str]:
    """Return the pattern of the names of a job's weight files, including incomplete ones."""
    label = f"v[0-9]+(-from-v[0-9]+)?-{re.escape(scope.key)}"
    return re.compile(rf"\.?{label}-[0-9a-f]{{8}}\.(safetensors|difference)(\.[0-9a-f]{{8}})?")


class TensorEntry(Message):
    """One tensor of a published version."""

    name: str
    """Parameter name, as in `state_dict()`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    shape: list[int]
    offset: int = Field(ge=0)
    """First byte within the payload."""
    num_bytes: int = Field(ge=0)
    """Number of bytes, little endian, row major."""


class Difference(Message):
    """Difference between one version and another."""

    base: int = Field(ge=0)
    """The other version."""
    base_digest: str
    """BLAKE3 of the base's payload, which must match."""
    num_bytes: int = Field(ge=0)
    digest: str
    """BLAKE3 of the difference itself."""
    location: str = Field(pattern=r"^v[0-9]{1,18}-from-v[0-9]{1,18}-[0-9a-f]{8}$")
    """Its name, which begins with both versions: that of an object, or a part of a file's."""


class Manifest(Message):
    """Content of one version, in the KV bucket of the job's weights."""

    version: int = Field(ge=0)
    kind: Literal["full", "delta", "lora"] = "full"
    """full: the payload; lora: that of an adapter; delta: differences from other versions."""
    tensors: list[TensorEntry]
    """Layout of the payload."""
    num_bytes: int = Field(ge=0)
    digest: str
    """BLAKE3 of the payload, hexadecimal; of a delta, of its result; with `nccl`, a fingerprint
    computed on GPUs."""
    transport: Literal["object", "file", "nccl"]
    """How it is transferred; receivers use it only if it is the job's own (`weights.transport`)."""
    location: str = Field(default="", pattern=r"^(v[0-9]{1,18}-[0-9a-f]{8})?$")
    """Name of the whole payload, which begins with its version: that of an object, a part of a
    file's, or the learner's; empty for a delta."""
    differences: list[Difference] = Field(default_factory=list[Difference])
    """For a delta: from the previous version, and from its anchor, the newest full one, if that is
    another. For an anchor: from the previous version, if smaller."""
    published: float
    host: str = ""
    files: dict[str, str] = Field(default_factory=dict[str, str])
    """Digests of the model folder's files as the learner sees them, by path."""
    software: str = Field(default="", max_length=64)
    """tinkermq version of the learner; empty: older than this key."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """Refuse names of payloads that belong to other versions."""
        labels = [(self.location, payload_label(self.version))] if self.location else []
        for difference in self.differences:
            label = payload_label(self.version, difference.base)
            labels.append((difference.location, label))
        for location, label in labels:
            if not location.startswith(label):
                raise ValueError(f"{location!r} must begin with {label!r}")
        return self

    def named_at(self, at: str) -> str:
        """Return the key of its version; any version may be the latest."""
        return at if at == LATEST else manifest_key(self.version)

    @property
    def stored_bytes(self) -> int:
        """Bytes stored for it."""
        whole = self.num_bytes if self.location else 0
        return whole + sum(difference.num_bytes for difference in self.differences)


class WeightsAnnouncement(Message):
    """A new version is published, on `weights`; before that, one in the learner's shared memory."""

    version: int = Field(ge=0)
    """The version; its manifest is in KV, or comes with this."""
    early: Manifest | None = None
    """For receivers on the learner's machine: the manifest of a version that lies in its shared
    memory, and is not stored yet."""


class JoinRound(Message):
    """A receiver joins the next transfer of a version, on `weights.join`."""

    receiver: str = Field(max_length=64)
    """Unique name."""
    version: int = Field(ge=0)
    location: str = Field(pattern=r"^v[0-9]{1,18}-[0-9a-f]{8}$")
    """The learner's name for the version, from the manifest."""
    num_bytes: int = Field(ge=0)
    """Size of the payload, from the manifest."""
    device: Literal["cpu", "cuda"]
    """Device of the receiver."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the TCPStore that it is connected to; 0: none."""
    group: str = Field(default="", max_length=64)
    """Group that it still belongs to, if any."""
    num_ranks: int = Field(default=1, ge=1, le=1024)
    """Places that it takes: one, or one for each worker of its engine."""
    gpus: list[Annotated[str, Field(max_length=64)]] = Field(
        default_factory=list[Annotated[str, Field(max_length=64)]], max_length=1024
    )
    """UUIDs of the GPUs of these places."""


class Round(Message):
    """The receiver's place in a transfer group, or why it has none."""

    answer: Literal["place", "connect", "later", "removed"]
    """place: join the group; connect: connect to the TCPStore and repeat; later: repeat when a
    restarted learner has reached the version; removed: the version is gone."""
    address: str
    """Address of the TCPStore (torch.distributed)."""
    port: int = Field(ge=1, le=65535)
    """Port of the TCPStore."""
    group: str = ""
    """The sending group."""
    device: Literal["cpu", "cuda", "ipc"] = "cpu"
    """Device and backend: `cpu` with gloo, `cuda` with NCCL, `ipc` with CUDA IPC on one GPU."""
    rank: int = Field(default=0, ge=0)
    """First rank of the receiver; the learner's is 0."""
    size: int = Field(default=0, ge=0)
    """Size of the group, with the learner."""


class WeightsRoom(Request):
    """The learner asks for room for the versions that it publishes."""

    job: str
    """Its job, of the requesting user."""
    wanted_bytes: int = Field(ge=1, le=_MAX_BYTES)
    """Bytes for all versions that may be needed at a time."""
    least_bytes: int = Field(ge=1, le=_MAX_BYTES)
    """Bytes for the versions without which a run stands still."""


class WeightsBound(Message):
    """The bound of the bucket of a job's weights."""

    num_bytes: int
