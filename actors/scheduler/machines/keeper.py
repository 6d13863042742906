"""Request machines from a cluster and release them, as the queue needs them.

Level-triggered: each turn reads the cluster, the nodes and the queue, decides and acts. Only idle
times, failures and the times when nodes were alive are kept in memory, so it may be killed at any
time: its successor finds all machines in the cluster by their names, and gives running ones time to
join. Use of the day's budget is stored each turn, per machine.

A node is closed to new actors in one turn and released in the next, if nothing arrived in between.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from ....broker.client.connection import Broker
from ....broker.jetstream.kv import Bucket, DamagedEntry
from ....schemas.machines import (
    MachineList,
    MachinesConfig,
    MachineSpending,
    MachineState,
    MachineStatus,
)
from ....schemas.node import NodeStatus
from ....schemas.wire.errors import TinkermqError
from ....schemas.wire.message import Empty
from ....schemas.wire.subjects import BUCKET_MACHINES
from ..nodes import Nodes
from ..placement import NodeSlots, PlacementRequest, UserShares, place
from .source import Machine, MachineNames, MachineSource

# How many machines to request and which to release (pure). The queue is placed as if more machines
# existed; the machines that it then uses are requested. So quotas, priorities and reserved slots
# count as they do for nodes.

_NEW = "~new-"


@dataclass(frozen=True)
class Demand:
    """The queue and the nodes at a point in time."""

    queue: Sequence[PlacementRequest]
    nodes: Sequence[NodeSlots]
    shares: UserShares
    busy: frozenset[str]
    """Nodes that run actors or will run some."""
    now: float


@dataclass(frozen=True)
class Decision:
    """The decision of a turn."""

    ask: int = 0
    give_back: tuple[str, ...] = ()
    """Names of machines to release."""
    why: str = ""
    """Why no more machines are requested; empty if no more are needed."""


def machines_needed(demand: Demand, slots: int, room: int, *, gpus: bool = False) -> int:
    """Return how many more machines of `slots` slots, at most `room`, the queue needs.

    With `gpus` their slots are GPUs. Cost: one placement of the queue, none if nothing waits.
    """
    if not demand.queue or room <= 0:
        return 0
    new = machines_of(slots, room, gpus=gpus)
    placed = place(demand.queue, [*demand.nodes, *new], demand.shares, demand.now)
    return len(
        {assignment.node for assignment in placed.assignments if assignment.node.startswith(_NEW)}
    )


def machines_of(slots: int, count: int, *, gpus: bool) -> list[NodeSlots]:
    """Return further machines as idle nodes."""
    names = (f"{_NEW}{number:05d}" for number in range(count))
    return [NodeSlots(name, slots, frozenset(range(slots)), are_gpus=gpus) for name in names]


def decide(
    bounds: MachinesConfig,
    machines: Mapping[str, MachineState],
    needed: int,
    idle_s: Mapping[str, float],
    slot_hours: float,
    busy: frozenset[str] = frozenset(),
) -> Decision:
    """Decide from the existing `machines` (by name, oldest first) and the number `needed`.

    `needed` counts machines beyond the existing nodes; `idle_s` are the idle times of idle
    machines; `slot_hours` is today's use. A machine whose node is `busy` though it does not run
    starts again: its run is not yet known to be lost, and will need it.
    """
    budget = bounds.slot_hours_per_day
    staying = [name for name, state in machines.items() if state != "draining"]
    if budget is not None and slot_hours >= budget:
        why = f"the day's budget of {budget:g} slot-hours is used up: {slot_hours:.2f} were used"
        return Decision(0, tuple(staying), why)
    pending = [name for name in staying if machines[name] != "here"]
    unused = [name for name in pending if name not in busy]
    idle = [name for name in staying if idle_s.get(name, -1.0) >= bounds.idle_s]
    spare = unused[needed:][::-1] + ([] if needed else idle)
    returned = spare[: max(len(staying) - bounds.least, 0)]
    missing = max(needed - len(unused), bounds.least - len(staying), 0)
    room = max(bounds.most - len(machines), 0)
    why = f"the pool may have at most {bounds.most} machines" if missing > room else ""
    return Decision(min(missing, room), tuple(returned), why)


# -- delays after a refusal, or after a machine that never became a node ---------------------------

FIRST_PAUSE_S = 10.0
LAST_PAUSE_S = 600.0


class RequestBackoff:
    """A pause that doubles with every failure and ends with the first success."""

    def __init__(self) -> None:
        """There was no failure yet."""
        self.trouble = ""
        """The last failure; empty after a success."""
        self._num_failures = 0
        self._until = float("-inf")

    def failed(self, why: str) -> None:
        """Record a failure; the pause starts again."""
        self.trouble = why
        pause_s = min(FIRST_PAUSE_S * 2**self._num_failures, LAST_PAUSE_S)
        self._until = time.monotonic() + pause_s
        self._num_failures += 1

    def succeeded(self) -> None:
        """Record that a machine has joined."""
        self.__init__()

    def is_over(self) -> bool:
        """Return whether a request may be tried again."""
        return time.monotonic() >= self._until


# Use of a day's budget: each turn stores how long each machine ran today by the cluster's clock.
# Counting twice changes nothing, and time without a scheduler is counted for machines that still
# run; machines that ended meanwhile count up to the last turn.

KEY = "spent"
_DAY_S = 86400.0


class Spending:
    """The record of a day's use."""

    def __init__(self, broker: Broker) -> None:
        """There is no record yet."""
        self._bucket = Bucket(broker, BUCKET_MACHINES, MachineSpending)
        self._known: MachineSpending | None = None

    async def record_use(self, machines: Sequence[Machine], now: float) -> float:
        """Record the machines running at `now` (seconds since the epoch); return that day's use."""
        before = self._known or await self._read()
        self._known = spent(before, machines, now)
        if self._known != before and self._known.seconds:
            await self._bucket.put(KEY, self._known)
        return sum(self._known.seconds.values())

    async def _read(self) -> MachineSpending | None:
        try:
            entry = await self._bucket.get(KEY)
        except DamagedEntry:
            return None
        return None if entry is None else entry.value


