"""The context of a job's actor, in the test's own process."""

import asyncio

import structlog
from tinkermq.actors.runtime import JobContext
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Presence
from tinkermq.schemas.wire.subjects import JobScope


async def job_context(broker: Broker, scope: JobScope, role: str, config: JobConfig) -> JobContext:
    """Return the context of the one actor of a role."""
    told = config.model_dump(mode="json", exclude_unset=True)
    record = JobRecord(
        job=scope.job, name="run", user=scope.user, state="RUNNING", config=told, created=0.0
    )
    return JobContext(
        broker=broker,
        role=role,
        name=role,
        log=structlog.get_logger(),
        stopping=asyncio.Event(),
        service=await Service.start(broker, name=f"tinkermq-{role}", description=role),
        presence=Presence(actor=role, role=role, host="h", pid=1, state="", time=0.0),
        scope=scope,
        record=record,
        config=config,
    )
