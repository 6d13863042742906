"""Who waited for whom, how an actor's time is divided, and traces."""

from dataclasses import replace
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import RequestContext, Service, call
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.control import ControlReply, ControlRequest
from tinkermq.schemas.profile import Profile, TimeUse, advise, profile_of, waited_for
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope
from tinkermq.schemas.wire.trace import (
    TRACEPARENT,
    GroupTrace,
    StepTrace,
    is_traceparent,
    new_trace,
    span_of,
    trace_of,
)

from tests.support.groups import make_group, make_trajectory
from tests.support.waiting import PATIENCE_S

TRACE = new_trace()


def group(**changes: Any) -> GroupTrace:
    """A group issued at 100 and there at 120: 6 s queue, 4 s weights, 10 s episodes (6 + 3)."""
    told: dict[str, Any] = {
        "task": 7,
        "traceparent": TRACE,
        "source": "generator-1",
        "issued": 100.0,
        "arrived": 120.0,
        "weights_s": 4.0,
        "rollout_s": 10.0,
        "generate_s": 6.0,
        "environment_s": 3.0,
        "answer_s": 0.5,
    }
    return GroupTrace(**{**told, **changes})


def trace(wait_s: float, *groups: GroupTrace, formed: float = 120.0, **more: Any) -> StepTrace:
    """A step that began to train at `formed`, after so many seconds of waiting."""
    learner = {"wait": wait_s, "train": 2.0, "publish": 0.5, "other": 0.5}
    told: dict[str, Any] = {"step": 1, "learner": learner, **more}
    return StepTrace(
        traceparent=new_trace(),
        formed=formed,
        ended=formed + 3.0,
        num_groups=len(groups),
        groups=list(groups),
        **told,
    )


@pytest.mark.parametrize(
    ("wait_s", "during"),
    [
        (0.0, {}),
        (5.0, {"generate": 3.0, "environment": 1.5, "other": 0.5}),
        (12.0, {"weights": 2.0, "generate": 6.0, "environment": 3.0, "other": 1.0}),
        (18.0, {"queue": 4.0, "weights": 4.0, "generate": 6.0, "environment": 3.0, "other": 1.0}),
        # It was not even issued in the first 5 of the 25 seconds.
        (25.0, {"queue": 6.0, "weights": 4.0, "generate": 6.0, "environment": 3.0, "other": 6.0}),
    ],
)
def test_the_learner_waited_for_what_its_last_group_was_at(
    wait_s: float, during: dict[str, float]
) -> None:
    earlier = group(arrived=101.0, rollout_s=50.0, generate_s=50.0)
    found = dict(waited_for(trace(wait_s, earlier, group())))
    assert found == pytest.approx(during)
    assert sum(found.values()) == pytest.approx(wait_s)


def test_a_group_of_an_external_agent_was_in_no_queue() -> None:
    outside = group(issued=0.0, weights_s=0.0, rollout_s=0.0, generate_s=0.0, environment_s=0.0)
    assert waited_for(trace(8.0, outside)) == [("other", 8.0)]


def test_shares_are_of_each_actors_own_wall_time() -> None:
    steps = [
        trace(
            5.0,
            group(),
            step=1,
            generators={"generator-0": {"generate": 3.0, "tasks": 1.0}},
            hosts={"env-a": {"play": 1.0, "idle": 3.0}},
        ),
        trace(
            3.0,
            group(answer_s=2.0),
            step=2,
            generators={"generator-0": {"generate": 3.0, "swap": 1.0}, "generator-1": {"other": 2}},
        ),
        trace(13.0, group(answer_s=1.0), step=3),
    ]
    found = profile_of(steps)
    assert (found.num_steps, found.wall_s) == (3, 30.0)
    assert found.learner == pytest.approx(
        {"wait": 0.7, "train": 0.2, "publish": 0.05, "other": 0.05}
    )
    assert sum(found.waited_for.values()) == pytest.approx(0.7)
    assert found.generators == {
        "generator-0": {"generate": 0.75, "tasks": 0.125, "swap": 0.125},
        "generator-1": {"other": 1.0},
    }
    assert found.hosts == {"env-a": {"play": 0.25, "idle": 0.75}}
    assert (found.answer_p50_s, found.answer_p95_s) == (1.0, 2.0)
    typical = found.typical
    assert typical is not None
    assert (typical.step, typical.task, typical.source) == (1, 7, "generator-1")
    assert typical.trace == trace_of(TRACE)
    assert [kind for kind, _ in typical.path] == [
        "generate",
        "environment",
        "other",
        "train",
        "publish",
        "rest",
    ]
    assert sum(seconds for _, seconds in typical.path) == pytest.approx(typical.seconds) == 8.0


