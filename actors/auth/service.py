"""The auth service's life: it holds four connections.

In the account of the callout it hears of each log-in; in the system account it closes connections;
in the pool's own account it keeps the users and answers nodes. What users ask, of the service and
of the store, comes over a fourth: a flood of it delays no log-in.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any, NamedTuple, cast

from nats.aio.client import Client

from ...broker.client.availability import RECONNECT_WAIT_S
from ...broker.client.connection import Broker
from ...broker.client.faults import server_urls
from ...broker.client.login import tls_options
from ...broker.client.reconnect import drop_old_requests, request_connection
from ...broker.client.replies import listen
from ...broker.client.rpc import Service
from ...broker.credentials import SECRETS_VARIABLE, PoolSecrets
from ...broker.jobs import JobStore
from ...broker.service_process import erase_variable
from ...broker.user_records import Audit, UserStore, create_user_stores
from ...schemas.wire.errors import ConfigError, ConflictError
from ..runtime import ActorContext
from .callout import Authenticator, ClaimIssuer
from .connections import EVERY_S, GRACE_S, LOOK_S, JobEnds, UserConnections
from .job_keys import EpisodeSecrets, JobKeys
from .logins import Logins
from .store_proxy import StorageBounds, StoreProxy
from .user_cache import KnownUsers
from .user_requests import UserRequests

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
    async with request_connection(context.broker, context.stopping) as requests:
        if requests is not None:
            times = _Times(look_s, grace_s, load_s)
            await _answer(context, requests, secrets, times)


class _Times(NamedTuple):
    """See `serve`."""

    look_s: float
    grace_s: float
    load_s: float


async def _answer(
    context: ActorContext, requests: Broker, secrets: PoolSecrets, times: _Times
) -> None:
    """Answer users over `requests`, everybody else over the context's own connection."""
    broker = context.broker
    await create_user_stores(broker)
    users, jobs, audit = UserStore(broker), JobStore(broker), Audit(broker)
    with contextlib.suppress(ConflictError):  # made at the first start
        await users.create(secrets.first_admin())
    issuer = ClaimIssuer(secrets.seed("issuer"))
    job_secret = secrets.job_secret()
    authenticator = Authenticator(users, jobs, job_secret)
    system = await _side_connection(broker.url, "auth-sys", secrets.seed("sys"))
    callout = await _side_connection(broker.url, "auth-callout", secrets.seed("callout"))
    known = KnownUsers(broker)
    await known.open()
    store = StoreProxy(requests, broker, audit, StorageBounds(broker, known), known.requests)
    connections = UserConnections(system, audit, known.get, look_s=times.load_s)
    logins = Logins(authenticator, issuer, audit, connections, known.get, job_secret)
    asking = await Service.start(
        requests,
        name="tinkermq-users",
        description="Users of the pool, answered by the auth service",
    )
    asking.share.bound = known.requests
    try:
        await connections.start()
        await UserRequests(users, audit, system, job_secret).open(asking)
        await JobKeys(jobs, job_secret).open(context.service)
        await EpisodeSecrets(jobs, job_secret).open(asking)
        await store.open()
        await listen(callout, CALLOUT, logins.take, queue="auth")
        context.set_state("working")
        async with asyncio.TaskGroup() as tasks:
            ends = JobEnds(system, jobs, every_s=times.look_s, grace_s=times.grace_s)
            dropping = drop_old_requests(requests, asking.share, store.share)
            looking = (
                tasks.create_task(ends.run(), name="connections of ended jobs"),
                tasks.create_task(connections.run(), name="load of connections"),
                tasks.create_task(known.run(), name="records of users"),
                tasks.create_task(dropping, name="requests behind a flood"),
            )
            await context.stopping.wait()
            for task in looking:
                task.cancel()
        await store.close()
        await logins.settle(_SETTLE_S)
    finally:
        await asking.stop()
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
