"""Commands of a pool's admin: `tinkermq init`, `user`, `register`, `backup` and `restore`."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from ...broker.calls import all_users, ask_users
from ...broker.client.connection import Broker
from ...broker.client.login import CREDENTIALS_VARIABLE, KEY_VARIABLE
from ...broker.credentials import PoolSecrets
from ...broker.jobs import JobStore
from ...broker.snapshots import Saved, restore_all, save_all
from ...schemas.user import (
    BOUNDS,
    AddUser,
    AuditList,
    AuditRequest,
    NameUser,
    NewKey,
    RotateKey,
    SetQuota,
    UserInfo,
    UserReply,
)
from ...schemas.wire.errors import AuthError, NotFoundError, StateError, counted
from ...schemas.wire.message import Message
from ...schemas.wire.subjects import user_name
from ..home import Home
from ..pool import Pool
from .output import print_json, print_note, print_plain, print_result, print_rows, print_text
from .session import COMMON, Common, with_pool

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
    """Add a user. The key is printed once and not stored.

    Parameters
    ----------
    user
        Name: lower-case letters, digits and '_'.
    role
        An admin manages users and can see and stop all runs.
    days
        Days until the key expires; 0: never.
    slots
        Most slots of the user's jobs at once; default: no limit.
    weight
        Share of the pool relative to other waiting users.
    """
    request = AddUser(user=user, role=role, days=days, max_slots=slots, weight=weight)
    return _show_new_key(common, "add", request)


def list_users(*, common: Common = COMMON) -> int:
    """List the users."""
    users = with_pool(common.nats_url, lambda pool: all_users(pool.broker))
    columns = ("user", "role", "key ends", "state", "slots", "weight", "runs", "storage")
    document = [user.model_dump() for user in users]
    return print_rows(document, columns, map(_cells, users), as_json=common.json)


def rotate(user: str, /, *, days: float = 365.0, common: Common = COMMON) -> int:
    """Replace a user's key. The old key and its connections end now.

    Parameters
    ----------
    user
        Name; every user may rotate their own key.
    days
        Days until the new key expires; 0: never.
    """
    return _show_new_key(common, "rotate", RotateKey(user=user, days=days))


def revoke(user: str, /, *, common: Common = COMMON) -> int:
    """Revoke a user's key for good and close the connections. Running jobs are not stopped.

    Parameters
    ----------
    user
        Name.
    """
    reply = _request_reply(common, "revoke", NameUser(user=user), UserReply)
    return print_result(reply.user.model_dump(), f"{user} is shut out", as_json=common.json)


def quota(
    user: str,
    /,
    *,
    slots: int | None = None,
    weight: float | None = None,
    max_priority: int | None = None,
    jobs: int | None = None,
    live_jobs: int | None = None,
    actors: int | None = None,
    stored_bytes: int | None = None,
    record_bytes: int | None = None,
    evaluations: int | None = None,
    tinker_tokens: int | None = None,
    requests: int | None = None,
    connections: int | None = None,
    subscriptions: int | None = None,
    messages_s: int | None = None,
    bytes_s: int | None = None,
    common: Common = COMMON,
) -> int:
    """Change a user's quota and print it; -1 means no limit.

    Parameters
    ----------
    user
        Name.
    slots
        Most slots of the user's jobs at once.
    weight
        Share of the pool relative to other waiting users.
    max_priority
        Highest priority that the user's runs may have.
    jobs
        Most jobs, including those that have ended.
    live_jobs
        Most runs that have not ended.
    actors
        Most processes of the user's jobs at once, including environment hosts.
    stored_bytes
        Most bytes at the broker: the limits of live jobs plus the data of ended ones.
    record_bytes
        Most bytes of the records of the user's jobs.
    evaluations
        Most stored evaluations of the user's jobs.
    tinker_tokens
        Most tokens computed in total for the user's programs on the Tinker API.
    requests
        Most concurrent requests to a service of the pool.
    connections
        Most connections with the user's key.
    subscriptions
        Most subscriptions of these connections together.
    messages_s
        Most messages per second from these connections.
    bytes_s
        Most bytes per second from these connections.
    """
    request = SetQuota(
        user=user,
        weight=weight,
        max_priority=max_priority,
        max_slots=slots,
        max_jobs=jobs,
        max_live_jobs=live_jobs,
        max_actors=actors,
        max_stored_bytes=stored_bytes,
        max_record_bytes=record_bytes,
        max_evaluations=evaluations,
        max_tinker_tokens=tinker_tokens,
        max_requests=requests,
        max_connections=connections,
        max_subscriptions=subscriptions,
        max_messages_s=messages_s,
        max_bytes_s=bytes_s,
    )
    info = _request_reply(common, "quota", request, UserReply).user
    bound = "no bound" if info.max_slots is None else counted(info.max_slots, "slot")
    others = ", ".join(
        f"{name.removeprefix('max_')} {_bound(getattr(info, name))}"
        for name in BOUNDS
        if name != "max_slots"
    )
    text = f"{user} has {bound}, weight {info.weight:g}\n{others}"
    return print_result(info.model_dump(), text, as_json=common.json)


def audit(*, last: int = 50, common: Common = COMMON) -> int:
    """Print the audit log: changes to users and refused requests.

    Parameters
    ----------
    last
        Number of newest records to print.
    """
    newest_first = _request_reply(common, "audit", AuditRequest(limit=last), AuditList).records
    records = newest_first[::-1]
    rows = [
        [
            datetime.fromtimestamp(record.time, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            record.who,
            record.what,
            record.target,
            record.outcome,
            record.detail,
        ]
        for record in records
    ]
    columns = ("when", "who", "what", "whom", "outcome", "detail")
    document = [record.model_dump() for record in records]
    return print_rows(document, columns, rows, as_json=common.json)


def _request_reply(common: Common, method: str, request: Message, reply: type[R]) -> R:
    return with_pool(common.nats_url, lambda pool: ask_users(pool.broker, method, request, reply))


def _show_new_key(common: Common, method: str, request: Message) -> int:
    reply = _request_reply(common, method, request, NewKey)
    if common.json:
        print_json({"user": reply.user, "api_key": reply.secret, "expires": reply.expires})
    else:
        print_text(
            f"the key of [bold]{reply.user}[/], until {_day(reply.expires)}, shown this once:"
        )
        print_text(f"  export {KEY_VARIABLE}={reply.secret}")
    return 0


def _cells(user: UserInfo) -> list[str]:
    state = "in"
    if user.revoked is not None:
        state = f"revoked {_day(user.revoked)}"
    elif user.expires is not None and user.expires < time.time():
        state = "key has expired"
    bounds = (user.max_slots, user.max_jobs, user.max_stored_bytes)
    slots, runs, stored = ("" if bound is None else _bound(bound) for bound in bounds)
    weight = f"{user.weight:g}"
    return [user.user, user.role, _day(user.expires), state, slots, weight, runs, stored]


def _bound(number: int | None) -> str:
    """Format a limit; large ones are bytes."""
    if number is None:
        return "no bound"
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if number >= size:
            return f"{number / size:g} {unit}"
    return str(number)


def _day(moment: float | None) -> str:
    return "never" if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d")


# `tinkermq init`: the secrets of a pool with authentication, and its first admin.


def init(
    *,
    home: Path | None = None,
    admin: str = "admin",
    days: float = 365.0,
    json: bool = False,
) -> int:
    """Create the secrets and first admin of a pool with authentication; print the key once.

    From then on, `tinkermq up` with this folder starts a broker that requires a key. A store of a
    pool without users is moved aside: users would not see its runs, nor nats-server its streams.

    Parameters
    ----------
    home
        Folder of the stack; default: $TINKERMQ_HOME, or ~/.local/share/tinkermq.
    admin
        Name of the first admin.
    days
        Days until the admin's key expires; 0: never.
    json
        Print JSON.
    """
    place = Home(home.resolve() if home else None)
    folder, aside = place.secrets, place.store.with_name("nats-without-users")
    if place.is_locked() and not PoolSecrets(folder).exist:
        raise StateError("a pool without users is up", hint="stop it first: `tinkermq down`")
    key = PoolSecrets(folder).create(user_name(admin), days)
    if (place.store / "jetstream" / "jetstream" / "$G").exists():  # the account without users
        place.store.rename(aside)
    if json:
        print_json({"user": admin, "api_key": key, "secrets": str(folder)})
        return 0
    print_plain(f"secrets are in {folder}, readable only by you")
    print_text(f"  the key of [bold]{admin}[/], shown this once:")
    print_text(f"  export {KEY_VARIABLE}={key}")
    print_plain(f"  to run your own nats-server, include {PoolSecrets(folder).accounts}")
    if aside.exists():
        print_plain(f"  runs of the pool without users are kept in {aside}")
    print_text("  [bold]tinkermq up[/]                start the pool, with authentication")
    print_text("  [bold]tinkermq user add NAME[/]     make a user")
    return 0


# `tinkermq backup` and `tinkermq restore`: the broker's data as files.

_MOVING = frozenset({"STARTING", "RUNNING"})


def backup(folder: Path, /, *, common: Common = COMMON) -> int:
    """Write all data of the broker into a folder. Copy the run folders separately.

    In a pool with users it needs the auth service's credentials: TINKERMQ_CREDENTIALS.

    Parameters
    ----------
    folder
        New or empty folder; it will hold all data of all users.
    """

    async def work(pool: Pool) -> list[Saved]:
        _check_rights(pool.broker)
        for name in await _moving(pool.broker):
            print_note(
                f"{name} is running: pause it during the backup, or its run folder will not match"
            )
        return await save_all(pool.broker, folder)

    return _print_saved(with_pool(common.nats_url, work), f"saved to {folder}", as_json=common.json)


def restore(folder: Path, /, *, common: Common = COMMON) -> int:
    """Load a backup into a new server, before the other services are started.

    In a pool with users it needs the auth service's credentials: TINKERMQ_CREDENTIALS.

    Parameters
    ----------
    folder
        Folder that `tinkermq backup` has written.
    """

    async def work(pool: Pool) -> list[Saved]:
        _check_rights(pool.broker)
        return await restore_all(pool.broker, folder)

    return _print_saved(with_pool(common.nats_url, work), "restored", as_json=common.json)


def _check_rights(broker: Broker) -> None:
    if broker.is_limited:
        raise AuthError(
            f"{broker.user} may not read and write all data of the pool",
            hint=f"set {CREDENTIALS_VARIABLE} to the file auth.creds of `tinkermq init`",
        )


async def _moving(broker: Broker) -> list[str]:
    try:
        return [job.name for job in await JobStore(broker).live() if job.state in _MOVING]
    except NotFoundError:  # a server that no scheduler has used yet
        return []


def _print_saved(saved: list[Saved], done: str, *, as_json: bool) -> int:
    num_messages = sum(stream.num_messages for stream in saved)
    num_bytes = sum(stream.num_bytes for stream in saved)
    document = [
        {"stream": stream.name, "messages": stream.num_messages, "bytes": stream.num_bytes}
        for stream in saved
    ]
    text = f"{len(saved)} streams, {num_messages:,} messages, {num_bytes:,} bytes {done}"
    return print_result(document, text, as_json=as_json)
