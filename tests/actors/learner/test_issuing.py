"""Tasks are issued under the gate, to generators and to clients alike."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from tinkermq.actors.learner.data_order import DataOrder
from tinkermq.actors.learner.tasks import Ledger, TaskIssuer
from tinkermq.actors.training.state import LearnerState
from tinkermq.broker.calls import decide_failed
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import publish_dead, read_failed
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.control import PublishTasksRequest, ReserveRequest, TaskSpec
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.task import BatchRecord, Blame, DeadLetter, Task
from tinkermq.schemas.wire.errors import FencedError, NotFoundError, StateError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.groups import make_group, make_trajectory


def _issuer(
    broker: Broker,
    scope: JobScope,
    ledger: Ledger,
    check_owner: Callable[[], Awaitable[None]] | None = None,
    **training: Any,
) -> TaskIssuer:
    config = JobConfig.model_validate(
        {
            "model": {"path": "none"},
            "env": {"game": "none"},
            "rollout": {"group_size": 2},
            "training": {"batch_size": 3, "max_staleness": 1, "num_steps": 10} | training,
        }
    )
    issuer = TaskIssuer(
        TaskQueue(broker, scope),
        RolloutLog(broker, scope),
        ledger,
        DataOrder(0, 50),
        config,
        10,
        check_owner=check_owner,
    )
    issuer.is_open = True
    return issuer


async def _queued(broker: Broker, scope: JobScope) -> list[Task]:
    queue = TaskQueue(broker, scope)
    leases = await queue.pull(100, timeout_s=0)
    for lease in leases:
        await lease.give_back()
    await queue.close()
    return sorted((lease.task for lease in leases), key=lambda task: task.task)


async def _stored(broker: Broker, scope: JobScope) -> list[Task]:
    stored = await get_all(broker, scope.stream_task, scope.task("*"))
    return sorted((Task.from_bytes(one.payload) for one in stored), key=lambda task: task.task)


async def test_as_many_tasks_are_issued_as_the_gate_lets_through(
    broker: Broker, scope: JobScope
) -> None:
    issuer = _issuer(broker, scope, Ledger(LearnerState()))
    assert await issuer.issue(0) == 6
    assert await issuer.issue(0) == 0
    assert await issuer.issue(1) == 3
    tasks = await _queued(broker, scope)
    assert [task.task for task in tasks] == list(range(9))
    assert [task.index for task in tasks] == list(range(9))
    assert [task.min_version for task in tasks] == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    order = DataOrder(0, 50)
    assert [(task.sample, task.seed) for task in tasks] == [
        (order.sample(index), order.task_seed(index)) for index in range(9)
    ]


async def test_no_task_is_issued_that_no_step_would_train(broker: Broker, scope: JobScope) -> None:
    issuer = _issuer(broker, scope, Ledger(LearnerState(next_task=27, next_index=27)))
    assert await issuer.issue(9) == 3


async def test_a_dropped_task_is_issued_again_under_a_new_number(
    broker: Broker, scope: JobScope
) -> None:
    ledger = Ledger(LearnerState())
    issuer = _issuer(broker, scope, ledger)
    await issuer.issue(0)
    ledger.drop(4, "stale")
    assert await issuer.issue(1) == 4
    tasks = await _queued(broker, scope)
    first, again = tasks[4], tasks[6]
    assert (again.task, again.reissue_of) == (6, 4)
    assert (again.index, again.sample, again.seed) == (first.index, first.sample, first.seed)


async def test_what_is_issued_late_begins_with_weights_that_can_still_be_trained(
    broker: Broker, scope: JobScope
) -> None:
    ledger = Ledger(LearnerState(step=5, next_task=2, trained=[(1, 2)], indices=[(1, 2)]))
    ledger.find_missing()
    issuer = _issuer(broker, scope, ledger)
    await issuer.issue(5)
    late = (await _queued(broker, scope))[0]
    assert (late.task, late.index, late.min_version) == (0, 0, 4)


async def test_clients_pass_the_same_gate_also_when_they_ask_at_once(
    broker: Broker, scope: JobScope
) -> None:
    ledger = Ledger(LearnerState())
    issuer = _issuer(broker, scope, ledger, tasks="external")
    assert await issuer.issue(0) == 0
    request = PublishTasksRequest(
        tasks=[TaskSpec(sample=7, seed=3), TaskSpec(reset_kwargs={"level": 2}), *[TaskSpec()] * 3]
    )
    counts = await asyncio.gather(*(issuer.publish_for_client(request, 0) for _ in range(3)))
    assert sum(counts) == 6
    tasks = await _queued(broker, scope)
    assert [task.task for task in tasks] == list(range(6))
    assert (tasks[0].sample, tasks[0].seed, tasks[0].index) == (7, 3, None)
    assert tasks[1].reset_kwargs == {"level": 2}
    assert all(task.group_size == 2 for task in tasks)


async def test_an_agent_is_told_when_the_bound_is_reached(broker: Broker, scope: JobScope) -> None:
    issuer = _issuer(broker, scope, Ledger(LearnerState()))
    assert issuer.reserve(ReserveRequest(count=4, source="me"), 0) == [0, 1, 2, 3]
    assert issuer.reserve(ReserveRequest(count=4, source="me"), 0) == [4, 5]
    with pytest.raises(StateError, match="the staleness bound is reached") as raised:
        issuer.reserve(ReserveRequest(count=1, source="me"), 0)
    assert raised.value.hint == "try again after the next training step"


async def test_nobody_gets_a_number_while_the_learner_starts(
    broker: Broker, scope: JobScope
) -> None:
    issuer = _issuer(broker, scope, Ledger(LearnerState()))
    issuer.is_open = False
    with pytest.raises(StateError, match="the learner is starting"):
        issuer.reserve(ReserveRequest(count=1, source="me"), 0)
    with pytest.raises(StateError, match="the learner is starting"):
        await issuer.publish_for_client(PublishTasksRequest(tasks=[TaskSpec()]), 0)


async def test_a_reservation_that_is_not_kept_is_closed(broker: Broker, scope: JobScope) -> None:
    ledger, log = Ledger(LearnerState()), RolloutLog(broker, scope)
    issuer = _issuer(broker, scope, ledger)
    kept, early = issuer.reserve(ReserveRequest(count=2, source="me", deadline_s=600), 0)
    (lost,) = issuer.reserve(ReserveRequest(count=1, source="me", deadline_s=0.001), 0)
    group = make_group([make_trajectory([1], [([2], [])], [0.0])] * 2, kept)
    assert await log.append(group)
    ledger.note_in_log(kept, group.task)
    await asyncio.sleep(0.01)
    await issuer.expire_reservations()
    assert not await log.contains(early)
    entry = await log.find(lost)
    assert entry is not None
    assert entry.group is not None
    assert entry.group.error is not None
    assert entry.group.error.code == "reservation_expired"
    assert not await log.append(make_group(group.trajectories, lost))  # too late
    entry = await log.find(kept)
    assert entry is not None
    assert entry.group is not None
    assert entry.group.error is None


async def test_a_clients_task_that_came_to_nothing_is_published_again(
    broker: Broker, scope: JobScope
) -> None:
    ledger = Ledger(LearnerState())
    issuer = _issuer(broker, scope, ledger, tasks="external")
    await issuer.publish_for_client(PublishTasksRequest(tasks=[TaskSpec(sample=7, seed=3)]), 0)
    ledger.note_in_log(0, None)
    ledger.drop(0, "malformed")
    assert issuer.waits_for(2).startswith(
        "2 more groups from outside, 0 of them under way (1 could"
    )
    assert await issuer.issue(0) == 1
    assert await issuer.issue(0) == 0
    (again,) = [task for task in await _queued(broker, scope) if task.task == 1]
    assert (again.sample, again.seed, again.reissue_of, again.tries) == (7, 3, 0, 1)


async def test_a_narrower_gate_lets_nothing_through_until_training_has_caught_up(
    broker: Broker, scope: JobScope
) -> None:
    training = {"max_staleness": "auto", "staleness_limit": 4, "num_steps": 20}
    issuer = _issuer(broker, scope, Ledger(LearnerState()), **training)
    assert await issuer.issue(0) == 6
    issuer.staleness.now = 4
    assert await issuer.issue(0) == 9
    issuer.staleness.now = 1
    assert [await issuer.issue(version) for version in range(1, 6)] == [0, 0, 0, 3, 3]
    tasks = await _queued(broker, scope)
    # None asks for a version that is not made when it is issued, or is older than can be trained.
    assert [task.min_version for task in tasks] == [0] * 15 + [4] * 3 + [5] * 3


async def test_a_task_that_a_learner_that_was_cut_off_has_queued_makes_room(
    broker: Broker, scope: JobScope
) -> None:
    old, new = Ledger(LearnerState()), Ledger(LearnerState())
    cut_off = _issuer(broker, scope, old)
    await cut_off.issue(0)
    for task in await _stored(broker, scope):
        new.note_task(task)
    old.drop(4, "malformed")  # as it does with groups of the new one, which it never gave out
    await cut_off.issue(1)
    assert [task.index for task in await _stored(broker, scope)][6:] == [4, 6, 7, 8]
    await _issuer(broker, scope, new).issue(1)
    tasks = await _stored(broker, scope)
    assert [(task.task, task.index) for task in tasks[:9]] == [(n, n) for n in range(9)]
    foreign = tasks[9]
    assert (foreign.task, foreign.index) == (9, 8)  # nobody has given that number out yet
    await _issuer(broker, scope, new).issue(2)
    assert [task.index for task in await _stored(broker, scope)] == list(range(12))


async def test_a_learner_that_is_no_longer_the_owner_issues_nothing(
    broker: Broker, scope: JobScope
) -> None:
    log = BatchLog(broker, scope)
    cut_off = _issuer(broker, scope, Ledger(LearnerState()), check_owner=lambda: log.check_owner(0))
    assert await cut_off.issue(0) == 6
    record = BatchRecord(step=1, seqs=[1], tasks=[0], seed=0, digest="d", learner="new", time=1.0)
    await log.append(record, 0)
    with pytest.raises(FencedError, match="its last entry is 1, this learner's last one is 0"):
        await cut_off.issue(1)
    assert len(await _stored(broker, scope)) == 6


async def test_a_learner_that_was_cut_off_gives_clients_no_numbers(
    broker: Broker, scope: JobScope
) -> None:
    log = BatchLog(broker, scope)
    external = {"tasks": "external"}
    check = partial(log.check_owner, 0)
    cut_off = _issuer(broker, scope, Ledger(LearnerState()), check_owner=check, **external)
    request = PublishTasksRequest(tasks=[TaskSpec(seed=1)])
    assert await cut_off.publish_for_client(request, 0) == 1
    await cut_off.check_owner()
    record = BatchRecord(step=1, seqs=[1], tasks=[0], seed=0, digest="d", learner="new", time=1.0)
    await log.append(record, 0)
    with pytest.raises(FencedError):
        await cut_off.publish_for_client(request, 0)
    with pytest.raises(FencedError):
        await cut_off.check_owner()
    assert len(await _stored(broker, scope)) == 1


async def test_a_failed_task_is_repeated_once_as_a_new_task_whatever_dies(
    broker: Broker, scope: JobScope
) -> None:
    ledger = Ledger(LearnerState())
    issuer = _issuer(broker, scope, ledger)
    await issuer.issue(0)
    first = (await _stored(broker, scope))[4]
    blame = Blame(boundary="task", code="data", message="too long")
    letter = DeadLetter(task=first, blame=blame, num_attempts=1, source="g", time=1.0)
    await publish_dead(broker, scope, letter)
    ledger.repeat(first)  # not decided yet: it holds when the task is dropped
    ledger.drop(4, "failed", unplayable=True)
    assert [failed.task.task for failed in await read_failed(broker, scope)] == [4]
    record = JobRecord(
        job=scope.job, user=scope.user, name="run", config={}, state="COMPLETED", created=1.0
    )
    with pytest.raises(NotFoundError, match="task 5 of run is not among those that failed"):
        await decide_failed(broker, record, [5], "repeat")
    assert await decide_failed(broker, record, [], "repeat") == [4]
    assert await read_failed(broker, scope) == []
    assert await issuer.issue(1) == 4
    again = (await _stored(broker, scope))[6]
    assert (again.task, again.reissue_of, again.index, again.tries) == (6, 4, None, 0)
    assert (again.sample, again.seed) == (first.sample, first.seed)
    # A learner that starts again reads the same letters, with or without a checkpoint since.
    saved = LearnerState()
    ledger.write_to(saved)
    old = LearnerState(dropped=[(4, 5)], next_task=6, next_index=6)
    for state in (saved, old):
        restarted = Ledger(LearnerState.model_validate_json(state.model_dump_json()))
        for task in await _stored(broker, scope):
            if task.task not in restarted:
                restarted.note_task(task)
        restarted.repeat(first)
        assert restarted.num_client_reissues == 0
    trained = Ledger(LearnerState(trained=[(4, 5)], next_task=6))
    trained.repeat(first)
    assert trained.num_client_reissues == 0
