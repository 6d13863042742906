"""The scheduler's loop: compares the job records with the nodes' answers, and acts.

It is level-triggered: every turn checks all live jobs and takes the next action, so lost messages
and dead processes do no harm. A turn reads the changed records of jobs and nodes, places waiting
jobs on free slots, sends the nodes their actors, updates the jobs' states by the nodes' answers,
forwards stops and pauses to learners, and publishes the events of all state changes. Unchanged
state costs no message.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog

from ...broker.client.connection import Broker
from ...broker.client.rpc import call
from ...broker.jetstream.streams import create_job_streams, settle_job_streams
from ...broker.jobs import JobStore, is_final
from ...schemas.config.sections import BROKER
from ...schemas.control import ControlReply, ControlRequest
from ...schemas.job import FINAL_STATES, ActorPlacement, JobRecord
from ...schemas.node import ActorStatus, NodeStatus, NodeSync, WantedActor
from ...schemas.wire import errors
from ...schemas.wire.subjects import JobScope
from .jobs import states
from .jobs.removal import Remover
from .jobs.view import JobsView, Versions, key_of
from .lease import DecisionTimes, LeaderLease, Timing
from .machines.keeper import Demand
from .nodes import Nodes
from .notifier import MoveEvents, Notifier
from .placement import (
    Assignment,
    NodeSlots,
    PlacementRequest,
    free_slots,
    is_queued,
    place,
    refuse_impossible,
    request_of,
    shape_of,
    unwanted,
    with_nodes,
)

# Stop, pause, resume and hand-over requests to learners. The job's record holds the request; only
# the process that received it is remembered here. So a restarted learner gets it again, and so does
# one whose heartbeat contradicts the record because it missed a request or received it late.

_CONTROL_TIMEOUT_S = 5.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class LearnerCommands:
    """Sends each request once to each process of a learner."""

    def __init__(self, broker: Broker) -> None:
        """No requests were sent yet."""
        self._broker = broker
        self._ordered: dict[str, tuple[str, int | None]] = {}
        self._telling: set[str] = set()
        self._astray: set[str] = set()

    def compare(self, record: JobRecord, *, is_paused: bool) -> None:
        """Send the request again if a learner is paused while its job runs, or the reverse.

        `is_paused` is the state in its heartbeat.
        """
        key, should_pause = key_of(record), record.state == "PAUSED"
        if record.state not in ("RUNNING", "PAUSED") or is_paused == should_pause:
            self._astray.discard(key)
            return
        self._astray.add(key)
        self._ordered.pop(key, None)

    def send_pending(
        self,
        key: str,
        record: JobRecord,
        learner: ActorStatus | None,
        group: asyncio.TaskGroup,
    ) -> None:
        """Request the learner to stop, pause or continue, once, in a task of `group`."""
        verb = _verb_for(record, is_astray=key in self._astray)
        if verb is None:
            self._ordered.pop(key, None)
            return
        if learner is None or learner.state != "running" or key in self._telling:
            return
        if self._ordered.get(key) != (verb, learner.pid):
            self._telling.add(key)
            group.create_task(self._notify(key, record, verb, learner.pid), name=f"{verb} {key}")

    def hand_over(self, record: JobRecord, group: asyncio.TaskGroup) -> None:
        """Request the learner of a silent node to end, in case only the node hangs.

        Otherwise it could continue training beside its successor: each would be fenced off by the
        other's batch records, and the restarting one loses. A learner that cannot receive the
        request cannot write to the log either.
        """
        group.create_task(self._hand_over(record), name=f"hand over {record.job}")

    async def _hand_over(self, record: JobRecord) -> None:
        try:
            await tell_learner(self._broker, record, "hand_over")
            _log.info("learner_told_to_end", job=record.job)
        except errors.TinkermqError as error:
            _log.debug("learner_not_ordered", job=record.job, verb="hand_over", error=error.message)

    def forget(self, key: str) -> None:
        """Forget a job that has ended."""
        self._ordered.pop(key, None)
        self._astray.discard(key)

    async def _notify(
        self, key: str, record: JobRecord, verb: Literal["stop", "pause", "resume"], pid: int | None
    ) -> None:
        try:
            await tell_learner(self._broker, record, verb)
            self._ordered[key] = (verb, pid)
        except errors.TinkermqError as error:  # it may not listen yet; retried next turn
            _log.debug("learner_not_ordered", job=record.job, verb=verb, error=error.message)
        finally:
            self._telling.discard(key)


async def tell_learner(
    broker: Broker, record: JobRecord, verb: Literal["stop", "pause", "resume", "hand_over"]
) -> ControlReply:
    """Send a control request to the learner of a job."""
    return await call(
        broker,
        record.scope.control(states.main_actor(record.actors).name),
        ControlRequest(verb=verb, reason=f"{verb} of the job"),
        ControlReply,
        timeout_s=_CONTROL_TIMEOUT_S,
        waiting_for=f"the {states.main_actor(record.actors).role} of {record.name}",
        idempotent=True,
    )


def _verb_for(record: JobRecord, *, is_astray: bool) -> Literal["stop", "pause", "resume"] | None:
    if record.state in states.ACTIVE and record.stop == "drain":
        return "stop"
    if record.state == "PAUSED":
        return "pause"
    return "resume" if is_astray and record.state == "RUNNING" else None


WHO = "scheduler"
_STARTS_PER_TURN = 32
_PAUSE_S = 0.01  # simultaneous changes share one turn
_IDLE_SHARE = 3.0  # of the turn's duration, so that clients are answered while many jobs wait
_MEANWHILE = (errors.ConflictError, errors.NotFoundError, errors.MessageError)
"""The record was written, removed or damaged since it was read: retried in the next turn."""

Wanted = Mapping[str, list[WantedActor]]


@dataclass(frozen=True)
class _Derived:
    """Values derived from one version of a job's record."""

    record: JobRecord
    request: PlacementRequest | None
    wanted: Wanted


