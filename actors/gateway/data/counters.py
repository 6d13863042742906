"""What `/metrics` tells: this gateway's own figures, and those of the jobs that the caller may see.

Written in Prometheus' text format. A scrape with a key (`authorization: Bearer …`) also gets the
jobs, actors and nodes of that user; without keys at the broker every scrape does.
"""

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.types import Scope

from ....schemas.metric import Presence
from ....schemas.node import NodeStatus

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
            "tinkermq_gateway_streams", "Live streams that are open", registry=self.registry
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


class _Snapshot:
    """A collector of families that were made beforehand."""

    def __init__(self, families: Sequence[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Sequence[GaugeMetricFamily]:
        return self._families


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
    registry = CollectorRegistry()
    registry.register(_Snapshot(families))  # pyright: ignore[reportArgumentType]  only `collect` is asked for
    return generate_latest(registry)


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
        "What an actor tells of itself in its heartbeat",
        labels=["actor", "role", "figure"],
    )
    up = GaugeMetricFamily(
        "tinkermq_actor_up", "1 for every actor that is heard of", labels=["actor", "role", "state"]
    )
    for key, presence in actors:
        up.add_metric([key, presence.role, presence.state], 1)
        for figure, value in presence.numbers.items():
            family.add_metric([key, presence.role, figure], value)
    return [up, family]
