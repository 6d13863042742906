"""A pool with authentication in a test: a server of its own, and the auth service beside it.

The auth service runs in the test's process. Everybody connects as in life: services with their
credentials files, users with API keys, processes of jobs with job keys.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import structlog
from tinkermq.actors.auth.service import serve
from tinkermq.actors.runtime import ActorContext
from tinkermq.broker.calls import ask_users
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.keys import JobIdentity, job_key
from tinkermq.broker.client.login import CREDENTIALS_VARIABLE
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.credentials import PoolSecrets
from tinkermq.broker.jetstream.streams import create_job_streams, create_shared
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import ActorPlacement, JobRecord, Role
from tinkermq.schemas.metric import Presence
from tinkermq.schemas.user import AddUser, NewKey
from tinkermq.schemas.wire.errors import BrokerError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.waiting import PATIENCE_S, eventually, until

REFUSED = r"may not|refused"
"""What every refusal says."""
ROLES: dict[str, Role] = {
    "learner": "learner",
    "generator-0": "generator",
    "evaluator-0": "evaluator",
    "environment-0": "environment",
}


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a moment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class SecuredPool:
    """Server, auth service, and what a test needs of both."""

    def __init__(self, folder: Path, **server: Any) -> None:
        self.folder = folder
        self.secrets = PoolSecrets(folder / "secrets")
        self.admin_key = self.secrets.create("root", 1)
        extra = "\n".join([self.secrets.server_config(), server.pop("extra_config", "")])
        self.server = NatsServer(folder / "nats", extra_config=extra, **server)
        self.keys: dict[str, str] = {"root": self.admin_key}
        self._stopping = asyncio.Event()
        self._connections: list[Broker] = []
        self._auth: asyncio.Task[None] | None = None
        self.auth_broker: Broker | None = None
        """The auth service's connection for its own work."""

    async def __aenter__(self) -> "SecuredPool":
        self.server.start()
        await self.start_auth()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for broker in self._connections:
            await broker.close()
        await self.stop_auth()
        self.server.stop()

    async def start_auth(self) -> None:
        """Start the auth service, and wait until it lets somebody in."""
        self._stopping = asyncio.Event()
        ready = asyncio.Event()
        self._auth = asyncio.create_task(self._serve(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait(
            {self._auth, waiting}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
        )
        if self._auth.done():
            await self._auth

        async def is_open() -> bool:
            try:
                await (await connect(self.server.url, name="probe", api_key=self.admin_key)).close()
            except BrokerError:
                return False
            return True

        await eventually(is_open, "the auth service to let the admin in")

    async def stop_auth(self) -> None:
        """End the auth service."""
        self._stopping.set()
        if self._auth is not None:
            await self._auth

    async def _serve(self, ready: asyncio.Event) -> None:
        async with await self._service_connection("auth") as broker:
            await create_shared(broker)
            self.auth_broker = broker
            async with await Service.start(
                broker, name="tinkermq-auth", description="auth"
            ) as service:
                context = ActorContext(
                    broker=broker,
                    role="auth",
                    name="auth",
                    log=structlog.get_logger(),
                    stopping=self._stopping,
                    service=service,
                    presence=Presence(
                        actor="auth", role="auth", host="h", pid=1, state="starting", time=0.0
                    ),
                )
                ready.set()
                await serve(context, self.secrets, look_s=0.1, grace_s=0)

    async def _service_connection(self, name: str) -> Broker:
        with environment(**{CREDENTIALS_VARIABLE: str(self.secrets.credentials(name))}):
            return await connect(self.server.url, name=name)

    async def service(self, name: str) -> Broker:
        """Connect as a service of the pool."""
        broker = await self._service_connection(name)
        self._connections.append(broker)
        return broker

    async def user(self, name: str) -> Broker:
        """Connect as a user, made on the way."""
        if name not in self.keys:
            admin = await self.connected(self.admin_key)
            self.keys[name] = (await ask_users(admin, "add", AddUser(user=name), NewKey)).secret
        return await self.connected(self.keys[name])

    async def connected(self, key: str) -> Broker:
        """Connect with a key."""
        broker = await connect(self.server.url, name="test", api_key=key)
        self._connections.append(broker)
        return broker

    async def job(self, user: str, job: str) -> JobScope:
        """Make a running job of a user, with its streams."""
        scheduler, scope = await self.service("scheduler"), JobScope(user, job)
        await create_job_streams(scheduler, scope, LimitsConfig(), ack_wait_s=30)
        record = JobRecord(
            job=job,
            name=f"run-{job}",
            user=user,
            state="RUNNING",
            config={},
            actors=[ActorPlacement(name=name, role=role) for name, role in ROLES.items()],
            created=time.time(),
        )
        await JobStore(scheduler).create(record, "test")
        return scope

    async def process(self, scope: JobScope, actor: str) -> Broker:
        """Connect as a process of a job."""
        identity = JobIdentity(scope.user, scope.job, ROLES[actor], actor, 1)
        return await self.connected(job_key(identity, self.secrets.job_secret()))


async def refused_publish(broker: Broker, subject: str, payload: bytes = b"x") -> None:
    """Publish, and see the broker refuse it."""
    errors: list[BrokerError] = []
    remove = broker.on_error(errors.append)
    await broker.nc.publish(subject, payload, reply=broker.nc.new_inbox())
    await broker.nc.flush()
    await until(lambda: bool(errors), f"{subject} to be denied")
    remove()
    assert "may not publish" in errors[0].message


async def refused_listen(broker: Broker, subject: str) -> None:
    """Subscribe, and see the broker refuse it."""
    errors: list[BrokerError] = []
    remove = broker.on_error(errors.append)
    listening = await broker.listen(subject, lambda _: None)
    await broker.nc.flush()
    await until(lambda: bool(errors), f"{subject} to be denied")
    remove()
    assert "may not subscribe" in errors[0].message
    await listening.stop()


@asynccontextmanager
async def secured(folder: Path, **server: Any) -> AsyncIterator[SecuredPool]:
    """Run a pool with authentication."""
    async with SecuredPool(folder, **server) as pool:
        yield pool
