"""Limits of the gateway (deadlines, bodies, concurrent requests) and its `/metrics`.

`/metrics` is Prometheus' text format. A scrape with a key (`authorization: Bearer …`) also gets the
jobs, actors and nodes that its user may see; if the broker requires no keys, every scrape gets
them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import Scope

from ...schemas.http_server import HttpBounds
from ...schemas.metric import Presence
from ...schemas.node import NodeStatus
from ...schemas.wire.errors import BusyError, ConfigError

P = ParamSpec("P")
T = TypeVar("T")

MAX_REQUESTS = 1024
"""Maximum number of concurrent requests, without light ones."""
MAX_LOCAL_REQUESTS = 512
"""The same in a pool without users: half of the limit of its one visitor, pages included."""
RETRY_AFTER_S = 5
MAX_INFERENCE_BYTES = 8 << 20
MAX_PROGRAM_BYTES = 1 << 30
"""Bound on a program's body. The endpoints of programs have lower bounds, and refuse larger bodies
in the form of the API."""
MAX_CONFIG_BYTES = 1 << 20
MAX_FORM_BYTES = 16 << 10
MAX_RUNNING = 256
"""Maximum concurrent requests and live streams of one user."""
MAX_HELD_BYTES = 64 << 20
"""Maximum bytes of the bodies of one user at the same time."""
MAX_ANSWER_BYTES = 64 << 20
"""Maximum bytes of answers of one user: the unread part of streams, and other answers
completely."""
MAX_THREADS = 2
"""Maximum number of threads for one user; queued work has no thread."""
_CONFIGS = frozenset({"/submit", "/api/v1/jobs", "/api/v1/check"})
_APIS = ("/v1/", "/tinker/", "/e/", "/tokenize", "/detokenize")
_TINKER = "/tinker/api/v1/"
_LIGHT = tuple(
    _TINKER + path
    for path in ("session_heartbeat", "healthz", "client/config", "client/dynamic_config")
)


def http_bounds(max_running: int = MAX_REQUESTS) -> HttpBounds:
    """Return the bounds of a gateway's HTTP server."""
    return HttpBounds(
        idle_s=10,
        body_s=15,
        stalled_s=30,
        max_running=max_running,
        is_light=_is_light,
        retry_after_s=RETRY_AFTER_S,
    )


def _is_light(scope: Scope) -> bool:
    """Return whether a request is short: a page, health or a heartbeat, but not a stream."""
    if any(name == b"accept" and b"event-stream" in value for name, value in scope["headers"]):
        return False
    path: str = scope["path"]
    return path in _LIGHT or not path.startswith(_APIS)


def content_length(headers: Mapping[str, str]) -> int | None:
    """Return the declared length of a body; 0 for a malformed one, None without one."""
    length = headers.get("content-length")
    if length is None:
        return None
    return int(length) if length.isascii() and length.isdigit() and len(length) < 12 else 0


def body_bytes(headers: Mapping[str, str], largest: int) -> int:
    """Return the size of a request's body, or its bound, at most `largest`."""
    length = content_length(headers)
    if length is not None:
        return min(length, largest)
    return largest if "transfer-encoding" in headers else 0


def max_body_bytes(path: str) -> int:
    """Return the maximum size of a body; conversations may contain images."""
    if path.startswith(_APIS) and not path.startswith("/e/"):
        return MAX_INFERENCE_BYTES
    return MAX_CONFIG_BYTES if path in _CONFIGS else MAX_FORM_BYTES


TAKEN = "tinkermq.taken"
"""Key in a request's scope: its `Taken`."""


class Taken:
    """The bytes of one request within its user's share."""

    def __init__(self, body_bytes: int, running: "set[Taken]") -> None:
        """Count so many bytes: the length of the body, or its bound if that is unknown.

        `running` are all requests of the user.
        """
        self.body_bytes = body_bytes
        self.answer_bytes = 0
        self._running = running

    def hold(self, num_bytes: int) -> None:
        """Count more bytes for the answer.

        Raises BusyError if the user's answers together are too large, ConfigError if this one is.
        """
        if self.answer_bytes + num_bytes > MAX_ANSWER_BYTES:
            raise ConfigError(
                f"{MAX_ANSWER_BYTES:,} bytes of the answer wait to be read, the most allowed",
                hint="ask for a stream and read it as it comes, or for fewer answers or log-probs "
                "in one request",
            )
        if sum(request.answer_bytes for request in self._running) + num_bytes > MAX_ANSWER_BYTES:
            raise BusyError(
                f"{MAX_ANSWER_BYTES:,} bytes of your answers wait to be read, the most allowed",
                hint="ask for streams and read them as they come, or send fewer requests at a time",
            )
        self.answer_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Stop counting bytes that were read."""
        self.answer_bytes -= num_bytes

    def settle(self, body_bytes: int) -> None:
        """Count the received length of the body instead of its bound."""
        self.body_bytes = min(self.body_bytes, body_bytes)


class Share:
    """The running requests of one user."""

    def __init__(
        self, max_running: int = MAX_RUNNING, max_held_bytes: int = MAX_HELD_BYTES
    ) -> None:
        """Bound the number of requests, and the bytes of their bodies."""
        self._running: set[Taken] = set()
        self._max_running = max_running
        self._max_held_bytes = max_held_bytes
        self._threads = asyncio.Semaphore(MAX_THREADS)

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @contextlib.contextmanager
    def taken(self, body_bytes: int = 0) -> Iterator[Taken]:
        """Count a request while the block runs; raises BusyError beyond a bound."""
        if self.num_running >= self._max_running:
            raise BusyError(
                f"{self.num_running} of your requests are running, the most that one user may have",
                hint="send the next one after an answer",
            )
        held_bytes = sum(request.body_bytes for request in self._running)
        if body_bytes and held_bytes + body_bytes > self._max_held_bytes:
            raise BusyError(
                f"the bodies of your running requests have {held_bytes:,} bytes",
                hint=f"have at most {self._max_held_bytes:,} at a time",
            )
        request = Taken(body_bytes, self._running)
        self._running.add(request)
        try:
            yield request
        finally:
            self._running.remove(request)

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run slow work in a thread; one user has at most `MAX_THREADS`."""
        async with self._threads:
            return await asyncio.to_thread(function, *args, **kwargs)


