"""Sampling through the Tinker API."""

import re
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from ..wire.codec import from_base64url, to_base64url
from ..wire.errors import NotFoundError
from ..wire.message import Message
from .checkpoints import CheckpointExport
from .names import CheckpointName

_SAMPLER = re.compile(r"([a-z0-9][a-z0-9-]{0,47}):sample:(0|[1-9][0-9]{0,18}):([A-Za-z0-9_-]+)")
_REQUEST = re.compile(r"(.+:sample:[0-9]+:[A-Za-z0-9_-]+):([0-9]{1,19})@([a-z0-9][a-z0-9-]{0,47})")
_USER = r"^([a-z0-9][a-z0-9_]{0,31})?$"
_BASE = "base:"
_MOVES = "inflight:"
MAX_SAMPLE_BYTES = 4 << 20
"""Size of a sample request."""


@dataclass(frozen=True)
class SamplerName:
    """A sampling session; its name contains its source, so no table is needed."""

    session: str
    number: int
    source: str
    """`tinker://…`, after `inflight:` if samples use later weights as well; or `base:` and the name
    of a base model."""

    @classmethod
    def parse(cls, text: str) -> "SamplerName":
        """Read the id of a sampling session; raises NotFoundError."""
        match = _SAMPLER.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            source = from_base64url(match[3]).decode()
        except ValueError:
            raise NotFoundError(
                f"there is no sampling session {text[:80]!r}",
                hint="create_sampling_session returns the id of one",
            ) from None
        return cls(match[1], int(match[2]), source)

    @classmethod
    def of_base(cls, session: str, number: int, base: str) -> "SamplerName":
        """Return the name of a session on a base model."""
        return cls(session, number, _BASE + base)

    @property
    def base(self) -> str | None:
        """The base model, or None for a checkpoint."""
        return self.source.removeprefix(_BASE) if self.source.startswith(_BASE) else None

    @classmethod
    def of_checkpoint(
        cls, session: str, number: int, path: CheckpointName, *, moves: bool = False
    ) -> "SamplerName":
        """Return the name of a session on a checkpoint; with `moves`, also on later weights."""
        return cls(session, number, f"{_MOVES if moves else ''}{path}")

    @property
    def moves(self) -> bool:
        """Whether its samples switch to weights saved later."""
        return self.source.startswith(_MOVES)

    @property
    def checkpoint(self) -> CheckpointName:
        """The checkpoint, the first one if it moves; raises NotFoundError."""
        return CheckpointName.parse(self.source.removeprefix(_MOVES))

    def __str__(self) -> str:
        return f"{self.session}:sample:{self.number}:{to_base64url(self.source.encode())}"


@dataclass(frozen=True)
class SampleName:
    """One request of a sampling session, and its sampler."""

    sampler: SamplerName
    seq: int
    actor: str

    @classmethod
    def parse(cls, text: str) -> "SampleName | None":
        """Read a request id; None for another kind. Raises NotFoundError."""
        if (match := _REQUEST.fullmatch(text)) is None:
            return None
        return cls(SamplerName.parse(match[1]), int(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.sampler}:{self.seq}@{self.actor}"


class SampleRequest(Message):
    """Request continuations of a prompt, or its log-probs."""

    source: str = Field(max_length=400)
    """Source of a sampling session: a path or base model."""
    request: str = Field(max_length=600)
    """Sampling session and number of the request; a repeated one is the same."""
    body: bytes = Field(max_length=MAX_SAMPLE_BYTES)

    max_bytes: ClassVar[int] = MAX_SAMPLE_BYTES + (4 << 10)


class SampleTaken(Message):
    """The sampler that accepted a request."""

    actor: str
    num_samples: int


class AwaitSample(Message):
    """Wait for a sample, or cancel it."""

    request: str = Field(max_length=600)
    wait_s: float = Field(default=25.0, ge=0, le=60)
    cancel: bool = False
    """The result is not needed."""

    max_bytes: ClassVar[int] = 2 << 10


class FindSnapshot(Message):
    """A sampler asks its trainer for the current weights of a user's samples."""

    user: str = Field(default="", pattern=_USER)
    path: str = Field(default="", max_length=400)
    """Empty: only identify the trainer's folder."""
    moves: bool = False
    """Return the newest in-flight weights of the model."""

    max_bytes: ClassVar[int] = 2 << 10


class FoundSnapshot(Message):
    """The checkpoint to use."""

    mark: str
    """Identifies the trainer's folder: a sampler that finds it shares the disk."""
    owner: str = ""
    path: str = ""
    seq: int = 0
    """Operation that saved it."""
    export: CheckpointExport | None = None
    """Its files, for a sampler that does not share the disk."""
