"""Names of sessions, models, requests and checkpoints of the Tinker API.

A model is `<session>:train:<number>`, its request `<model>:<sequence number>`. Both are computed
from a request, so polls need no table. A checkpoint is `tinker://<model>/<kind>/<name>`.
"""

import re
from dataclasses import dataclass
from typing import Literal, cast

from ..wire.errors import NotFoundError

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
KINDS = ("weights", "sampler_weights", "external_weights")
_SESSION = r"[a-z0-9][a-z0-9-]{0,47}"
_NUMBER = r"0|[1-9][0-9]{0,8}"
_MODEL = re.compile(rf"({_SESSION}):train:({_NUMBER})")
_REQUEST = re.compile(rf"({_SESSION}:train:(?:{_NUMBER})):({_NUMBER})")
_PATH = re.compile(rf"tinker://({_SESSION}:train:(?:{_NUMBER}))/({'|'.join(KINDS)})/(.+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_SEQ = 10**9 - 1


def session_name(text: str) -> str:
    """Return a valid session id; raises NotFoundError for another text."""
    if re.fullmatch(_SESSION, text) is None:
        raise NotFoundError(
            f"there is no session {text[:80]!r}", hint="create_session returns a session's id"
        )
    return text


def is_path(text: str) -> bool:
    """Whether a text is a checkpoint path, `tinker://…`."""
    return text.startswith("tinker://")


@dataclass(frozen=True)
class ModelName:
    """One model of a session."""

    session: str
    number: int

    @classmethod
    def parse(cls, text: str) -> "ModelName":
        """Read `<session>:train:<number>`; raises NotFoundError."""
        if (match := _MODEL.fullmatch(text)) is None:
            raise NotFoundError(
                f"there is no model {text[:80]!r}", hint="create_model returns a model's id"
            )
        return cls(match[1], int(match[2]))

    @classmethod
    def of_folder(cls, folder: str) -> "ModelName":
        """Read the name of a model's folder, `<session>.train.<number>`; raises NotFoundError."""
        return cls.parse(folder.replace(".train.", ":train:"))

    @property
    def folder(self) -> str:
        """The name of the folder with the model's files."""
        return f"{self.session}.train.{self.number}"

    def __str__(self) -> str:
        return f"{self.session}:train:{self.number}"


@dataclass(frozen=True)
class OperationName:
    """One operation of a model; number 0 creates the model."""

    model: ModelName
    seq: int

    @classmethod
    def parse(cls, text: str) -> "OperationName":
        """Read a request id; raises NotFoundError."""
        if (match := _REQUEST.fullmatch(text)) is None:
            raise NotFoundError(
                f"there is no request {text[:80]!r}", hint="each submit returns a request id"
            )
        return cls(ModelName.parse(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.model}:{self.seq}"


@dataclass(frozen=True)
class CheckpointName:
    """A named checkpoint."""

    model: ModelName
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(cls, path: str) -> "CheckpointName":
        """Read `tinker://<model>/<kind>/<name>`; raises NotFoundError."""
        match = _PATH.fullmatch(path)
        if match is None or not _NAME.fullmatch(match[3]):
            raise NotFoundError(
                f"there is no checkpoint {path[:200]!r}",
                hint="a path is tinker://<session>:train:<n>/weights/<name>, or sampler_weights or "
                "external_weights in the place of weights",
            )
        return cls(ModelName.parse(match[1]), cast("CheckpointKind", match[2]), match[3])

    @staticmethod
    def is_name(name: str) -> bool:
        """Whether a checkpoint may have this name."""
        return _NAME.fullmatch(name) is not None

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"
