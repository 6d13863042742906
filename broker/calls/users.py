"""What may be asked of the auth service about users, on behalf of the connection's user."""

from typing import TypeVar

from ...schemas.user import ListUsers, UserInfo, UserList
from ...schemas.wire.errors import BrokerError
from ...schemas.wire.message import Message
from ..client.connection import Broker
from ..client.faults import shown_url
from .repeated import call_service

R = TypeVar("R", bound=Message)

TIMEOUT_S = 20.0
_BACK_S = 6.0
"""For how long an auth service may be away that a pool with users has."""


async def ask_users(broker: Broker, method: str, request: Message, reply: type[R]) -> R:
    """Ask on `rpc.<user>.users.<method>`; every request may be sent again, and is.

    Raises AuthError where only admins may, BrokerError at a pool without users.
    """
    return await call_service(
        broker,
        broker.rpc("users", method),
        request,
        reply,
        timeout_s=TIMEOUT_S,
        absent_s=_BACK_S if broker.is_limited else 0.0,
        absent=BrokerError(
            f"the pool at {shown_url(broker.url)} has no users: no auth service answers",
            hint="`tinkermq init` makes the secrets of a pool with authentication; where "
            "it has them, see `tinkermq doctor`",
        ),
        waiting_for="the auth service",
    )


async def all_users(broker: Broker) -> list[UserInfo]:
    """Return all users by name, for admins."""
    users: list[UserInfo] = []
    while True:
        after = users[-1].user if users else ""
        page = await ask_users(broker, "list", ListUsers(after=after), UserList)
        users += page.users
        if not page.more or not page.users:
            return users
