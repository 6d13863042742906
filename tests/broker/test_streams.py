"""The streams of a job, and what a missing stream or bucket is called."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.faults import missing
from tinkermq.broker.feed import publish_dead, publish_event, publish_metric
from tinkermq.broker.jetstream.kv import Mirror
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    create_shared,
    delete_job_streams,
    delete_stream,
    settle_job_streams,
    stream_info,
    stream_subjects,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import RequestRecord
from tinkermq.schemas.metric import Event, Metric
from tinkermq.schemas.task import BatchRecord, Blame, DeadLetter, Task
from tinkermq.schemas.wire.errors import BrokerError, NotFoundError, StateError
from tinkermq.schemas.wire.subjects import (
    BUCKET_JOBS,
    BUCKET_REQUESTS,
    BUCKET_USERS,
    PREFIX,
    JobScope,
    stream_of,
)

from tests.support.groups import make_group as group_of
from tests.support.groups import make_trajectory
from tests.support.strategies import make_group
from tests.support.waiting import PATIENCE_S


async def _listed(broker: Broker) -> dict[str, dict[str, Any]]:
    """List the streams with the request that `nats stream ls` sends."""
    reply = await broker.request("$JS.API.STREAM.LIST", b"{}")
    return {
        stream["config"]["name"]: stream["config"] for stream in json.loads(reply.data)["streams"]
    }


async def test_every_stream_has_a_description_and_a_byte_bound(
    broker: Broker, scope: JobScope
) -> None:
    streams = await _listed(broker)
    for name in (
        scope.stream_task,
        scope.stream_rollout,
        scope.stream_batch,
        scope.stream_dead,
        scope.stream_feed,
        scope.stream_log,
        f"KV_{scope.bucket_weights}",
        f"OBJ_{scope.object_weights}",
        f"KV_{BUCKET_JOBS}",
    ):
        assert streams[name]["description"], name
        assert streams[name]["max_bytes"] > 0, name
        assert streams[name]["storage"] == "file", name


async def test_making_the_streams_again_changes_their_bounds_and_keeps_what_they_hold(
    broker: Broker, scope: JobScope
) -> None:
    await RolloutLog(broker, scope).append(make_group(0))
    await create_job_streams(broker, scope, LimitsConfig(rollout_bytes=2 << 20))
    await create_shared(broker)
    info = await stream_info(broker, scope.stream_rollout)
    assert info["config"]["max_bytes"] == 2 << 20
    assert info["state"]["messages"] == 1


async def test_deleting_the_streams_twice_is_harmless(broker: Broker, scope: JobScope) -> None:
    await delete_job_streams(broker, scope)
    await delete_job_streams(broker, scope)
    assert not [name for name in await _listed(broker) if f"-{scope.job}-" in name]


async def test_subjects_are_listed_without_reading_what_they_hold(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    for number in range(20):
        await log.append(make_group(number))
    subjects = await stream_subjects(broker, scope.stream_rollout, scope.rollout("*"))
    assert set(subjects) == {scope.rollout(number) for number in range(20)}


async def test_a_bound_that_the_server_cannot_hold_is_named_with_what_to_do(
    own_server: NatsServer, own_broker: Broker
) -> None:
    limits = LimitsConfig().model_copy(update={"rollout_bytes": 2**51})
    with pytest.raises(BrokerError, match="refuses the stream tmq-local-big-rollout") as raised:
        await create_job_streams(own_broker, JobScope("local", "big"), limits)
    assert "max_file_store" in raised.value.hint


async def test_an_ended_job_is_settled_though_a_stream_of_it_was_removed(
    broker: Broker, scope: JobScope
) -> None:
    await broker.api(f"STREAM.DELETE.{scope.stream_task}")
    await settle_job_streams(broker, scope)
    assert (await stream_info(broker, scope.stream_batch))["config"]["max_bytes"] == 1


# What a stream or bucket that is not there is called, and what brings it back, is always said.


TASK = Task(task=0, seed=0, group_size=1)
GROUP = group_of([make_trajectory([1], [([2], [])], [0.0])])
RECORD = BatchRecord(step=1, seqs=[1], tasks=[0], seed=0, digest="", learner="", time=0.0)
LETTER = DeadLetter(
    task=TASK,
    blame=Blame(boundary="task", code="x", message="x"),
    num_attempts=1,
    source="x",
    time=0.0,
)
TENSORS = {"a": TensorBytes("float32", (1,), memoryview(b"abcd"))}


async def _read(log: RolloutLog) -> None:
    async for _ in log.read():
        return


def _uses(broker: Broker, scope: JobScope) -> list[tuple[str, Awaitable[object]]]:
    """Return everything that a run does with its streams, each with the stream's name."""
    queue, log, batches = TaskQueue(broker, scope), RolloutLog(broker, scope), scope.stream_batch
    weights = WeightStore(broker, scope)
    manifests, payloads = f"KV_{scope.bucket_weights}", f"OBJ_{scope.object_weights}"
    return [
        (scope.stream_task, queue.publish(TASK)),
        (scope.stream_task, queue.pull(1, 60)),
        (scope.stream_task, queue.pending_numbers()),
        (scope.stream_rollout, log.append(GROUP)),
        (scope.stream_rollout, log.find(0)),
        (scope.stream_rollout, log.newest_there()),
        (scope.stream_rollout, log.last_seq()),
        (scope.stream_rollout, log.trim(2)),
        (scope.stream_rollout, _read(log)),
        (batches, BatchLog(broker, scope).append(RECORD, 0)),
        (batches, BatchLog(broker, scope).read_all()),
        (scope.stream_feed, publish_metric(broker, scope, Metric(step=1, values={}, time=0.0))),
        (scope.stream_feed, publish_event(broker, scope, Event(kind="a", source="b", time=0.0))),
        (scope.stream_dead, publish_dead(broker, scope, LETTER)),
        (manifests, weights.latest()),
        (manifests, weights.versions()),
        (payloads, weights.publish(0, TENSORS)),
    ]


