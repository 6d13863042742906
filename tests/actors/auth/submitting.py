"""A scheduler beside a pool with authentication, and jobs that its users submit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from tinkermq.actors.runtime import ActorContext
from tinkermq.actors.scheduler import scheduler
from tinkermq.broker.client.rpc import Service
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Presence
from tinkermq.schemas.wire.errors import BrokerError, NotFoundError

from tests.support.hollow_model import hollow_model
from tests.support.secured import SecuredPool
from tests.support.waiting import PATIENCE_S, eventually


@asynccontextmanager
async def a_scheduler(pool: SecuredPool) -> AsyncIterator[None]:
    """Run a scheduler here."""
    broker = await pool.service("scheduler")
    async with await Service.start(broker, name="tinkermq-scheduler", description="s") as service:
        context = ActorContext(
            broker=broker,
            role="scheduler",
            name="scheduler",
            log=structlog.get_logger(),
            stopping=asyncio.Event(),
            service=service,
            presence=Presence(
                actor="scheduler", role="scheduler", host="h", pid=1, state="starting", time=0.0
            ),
        )
        running = asyncio.create_task(scheduler.run(context))
        yield
        context.stopping.set()
        await asyncio.wait_for(running, PATIENCE_S)


async def submitted(pool: SecuredPool, user: str, folder: Path | None, **changes: Any) -> JobRecord:
    """Submit a small job as a user, as soon as a scheduler takes it."""
    config: dict[str, Any] = {
        "model": {"path": hollow_model()},
        "env": {"game": "bandit", "hosts": 0, "num_val": 0},
        **({} if folder is None else {"output_dir": str(folder)}),
        **changes,
    }
    clients = Pool(await pool.user(user))

    async def attempt() -> JobRecord | None:
        try:
            return await clients.submit(config)
        except BrokerError as error:
            if not isinstance(error.__cause__, NotFoundError):  # nobody answers yet
                raise
            return None

    return await eventually(attempt, "the scheduler to take a job")
