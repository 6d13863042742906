"""`tinkermq doctor` says of nodes what is wrong with them, and of those that are well nothing."""

import time

import pytest
from tinkermq.clients.cli.doctor import Finding, check_nodes
from tinkermq.schemas.node import ActorStatus, NodeStatus


def _node(
    name: str = "box", *, silent_s: float = 0.0, store_lost: float | None = None
) -> NodeStatus:
    actor = ActorStatus(
        user="ada", job="j1", name="learner", attempt=1, state="running", silent_s=silent_s
    )
    return NodeStatus(
        node=name, host="h", slots=4, actors=[actor], time=time.time(), store_lost=store_lost
    )


def _found(*nodes: NodeStatus) -> dict[str, Finding]:
    return {one.name: one for one in check_nodes(list(nodes))}


def test_nodes_that_are_well_are_told_so() -> None:
    assert all(one.ok for one in _found(_node("a"), _node("b")).values())
    assert all(one.ok for one in _found().values())


@pytest.mark.parametrize("silent_s", [30.0, 61.5, 299.0, 5000.0])
def test_an_actor_that_tells_no_heartbeat_is_named(silent_s: float) -> None:
    found = _found(_node("a"), _node("b", silent_s=silent_s))["actors"]
    assert not found.ok
    assert f"learner of job j1 on b for {silent_s:.0f} s" in found.detail


@pytest.mark.parametrize("names", [["a"], ["b"], ["a", "b"]])
def test_a_broker_that_came_back_empty_is_told_with_the_nodes_that_saw_it(names: list[str]) -> None:
    nodes = [_node(one, store_lost=1e9 if one in names else None) for one in ("a", "b")]
    found = _found(*nodes)["store"]
    assert not found.ok
    assert "came back empty" in found.detail
    assert [one for one in ("a", "b") if f"{one} has found at 2001" in found.detail] == names
    assert "tinkermq restore" in found.hint
