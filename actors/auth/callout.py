"""Decides on each log-in: who is it, and with which permissions."""

import time
from typing import NamedTuple

from ...broker.client.keys import (
    EPISODE_KEY,
    check_episode_key,
    check_job_key,
    id_of_invitation,
    is_same,
    key_hash,
    user_of_key,
)
from ...broker.jobs import JobStore, is_final
from ...broker.users.permissions import (
    Permissions,
    admin_permissions,
    episode_permissions,
    invited_permissions,
    job_permissions,
    user_permissions,
)
from ...broker.users.records import UserStore
from ...schemas.user import Invitation, UserRecord
from ...schemas.wire.errors import AuthError, TinkermqError
from .job_ends import JobConnection


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
