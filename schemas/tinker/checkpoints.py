"""What is asked and told about checkpoints, training runs and sessions under the Tinker API."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ..wire.message import Message, Request
from .operation import ModelId

MAX_METADATA_BYTES = 4 << 10
"""Of what a user says about one run, checkpoint or session, as JSON."""
MAX_PAGE = 500
PART_BYTES = 4 << 20
"""Of a file that is read at once."""
Metadata = dict[str, str]
Path = Annotated[str, Field(max_length=400)]
SessionId = Annotated[str, Field(min_length=1, max_length=80)]


class TinkerPage(Message):
    """Asks for a part of a list, newest first."""

    offset: int = Field(default=0, ge=0, le=10**9)
    limit: int = Field(default=20, ge=0, le=MAX_PAGE)

    max_bytes: ClassVar[int] = 1 << 10


class TinkerCheckpoint(Message):
    """One checkpoint that has a name."""

    path: Path
    """`tinker://…`"""
    time: float
    """When it was saved, in seconds since the epoch."""
    size_bytes: int
    is_public: bool = False
    """Whether everybody in the pool may read it."""
    expires: float = 0.0
    """When it is removed, in seconds since the epoch; 0: never."""
    user_metadata: Metadata | None = None


class ListCheckpoints(TinkerPage):
    """Asks for a user's checkpoints, of one model or of all."""

    model: str = Field(default="", max_length=80)
    """Empty: of all models."""


class CheckpointPage(Message):
    """Some of a user's checkpoints."""

    checkpoints: list[TinkerCheckpoint] = Field(default_factory=list[TinkerCheckpoint])
    total: int = 0
    """How many there are."""


class ChangeCheckpoint(Message):
    """Changes an own checkpoint."""

    path: Path
    action: Literal["delete", "publish", "unpublish", "expire"]
    ttl_s: int | None = Field(default=None, ge=1, le=10**10)
    """With `expire`: seconds from now; None: it is kept."""

    max_bytes: ClassVar[int] = 1 << 10


class ExportCheckpoint(Message):
    """Asks for a ticket with which the files of a checkpoint are fetched."""

    path: Path

    max_bytes: ClassVar[int] = 1 << 10


class ExportedFile(Message):
    """One file of a checkpoint."""

    name: str
    size_bytes: int


class CheckpointExport(Message):
    """The files of a checkpoint, and what opens them without a key until it expires."""

    ticket: str
    expires: float
    """In seconds since the epoch."""
    files: list[ExportedFile]


class FetchFile(Message):
    """Asks for a part of a file of a checkpoint; whoever has the ticket may."""

    ticket: str = Field(max_length=1000)
    file: str = Field(max_length=200)
    offset: int = Field(default=0, ge=0)

    max_bytes: ClassVar[int] = 4 << 10


class FilePart(Message):
    """A part of a file, at most `PART_BYTES`."""

    data: bytes
    size_bytes: int
    """Of the whole file."""


class TrainingRun(Message):
    """One model, whether it is in memory or only has checkpoints."""

    model: ModelId
    base: str
    rank: int
    owner: str
    time: float
    """When something was last asked of it, in seconds since the epoch."""
    user_metadata: Metadata | None = None
    checkpoint: TinkerCheckpoint | None = None
    """The newest one to train on from."""
    sampler_checkpoint: TinkerCheckpoint | None = None
    """The newest one to sample from."""


class ListRuns(TinkerPage):
    """Asks for a user's training runs, or for one."""

    model: str = Field(default="", max_length=80)
    """Empty: all."""


class RunPage(Message):
    """Some of a user's training runs."""

    runs: list[TrainingRun] = Field(default_factory=list[TrainingRun])
    total: int = 0
    """How many there are."""


class TellSession(Message):
    """Tells trainers of a user's session: that it begins, goes on, samples, or is over."""

    session: SessionId
    event: Literal["begin", "beat", "sampler", "finish"]
    sampler: str = Field(default="", max_length=600)
    """With `sampler`: its id."""
    reason: str = Field(default="", max_length=1000)
    """With `finish`: how it ended."""
    user_metadata: Metadata | None = None
    display_name: str | None = Field(default=None, max_length=200)
    sdk_version: str = Field(default="", max_length=80)

    max_bytes: ClassVar[int] = 16 << 10


class SessionState(Message):
    """What a trainer knows of a session."""

    state: Literal["unknown", "live", "over"]


class TinkerSession(Message):
    """One session of a user's program."""

    session: SessionId
    time: float
    """When it began, in seconds since the epoch."""
    seen: float = 0.0
    """When its program was last heard of."""
    reason: str = ""
    """How it ended; empty: it has not."""
    user_metadata: Metadata | None = None
    display_name: str | None = None
    sdk_version: str = ""
    models: list[str] = Field(default_factory=list[str])
    samplers: list[str] = Field(default_factory=list[str])
    """The newest ones."""


class ListSessions(TinkerPage):
    """Asks for a user's sessions, or for one."""

    session: str = Field(default="", max_length=80)
    """Empty: all."""


class SessionPage(Message):
    """Some of a user's sessions."""

    sessions: list[TinkerSession] = Field(default_factory=list[TinkerSession])
    total: int = 0
    """How many there are."""


class TakeCheckpoint(Request):
    """Asks that a checkpoint of an own run can be loaded by programs written for Tinker."""

    path: str = Field(max_length=200)
    """`tinker://RUN@STEP`."""

    max_bytes: ClassVar[int] = 1 << 10
