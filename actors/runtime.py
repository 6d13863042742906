"""Shared code of all actors: start, logs, heartbeat, micro service, signals, end.

An actor's module parses its arguments, then calls `run_actor` with a coroutine function. That
function gets an `ActorContext` and returns when the work is done or `stopping` is set. The exit
code decides on a restart by the node: after 0 (done) and 2 (a mistake of the user, which a restart
cannot repair) the actor has ended; after any other code it is restarted if the job still needs it.
"""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import hashlib
import logging
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import structlog
import uvloop

from ..broker.client.connection import Broker, connected
from ..broker.client.login import take_login
from ..broker.client.rpc import RequestContext, Service
from ..broker.feed import publish_event
from ..broker.jetstream.kv import Bucket
from ..broker.jetstream.streams import create_shared, wait_for_shared
from ..broker.presence import PresenceBeat
from ..envs.dataset import guard_datasets
from ..schemas.config.job import JobConfig
from ..schemas.config.load_config import parse_config
from ..schemas.control import ControlReply, ControlRequest
from ..schemas.job import JobRecord
from ..schemas.local.process import notifying_systemd
from ..schemas.local.proxies import keep_proxies_out
from ..schemas.metric import Event, Presence
from ..schemas.version import VERSION
from ..schemas.wire.errors import (
    NotFoundError,
    RewoundError,
    StateError,
    TinkermqError,
    root_cause,
)
from ..schemas.wire.subjects import BUCKET_JOBS, JobScope
from .addresses import settle_interface
from .storage.access import refuse_files_of_others, refuse_links_to_others
from .storage.cache import fetch_models
from .storage.held_models import held_models

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_FAILED = 2
EXIT_DRAINED = 3
EXIT_OUT_OF_MEMORY = 4
"""Of a rank's process."""
"""Exit code of an actor that was stopped before its work was done: another node continues it."""
SLOW_CALLBACK_S = 0.05
WAITERS = frozenset({"node", "gateway"})
"""Services that may not create the buckets that all jobs share, and wait for them."""
_SHARED_DEADLINE_S = 60.0
_MOST_TEXTS = 1024

S = TypeVar("S")
T = TypeVar("T")
ControlHandler = Callable[[ControlRequest], Awaitable[dict[str, Any]]]


@dataclass
class ActorContext:
    """An actor's connection, name, stop signal and heartbeat."""

    broker: Broker
    role: str
    name: str
    log: structlog.stdlib.BoundLogger
    stopping: asyncio.Event
    service: Service
    presence: Presence
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    step: int | None = None
    stop_asked: bool = False
    """Set when a control request ends this actor for good."""
    _waits: list[tuple[str, float | None]] = field(default_factory=list[tuple[str, float | None]])
    on_progress: Callable[[], None] = lambda: None

    def progressed(self) -> None:
        """Count finished work in the heartbeat, which the node reads after a failure."""
        self.presence = self.presence.model_copy(update={"progress": self.presence.progress + 1})
        if self.presence.progress == 1:
            self.on_progress()

    def set_state(self, state: str, *, version: int | None = None) -> None:
        """Record the actor's present work in the heartbeat."""
        changes: dict[str, Any] = {"state": state}
        if version is not None:
            changes["version"] = version
        self.presence = self.presence.model_copy(update=changes)

    @contextlib.contextmanager
    def waiting(self, for_what: str) -> Iterator[None]:
        """Record a wait in the heartbeat, which shows why a job is stuck."""
        with self._named((for_what, None)):
            yield

    @contextlib.contextmanager
    def missing(self, what: str, since: float | None = None) -> Iterator[None]:
        """Record a wait for something outside the pool since a time (default: now)."""
        with self._named((what, time.time() if since is None else since)):
            yield

    @property
    def misses(self) -> bool:
        """Return whether the actor waits for something outside the pool."""
        return any(since is not None for _, since in self._waits)

    @contextlib.contextmanager
    def _named(self, wait: tuple[str, float | None]) -> Iterator[None]:
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    async def unless_stopping(self, awaitable: Coroutine[Any, Any, T], stopped: S) -> T | S:
        """Await an awaitable, or return `stopped` once `stopping` is set."""
        work = asyncio.ensure_future(awaitable)
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else stopped
        finally:
            for task in (work, stop):
                task.cancel()

    def beat(self) -> Presence:
        """Return the current heartbeat."""
        missing = [wait for wait in self._waits if wait[1] is not None]
        waits_for, since = (missing or self._waits or [("", None)])[0 if missing else -1]
        if (trouble := self.broker.availability.trouble) is not None:
            waits_for, since = trouble
        state = "draining" if self.stopping.is_set() else self.presence.state
        return self.presence.model_copy(
            update={
                "waits_for": waits_for,
                "missing_since": since,
                "state": state,
                "numbers": dict(self.numbers),
                "time": time.time(),
            }
        )


