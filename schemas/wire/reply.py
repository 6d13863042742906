"""The reply to a request that failed."""

from typing import Self

from pydantic import Field

from .errors import TinkermqError, error_from_reply
from .message import Message

MAX_CHARS = 8000
"""Characters of a message or hint."""


class ErrorReply(Message):
    """What a service answers when a request failed.

    The headers `Nats-Service-Error-Code` and `Nats-Service-Error` say the same to the ordinary
    tools.
    """

    code: str
    """Stable, machine-readable."""
    message: str
    """What happened, with which value."""
    hint: str = ""
    """What to do next."""

    @classmethod
    def of(cls, code: str, message: str, hint: str = "") -> Self:
        """Make a reply of any text, also of what has no UTF-8 form (games and models say it).

        What is longer than anybody reads is cut: a reply that is too large would be none.
        """
        return cls(code=code, message=_clean(message), hint=_clean(hint))

    def to_error(self) -> TinkermqError:
        """Return the error that the peer raised, as the same class."""
        return error_from_reply(self.code, self.message, self.hint)


class Part(Message):
    """One of the messages that answer one request, when the answer comes bit by bit.

    What extends it carries a piece of the answer; one that carries none says that the service is
    still at work.
    """

    index: int = Field(default=0, ge=0)
    """Number of the message, from 0: a gap means that one was lost."""
    last: bool = False
    """Nothing follows."""
    error: ErrorReply | None = None
    """Why the answer ends here; only in the last one."""


def _clean(told: object) -> str:
    text = told if isinstance(told, str) else str(type(told))
    cut = text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + " …"
    return cut.encode(errors="replace").decode()
