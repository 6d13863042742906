"""`tinkermq pool`: the nodes that are there, and the machines that come and go."""

import time
from collections import Counter

from ....schemas.machines import MachineList, MachineStatus
from ....schemas.node import CLOCK_BOUND_S, NodeStatus, differences
from ...pool import Pool
from ..options import COMMON, Common
from ..output import duration, note, print_json, print_table, say_plain
from ..session import with_pool


def pool(*, common: Common = COMMON) -> int:
    """Show the pool's nodes, what was asked of a cluster, what came of it, and what it costs."""

    async def work(pool: Pool) -> tuple[list[NodeStatus], MachineList]:
        return await pool.nodes(), await pool.machines()

    nodes, machines = with_pool(common.nats_url, work)
    if common.json:
        told = {"nodes": [node.model_dump() for node in nodes], "machines": machines.model_dump()}
        print_json(told)
        return 0
    rows = _rows(nodes, machines, time.time())
    if rows:
        print_table(("machine", "state", "slots", "used", "since", "time left", "waits for"), rows)
    else:
        note("no nodes: start one by `tinkermq node`, or get machines by `tinkermq up --on`")
    if machines.on:
        say_plain(_summary(machines))
    if machines.trouble:
        note(f"none come now: {machines.trouble}")
    for one in [*unlike(nodes), *clocks_off(nodes)]:
        note(one)
    return 0


def unlike(nodes: list[NodeStatus]) -> list[str]:
    """Say which packages differ between nodes: ranks of a learner lie on those that are alike."""
    return [
        f"packages differ: {one}"
        for one in differences((node.node, node.packages) for node in nodes)
    ]


def clocks_off(nodes: list[NodeStatus]) -> list[str]:
    """Say which clocks are off, as the scheduler has measured them."""
    found: list[str] = []
    for node in nodes:
        ahead_s = node.clock_ahead_s or 0.0
        if abs(ahead_s) > CLOCK_BOUND_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            found.append(f"the clock of {node.node} is {abs(ahead_s):.1f} s {side} the scheduler's")
    return found


def _rows(nodes: list[NodeStatus], machines: MachineList, now: float) -> list[tuple[object, ...]]:
    by_name = {node.node: node for node in nodes}
    rows = [_machine(one, by_name.pop(one.name, None), now) for one in machines.machines]
    return rows + [
        (node.node, "draining" if node.draining else "here", node.slots, _used(node), "", "", "")
        for node in by_name.values()
    ]


def _machine(one: MachineStatus, node: NodeStatus | None, now: float) -> tuple[object, ...]:
    since = "" if one.started is None else duration(now - one.started)
    left = "" if one.ends is None else duration(one.ends - now)
    slots, used = (node.slots, _used(node)) if node is not None else ("", "")
    return (one.name, one.state, slots, used, since, left, one.why)


def _used(node: NodeStatus) -> int:
    return len({slot for actor in node.actors for slot in actor.devices})


def _summary(machines: MachineList) -> str:
    """Say in one line what is asked for, what has come, and what it costs."""
    states = Counter(one.state for one in machines.machines)
    counts = ", ".join(f"{states[name]} {name}" for name in ("asked", "coming", "here", "draining"))
    budget = machines.slot_hours_per_day
    of_budget = "" if budget is None else f" of {budget:g}"
    return (
        f"{machines.on}: {counts} ({machines.least} to {machines.most} machines of "
        f"{machines.slots} slots), {machines.slot_hours:.2f}{of_budget} slot-hours today"
    )
