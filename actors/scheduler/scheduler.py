"""The scheduler: wait for the lease, schedule while it lasts, wait again.

Any number of schedulers may run; the one with the lease answers clients and reconciles. All state
is in the job records and on the nodes, so the next scheduler continues from there.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import cast

from ...broker.client.connection import Broker, drop_old_requests, request_connection
from ...broker.client.rpc import Handler, RequestContext, Service
from ...broker.jetstream.streams import bound_weights, mend_shared
from ...broker.jobs import JobStore, is_final
from ...broker.presence import INTERVAL_S
from ...broker.user_records import Audit
from ...schemas.job import (
    ConfigureRequest,
    JobList,
    JobRecord,
    JobReply,
    JobRequest,
    LabelRequest,
    ListRequest,
    OpenRequest,
    PriorityRequest,
    Removal,
    ResumeRequest,
    ScaleRequest,
    SealingKey,
    SecretsRequest,
    StopRequest,
    SubmitRequest,
    TenantShare,
    TenantShares,
    TrainerUsage,
)
from ...schemas.machines import MachinesConfig
from ...schemas.node import (
    DamagedRecords,
    InspectRequest,
    NodeList,
    NodeStatus,
    some_names,
)
from ...schemas.tinker.operation import TrainerOffers
from ...schemas.user import Quota, QuotaReply
from ...schemas.weights import WeightsBound, WeightsRoom
from ...schemas.wire.errors import BrokerError, FencedError, QuotaError, StateError, TinkermqError
from ...schemas.wire.message import Empty, Message
from ...schemas.wire.subjects import DEFAULT_USER, acting, rpc
from ..runtime import ActorContext, settle_memory
from .jobs import states
from .jobs.removal import Remover
from .jobs.secrets import SecretStore
from .jobs.view import DamageReport, JobsView, RetentionLimits
from .lease import LeaderLease, Timing
from .machines.keeper import MachineKeeper
from .machines.sources import machine_keeper
from .nodes import Nodes
from .notifier import Notifier
from .reconciler import Reconciler, tell_learner
from .submission.access import refuse_removal, refuse_removed
from .submission.dry_run import DryRuns
from .submission.origins import describe_changes, refuse_changes
from .submission.submission import Submission

DEFAULT_TIMING = Timing()
DEFAULT_KEEPING = RetentionLimits()
NO_MACHINES = MachinesConfig.none()
_MEND_S = 0.5
"""How often the leader looks for deleted buckets; a request for one fails after two seconds."""


async def run(
    context: ActorContext,
    timing: Timing = DEFAULT_TIMING,
    keeping: RetentionLimits = DEFAULT_KEEPING,
    machines: MachinesConfig = NO_MACHINES,
) -> None:
    """Schedule until `context.stopping` is set, requesting `machines` as the queue needs them."""
    async with request_connection(context.broker, context.stopping) as requests:
        while requests is not None and not context.stopping.is_set():
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
    jobs = JobStore(broker, wrote=view.enter, missed=view.relist)
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
            numbers = group.create_task(_report_numbers(context, reconciler, view), name="numbers")
            answers = _SchedulerRequests(broker, jobs, view, pool, reconciler, secrets, keeper)
            await answers.open(service)
            mending = group.create_task(_mend_shared(context, lease), name="shared buckets")
            growing = group.create_task(
                keeper.run(reconciler.demand, lambda: lease.is_fresh), name="machines"
            )
            dropping = group.create_task(
                drop_old_requests(requests, service.share), name="requests behind a flood"
            )
            await reconciler.run(context.stopping)
            for task in (telling, numbers, dropping, growing, mending):
                task.cancel()
        finally:
            await view.close()
            await pool.records.close()
        holding.cancel()


async def _mend_shared(context: ActorContext, lease: LeaderLease) -> None:
    """Make deleted buckets that all jobs share again, before those who need them give up."""
    while True:
        await asyncio.sleep(_MEND_S)
        with contextlib.suppress(TinkermqError, TimeoutError):
            if lease.is_fresh and (made := await mend_shared(context.broker)):
                context.log.warning("buckets_made_again", streams=made)


async def _report_numbers(context: ActorContext, reconciler: Reconciler, view: JobsView) -> None:
    """Add the durations of decisions and the number of jobs to the heartbeat."""
    while True:
        context.numbers.update({**reconciler.decisions.numbers(), **view.numbers()})
        await asyncio.sleep(INTERVAL_S)


async def _release(context: ActorContext, lease: LeaderLease) -> None:
    try:
        await lease.release()
    except TinkermqError as error:  # the lease expires by itself
        context.log.warning("lease_not_released", error=error.message)


# -- requests of clients ---------------------------------------------------------------------------

_CHANGES = frozenset(
    {"submit", "configure", "stop", "resume", "scale", "priority", "pause", "unpause", "secrets"}
    | {"label", "archive", "unarchive", "delete"}
)
_MAX_ERROR_CHARS = 300
"""Length of an actor's error in the list of nodes; its job's events have the full text."""


class _SchedulerRequests:
    """Answers clients; every change goes through the job records, so it survives the scheduler."""

    def __init__(
        self,
        broker: Broker,
        jobs: JobStore,
        view: JobsView,
        pool: Nodes,
        reconciler: Reconciler,
        secrets: SecretStore,
        keeper: MachineKeeper,
    ) -> None:
        """Answer from `view` and `pool`, and change `jobs`, on which `reconciler` acts.

        `secrets` are never returned; `keeper` manages a cluster's machines.
        """
        self._broker = broker
        self._jobs = jobs
        self._view = view
        self._pool = pool
        self._keeper = keeper
        self._reconciler = reconciler
        self._submission = Submission(broker, jobs, view, reconciler, secrets)
        self._secrets = secrets
        self._audit = Audit(broker)
        self._damage = DamageReport(broker)
        self._rooms: dict[str, asyncio.Lock] = {}

    async def open(self, service: Service) -> None:
        """Answer on the subjects of every user."""
        service.share.bound = lambda user: self._view.quota(user).max_requests
        dry_runs = DryRuns(self._submission)
        endpoints: list[tuple[str, type[Message], Handler]] = [
            ("submit", SubmitRequest, self.submit),
            ("try", SubmitRequest, dry_runs.try_out),
            ("inspect", InspectRequest, dry_runs.inspect_model),
            ("configure", ConfigureRequest, self.configure),
            ("get", JobRequest, self.get),
            ("list", ListRequest, self.list_jobs),
            ("stop", StopRequest, self.stop),
            ("resume", ResumeRequest, self.resume),
            ("scale", ScaleRequest, self.scale),
            ("priority", PriorityRequest, self.priority),
            ("label", LabelRequest, self.label),
            ("pause", JobRequest, self.pause),
            ("unpause", JobRequest, self.unpause),
            ("nodes", Empty, self.nodes),
            ("machines", Empty, self._keeper.answer),
            ("quota", Empty, self.quota),
            ("trainers", Empty, self.trainers),
            ("tinker-usage", TrainerUsage, self.tinker_usage),
            ("weights-room", WeightsRoom, self.weights_room),
            ("archive", JobRequest, partial(self._remove, removal="archive")),
            ("unarchive", JobRequest, partial(self._remove, removal="unarchive")),
            ("delete", JobRequest, partial(self._remove, removal="delete")),
            ("damaged", Empty, self.damaged),
            ("key", Empty, self.key),
            ("secrets", SecretsRequest, self.secrets),
        ]
        for method, model, handler in endpoints:
            noted = self._noted(method, handler) if method in _CHANGES else handler
            own, of_admins = rpc("*", "scheduler", method), acting("*", "*", "scheduler", method)
            await service.endpoint(method, own, model, noted, fair=True)
            await service.endpoint(f"{method}-as-admin", of_admins, model, noted, fair=True)
        subject = rpc("node", "secrets", "open")
        await service.endpoint("open", subject, OpenRequest, self._secrets.open_for)

    def _noted(self, method: str, handler: Handler) -> Handler:
        """Return a handler that records changes of other users' jobs in the audit stream."""

        async def note(request: Message, context: RequestContext) -> JobReply:
            record = (reply := cast("JobReply", await handler(request, context))).record
            if context.caller != record.user and self._broker.user != DEFAULT_USER:
                target = f"{record.user}/{record.name}"
                await self._audit.write(context.caller, f"jobs.{method}", target=target)
            return reply

        return note

    async def submit(self, request: SubmitRequest, context: RequestContext) -> JobReply:
        """Create a job."""
        return JobReply(record=await self._submission.submit(context.user, request))

    async def configure(self, request: ConfigureRequest, context: RequestContext) -> JobReply:
        """Complete the configuration of a job."""
        return JobReply(record=await self._submission.configure(context.user, request))

    async def get(self, request: JobRequest, context: RequestContext) -> JobReply:
        """Return one job."""
        record = await self._view.steered(context.user, request.job)
        return JobReply(record=self._view.with_queue_place(record))

    async def list_jobs(self, request: ListRequest, context: RequestContext) -> JobList:
        """Return a page of the user's jobs, or for an admin of all jobs."""
        everybody = request.widest and self._view.is_admin(context.user)
        user = None if everybody else context.user
        archive = self._view.archive
        async with archive.turns.turn(context.caller):
            records = [
                record for record in self._view.records(user) if request.all or not is_final(record)
            ]
            jobs = self._view.with_archived(records, user) if request.archived else records
            page, after = self._view.page(jobs, request.after)
        reply = await archive.read(page, context.caller)
        return JobList(records=[self._view.with_queue_place(item) for item in reply], after=after)

    async def nodes(self, _: Empty, context: RequestContext) -> NodeList:
        """Return the present nodes; only admins see the owners of others' actors."""
        nodes = [_short(node) for node in self._pool.list_statuses()]
        if not self._view.is_admin(context.user):
            nodes = [_shown(node, context.user) for node in nodes]
        return NodeList(nodes=nodes, trouble=self._trouble())

    def _trouble(self) -> str:
        """Return what the scheduler waits for; empty if nothing."""
        if (trouble := self._broker.availability.trouble) is not None:
            return trouble.text
        if refusing := self._pool.refusing:
            names = some_names(refusing)
            return f"nodes that know a later scheduler and refuse this one: {names}"
        return ""

    async def quota(self, _: Empty, context: RequestContext) -> QuotaReply:
        """Return the user's quota and holdings."""
        quota = {name: getattr(self._view.quota(context.user), name) for name in Quota.model_fields}
        return QuotaReply(**quota, held=self._view.held(context.user))

    async def trainers(self, _: Empty) -> TrainerOffers:
        """Return the base models that all users may train through the Tinker API."""
        return TrainerOffers(offers=self._view.offers())

    async def tinker_usage(self, usage: TrainerUsage, context: RequestContext) -> TenantShares:
        """Record the tokens used at a Tinker service by its users, and return their shares.

        Raises StateError for other kinds of jobs, whose owners could use up others' quotas.
        """
        record = await self._view.get(context.user, usage.job)
        if record.kind != "tinker":
            raise StateError(
                f"run {record.name} is of kind {record.kind} and has no usage to report",
                hint="services for the Tinker API report what their users have used",
            )
        if states.with_usage(record, usage) is not record:
            await self._jobs.update(record, lambda now: states.with_usage(now, usage))
        return TenantShares(users={user: self._share(user) for user in usage.tokens})

    async def weights_room(self, request: WeightsRoom, context: RequestContext) -> WeightsBound:
        """Set the size limit for a running job's weight versions to what its model needs.

        Raises QuotaError, BrokerError if the server has no room, StateError.
        """
        async with self._rooms.setdefault(context.user, asyncio.Lock()):  # one by one
            record = await self._view.get(context.user, request.job)
            if record.state not in states.ACTIVE:
                raise StateError(
                    f"job {record.job} is {record.state} and publishes no weights",
                    hint="resume it: `tinkermq resume`",
                )
            try:
                return await self._bound_weights(record, request.wanted_bytes)
            except (QuotaError, BrokerError):
                return await self._bound_weights(record, request.least_bytes)

    async def _bound_weights(self, record: JobRecord, num_bytes: int) -> WeightsBound:
        """Set the limit, which counts among the bytes of the user's streams."""
        stored = states.reserved_bytes(self._view.config(record)) + num_bytes
        self._view.check_room(record.user, max_stored_bytes=stored - states.stored_bytes(record))
        await bound_weights(self._broker, record.scope, num_bytes)
        await self._jobs.set_fields(record, stored_bytes=stored)
        return WeightsBound(num_bytes=num_bytes)

    def _share(self, user: str) -> TenantShare:
        quota = self._view.quota(user)
        left = None
        if quota.max_tinker_tokens is not None:
            left = max(quota.max_tinker_tokens - self._view.tinker_tokens(user), 0)
        return TenantShare(weight=quota.weight, tokens_left=left)

    async def damaged(self, _: Empty, context: RequestContext) -> DamagedRecords:
        """Return the user's unreadable records; for admins those of the whole pool."""
        everything = self._view.may_administer(context.user)
        return await self._damage.read("" if everything else context.user)

    async def key(self, _: Empty) -> SealingKey:
        """Return the key with which clients seal secrets."""
        return self._secrets.key

    async def secrets(self, request: SecretsRequest, context: RequestContext) -> JobReply:
        """Store secrets of a job until it ends."""
        record = await self._view.get(context.user, request.job)
        refuse_removed(record)
        names = await self._secrets.add_sealed(record.scope, request.sealed)
        return JobReply(record=await self._jobs.set_fields(record, secrets=names))

    async def stop(self, request: StopRequest, context: RequestContext) -> JobReply:
        """Stop a job: the learner drains with a checkpoint, or everything ends now.

        An ended job does not change; a later `now` overrides an earlier drain.
        """
        record = await self._view.steered(context.user, request.job)
        if is_final(record):
            return JobReply(record=record)
        how = "now" if request.now or record.stop == "now" else "drain"

        def ask(current: JobRecord) -> JobRecord:
            if is_final(current):
                return current
            return current.model_copy(
                update={
                    "stop": how,
                    "stop_complete": request.complete or current.stop_complete,
                    "stopped_by": current.stopped_by or context.who,
                }
            )

        return JobReply(record=await self._jobs.update(record, ask))

    async def resume(self, request: ResumeRequest, context: RequestContext) -> JobReply:
        """Queue an ended job again, or continue a paused one; other jobs do not change.

        Only an ended job accepts other values of its configuration.
        """
        async with self._alone(request, context):
            record = await self._view.steered(context.user, request.job)
            if not is_final(record):
                refuse_changes(record, request.config)
                paused = record.state == "PAUSED"
                job = JobRequest(job=request.job)
                return await self.unpause(job, context) if paused else JobReply(record=record)
            again = await self._submission.resumed(record, request.config)
            why = describe_changes(request.config)
            record = await self._jobs.transition(record, "QUEUED", why, context.who, **again)
        return JobReply(record=record)

    @contextlib.asynccontextmanager
    async def _alone(
        self,
        request: ResumeRequest | ScaleRequest | LabelRequest | JobRequest,
        context: RequestContext,
    ) -> AsyncIterator[None]:
        """Hold the lock for requests about the owner's jobs."""
        record = await self._view.steered(context.user, request.job)
        async with self._view.lock(record.user):
            yield

    async def scale(self, request: ScaleRequest, context: RequestContext) -> JobReply:
        """Change a job's number of generators or environment hosts; it need not be running."""
        async with self._alone(request, context):
            return JobReply(record=await self._scale(request, context))

    async def _scale(self, request: ScaleRequest, context: RequestContext) -> JobRecord:
        record = await self._view.steered(context.user, request.job)
        if is_final(record) or not record.configured:
            raise StateError(
                f"run {record.name} is {record.state} and has no actors to scale",
                hint="scale a run that is queued or running",
            )
        if request.role == "server" and request.count < 1:
            raise StateError(
                f"run {record.name} needs a server", hint=f"end it: `tinkermq stop {record.name}`"
            )
        config = self._view.config(record)
        slots = 0 if request.role == "environment" else config.generator_slots
        actors = states.scaled(record.actors, request.role, request.count, slots)
        if request.role == "generator" and record.is_colocated and actors != record.actors:
            raise StateError(
                f"the generator of run {record.name} shares the learner's GPU, on which there is "
                "room for one",
                hint="set placement=separate and resume the run on several GPUs",
            )
        if len(actors) > len(record.actors):
            self._reconciler.refuse_impossible(actors)
            self._view.check_alone(record.user, actors)
            added = actors[len(record.actors) :]
            self._view.check_room(
                record.user, max_slots=states.slots_of(added), max_actors=len(added)
            )
            grown = record.model_copy(update={"actors": actors})
            self._view.check_growth(record, grown)

        def resize(current: JobRecord) -> JobRecord:
            actors = states.scaled(current.actors, request.role, request.count, slots)
            return current.model_copy(update={"actors": actors})

        return await self._jobs.update(record, resize)

    async def priority(self, request: PriorityRequest, context: RequestContext) -> JobReply:
        """Change the priority of a job; it has an effect while the job, or part of it, waits."""
        record = await self._view.steered(context.user, request.job)
        if is_final(record):
            raise StateError(
                f"run {record.name} is {record.state}; its priority has no effect any more",
                hint="see what waits: `tinkermq ps`",
            )
        self._view.check_priority(context.user, request.priority)
        return JobReply(record=await self._jobs.set_fields(record, priority=request.priority))

    async def label(self, request: LabelRequest, context: RequestContext) -> JobReply:
        """Change a job's tags, group and notes, which do not affect its work."""
        async with self._alone(request, context):
            record = await self._view.steered(context.user, request.job)
            refuse_removed(record)
            reported = request.model_dump(include={"tags", "group", "notes"}, exclude_none=True)
            labels = (
                {**reported, "group": request.group or None} if "group" in reported else reported
            )

            def change(current: JobRecord) -> JobRecord:
                return current.model_copy(update={"config": {**current.config, **labels}})

            self._view.check_growth(record, change(record))
            return JobReply(record=await self._jobs.update(record, change))

    async def _remove(
        self, request: JobRequest, context: RequestContext, *, removal: Removal
    ) -> JobReply:
        """Record the requested removal, which the reconciler carries out."""
        # not while the job, or a dependent job, is being started
        async with self._alone(request, context):
            record = await self._view.steered(context.user, request.job)
            if record.removal == removal or (removal == "archive" and record.archived is not None):
                return JobReply(record=record)
            refuse_removal(record, removal, self._view.records())
            if self._view.find(record.user, record.job) is None:  # archived
                record = await self._jobs.take_back(record, removal)
                self._reconciler.hurry()
                return JobReply(record=record)

            def mark(current: JobRecord) -> JobRecord:
                refuse_removal(current, removal, [])
                return current.model_copy(update={"removal": removal})

            record = await self._jobs.update(record, mark)
        self._reconciler.hurry()
        return JobReply(record=record)

    async def pause(self, request: JobRequest, context: RequestContext) -> JobReply:
        """Pause a job's learner; its actors keep their slots."""
        record = await self._view.steered(context.user, request.job)
        if record.state == "PAUSED":
            return JobReply(record=record)
        if record.state != "RUNNING":
            raise StateError(
                f"run {record.name} is {record.state}; only a RUNNING run can be paused",
                hint="see its state: `tinkermq ps`",
            )
        await tell_learner(self._broker, record, "pause")
        who = context.who
        return JobReply(record=await self._jobs.transition(record, "PAUSED", "paused", who))

    async def unpause(self, request: JobRequest, context: RequestContext) -> JobReply:
        """Continue a paused job."""
        record = await self._view.steered(context.user, request.job)
        if record.state == "RUNNING":
            return JobReply(record=record)
        if record.state != "PAUSED":
            raise StateError(
                f"run {record.name} is {record.state}, not PAUSED",
                hint="continue an ended run with `tinkermq resume`",
            )
        who = context.who
        record = await self._jobs.transition(record, "RUNNING", "goes on after a pause", who)
        await tell_learner(self._broker, record, "resume")
        return JobReply(record=record)


def _short(node: NodeStatus) -> NodeStatus:
    """Return a node with shortened actor errors, since one message has all nodes."""
    actors = [
        actor.model_copy(update={"error": actor.error[:_MAX_ERROR_CHARS]}) if actor.error else actor
        for actor in node.actors
    ]
    return node.model_copy(update={"actors": actors})


def _shown(node: NodeStatus, user: str) -> NodeStatus:
    """Return a node without the names, jobs and errors of other users."""
    hidden = {"user": "", "job": "", "name": "", "error": "", "pid": None}
    actors = [
        actor if actor.user == user else actor.model_copy(update=hidden) for actor in node.actors
    ]
    return node.model_copy(update={"actors": actors})
