"""The scheduler's view of the nodes: present nodes, their reports, and silent nodes.

Nodes have records in the KV bucket, and answer sync requests. A node is alive if it renewed its
record or answered a sync. Silence counts only while the scheduler could have received something:
while the broker is unreachable no node falls silent.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from ...broker.client.connection import Broker
from ...broker.client.rpc import call
from ...broker.jetstream.kv import Mirror
from ...schemas.node import CLOCK_BOUND_S, ActorStatus, NodeStatus, NodeSync
from ...schemas.wire.errors import FencedError, MessageError, TinkermqError
from ...schemas.wire.subjects import BUCKET_NODES
from ...schemas.wire.subjects import node as node_subject
from .lease import Timing

# The offset of a node's clock, from a request and its answer (pure). The answer's clock reading is
# compared with the middle of both times (as NTP does, RFC 5905 section 8); the fastest recent
# answer counts, as it has the smallest error.
#
# It affects no decisions: leases, heartbeats and silence use each process's monotonic clock.

RECENT_S = 60.0
"""An answer counts for this long, unless a faster one arrives."""


@dataclass(frozen=True)
class ClockReading:
    """A reading of a node's clock from one answer."""

    ahead_s: float
    """How far it is ahead of this machine's clock, in seconds."""
    within_s: float
    """Largest error of the offset in either direction."""
    at: float
    """Time of the reading, by the monotonic clock."""

    @property
    def surely_ahead_s(self) -> float:
        """Smallest possible lead of the clock; negative if it is behind, 0 if unknown."""
        least = max(abs(self.ahead_s) - self.within_s, 0.0)
        return least if self.ahead_s > 0 else -least


def read_clock(shown: float, asked_at: float, took_s: float, at: float) -> ClockReading:
    """Return the reading of a clock that showed `shown` in an answer.

    The request was sent at `asked_at` by this machine's clock, and the answer took `took_s`.
    """
    return ClockReading(shown - asked_at - took_s / 2, took_s / 2, at)


def better(known: ClockReading | None, new: ClockReading) -> ClockReading:
    """Return the better of two readings."""
    if known is None or new.within_s <= known.within_s or new.at - known.at > RECENT_S:
        return new
    return known


_PROMPT_S = 0.2
_LONGEST_STEP_S = 1.0
_FORGET = 10  # silences after which nothing is placed on a node
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass
class _Member:
    status: NodeStatus | None = None
    revision: int = 0
    silent_s: float = 0.0
    last_request: NodeSync | None = None
    asked_at: float = float("-inf")
    clock: ClockReading | None = None
    clock_is_off: bool = False
    refuses: bool = False


