"""What may be asked of the auth service about users, on behalf of the connection's user."""

from typing import TypeVar

from ..schemas.errors import BrokerError, NotFoundError
from ..schemas.message import Message
from ..schemas.user import ListUsers, UserInfo, UserList
from .connection import Broker
from .faults import shown_url
from .rpc import call

R = TypeVar("R", bound=Message)

TIMEOUT_S = 20.0


async def ask_users(broker: Broker, method: str, request: Message, reply: type[R]) -> R:
    """Ask on `rpc.<user>.users.<method>`.

    Raises AuthError where only admins may, BrokerError at a pool without users.
    """
    subject = broker.rpc("users", method)
    try:
        return await call(
            broker,
            subject,
            request,
            reply,
            timeout_s=TIMEOUT_S,
            waiting_for="the auth service",
        )
    except NotFoundError as error:
        if subject not in error.message:
            raise  # the service tells of somebody else who is not there
        raise BrokerError(
            f"the pool at {shown_url(broker.url)} has no users: no auth service answers",
            hint="`tinkermq init` makes the secrets of a pool with authentication; where it has "
            "them, see `tinkermq doctor`",
        ) from error


async def all_users(broker: Broker) -> list[UserInfo]:
    """Return all users by name, for admins."""
    users: list[UserInfo] = []
    while True:
        after = users[-1].user if users else ""
        page = await ask_users(broker, "list", ListUsers(after=after), UserList)
        users += page.users
        if not page.more or not page.users:
            return users
