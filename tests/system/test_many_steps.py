"""Five thousand steps of what a learner does at the broker: the last cost what the first did.

Counted are messages and bytes at the server, and bytes kept, none of which depends on how fast the
machine is. `benchmarks/long_run.py` does the same with a whole job, models and all.
"""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from tinkermq.actors.learner.evaluations import Evaluations
from tinkermq.actors.learner.tasks import Ledger
from tinkermq.actors.training.state import LearnerState
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import create_job_streams, stream_info
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.broker.tasks import TaskQueue, ValidationLog
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.env import DescribeReply
from tinkermq.schemas.metric import EpisodeScore, ValidationResult
from tinkermq.schemas.task import BatchRecord, Task
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.configs import REPOSITORY, small_job
from tests.support.groups import random_group

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

STEPS, WINDOW, BATCH = 5000, 500, 2


class Cost(NamedTuple):
    """What some steps cost."""

    messages: int
    num_bytes: int


class Steps:
    """The steps of a learner and a generator, without a model."""

    def __init__(self, broker: Broker, scope: JobScope, config: JobConfig) -> None:
        self._queue = TaskQueue(broker, scope)
        self._log = RolloutLog(broker, scope)
        self._batches = BatchLog(broker, scope)
        self._weights = WeightStore(broker, scope)
        self._evaluations = Evaluations(
            broker, scope, config, self._describe, self._take, self._report
        )
        self._validation = TaskQueue(broker, scope, validation=True)
        self._results = ValidationLog(broker, scope)
        self._rng = np.random.default_rng(0)
        self.ledger = Ledger(LearnerState())
        self._batch_seq = self._last_seq = 0

    async def _take(self, step: int, values: Mapping[str, float]) -> None:
        """Log the result of an evaluation nowhere."""

    async def _report(self, kind: str, message: str = "", **data: Any) -> None:
        raise AssertionError(f"{kind}: {message}")

    async def _describe(self) -> DescribeReply:
        return DescribeReply(game="bandit", num_train=None, num_val=1, host="h")

    async def _validate(self, step: int) -> None:
        """Ask for the validation of a version, play its task, and report it."""
        self._evaluations.note_version(step)
        await self._evaluations.request(step)
        await self._evaluations.play()
        score = EpisodeScore(reward=1.0, success=True, num_tokens=1, num_turns=1)
        while not (leases := await self._validation.pull(1, 5)):
            pass
        result = ValidationResult(
            version=step, task=0, episodes=[score], source="g", started=0, finished=0
        )
        await self._results.append(result)
        await leases[0].done()
        await self._evaluations.play()
        await self._evaluations.collect()
        assert not self._evaluations.open_versions

    async def run(self, step: int) -> None:
        """Issue, roll out, record, train, drop every tenth group, publish, evaluate, trim."""
        numbers = [self.ledger.next_issue().number for _ in range(BATCH + (step % 10 == 0))]
        for number in numbers:
            task = Task(task=number, seed=0, group_size=2, index=number)
            self.ledger.note_task(task)
            await self._queue.publish(task)
        while self.ledger.min_versions:
            for lease in await self._queue.pull(len(numbers), 5):
                await self._log.append(random_group(self._rng, lease.task.task, size=2))
                await lease.done()
                self.ledger.note_in_log(lease.task.task, None)
        trained, dropped = numbers[:BATCH], numbers[BATCH:]
        self._last_seq += len(numbers)
        record = BatchRecord(
            step=step, seqs=[self._last_seq], tasks=trained, seed=0, digest="", learner="", time=0
        )
        self._batch_seq = await self._batches.append(record, self._batch_seq)
        self.ledger.train(trained)
        for number in dropped:
            self.ledger.drop(number, "failed")
        data = memoryview(self._rng.bytes(256))
        await self._weights.publish(step, {"w": TensorBytes("bfloat16", (128,), data)})
        await self._weights.keep(self._evaluations.open_versions, newest=2)
        await self._validate(step)
        if step % 25 == 0:
            await self._log.trim(self._last_seq + 1)


def _cost(server: NatsServer) -> Cost:
    with urllib.request.urlopen(f"{server.monitor_url}/varz") as reply:
        told = json.load(reply)
    return Cost(told["in_msgs"] + told["out_msgs"], told["in_bytes"] + told["out_bytes"])


async def test_the_last_of_many_steps_costs_the_broker_what_the_first_did(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    config = parse_config(small_job(Path("m"), env={"num_val": 1}))
    await create_job_streams(own_broker, own_scope, config.limits, validation=True)
    steps = Steps(own_broker, own_scope, config)
    kept = [
        own_scope.stream_task,
        own_scope.stream_validation,
        own_scope.stream_rollout,
        f"KV_{own_scope.bucket_weights}",
        f"OBJ_{own_scope.object_weights}",
    ]
    costs, sizes, memory = list[Cost](), list[int](), list[int]()
    for step in range(1, STEPS + 1):
        await steps.run(step)
        if step in (WINDOW, 2 * WINDOW, STEPS - WINDOW, STEPS):
            costs.append(_cost(own_server))
            states = [(await stream_info(own_broker, name))["state"] for name in kept]
            sizes.append(sum(int(state["bytes"]) for state in states))
            memory.append(psutil.Process().memory_info().rss)
    early, late = (
        Cost(after.messages - before.messages, after.num_bytes - before.num_bytes)
        for before, after in ((costs[0], costs[1]), (costs[2], costs[3]))
    )
    assert late.messages <= 1.02 * early.messages, (early, late)
    assert late.num_bytes <= 1.05 * early.num_bytes, (early, late)
    assert sizes[-1] <= 1.2 * sizes[1], sizes
    assert memory[-1] <= memory[1] + 32 * 2**20, memory
    assert len(steps.ledger.trained) == STEPS * BATCH


def test_some_hundred_steps_of_a_whole_job_cost_what_the_first_did(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.long_run", "--steps", "400", "--json", str(file)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {one["what"]: one for one in json.loads(file.read_text())["figures"]}
    counted = [one for what, one in figures.items() if "time" not in what]
    assert len(counted) == 5
    assert [one for one in counted if not one["met"]] == [], done.stdout
