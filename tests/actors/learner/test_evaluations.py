"""The learner's side of validation: what is due is asked for, played by others, reported once."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.learner.evaluations import Evaluations
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    create_shared,
    delete_stream,
    purge,
    stream_info,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.tasks import Lease, TaskQueue, ValidationLog
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.env import DescribeReply
from tinkermq.schemas.metric import EpisodeScore, EvalRecord, ValidationResult
from tinkermq.schemas.task import Blame
from tinkermq.schemas.wire.subjects import BUCKET_EVALS, JobScope

from tests.support.configs import small_job
from tests.support.waiting import PATIENCE_S, eventually

NUM_VAL = 3


@dataclass
class Learning:
    """A learner as far as it validates, and somebody who plays."""

    broker: Broker
    scope: JobScope
    evaluations: Evaluations
    queue: TaskQueue
    log: ValidationLog
    reported: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    heard: int = 0

    async def play(
        self, num: int, blame: Blame | None = None, figures: Mapping[str, float] | None = None
    ) -> list[Lease]:
        """Take and play so many tasks, task n with reward n."""
        leases: list[Lease] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(leases) < num:
                leases += await self.queue.pull(num - len(leases), 1)
        for lease in leases:
            task = lease.task
            score = EpisodeScore(
                reward=float(task.task),
                success=task.task > 0,
                num_tokens=2,
                num_turns=1,
                figures=dict(figures or {}),
            )
            result = ValidationResult(
                version=task.version or 0,
                task=task.task,
                episodes=[] if blame else [score],
                blame=blame,
                source="generator-0",
                started=10.0 + task.task,
                finished=20.0 + task.task,
            )
            assert await self.log.append(result)
            await lease.done()
        return leases


@asynccontextmanager
async def learning(broker: Broker, scope: JobScope, **evaluation: Any) -> AsyncIterator[Learning]:
    """Follow the evaluations of a job, as its learner does."""
    env = {"num_val": evaluation.pop("num_val", NUM_VAL)}
    config = parse_config(small_job(Path("m"), env=env, evaluation={"samples": 1, **evaluation}))

    async def describe() -> DescribeReply:
        return DescribeReply(game="g", num_train=None, num_val=NUM_VAL, host="h")

    async def tell(step: int, values: dict[str, float]) -> None:
        made.reported.append((step, values))

    async def event(kind: str, message: str = "", **_: Any) -> None:
        made.events.append(f"{kind}: {message}")

    def heard() -> None:
        made.heard += 1

    evaluations = Evaluations(broker, scope, config, describe, tell, event, heard)
    queue = TaskQueue(broker, scope, validation=True)
    made = Learning(broker, scope, evaluations, queue, ValidationLog(broker, scope))
    await evaluations.load()
    evaluations.note_version(9)
    following = asyncio.create_task(evaluations.follow())
    try:
        yield made
    finally:
        following.cancel()
        await asyncio.wait({following})
        await queue.close()


@pytest.fixture
async def validated(broker: Broker, scope: JobScope) -> JobScope:
    """A job that validates."""
    await create_job_streams(broker, scope, LimitsConfig(), validation=True)
    return scope


async def test_a_version_is_reported_when_its_last_task_is_played(
    broker: Broker, validated: JobScope
) -> None:
    async with learning(broker, validated) as learner:
        assert await learner.evaluations.request(4)
        assert not await learner.evaluations.request(4)
        assert learner.evaluations.open_versions == {4}
        [*most] = await learner.play(NUM_VAL - 1)
        assert {lease.task.version for lease in most} == {4}
        assert learner.reported == []
        await learner.play(1)
        await asyncio.wait_for(learner.evaluations.wait_all(), PATIENCE_S)
        [(step, values)] = learner.reported
        assert step == 4
        assert (values["val/num_episodes"], values["val/mean_score"]) == (3, 1.0)
        assert values["val/success_rate"] == pytest.approx(2 / 3)
        assert values["timing_s/testing"] == 12.0
        assert learner.heard >= NUM_VAL
        state = (await stream_info(broker, validated.stream_validation))["state"]
        assert state["messages"] == 0


@pytest.mark.parametrize("lost", ["record", "bucket", "tasks"])
async def test_an_evaluation_ends_though_the_broker_has_lost_what_it_held_of_it(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope, lost: str
) -> None:
    await create_job_streams(own_broker, own_scope, LimitsConfig(), validation=True)
    async with learning(own_broker, own_scope) as learner:
        for version in (1, 2):
            await learner.evaluations.request(version)
            await learner.play(NUM_VAL)
            await asyncio.wait_for(learner.evaluations.wait_all(), PATIENCE_S)
        await learner.evaluations.request(3)
        stream, tasks = own_scope.stream_validation, own_scope.validation_task("*", "*")

        async def all_queued() -> bool:
            return (await stream_info(own_broker, stream))["state"]["messages"] == NUM_VAL

        await eventually(all_queued, "the tasks to be queued")
        if lost == "record":
            await Bucket(own_broker, BUCKET_EVALS, EvalRecord).purge(f"{own_scope.key}.3")
        elif lost == "bucket":
            await delete_stream(own_broker, f"KV_{BUCKET_EVALS}")
            await create_shared(own_broker)
        else:
            await purge(own_broker, stream, tasks)
            own_server.restart()
        await learner.play(NUM_VAL)
        await asyncio.wait_for(learner.evaluations.wait_all(), PATIENCE_S)
        assert [version for version, _ in learner.reported] == [1, 2, 3]


async def test_more_metrics_than_a_record_holds_are_left_out_and_counted(
    broker: Broker, validated: JobScope
) -> None:
    figures = {f"{number:03}{'x' * 90}": 1.0 for number in range(999)}
    async with learning(broker, validated) as learner:
        await learner.evaluations.request(4)
        await learner.play(NUM_VAL, figures=figures)
        await asyncio.wait_for(learner.evaluations.wait_all(), PATIENCE_S)
        [(_, values)] = learner.reported
        assert values["val/mean_score"] == 1.0
        kept = sum(name.startswith("val_game/") for name in values)
        assert kept > 400
        assert values["timing_s/testing"] == 12.0
        assert values["val/metrics_left_out"] == len(figures) - kept


async def test_a_learner_that_starts_again_goes_on_with_what_was_played(
    broker: Broker, validated: JobScope
) -> None:
    async with learning(broker, validated) as killed:
        await killed.evaluations.request(2)
        [held] = await killed.play(1)
    async with learning(broker, validated) as restarted:
        assert restarted.evaluations.open_versions == {2}
        rest = await restarted.play(NUM_VAL - 1)
        assert held.task.task not in {lease.task.task for lease in rest}
        await asyncio.wait_for(restarted.evaluations.wait_all(), PATIENCE_S)
        [(step, values)] = restarted.reported
        assert (step, values["val/num_episodes"]) == (2, NUM_VAL)
        assert await restarted.queue.pull(1, 0.1) == []


async def test_a_version_that_clients_ask_for_is_played_once_it_is_published(
    broker: Broker, validated: JobScope
) -> None:
    bucket = Bucket(broker, BUCKET_EVALS, EvalRecord)
    async with learning(broker, validated) as learner:
        for version in (5, 10):
            record = EvalRecord(version=version, step=version)
            await bucket.create(f"{validated.key}.{version}", record)
        assert {lease.task.version for lease in await learner.play(NUM_VAL)} == {5}
        learner.evaluations.note_version(10)
        assert {lease.task.version for lease in await learner.play(NUM_VAL)} == {10}
        await asyncio.wait_for(learner.evaluations.wait_all(), PATIENCE_S)
        assert [step for step, _ in learner.reported] == [5, 10]


async def test_a_version_that_cannot_be_validated_is_given_up_with_its_reason(
    broker: Broker, validated: JobScope
) -> None:
    blame = Blame(boundary="broker", code="not_found", message="the weights were removed")
    async with learning(broker, validated) as learner:
        await learner.evaluations.request(1)
        await learner.play(NUM_VAL, blame)
        await asyncio.wait_for(learner.evaluations.wait_all(), PATIENCE_S)
        assert learner.reported == []
        assert learner.events == ["evaluation_failed: the weights were removed"]
        bucket = Bucket(broker, BUCKET_EVALS, EvalRecord)

        async def given_up() -> bool:
            record = await bucket.get(f"{validated.key}.1")
            return record is not None and record.value.state == "given_up"

        await eventually(given_up, "the record")
    async with learning(broker, validated, data="train") as other:
        await other.evaluations.request(3)
        await asyncio.wait_for(other.evaluations.wait_all(), PATIENCE_S)
        [event] = other.events
        assert "evaluation.data=train needs rows" in event


async def test_a_version_of_a_run_without_validation_tasks_is_refused_at_once(
    broker: Broker, scope: JobScope
) -> None:
    bucket = Bucket(broker, BUCKET_EVALS, EvalRecord)
    async with learning(broker, scope, num_val=0) as learner:
        assert not await learner.evaluations.request(1)
        await bucket.create(f"{scope.key}.2", EvalRecord(version=2, step=2))

        async def given_up() -> str | None:
            record = await bucket.get(f"{scope.key}.2")
            return record.value.blame if record and record.value.state == "given_up" else None

        assert "env.num_val is 0" in await eventually(given_up, "the record")


async def test_the_newest_records_stay_and_that_of_the_best_version(
    own_broker: Broker,
) -> None:
    scope = JobScope("local", "long")
    await create_job_streams(own_broker, scope, LimitsConfig(), ack_wait_s=30)
    bucket = Bucket(own_broker, BUCKET_EVALS, EvalRecord)
    for version, score in enumerate((0.1, 0.9, 0.2, 0.3, 0.4, 0.5)):
        values = {"val/mean_score": score}
        record = EvalRecord(version=version, step=version, state="reported", values=values)
        await bucket.create(f"{scope.key}.{version}", record)

    async def nothing(*_: Any, **__: Any) -> None:
        return None

    async def describe() -> DescribeReply:
        return DescribeReply(game="g", num_train=None, num_val=NUM_VAL, host="h")

    config = parse_config(small_job(Path("m"), env={"num_val": NUM_VAL}))
    evaluations = Evaluations(own_broker, scope, config, describe, nothing, nothing, most_kept=2)
    await evaluations.load()
    kept = await bucket.items(scope.key)
    assert [entry.value.version for entry in kept] == [1, 4, 5]
    assert await evaluations.request(6)
    await evaluations.load()
    assert [entry.value.version for entry in await bucket.items(scope.key)] == [1, 4, 5, 6]
