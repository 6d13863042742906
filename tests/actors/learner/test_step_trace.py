"""The trace of a step takes what groups and heartbeats tell, but not at its word."""

import math
from dataclasses import replace
from typing import Any

import pytest
from tinkermq.actors.learner.intake import CheckedEntry
from tinkermq.actors.learner.reporter import MAX_GROUPS, StepTracer
from tinkermq.actors.learner.staleness import Candidate
from tinkermq.schemas.metric import Presence
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.wire.trace import StepTrace, new_trace

from tests.support.groups import make_group, make_trajectory

TRACE = new_trace()


def group(number: int = 0, **changes: object) -> Group:
    """Two episodes of 1 s and 7 s: the slower waited 3 s for the engine, 4 s for three answers."""
    slow = make_trajectory(
        [1], [([2], [3]), ([4], [])], [0.0, 1.0], generate_s=3.0, environment_s=4.0
    )
    fast = make_trajectory([1], [([2], [])], [0.0], generate_s=0.5, environment_s=0.5)
    made = make_group([slow, fast], number)
    task = made.task.model_copy(update={"issued": 100.0})
    told = {"task": task, "started": 50.0, "finished": 58.0, "weights_s": 2.0}
    return made.model_copy(update={**told, **changes})


def entry(made: Group, arrived: float = 120.0, traceparent: str = TRACE) -> CheckedEntry:
    """An entry of the log as the learner holds it."""
    number = made.task.task
    place = Candidate(1, number)
    return CheckedEntry(1, number, made, made.task, 0, b"", place, None, traceparent, arrived)


def traced(tracer: StepTracer, *entries: CheckedEntry) -> StepTrace:
    """The trace of a step of these entries, as it comes out of the broker."""
    made = tracer.trace(4, entries, 120.0, {"wait": 1.0, "train": 2.0}, 0.25)
    return StepTrace.from_bytes(made.to_bytes())


def test_a_trace_tells_how_its_groups_came_to_be_the_last_one_last() -> None:
    found = traced(StepTracer(), entry(group(1), 119.5), entry(group(0), 101.0))
    assert (found.step, found.num_groups, found.send_s) == (4, 2, 0.25)
    assert [one.task for one in found.groups] == [0, 1]
    last = found.groups[-1]
    assert (last.issued, last.arrived, last.traceparent) == (100.0, 119.5, TRACE)
    assert (last.weights_s, last.rollout_s) == (2.0, 8.0)
    assert (last.generate_s, last.environment_s) == (3.0, 4.0)
    assert last.answer_s == pytest.approx(4.5 / 5)


def test_the_times_of_generators_add_up_until_the_next_trace() -> None:
    tracer = StepTracer()
    tracer.take_group(group(time_use={"generate": 2.0, "tasks": 1.0}))
    tracer.take_group(group(time_use={"generate": 0.5}))
    source = group().source
    assert traced(tracer).generators == {source: {"generate": 2.5, "tasks": 1.0}}
    assert traced(tracer).generators == {}


def test_what_an_agent_makes_up_is_left_out() -> None:
    tracer = StepTracer()
    wrong = {"generate": math.inf, "swap": -1.0, "weights": math.nan, "x" * 100: 1.0, "other": 3.0}
    tracer.take_group(group(time_use=wrong))
    odd = group(started=9.0, finished=1.0, weights_s=math.inf)
    found = traced(tracer, entry(odd, traceparent="00-forged"))
    (times,) = found.generators.values()
    assert times == {"swap": 0.0, "generate": 0.0, "weights": 0.0, "other": 3.0}
    (told,) = found.groups
    assert (told.traceparent, told.rollout_s, told.weights_s) == ("", 0.0, 0.0)


def test_a_host_is_timed_from_heartbeat_to_heartbeat_of_one_process() -> None:
    tracer = StepTracer()

    def beat(pid: int, play_s: float, idle_s: float) -> Presence:
        numbers = {"full_s": 0.0, "play_s": play_s, "idle_s": idle_s, "episodes": 3.0}
        told: dict[str, Any] = {
            "actor": "env-a",
            "role": "environment",
            "host": "h",
            "state": "running",
        }
        return Presence(**told, pid=pid, numbers=numbers, time=0.0)

    for told in (beat(1, 5.0, 1.0), beat(1, 7.0, 2.0), beat(2, 1.0, 1.0), beat(2, 1.5, 1.0)):
        tracer.take_host(told)
    assert traced(tracer).hosts == {"env-a": {"full": 0.0, "play": 2.5, "idle": 1.0}}


def test_a_trace_names_a_bounded_number_of_groups() -> None:
    many = [entry(group(number), 100.0 + number) for number in range(MAX_GROUPS + 2)]
    found = traced(StepTracer(), *many)
    assert found.num_groups == MAX_GROUPS + 2
    assert [one.task for one in found.groups] == list(range(2, MAX_GROUPS + 2))
    failed = replace(many[0], group=None)
    assert traced(StepTracer(), failed).groups == []
