"""A trace context travels with tasks, groups and requests, in the W3C's header."""

from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import RequestContext, Service, call
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.control import ControlReply, ControlRequest
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope
from tinkermq.schemas.wire.trace import (
    TRACEPARENT,
    is_traceparent,
    new_trace,
    span_of,
    trace_of,
)

from tests.support.groups import make_group, make_trajectory
from tests.support.waiting import PATIENCE_S


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