class Repeats:
    """Counts equal texts, so that what repeats is reported once, and then at each doubling."""

    def __init__(self) -> None:
        """Start with none."""
        self._counts: Counter[str] = Counter()

    def due(self, text: str) -> int:
        """Count a text; return how often it came, or 0 if that need not be reported."""
        if len(self._counts) >= _MOST_TEXTS:
            self._counts.clear()
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        self._counts[digest] += 1
        count = self._counts[digest]
        return 0 if count & (count - 1) else count


@dataclass
class JobContext(ActorContext):
    """The context of an actor that belongs to a job."""

    scope: JobScope = field(default_factory=lambda: JobScope("local", "none"))
    record: JobRecord = field(kw_only=True)
    config: JobConfig = field(kw_only=True)
    own_bytes: Callable[[], dict[str, int]] = dict
    """Known bytes of this actor's memory by kind."""
    given_up: Repeats = field(default_factory=Repeats)
    """The errors of tasks that this actor gave up."""
    _control_handler: ControlHandler | None = None
    _serves_control: bool = False

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.record.run_dir)

    @property
    def hidden(self) -> Path | None:
        """The folder of the run in a pool with users, whose own code does not see it; else None."""
        return self.run_dir if self.broker.login.is_authenticated else None

    async def event(self, kind: str, message: str = "", **data: Any) -> None:
        """Publish an event of the job, and log it."""
        self.log.info(kind, message=message, **data)
        event = Event(kind=kind, source=self.name, message=message, data=data, time=time.time())
        await publish_event(self.broker, self.scope, event)

    async def failed(self, error: TinkermqError) -> None:
        """Publish the event of an error that ends this actor; equal errors of one attempt once."""
        digest = hashlib.sha256(f"{error.code} {error}".encode(errors="replace")).hexdigest()
        event = Event(
            kind="actor_failed",
            source=self.name,
            message=str(error),
            data={"code": error.code},
            time=time.time(),
        )
        once = f"actor_failed {self.record.attempt} {digest}"
        await publish_event(self.broker, self.scope, event, message_id=once)

    async def serve_control(self, handler: ControlHandler | None = None) -> None:
        """Answer control requests with the actor's `handler`; without one, `stop` drains the actor.

        It may be called again with the handler of an actor that has finished starting.
        """
        first = not self._serves_control
        self._control_handler, self._serves_control = handler, True
        if first:
            for subject in (self.scope.control(self.name), self.scope.control_by("*", self.name)):
                await self.service.endpoint("control", subject, ControlRequest, self._control)

    async def _control(self, request: ControlRequest, context: RequestContext) -> ControlReply:
        detail: dict[str, Any] = {}
        if context.caller != context.user:
            await self.event("control_by_admin", f"{request.verb} asked for by {context.who}")
        if request.verb == "hand_over":
            self.stopping.set()
        elif request.verb == "memory":
            memory = await asyncio.to_thread(read_process_memory)
            detail = {"memory": memory, "parts": self.own_bytes()}
        elif self._control_handler is not None:
            detail = await self._control_handler(request)
        elif request.verb == "stop":
            self.stop_asked = True
            self.stopping.set()
        elif request.verb != "status":
            raise StateError(
                f"{self.name} cannot {request.verb}: it is {self.presence.state}",
                hint="the learner can, once it has started",
            )
        return ControlReply(actor=self.name, step=self.step, detail=detail)


def settle_memory() -> None:
    """Exclude the objects of the start-up from garbage collection, and let it run less often.

    A full collection walks every module of torch and transformers. Call this once an actor is ready
    to work.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def actor_arguments(role: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of an actor of a job; no large package is imported before this."""
    parser = argparse.ArgumentParser(prog=f"python -m tinkermq.actors.{role}")
    _add_nats(parser)
    parser.add_argument("--user", default="local", help="owner of the job (default: local)")
    parser.add_argument("--job", required=True, help="job id")
    parser.add_argument("--name", default=role, help=f"name within the job (default: {role})")
    return parser.parse_args(argv)


