"""Decides on each log-in: who is it, and with which permissions."""

import base64
import json
import time
import uuid
from typing import Any, NamedTuple, cast

import nkeys

from ...broker.client.keys import (
    EPISODE_KEY,
    check_episode_key,
    check_job_key,
    id_of_invitation,
    is_same,
    key_hash,
    user_of_key,
)
from ...broker.credentials import ACCOUNT
from ...broker.jobs import JobStore, is_final
from ...broker.permissions import (
    Permissions,
    admin_permissions,
    episode_permissions,
    invited_permissions,
    job_permissions,
    user_permissions,
)
from ...broker.user_records import UserStore
from ...schemas.user import Invitation, UserRecord
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import AuthError, MessageError, TinkermqError
from .connections import JobConnection


class Admission(NamedTuple):
    """Whom to let in."""

    name: str
    permissions: Permissions
    expires: float | None = None
    """When the server shall close the connection."""


class Authenticator:
    """Checks API keys, job keys and invitations."""

    def __init__(self, users: UserStore, jobs: JobStore, job_secret: bytes) -> None:
        """Look users and jobs up in their stores, at each log-in anew."""
        self._users = users
        self._jobs = jobs
        self._job_secret = job_secret

    async def admit(self, user: str, secret: str) -> Admission:
        """Return what somebody may do; raises AuthError, which tells why not."""
        if user == "job":
            of_program = secret.startswith(EPISODE_KEY)
            return await (self._program(secret) if of_program else self._process(secret))
        if user == "invited":
            return await self._invited(secret)
        return await self._user(user, secret)

    async def _user(self, user: str, key: str) -> Admission:
        try:
            named = user_of_key(key)
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
        """Let an actor in for as long as this attempt of its job has it."""
        identity = check_job_key(key, self._job_secret)
        if identity is None:
            raise AuthError("no job key of this pool")
        record = await self._jobs.find_by_id(identity.user, identity.job)
        if record is None or is_final(record) or record.attempt != identity.attempt:
            raise AuthError("the key of a job that has ended")
        if not any(
            (one.name, one.role) == (identity.actor, identity.role) for one in record.actors
        ):
            raise AuthError("the key of an actor that the job no longer has")
        name = JobConnection.of(identity).name
        return Admission(
            name,
            job_permissions(identity, record.follow, record.judge, record.teachers.values()),
        )

    async def _program(self, key: str) -> Admission:
        """Let in who has the key of an episode, for as long as its job runs."""
        identity = check_episode_key(key, self._job_secret)
        if identity is None:
            raise AuthError("no key of an episode of this pool")
        record = await self._jobs.find_by_id(identity.user, identity.job)
        if record is None or is_final(record):
            raise AuthError("the key of an episode whose job has ended")
        name = JobConnection(identity.user, identity.job, record.attempt, identity.episode).name
        return Admission(name, episode_permissions(identity))

    async def _invited(self, code: str) -> Admission:
        number = id_of_invitation(code)
        invitation = await self._users.invitation(number) if number else None
        if invitation is None:
            raise AuthError("no invitation")
        check_invitation(invitation, code)
        return Admission("invited", invited_permissions(), invitation.expires)


def check_record(record: UserRecord | None, key: str) -> None:
    """Raise AuthError unless `key` is the key of the user, and lets him in now."""
    if record is None or not is_same(record.key_hash, key_hash(key)):
        raise AuthError("an unknown key")
    if record.revoked is not None:
        raise AuthError("a revoked user")
    if record.expires is not None and record.expires < time.time():
        raise AuthError("a key that has expired")


def check_invitation(invitation: Invitation, code: str) -> None:
    """Raise AuthError unless `code` is that of the invitation, and somebody may still use it."""
    if not is_same(invitation.code_hash, key_hash(code)):
        raise AuthError("no invitation", hint="ask an admin for one")
    if invitation.uses_left < 1 or invitation.expires < time.time():
        raise AuthError("an invitation that is used up", hint="ask an admin for another")


# The signed answers that nats-server takes from an auth callout, in its own form of JWT.
#
# Header, claims and an ed25519 signature by an nkey, each in base64url; see the server's
# documentation of auth callout. What the server sends is read unchecked: nobody else can publish
# on the callout's subject.

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_UNLIMITED = {"data": -1, "payload": -1}


class LoginRequest(NamedTuple):
    """What nats-server tells of somebody who wants in."""

    server: str
    """Id of the server."""
    nkey: str
    """The key under which the server files this connection."""
    user: str
    password: str
    address: str
    """Host it comes from."""
    client: str
    """Name that the client gave itself."""


def read_request(token: bytes) -> LoginRequest:
    """Read the server's request; raises MessageError."""
    try:
        nats = cast("dict[str, Any]", read_json(_unpacked(token.split(b".")[1]))["nats"])
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
    """Signs answers in the name of the pool's accounts."""

    def __init__(self, seed: str) -> None:
        """`seed` is that of the account key which the server's configuration names."""
        self._pair = nkeys.from_seed(bytearray(seed.encode()))
        self._public = self._pair.public_key.decode()

    def admit(
        self, request: LoginRequest, name: str, permissions: Permissions, expires: float | None
    ) -> bytes:
        """Return the answer that lets a connection in, until `expires`."""
        claims: dict[str, Any] = {
            "sub": request.nkey,
            "aud": ACCOUNT,
            "name": name,
            "nats": {
                "type": "user",
                "version": 2,
                "subs": permissions.max_subscriptions,
                **_UNLIMITED,
                **permissions.claims(),
            },
        }
        if expires is not None:
            claims["exp"] = int(expires)
        return self._answer(request, jwt=self._signed(claims))

    def refuse(self, request: LoginRequest, why: str) -> bytes:
        """Return the answer that keeps a connection out; the server logs `why`."""
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
        text = b".".join(_packed(json.dumps(part).encode()) for part in (_HEADER, stamped))
        return (text + b"." + _packed(self._pair.sign(text))).decode()


def _text(value: object) -> str:
    """Return what a client says of himself as printable text; it may be anything."""
    text = value if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "?" for char in text)


def _packed(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _unpacked(data: bytes) -> bytes:
    return base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4))
