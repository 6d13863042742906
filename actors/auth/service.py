"""The auth service's life: it holds three connections and answers on all of them.

In the account of the callout it hears of each log-in; in the system account it closes connections;
in the pool's own account it keeps the users, answers admins and nodes, and holds the door.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from ...broker.addresses import server_urls
from ...broker.audit import Audit
from ...broker.complaints import RECONNECT_WAIT_S
from ...broker.credentials import SECRETS_VARIABLE, PoolSecrets
from ...broker.jobs import JobStore
from ...broker.login import tls_options
from ...broker.process import erase_variable
from ...broker.users import UserStore, create_user_stores
from ...schemas.errors import AuthError, ConfigError, ConflictError, MessageError, TinkermqError
from ..runtime import ActorContext
from .callout import Gate
from .claims import Issuer, LoginRequest, read_request
from .desk import UserDesk
from .door import Door
from .job_ends import EVERY_S, GRACE_S, JobEnds
from .job_keys import JobKeys

CALLOUT = "$SYS.REQ.USER.AUTH"
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


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

    Every `look_s` the connections of jobs that ended more than `grace_s` ago are closed.
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
    door = Door(broker, audit)
    try:
        await UserDesk(users, audit, system).open(context.service)
        await JobKeys(jobs, job_secret).open(context.service)
        await door.open()
        answering = Answering(gate, issuer, audit)
        await cast("Any", callout).subscribe(CALLOUT, queue="auth", cb=answering.take)
        await callout.flush()
        context.set_state("working")
        async with asyncio.TaskGroup() as tasks:
            ends = JobEnds(system, jobs, every_s=look_s, grace_s=grace_s)
            looking = tasks.create_task(ends.run(), name="connections of ended jobs")
            await context.stopping.wait()
            looking.cancel()
        await door.close()
    finally:
        await callout.close()
        await system.close()


class Answering:
    """Answers the server's questions, each in a task of its own."""

    def __init__(self, gate: Gate, issuer: Issuer, audit: Audit) -> None:
        self._gate = gate
        self._issuer = issuer
        self._audit = audit
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, message: Msg) -> None:
        """Begin to answer one question."""
        task = asyncio.create_task(self._answer(message), name="login")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Msg) -> None:
        try:
            request = read_request(message.data)
        except MessageError as error:
            _log.error("callout_malformed", error=error.message)
            return
        try:
            admission = await self._gate.admit(request.user, request.password)
        except AuthError as error:
            await message.respond(self._issuer.refuse(request, error.message))
            await self._audit.refused(request.user, "login", error.message, _where(request))
        except TinkermqError as error:  # not known: the client asks again
            _log.error("login_undecided", user=request.user, error=error.message)
            await message.respond(self._issuer.refuse(request, "the users cannot be read now"))
        else:
            await message.respond(self._issuer.admit(request, *admission))


def _where(request: LoginRequest) -> str:
    return f"{request.client or 'a client'} from {request.address or 'nowhere'}"


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
