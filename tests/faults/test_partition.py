"""A partition of the network between a learner's node and the broker costs no position.

The learner lives on behind it and does not know that another one has taken its job over.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from tinkermq.broker.client.connection import Msg
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.task import Task

from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.partition import Partitions
from tests.support.processes import alive
from tests.support.proofs import (
    assert_every_position_once,
    assert_every_task_once,
    assert_replay_is_identical,
)
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.faults, pytest.mark.long]


class CutOff(Stack):
    """A stack whose first node reaches the broker through a proxy."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, slots=16)
        self.partitions = Partitions(lambda: self.server.port)

    def url_for(self, name: str) -> str:
        """Return the proxy's address for the first node."""
        return self.partitions.url if name == "node" else self.server.url

    def on_node(self, name: str) -> list[int]:
        """Return the processes of a node: itself and its actors."""
        node = psutil.Process(self._processes[name].pid)
        return [node.pid, *(child.pid for child in node.children(recursive=True))]


@pytest.mark.parametrize(
    ("save_freq", "comes_back", "ends"),
    [
        (2, "late", "fenced"),
        (100, "lost", "fenced"),
        (100, "late", "drains"),
        (2, "late", "drains"),
    ],
)
async def test_a_learner_that_was_cut_off_behind_a_batch_record_loses_and_repeats_no_position(
    tmp_path: Path, model: Path, save_freq: int, comes_back: str, ends: str
) -> None:
    """It comes back when its successor has issued tasks and has recorded no step yet.

    Without staleness the successor has to wait for them: it finds nothing else to train. What was
    held back arrives `late` or is `lost`. The old learner is `fenced` by the next record, or
    `drains` before that and leaves a checkpoint, from which a third one may start.
    """
    slow = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 1.0}, "num_val": 0}
    stack = CutOff(tmp_path)
    async with stack.partitions, stack:
        batch = 4
        training = {
            "num_steps": 9,
            "save_freq": save_freq,
            "max_staleness": 0,
            "batch_size": batch,
        }
        job = await stack.submit(small_job(model, env=slow, training=training))
        await job.until_step(3)
        old, published = await job.pid("learner"), list[Task]()

        def hear(message: Msg) -> None:
            published.append(Task.from_bytes(message.data, at=message.subject))

        heard = await stack.broker.listen(job.scope.task("*"), hear)
        stack.start("node", "other")
        await stack.until_nodes(2)
        await asyncio.wait_for(stack.partitions.cut_behind(job.scope.batch), PATIENCE_S)
        stack.partitions.cut(on_node := stack.on_node("node"))
        node = on_node[0]
        os.kill(node, signal.SIGSTOP)  # it starts no learner again
        seen = len(published)
        last = await _last_number(job)

        async def follower() -> int | None:
            pid = await job.pid("learner")
            return None if pid == old else pid

        new = await job.eventually(follower, "another learner")
        await until(
            lambda: len({one.task for one in published[seen:] if one.task > last}) == batch,
            "tasks of the new learner",
        )
        os.kill(new, signal.SIGSTOP)  # it records no step
        highest = max(one.task for one in published)

        async def foreign() -> bool:
            numbers = [one.number or 0 for one in await job.entries()]
            return len([one for one in numbers if one > last]) == batch

        await job.eventually(foreign, "the groups of tasks that the old learner has not issued")
        recorded = len(await job.batches())
        stack.partitions.heal([old], lost=comes_back == "lost")
        await until(
            lambda: not alive(old) or any(one.task > highest for one in published),
            "the old learner to issue tasks, or to end",
        )
        assert len(await job.batches()) == recorded
        if ends == "drains":
            with contextlib.suppress(ProcessLookupError):
                os.kill(old, signal.SIGTERM)
            await until(lambda: not alive(old), "the old learner to drain")
            os.kill(new, signal.SIGCONT)
            await until_recorded(job, recorded + 1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(new, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(new, signal.SIGCONT)
        os.kill(node, signal.SIGCONT)
        stack.partitions.heal([pid for pid in on_node if pid != old])
        await job.until("COMPLETED")
        await heard.stop()
        if ends == "drains":
            [told] = await job.events("checkpoint_damaged")
            assert "was written by a fenced-off learner" in told.message
        assert job.record.losses == 1
        await assert_every_position_once(job)
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)


async def until_recorded(job: Job, count: int) -> None:
    async def recorded() -> bool:
        return len(await job.batches()) >= count

    await job.eventually(recorded, f"{count} recorded steps")


async def _last_number(job: Job) -> int:
    """Return the highest task number that was given out: queued, held, or in the log."""
    queued = await TaskQueue(job.stack.broker, job.scope).pending_numbers()
    return max([*queued, *(one.number or 0 for one in await job.entries())])
