"""The node: runs exactly the actors that the scheduler requested last.

A sync names every actor that the node must run. Missing ones are started, extra ones are stopped,
and running ones stay, so the scheduler may die, return and repeat the request at any time. Actors
are children that die with the node; a restarted node has none until the next sync.
"""

import asyncio
import contextlib
import platform
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import structlog

from ...broker.client.connection import Broker
from ...broker.client.login import KEY_VARIABLE
from ...broker.client.rpc import Service, call
from ...broker.feed import publish_log
from ...broker.jetstream.kv import Bucket
from ...broker.jetstream.streams import stream_info
from ...schemas.job import OpenedSecrets, OpenRequest
from ...schemas.metric import LogLines, Presence
from ...schemas.node import (
    ActorStatus,
    NodeStatus,
    NodeSync,
    RemoveRun,
    WantedActor,
)
from ...schemas.user import JobKeyRequest, NewKey
from ...schemas.wire.errors import (
    AuthError,
    DeadlineError,
    FencedError,
    NotFoundError,
    StateError,
    TinkermqError,
)
from ...schemas.wire.message import Empty, Message
from ...schemas.wire.subjects import BUCKET_ACTORS, BUCKET_NODES, JobScope, rpc
from ...schemas.wire.subjects import node as node_subject
from ..gpus import Gpus
from ..storage.run_folders import remove_run_folder
from ..weights.shared_memory import sweep
from .checks import serve_checks
from .children import ActorStarter, Child, StartChild, StartFailed
from .process import (
    STOP_DEADLINE_S,
    ActorProcess,
    silence_bound,
)
from .sandbox import StartRefused

# -- keys and secrets for one process --------------------------------------------------------------
#
# They are requested at each start, not stored on the node, and passed in the environment, from
# which the process removes them.

R = TypeVar("R", bound=Message)

_TIMEOUT_S = 5.0
_KEY_PATIENCE_S = 15.0
_PAUSE_S = 0.5


def with_job_keys(broker: Broker, start: StartChild) -> StartChild:
    """Return a function that starts actors like `start`, with a key from the auth service."""

    async def fetch(spec: WantedActor) -> Mapping[str, str]:
        request = JobKeyRequest(user=spec.user, job=spec.job, actor=spec.name, attempt=spec.attempt)
        subject, patience_s = rpc("node", "keys", "job"), _KEY_PATIENCE_S
        reply = await _call_service(
            broker, subject, request, NewKey, "the auth service", patience_s
        )
        return {KEY_VARIABLE: reply.secret}

    return _starting_with(fetch, start)


def with_secrets(broker: Broker, start: StartChild) -> StartChild:
    """Return a function that starts actors like `start`, with their secrets."""

    async def fetch(spec: WantedActor) -> Mapping[str, str]:
        if not spec.secrets:
            return {}
        request = OpenRequest(user=spec.user, job=spec.job, actor=spec.name, attempt=spec.attempt)
        subject = rpc("node", "secrets", "open")
        reply = await _call_service(broker, subject, request, OpenedSecrets, "the scheduler")
        return {str(name): value for name, value in reply.values.items()}

    return _starting_with(fetch, start)


def _starting_with(
    fetch: Callable[[WantedActor], Awaitable[Mapping[str, str]]], start: StartChild
) -> StartChild:
    async def start_with(spec: WantedActor, environment: Mapping[str, str], output: int) -> Child:
        return await start(spec, {**environment, **await fetch(spec)}, output)

    return start_with


