"""Users and invitations: kept in a KV bucket that only the auth service writes.

The scheduler reads a user's quota from here (`UserStore.get`); a pool without authentication has
no such bucket, and `get` returns None.
"""

from collections.abc import Callable
from typing import TypeVar

from ...schemas.user import Invitation, UserRecord
from ...schemas.wire.errors import NotFoundError
from ...schemas.wire.message import Message
from ...schemas.wire.subjects import AUDIT as AUDIT_SUBJECT
from ...schemas.wire.subjects import BUCKET_USERS, STREAM_AUDIT
from ..client.connection import Broker
from ..jetstream.kv import Bucket
from ..jetstream.streams import bucket_config, ensure_stream
from .audit import audit_configs

M = TypeVar("M", bound=Message)

USER, _INVITATION = "user", "invitation"

__all__ = ["AUDIT_SUBJECT", "STREAM_AUDIT", "USER", "UserStore", "create_user_stores"]


async def create_user_stores(broker: Broker) -> None:
    """Make the bucket of users and the audit streams; harmless when they are there."""
    await ensure_stream(broker, bucket_config(BUCKET_USERS, "Users, by hash of their key"))
    for config in audit_configs():
        await ensure_stream(broker, config)


class UserStore:
    """The users of a pool."""

    def __init__(self, broker: Broker) -> None:
        """Work on the bucket that `create_user_stores` has made."""
        self._users = Bucket(broker, BUCKET_USERS, UserRecord)
        self._invitations = Bucket(broker, BUCKET_USERS, Invitation)

    async def get(self, user: str) -> UserRecord | None:
        """Return a user, or None; None as well at a pool without users."""
        try:
            entry = await self._users.find(f"{USER}.{user}")
        except NotFoundError:
            return None
        return None if entry is None else entry.value

    async def list(self) -> list[UserRecord]:
        """Return all users, by name."""
        return [entry.value for entry in await self._users.items(USER)]

    async def create(self, record: UserRecord) -> None:
        """Make a user; raises ConflictError when the name is taken."""
        await self._users.create(f"{USER}.{record.user}", record)

    async def change(self, user: str, change: Callable[[UserRecord], UserRecord]) -> UserRecord:
        """Replace a user's record by `change` of it; raises NotFoundError."""
        return await _change(self._users, f"{USER}.{user}", f"user {user!r}", change)

    async def invite(self, number: str, invitation: Invitation) -> None:
        """Keep an invitation."""
        await self._invitations.create(f"{_INVITATION}.{number}", invitation)

    async def invitation(self, number: str) -> Invitation | None:
        """Return an invitation, or None."""
        entry = await self._invitations.find(f"{_INVITATION}.{number}")
        return None if entry is None else entry.value

    async def change_invitation(
        self, number: str, change: Callable[[Invitation], Invitation]
    ) -> Invitation:
        """Replace an invitation by `change` of it; raises NotFoundError."""
        key = f"{_INVITATION}.{number}"
        return await _change(self._invitations, key, "this invitation", change)


async def _change(bucket: Bucket[M], key: str, what: str, change: Callable[[M], M]) -> M:
    def changed(current: M | None) -> M:
        if current is None:
            raise NotFoundError(
                f"there is no {what}", hint="see who is there: `tinkermq user list`"
            )
        return change(current)

    return (await bucket.change(key, changed)).value
