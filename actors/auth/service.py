"""The auth service's life: it holds three connections and answers on all of them.

In the account of the callout it hears of each log-in; in the system account it closes connections;
in the pool's own account it keeps the users, answers admins and nodes, and holds the door.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

from nats.aio.client import Client

from ...broker.addresses import server_urls
from ...broker.audit import Audit
from ...broker.complaints import RECONNECT_WAIT_S
from ...broker.credentials import SECRETS_VARIABLE, PoolSecrets
from ...broker.jobs import JobStore
from ...broker.login import tls_options
from ...broker.process import erase_variable
from ...broker.users import UserStore, create_user_stores
from ...schemas.errors import ConfigError, ConflictError
from ..runtime import ActorContext
from .callout import Gate
from .claims import Issuer
from .connections import LOOK_S, Connections
from .desk import UserDesk
from .door import Door
from .job_ends import EVERY_S, GRACE_S, JobEnds
from .job_keys import JobKeys
from .known import KnownUsers
from .logins import Logins
from .storage_bounds import StorageBounds

CALLOUT = "$SYS.REQ.USER.AUTH"
_SETTLE_S = 1.0


async def run(context: ActorContext) -> None:
    """Serve until `context.stopping` is set."""
    folder = erase_variable(SECRETS_VARIABLE)
    if not folder:
        raise ConfigError(
            f"${SECRETS_VARIABLE} is not set",
            hint="it names the folder of secrets that `tinkermq init` has made",
        )
    await serve(context, PoolSecrets(Path(folder)))


async def serve(
    context: ActorContext,
    secrets: PoolSecrets,
    *,
    look_s: float = EVERY_S,
    grace_s: float = GRACE_S,
    load_s: float = LOOK_S,
) -> None:
    """Serve with these secrets until `context.stopping` is set.

    Every `look_s` the connections of jobs that ended more than `grace_s` ago are closed; every
    `load_s` it is looked who sends too much.
    """
    broker = context.broker
    await create_user_stores(broker)
    users, jobs, audit = UserStore(broker), JobStore(broker), Audit(broker)
    with contextlib.suppress(ConflictError):  # made at the first start
        await users.create(secrets.first_admin())
    issuer = Issuer(secrets.seed("issuer"))
    job_secret = secrets.job_secret()
    gate = Gate(users, jobs, job_secret)
    system = await _side_connection(broker.url, "auth-sys", secrets.seed("sys"))
    callout = await _side_connection(broker.url, "auth-callout", secrets.seed("callout"))
    known = KnownUsers(broker)
    await known.open()
    door = Door(broker, audit, StorageBounds(broker, known), known.requests)
    connections = Connections(system, audit, known.get, look_s=load_s)
    context.service.share.bound = known.requests
    logins = Logins(gate, issuer, audit, connections, known.get, job_secret)
    try:
        await connections.start()
        await UserDesk(users, audit, system).open(context.service)
        await JobKeys(jobs, job_secret).open(context.service)
        await door.open()
        await cast("Any", callout).subscribe(CALLOUT, queue="auth", cb=logins.take)
        await callout.flush()
        context.set_state("working")
        async with asyncio.TaskGroup() as tasks:
            ends = JobEnds(system, jobs, every_s=look_s, grace_s=grace_s)
            looking = (
                tasks.create_task(ends.run(), name="connections of ended jobs"),
                tasks.create_task(connections.run(), name="load of connections"),
                tasks.create_task(known.run(), name="records of users"),
            )
            await context.stopping.wait()
            for task in looking:
                task.cancel()
        await door.close()
        await logins.settle(_SETTLE_S)
    finally:
        await known.close()
        await callout.close()
        await system.close()


async def _side_connection(url: str, name: str, seed: str) -> Client:
    """Connect to an account that is not the pool's; it has no JetStream."""
    client = Client()
    options: dict[str, Any] = {"nkeys_seed_str": seed, **tls_options(url)}
    await cast("Any", client).connect(
        server_urls(url),
        name=name,
        max_reconnect_attempts=-1,
        reconnect_time_wait=RECONNECT_WAIT_S,
        connect_timeout=2,
        **options,
    )
    return client