class Reconciler:
    """Reconciles jobs and nodes while its lease lasts."""

    def __init__(
        self,
        broker: Broker,
        jobs: JobStore,
        view: JobsView,
        pool: Nodes,
        lease: LeaderLease,
        timing: Timing,
        notifier: Notifier,
        remover: Remover,
        could_come: Callable[[], list[NodeSlots]] = list,
    ) -> None:
        """Work on `view` and `pool`; `notifier` publishes the ends of jobs.

        A job may wait for nodes in `could_come`.
        """
        self._broker = broker
        self._jobs = jobs
        self._view = view
        self._pool = pool
        self._lease = lease
        self._timing = timing
        self._notifier = notifier
        self._versions = Versions(broker, jobs)
        self._messenger = LearnerCommands(broker)
        self._events = MoveEvents(broker, jobs)
        self._remover = remover
        self._could_come = could_come
        self.decisions = DecisionTimes()
        """Durations of placement."""
        self._hurry = asyncio.Event()
        self._derivations: dict[str, _Derived] = {}
        self._fitting: set[tuple[tuple[int, ...], ...]] = set()
        self._fitting_shape = -1

    def hurry(self) -> None:
        """Start the next turn at once."""
        if self._timing.hurries:
            self._hurry.set()

    def nodes(self) -> list[NodeStatus]:
        """Return the present nodes."""
        return self._pool.nodes()

    def refuse_impossible(self, actors: Sequence[ActorPlacement]) -> None:
        """Raise PlacementError if the pool could not hold the actors even when idle."""
        if self._fitting_shape != self._pool.shape:
            self._fitting, self._fitting_shape = set(), self._pool.shape
        shape = shape_of(actors)
        if shape not in self._fitting:
            idle = [free_slots(node, [], idle=True) for node in self._pool.nodes()]
            refuse_impossible(actors, [*idle, *self._could_come()])
            self._fitting.add(shape)

    @property
    def may_grow(self) -> bool:
        """Return whether the pool can still add machines that have no node."""
        return bool(self._could_come())

    def _slots(self) -> list[NodeSlots]:
        """Return the free slots of each node."""
        desired = self._wanted()
        return [
            free_slots(node, desired[node.node], closed=node.node in self._pool.closed)
            for node in self._pool.nodes()
        ]

    def demand(self) -> Demand:
        """Return the requests that wait for nodes, and the nodes."""
        desired = self._wanted()
        busy = {node.node for node in self._pool.nodes() if desired[node.node] or node.actors}
        shares = self._view.shares(self._timing.aging_s)
        return Demand(self._waiting(), self._slots(), shares, frozenset(busy), time.time())

    async def run(self, stopping: asyncio.Event) -> None:
        """Run turns until `stopping` is set; wait for an unreachable broker."""
        async with asyncio.TaskGroup() as group:
            stop = group.create_task(stopping.wait(), name="stop of the scheduler")
            while not stopping.is_set():
                self._hurry.clear()
                started = time.monotonic()
                try:
                    if self._lease.is_fresh:
                        await self._turn(group)
                except errors.TinkermqError as error:
                    _log.warning("turn_failed", error=error.message, hint=error.hint)
                took_s = time.monotonic() - started
                hurry = asyncio.create_task(self._hurry.wait())
                await asyncio.wait(
                    {stop, hurry}, timeout=self._timing.turn_s, return_when=asyncio.FIRST_COMPLETED
                )
                hurry.cancel()
                await asyncio.sleep(min(max(_PAUSE_S, _IDLE_SHARE * took_s), self._timing.turn_s))

    async def _turn(self, group: asyncio.TaskGroup) -> None:
        await self._view.refresh()
        await self._view.mend(self._jobs)
        await self._fail_unreadable()
        await self._pool.refresh()
        self._rise_above_nodes()
        await self._place()
        await self._sync(group)
        for record in list(self._view.live.values()):
            if not is_queued(record) or record.stop != "no":
                await self._advance(record, group)
        self._events.publish(self._view.untold(), group)
        self._remover.start_removals(group)
        active = [item for item in self._view.live.values() if item.state in states.ACTIVE]
        beats = await self._versions.refresh(active)
        if beats is not None:
            for record in active:
                if (beat := beats.get(key_of(record))) is not None:
                    self._messenger.compare(record, is_paused=beat.state == "paused")

    def _rise_above_nodes(self) -> None:
        """Raise the epoch above that of all nodes: the broker may have lost a higher one."""
        latest = max((node.epoch for node in self._pool.nodes()), default=0)
        if latest > self._lease.epoch:
            _log.warning("epoch_raised", epoch=self._lease.epoch, nodes_have_heard=latest)
            self._lease.rise(latest)

    async def _fail_unreadable(self) -> None:
        """Fail jobs whose configuration this release does not accept, so that others continue."""
        for record in self._view.unread():
            try:
                self._view.config(record)
            except errors.ConfigError as error:
                with contextlib.suppress(*_MEANWHILE):
                    await self._move(record, states.Transition("FAILED", str(error)))

    async def _place(self) -> None:
        started = time.thread_time()
        queue = self._waiting()
        if not queue:
            return
        shares = self._view.shares(self._timing.aging_s)
        placed = place(queue, self._slots(), shares, time.time(), most=_STARTS_PER_TURN)
        self.decisions.note(time.thread_time() - started)
        assigned: dict[str, list[Assignment]] = defaultdict(list)
        for assignment in placed.assignments:
            assigned[assignment.job].append(assignment)
        if len(assigned) >= _STARTS_PER_TURN:
            self.hurry()
        live = self._view.live
        self._view.note_waits(placed)
        await asyncio.gather(*(self._give(key, mine) for key, mine in assigned.items()))
        waits = self._view.waits.items()
        changed = [(key, why) for key, (_, why) in waits if key in live and live[key].reason != why]
        await asyncio.gather(*(self._explain(key, why) for key, why in changed))

    def _waiting(self) -> list[PlacementRequest]:
        """Return requests without nodes: missing actors of running jobs, and queued jobs."""
        matches = (self._derived(key, record).request for key, record in self._view.live.items())
        requests = [item for item in matches if item is not None]
        requests.sort(key=lambda request: (request.whole, request.created))
        return requests

    def _derived(self, key: str, record: JobRecord) -> "_Derived":
        """Return the values derived from a record, computed once per version."""
        derived = self._derivations.get(key)
        if derived is None or derived.record is not record:
            derived = self._derivations[key] = _Derived(
                record, request_of(key, record), self._wanted_by(record)
            )
        return derived

    async def _give(self, key: str, assigned: Sequence[Assignment]) -> None:
        record = self._view.live[key]
        by_actor = {item.actor: item for item in assigned}
        try:
            if not is_queued(record):
                await self._jobs.update(record, lambda now: with_nodes(now, by_actor))
            elif not self._events.closes(key):
                await self._start(record, by_actor)
        except _MEANWHILE:
            return

    async def _start(self, record: JobRecord, by_actor: Mapping[str, Assignment]) -> None:
        config = self._view.config(record)
        try:
            await create_job_streams(
                self._broker,
                record.scope,
                config.limits,
                ack_wait_s=config.generator.ack_wait_s,
                segments=config.keeps_segments,
                operations=record.kind == "tinker",
                checkpoints=config.storage.url == BROKER,
                validation=config.validates and record.kind in ("train", "sft"),
            )
        except errors.BrokerError as error:
            await self._move(record, states.Transition("FAILED", str(error)))
            # earlier assignments
            with contextlib.suppress(errors.BrokerError, errors.DeadlineError):
                await settle_job_streams(self._broker, record.scope)
            return
        fresh = record.model_copy(update={"actors": states.unplaced(record.actors)})
        where = ", ".join(sorted({item.node for item in by_actor.values()}))
        actors = with_nodes(fresh, by_actor).actors
        await self._jobs.transition(
            record, "STARTING", f"placed on {where}", WHO, actors=actors, has_streams=True
        )

    async def _explain(self, key: str, why: str) -> None:
        """Record why a queued job waits, if the reason has changed."""
        with contextlib.suppress(*_MEANWHILE):
            await self._jobs.update(
                self._view.live[key],
                lambda now: now.model_copy(update={"reason": why}) if is_queued(now) else now,
            )

    def _wanted(self) -> Wanted:
        """Return the actors that each node must run, by node."""
        desired: dict[str, list[WantedActor]] = defaultdict(list)
        self._derivations = {
            key: item for key, item in self._derivations.items() if key in self._view.live
        }
        for key, record in self._view.live.items():
            for node, actors in self._derived(key, record).wanted.items():
                desired[node] += actors
        return desired

    def _wanted_by(self, record: JobRecord) -> Wanted:
        desired: dict[str, list[WantedActor]] = defaultdict(list)
        if record.state in states.ACTIVE:
            config = self._view.config(record)
            for actor in record.actors:
                if actor.node is not None:
                    desired[actor.node].append(states.wanted_actor(record, actor, config))
        return desired

    async def _sync(self, group: asyncio.TaskGroup) -> None:
        desired = self._wanted()
        await self._pool.sync(
            {
                node.node: NodeSync(
                    scheduler=self._lease.holder,
                    epoch=self._lease.epoch,
                    actors=desired[node.node],
                    kill=self._to_kill(unwanted(node, desired[node.node])),
                )
                for node in self._pool.nodes()
            },
            group,
        )

    def _to_kill(self, leaving: list[ActorStatus]) -> list[str]:
        """Return the running jobs that were stopped without a checkpoint."""
        result = {(item.user, item.job): self._view.find(item.user, item.job) for item in leaving}
        return sorted(
            JobScope(user, job).key
            for (user, job), record in result.items()
            if record is None or record.stop == "now"
        )

    async def _advance(self, record: JobRecord, group: asyncio.TaskGroup) -> None:
        silent = self._pool.silent(actor.node for actor in record.actors)
        statuses = self._statuses(record)
        max_node_failures = (
            self._view.config(record).limits.max_node_failures if record.configured else 0
        )

        def updated(now: JobRecord) -> JobRecord:
            return now.model_copy(update={"actors": states.with_statuses(now, statuses, silent)})

        try:
            if updated(record) != record:
                record = await self._jobs.update(record, updated)
            step = states.next_state(record, statuses, silent, max_node_failures)
            if step is not None:
                record = await self._move(record, step)
        except _MEANWHILE:
            return
        if is_final(record):
            self._messenger.forget(key_of(record))
        elif step is not None and step.state == "LOST":
            self._messenger.hand_over(record, group)
        elif record.actors:
            main = statuses.get(states.main_actor(record.actors).name)
            self._messenger.send_pending(key_of(record), record, main, group)

    def _statuses(self, record: JobRecord) -> dict[str, ActorStatus]:
        reported = (
            (actor.name, self._pool.status(actor.node, record.user, record.job, actor.name))
            for actor in record.actors
        )
        return {name: status for name, status in reported if status is not None}

    async def _move(self, record: JobRecord, step: states.Transition) -> JobRecord:
        _log.info("job_moved", job=record.job, state=step.state, reason=step.reason)
        changes: dict[str, object] = {}
        if step.state == "QUEUED":
            changes["actors"] = states.unplaced(record.actors)
        elif step.state == "LOST":
            silent = self._pool.silent(actor.node for actor in states.vital(record.actors))
            drained = all(map(self._pool.has_drained, silent))
            changes["losses"] = record.losses + (not drained)
        if step.state in FINAL_STATES:
            changes["actors"] = states.at_rest(record.actors)
        self.hurry()
        ended = step.state in ("CANCELLED", "COMPLETED")
        who = (ended and record.stopped_by) or WHO
        moved = await self._jobs.transition(record, step.state, step.reason, who, **changes)
        if is_final(moved):
            self._notifier.ended(moved)
        return moved
