"""Sessions of visitors, each with one connection to the broker.

A session is a random id in a cookie; its key stays in this process's memory. The number of
connections is bounded, and unused ones are closed. If the broker requires no keys, everyone is the
user `local`, without a log-in.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog

from ...broker.client.connection import Broker, connect
from ...broker.client.keys import user_of_key
from ...broker.client.login import anonymous
from ...broker.client.server_info import read_server_info
from ...schemas.job import JobRecord
from ...schemas.wire import errors
from ...schemas.wire.foreign import ends_this_task
from ...schemas.wire.subjects import DEFAULT_USER
from .limits import MAX_REQUESTS, MAX_RUNNING, Share, Taken

COOKIE = "tinkermq_session"
SESSION_S = 12 * 3600.0
IDLE_S = 600.0
MAX_VISITORS = 128
MAX_SESSIONS = 4096
MAX_SESSIONS_OF_USER = 16
"""Maximum number of sessions of one user; a further log-in ends the oldest."""
_CONNECT_DEADLINE_S = 5.0
_CONNECTING_AT_ONCE = 8
_SWEEP_S = 30.0

_log = structlog.get_logger()


class LogInError(errors.TinkermqError):
    """The key is missing or unknown, or the session has ended."""

    status = 401


@dataclass
class Visitor:
    """A user and their connection to the broker."""

    user: str
    broker: Broker
    used: float = field(default_factory=time.monotonic)
    share: Share = field(default_factory=Share)
    listed: tuple[float, list[JobRecord]] | None = None
    """Time and result of the last listing of jobs, which many pages show."""

    @contextlib.contextmanager
    def held(self, body_bytes: int = 0) -> Iterator[Taken]:
        """Keep the connection open while the block runs.

        Raises BusyError if the user has reached a limit on requests or bytes.
        """
        with self.share.taken(body_bytes) as share:
            try:
                yield share
            finally:
                self.used = time.monotonic()


@dataclass(frozen=True)
class _Session:
    user: str
    key: str
    until: float


class Sessions:
    """The log-ins of this gateway and their connections."""

    def __init__(self, url: str, *, with_keys: bool, max_visitors: int = MAX_VISITORS) -> None:
        """Use the broker at `url`; nothing is opened yet."""
        self.url = url
        self.with_keys = with_keys
        self._max_visitors = max_visitors
        self._sessions: dict[str, _Session] = {}
        self._visitors: dict[str, Visitor] = {}
        self._opening: dict[str, asyncio.Task[Visitor]] = {}
        self._free = asyncio.Semaphore(_CONNECTING_AT_ONCE)
        self._dropping = set[asyncio.Task[None]]()

    @property
    def num_sessions(self) -> int:
        """Browsers that are logged in."""
        return len(self._sessions)

    @property
    def num_visitors(self) -> int:
        """Connections that are open."""
        return len(self._visitors)

    async def log_in(self, key: str) -> str:
        """Return the id of a new session of the key's user; raises LogInError."""
        if not self.with_keys:
            raise LogInError("this pool requires no keys", hint="begin at /jobs")
        user, now = (await self.visitor_of_key(key)).user, time.monotonic()
        self._sessions = {
            name: login for name, login in self._sessions.items() if login.until > now
        }
        own = [name for name, login in self._sessions.items() if login.user == user]
        for oldest in own[: max(0, len(own) + 1 - MAX_SESSIONS_OF_USER)]:
            del self._sessions[oldest]
        if len(self._sessions) >= MAX_SESSIONS:
            raise errors.BusyError("too many people are logged in", hint="try again later")
        session = secrets.token_urlsafe(32)
        self._sessions[session] = _Session(user, key, now + SESSION_S)
        return session

    async def log_out(self, session: str) -> None:
        """End a session, and its connection unless another session has the same key."""
        ended = self._sessions.pop(session, None)
        if ended is not None and all(item.key != ended.key for item in self._sessions.values()):
            await self._drop(ended.key)

    async def visitor(self, *, session: str | None, key: str | None) -> Visitor:
        """Return the visitor, by key or session; raises LogInError.

        A key takes precedence over a session, even an empty one.
        """
        if not self.with_keys:
            return await self._connected("")
        if key is not None:
            return await self.visitor_of_key(key)
        match = self._sessions.get(session or "")
        if match is None or match.until < time.monotonic():
            raise LogInError(
                "you are not logged in", hint="log in, or send `Authorization: Bearer KEY`"
            )
        try:
            return await self.visitor_of_key(match.key)
        except LogInError:
            self._sessions.pop(session or "", None)
            raise

    async def visitor_of_key(self, key: str) -> Visitor:
        """Return the user of a key with their connection; raises LogInError."""
        user_of(key)
        return await self._connected(key)

    async def _connected(self, key: str) -> Visitor:
        """Return the visitor of a key, connected to the broker.

        A broken connection is opened anew, since the key may have been revoked.
        """
        match = self._visitors.get(key)
        if match is not None and match.broker.is_connected:
            match.used = time.monotonic()
            return match
        if key not in self._opening:
            opening = asyncio.create_task(self._open(key), name="open a user's connection")
            self._opening[key] = opening
            opening.add_done_callback(lambda _: self._opening.pop(key, None))
        opening = self._opening[key]
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError as error:
            if ends_this_task(error):
                raise
            raise errors.BrokerError(
                "the connection to the broker was lost while it was made", hint="try again"
            ) from error

    async def sweep(self) -> None:
        """Close unused connections, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            before = time.monotonic() - IDLE_S
            for key, visitor in list(self._visitors.items()):
                idle = not visitor.share.num_running and visitor.used < before
                if idle or visitor.broker.closed.is_set():
                    await self._drop(key)

    async def close(self) -> None:
        """Close all connections."""
        self._sessions.clear()
        for key in list(self._visitors):
            await self._drop(key)

    async def _open(self, key: str) -> Visitor:
        await self._drop(key)
        await self._make_room()
        async with self._free:
            if self.with_keys:
                user = user_of(key)
                broker = await _connect_as(self.url, user, key)
            else:
                user = DEFAULT_USER
                broker = await connect(
                    self.url, name="gateway", login=anonymous(), deadline_s=_CONNECT_DEADLINE_S
                )
        visitor = self._visitors[key] = Visitor(user, broker, share=self._share(user))
        broker.on_error(lambda error: self._refused(key, visitor, error))
        return visitor

    def _refused(self, key: str, visitor: Visitor, error: errors.BrokerError) -> None:
        """Close a connection whose key the broker now refuses, and its streams."""
        if isinstance(error, errors.LogInRefusedError) and self._visitors.get(key) is visitor:
            dropping = asyncio.create_task(self._drop(key), name="drop a refused connection")
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    def _share(self, user: str) -> Share:
        """Return the counter of a user's requests; some may run with an older key."""
        for visitor in self._visitors.values():
            if visitor.user == user:
                return visitor.share
        return Share(MAX_RUNNING if self.with_keys else MAX_REQUESTS)

    async def _make_room(self) -> None:
        if len(self._visitors) < self._max_visitors:
            return
        free = [key for key, visitor in self._visitors.items() if not visitor.share.num_running]
        if not free:
            raise errors.BrokerError(
                f"{len(self._visitors)} users are connected, as many as this gateway serves",
                hint="try again later, or run a second gateway",
            )
        await self._drop(min(free, key=lambda key: self._visitors[key].used))

    async def _drop(self, key: str) -> None:
        visitor = self._visitors.pop(key, None)
        if visitor is not None:
            await visitor.broker.close()


async def _connect_as(url: str, user: str, key: str) -> Broker:
    """Open a connection with a user's key; no other function passes a key on."""
    try:
        return await connect(
            url, name=f"gateway-{user}", api_key=key, deadline_s=_CONNECT_DEADLINE_S
        )
    except errors.LogInRefusedError as error:
        _log.warning("log_in_refused", user=user)
        raise LogInError(
            "the broker refuses this key",
            hint="it may be mistyped, revoked or expired; an admin makes another: "
            "`tinkermq user rotate`",
        ) from error


def user_of(key: str) -> str:
    """Return the user that a key `tmq_<user>_<secret>` names; raises LogInError."""
    try:
        return user_of_key(key)
    except (errors.AuthError, errors.MessageError) as error:
        raise LogInError(
            "this is not an API key of a user", hint="a key looks like tmq_<user>_<secret>"
        ) from error


async def asks_for_keys(url: str) -> bool:
    """Return whether the broker requires authentication, from its INFO.

    Raises BrokerError if no server answers at `url`.
    """
    return bool((await read_server_info(url)).get("auth_required"))
