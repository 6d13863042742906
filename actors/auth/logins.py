"""Answers log-ins, those of different people in turn.

Who asks to be let in is told from his key before anything is looked up: each user has a queue of
his own, each user's processes have one, and those without a key that is known have one for each
address they come from. A queue is bounded and so is the rate at which it is answered; who is beyond
that hears so a few times a second and is left to the server's own time limit otherwise, which costs
nothing here.
"""

import time
from collections.abc import Callable

import structlog
from nats.aio.msg import Msg

from ...broker.client.keys import check_episode_key, check_job_key, is_same, key_hash
from ...broker.fair_queue import FairQueue, Rates
from ...broker.user_records import Audit
from ...schemas.user import UserRecord
from ...schemas.wire.errors import AuthError, MessageError, TinkermqError
from .callout import Authenticator, ClaimIssuer, LoginRequest, read_request
from .connections import JobConnection, UserConnections

LOGINS_S, LOGINS_AT_ONCE = 20.0, 200
"""Of one user: in the long run, and after a time without any."""
PROCESS_CONNECTIONS = 8
"""For each actor that a job may have, under the name of the job."""
PROGRAM_CONNECTIONS = 16
"""With the key of one episode: one for each gateway that it is used at."""
USER_PROGRAMS = 4096
"""With keys of episodes of one user."""
PROGRAM_LOGINS_S, PROGRAM_LOGINS_AT_ONCE = 100.0, 2000
"""With keys of episodes of one user: a job starts many at once."""
_RUNNING = 16
_REFUSALS_S = 50.0
_TURNED_AWAY = "turned away"
"""The line of all who are refused before they are looked up: the audit may be slow."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Logins:
    """Answers the server's questions, each in a task of its own."""

    def __init__(
        self,
        authenticator: Authenticator,
        issuer: ClaimIssuer,
        audit: Audit,
        connections: UserConnections,
        user: Callable[[str], UserRecord | None],
        job_secret: bytes,
    ) -> None:
        """Let `authenticator` decide; `user` knows the records of users without asking anybody."""
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

    def take(self, message: Msg) -> None:
        """Begin to answer one question, or turn somebody away who asks too often."""
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
            who = _named(line, request)
            self._queue.submit(_TURNED_AWAY, lambda: self._refuse(message, request, who, why))

    async def settle(self, deadline_s: float) -> None:
        """Give what runs some time to end."""
        await self._queue.settle(deadline_s)

    def _line(self, request: LoginRequest) -> str:
        """Return in which line somebody waits: in nobody else's, whatever he says of himself."""
        if request.user == "job":
            identity = check_job_key(request.password, self._job_secret)
            if identity is not None:
                return f"job {identity.user}"
            program = check_episode_key(request.password, self._job_secret)
            if program is not None:
                return f"programs {program.user}"
        record = self._user(request.user)
        if record is not None and is_same(record.key_hash, key_hash(request.password)):
            return f"user {request.user}"
        return f"address {request.address}"

    def _excess(self, line: str, request: LoginRequest) -> str:
        """Say why one more log-in is too much; empty if it is not."""
        kind, _, name = line.partition(" ")
        if kind == "user":
            left_s = self._connections.shut_out_s(name)
            if left_s:
                return f"shut out for {left_s:.0f} s more, for having sent too much"
            why = self._too_many(name)
            if why:
                return why
        if kind == "job":
            identity = check_job_key(request.password, self._job_secret)
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
        """Say that a user or program has all the connections there may be; empty if not."""
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
        await self._audit.refused(who, "login", why, _where(request))

    async def _answer(self, message: Msg, request: LoginRequest) -> None:
        try:
            admission = await self._authenticator.admit(request.user, request.password)
            if why := self._too_many(admission.name):  # others came in while this one waited
                raise AuthError(why)
        except AuthError as error:
            await self._refuse(message, request, request.user, error.message)
        except TinkermqError as error:  # not known: the client asks again
            _log.error("login_undecided", user=request.user, error=error.message)
            await message.respond(self._issuer.refuse(request, "the users cannot be read now"))
        else:
            self._connections.expect(admission.name)
            await message.respond(self._issuer.admit(request, *admission))


def _named(line: str, request: LoginRequest) -> str:
    """Return who is named as refused: somebody with a key, or what he called himself."""
    kind, _, name = line.partition(" ")
    return request.user if kind == "address" else name


def _where(request: LoginRequest) -> str:
    return f"{request.client or 'a client'} from {request.address or 'nowhere'}"
