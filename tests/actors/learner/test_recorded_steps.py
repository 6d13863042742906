"""A learner that starts again finds every task that was issued, while generators go on."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tinkermq.actors.learner.data_order import DataOrder
from tinkermq.actors.learner.drops import Drops
from tinkermq.actors.learner.intake import Intake
from tinkermq.actors.learner.recorded_steps import RecordedSteps
from tinkermq.actors.learner.reporter import Reporter
from tinkermq.actors.learner.tasks import Ledger
from tinkermq.actors.training.state import LearnerState
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.task import Task
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
    broker: Broker, scope: JobScope
) -> None:
    context, state = await job_context(broker, scope, "learner", CONFIG), LearnerState()
    queue, log = TaskQueue(broker, scope), RolloutLog(broker, scope)
    for number in range(NUM_TASKS):
        await queue.publish(Task(task=number, index=number, seed=0, group_size=2, issued=1.0))
    await finish_one(broker.url, scope)
    ledger = Ledger(state)
    intake = Intake(
        log,
        vocab_size=264,
        max_tokens=40,
        group_size=2,
        greedy_baseline=False,
        was_issued=ledger.was_issued,
    )
    reporter = Reporter(context=context, trackers=[], total_steps=100)
    drops = Drops(intake, ledger, DataOrder(0, 50), reporter, state, context.event)
    recorded = RecordedSteps(context, BatchLog(broker, scope), intake, ledger, drops, state)

    def notice_arrivals() -> None:
        arrived, intake.arrived = intake.arrived, []
        for entry in arrived:
            assert entry.number is not None
            ledger.note_in_log(entry.number, entry.task)
        with ThreadPoolExecutor(1) as elsewhere:  # this loop stands still meanwhile
            elsewhere.submit(asyncio.run, finish_one(broker.url, scope)).result(PATIENCE_S)

    await recorded.read()
    reading = asyncio.create_task(intake.read_log())
    await recorded.take_notice(notice_arrivals)
    following = ledger.next_issue()
    reading.cancel()
    await context.service.stop(0)
    assert (following.number, following.index) == (NUM_TASKS, NUM_TASKS)