class Nodes:
    """The nodes, as of the last `refresh` and `sync`."""

    def __init__(self, broker: Broker, timing: Timing) -> None:
        """There are no nodes yet."""
        self._broker = broker
        self.records = Mirror(broker, BUCKET_NODES, NodeStatus)
        self._members: dict[str, _Member] = {}
        self._silent_s = timing.silent_s
        self._resync_s = timing.resync_s
        self._sync_s = timing.sync_s
        self._asking: set[str] = set()
        self._complained: set[str] = set()
        self._left: set[str] = set()
        self.closed: set[str] = set()
        """Nodes on which nothing new is placed, as their machines are about to be released."""
        self.shape = 0
        """Incremented when nodes, their slots, their links or their packages change."""
        self._looked = time.monotonic()

    def nodes(self) -> list[NodeStatus]:
        """Return the present nodes by name."""
        known = (member.status for _, member in sorted(self._members.items()))
        return [status for status in known if status is not None]

    def list_statuses(self) -> list[NodeStatus]:
        """Return the nodes with their clock readings."""
        return [
            node.model_copy(update={"clock_ahead_s": clock.surely_ahead_s})
            if (clock := self._members[node.node].clock)
            else node
            for node in self.nodes()
        ]

    @property
    def refusing(self) -> list[str]:
        """Names of the nodes that refuse this scheduler because they have seen a later one."""
        return sorted(name for name, member in self._members.items() if member.refuses)

    @property
    def num_known(self) -> int:
        """Number of known node names, including nodes that left recently."""
        return len(self._members)

    def silent(self, names: Iterable[str | None]) -> frozenset[str]:
        """Return those of the nodes that left or were silent for too long."""
        return frozenset(name for name in names if name is not None and self._is_silent(name))

    def has_drained(self, name: str | None) -> bool:
        """Return whether a node announced its end: its actors were asked to stop."""
        return name in self._left

    def _is_silent(self, name: str) -> bool:
        """Return whether a node has left; an unknown one gets the same time to appear."""
        return self._members.setdefault(name, _Member()).silent_s >= self._silent_s

    def status(self, node: str | None, user: str, job: str, actor: str) -> ActorStatus | None:
        """Return the last status of an actor from its node, or None."""
        member = self._members.get(node or "")
        if member is None or member.status is None:
            return None
        key = (user, job, actor)
        statuses = member.status.actors
        return next((item for item in statuses if (item.user, item.job, item.name) == key), None)

    async def refresh(self) -> None:
        """Read the nodes' records; update which nodes are alive and which are silent."""
        await self.records.refresh()
        records = self.records.entries
        now = time.monotonic()
        passed_s = min(now - self._looked, _LONGEST_STEP_S)
        self._looked = now
        for name, entry in records.items():
            member = self._members.setdefault(name, _Member())
            if entry.revision != member.revision:
                member.revision = entry.revision
                known, new = member.status, entry.value
                later = new if known is None or new.time >= known.time else known  # by its clock
                self._note_status(name, member, later)
        for name, member in list(self._members.items()):
            member.silent_s += passed_s
            if name not in records and member.revision:
                self._part(name, "left")
            elif member.silent_s >= self._silent_s and member.status is not None:
                self._part(name, "silent")
                await self.records.bucket.delete(name)
            elif member.status is None and member.silent_s >= _FORGET * self._silent_s:
                self._left.discard(name)
                self._members.pop(name)  # cluster machines always have new names
                self._complained.discard(name)

    def _note_status(self, name: str, member: _Member, status: NodeStatus) -> None:
        if member.status is None:
            _log.info("node_joined", node=name, host=status.host, slots=status.slots)
        if member.status is None or _shape(member.status) != _shape(status):
            self.shape += 1
        member.silent_s = 0.0
        member.status = status
        self._left.discard(name)

    def _part(self, name: str, how: str) -> None:
        _log.warning("node_lost", node=name, how=how)
        member = self._members[name]
        if how == "left" and member.status is not None and member.status.draining:
            self._left.add(name)
        self.shape += 1
        self._members[name] = _Member(silent_s=self._silent_s)

    async def sync(self, requests: Mapping[str, NodeSync], group: asyncio.TaskGroup) -> None:
        """Send requests, in `group`, to nodes that have not received or do not follow them.

        Waits for prompt answers. A slow node delays no other node; it gets the next request after
        its answer or its timeout. Requests to other nodes are repeated from time to time.
        """
        syncs = [
            group.create_task(self._sync_one(name, request), name=f"sync of node {name}")
            for name, request in requests.items()
            if name not in self._asking and self._is_due(self._members[name], request)
        ]
        if syncs:
            await asyncio.wait(syncs, timeout=_PROMPT_S)

    def _is_due(self, member: _Member, request: NodeSync) -> bool:
        if member.last_request != request or time.monotonic() - member.asked_at >= self._resync_s:
            return True
        desired = {(actor.user, actor.job, actor.name): actor.attempt for actor in request.actors}
        runs = member.status.actors if member.status else []
        return desired != {(run.user, run.job, run.name): run.attempt for run in runs}

    async def _sync_one(self, name: str, request: NodeSync) -> None:
        self._asking.add(name)
        sent_at, began = time.time(), time.monotonic()
        try:
            status = await call(
                self._broker,
                node_subject(name, "sync"),
                request,
                NodeStatus,
                timeout_s=self._sync_s,
                waiting_for=f"node {name}",
                idempotent=True,
            )
            status.check_at(name)
        except FencedError as error:
            self._note_refusal(name, error)
            return
        except MessageError as error:
            if name not in self._complained:
                self._complained.add(name)
                _log.error("node_answer_refused", node=name, error=error.message)
            return
        except TinkermqError as error:
            _log.debug("node_sync_failed", node=name, error=error.message)
            return
        finally:
            self._asking.discard(name)
        self._complained.discard(name)
        member = self._members.setdefault(name, _Member())
        member.refuses = False
        member.last_request, member.asked_at = request, time.monotonic()
        took_s = member.asked_at - began
        self._note_clock(member, read_clock(status.time, sent_at, took_s, member.asked_at), name)
        self._note_status(name, member, status)

    def _note_refusal(self, name: str, error: FencedError) -> None:
        member = self._members.setdefault(name, _Member())
        if not member.refuses:
            member.refuses = True
            _log.warning("node_refuses", node=name, error=error.message)

    def _note_clock(self, member: _Member, new: ClockReading, name: str) -> None:
        """Record a node's clock; report once when it becomes wrong, and once when right."""
        member.clock = better(member.clock, new)
        ahead_s = member.clock.surely_ahead_s
        is_off = abs(ahead_s) > CLOCK_BOUND_S
        if is_off != member.clock_is_off:
            member.clock_is_off = is_off
            event = "node_clock_off" if is_off else "node_clock_right"
            _log.warning(event, node=name, ahead_s=round(ahead_s, 1))


def _shape(status: NodeStatus) -> tuple[object, ...]:
    """Return the properties that decide which actors a node can hold."""
    instances = [gpu.is_instance for gpu in status.gpus]
    return status.slots, status.slot_kind, instances, status.groups, status.link, status.packages
