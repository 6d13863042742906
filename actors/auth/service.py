"""Run the auth service, over four connections.

The callout account receives log-ins; the system account closes connections; the pool's own account
stores users and answers nodes. Requests of users, to the service and to the store, have the
fourth: a flood of them delays no log-in.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any, NamedTuple, cast

from nats.aio.client import Client

from ...broker.client.availability import RECONNECT_WAIT_S
from ...broker.client.connection import Broker, drop_old_requests, request_connection
from ...broker.client.faults import server_urls
from ...broker.client.keys import JobIdentity, episode_secret, job_key
from ...broker.client.login import tls_options
from ...broker.client.replies import listen
from ...broker.client.rpc import RequestContext, Service
from ...broker.credentials import SECRETS_VARIABLE, PoolSecrets
from ...broker.jobs import JobStore, is_final
from ...broker.service_process import erase_variable
from ...broker.user_records import Audit, UserStore, create_user_stores
from ...schemas.agent import EpisodeSecret
from ...schemas.user import JobKeyRequest, NewKey
from ...schemas.wire.errors import AuthError, ConfigError, ConflictError
from ...schemas.wire.message import Empty
from ...schemas.wire.subjects import JobScope, rpc
from ..runtime import ActorContext
from .callout import Authenticator, ClaimIssuer, Logins
from .connections import EVERY_S, GRACE_S, LOOK_S, JobEnds, UserConnections
from .store_proxy import StorageBounds, StoreProxy, UserCache
from .user_requests import UserRequests

# -- keys for the processes of jobs ----------------------------------------------------------------


class JobKeys:
    """Signs keys for actors of live jobs."""

    def __init__(self, jobs: JobStore, secret: bytes) -> None:
        """Sign with `secret`."""
        self._jobs = jobs
        self._secret = secret

    async def open(self, service: Service) -> None:
        """Answer nodes; no one else may publish there."""
        await service.endpoint("job-key", rpc("node", "keys", "job"), JobKeyRequest, self._sign)

    async def _sign(self, request: JobKeyRequest) -> NewKey:
        record = await self._jobs.find_by_id(request.user, request.job)
        actors = record.actors if record is not None else []
        actor = next((item for item in actors if item.name == request.actor), None)
        if record is None or is_final(record) or record.attempt != request.attempt or not actor:
            raise AuthError(
                f"job {request.job} does not run {request.actor} in attempt {request.attempt}",
                hint="the job has ended or was resumed meanwhile",
            )
        identity = JobIdentity(
            request.user, request.job, actor.role, request.actor, request.attempt
        )
        return NewKey(secret=job_key(identity, self._secret))


# -- secrets with which environment hosts sign the keys of episodes --------------------------------


class EpisodeSecrets:
    """Gives the hosts of a live job the secret with which they sign keys of episodes.

    A caller may do what these keys permit anyway: it is the job's user, or one of its
    environment hosts. They ask once, so that episodes begin while no auth service is there, too.
    """

    def __init__(self, jobs: JobStore, pool_secret: bytes) -> None:
        """Derive secrets from `pool_secret`."""
        self._jobs = jobs
        self._pool_secret = pool_secret

    async def open(self, service: Service) -> None:
        """Answer hosts; the broker sees to it that they name their own job."""
        subject = JobScope.all_episode_keys()
        await service.endpoint("episode-keys", subject, Empty, self._tell, fair=True)

    async def _tell(self, request: Empty, context: RequestContext) -> EpisodeSecret:
        del request
        user, job = context.subject.split(".")[3:5]
        record = await self._jobs.find_by_id(user, job)
        if record is None or is_final(record):
            raise AuthError(
                f"user {user} runs no job {job}", hint="keys of episodes are for jobs that run"
            )
        return EpisodeSecret(secret=episode_secret(user, job, self._pool_secret))


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
    `load_s` floods are looked for.
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
    known = UserCache(broker)
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
        await listen(callout, CALLOUT, logins.handle_login, queue="auth")
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
