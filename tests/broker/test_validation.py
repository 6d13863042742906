"""Validation tasks and their results: leased like those of training, each counted once."""

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.tasks import Lease, TaskQueue, ValidationLog, publish_validation_tasks
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.metric import EpisodeScore, ValidationResult
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.errors import MessageError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.strategies import make_task
from tests.support.waiting import PATIENCE_S, eventually


@pytest.fixture
async def validated(broker: Broker, scope: JobScope) -> JobScope:
    """A job that validates."""
    await create_job_streams(broker, scope, LimitsConfig(), validation=True)
    return scope


def tasks_of(version: int, num: int) -> list[Task]:
    return [Task(task=n, sample=n, seed=n, version=version, group_size=1) for n in range(num)]


def result(lease: Lease, source: str, reward: float = 1.0) -> ValidationResult:
    version = lease.task.version
    assert version is not None
    score = EpisodeScore(reward=reward, success=True, num_tokens=1, num_turns=1)
    return ValidationResult(
        version=version,
        task=lease.task.task,
        episodes=[score],
        source=source,
        started=0.0,
        finished=1.0,
    )


async def test_tasks_of_a_generator_that_died_are_played_by_another_and_count_once(
    broker: Broker, validated: JobScope
) -> None:
    log, tasks = ValidationLog(broker, validated), tasks_of(4, 6)
    dying = TaskQueue(broker, validated, ack_wait_s=0.5, validation=True)
    other = TaskQueue(broker, validated, ack_wait_s=0.5, validation=True)
    await publish_validation_tasks(dying, tasks)
    held: list[Lease] = []
    while len(held) < 4:
        held += await dying.pull(4 - len(held), PATIENCE_S)
    assert await log.append(result(held[0], "dying"))  # stored, and not acknowledged

    async def all_played() -> bool:
        for lease in await other.pull(6, 0.2):
            await log.append(result(lease, "other", reward=2.0))
            await lease.done()
        return not await log.unplayed(4, tasks)

    await eventually(all_played, "the tasks of the dead generator")
    assert not await log.append(result(held[1], "dying", reward=9.0)), "a second result counts"
    results = await log.read(4)
    assert sorted(one.task for one in results) == list(range(6))
    assert {one.task: one.source for one in results}[held[0].task.task] == "dying"
    assert sum(score.reward for one in results for score in one.episodes if score) == 11.0
    await log.remove(4)
    assert await log.read(4) == []
    assert await other.pull(1, 0.1) == []
    for queue in (dying, other):
        await queue.close()


async def test_a_task_that_is_queued_or_held_is_not_queued_twice_and_versions_are_apart(
    broker: Broker, validated: JobScope
) -> None:
    queue = TaskQueue(broker, validated, validation=True)
    await publish_validation_tasks(queue, tasks_of(1, 2))
    await publish_validation_tasks(queue, tasks_of(2, 1))
    await publish_validation_tasks(queue, tasks_of(1, 2))
    training = TaskQueue(broker, validated)
    await training.publish(make_task(0))
    leases: list[Lease] = []
    while len(leases) < 3:
        leases += await queue.pull(10, PATIENCE_S)
    assert await queue.pull(10, 0.2) == []
    assert sorted((lease.task.version, lease.task.task) for lease in leases) == [
        (1, 0),
        (1, 1),
        (2, 0),
    ]
    [lease] = await training.pull(2, PATIENCE_S)
    assert lease.task.version is None
    for one in (queue, training):
        await one.close()


def test_a_task_is_named_by_its_version_and_number() -> None:
    scope, [task] = JobScope("ada", "j1"), tasks_of(3, 1)
    payload = task.to_bytes()
    assert Task.from_bytes(payload, at=scope.validation_task(3, 0)) == task
    for other in (scope.validation_task(4, 0), scope.validation_task(3, 1), scope.task(0)):
        with pytest.raises(MessageError):
            Task.from_bytes(payload, at=other)
