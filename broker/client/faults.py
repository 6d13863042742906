"""Errors of connections, with texts that tell users what to do."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

import nats.errors

from ...schemas.wire import errors
from ...schemas.wire.subjects import BUCKET_ARCHIVE, BUCKET_JOBS, BUCKET_USERS
from .nats_internals import NO_STREAM

# The URL of a broker: one server, or several of a cluster, separated by commas.
#
# `tls://a:4222,b:4222,c:4222`; each may repeat the scheme, and all have the same one. A client
# connects to any of them, and to another when that connection is lost.

SCHEMES = frozenset({"nats", "tls"})


def server_urls(url: str) -> list[str]:
    """Return the URL of each server."""
    first, *others = (part.strip() for part in url.split(","))
    scheme, mark, _ = first.rpartition("://")
    return [first, *(other if "://" in other else f"{scheme}{mark}{other}" for other in others)]


def split_servers(url: str, schemes: frozenset[str] = SCHEMES) -> list[SplitResult]:
    """Return each server's URL in parts; ValueError unless all could belong to one cluster."""
    servers = [urlsplit(server) for server in server_urls(url)]
    for server in servers:
        if server.scheme not in schemes or not server.hostname:
            raise ValueError(f"{server.netloc!r} is not the address of a server")
    if len({server.scheme for server in servers}) > 1:
        raise ValueError("either all servers must encrypt or none")
    return servers


TRANSIENT = (
    nats.errors.OutboundBufferLimitError,
    nats.errors.NoRespondersError,
    nats.errors.TimeoutError,
    nats.errors.ConnectionReconnectingError,
)
"""Errors of nats-py after which the same request may succeed."""
_UNSETTLED = frozenset({10004, 10005, 10008, 10009, 10118, 10119})
"""Answers of a cluster without a leader, or with too few servers for a new stream."""
_PASSING = frozenset({10008, 10009, 10023, 10118, 10119})
"""Answers of a cluster without a quorum, and of a server without free storage."""
_WRONG_SEQUENCE = frozenset({10071, 10164})
_STORE_FAILED = 10077
_STREAM_FAILED = 10051
"""Answer to a purge for which there is no space, and to faults of other requests."""
_STORE = "store"
_STREAM_ASKED = re.compile(r"^\$JS\.API\.(?:DIRECT|STREAM\.MSG)\.GET\.([^.]+)")
_DENIED = re.compile(r'permissions violation for (\w+) to "([^"]+)"')
_FROM_A_CHECKPOINT = (
    "restore it from a back-up, or go on in a new run from a checkpoint: `tinkermq fork RUN@STEP`"
)
_BRINGS_BACK = {
    "rollout": _FROM_A_CHECKPOINT,
    "batch": _FROM_A_CHECKPOINT,
    "task": "`tinkermq resume RUN` makes it again, and its tasks are issued again",
    "weights": "`tinkermq resume RUN` makes it again, and the learner publishes its weights again",
}
_OPERATIONS = {"publish": "publish to", "subscription": "subscribe to"}


class ConnectionLost(errors.BrokerError):
    """The connection broke during a request, which may or may not have arrived."""


class NoResponders(errors.BrokerError):
    """The request's subject has no subscriber, or the requested `stream` does not answer."""

    def __init__(self, message: str, *, hint: str = "", stream: str = "") -> None:
        super().__init__(message, hint=hint)
        self.stream = stream


class Unanswered(TimeoutError):
    """No reply to a request on `subject` came in time.

    A subject without a service raises NoResponders at once, but not while a client listens to all
    subjects (`nats sub '>'`).
    """

    def __init__(self, subject: str) -> None:
        super().__init__()
        self.subject = subject


class Refused(errors.BrokerError):
    """JetStream refused a request."""

    def __init__(self, error: Mapping[str, Any], what: str) -> None:
        """Describe JetStream's `error` for the request `what`."""
        self.description = str(error.get("description", ""))
        self.err_code = int(error.get("err_code", 0))
        self._is_purge = what.startswith("$JS.API.STREAM.PURGE.")
        self.is_absent = error.get("code") == 404
        """Whether the requested item does not exist."""
        super().__init__(
            f"{what} was refused: {self.description}",
            hint="look at the stream with `nats stream info`",
        )

    @property
    def is_overtaken(self) -> bool:
        """Whether another message was written meanwhile."""
        return self.err_code in _WRONG_SEQUENCE

    @property
    def is_full(self) -> bool:
        """Whether the stream is full."""
        return self.err_code == _STORE_FAILED

    @property
    def is_unsettled(self) -> bool:
        """Whether a cluster refuses until it has elected a leader, or a server is back."""
        return self.err_code in _UNSETTLED

    @property
    def is_passing(self) -> bool:
        """Whether the broker cannot store now, but can once servers or room are back."""
        return self.err_code in _PASSING or (self._is_purge and self.err_code == _STREAM_FAILED)


def nobody_listens(subject: str, headers: Mapping[str, str]) -> errors.BrokerError:
    """Return the error of a request without a responder.

    The store proxy reports missing streams; if the proxy itself is absent, it comes back.
    """
    if f".{_STORE}." in subject and NO_STREAM not in headers:
        return ConnectionLost(
            f"no answer on {subject}: the auth service of the pool is away",
            hint="try again; see whether it runs (`python -m tinkermq.actors.auth`)",
        )
    return NoResponders(
        f"no service listens on {subject}",
        hint="see whether the actor that answers there runs (`nats micro ls`)",
        stream=stream_read(subject) or headers.get(NO_STREAM, ""),
    )