def shares(waited: float, waited_for: dict[str, float], **more: Any) -> Profile:
    """A profile with these shares."""
    told = more.get("generator", {"generate": 1.0})
    learner = {"wait": waited, "train": 1 - waited - sum(more.get("own", {}).values())}
    return Profile(
        num_steps=3,
        wall_s=30.0,
        learner={**learner, **more.get("own", {})},
        waited_for=waited_for,
        generators={"generator-0": told} if told else {},
        hosts=more.get("hosts", {}),
        answer_p50_s=0.1,
        answer_p95_s=1.2,
        typical=None,
    )


@pytest.mark.parametrize(
    ("found", "says", "change"),
    [
        (shares(0.1, {}), "the learner is busy 90% of the time", "learner.threads"),
        (
            shares(0.62, {"generate": 0.5, "queue": 0.12}),
            "waited 62% of the time for rollouts, mostly for generation: add generators",
            "tinkermq scale RUN generators=N",
        ),
        (
            shares(0.62, {"generate": 0.5}, generator={"weights": 0.3, "tasks": 0.1}),
            "generators were held back 40% of the time by the staleness bound",
            "training.max_staleness",
        ),
        (
            shares(0.6, {"environment": 0.5}, hosts={"env-a": {"full": 0.9}}),
            "mostly for games, which answered after 1.2 s (p95): add environment hosts",
            "tinkermq scale RUN environments=N",
        ),
        (
            shares(0.6, {"environment": 0.5}, hosts={"env-a": {"full": 0.2, "play": 0.8}}),
            "though their hosts had workers free 80% of the time",
            "training.max_staleness",
        ),
        (
            shares(0.6, {"queue": 0.5}),
            "mostly for tasks that no generator had room for",
            "generator.max_episodes",
        ),
        (shares(0.6, {"weights": 0.5}), "raise training.max_staleness", "training.batch_size"),
        (shares(0.3, {"other": 0.3}), "the learner waited 30% of the time for rollouts: ", ""),
        (
            shares(0.3, {"other": 0.3}, generator={}),
            "their external agent records no times",
            "training.max_staleness",
        ),
    ],
)
def test_the_first_advice_names_what_holds_the_run_up(
    found: Profile, says: str, change: str
) -> None:
    first = advise(found, "RUN")[0]
    assert says in first.text
    assert not change or change in first.change


def test_generators_are_not_advised_where_all_cores_are_busy() -> None:
    def advised(cores_busy: float, waited_for: str = "generate") -> str:
        found = replace(shares(0.6, {waited_for: 0.5}), cores_busy=cores_busy)
        return advise(found, "RUN")[0].text

    assert "add generators" in advised(0.5)
    told = "the cores of this machine are 97% busy: more generators here would not help"
    assert told in advised(0.97)
    assert "raise training.max_staleness" in advised(1.0, "weights")
    half = [trace(1.0, cores_busy=0.9), trace(1.0, cores_busy=0.7), trace(9.0)]
    assert profile_of(half).cores_busy == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("found", "change"),
    [
        (shares(0.6, {"generate": 0.5}), ("generator.count",)),
        (shares(0.6, {"queue": 0.5}), ("generator.count", "generator.max_episodes")),
        (shares(0.6, {"environment": 0.5}), ("env.hosts", "env.workers")),
        (shares(0.1, {}, generator={"tasks": 0.5}), ("generator.count",)),
    ],
)
def test_what_has_ended_is_advised_keys_for_the_next_run(
    found: Profile, change: tuple[str, ...]
) -> None:
    assert advise(found, "")[-1].change == change
    assert any("tinkermq scale RUN" in one for one in advise(found, "RUN")[-1].change)


