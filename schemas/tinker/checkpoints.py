"""Checkpoints, training runs and sessions of the Tinker API."""

import json
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import Field

from ..wire.errors import MessageError
from ..wire.message import Message
from .operation import ModelId

MAX_METADATA_BYTES = 4 << 10
"""Size of a user's metadata of a run, checkpoint or session, as JSON."""
MAX_PAGE = 500
PART_BYTES = 4 << 20
"""Size of one read of a file."""
Metadata = dict[str, str]
Path = Annotated[str, Field(max_length=400)]
SessionId = Annotated[str, Field(min_length=1, max_length=80)]


def metadata_of(value: Any) -> Metadata | None:
    """Return a request's `user_metadata` with values as texts; raises MessageError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise MessageError(
            f"user_metadata must be a JSON object, not {str(value)[:80]!r}",
            hint="leave it out, or correct it",
        )
    texts = {
        str(key): item if isinstance(item, str) else json.dumps(item, default=str)
        for key, item in cast("dict[Any, Any]", value).items()
    }
    size = len(json.dumps(texts).encode())
    if size > MAX_METADATA_BYTES:
        raise MessageError(
            f"user_metadata has {size:,} bytes", hint=f"at most {MAX_METADATA_BYTES:,} are stored"
        )
    return texts


class TinkerPage(Message):
    """A page of a list, newest first."""

    offset: int = Field(default=0, ge=0, le=10**9)
    limit: int = Field(default=20, ge=0, le=MAX_PAGE)

    max_bytes: ClassVar[int] = 1 << 10


class TinkerCheckpoint(Message):
    """A named checkpoint."""

    path: Path
    """`tinker://…`"""
    time: float
    """When it was saved."""
    size_bytes: int
    is_public: bool = False
    """Everyone in the pool may read it."""
    expires: float = 0.0
    """0: never."""
    user_metadata: Metadata | None = None


class ListCheckpoints(TinkerPage):
    """List a user's checkpoints."""

    model: str = Field(default="", max_length=80)
    """Only checkpoints of this model; empty: all."""


class CheckpointPage(Message):
    """A page of checkpoints."""

    checkpoints: list[TinkerCheckpoint] = Field(default_factory=list[TinkerCheckpoint])
    total: int = 0
    """Number of all."""


CheckpointAction: TypeAlias = Literal["delete", "publish", "unpublish", "expire"]


class ChangeCheckpoint(Message):
    """Change one of the user's checkpoints."""

    path: Path
    action: CheckpointAction
    ttl_s: int | None = Field(default=None, ge=1, le=10**10)
    """Seconds from now, with `expire`; null: never."""

    max_bytes: ClassVar[int] = 1 << 10


class ExportCheckpoint(Message):
    """Request a ticket for fetching a checkpoint's files."""

    path: Path

    max_bytes: ClassVar[int] = 1 << 10


class ExportedFile(Message):
    """One file of a checkpoint."""

    name: str
    size_bytes: int


class CheckpointExport(Message):
    """Files of a checkpoint, and a ticket that opens them without a key until it expires."""

    ticket: str
    expires: float
    files: list[ExportedFile]


class FetchFile(Message):
    """Request a part of a checkpoint's file, with its ticket."""

    ticket: str = Field(max_length=1000)
    file: str = Field(max_length=200)
    offset: int = Field(default=0, ge=0)

    max_bytes: ClassVar[int] = 4 << 10


class FilePart(Message):
    """A part of a file, at most `PART_BYTES`."""

    data: bytes
    size_bytes: int
    """Size of the whole file."""


class TrainingRun(Message):
    """One model, in memory or with checkpoints only."""

    model: ModelId
    base: str
    rank: int
    owner: str
    time: float
    """Time of its last request."""
    user_metadata: Metadata | None = None
    checkpoint: TinkerCheckpoint | None = None
    """Newest checkpoint to train from."""
    sampler_checkpoint: TinkerCheckpoint | None = None
    """Newest checkpoint to sample from."""


class ListRuns(TinkerPage):
    """List a user's training runs, or one."""

    model: str = Field(default="", max_length=80)
    """This model; empty: all."""


class RunPage(Message):
    """A page of training runs."""

    runs: list[TrainingRun] = Field(default_factory=list[TrainingRun])
    total: int = 0
    """Number of all."""


class TellSession(Message):
    """Report an event of a session to trainers: its begin, a heartbeat, a sampler, its end."""

    session: SessionId
    event: Literal["begin", "beat", "sampler", "finish"]
    sampler: str = Field(default="", max_length=600)
    """Id of the sampler, with `sampler`."""
    reason: str = Field(default="", max_length=1000)
    """Reason of its end, with `finish`."""
    user_metadata: Metadata | None = None
    display_name: str | None = Field(default=None, max_length=200)
    sdk_version: str = Field(default="", max_length=80)

    max_bytes: ClassVar[int] = 16 << 10


class SessionState(Message):
    """A trainer's state of a session."""

    state: Literal["unknown", "live", "over"]


class TinkerSession(Message):
    """A session of a user's program."""

    session: SessionId
    time: float
    """Start."""
    seen: float = 0.0
    """Last contact."""
    reason: str = ""
    """How it ended; empty: it is open."""
    user_metadata: Metadata | None = None
    display_name: str | None = None
    sdk_version: str = ""
    models: list[str] = Field(default_factory=list[str])
    samplers: list[str] = Field(default_factory=list[str])
    """Newest samplers."""


class ListSessions(TinkerPage):
    """List a user's sessions, or one."""

    session: str = Field(default="", max_length=80)
    """This session; empty: all."""


class SessionPage(Message):
    """A page of sessions."""

    sessions: list[TinkerSession] = Field(default_factory=list[TinkerSession])
    total: int = 0
    """Number of all."""
