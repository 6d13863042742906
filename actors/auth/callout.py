"""Authenticate logins: decide who connects and with which permissions, and sign the answer.

Logins are queued per user, per user's processes, and per address for unknown keys, so that a flood
from one of them does not delay the others. Each queue and its rate are bounded; beyond the bound a
few logins a second are refused with a reason, the rest run into the server's timeout.
"""

import json
import math
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import nkeys
import structlog
from nats.aio.msg import Msg

from ...broker.client import keys
from ...broker.client.fair_queue import FairQueue, Rates
from ...broker.credentials import ACCOUNT
from ...broker.jobs import JobStore, is_final
from ...broker.permissions import (
    Permissions,
    admin_permissions,
    episode_permissions,
    job_permissions,
    user_permissions,
)
from ...broker.user_records import Audit, UserStore
from ...schemas.user import UserRecord
from ...schemas.wire.codec import from_base64url, read_json, to_base64url
from ...schemas.wire.errors import AuthError, MessageError, TinkermqError
from .connections import JobConnection, UserConnections


class Admission(NamedTuple):
    """A client that is admitted."""

    name: str
    permissions: Permissions
    expires: float | None = None
    """When the server closes the connection, in seconds since the epoch; None: never."""


class Authenticator:
    """Checks API keys and job keys."""

    def __init__(self, users: UserStore, jobs: JobStore, job_secret: bytes) -> None:
        """Read users and jobs from their stores at each log-in."""
        self._users = users
        self._jobs = jobs
        self._job_secret = job_secret

    async def admit(self, user: str, secret: str) -> Admission:
        """Return a client's permissions; raises AuthError with the reason of a refusal."""
        if user == "job":
            of_program = secret.startswith(keys.EPISODE_KEY)
            return await (self._program(secret) if of_program else self._process(secret))
        return await self._user(user, secret)

    async def _user(self, user: str, key: str) -> Admission:
        try:
            named = keys.user_of_key(key)
        except TinkermqError as error:
            raise AuthError("no API key") from error
        if named != user:
            raise AuthError("the key of another user")
        record = await self._users.get(user)
        check_record(record, key)
        assert record is not None
        table = admin_permissions if record.role == "admin" else user_permissions
        return Admission(user, table(user), record.expires)

    async def _process(self, key: str) -> Admission:
        """Admit an actor while this attempt of its job has it."""
        identity = keys.check_job_key(key, self._job_secret)
        if identity is None:
            raise AuthError("no job key of this pool")
        record = await self._jobs.find_by_id(identity.user, identity.job)
        if record is None or is_final(record) or record.attempt != identity.attempt:
            raise AuthError("the key of a job that has ended")
        if not any(
            (actor.name, actor.role) == (identity.actor, identity.role) for actor in record.actors
        ):
            raise AuthError("the key of an actor that the job no longer has")
        name = JobConnection.of(identity).name
        return Admission(
            name,
            job_permissions(identity, record.follow, record.judge, record.teachers.values()),
        )

    async def _program(self, key: str) -> Admission:
        """Admit a client with the key of an episode while its job runs."""
        identity = keys.check_episode_key(key, self._job_secret)
        if identity is None:
            raise AuthError("no key of an episode of this pool")
        record = await self._jobs.find_by_id(identity.user, identity.job)
        if record is None or is_final(record):
            raise AuthError("the key of an episode whose job has ended")
        name = JobConnection(identity.user, identity.job, record.attempt, identity.episode).name
        return Admission(name, episode_permissions(identity))


def check_record(record: UserRecord | None, key: str) -> None:
    """Raise AuthError unless `key` is the valid key of the user."""
    if record is None or not keys.is_same(record.key_hash, keys.key_hash(key)):
        raise AuthError("an unknown key")
    if record.revoked is not None:
        raise AuthError("a revoked user")
    if record.expires is not None and record.expires < time.time():
        raise AuthError("a key that has expired")


# Signed answers in nats-server's own form of JWT: header, claims and an ed25519 signature by an
# nkey, each in base64url. Requests are read unchecked: only the server publishes on their subject.

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_UNLIMITED = {"subs": -1, "data": -1, "payload": -1}
"""Limits in claims that the server does not enforce (`connections.py` does)."""