async def _call_service(
    broker: Broker,
    subject: str,
    request: Message,
    reply: type[R],
    service: str,
    patience_s: float = 0.0,
) -> R:
    """Repeat a request until `service` answers.

    Raises StartFailed while it does not answer, which is not a failure of the actor, and OSError
    when it refuses.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            return await call(
                broker,
                subject,
                request,
                reply,
                timeout_s=_TIMEOUT_S,
                waiting_for=service,
                idempotent=True,
            )
        except TinkermqError as error:
            if isinstance(error, AuthError):
                raise OSError(f"{service} gave nothing: {error.message}") from error
            if loop.time() >= deadline:
                raise StartFailed(f"{service} gave nothing: {error.message}") from error
        await asyncio.sleep(_PAUSE_S)


# -- the node --------------------------------------------------------------------------------------

RECORD_S = 2.0
_STORES_S = 10.0
_RECORD_PAUSE_S = 0.05
_BEAT_DEADLINE_S = 2.0
_DRAIN_S = STOP_DEADLINE_S + 5.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()

ActorKey = tuple[str, str, str]


class Node:
    """The actors of one machine."""

    def __init__(
        self,
        broker: Broker,
        name: str,
        slots: int,
        *,
        gpus: Gpus | None = None,
        link: str = "",
        packages: Mapping[str, str] | None = None,
        start: StartChild | None = None,
        stop_deadline_s: float = STOP_DEADLINE_S,
    ) -> None:
        """Each of `gpus` is a slot; without them there are `slots` CPU shares.

        `packages` are the versions of its actors' packages; `start` replaces the usual way to start
        an actor.
        """
        self.name = name
        self._broker = broker
        self._gpus = gpus
        self._gpu_use = gpus.read() if gpus else []
        self._slots = len(gpus) if gpus else slots
        self._link = link
        self._packages = dict(packages or {})
        self._has_users = broker.user == "node"  # as a service of a pool with authentication
        self._starter = ActorStarter(sandbox_games=self._has_users)
        self._start_child = with_secrets(broker, start or self._starter.start)
        if self._has_users:
            self._start_child = with_job_keys(broker, self._start_child)
        self._stop_deadline_s = stop_deadline_s
        self._actors: dict[ActorKey, ActorProcess] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._epoch = 0
        self._draining = False
        self._records = Bucket(broker, BUCKET_NODES, NodeStatus)
        self._changed = asyncio.Event()
        self._recorded = float("-inf")
        self._silence_s = silence_bound()
        self._store_made = ""
        self._store_lost: float | None = None
        self.store_seen = False
        """Whether the node has checked the broker's store since it connected."""
        self._beats = Bucket(broker, BUCKET_ACTORS, Presence, deadline_s=_BEAT_DEADLINE_S)

    def status(self) -> NodeStatus:
        """The node and its actors, as it reports them."""
        gpus = self._gpu_use
        return NodeStatus(
            node=self.name,
            host=socket.gethostname(),
            slots=self._slots,
            slot_kind="gpu" if gpus else "cpu",
            slot_model=gpus[0].model if gpus else platform.processor() or platform.machine(),
            groups=self._gpus.groups if self._gpus else [],
            groups_by=self._gpus.groups_by if self._gpus else "",
            link=self._link,
            gpus=gpus,
            actors=[_reported(actor) for actor in self._actors.values()],
            draining=self._draining,
            packages=self._packages,
            time=time.time(),
            epoch=self._epoch,
            store_lost=self._store_lost,
        )

    async def sync(self, request: NodeSync) -> NodeStatus:
        """Start and stop actors until exactly the requested ones run; answers at once.

        Raises FencedError for a scheduler that another has replaced.
        """
        if request.epoch < self._epoch:
            raise FencedError(
                f"scheduler {request.scheduler} has been replaced by another",
                hint="let it wait for its lease",
            )
        self._epoch = request.epoch
        specs = {(actor.user, actor.job, actor.name): actor for actor in request.actors}
        for key in set(self._actors) - set(specs):
            self._remove(key, kill=f"{key[0]}.{key[1]}" in request.kill)
        if not self._draining:
            for key, actor in specs.items():
                self._ensure(key, actor)
        return self.status()

    def _remove(self, key: ActorKey, *, kill: bool) -> None:
        actor = self._actors[key]
        if actor.ended:
            del self._actors[key]
        else:
            actor.stop(kill=kill)

    def _ensure(self, key: ActorKey, spec: WantedActor) -> None:
        """Run the actor; one of an older attempt, or one being stopped, ends first."""
        present = self._actors.get(key)
        if present is not None:
            is_current = present.spec.attempt == spec.attempt and not present.stopping
            if is_current or not present.ended:
                if not is_current:
                    present.stop()
                return
        self._start(key, spec)

    def _start(self, key: ActorKey, spec: WantedActor) -> None:
        assert self._tasks is not None
        scope = JobScope(spec.user, spec.job)

        async def send(lines: LogLines) -> None:
            await publish_log(self._broker, scope, lines)

        async def last_beat() -> Presence | None:
            if time.monotonic() - self._recorded > _STORES_S:
                raise DeadlineError("the broker stores nothing: no heartbeat can be there")
            entry = await self._beats.get(f"{scope.key}.{spec.name}")
            return None if entry is None else entry.value

        start, gpus = self._start_child, None
        if self._gpus and max(spec.devices, default=0) < len(self._gpus):
            gpus = self._gpus.uuids(spec.devices)
        elif self._gpus:  # the node was restarted with fewer slots
            start = _refuse_to_start(
                f"slot {max(spec.devices)} of node {self.name} was given to it, and the node has "
                f"{len(self._gpus)} GPUs by now; resume the job: it is placed anew"
            )
        actor = ActorProcess(
            spec,
            start=start,
            nats_url=self._broker.url,
            send=send,
            gpus=gpus,
            stop_deadline_s=self._stop_deadline_s,
            changed=self._changed.set,
            last_beat=last_beat,
            silence_s=self._silence_s,
        )
        self._actors[key] = actor
        self._tasks.create_task(actor.run(), name=f"actor {'.'.join(key)}")

    async def run(self, service: Service, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then drain.

        Raises StateError if a node of this name answers already.
        """
        await self._refuse_second()
        self._broker.on_reconnect(self._see_store_again)
        async with asyncio.TaskGroup() as self._tasks:
            record = self._tasks.create_task(self._keep_record(), name="node record")
            await service.endpoint("sync", node_subject(self.name, "sync"), NodeSync, self.sync)
            await service.endpoint(
                "status", node_subject(self.name, "status"), Empty, self._answer_status
            )
            await service.endpoint(
                "remove", node_subject(self.name, "remove"), RemoveRun, self._remove_run
            )
            await serve_checks(service, self.name, sandbox_games=self._has_users)
            await stopping.wait()
            await self._drain()
            await self._starter.close()
            record.cancel()
            await asyncio.to_thread(sweep, 0.0)
        await self._leave()

    async def _remove_run(self, request: RemoveRun) -> Empty:
        """Remove the folder of a job that was deleted; raises StateError while it runs here."""
        if any(key[:2] == (request.user, request.job) for key in self._actors):
            raise StateError(f"job {request.job} still has actors on node {self.name}")
        await asyncio.to_thread(remove_run_folder, request.run_dir, request.job)
        return Empty()

    async def _answer_status(self, _: Empty) -> NodeStatus:
        return self.status()

    async def _refuse_second(self) -> None:
        try:
            other = await call(
                self._broker,
                node_subject(self.name, "status"),
                Empty(),
                NodeStatus,
                timeout_s=2.0,
                waiting_for=f"a second node {self.name!r}",
                idempotent=True,
            )
        except (NotFoundError, DeadlineError):
            return
        raise StateError(
            f"a node named {self.name!r} runs already on host {other.host}",
            hint="give this one another name with --name",
        )

    async def _keep_record(self) -> None:
        """Write the node's record when it changes and every two seconds.

        Schedulers find the node by its record, and learn of changes of actors at once.
        """
        while True:
            self._changed.clear()
            if self._gpus:
                self._gpu_use = await asyncio.to_thread(self._gpus.read)  # the driver may be slow
            try:
                await self._records.put(self.name, self.status())
                self._recorded = time.monotonic()
                await self._look_at_store()
            except TinkermqError as error:
                _log.warning("node_record_failed", error=str(error))
            await asyncio.to_thread(sweep)  # versions that killed actors have left in memory
            await asyncio.sleep(_RECORD_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECORD_S):
                    await self._changed.wait()

    async def _look_at_store(self) -> None:
        """Detect that the broker lost its store while it was away."""
        if self.store_seen:
            return
        made = str((await stream_info(self._broker, f"KV_{BUCKET_NODES}"))["created"])
        if self._store_made not in ("", made):
            self._store_lost = time.time()
            _log.error("store_lost", made=made, before=self._store_made)
            self._changed.set()
        self._store_made, self.store_seen = made, True

    def _see_store_again(self) -> None:
        self.store_seen = False

    async def _drain(self) -> None:
        """Stop all actors; `ActorProcess` kills those that do not end by their deadline."""
        self._draining = True
        self._changed.set()
        for actor in self._actors.values():
            actor.stop()
        async with asyncio.timeout(_DRAIN_S):
            while not all(actor.ended for actor in self._actors.values()):  # noqa: ASYNC110  each actor ends in a task of its own
                await asyncio.sleep(0.02)

    async def _leave(self) -> None:
        """Remove the record, so schedulers need not wait for missing heartbeats."""
        try:
            await self._records.delete(self.name)
        except TinkermqError as error:
            _log.warning("node_record_failed", error=str(error))


def _refuse_to_start(why: str) -> StartChild:
    async def refuse(*_: object) -> Child:
        raise StartRefused(why)

    return refuse


def _reported(actor: ActorProcess) -> ActorStatus:
    """Return an actor's status; one that the node itself ended has not exited by itself."""
    status = actor.status
    if actor.stopping and status.state in {"running", "exited"}:
        return status.model_copy(update={"state": "restarting"})
    return status
