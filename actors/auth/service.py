"""Run the auth service, over four connections.

The callout account receives logins; the system account closes connections; the pool's own account
stores users and answers nodes. Requests of users, to the service and to the store, use the fourth,
so that a flood of them delays no login.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, cast

from nats.aio.client import Client

from ...broker.client.availability import RECONNECT_WAIT_S
from ...broker.client.connection import Broker, drop_old_requests, request_connection
from ...broker.client.fair_queue import Rates
from ...broker.client.faults import server_urls
from ...broker.client.keys import (
    JobIdentity,
    api_key,
    episode_secret,
    is_same,
    job_key,
    key_hash,
)
from ...broker.client.login import tls_options
from ...broker.client.replies import listen
from ...broker.client.rpc import Handler, RequestContext, Service
from ...broker.credentials import SECRETS_VARIABLE, PoolSecrets, expiry
from ...broker.jobs import JobStore, is_final
from ...broker.user_records import Audit, UserStore, create_user_stores
from ...schemas.agent import EpisodeSecret
from ...schemas.local.process import erase_variable
from ...schemas.user import (
    BOUNDS,
    AddUser,
    AuditList,
    AuditRequest,
    JobKeyRequest,
    ListUsers,
    NameUser,
    NewKey,
    RotateKey,
    SetQuota,
    UserInfo,
    UserList,
    UserRecord,
    UserReply,
)
from ...schemas.wire import errors
from ...schemas.wire.errors import AuthError, ConfigError, ConflictError
from ...schemas.wire.message import Empty, Message
from ...schemas.wire.subjects import JobScope, rpc, user_name
from ..runtime import ActorContext
from .callout import Authenticator, ClaimIssuer, Logins
from .connections import EVERY_S, GRACE_S, JobEnds, UserConnections, disconnect_user
from .store_proxy import StorageBounds, StoreProxy, UserCache

# -- keys for the processes of jobs, and secrets by which hosts sign the keys of episodes ----------


async def give_job_keys(service: Service, jobs: JobStore, secret: bytes) -> None:
    """Sign keys for actors of live jobs; only nodes may publish there."""

    async def sign(request: JobKeyRequest) -> NewKey:
        record = await jobs.find_by_id(request.user, request.job)
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
        return NewKey(secret=job_key(identity, secret))

    await service.endpoint("job-key", rpc("node", "keys", "job"), JobKeyRequest, sign)


async def give_episode_secrets(service: Service, jobs: JobStore, pool_secret: bytes) -> None:
    """Give the hosts of a live job the secret by which they sign keys of episodes.

    The keys permit no more than the callers may do anyway: they are the job's user and its
    environment hosts, which the broker lets name only their own job. A host requests the secret
    once, so that episodes can begin while the auth service is away.
    """

    async def derive(_: Empty, context: RequestContext) -> EpisodeSecret:
        user, job = context.subject.split(".")[3:5]
        record = await jobs.find_by_id(user, job)
        if record is None or is_final(record):
            raise AuthError(
                f"user {user} runs no job {job}", hint="keys of episodes are for jobs that run"
            )
        return EpisodeSecret(secret=episode_secret(user, job, pool_secret))

    subject = JobScope.all_episode_keys()
    await service.endpoint("episode-keys", subject, Empty, derive, fair=True)


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
) -> None:
    """Serve with these secrets until `context.stopping` is set.

    Every `look_s`, connections of jobs that ended more than `grace_s` ago are closed.
    """
    async with request_connection(context.broker, context.stopping) as requests:
        if requests is not None:
            await _answer(context, requests, secrets, look_s, grace_s)


async def _answer(
    context: ActorContext, requests: Broker, secrets: PoolSecrets, look_s: float, grace_s: float
) -> None:
    """Answer users over `requests`, other callers over the context's own connection."""
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
    connections = UserConnections(system, audit, known.get)
    logins = Logins(authenticator, issuer, audit, connections, known.get, job_secret)
    asking = await Service.start(
        requests,
        name="tinkermq-users",
        description="Users of the pool, answered by the auth service",
    )
    asking.share.bound = known.requests
    try:
        await connections.start()
        await _UserRequests(users, audit, system, job_secret).open(asking)
        await give_job_keys(context.service, jobs, job_secret)
        await give_episode_secrets(asking, jobs, job_secret)
        await store.open()
        await listen(callout, CALLOUT, logins.handle_login, queue="auth")
        context.set_state("working")
        async with asyncio.TaskGroup() as tasks:
            ends = JobEnds(system, jobs, every_s=look_s, grace_s=grace_s)
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