def _add_nats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nats",
        default=os.environ.get("TINKERMQ_NATS_URL", "nats://127.0.0.1:4222"),
        help="URL of the broker (default: $TINKERMQ_NATS_URL)",
    )


def service_parser(role: str) -> argparse.ArgumentParser:
    """Return the parser of an actor that belongs to no job, to be extended."""
    parser = argparse.ArgumentParser(prog=f"python -m tinkermq.actors.{role}")
    _add_nats(parser)
    return parser


def run_job_actor(
    role: str,
    main: Callable[[JobContext], Awaitable[int | None]],
    argv: Sequence[str] | None = None,
) -> int:
    """Run one actor of a job until it is done; return the exit code."""
    arguments = actor_arguments(role, argv)
    scope = JobScope(arguments.user, arguments.job)

    async def body(broker: Broker, stopping: asyncio.Event) -> int | None:
        record = await _job_record(broker, scope)
        service = await _start_service(broker, role, arguments.name, scope)
        context = JobContext(
            broker=broker,
            role=role,
            name=arguments.name,
            log=structlog.get_logger(),
            stopping=stopping,
            service=service,
            presence=_presence(role, arguments.name),
            scope=scope,
            record=record,
            config=parse_config(record.config),
        )
        async with PresenceBeat(broker, f"{scope.key}.{arguments.name}", context.beat) as beat:
            context.on_progress = beat.hurry
            try:
                await asyncio.to_thread(refuse_links_to_others, record, context.config)
                may_read = refuse_files_of_others(record)
                if may_read is not None:
                    guard_datasets(may_read)
                if role != "environment":
                    with context.waiting("models from a store"):
                        here = await fetch_models(broker, context.config, record, role, may_read)
                        context.config, context.record = here
                code = await main(context)
            except TinkermqError as error:
                if not error.may_pass:
                    with contextlib.suppress(TinkermqError):  # the node reports it, too
                        await context.failed(error)
                raise
            finally:
                held_models.close()
        await service.stop()
        if code is None and stopping.is_set() and not context.stop_asked:
            return EXIT_DRAINED
        return code

    return _run(role, arguments.nats, body, actor=arguments.name, job=arguments.job)


def run_service_actor(
    role: str, name: str, nats: str, main: Callable[[ActorContext], Awaitable[None]]
) -> int:
    """Run an actor that belongs to no job (scheduler, node); return the exit code."""

    async def body(broker: Broker, stopping: asyncio.Event) -> None:
        if broker.user in WAITERS:
            await wait_for_shared(broker, _SHARED_DEADLINE_S)
        else:
            await create_shared(broker)
        service = await _start_service(broker, role, name, None)
        context = ActorContext(
            broker=broker,
            role=role,
            name=name,
            log=structlog.get_logger(),
            stopping=stopping,
            service=service,
            presence=_presence(role, name),
        )
        async with PresenceBeat(broker, f"pool.{name}", context.beat), notifying_systemd():
            await main(context)
        await service.stop()

    return _run(role, nats, body, actor=name)


async def _start_service(broker: Broker, role: str, name: str, scope: JobScope | None) -> Service:
    of_job = f" of job {scope.job}" if scope else ""
    metadata = {"actor": name, **({"job": scope.job, "user": scope.user} if scope else {})}
    text = f"tinkermq {role} {name}{of_job}"
    return await Service.start(broker, name=f"tinkermq-{role}", description=text, metadata=metadata)


async def _job_record(broker: Broker, scope: JobScope) -> JobRecord:
    entry = await Bucket(broker, BUCKET_JOBS, JobRecord).get(scope.key)
    if entry is None:
        raise NotFoundError(
            f"there is no job {scope.job!r} of user {scope.user!r}",
            hint="list the jobs with `tinkermq ps --all`",
        )
    return entry.value


def _presence(role: str, name: str) -> Presence:
    return Presence(
        actor=name,
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        release=VERSION,
        state="starting",
        time=time.time(),
    )


def _run(
    role: str,
    nats: str,
    body: Callable[[Broker, asyncio.Event], Awaitable[int | None]],
    **bound: Any,
) -> int:
    log = configure_logging(role=role, **bound)
    keep_proxies_out(os.environ)

    async def main() -> int | None:
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = SLOW_CALLBACK_S
        stopping = _stop_on_signal(loop, log)
        job, login, name = "job" in bound, take_login(), bound["actor"]
        async with connected(nats, name, stopping, login=login, for_ever=job) as broker:
            if broker is None:
                return EXIT_DRAINED
            await settle_interface(broker)
            return await body(broker, stopping)

    return run_process(log, main)