def stream_read(subject: str) -> str:
    """Return the stream that a request on this subject reads; empty for other requests."""
    match = _STREAM_ASKED.match(subject)
    return match[1] if match else ""


def shown_url(url: str) -> str:
    """Return the URL without user and password, for messages and logs."""
    return re.sub(r"(^|//|,)[^@/,]*@", r"\1", url)


def check_url(url: str) -> None:
    """Raise BrokerError unless this is the URL of one or more NATS servers."""
    try:
        split_servers(url)
    except ValueError as error:
        raise errors.BrokerError(
            f"{shown_url(url)!r} is not the URL of a NATS server",
            hint="write nats://host:port, such as nats://127.0.0.1:4222; the servers of a cluster "
            "with commas: tls://a:4222,b:4222,c:4222",
        ) from error


def denied_subject(error: Exception) -> tuple[str, str] | None:
    """Return operation and subject (in lower case) if a right is missing, else None."""
    match = _DENIED.search(str(error).lower())
    return (_OPERATIONS.get(match[1], match[1]), match[2]) if match else None


def is_refusal(error: Exception) -> bool:
    """Return whether the server refuses the user."""
    text = str(error).lower()
    return isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in text


def denied(user: str, operation: str, subject: str) -> errors.DeniedError:
    """Return the error of a user without the right to a subject."""
    return errors.DeniedError(
        f"user {user!r} may not {operation} {subject!r}",
        hint="use the credentials of the subject's owner, or grant the right at the broker",
        subject=subject,
    )


def too_large(what: str, size: int, most: int) -> errors.MessageError:
    """Return the error of a payload that the server does not accept."""
    return errors.MessageError(
        f"{what} has {size:,} bytes, the server takes at most {most:,} in one message",
        hint="make it smaller (shorter or fewer trajectories, a smaller group_size), or "
        "raise max_payload in the configuration of nats-server",
    )


def missing(stream: str) -> errors.NotFoundError:
    """Return the error of a missing stream or bucket, with a hint how to restore it."""
    plain = stream.removeprefix("KV_").removeprefix("OBJ_")
    if plain == BUCKET_JOBS:
        what = "all job records were in it: restore a back-up (`tinkermq restore`)"
    elif plain == BUCKET_ARCHIVE:
        what = "the records of archived runs were in it: restore a back-up (`tinkermq restore`); "
        what += "without one, `tinkermq up` makes it again, empty"
    elif plain == BUCKET_USERS:
        what = "all users and their keys were in it: restore a back-up (`tinkermq restore`)"
    elif "-" not in plain.removeprefix("tmq-"):
        what = "start the scheduler again, or `tinkermq up`: it makes what all jobs share"
    else:
        kind = plain.rpartition("-")[2]
        what = "the run may have been removed (`tinkermq ps --all`); if not, "
        what += _BRINGS_BACK.get(kind, "`tinkermq resume RUN` makes it again, empty")
    return errors.NotFoundError(f"there is no stream {stream}", hint=what)


def late(url: str, waiting_for: str) -> errors.DeadlineError:
    """Return the error of an expired wait."""
    return errors.DeadlineError(
        f"{waiting_for}: no answer in time through {shown_url(url)}",
        hint="see whether nats-server, and what should answer, run (`tinkermq doctor`)",
    )


def broken(url: str, subject: str) -> ConnectionLost:
    """Return the error of a request whose connection was lost."""
    return ConnectionLost(
        f"the connection to {shown_url(url)} broke during a request on {subject}",
        hint="try again",
    )


def dropped(subject: str) -> errors.BrokerError:
    """Return the error of messages that arrived faster than they were handled."""
    return errors.BrokerError(
        f"messages on {subject} were dropped: they came faster than this process took them",
        hint="the event loop of this process was blocked, or its handler is too slow",
    )


def without_users(url: str, user: str) -> errors.BrokerError:
    """Return the error of an API key in a pool without users."""
    return errors.BrokerError(
        f"the pool at {shown_url(url)} has no users, so it has no key of user {user!r}",
        hint="unset TINKERMQ_API_KEY, or leave api_key out; is it the URL of another pool?",
    )


def refused(url: str, error: Exception) -> errors.LogInRefusedError:
    """Return the error of a user whom the server refuses."""
    return errors.LogInRefusedError(
        f"the NATS server at {shown_url(url)} refuses this user: {error}",
        hint="set TINKERMQ_API_KEY if it is unset; else the key may be mistyped, revoked, expired "
        "or another pool's (an admin makes a new one: `tinkermq user rotate`)",
    )


def unreachable(url: str, deadline_s: float, last_error: Exception | None) -> errors.BrokerError:
    """Return the error of a server that does not answer at the first connect."""
    why = f" ({last_error})" if last_error else ""
    return errors.BrokerError(
        f"no NATS server answers at {shown_url(url)} within {deadline_s:g} s{why}",
        hint="start one with `tinkermq up`, or give the URL of one that runs (--nats-url, "
        "TINKERMQ_NATS_URL)",
    )


def closed(url: str, last_error: Exception | None) -> errors.BrokerError:
    """Return the error of a connection that is closed for good."""
    why = f": {last_error}" if last_error else ""
    return errors.BrokerError(
        f"the connection to {shown_url(url)} is closed{why}",
        hint="connect again; the credentials may have expired or been revoked",
    )


def without_jetstream(url: str) -> errors.BrokerError:
    """Return the error of a server without JetStream."""
    return errors.BrokerError(
        f"the NATS server at {shown_url(url)} has JetStream disabled",
        hint="start it with `nats-server -js`, or let `tinkermq up` start one",
    )
