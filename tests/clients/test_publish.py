"""External agents publish trajectories and tasks, checked before they leave."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.clients import AsyncTrajectoryPublisher, TrajectoryPublisher, make_trajectory
from tinkermq.clients.address import JobAddress
from tinkermq.schemas.control import (
    PublishTasksReply,
    PublishTasksRequest,
    ReserveReply,
    ReserveRequest,
)
from tinkermq.schemas.rollout import Trajectory
from tinkermq.schemas.wire.errors import (
    BrokerError,
    DeadlineError,
    MessageError,
    StateError,
)
from tinkermq.schemas.wire.subjects import JobScope


class Reservations:
    """What a learner answers, without the learner: numbers while the gate is open."""

    def __init__(self, scope: JobScope) -> None:
        self.scope = scope
        self.given = 0
        self.gate = 100
        self.tasks: list[object] = []

    async def reserve(self, request: ReserveRequest) -> ReserveReply:
        if self.given >= self.gate:
            raise StateError("the staleness bound is reached", hint="try again")
        self.given += 1
        return ReserveReply(
            tasks=[self.given - 1], group_size=2, version=3, vocab_size=100, max_tokens=8
        )

    async def take(self, request: PublishTasksRequest) -> PublishTasksReply:
        room = self.gate - len(self.tasks)
        self.tasks += request.tasks[:room]
        return PublishTasksReply(queued=min(room, len(request.tasks)))


@pytest.fixture
async def learner(broker: Broker, scope: JobScope) -> AsyncIterator[Reservations]:
    reservations = Reservations(scope)
    subject = scope.control("learner")
    async with await Service.start(broker, name="learner", description="reserves") as service:
        await service.endpoint(
            "reserve", f"{subject}.reserve", ReserveRequest, reservations.reserve
        )
        await service.endpoint("tasks", f"{subject}.tasks", PublishTasksRequest, reservations.take)
        yield reservations


@pytest.fixture
async def publisher(broker: Broker, scope: JobScope) -> AsyncIterator[AsyncTrajectoryPublisher]:
    url = JobAddress(broker.url, scope).server_url
    async with AsyncTrajectoryPublisher(url, source="my-agent") as made:
        yield made


def episode(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "token_ids": [1, 2, 3, 4, 5],
        "mask": [0, 1, 1, 0, 1],
        "logprobs": [0, -0.5, -1.0, 0, -0.1],
        "rewards": 1.0,
        "version": 3,
    }
    return make_trajectory(**{**fields, **changes})


def test_a_trajectory_is_made_from_plain_lists() -> None:
    made = episode()
    assert made.turn_ends.tolist() == [2, 4]
    assert made.rewards.tolist() == [0.0, 1.0]
    assert made.versions.tolist() == [-1, 3, 3, -1, 3]
    assert made.logprobs.dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": [0, 0, 0, 0, 0]}, "no generated token"),
        ({"logprobs": [0.0]}, "logprobs 1"),
        ({"rewards": [1.0, 2.0, 3.0]}, "turn_ends has 2 entries and rewards 3"),
        ({"token_ids": [1, 2]}, "token_ids has 2"),
        ({"token_ids": [1.5, 2, 3, 4, 5]}, "token_ids holds values that are no int32"),
        ({"token_ids": ["a"] * 5}, "token_ids cannot be an array"),
        ({"token_ids": [[1]] * 5}, "must have 1 dimension"),
    ],
)
def test_what_is_wrong_with_a_trajectory_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MessageError, match=message):
        episode(**changes)


async def test_a_group_enters_the_log_under_a_reserved_number(
    broker: Broker, scope: JobScope, learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    assert await publisher.publish_group([episode(), episode(rewards=0.0)], sample=7) == 0
    assert await publisher.publish_group([episode(), episode()]) == 1
    entry = await RolloutLog(broker, scope).find(0)
    assert entry is not None
    assert entry.group is not None
    assert (entry.group.source, entry.group.task.sample) == ("my-agent", 7)
    assert [one.reward for one in entry.group.trajectories] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([episode()], "2 trajectories, this has 1"),
        ([], "a group of this job has"),
        ([episode(token_ids=[1, 2, 3, 4, 100])] * 2, "token_ids must be from 0 to 99"),
        ([episode(version=9)] * 2, "versions of generated tokens must be from 0 to 3"),
        ([episode(logprobs=[0, 0.5, -1, 0, -1])] * 2, "logprobs of generated tokens"),
        ([episode(rewards=float("nan"))] * 2, "rewards must be finite"),
        ([episode(mask=[1, 1, 1, 0, 1])] * 2, "turns must end, in order, on generated tokens"),
    ],
)
async def test_a_bad_group_is_refused_with_its_rule_and_nothing_is_appended(
    broker: Broker,
    scope: JobScope,
    learner: Reservations,
    publisher: AsyncTrajectoryPublisher,
    group: list[Trajectory],
    message: str,
) -> None:
    with pytest.raises(MessageError, match=message):
        await publisher.publish_group(group)
    assert await RolloutLog(broker, scope).numbers() == set()


async def test_a_reservation_that_ran_out_is_told(
    broker: Broker, scope: JobScope, learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    await publisher.publish_group([episode(), episode()])
    learner.given = 0  # the same number again: its place in the log is taken
    with pytest.raises(StateError, match="reservation of task 0 ran out"):
        await publisher.publish_group([episode(), episode()])


async def test_a_closed_gate_is_waited_for_and_then_told(
    learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    learner.gate = 0
    with pytest.raises(DeadlineError, match="staleness bound"):
        await publisher.publish_group([episode(), episode()], timeout_s=1)


async def test_tasks_are_issued_as_the_gate_opens(
    learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    learner.gate = 2
    with pytest.raises(DeadlineError, match="1 of 3 tasks wait"):
        await publisher.publish_tasks([{"sample": 1}, {"seed": 2}, {}], timeout_s=1)
    assert len(learner.tasks) == 2


async def test_a_malformed_task_is_named(publisher: AsyncTrajectoryPublisher) -> None:
    with pytest.raises(MessageError, match="a task has no 'prompt'"):
        await publisher.publish_tasks([{"prompt": "x"}])
    with pytest.raises(MessageError, match="sample"):
        await publisher.publish_tasks([{"sample": -1}])


async def test_without_a_learner_the_error_says_so(publisher: AsyncTrajectoryPublisher) -> None:
    with pytest.raises(BrokerError, match=r"the learner of job .* is not there"):
        await publisher.publish_group([episode(), episode()])


async def test_the_sync_publisher_gives_futures(
    broker: Broker, scope: JobScope, learner: Reservations
) -> None:
    url = JobAddress(broker.url, scope).server_url
    with TrajectoryPublisher(url) as publisher:
        future = publisher.publish_group_future([episode(), episode()])
        # The test's own loop must run: it answers for the learner.
        assert await asyncio.wrap_future(future) == 0


async def test_a_group_over_the_limit_is_refused_before_a_number_is_taken(
    learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    long = episode(messages=[{"role": "user", "content": "x" * 9_000_000}])
    with pytest.raises(MessageError, match=r"the largest are messages of episode 1 \(9,000,0"):
        await publisher.publish_group([episode(), long])
    assert learner.given == 0


async def test_tasks_go_in_as_many_messages_as_their_arguments_need(
    learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    sizes = [3_000_000, 3_000_000, 3_000_000, 10, 8_000_000, 10]
    tasks = [{"seed": n, "reset_kwargs": {"board": "x" * n}} for n in sizes]
    assert await publisher.publish_tasks(tasks) == 6
    assert [task.seed for task in learner.tasks] == sizes  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_task_over_the_limit_is_refused_before_any_is_issued(
    learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    large = {"seed": 1, "reset_kwargs": {"board": "x" * 9_000_000}}
    with pytest.raises(MessageError, match="task 1 of 2 has 9,000,"):
        await publisher.publish_tasks([{"seed": 0}, large])
    assert learner.tasks == []
