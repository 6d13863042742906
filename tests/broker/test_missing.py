"""What a stream or bucket that is not there is called, and what brings it back, is always said."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tinkermq.broker.batches import BatchLog
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.faults import missing
from tinkermq.broker.feed import publish_dead, publish_event, publish_metric
from tinkermq.broker.jetstream.kv import Mirror
from tinkermq.broker.jetstream.streams import create_shared, delete_stream, stream_info
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.broker.weights.payloads import TensorBytes
from tinkermq.broker.weights.store import WeightStore
from tinkermq.schemas.job import RequestRecord
from tinkermq.schemas.metric import Event, Metric
from tinkermq.schemas.task import BatchRecord, Blame, DeadLetter, Task
from tinkermq.schemas.wire.errors import NotFoundError, StateError
from tinkermq.schemas.wire.subjects import (
    BUCKET_JOBS,
    BUCKET_REQUESTS,
    BUCKET_USERS,
    PREFIX,
    JobScope,
    stream_of,
)

from tests.support.groups import make_group, make_trajectory
from tests.support.waiting import PATIENCE_S

TASK = Task(task=0, seed=0, group_size=1)
GROUP = make_group([make_trajectory([1], [([2], [])], [0.0])])
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


@pytest.mark.long
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


@pytest.mark.long
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
