"""A learner that starts again finds every task that was issued, while generators go on."""

import asyncio
import hashlib
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from tinkermq.actors.learner.data_order import DataOrder
from tinkermq.actors.learner.intake import CheckedEntry, Drops, Intake
from tinkermq.actors.learner.recorded_steps import RecordedSteps
from tinkermq.actors.learner.rewind import records_behind
from tinkermq.actors.learner.tasks import Ledger
from tinkermq.actors.training.state import LearnerState
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.task import BatchRecord, Task
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.contexts import job_context
from tests.support.groups import make_group, make_trajectory
from tests.support.waiting import PATIENCE_S

NUM_TASKS = 5
CONFIG = JobConfig.model_validate(
    {
        "model": {"path": "none"},
        "env": {"game": "none"},
        "rollout": {"group_size": 2},
        "training": {"batch_size": 100, "max_staleness": 4, "num_steps": 100},
    }
)


async def finish_one(url: str, scope: JobScope) -> None:
    """Finish a task as a generator does: append its group, then acknowledge."""
    async with await connect(url, name="generator") as broker:
        queue = TaskQueue(broker, scope)
        [lease] = await queue.pull(1, timeout_s=PATIENCE_S)
        episodes = [make_trajectory([1, 2], [([3], [])], [1.0]) for _ in range(2)]
        group = make_group(episodes).model_copy(update={"task": lease.task})
        await RolloutLog(broker, scope).append(group)
        await lease.done()
        await queue.close()


async def test_a_task_that_is_finished_while_a_learner_reads_is_not_issued_again(
    broker: Broker, scope: JobScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, state = await job_context(broker, scope, "learner", CONFIG), LearnerState()
    queue, log = TaskQueue(broker, scope), RolloutLog(broker, scope)
    for number in range(NUM_TASKS):
        await queue.publish(Task(task=number, index=number, seed=0, group_size=2, issued=1.0))
    await finish_one(broker.url, scope)
    ledger = Ledger(state)
    intake = Intake(
        log,
        ledger,
        vocab_size=264,
        max_tokens=40,
        group_size=2,
        greedy_baseline=False,
    )
    drops = Drops(intake, ledger, DataOrder(0, 50), state, context.event)
    recorded = RecordedSteps(context, intake, ledger, drops, state)
    take_arrived = intake.take_arrived

    def take_arrived_while_another_is_finished() -> list[CheckedEntry]:
        arrived = take_arrived()
        with ThreadPoolExecutor(1) as elsewhere:  # this loop stands still meanwhile
            elsewhere.submit(asyncio.run, finish_one(broker.url, scope)).result(PATIENCE_S)
        return arrived

    monkeypatch.setattr(intake, "take_arrived", take_arrived_while_another_is_finished)
    await recorded.read()
    reading = asyncio.create_task(intake.read_log())
    await recorded.note_issued()
    following = ledger.next_issue()
    reading.cancel()
    await context.service.stop(0)
    assert (following.number, following.index) == (NUM_TASKS, NUM_TASKS)


def _num_sent(server: NatsServer) -> int:
    """Return the number of messages that the server has sent to all clients."""
    with urllib.request.urlopen(f"{server.monitor_url}/varz") as reply:
        return json.load(reply)["out_msgs"]


async def test_a_learner_of_a_long_run_reads_the_records_since_its_checkpoint_only(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    batches, log, last = BatchLog(own_broker, own_scope), RolloutLog(own_broker, own_scope), 0
    group = make_group([make_trajectory([1, 2], [([3], [])], [1.0])])
    await log.append(group)
    digest = hashlib.sha256(hashlib.sha256(group.to_bytes()).digest()).hexdigest()
    for step in range(1, 1501):
        record = BatchRecord(
            step=step, seqs=[1], tasks=[step], seed=0, digest=digest, learner="l", time=0.0
        )
        last = await batches.append(record, last)
    before = _num_sent(own_server)
    behind = await records_behind(batches, log, 1480)
    assert [record.step for record in behind] == list(range(1481, 1501))
    assert _num_sent(own_server) - before < 100