class LoginRequest(NamedTuple):
    """A login as nats-server reports it."""

    server: str
    """Id of the server."""
    nkey: str
    """The server's key for this connection."""
    user: str
    password: str
    address: str
    """Host of the client."""
    client: str
    """Name that the client states."""


def read_request(token: bytes) -> LoginRequest:
    """Read the server's request; raises MessageError."""
    try:
        claims = from_base64url(token.split(b".")[1].decode())
        nats = cast("dict[str, Any]", read_json(claims)["nats"])
        options, info = nats["connect_opts"], nats.get("client_info", {})
        return LoginRequest(
            server=nats["server_id"]["id"],
            nkey=nats["user_nkey"],
            user=_text(options.get("user"))[:64],
            password=_text(options.get("pass")),
            address=_text(info.get("host"))[:64],
            client=_text(options.get("name"))[:64],
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise MessageError(f"the server's request cannot be read: {error!r}") from error


class ClaimIssuer:
    """Signs answers with the key of the pool's accounts."""

    def __init__(self, seed: str) -> None:
        """`seed` is that of the account key in the server's configuration."""
        self._pair = nkeys.from_seed(bytearray(seed.encode()))
        self._public = self._pair.public_key.decode()

    def admit(
        self, request: LoginRequest, name: str, permissions: Permissions, expires: float | None
    ) -> bytes:
        """Return the answer that admits a connection, until `expires`."""
        claims: dict[str, Any] = {
            "sub": request.nkey,
            "aud": ACCOUNT,
            "name": name,
            "nats": {
                "type": "user",
                "version": 2,
                **_UNLIMITED,
                **permissions.claims(),
            },
        }
        if expires is not None:
            claims["exp"] = math.ceil(expires)  # a client closed then is not admitted again
        return self._answer(request, jwt=self._signed(claims))

    def refuse(self, request: LoginRequest, why: str) -> bytes:
        """Return the answer that refuses a connection; the server logs `why`."""
        return self._answer(request, error=why)

    def _answer(self, request: LoginRequest, **nats: str) -> bytes:
        claims = {
            "sub": request.nkey,
            "aud": request.server,
            "nats": {"type": "authorization_response", "version": 2, **nats},
        }
        return self._signed(claims).encode()

    def _signed(self, claims: dict[str, Any]) -> str:
        stamped = {
            "jti": uuid.uuid4().hex,
            "iat": int(time.time()),
            "iss": self._public,
            **claims,
        }
        text = ".".join(to_base64url(json.dumps(part).encode()) for part in (_HEADER, stamped))
        return f"{text}.{to_base64url(self._pair.sign(text.encode()))}"


def _text(value: object) -> str:
    """Return a field that a client states, of any type, as printable text."""
    text = value if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "?" for char in text)


# -- queues of logins ------------------------------------------------------------------------------