def spent(
    before: MachineSpending | None, machines: Sequence[Machine], now: float
) -> MachineSpending:
    """Return the use on the day of `now`, including ended machines. Pure."""
    day = int(now // _DAY_S)
    seconds = dict(before.seconds) if before is not None and before.day == day else {}
    for machine in machines:
        if machine.started is not None:
            ran_s = now - max(machine.started, day * _DAY_S)
            seconds[machine.id] = max(seconds.get(machine.id, 0.0), ran_s, 0.0)
    return MachineSpending(day=day, seconds=seconds)


_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class MachineKeeper:
    """Keeps as many machines as the queue needs, within the limits."""

    def __init__(
        self, broker: Broker, config: MachinesConfig, url: str, source: MachineSource, pool: Nodes
    ) -> None:
        """There are no requests yet; `url` identifies the pool."""
        self._config = config
        self._source = source
        self._pool = pool
        self._names = MachineNames(url)
        self._spending = Spending(broker)
        self._patience = RequestBackoff()
        self._idle_since: dict[str, float] = {}
        self._here_at: dict[str, float] = {}
        """Times when the nodes of joined machines were last alive, by id. Machines that ran when
        this scheduler started count as alive at that time."""
        self._returned_at: dict[str, float] = {}
        """Times when machines were released, by id."""
        self._known: dict[str, Machine] | None = None
        self._state = MachineList(on=config.on, least=config.least, most=config.most)

    def could_come(self) -> list[NodeSlots]:
        """Return nodes for all machines that the pool may have."""
        return machines_of(self._config.slots, self._config.most, gpus=self._config.gpus)

    async def answer(self, _: Empty) -> MachineList:
        """Return the state of the machines, for clients."""
        return self._state

    async def run(self, waiting: Callable[[], Demand], may_act: Callable[[], bool]) -> None:
        """Run turns forever; act only while `may_act`, until another scheduler takes over."""
        while self._config.most:
            if may_act():
                await self._try(waiting)
            await asyncio.sleep(self._config.look_s)

    async def _try(self, waiting: Callable[[], Demand]) -> None:
        """Poll once; report a cluster that does not answer, and retry at the next poll."""
        try:
            await self._turn(waiting)
        except TinkermqError as error:
            self._state = self._state.model_copy(update={"trouble": error.message})
            _log.warning("machines_not_seen", error=error.message, hint=error.hint)

    async def _turn(self, waiting: Callable[[], Demand]) -> None:
        reply = await self._source.list_machines()
        used_s = await self._spending.record_use(reply, time.time())
        single = await self._without_doubles(reply)
        nodes = {node.node: node for node in self._pool.nodes()}
        seen = {item.name: SeenMachine(item, _state(item, nodes)) for item in single}
        self._note_fates(seen.values())
        demand = waiting()
        self._note_idle(seen, demand.busy)
        decision = self._decide(seen, demand, used_s * self._config.slots / 3600)
        await self._do(decision, seen, nodes)

    def _decide(
        self, seen: Mapping[str, "SeenMachine"], demand: Demand, slot_hours: float
    ) -> Decision:
        states: dict[str, MachineState] = {name: item.state for name, item in seen.items()}
        here = sum(state == "here" for state in states.values())
        room, gpus = self._config.most - here, self._config.gpus
        needed = machines_needed(demand, self._config.slots, room, gpus=gpus)
        idle_s = {name: time.monotonic() - since for name, since in self._idle_since.items()}
        decision = decide(self._config, states, needed, idle_s, slot_hours, demand.busy)
        matters = decision.ask or not self._patience.is_over()
        self._state = MachineList(
            on=self._config.on,
            least=self._config.least,
            most=self._config.most,
            slots=self._config.slots,
            slot_hours=slot_hours,
            slot_hours_per_day=self._config.slot_hours_per_day,
            machines=[_shown(item) for item in seen.values()],
            trouble=(self._patience.trouble if matters else "") or decision.why,
        )
        return decision

    async def _without_doubles(self, machines: Sequence[Machine]) -> list[Machine]:
        """Remove machines requested twice; the one that is further along, or older, is kept."""
        first: dict[str, Machine] = {}
        for machine in sorted(machines, key=lambda item: item.state == "asked"):
            if machine.name in first:
                await self._source.release_machine(machine, drain=False)
            first.setdefault(machine.name, machine)
        return sorted(first.values(), key=lambda item: self._names.number(item.name))

    def _note_fates(self, seen: Iterable["SeenMachine"]) -> None:
        """Record machines that joined, and machines that ended before they joined."""
        now = {item.machine.id: item for item in seen}
        self._forget_earlier_starts(item.machine for item in now.values())
        joined = {"here"} if self._known is not None else {"here", "coming"}
        here = {number for number, item in now.items() if item.state in joined}
        if here - self._here_at.keys():
            self._patience.succeeded()
        self._here_at |= dict.fromkeys(here, time.monotonic())
        for number, machine in (self._known or {}).items():
            if number not in now.keys() | self._here_at.keys() | self._returned_at.keys():
                waited = f"; it waited: {machine.why}" if machine.why else ""
                self._patience.failed(
                    f"{machine.name} ({number}) ended before its node had joined: see its log, "
                    f"{machine.log}{waited}"
                )
        self._known = {number: item.machine for number, item in now.items()}
        self._here_at = {number: at for number, at in self._here_at.items() if number in now}
        self._returned_at = {
            number: at for number, at in self._returned_at.items() if number in now
        }

    def _forget_earlier_starts(self, machines: Iterable[Machine]) -> None:
        """Forget when machines joined and were released that start again under their id.

        A requeued job of Slurm does, and its node has the whole time to join.
        """
        known = self._known or {}
        for machine in machines:
            before = known.get(machine.id, machine)
            if machine.state == "asked" or before.started != machine.started:
                self._here_at.pop(machine.id, None)
                self._returned_at.pop(machine.id, None)

    def _note_idle(self, seen: Mapping[str, "SeenMachine"], busy: frozenset[str]) -> None:
        now = time.monotonic()
        idle = {name for name, item in seen.items() if item.state == "here" and name not in busy}
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}

    async def _do(
        self,
        decision: Decision,
        seen: Mapping[str, "SeenMachine"],
        nodes: Mapping[str, NodeStatus],
    ) -> None:
        leaving = {
            *decision.give_back,
            *(name for name, item in seen.items() if self._is_late(item)),
        }
        ready = {name for name in leaving if name in self._pool.closed or name not in nodes}
        self._pool.closed = leaving & nodes.keys()
        for name in ready:
            machine = seen[name].machine
            await self._give_back(machine, has_joined=name in nodes or machine.id in self._here_at)
        if decision.ask and self._patience.is_over():
            await self._request(self._names.free([*seen, *nodes], decision.ask))

    async def _request(self, names: Sequence[str]) -> None:
        """Request machines; report refusals by the cluster, and wait before a retry."""
        try:
            for name in names:
                await self._source.request_machine(name)
                _log.info("machine_asked", machine=name, on=self._config.on)
        except TinkermqError as error:
            self._patience.failed(error.message)
            self._state = self._state.model_copy(update={"trouble": error.message})
            _log.warning("machine_refused", error=error.message, hint=error.hint)

    async def _give_back(self, machine: Machine, *, has_joined: bool) -> None:
        """Release a machine: drain its node if it has joined, and end one that does not drain."""
        given_at = self._returned_at.get(machine.id)
        if given_at is not None and time.monotonic() - given_at < self._config.drain_s:
            return  # a second signal would end it at once
        drain = has_joined and given_at is None
        await self._source.release_machine(machine, drain=drain)
        self._returned_at[machine.id] = time.monotonic()
        _log.info("machine_given_back", machine=machine.name, id=machine.id, drain=drain)

    def _is_late(self, item: "SeenMachine") -> bool:
        """Return whether a running machine's node is late to join or to reconnect."""
        machine, join_s = item.machine, self._config.join_s
        if item.state != "coming" or machine.started is None:
            return False
        here_at = self._here_at.get(machine.id)
        away_s = time.time() - machine.started if here_at is None else time.monotonic() - here_at
        if away_s < join_s:
            return False
        if machine.id not in self._returned_at:
            fate = "has not joined within" if here_at is None else "was silent for"
            self._patience.failed(
                f"the node of {machine.name} ({machine.id}) {fate} {join_s:g} s: can it reach the "
                "broker at its URL?"
            )
        return True


@dataclass(frozen=True)
class SeenMachine:
    """A machine, and its state in the pool."""

    machine: Machine
    state: MachineState


def _state(machine: Machine, nodes: Mapping[str, NodeStatus]) -> MachineState:
    node = nodes.get(machine.name)
    if machine.state == "asked":
        return "asked"
    if machine.state == "leaving" or (node is not None and node.draining):
        return "draining"
    return "coming" if node is None else "here"


def _shown(item: SeenMachine) -> MachineStatus:
    machine = item.machine
    return MachineStatus(
        name=machine.name,
        state=item.state,
        id=machine.id,
        started=machine.started,
        ends=machine.ends,
        why=machine.why,
    )