# -- requests of users -----------------------------------------------------------------------------
# From admins and from users themselves. The subject names the sender.

_PAGE_USERS = 500
"""Users in one answer."""
_ROTATIONS, _ROTATIONS_S = 10, 1 / 60
"""Bounds on a user's replacements of the own key: in a burst, and per second in the long run."""
_OWN_KICK_S = 1.0
_AGAIN_S = 120.0
"""How long a repeated request for a new user gets the same key."""
_DAY_S = 86_400


class _UserRequests:
    """Answers requests on `rpc.<user>.users.<method>`."""

    def __init__(self, users: UserStore, audit: Audit, system: Client, secret: bytes) -> None:
        """Change `users`; close connections through the server's `system` account.

        Keys are derived from the pool's `secret` and the id of the request that creates them.
        """
        self._users = users
        self._secret = secret
        self._audit = audit
        self._system = system
        self._kicks: set[asyncio.Task[int]] = set()
        self._rotations = Rates(_ROTATIONS_S, _ROTATIONS)

    async def open(self, service: Service) -> None:
        """Answer on the subjects of every user."""
        endpoints: list[tuple[str, type[Message], Handler]] = [
            ("add", AddUser, self._add),
            ("list", ListUsers, self._list),
            ("rotate", RotateKey, self._rotate),
            ("revoke", NameUser, self._revoke),
            ("quota", SetQuota, self._quota),
            ("audit", AuditRequest, self._read_audit),
        ]
        for method, model, handler in endpoints:
            audited = self._as_admin(f"users.{method}", handler)
            await service.endpoint(method, rpc("*", "users", method), model, audited, fair=True)
        await service.endpoint("me", rpc("*", "users", "me"), Empty, self._me, fair=True)

    async def _add(self, request: AddUser, context: RequestContext) -> NewKey:
        user = user_name(request.user)
        key = api_key(user, self._secret, "add", context.user, request.request_id)
        record = _record(user, key, request.days, request.max_slots)
        record = record.model_copy(update={"role": request.role, "weight": request.weight})
        record = await self._create(record)
        return NewKey(secret=key, user=user, expires=record.expires)

    async def _list(self, request: ListUsers, _: RequestContext) -> UserList:
        users = [item for item in await self._users.list() if item.user > request.after]
        page = [_info(user) for user in users[:_PAGE_USERS]]
        return UserList(users=page, more=len(users) > len(page))

    async def _rotate(self, request: RotateKey, context: RequestContext) -> NewKey:
        known, now = await self._known(request.user), time.time()
        key = api_key(known.user, self._secret, "rotate", context.user, request.request_id)
        if known.revoked is None and is_same(known.key_hash, key_hash(key)):  # a repetition
            return NewKey(secret=key, user=known.user, expires=known.expires)

        def replace(record: UserRecord) -> UserRecord:
            if record.revoked is not None:
                raise errors.StateError(
                    f"user {record.user} was revoked, which is for good",
                    hint="add a user of another name",
                )
            update = {"key_hash": key_hash(key), "expires": expiry(now, request.days)}
            return record.model_copy(update=update)

        record = await self._users.change(request.user, replace)
        await self._shut_out(request.user, context)
        return NewKey(secret=key, user=record.user, expires=record.expires)

    async def _revoke(self, request: NameUser, context: RequestContext) -> UserReply:
        if request.user == context.user:
            raise errors.StateError(
                "an admin cannot revoke himself", hint="let another admin do it"
            )
        now = time.time()
        record = await self._users.change(
            request.user,
            lambda user: user.model_copy(update={"revoked": user.revoked or now}),
        )
        await self._shut_out(request.user, context)
        return UserReply(user=_info(record))

    async def _quota(self, request: SetQuota, _: RequestContext) -> UserReply:
        parameters = {name: getattr(request, name) for name in BOUNDS}
        update: dict[str, object] = {
            name: None if value < 0 else value
            for name, value in parameters.items()
            if value is not None
        }
        if request.weight is not None:
            update["weight"] = request.weight
        if request.max_priority is not None:
            update["max_priority"] = request.max_priority
        record = await self._users.change(request.user, lambda user: user.model_copy(update=update))
        return UserReply(user=_info(record))

    async def _read_audit(self, request: AuditRequest, _: RequestContext) -> AuditList:
        return AuditList(records=await self._audit.last(request.limit))

    async def _me(self, _: Empty, context: RequestContext) -> UserReply:
        return UserReply(user=_info(await self._known(context.user)))

    async def _create(self, record: UserRecord) -> UserRecord:
        """Make a user, or return the user that the same request has already made."""
        try:
            await self._users.create(record)
        except errors.ConflictError as error:
            known = await self._users.get(record.user)
            if known is None or not _is_again(known, record.key_hash):
                raise _taken(record.user) from error
            return known
        return record

    async def _known(self, user: str) -> UserRecord:
        record = await self._users.get(user)
        if record is None:
            raise errors.NotFoundError(f"there is no user {user!r}", hint="`tinkermq user list`")
        return record

    def _as_admin(self, what: str, handler: Handler) -> Handler:
        """Return an audited handler for admins; users themselves may also call `rotate`."""

        async def answer(request: Message, context: RequestContext) -> Message:
            target = str(getattr(request, "user", ""))
            try:
                await self._check_admin(what, target, context.user)
                reply = await handler(request, context)
            except errors.TinkermqError as error:
                await self._audit.refused(context.user, what, error.message, target=target)
                raise
            await self._audit.write(context.user, what, target=target)
            return reply

        return answer

    async def _check_admin(self, what: str, target: str, user: str) -> None:
        """Raise AuthError or BusyError unless a user may make a request now."""
        caller = await self._known(user)
        own_key = what == "users.rotate" and target == user
        bounded = own_key and caller.role != "admin"
        if bounded and self._rotations.take(user, time.monotonic()) is None:
            raise errors.BusyError(
                f"user {user!r} has replaced the own key {_ROTATIONS} times just now",
                hint="another time in some minutes; an admin is not bounded so",
            )
        if caller.revoked is not None or (caller.role != "admin" and not own_key):
            raise errors.AuthError(f"user {user!r} may not do this ({what})", hint="ask an admin")

    async def _shut_out(self, user: str, context: RequestContext) -> None:
        """Close the connections that use the old key; the caller's own after its answer."""
        if user != context.user:
            await disconnect_user(self._system, user)
            return
        task = asyncio.create_task(self._kick_later(user), name=f"kick {user}")
        self._kicks.add(task)
        task.add_done_callback(self._kicks.discard)

    async def _kick_later(self, user: str) -> int:
        await asyncio.sleep(_OWN_KICK_S)
        return await disconnect_user(self._system, user)


def _is_again(known: UserRecord, key_hash: str) -> bool:
    """Return whether this request has made the user already, a short time ago."""
    return is_same(known.key_hash, key_hash) and time.time() - known.created < _AGAIN_S


def _record(user: str, key: str, days: float, max_slots: int | None) -> UserRecord:
    now = time.time()
    return UserRecord(
        user=user,
        key_hash=key_hash(key),
        created=now,
        expires=expiry(now, days),
        max_slots=max_slots,
    )


def _info(record: UserRecord) -> UserInfo:
    return UserInfo(**record.model_dump(exclude={"key_hash"}))


def _taken(user: str) -> errors.ConflictError:
    return errors.ConflictError(
        f"there is a user {user!r} already",
        hint="choose another name; a new key for this one: `tinkermq user rotate`",
    )
