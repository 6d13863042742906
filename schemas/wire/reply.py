"""Replies: errors and parts."""

from typing import Self

from pydantic import Field

from .errors import TinkermqError, error_from_reply
from .message import Message

MAX_CHARS = 8000
"""Length of a message or hint."""


class ErrorReply(Message):
    """Reply to a request that failed. The headers `Nats-Service-Error-Code` and
    `Nats-Service-Error` repeat it for NATS tools."""

    code: str
    """Stable error code."""
    message: str
    """What happened, with which value."""
    hint: str = ""
    """What to do about it."""

    @classmethod
    def of(cls, code: str, message: str, hint: str = "") -> Self:
        """Make a reply of any text, also invalid Unicode from games and models.

        Long texts are cut, so that the reply fits a message.
        """
        return cls(code=code, message=_clean(message), hint=_clean(hint))

    def to_error(self) -> TinkermqError:
        """Return the error that the peer raised, as the same class."""
        return error_from_reply(self.code, self.message, self.hint)


class Part(Message):
    """One of several messages that answer a request. A part without content says that the service
    is still working."""

    index: int = Field(default=0, ge=0)
    """Number of the part, from 0; a gap means a loss."""
    last: bool = False
    """No part follows."""
    error: ErrorReply | None = None
    """Why the answer ends here; in the last part only."""


def _clean(told: object) -> str:
    text = told if isinstance(told, str) else str(type(told))
    cut = text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + " …"
    return cut.encode(errors="replace").decode()
