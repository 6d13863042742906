"""`tinkermq verify` tells each way in which a run's records can be wrong."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.clients.verify import Verification, verify
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.task import BatchRecord, Dropped, Task
from tinkermq.schemas.wire.errors import StateError
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.conftest import new_record
from tests.support.groups import make_group, make_trajectory

pytestmark = pytest.mark.full

CONFIG: dict[str, Any] = {
    "model": {"path": "none"},
    "env": {"game": "guess"},
    "training": {"batch_size": 2, "num_steps": 3, "max_staleness": 1, "keep_rollouts": True},
}


class Run:
    """Records of three steps of two groups, which a test may damage before they are written."""

    def __init__(self) -> None:
        self.versions = [0, 0, 0, 1, 1, 2, 2]
        """Version of each group, by task."""
        self.positions = list(range(7))
        self.steps: list[dict[str, Any]] = [
            {"step": 1, "tasks": [0, 1]},
            {"step": 2, "tasks": [2, 3], "dropped": [4]},
            {"step": 3, "tasks": [5, 6]},
        ]
        """`seqs` of a step, where they are not those of its tasks; `digest`, where it is wrong."""
        self.deleted: list[int] = []
        """Entries that the log lost."""

    async def write(self, broker: Broker, scope: JobScope) -> None:
        """Write log and records."""
        log, batches = RolloutLog(broker, scope), BatchLog(broker, scope)
        for task, version in enumerate(self.versions):
            episode = make_trajectory([1, 2], [([3, 4], [])], [0.5], versions=version)
            await log.append(make_group([episode], task, index=self.positions[task]))
        for place, fields in enumerate(self.steps):
            seqs = fields.get("seqs") or [task + 1 for task in fields["tasks"]]
            payloads = [entry.payload for seq in seqs if (entry := await log.get(seq))]
            digests = b"".join(hashlib.sha256(payload).digest() for payload in payloads)
            gone = fields.get("dropped", [])
            await batches.append(
                BatchRecord(
                    step=fields["step"],
                    seqs=seqs,
                    tasks=fields["tasks"],
                    dropped=[Dropped(seq=task + 1, task=task, reason="stale") for task in gone],
                    seed=0,
                    digest=fields.get("digest") or hashlib.sha256(digests).hexdigest(),
                    learner="l",
                    time=time.time(),
                ),
                place,
            )
        for seq in self.deleted:
            await broker.api(f"STREAM.MSG.DELETE.{scope.stream_rollout}", {"seq": seq})


async def new_run(broker: Broker, scope: JobScope, **fields: Any) -> JobRecord:
    fields = {"config": CONFIG, "state": "COMPLETED", "has_streams": True} | fields
    return await JobStore(broker).create(new_record(scope, **fields), "test")


def results(found: Verification) -> dict[str, list[str]]:
    return {check.name: check.problems for check in found.checks.values() if check.problems}


def _group_twice(run: Run) -> None:
    run.steps[2] |= {"tasks": [5, 0], "seqs": [6, 1]}


def _missing_group(run: Run) -> None:
    run.deleted = [1]


def _another_token(run: Run) -> None:
    run.steps[1]["digest"] = "d" * 64


def _lost_task(run: Run) -> None:
    run.steps[1]["dropped"] = []
    run.deleted = [5]


def _another_task(run: Run) -> None:
    run.steps[1]["seqs"] = [4, 3]


def _too_old(run: Run) -> None:
    run.versions[5] = 0


def _too_new(run: Run) -> None:
    run.versions[0] = 1


def _position_twice(run: Run) -> None:
    run.positions[6] = 0


def _missing_step(run: Run) -> None:
    run.steps[1]["step"], run.steps[2]["step"] = 3, 4
    run.versions[2:] = [2, 2, 2, 3, 3]


def _small_batch(run: Run) -> None:
    run.steps[0]["tasks"] = [0]
    run.steps[1]["dropped"] = [1, 4]


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        (lambda _: None, {}),
        (
            _group_twice,
            {
                "once": [
                    "task 0 was decided twice, at step 1 and later",
                    "log entry 1 was decided twice, at step 1 and later",
                    "position 0 of the data was trained twice (task 0)",
                ],
                "versions": ["task 0 has lag 2 at step 3, the bound is 1"],
            },
        ),
        (_missing_group, {"tokens": ["step 1 trained log entry 1, which is gone"]}),
        (_another_token, {"tokens": ["the groups of step 2 are not those it recorded"]}),
        (_lost_task, {"tasks": ["task 4 is neither trained, dropped, queued nor logged"]}),
        (
            _another_task,
            {
                "tokens": [
                    "entry 4, trained as task 2, is of task 3",
                    "entry 3, trained as task 3, is of task 2",
                ]
            },
        ),
        (_too_old, {"versions": ["task 5 has lag 2 at step 3, the bound is 1"]}),
        (_too_new, {"versions": ["task 0 has tokens of version 1, step 1 has 0"]}),
        (_position_twice, {"once": ["position 0 of the data was trained twice (task 0)"]}),
        (_missing_step, {"steps": ["step 2 has no record"]}),
        (_small_batch, {"steps": ["step 1 trained 1 groups, not 2"]}),
    ],
)
async def test_each_damage_to_the_records_is_told_by_its_check(
    broker: Broker,
    scope: JobScope,
    damage: Callable[[Run], None],
    problems: dict[str, list[str]],
) -> None:
    run = Run()
    damage(run)
    await run.write(broker, scope)
    found = await verify(broker, await new_run(broker, scope))
    assert results(found) == problems
    assert found.passed == (not problems)


async def test_a_run_that_goes_on_is_verified_so_far(broker: Broker, scope: JobScope) -> None:
    run = Run()
    run.steps[2:] = []
    await run.write(broker, scope)
    await TaskQueue(broker, scope).publish(Task(task=7, seed=0, group_size=1))
    await TaskQueue(broker, scope).publish(Task(task=9, seed=0, group_size=1))
    found = await verify(broker, await new_run(broker, scope, state="RUNNING"))
    assert found.passed
    assert found.open == {5, 6, 7, 9}
    assert found.checks["tasks"].seen == "tasks: 10, 4 open, 1 reserved or not issued yet"


async def test_what_the_log_no_longer_holds_is_not_checked(broker: Broker, scope: JobScope) -> None:
    config = CONFIG | {"training": CONFIG["training"] | {"keep_rollouts": False}}
    await Run().write(broker, scope)
    record = await new_run(broker, scope, config=config)
    for last, result, seen in (
        (3, "passed", "2 of 3 steps are in the log, 8 generated tokens"),
        (8, "not checked", "0 of 3 steps are in the log"),
    ):
        await RolloutLog(broker, scope).trim(last)
        check = (await verify(broker, record)).checks["tokens"]
        assert (check.result, check.seen.startswith(seen)) == (result, True), check


async def test_a_run_without_records_is_refused(broker: Broker, scope: JobScope) -> None:
    with pytest.raises(StateError, match="trains nothing"):
        await verify(broker, await new_run(broker, scope, kind="infer"))