def run_process(
    log: structlog.stdlib.BoundLogger, main: Callable[[], Coroutine[Any, Any, int | None]]
) -> int:
    """Run the loop of a process to its end; return the exit code, also of what `main` raises."""
    try:
        with asyncio.Runner(
            loop_factory=uvloop.new_event_loop, debug=bool(os.environ.get("TINKERMQ_DEBUG"))
        ) as runner:
            return runner.run(main()) or EXIT_DONE
    except Exception as raised:  # noqa: BLE001  the process edge: record, then tell the node
        return _report_failure(log, raised)


def _report_failure(log: structlog.stdlib.BoundLogger, raised: Exception) -> int:
    error = root_cause(raised)
    if isinstance(error, RewoundError):
        log.warning("store_rewound", message=error.message, hint=error.hint)
        return EXIT_DRAINED
    if isinstance(error, TinkermqError):
        log.error("actor_failed", code=error.code, message=error.message, hint=error.hint)
        return EXIT_CRASHED if error.may_pass else EXIT_FAILED
    log.error("actor_crashed", exc_info=raised)
    return EXIT_CRASHED


def _stop_on_signal(
    loop: asyncio.AbstractEventLoop, log: structlog.stdlib.BoundLogger
) -> asyncio.Event:
    """Set the returned event at the first SIGTERM or SIGINT; a second one ends at once."""
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            log.warning("actor_stopped_at_once")
            sys.stderr.flush()
            os._exit(EXIT_CRASHED)
        log.info("actor_draining")
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopping


# -- the memory of a process -----------------------------------------------------------------------
# For `tinkermq profile --memory`. The kernel counts the pages; the actor reports the bytes of its
# own data. The rest is torch and other libraries, activations, and free memory that the allocator
# keeps.

_STATUS = Path("/proc/self/status")
_PAGES = Path("/proc/self/smaps_rollup")
_FIELDS = {
    "Rss": "resident",
    "Private_Dirty": "private",
    "Pss_Shmem": "shared_memory",
    "Pss": "proportional",
    "VmHWM": "peak",
}


def read_process_memory() -> dict[str, int]:
    """Return bytes of this process as Linux counts them; empty on other systems.

    `resident` are all mapped pages in memory, `private` those of no other process, `proportional`
    divides pages by the number of their processes; `shared_memory` is the part of it in memory
    files. `peak` is the highest `resident` so far.
    """
    try:
        pages, status = _PAGES.read_text(), _STATUS.read_text()
    except OSError:
        return {}
    sizes = dict(_sizes(pages)) | dict(_sizes(status))
    return {ours: sizes[name] for name, ours in _FIELDS.items() if name in sizes}


def _sizes(text: str) -> Iterable[tuple[str, int]]:
    for line in text.splitlines():
        match line.split():
            case [name, number, "kB"] if name.endswith(":"):
                yield name[:-1], int(number) * 1024
            case _:
                continue


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors in this machine's memory; storage that several share counts
    once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def return_free_memory() -> None:
    """Return freed memory that the C library keeps to the system.

    glibc keeps freed memory that lies between other allocations, such as the activations of a
    step. With other C libraries this does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# -- logs: JSON lines in services, coloured lines on a terminal ------------------------------------


class _Patient:
    """A stream whose file may be on a full disk: it buffers data that cannot be written yet."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write, or keep for later."""
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """Write as much of the buffer to the file as fits."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure_logging(**bound: Any) -> structlog.stdlib.BoundLogger:
    """Configure structlog for this process and return a logger with `bound` on every line.

    TINKERMQ_LOG_FORMAT=json writes one JSON object a line, TINKERMQ_LOG_LEVEL sets the lowest
    level (default info). Logs go to standard error.
    """
    as_json = os.environ.get("TINKERMQ_LOG_FORMAT") == "json" or not sys.stderr.isatty()
    level = logging.getLevelNamesMapping().get(
        os.environ.get("TINKERMQ_LOG_LEVEL", "info").upper(), logging.INFO
    )
    renderer: Any = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Patient(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    structlog.contextvars.bind_contextvars(**bound)
    return structlog.get_logger()
