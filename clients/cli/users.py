"""`tinkermq user` and `tinkermq register`: the users of a pool with authentication."""

import os
import sys
import time
from datetime import UTC, datetime
from typing import Literal, TypeVar

from ...broker.login import INVITATION_VARIABLE, KEY_VARIABLE
from ...broker.user_calls import ask_users
from ...schemas.errors import AuthError
from ...schemas.message import Empty, Message
from ...schemas.user import (
    AddUser,
    AuditList,
    AuditRequest,
    Invite,
    NameUser,
    NewKey,
    Register,
    RotateKey,
    SetQuota,
    UserInfo,
    UserList,
    UserReply,
)
from ..pool import Pool
from .options import COMMON, Common
from .output import print_json, print_table, say
from .session import with_pool

R = TypeVar("R", bound=Message)


def add(
    user: str,
    /,
    *,
    role: Literal["user", "admin"] = "user",
    days: float = 365.0,
    slots: int | None = None,
    weight: float = 1.0,
    common: Common = COMMON,
) -> int:
    """Make a user; the key is shown once and kept nowhere.

    Parameters
    ----------
    user
        Name: lower-case letters, digits and '_'.
    role
        An admin manages users, and sees and stops everybody's jobs.
    days
        Life of the key; 0: for ever.
    slots
        Slots that the user's jobs may hold at once; default: no bound.
    weight
        Share of the pool in relation to others who wait.
    """
    request = AddUser(user=user, role=role, days=days, max_slots=slots, weight=weight)
    return _show_key(_ask(common, "add", request, NewKey), as_json=common.json)


def list_users(*, common: Common = COMMON) -> int:
    """List the users."""
    users = _ask(common, "list", Empty(), UserList).users
    if common.json:
        print_json([user.model_dump() for user in users])
    else:
        columns = ("user", "role", "key ends", "state", "slots", "weight")
        print_table(columns, [_cells(user) for user in users])
    return 0


def rotate(user: str, /, *, days: float = 365.0, common: Common = COMMON) -> int:
    """Replace a user's key by a new one; the old one ends now, and so do its connections.

    Parameters
    ----------
    user
        Name; everybody may rotate the own key.
    days
        Life of the new key; 0: for ever.
    """
    reply = _ask(common, "rotate", RotateKey(user=user, days=days), NewKey)
    return _show_key(reply, as_json=common.json)


def revoke(user: str, /, *, common: Common = COMMON) -> int:
    """Shut a user out for good and close his connections; his jobs go on until they are stopped.

    Parameters
    ----------
    user
        Name.
    """
    reply = _ask(common, "revoke", NameUser(user=user), UserReply)
    return _show_user(reply.user, f"{user} is shut out", as_json=common.json)


def quota(
    user: str,
    /,
    *,
    slots: int | None = None,
    weight: float | None = None,
    max_priority: int | None = None,
    common: Common = COMMON,
) -> int:
    """Change a user's share of the pool.

    Parameters
    ----------
    user
        Name.
    slots
        Slots that the user's jobs may hold at once; -1: no bound.
    weight
        Share in relation to others who wait.
    max_priority
        Highest priority that the user's jobs may have.
    """
    request = SetQuota(user=user, max_slots=slots, weight=weight, max_priority=max_priority)
    info = _ask(common, "quota", request, UserReply).user
    bound = "no bound" if info.max_slots is None else f"{info.max_slots} slots"
    return _show_user(info, f"{user} has {bound}, weight {info.weight:g}", as_json=common.json)


def invite(
    *,
    uses: int = 1,
    days: float = 7.0,
    key_days: float = 365.0,
    slots: int | None = None,
    common: Common = COMMON,
) -> int:
    """Make an invitation, with which people register themselves; its code is shown once.

    Parameters
    ----------
    uses
        How many may register with it.
    days
        Its life.
    key_days
        Life of their keys; 0: for ever.
    slots
        Slots that the jobs of each may hold at once; default: no bound.
    """
    request = Invite(uses=uses, days=days, key_days=key_days, max_slots=slots)
    reply = _ask(common, "invite", request, NewKey)
    if common.json:
        print_json({"code": reply.secret, "expires": reply.expires})
    else:
        say(f"an invitation for {uses}, until {_day(reply.expires)}, shown this once:")
        say(f"  export {INVITATION_VARIABLE}={reply.secret}")
        say("  tinkermq register NAME")
    return 0


def audit(*, last: int = 50, common: Common = COMMON) -> int:
    """Print what was done to users, and what was refused to whom.

    Parameters
    ----------
    last
        How many of the newest records.
    """
    newest_first = _ask(common, "audit", AuditRequest(limit=last), AuditList).records
    records = newest_first[::-1]
    if common.json:
        print_json([record.model_dump() for record in records])
    else:
        columns = ("when", "who", "what", "whom", "outcome", "detail")
        rows = [
            [_moment(one.time), one.who, one.what, one.target, one.outcome, one.detail]
            for one in records
        ]
        print_table(columns, rows)
    return 0


def register(user: str, /, *, common: Common = COMMON) -> int:
    """Become a user by an invitation: its code is read from $TINKERMQ_INVITATION, or from stdin.

    Parameters
    ----------
    user
        Wanted name.
    """
    code = os.environ.get(INVITATION_VARIABLE) or sys.stdin.readline().strip()
    if not code:
        raise AuthError(
            "there is no invitation", hint=f"set {INVITATION_VARIABLE}, or write it to stdin"
        )
    reply = _ask(common, "register", Register(code=code, user=user), NewKey, api_key=code)
    return _show_key(reply, as_json=common.json)


def _ask(
    common: Common, method: str, request: Message, reply: type[R], *, api_key: str | None = None
) -> R:
    async def work(pool: Pool) -> R:
        return await ask_users(pool.broker, method, request, reply)

    return with_pool(common.nats_url, work, api_key=api_key)


def _show_key(reply: NewKey, *, as_json: bool) -> int:
    if as_json:
        print_json({"user": reply.user, "api_key": reply.secret, "expires": reply.expires})
    else:
        say(f"the key of [bold]{reply.user}[/], until {_day(reply.expires)}, shown this once:")
        say(f"  export {KEY_VARIABLE}={reply.secret}")
    return 0


def _show_user(info: UserInfo, text: str, *, as_json: bool) -> int:
    if as_json:
        print_json(info.model_dump())
    else:
        say(text)
    return 0


def _cells(user: UserInfo) -> list[str]:
    state = "in"
    if user.revoked is not None:
        state = f"revoked {_day(user.revoked)}"
    elif user.expires is not None and user.expires < time.time():
        state = "key has expired"
    slots = "" if user.max_slots is None else str(user.max_slots)
    return [user.user, user.role, _day(user.expires), state, slots, f"{user.weight:g}"]


def _day(moment: float | None) -> str:
    return "never" if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d")


def _moment(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S")
