"""The scheduler's loop: compares what the job records want with what the nodes say.

It is level-triggered: every turn looks at everything that lives and does the next thing, so it
does not matter which message was lost or which process died in between. A turn: read the live
jobs and the nodes, give free slots to what waits, tell every node what it shall run, move the
jobs by what the nodes answered, and pass on stops and pauses to learners that have not heard them.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import structlog

from ...broker.connection import Broker
from ...broker.jobs import JobStore, is_final
from ...broker.presence import presences
from ...schemas.config import JobConfig
from ...schemas.errors import (
    BrokerError,
    ConfigError,
    ConflictError,
    DeadlineError,
)
from ...schemas.job import ActorPlacement, JobRecord
from ...schemas.load_config import parse_config
from ...schemas.node import ActorStatus, NodeStatus, NodeSync, WantedActor
from ...schemas.subjects import JobScope
from .lease import Lease
from .messenger import Messenger
from .placement import Assignment, NodeSlots, PlacementRequest, place, why_waiting
from .pool import Pool
from .roster import main_actor, slots_of, unplaced, wanted_actor
from .states import ACTIVE, Transition, next_state, told_placements
from .timing import Timing

WHO = "scheduler"
_LIST_S = 10.0
_VERSION_S = 2.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Reconciler:
    """Keeps jobs and nodes in step for as long as its lease lasts."""

    def __init__(
        self, broker: Broker, jobs: JobStore, pool: Pool, lease: Lease, timing: Timing
    ) -> None:
        """Know no job yet; the first turn reads them all."""
        self._broker = broker
        self._jobs = jobs
        self._pool = pool
        self._lease = lease
        self._timing = timing
        self._live: dict[str, JobRecord] = {}
        self._listed = self._versions_read = float("-inf")
        self._configs: dict[tuple[str, int], JobConfig] = {}
        self._messenger = Messenger(broker)
        self._hurry = asyncio.Event()

    def look(self, record: JobRecord) -> None:
        """Take up a new or changed job at once."""
        self._live[JobScope(record.user, record.job).key] = record
        self._hurry.set()

    def slots(self) -> list[NodeSlots]:
        """Return what each node has to give, as of now."""
        return [self._slots_of(node) for node in self._pool.nodes()]

    async def run(self, stopping: asyncio.Event) -> None:
        """Turn until `stopping` is set; a broker that is away is waited for."""
        async with asyncio.TaskGroup() as group:
            stop = group.create_task(stopping.wait(), name="stop of the scheduler")
            while not stopping.is_set():
                try:
                    if self._lease.is_fresh:
                        await self._turn(group)
                except (BrokerError, DeadlineError) as error:
                    _log.warning("turn_failed", error=error.message)
                hurry = asyncio.create_task(self._hurry.wait())
                await asyncio.wait(
                    {stop, hurry}, timeout=self._timing.turn_s, return_when=asyncio.FIRST_COMPLETED
                )
                hurry.cancel()
                self._hurry.clear()

    async def _turn(self, group: asyncio.TaskGroup) -> None:
        await self._read_jobs()
        await self._pool.refresh()
        await self._place()
        await self._sync()
        for key, record in list(self._live.items()):
            await self._advance(key, record, group)
        await self._read_versions()

    async def _read_jobs(self) -> None:
        """Read the live jobs anew; all records only now and then."""
        if time.monotonic() - self._listed >= _LIST_S:
            for record in await self._jobs.live():
                self._live.setdefault(_key(record), record)
            self._listed = time.monotonic()
        known = list(self._live.items())
        records = await asyncio.gather(
            *(self._jobs.find(record.user, record.job) for _, record in known)
        )
        for (key, _), record in zip(known, records, strict=True):
            if record is None or is_final(record):
                self._forget(key)
            else:
                self._live[key] = await self._readable(key, record)

    async def _readable(self, key: str, record: JobRecord) -> JobRecord:
        """Fail a job whose configuration this release does not take; it must not fail others."""
        if not record.configured:
            return record
        try:
            self._config(key, record)
        except ConfigError as error:
            return await self._move(record, Transition("FAILED", str(error)))
        return record

    # -- placing ------------------------------------------------------------------------------

    async def _place(self) -> None:
        queue = self._waiting()
        nodes = self.slots()
        given = place(queue, nodes)
        for request in queue:
            mine = [one for one in given if one.job == request.job]
            with contextlib.suppress(ConflictError):  # the job moved meanwhile: next turn
                self._live[request.job] = await self._give(request, mine, nodes)

    def _waiting(self) -> list[PlacementRequest]:
        """Return what has no node: first actors that running jobs lack, then queued jobs."""
        records = sorted(self._live.items(), key=lambda item: item[1].created)
        missing: list[PlacementRequest] = []
        queued: list[PlacementRequest] = []
        for key, record in records:
            if record.state == "QUEUED" and record.configured and record.stop == "no":
                queued.append(PlacementRequest(key, tuple(unplaced(record.actors))))
            elif record.state in ACTIVE:
                lacking = tuple(actor for actor in record.actors if actor.node is None)
                home = record.actors[0].node
                if lacking:
                    missing.append(PlacementRequest(key, lacking, home=home, whole=False))
        return missing + queued

    async def _give(
        self, request: PlacementRequest, given: list[Assignment], nodes: Sequence[NodeSlots]
    ) -> JobRecord:
        record = self._live[request.job]
        node_of = {one.actor: one.node for one in given}
        if not request.whole:
            return await self._jobs.update(record, lambda now: _placed(now, now.actors, node_of))
        if given:
            actors = _placed(record, request.actors, node_of).actors
            where = ", ".join(sorted(set(node_of.values())))
            return await self._jobs.transition(
                record, "STARTING", f"placed on {where}", WHO, actors=actors
            )
        why = why_waiting(slots_of(request.actors), nodes)
        return await self._jobs.update(
            record, lambda now: now.model_copy(update={"reason": why}) if _queued(now) else now
        )

    def _slots_of(self, node: NodeStatus) -> NodeSlots:
        """Count what a node has promised, and what still runs there although unwanted."""
        wanted = self._wanted_on(node.node)
        promised = sum(actor.slots for actor in wanted)
        leaving = sum(status.slots for status in _unwanted(node, wanted))
        return NodeSlots(node.node, node.slots, node.slots - promised - leaving)

    # -- telling nodes ------------------------------------------------------------------------

    async def _sync(self) -> None:
        requests: dict[str, NodeSync] = {}
        for node in self._pool.nodes():
            wanted = self._wanted_on(node.node)
            requests[node.node] = NodeSync(
                scheduler=self._lease.holder,
                epoch=self._lease.epoch,
                actors=wanted,
                kill=await self._to_kill(_unwanted(node, wanted)),
            )
        await self._pool.sync(requests)

    def _wanted_on(self, node: str) -> list[WantedActor]:
        return [
            wanted_actor(record, actor, self._config(key, record))
            for key, record in self._live.items()
            if record.state in ACTIVE
            for actor in record.actors
            if actor.node == node
        ]

    def _config(self, key: str, record: JobRecord) -> JobConfig:
        """Return the parsed configuration; it cannot change within an attempt."""
        cached = self._configs.get((key, record.attempt))
        if cached is None:
            cached = self._configs[key, record.attempt] = parse_config(record.config)
        return cached

    async def _to_kill(self, unwanted: list[ActorStatus]) -> list[str]:
        """Return the jobs among those still running that were stopped without a checkpoint."""
        kill: list[str] = []
        for user, job in sorted({(status.user, status.job) for status in unwanted}):
            record = await self._jobs.find(user, job)
            if record is None or record.stop == "now":
                kill.append(JobScope(user, job).key)
        return kill

    # -- moving jobs --------------------------------------------------------------------------

    async def _advance(self, key: str, record: JobRecord, group: asyncio.TaskGroup) -> None:
        silent = self._pool.silent(actor.node for actor in record.actors)
        statuses = self._statuses(record)
        try:
            record = await self._jobs.update(
                record,
                lambda now: now.model_copy(
                    update={"actors": told_placements(now, statuses, silent)}
                ),
            )
            step = next_state(record, statuses, silent)
            if step is not None:
                record = await self._move(record, step)
        except ConflictError:  # a client moved it meanwhile: next turn
            return
        self._keep(key, record)
        if record.actors:
            main = statuses.get(main_actor(record.actors).name)
            self._messenger.pass_on(key, record, main, group)

    def _statuses(self, record: JobRecord) -> dict[str, ActorStatus]:
        told = (
            (actor.name, self._pool.status(actor.node, record.user, record.job, actor.name))
            for actor in record.actors
        )
        return {name: status for name, status in told if status is not None}

    async def _move(self, record: JobRecord, step: Transition) -> JobRecord:
        _log.info("job_moved", job=record.job, state=step.state, reason=step.reason)
        changes = {"actors": unplaced(record.actors)} if step.state == "QUEUED" else {}
        self._hurry.set()
        return await self._jobs.transition(record, step.state, step.reason, WHO, **changes)

    def _keep(self, key: str, record: JobRecord) -> None:
        if is_final(record):
            self._forget(key)
        else:
            self._live[key] = record

    def _forget(self, key: str) -> None:
        self._live.pop(key, None)
        self._messenger.forget(key)
        self._configs = {at: one for at, one in self._configs.items() if at[0] != key}

    async def _read_versions(self) -> None:
        """Enter the version that each learner's heartbeat tells."""
        if time.monotonic() - self._versions_read < _VERSION_S:
            return
        self._versions_read = time.monotonic()
        for key, record in list(self._live.items()):
            entry = await presences(self._broker).get(f"{key}.learner")
            version = entry.value.version if entry else None
            if version is not None and version > record.version:
                with contextlib.suppress(ConflictError):
                    self._live[key] = await self._jobs.update(
                        record, lambda now, to=version: now.model_copy(update={"version": to})
                    )


def _placed(
    record: JobRecord, actors: Sequence[ActorPlacement], node_of: dict[str, str]
) -> JobRecord:
    """Return the record with nodes for those of its actors that have none."""
    placed = [
        actor.model_copy(update={"node": node_of.get(actor.name)}) if actor.node is None else actor
        for actor in actors
    ]
    return record.model_copy(update={"actors": placed})


def _queued(record: JobRecord) -> bool:
    return record.state == "QUEUED"


def _unwanted(node: NodeStatus, wanted: Sequence[WantedActor]) -> list[ActorStatus]:
    """Return the actors that run on a node without being wanted there (any more)."""
    names = {(actor.user, actor.job, actor.name) for actor in wanted}
    return [status for status in node.actors if (status.user, status.job, status.name) not in names]


def _key(record: JobRecord) -> str:
    return JobScope(record.user, record.job).key