def test_what_costs_besides_is_told_behind_it() -> None:
    found = shares(
        0.1,
        {},
        own={"checkpoint": 0.2, "publish": 0.15},
        generator={"tasks": 0.5, "swap": 0.2, "validation": 0.15},
    )
    texts = [one.text for one in advise(found, "RUN")]
    assert texts[1].startswith("generators were held back 50% of the time")
    assert texts[2].startswith("writing checkpoints took 20%")
    assert texts[3].startswith("publishing weights")
    assert texts[4].startswith("generators stood still 20%")
    assert texts[5].startswith("generators did nothing but validate versions 15%")


def test_a_run_without_steps_has_an_empty_profile() -> None:
    found = profile_of([])
    assert (found.num_steps, found.learner, found.typical) == (0, {}, None)


# -- An actor's time is divided without gaps: the seconds by kind add up to the wall time ----------


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_of_several_things_at_once_the_first_named_counts() -> None:
    clock = Clock()
    use = TimeUse("generate", "environment", rest="tasks", clock=clock)
    clock.now += 1
    with use.doing("environment"):
        clock.now += 2
        with use.doing("generate"), use.doing("environment"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert use.take() == {"generate": 4, "environment": 10, "tasks": 17}
    clock.now += 32
    assert use.take() == {"tasks": 32}
    assert use.totals() == {"generate": 4, "environment": 10, "tasks": 49}


def test_no_more_seconds_get_another_name_than_there_are() -> None:
    clock = Clock()
    use = TimeUse("swap", "generate", rest="tasks", clock=clock)
    with use.doing("generate"):
        clock.now += 3
        use.reassign("generate", "swap", 1)
        assert use.take() == {"swap": 1, "generate": 2}
        clock.now += 1
        use.reassign("generate", "swap", 5)
        assert use.take() == {"swap": 1}


# -- A trace context travels with tasks, groups and requests, in the W3C's header ------------------


async def test_a_trace_goes_with_a_task_to_its_group_and_to_whom_is_asked(
    broker: Broker, scope: JobScope
) -> None:
    sent = new_trace()
    queue, log = TaskQueue(broker, scope), RolloutLog(broker, scope)
    await queue.publish(Task(task=0, seed=0, group_size=1), traceparent=sent)
    (lease,) = await queue.pull(1, 5)
    assert lease.traceparent == sent
    await log.append(make_group([make_trajectory([1], [([2], [])], [0.0])]), traceparent=sent)
    entry = await log.find(0)
    assert entry is not None
    assert entry.traceparent == sent
    await queue.close()

    async def answer(_: ControlRequest, context: RequestContext) -> ControlReply:
        return ControlReply(actor=context.traceparent)

    async with await Service.start(broker, name="traced", description="d") as service:
        await service.endpoint("control", scope.control("x"), ControlRequest, answer)
        reply = await call(
            broker,
            scope.control("x"),
            ControlRequest(verb="status"),
            ControlReply,
            timeout_s=PATIENCE_S,
            waiting_for="x",
            traceparent=sent,
        )
    assert reply.actor == sent


def test_a_trace_context_is_of_the_w3cs_form() -> None:
    assert TRACEPARENT == "traceparent"
    example = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert is_traceparent(example)
    assert trace_of(example) == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert span_of(example) == "00f067aa0ba902b7"
    assert is_traceparent(new_trace())
    assert new_trace() != new_trace()
    for wrong in ("", "x", example.upper(), example[:-1], f"00-{'0' * 32}-{'1' * 16}-01"):
        assert not is_traceparent(wrong)
        assert (trace_of(wrong), span_of(wrong)) == ("", "")
