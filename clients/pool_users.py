"""The users of a pool with authentication, in Python: `PoolUsers`, `AsyncPoolUsers`."""

from typing import Any, Literal

from ..broker.calls import all_users, ask_users
from ..schemas.user import (
    AddUser,
    NameUser,
    NewKey,
    RotateKey,
    SetQuota,
    UserInfo,
    UserReply,
)
from ..schemas.wire.errors import ConfigError
from .address import parse_broker_url
from .base import PoolClient, SyncTwin, make_sync
from .validation import did_you_mean


class AsyncPoolUsers(PoolClient):
    """The users of a pool, for async code; see `PoolUsers`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Name the pool's broker."""
        super().__init__(parse_broker_url(url), api_key)

    async def list(self) -> list[UserInfo]:
        """Return all users by name: role, expiry of the key, quota."""
        return await all_users((await self._connected()).broker)

    async def add(
        self,
        user: str,
        role: Literal["user", "admin"] = "user",
        days: float = 365.0,
        slots: int | None = None,
        weight: float = 1.0,
    ) -> str:
        """Add a user; return the key, which is not stored. With `days` 0 it never expires."""
        request = AddUser(user=user, role=role, days=days, max_slots=slots, weight=weight)
        return (await self._ask("add", request, NewKey)).secret

    async def rotate(self, user: str, days: float = 365.0) -> str:
        """Replace a user's key and return the new one; the old one ends now."""
        return (await self._ask("rotate", RotateKey(user=user, days=days), NewKey)).secret

    async def revoke(self, user: str) -> UserInfo:
        """Revoke a user's key for good. Running jobs are not stopped."""
        return (await self._ask("revoke", NameUser(user=user), UserReply)).user

    async def quota(self, user: str, bounds: dict[str, float]) -> UserInfo:
        """Change a user's quota (`{"max_slots": 8, "weight": 2}`) and return the user.

        -1 means no limit. Raises ConfigError for an unknown limit.
        """
        known = SetQuota.model_fields.keys() - {"user"}
        if unknown := sorted(bounds.keys() - known):
            raise ConfigError(
                f"there is no bound {unknown[0]!r}", hint=did_you_mean(unknown[0], sorted(known))
            )
        request = SetQuota.model_validate({"user": user, **bounds})
        return (await self._ask("quota", request, UserReply)).user

    async def _ask(self, method: str, request: Any, reply: Any) -> Any:
        return await ask_users((await self._connected()).broker, method, request, reply)


class PoolUsers(SyncTwin[AsyncPoolUsers]):
    """The users of a pool with authentication, for admins; the same as `tinkermq user`.

    Raises AuthError for users who are not admins, BrokerError at a pool without users.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Name the pool's broker; the key is $TINKERMQ_API_KEY unless it is given."""
        super().__init__(AsyncPoolUsers(url, api_key))

    list = make_sync(AsyncPoolUsers.list)
    add = make_sync(AsyncPoolUsers.add)
    rotate = make_sync(AsyncPoolUsers.rotate)
    revoke = make_sync(AsyncPoolUsers.revoke)
    quota = make_sync(AsyncPoolUsers.quota)
