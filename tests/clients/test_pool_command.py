"""What `tinkermq pool` shows of nodes and machines."""

from tinkermq.clients.cli.doctor import (
    _rows,
    _summary,
    clock_differences,
    package_differences,
)
from tinkermq.schemas.machines import MachineList, MachineStatus
from tinkermq.schemas.node import ActorStatus, NodeStatus

NOW = 10_000.0
MACHINES = MachineList(
    on="slurm:gpu",
    most=4,
    slots=8,
    slot_hours=16.7,
    slot_hours_per_day=400,
    machines=[
        MachineStatus(name="m1", state="here", started=NOW - 7500, ends=NOW + 35_700),
        MachineStatus(name="m2", state="draining", started=NOW - 7500, ends=NOW + 60),
        MachineStatus(name="m3", state="coming", started=NOW - 12),
        MachineStatus(name="m4", state="asked", why="Priority"),
    ],
)


def node(name: str, **more: object) -> NodeStatus:
    return NodeStatus.model_validate({"node": name, "host": "h", "slots": 8, "time": NOW, **more})


def test_machines_stand_with_what_runs_on_them_and_before_nodes_that_nobody_asked_for() -> None:
    learner = ActorStatus(
        user="ada", job="j", name="learner", devices=[0, 1], attempt=1, state="running"
    )
    nodes = [node("m1", actors=[learner]), node("own", draining=True)]
    assert _rows(nodes, MACHINES, NOW) == [
        ("m1", "here", 8, 2, "2h 05m", "9h 55m", ""),
        ("m2", "draining", "", "", "2h 05m", "1m 00s", ""),
        ("m3", "coming", "", "", "12s", "", ""),
        ("m4", "asked", "", "", "", "", "Priority"),
        ("own", "draining", 8, 0, "", "", ""),
    ]


def test_one_line_counts_the_machines_and_what_they_have_cost() -> None:
    assert _summary(MACHINES) == (
        "slurm:gpu: 1 asked, 1 coming, 1 here, 1 draining (0 to 4 machines of 8 slots), "
        "16.70 of 400 slot-hours today"
    )
    free = MACHINES.model_copy(update={"slot_hours_per_day": None, "machines": []})
    assert _summary(free).endswith(
        "0 draining (0 to 4 machines of 8 slots), 16.70 slot-hours today"
    )


def test_packages_that_differ_and_clocks_that_are_off_are_named() -> None:
    old, new = {"python": "3.11.7", "torch": "2.5.1"}, {"python": "3.12.1", "torch": "2.6.0"}
    many = [node(f"n{number}", packages=new) for number in range(5)]
    assert package_differences([*many, node("silent")]) == []
    assert package_differences([node("old", packages=old), *many]) == [
        "packages differ: torch 2.5.1 on old; 2.6.0 on n0, n1, n2 and 2 more"
    ]
    clocks = [node("a", clock_ahead_s=-70.25), node("b", clock_ahead_s=1.9), node("c")]
    assert clock_differences([*clocks, node("d", clock_ahead_s=3)]) == [
        "the clock of a is 70.2 s behind the scheduler's",
        "the clock of d is 3.0 s ahead of the scheduler's",
    ]