# -- /metrics --------------------------------------------------------------------------------------

_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_JOB_FIGURES = (
    ("step", "tinkermq_job_step", "Training steps done"),
    ("reward", "tinkermq_job_reward", "Mean return of the newest step"),
    ("validation", "tinkermq_job_validation_score", "Newest validation score"),
    ("tokens_per_s", "tinkermq_job_tokens_per_second", "Trained tokens per second"),
    ("slots", "tinkermq_job_slots", "Slots that the job holds"),
    ("restarts", "tinkermq_job_restarts", "Restarts of its actors"),
)


class Counters:
    """The gateway's own figures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tinkermq_gateway_requests",
            "HTTP requests answered",
            ["method", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "tinkermq_gateway_request_seconds",
            "Time to answer, streams left out",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.streams = Gauge(
            "tinkermq_gateway_streams", "Open live streams", registry=self.registry
        )
        self.sessions = Gauge(
            "tinkermq_gateway_sessions", "Browsers logged in", registry=self.registry
        )
        self.connections = Gauge(
            "tinkermq_gateway_connections", "Connections to the broker", registry=self.registry
        )

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one request."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(method, str(status)).inc()
        if not str(scope["path"]).endswith("/stream"):
            self._seconds.observe(seconds)

    def text(self) -> bytes:
        """Return the figures in Prometheus' format."""
        return generate_latest(self.registry)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def pool_text(
    counts: dict[str, int],
    rows: Sequence[dict[str, Any]],
    nodes: Sequence[NodeStatus],
    actors: Sequence[tuple[str, Presence]],
) -> bytes:
    """Return jobs, nodes and actors in Prometheus' format.

    `rows` are those of live jobs (`records.row`), `actors` heartbeats with their keys.
    """
    families = [_jobs(counts), *_figures(rows), *_nodes(nodes), *_actors(actors)]
    return generate_latest(cast("Collector", SimpleNamespace(collect=lambda: families)))


def _jobs(counts: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("tinkermq_jobs", "Jobs by group of states", labels=["state"])
    for state, count in counts.items():
        if state != "all":
            family.add_metric([state], count)
    return family


def _figures(rows: Sequence[dict[str, Any]]) -> list[GaugeMetricFamily]:
    families: list[GaugeMetricFamily] = []
    for key, name, about in _JOB_FIGURES:
        family = GaugeMetricFamily(name, about, labels=["user", "job", "name"])
        for row in rows:
            if row[key] is not None:
                family.add_metric([row["user"], row["job"], row["name"]], row[key])
        families.append(family)
    return families


def _nodes(nodes: Sequence[NodeStatus]) -> list[GaugeMetricFamily]:
    slots = GaugeMetricFamily("tinkermq_node_slots", "Slots of a node", labels=["node", "kind"])
    used = GaugeMetricFamily("tinkermq_node_slots_used", "Slots given away", labels=["node"])
    for node in nodes:
        slots.add_metric([node.node, node.slot_kind], node.slots)
        used.add_metric([node.node], sum(actor.slots for actor in node.actors))
    labels = ["node", "gpu", "model"]
    busy = GaugeMetricFamily("tinkermq_gpu_utilization", "Share of time computing", labels=labels)
    memory = GaugeMetricFamily("tinkermq_gpu_memory_used_bytes", "Memory in use", labels=labels)
    for node in nodes:
        for gpu in node.gpus:
            busy.add_metric([node.node, str(gpu.index), gpu.model], gpu.utilization)
            memory.add_metric([node.node, str(gpu.index), gpu.model], gpu.used_bytes)
    return [slots, used, busy, memory]


def _actors(actors: Sequence[tuple[str, Presence]]) -> list[GaugeMetricFamily]:
    family = GaugeMetricFamily(
        "tinkermq_actor_figure",
        "An actor's figures in its heartbeat",
        labels=["actor", "role", "figure"],
    )
    up = GaugeMetricFamily(
        "tinkermq_actor_up", "1 for every actor with a heartbeat", labels=["actor", "role", "state"]
    )
    for key, presence in actors:
        up.add_metric([key, presence.role, presence.state], 1)
        for figure, value in presence.numbers.items():
            family.add_metric([key, presence.role, figure], value)
    return [up, family]
