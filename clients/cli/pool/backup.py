"""`tinkermq backup` and `tinkermq restore`: what the broker stores, as files, and back again."""

from pathlib import Path

from ....broker.client.connection import Broker
from ....broker.client.login import CREDENTIALS_VARIABLE
from ....broker.jobs import JobStore
from ....broker.snapshots import Saved, restore_all, save_all
from ....schemas.wire.errors import AuthError, NotFoundError
from ...pool import Pool
from ..options import COMMON, Common
from ..output import note, print_json, say
from ..session import with_pool

_MOVING = frozenset({"STARTING", "RUNNING"})


def backup(folder: Path, /, *, common: Common = COMMON) -> int:
    """Write what the broker stores into a folder; the folders of the runs are copied beside it.

    In a pool with users it needs the auth service's credentials: TINKERMQ_CREDENTIALS.

    Parameters
    ----------
    folder
        New or empty folder; it will hold everything that users stored.
    """

    async def work(pool: Pool) -> list[Saved]:
        _check_rights(pool.broker)
        for name in await _moving(pool.broker):
            note(f"{name} runs: its folder and this back-up fit only if it is paused meanwhile")
        return await save_all(pool.broker, folder)

    return _told(with_pool(common.nats_url, work), f"saved to {folder}", as_json=common.json)


def restore(folder: Path, /, *, common: Common = COMMON) -> int:
    """Bring a back-up to a new server, before the other services are started.

    In a pool with users it needs the auth service's credentials: TINKERMQ_CREDENTIALS.

    Parameters
    ----------
    folder
        What `tinkermq backup` has written.
    """

    async def work(pool: Pool) -> list[Saved]:
        _check_rights(pool.broker)
        return await restore_all(pool.broker, folder)

    return _told(with_pool(common.nats_url, work), "restored", as_json=common.json)


def _check_rights(broker: Broker) -> None:
    if broker.is_limited:
        raise AuthError(
            f"{broker.user} may not read and write all that the pool has stored",
            hint=f"set {CREDENTIALS_VARIABLE} to the file auth.creds of `tinkermq init`",
        )


async def _moving(broker: Broker) -> list[str]:
    try:
        return [one.name for one in await JobStore(broker).live() if one.state in _MOVING]
    except NotFoundError:  # a server that no scheduler has seen yet
        return []


def _told(saved: list[Saved], done: str, *, as_json: bool) -> int:
    if as_json:
        print_json(
            [
                {"stream": one.name, "messages": one.num_messages, "bytes": one.num_bytes}
                for one in saved
            ]
        )
        return 0
    num_messages, num_bytes = (
        sum(one.num_messages for one in saved),
        sum(one.num_bytes for one in saved),
    )
    say(f"{len(saved)} streams, {num_messages:,} messages, {num_bytes:,} bytes {done}")
    return 0
