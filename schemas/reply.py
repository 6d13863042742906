"""The reply to a request that failed."""

from .message import Message


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
