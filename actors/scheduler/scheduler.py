"""The scheduler: wait for the lease, schedule while it lasts, wait again.

Any number of schedulers may run; the one with the lease answers clients and reconciles. All that
state is in the job records and on the nodes, so the next one continues from there.
"""

import asyncio

from ...broker.client.connection import Broker, drop_old_requests, request_connection
from ...broker.client.rpc import Service
from ...broker.jobs import JobStore
from ...broker.presence import INTERVAL_S
from ...schemas.machines import MachinesConfig
from ...schemas.wire.errors import FencedError, TinkermqError
from ..runtime import ActorContext, settle_memory
from .jobs.archive import RetentionLimits
from .jobs.removal import Remover
from .jobs.secrets import SecretStore
from .jobs.view import JobsView
from .lease import LeaderLease, Timing
from .machines.sources import machine_keeper
from .nodes import Nodes
from .notifier import Notifier
from .reconciler import Reconciler
from .requests import SchedulerRequests

DEFAULT_TIMING = Timing()
DEFAULT_KEEPING = RetentionLimits()
NO_MACHINES = MachinesConfig.none()


async def run(
    context: ActorContext,
    timing: Timing = DEFAULT_TIMING,
    keeping: RetentionLimits = DEFAULT_KEEPING,
    machines: MachinesConfig = NO_MACHINES,
) -> None:
    """Schedule until `context.stopping` is set, with `machines` as the queue needs them."""
    async with request_connection(context.broker, context.stopping) as requests:
        if requests is not None:
            await _schedule(context, requests, timing, keeping, machines)


async def _schedule(
    context: ActorContext,
    requests: Broker,
    timing: Timing,
    keeping: RetentionLimits,
    machines: MachinesConfig,
) -> None:
    while not context.stopping.is_set():
        lease = LeaderLease(context.broker, timing)
        context.set_state("waiting")
        with context.waiting("the lease of another scheduler"):
            if not await lease.acquire(context.stopping):
                return
        context.log.info("lease_taken", holder=lease.holder, epoch=lease.epoch)
        context.set_state("working")
        try:
            await _lead(context, requests, lease, timing, keeping, machines)
        except* FencedError as group:
            context.log.warning("lease_lost", error=str(group.exceptions[0]))
        else:
            await _release(context, lease)


async def _lead(
    context: ActorContext,
    requests: Broker,
    lease: LeaderLease,
    timing: Timing,
    keeping: RetentionLimits,
    machines: MachinesConfig,
) -> None:
    """Answer clients and reconcile, until stopped or another scheduler takes over."""
    broker = context.broker
    view, pool = JobsView(broker), Nodes(broker, timing)
    jobs = JobStore(broker, wrote=view.enter)
    secrets = SecretStore(broker, view)
    notifier = Notifier(broker, secrets)
    remover = Remover(broker, jobs, view, pool, keeping)
    keeper = machine_keeper(broker, machines, pool)
    reconciler = Reconciler(
        broker, jobs, view, pool, lease, timing, notifier, remover, keeper.could_come
    )
    async with (
        await Service.start(
            requests,
            name="tinkermq-scheduler-requests",
            description="Jobs and nodes of the pool, answered by the scheduler that leads",
            metadata={"holder": lease.holder},
        ) as service,
        asyncio.TaskGroup() as group,
    ):
        holding = group.create_task(lease.hold(), name="scheduler lease")
        try:
            await view.open(reconciler.hurry)
            await pool.records.open(reconciler.hurry)
            await pool.refresh()
            settle_memory()
            telling = group.create_task(notifier.run(), name="notifications")
            numbers = group.create_task(_tell(context, reconciler, view), name="numbers")
            answers = SchedulerRequests(broker, jobs, view, pool, reconciler, secrets, keeper)
            await answers.open(service)
            growing = group.create_task(
                keeper.run(reconciler, lambda: lease.is_fresh), name="machines"
            )
            dropping = group.create_task(
                drop_old_requests(requests, service.share), name="requests behind a flood"
            )
            await reconciler.run(context.stopping)
            telling.cancel()
            numbers.cancel()
            dropping.cancel()
            growing.cancel()
        finally:
            await view.close()
            await pool.records.close()
        holding.cancel()


async def _tell(context: ActorContext, reconciler: Reconciler, view: JobsView) -> None:
    """Put into the heartbeat how long decisions take and the number of jobs."""
    while True:
        context.numbers.update({**reconciler.decisions.numbers(), **view.numbers()})
        await asyncio.sleep(INTERVAL_S)


async def _release(context: ActorContext, lease: LeaderLease) -> None:
    try:
        await lease.release()
    except TinkermqError as error:  # it runs out by itself
        context.log.warning("lease_not_released", error=error.message)
