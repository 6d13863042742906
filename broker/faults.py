"""What can go wrong with a connection, in words that a user can act on."""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

import nats.errors
from nats.js.errors import NoStreamResponseError

from ..schemas.errors import BrokerError

TRANSIENT = (
    nats.errors.OutboundBufferLimitError,
    nats.errors.NoRespondersError,
    nats.errors.TimeoutError,
    nats.errors.ConnectionReconnectingError,
    NoStreamResponseError,
)
"""Errors of nats-py after which the same request may succeed."""
DOOR = "store"
NO_STREAM = "Tmq-No-Stream"
"""Header by which the door says that a stream is not there."""
_DENIED = re.compile(r'permissions violation for (\w+) to "([^"]+)"')
_OPERATIONS = {"publish": "publish to", "subscription": "subscribe to"}


class ConnectionLost(BrokerError):
    """The connection broke while a request was in flight: it may or may not have arrived."""


class NoResponders(BrokerError):
    """Nobody listens on the subject of a request."""


def nobody_listens(subject: str, headers: Mapping[str, str]) -> BrokerError:
    """Return the error of a request that nobody took.

    The door answers for streams that are not there, and says so; when it is itself away, it comes
    back.
    """
    if f".{DOOR}." in subject and NO_STREAM not in headers:
        return ConnectionLost(
            f"nobody answers at {subject}: the auth service of the pool is away",
            hint="try again; see whether it runs (`python -m tinkermq.actors.auth`)",
        )
    return NoResponders(
        f"nobody listens on {subject}",
        hint="see whether the actor that answers there runs (`nats micro ls`)",
    )


def shown_url(url: str) -> str:
    """Return the URL without user and password, for messages and logs."""
    return re.sub(r"//[^@/]*@", "//", url)


def check_url(url: str) -> None:
    """Raise BrokerError unless this is the URL of a NATS server."""
    parts = urlsplit(url)
    if parts.scheme not in {"nats", "tls"} or not parts.hostname:
        raise BrokerError(
            f"{shown_url(url)!r} is not the URL of a NATS server",
            hint="write nats://host:port, such as nats://127.0.0.1:4222",
        )


def denied_subject(error: Exception) -> tuple[str, str] | None:
    """Return operation and subject (in lower case) if a right is missing, else None."""
    found = _DENIED.search(str(error).lower())
    return (_OPERATIONS.get(found[1], found[1]), found[2]) if found else None


def is_refusal(error: Exception) -> bool:
    """Whether the server refuses the user."""
    text = str(error).lower()
    return isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in text


def denied(user: str, operation: str, subject: str) -> BrokerError:
    """Return the error of a user without the right to a subject."""
    return BrokerError(
        f"user {user!r} may not {operation} {subject!r}",
        hint="use the credentials of the subject's owner, or grant the right at the broker",
    )


def dropped(subject: str) -> BrokerError:
    """Return the error of messages that came faster than they were taken."""
    return BrokerError(
        f"messages on {subject} were dropped: they came faster than this process took them",
        hint="the event loop of this process was blocked, or its handler is too slow",
    )


def refused(url: str, error: Exception) -> BrokerError:
    """Return the error of a user whom the server does not let in."""
    return BrokerError(
        f"the NATS server at {shown_url(url)} refuses this user: {error}",
        hint="check the API key, or the user and password in the URL",
    )


def unreachable(url: str, deadline_s: float, last_error: Exception | None) -> BrokerError:
    """Return the error of a server that does not answer at the first connect."""
    why = f" ({last_error})" if last_error else ""
    return BrokerError(
        f"no NATS server answers at {shown_url(url)} within {deadline_s:g} s{why}",
        hint="start one with `tinkermq up`, or give the URL of one that runs (--nats-url, "
        "TINKERMQ_NATS_URL)",
    )


def closed(url: str, last_error: Exception | None) -> BrokerError:
    """Return the error of a connection that is closed for good."""
    why = f": {last_error}" if last_error else ""
    return BrokerError(
        f"the connection to {shown_url(url)} is closed{why}",
        hint="connect again; the credentials may have expired or been revoked",
    )


def without_jetstream(url: str) -> BrokerError:
    """Return the error of a server that does not store messages."""
    return BrokerError(
        f"the NATS server at {shown_url(url)} has JetStream disabled",
        hint="start it with `nats-server -js`, or let `tinkermq up` start one",
    )