LOGINS_S, LOGINS_AT_ONCE = 20.0, 200
"""Logins of one user: per second in the long run, and in a burst."""
PROCESS_CONNECTIONS = 8
"""Connections of processes for each actor that a job may have."""
PROGRAM_CONNECTIONS = 16
"""Connections with the key of one episode: one for each gateway that uses it."""
USER_PROGRAMS = 4096
"""Connections with keys of episodes of one user."""
PROGRAM_LOGINS_S, PROGRAM_LOGINS_AT_ONCE = 100.0, 2000
"""Logins with one user's episode keys: a job starts many at once."""
_RUNNING = 16
_REFUSALS_S = 50.0
_TURNED_AWAY = "turned away"
"""Queue of the clients that are refused without reading records: the audit may be slow."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Logins:
    """Answers the server's login requests, each in a task of its own."""

    def __init__(
        self,
        authenticator: Authenticator,
        issuer: ClaimIssuer,
        audit: Audit,
        connections: UserConnections,
        user: Callable[[str], UserRecord | None],
        job_secret: bytes,
    ) -> None:
        """`authenticator` decides; `user` returns users' records from memory."""
        self._authenticator = authenticator
        self._issuer = issuer
        self._audit = audit
        self._connections = connections
        self._user = user
        self._job_secret = job_secret
        self._queue = FairQueue()
        self._queue.bound = lambda _: _RUNNING
        self._rates = Rates(LOGINS_S, LOGINS_AT_ONCE)
        self._program_rates = Rates(PROGRAM_LOGINS_S, PROGRAM_LOGINS_AT_ONCE)
        self._refusals = Rates(_REFUSALS_S, int(_REFUSALS_S))

    def handle_login(self, message: Msg) -> None:
        """Start to answer a login, or refuse a client with too many."""
        try:
            request = read_request(message.data)
        except MessageError as error:
            _log.error("callout_malformed", error=error.message)
            return
        line = self._line(request)
        why = self._excess(line, request)
        if not why and not self._queue.submit(line, lambda: self._answer(message, request)):
            why = "too many log-ins at once: come again in some seconds"
        if why and self._refusals.take(line, time.monotonic()) is not None:
            kind, _, name = line.partition(" ")
            who = request.user if kind == "address" else name  # as the client claims, or of its key
            self._queue.submit(_TURNED_AWAY, lambda: self._refuse(message, request, who, why))

    async def settle(self, deadline_s: float) -> None:
        """Give running answers some time to end."""
        await self._queue.settle(deadline_s)

    def _line(self, request: LoginRequest) -> str:
        """Return the queue of a login; it does not depend on the client's claims."""
        if request.user == "job":
            identity = keys.check_job_key(request.password, self._job_secret)
            if identity is not None:
                return f"job {identity.user}"
            program = keys.check_episode_key(request.password, self._job_secret)
            if program is not None:
                return f"programs {program.user}"
        record = self._user(request.user)
        if record is not None and keys.is_same(record.key_hash, keys.key_hash(request.password)):
            return f"user {request.user}"
        return f"address {request.address}"

    def _excess(self, line: str, request: LoginRequest) -> str:
        """Return the reason to refuse a further login; empty if it is allowed."""
        kind, _, name = line.partition(" ")
        if kind == "user":
            left_s = self._connections.shut_out_s(name)
            if left_s:
                return f"shut out for {left_s:.0f} s more, for having sent too much"
            why = self._too_many(name)
            if why:
                return why
        if kind == "job":
            identity = keys.check_job_key(request.password, self._job_secret)
            has = self._connections.num_of(JobConnection.of(identity).name) if identity else 0
            owner = self._user(name)
            most = owner.max_actors if owner is not None else None
            if most is not None and has >= PROCESS_CONNECTIONS * most:
                return f"{has} connections of the job's processes, and it may have {most} of these"
        if kind == "programs":
            if self._connections.num_of_programs(name) >= USER_PROGRAMS:
                return f"{USER_PROGRAMS} connections of programs of user {name}"
            if self._program_rates.take(line, time.monotonic()) is None:
                return f"more than {PROGRAM_LOGINS_S:g} log-ins of programs a second"
        elif kind != "job" and self._rates.take(line, time.monotonic()) is None:
            return f"more than {LOGINS_S:g} log-ins a second: come again in some seconds"
        return ""

    def _too_many(self, name: str) -> str:
        """Return the reason to refuse a user or program a further connection; empty if it is
        allowed.
        """
        quota, has = self._user(name), self._connections.num_of(name)
        process = JobConnection.read(name)
        if process is not None and process.episode and has >= PROGRAM_CONNECTIONS:
            return f"{has} connections with the key of one episode"
        most = quota.max_connections if quota is not None else None
        if most is None or has < most:
            return ""
        return f"{has} connections, the quota is {most}: close some, or ask an admin"

    async def _refuse(self, message: Msg, request: LoginRequest, who: str, why: str) -> None:
        await message.respond(self._issuer.refuse(request, why))
        where = f"{request.client or 'a client'} from {request.address or 'nowhere'}"
        await self._audit.refused(who, "login", why, where)

    async def _answer(self, message: Msg, request: LoginRequest) -> None:
        try:
            admission = await self._authenticator.admit(request.user, request.password)
            if why := self._too_many(admission.name):  # others connected while this one waited
                raise AuthError(why)
        except AuthError as error:
            await self._refuse(message, request, request.user, error.message)
        except TinkermqError as error:  # unknown: the client tries again
            _log.error("login_undecided", user=request.user, error=error.message)
            await message.respond(self._issuer.refuse(request, "the users cannot be read now"))
        else:
            self._connections.expect(admission.name)
            await message.respond(self._issuer.admit(request, *admission))
