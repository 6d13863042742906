"""A learner without a model and generators without one: real messages, made-up episodes.

    python -m benchmarks.simulated learner NATS_URL GROUPS IN_FLIGHT
    python -m benchmarks.simulated generators NATS_URL COUNT TOKENS

The learner issues tasks, reads, checks and forgets groups, and trims the log, with the parts of the
real one; it prints a line of JSON every two thousand groups, or four in all. Each generator has a
connection of its own: it pulls a task, appends its group, and says done. They end with their
standard input.
"""

import asyncio
import contextlib
import json
import os
import sys
import time

import uvloop
from tinkermq.actors.learner.intake import Intake
from tinkermq.actors.learner.tasks import Ledger
from tinkermq.actors.training.state import LearnerState
from tinkermq.broker.client.connection import connect
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.broker import make_group
from benchmarks.processes import rss_mb

SCOPE = JobScope("local", "scaling")
GROUP_SIZE = 4
BATCH = 64
VOCABULARY = 1 << 20
TELL_EVERY = 2000
STALLED_S = 60


async def learn(url: str, num_groups: int, in_flight: int) -> None:
    """Issue tasks and take their groups, `in_flight` of them under way."""
    async with await connect(url, name="learner") as broker:
        queue, log = TaskQueue(broker, SCOPE), RolloutLog(broker, SCOPE)
        intake = Intake(
            log,
            Ledger(LearnerState(next_task=num_groups)),
            vocab_size=VOCABULARY,
            max_tokens=1 << 20,
            group_size=GROUP_SIZE,
            greedy_baseline=False,
        )
        reading = asyncio.create_task(intake.read_log())
        issued = taken = 0
        tell_every = min(TELL_EVERY, num_groups // 4)
        while taken < num_groups:
            wanted = min(taken + in_flight, num_groups) - issued
            if wanted:
                async with asyncio.TaskGroup() as issuing:
                    for number in range(issued, issued + wanted):
                        task = Task(task=number, seed=number, group_size=GROUP_SIZE)
                        issuing.create_task(queue.publish(task))
                issued += wanted
            while len(intake.candidates()) < min(BATCH, num_groups - taken):
                intake.changed.clear()
                async with asyncio.timeout(STALLED_S):
                    await intake.changed.wait()
            batch = intake.take_arrived()
            assert all(entry.group is not None for entry in batch)
            intake.forget(entry.seq for entry in batch)
            await log.trim(intake.first_undecided())
            before, taken = taken, taken + len(batch)
            if before // tell_every < taken // tell_every or taken == num_groups:
                tell(taken)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await queue.close()


def tell(taken: int) -> None:
    """Print what the process has taken and cost so far."""
    cost = {"groups": taken, "cpu_s": time.process_time(), "rss_mb": rss_mb(os.getpid())}
    print(json.dumps({**cost, "time": time.perf_counter()}), flush=True)


async def generate(url: str, count: int, num_tokens: int) -> None:
    """Be `count` generators until standard input ends."""
    template = make_group(0, GROUP_SIZE, num_tokens)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)

    async def generator(name: str) -> None:
        async with await connect(url, name=name, deadline_s=120) as broker:
            queue, log = TaskQueue(broker, SCOPE), RolloutLog(broker, SCOPE)
            while not ended.is_set():
                for lease in await queue.pull(1, 5.0):
                    await log.append(template.model_copy(update={"task": lease.task}))
                    await lease.done()
            await queue.close()

    async with asyncio.TaskGroup() as running:
        for number in range(count):
            running.create_task(generator(f"generator-{os.getpid()}-{number}"))


if __name__ == "__main__":
    role, nats_url, first, second = sys.argv[1:]
    work = {"learner": learn, "generators": generate}[role]
    uvloop.run(work(nats_url, int(first), int(second)))