async def test_whatever_needs_a_stream_that_was_deleted_names_it(
    broker: Broker, scope: JobScope
) -> None:
    uses = _uses(broker, scope)
    for name in {name for name, _ in uses}:
        await delete_stream(broker, name)
    found = await asyncio.gather(*(use for _, use in uses), return_exceptions=True)
    for (name, _), error in zip(uses, found, strict=True):
        assert isinstance(error, NotFoundError), (name, error)
        assert error.message == f"there is no stream {name}"
        assert "tinkermq" in error.hint


@pytest.mark.full
async def test_who_is_patient_is_told_of_a_missing_stream_though_others_listen_on_its_subjects(
    nats_server: NatsServer, broker: Broker, scope: JobScope
) -> None:
    async with await connect(nats_server.url, name="patient") as patient:
        patient.availability.set_patient(True)
        uses = _uses(patient, scope)
        for name in {name for name, _ in uses}:
            await delete_stream(broker, name)
        for heard in (f"{PREFIX}.job.{scope.key}.>", f"$KV.{scope.bucket_weights}.>"):
            await broker.listen(heard, lambda _: None)
        found = await asyncio.gather(*(use for _, use in uses), return_exceptions=True)
    for (name, _), error in zip(uses, found, strict=True):
        assert isinstance(error, NotFoundError), (name, error)
        assert error.message == f"there is no stream {name}"


@pytest.mark.full
async def test_what_was_known_of_a_bucket_that_was_deleted_stays_known(own_broker: Broker) -> None:
    mirror, heard = Mirror(own_broker, BUCKET_REQUESTS, RequestRecord), asyncio.Event()
    await mirror.open(heard.set)
    await mirror.bucket.put("a", RequestRecord(job="x"))
    await mirror.refresh()
    await delete_stream(own_broker, f"KV_{BUCKET_REQUESTS}")
    heard.clear()
    await own_broker.publish(f"$KV.{BUCKET_REQUESTS}.a", b"stored nowhere")
    async with asyncio.timeout(PATIENCE_S):
        await heard.wait()
    assert await mirror.refresh() == {"a"}
    assert mirror.entries["a"].value.job == "x"
    await mirror.close()


async def test_who_asks_while_a_mirror_reads_knows_afterwards_what_it_has_read(
    own_broker: Broker,
) -> None:
    mirror, heard = Mirror(own_broker, BUCKET_REQUESTS, RequestRecord), asyncio.Event()
    await mirror.open(heard.set)
    await mirror.refresh()
    await mirror.bucket.put("b", RequestRecord(job="y"))
    async with asyncio.timeout(PATIENCE_S):
        await heard.wait()
    first = asyncio.create_task(mirror.refresh())
    await asyncio.sleep(0)  # it has asked the broker, and no answer can have come
    await mirror.refresh()
    assert mirror.entries["b"].value.job == "y"
    await first
    await mirror.close()


@pytest.mark.parametrize(
    ("subject", "stream"),
    [
        (lambda scope: scope.task(3), "tmq-ada-j1-task"),
        (lambda scope: scope.metric, "tmq-ada-j1-feed"),
        (lambda scope: scope.event, "tmq-ada-j1-feed"),
        (lambda scope: scope.log("learner"), "tmq-ada-j1-log"),
        (lambda _: "$KV.tmq-evals.ada.j1.3", "KV_tmq-evals"),
        (lambda _: "$O.tmq-ada-j1-weights.C.x", "OBJ_tmq-ada-j1-weights"),
        (lambda _: "elsewhere", "elsewhere"),
    ],
)
def test_a_subject_tells_its_stream(subject: Callable[[JobScope], str], stream: str) -> None:
    assert stream_of(subject(JobScope("ada", "j1"))) == stream


def test_what_brings_a_stream_back_depends_on_what_it_held() -> None:
    hints = {
        name: missing(name).hint
        for name in (
            "tmq-a-b-task",
            "tmq-a-b-batch",
            "KV_tmq-evals",
            f"KV_{BUCKET_JOBS}",
            f"KV_{BUCKET_USERS}",
        )
    }
    assert "resume RUN` makes it again, and its tasks" in hints["tmq-a-b-task"]
    assert "tinkermq fork RUN@STEP" in hints["tmq-a-b-batch"]
    assert "start the scheduler again" in hints["KV_tmq-evals"]
    for bucket in (BUCKET_JOBS, BUCKET_USERS):
        assert "tinkermq restore" in hints[f"KV_{bucket}"]


async def test_the_records_of_jobs_are_not_begun_anew_while_jobs_have_streams(
    own_broker: Broker, own_scope: JobScope
) -> None:
    await delete_stream(own_broker, f"KV_{BUCKET_JOBS}")
    with pytest.raises(StateError, match="held the records of all jobs, and 1 jobs") as raised:
        await create_shared(own_broker)
    assert "tinkermq restore" in raised.value.hint
    await delete_stream(own_broker, own_scope.stream_batch)
    await create_shared(own_broker)
    assert await stream_info(own_broker, f"KV_{BUCKET_JOBS}")
