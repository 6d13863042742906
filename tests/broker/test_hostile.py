"""No payload or header ends a reader: whatever is stored is a message or an error."""

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import follow, publish_log, publish_metric, read_dead, read_events
from tinkermq.broker.jetstream.direct_get import (
    StreamReader,
    get_all,
    get_last,
    get_newest,
    get_seq,
)
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.streams import EVALUATION_BYTES
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import EvalRecord, Event, LogLines, Metric, Presence
from tinkermq.schemas.node import NodeStatus
from tinkermq.schemas.task import BatchRecord, Blame, DeadLetter, Dropped
from tinkermq.schemas.user import UserRecord
from tinkermq.schemas.weights import Manifest, TensorEntry, WeightsAnnouncement
from tinkermq.schemas.wire.codec import read_json
from tinkermq.schemas.wire.errors import MessageError
from tinkermq.schemas.wire.message import Message
from tinkermq.schemas.wire.subjects import BUCKET_EVALS, JobScope

from tests.support.strategies import hostile_payloads, make_group, make_task, nested
from tests.support.waiting import PATIENCE_S, eventually

BLAME = Blame(boundary="engine", code="engine", message="m")
METRIC = Metric(step=1, values={"reward/mean": 0.5}, time=1.0)
STORED: list[Message] = [
    make_task(1),
    make_group(1),
    BatchRecord(
        step=1,
        seqs=[1],
        tasks=[1],
        dropped=[Dropped(seq=2, task=2, reason="stale")],
        seed=0,
        digest="d",
        learner="l",
        time=1.0,
    ),
    DeadLetter(task=make_task(1), blame=BLAME, num_attempts=1, source="g", time=1.0),
    METRIC,
    Event(kind="job_started", source="scheduler", data={"a": [1, {"b": 2}]}, time=1.0),
    LogLines(actor="learner", attempt=1, lines=["a", "b"], time=1.0),
    EvalRecord(version=1, step=1, values={"val/mean_score": 1.0}),
    Presence(actor="a", role="learner", host="h", pid=1, state="working", time=1.0),
    JobRecord(job="j", name="n", user="u", state="QUEUED", config={"a": {"b": 1}}, created=1.0),
    Manifest(
        version=1,
        tensors=[TensorEntry(name="w", dtype="float32", shape=[1], offset=0, num_bytes=4)],
        num_bytes=4,
        digest="d",
        transport="object",
        location="v1-0123abcd",
        published=1.0,
    ),
    WeightsAnnouncement(version=1),
]
JUNK = [
    b"",
    b"junk",
    nested(5000),
    b"\xdd\xff\xff\xff\xff",
    make_task(3).to_bytes()[:-1],
    Event(kind="k", source="s", time=1.0).to_bytes().replace(b"\xa1v\x01", b"\xa1v\x02"),
    bytes(1 << 20),
]


@pytest.mark.parametrize("valid", STORED, ids=lambda message: type(message).__name__)
def test_every_payload_is_a_message_or_a_message_error(valid: Message) -> None:
    @settings(
        max_examples=60,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(payload=hostile_payloads(valid))
    def check(payload: bytes) -> None:
        try:
            message = type(valid).from_bytes(payload)
        except MessageError as error:
            assert error.message  # noqa: PT017  both outcomes are right
        else:
            assert isinstance(message, type(valid))

    check()


async def _store(broker: Broker, subject: str, payload: bytes) -> None:
    await broker.append(subject, payload, deadline_s=PATIENCE_S, waiting_for="test")


async def test_the_task_queue_goes_on_behind_junk(broker: Broker, scope: JobScope) -> None:
    queue = TaskQueue(broker, scope)
    for number, payload in enumerate(JUNK):
        await _store(broker, scope.task(number), payload)
    await queue.publish(make_task(100))
    numbers: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while not numbers:
            numbers = [lease.task.task for lease in await queue.pull(3, 1)]
    assert numbers == [100]
    await queue.close()


async def test_the_rollout_reader_goes_on_behind_junk(broker: Broker, scope: JobScope) -> None:
    log = RolloutLog(broker, scope)
    for number, payload in enumerate(JUNK):
        await _store(broker, scope.rollout(number), payload)
    await log.append(make_group(100))
    async with asyncio.timeout(PATIENCE_S), aclosing(log.read()) as entries:
        errors = 0
        async for entry in entries:
            if entry.group is not None:
                break
            errors += 1
    assert errors == len(JUNK)
    assert entry.number == 100


async def test_the_feed_goes_on_behind_junk(broker: Broker, scope: JobScope) -> None:
    for subject in (scope.metric, scope.event, scope.log("learner"), scope.dead):
        for payload in JUNK:
            await _store(broker, subject, payload)
    await publish_metric(broker, scope, METRIC)
    async with asyncio.timeout(PATIENCE_S), aclosing(follow(broker, scope)) as feed:
        assert await anext(feed) == METRIC
    assert await read_events(broker, scope) == []
    assert await read_dead(broker, scope) == []


async def test_a_bucket_goes_on_behind_junk(broker: Broker) -> None:
    bucket = Bucket(broker, BUCKET_EVALS, EvalRecord)
    for number, payload in enumerate(JUNK):
        fits = payload[: EVALUATION_BYTES // 2]
        await _store(broker, f"$KV.{BUCKET_EVALS}.u.junk.{number}", fits)
    await bucket.put("u.junk.100", EvalRecord(version=100, step=1))
    await bucket.put("u.junk.101", EvalRecord(version=100, step=1))
    found, damaged = await bucket.read_all("u.junk")
    assert [entry.key for entry in found] == ["u.junk.100"]
    assert len(damaged) == len(JUNK) + 1


async def test_what_names_another_subject_than_its_own_is_junk(
    broker: Broker, scope: JobScope
) -> None:
    await _store(broker, scope.task(1), make_task(2).to_bytes())
    await _store(broker, scope.rollout(1), make_group(2).to_bytes())
    lines = LogLines(actor="learner", attempt=1, lines=["I am the learner"], time=1.0)
    await _store(broker, scope.log("generator-0"), lines.to_bytes())
    await publish_log(broker, scope, lines.model_copy(update={"lines": ["so am I"]}))
    queue, log = TaskQueue(broker, scope), RolloutLog(broker, scope)
    assert await queue.pull(1, 0) == []
    entry = await log.find(1)
    assert entry is not None
    assert entry.group is None
    assert "says that it is" in str(entry.error)
    async with asyncio.timeout(PATIENCE_S), aclosing(follow(broker, scope, ["log"])) as feed:
        told = await anext(feed)
    assert isinstance(told, LogLines)
    assert told.lines == ["so am I"]
    await queue.close()


async def test_a_manifest_of_another_version_is_no_version_and_is_replaced(
    broker: Broker, scope: JobScope
) -> None:
    store = WeightStore(broker, scope, "object")
    manifests = Bucket(broker, scope.bucket_weights, Manifest)
    tensors = {"w": TensorBytes("float32", (1,), memoryview(b"\0" * 4))}
    manifest = await store.publish(1, tensors)
    await manifests.put("v2", manifest)
    await _store(broker, f"$KV.{scope.bucket_weights}.latest", b"junk")
    assert await store.manifest(2) is None
    assert await store.latest() is None
    await store.publish(2, tensors)
    latest = await store.latest()
    assert latest is not None
    assert latest.version == 2
    assert await store.manifest(2) == latest


@pytest.mark.parametrize(
    ("message", "at"),
    [
        (make_task(1), "tmq.v1.job.u.j.task.2"),
        (make_group(1), "tmq.v1.job.u.j.rollout.2"),
        (
            LogLines(actor="learner", attempt=1, lines=[], time=1.0),
            "tmq.v1.job.u.j.log.generator-0",
        ),
        (EvalRecord(version=1, step=1), "u.j.2"),
        (Presence(actor="a", role="learner", host="h", pid=1, state="w", time=1.0), "u.j.b"),
        (JobRecord(job="j", name="n", user="u", state="QUEUED", config={}, created=1.0), "v.j"),
        (JobRecord(job="j", name="n", user="u", state="QUEUED", config={}, created=1.0), "x.u.j"),
        (JobRecord(job="J", name="n", user="u", state="QUEUED", config={}, created=1.0), "u.J"),
        (NodeStatus(node="n", host="h", slots=1, time=1.0), "m"),
        (NodeStatus(node="n.*", host="h", slots=1, time=1.0), "n.*"),
        (UserRecord(user="a", created=0.0, key_hash="0"), "user.b"),
        (STORED[-2], "v2"),
    ],
)
def test_a_message_that_names_another_key_is_refused(message: Message, at: str) -> None:
    with pytest.raises(MessageError):
        type(message).from_bytes(message.to_bytes(), at=at)


@settings(max_examples=100)
@given(st.text(max_size=80))
def test_a_scope_takes_only_what_may_stand_in_a_subject(text: str) -> None:
    try:
        scope = JobScope("local", text)
    except MessageError:
        return
    assert scope.batch.count(".") == 5
    assert not set(text) & set(" .*>\t\r\n")


# -- A header that a writer made up is no word of the server: what is stored is read as it is ------


STATUSES = ("503", "404", "408", "409 Consumer Deleted", "204", "100", "403")


@pytest.mark.parametrize("status", STATUSES)
async def test_an_entry_with_a_status_of_its_own_is_an_entry_like_any_other(
    broker: Broker, scope: JobScope, status: str
) -> None:
    stream, subject = scope.stream_rollout, scope.rollout(7)
    await broker.request(subject, b"", headers={"Status": status, "Description": "Batch Completed"})
    await broker.request(scope.rollout(8), b"behind it")

    one = await get_seq(broker, stream, 1)
    assert one is not None
    assert (one.subject, one.seq, one.payload) == (subject, 1, b"")
    last = await get_last(broker, stream, subject)
    newest = await get_newest(broker, stream, subject)
    assert last is not None
    assert newest is not None
    assert last.seq == newest.seq == 1
    assert [found.seq for found in await get_all(broker, stream, ">")] == [1, 2]

    reader = StreamReader(broker, stream, [subject, scope.rollout(8)])
    async with aclosing(reader.messages()) as messages:
        assert [(await anext(messages)).seq for _ in range(2)] == [1, 2]


async def test_a_forged_status_in_the_task_queue_costs_no_task(
    broker: Broker, scope: JobScope
) -> None:
    await broker.request(scope.task(3), b"", headers={"Status": "409", "Description": "gone"})
    queue = TaskQueue(broker, scope)
    assert await queue.publish(make_task(4))

    async def task() -> int | None:
        return next((lease.task.task for lease in await queue.pull(1, 1)), None)

    assert await eventually(task, "the task behind it") == 4
    await queue.close()


@pytest.mark.parametrize("text", [r'"\ud800"', r'{"a": ["\uDC00x"]}', r'{"\ud83d": 1}'])
def test_half_a_character_is_no_json(text: str) -> None:
    with pytest.raises(MessageError, match="half a character"):
        read_json(text)
    with pytest.raises(MessageError, match="half a character"):
        read_json(text.encode())
    with pytest.raises(MessageError, match="not valid JSON"):
        read_json(b'"\xed\xa0\x80"')
    assert read_json(r'"\ud83d\ude00 \\ud800"') == "\U0001f600 \\ud800"


@pytest.mark.parametrize(
    ("subject", "headers"),
    [
        (b"a", b"NATS/1.0"),
        (b"a", b"XYZ"),
        (b"a", b"NATS/1.0 \xff\xff\xff\xff\r\n\r\n"),
        (b"a", b"NATS/1.0 503 \xff\r\n\r\n"),
        (b"a", b"NATS/1.0\r\n\xff: \xfe\r\n\r\n"),
        (b"\xff", b""),
        (b"a \xff", b""),
        (b"a\x0bb", b""),
        (b"a _INBOX.a\x0cb", b""),
        (b"a\xc2\xa0\x1d\x85", b""),
    ],
)
async def test_no_subject_or_header_ends_the_connection_of_who_hears_it(
    broker: Broker, scope: JobScope, subject: bytes, headers: bytes
) -> None:
    heard = asyncio.Queue[str]()
    lost: list[None] = []
    broker.on_disconnect(lambda: lost.append(None))
    async with asyncio.timeout(PATIENCE_S):
        listening = await broker.listen(f"{scope.job}.>", lambda m: heard.put_nowait(m.subject))
        await broker.nc.flush()
        url = broker.nc.connected_url
        assert url is not None
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        await reader.readline()  # before it has spoken, the server may lose what it is told
        job, size = scope.job.encode(), len(headers)
        sizes = b"%d %d" % (size, size) if headers else b"0"
        verb = b"HPUB" if headers else b"PUB"
        writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
        writer.write(b"%s %s.%s %s\r\n%s\r\n" % (verb, job, subject, sizes, headers))
        writer.write(b"PUB %s.end 0\r\n\r\n" % job)
        while await heard.get() != f"{scope.job}.end":
            pass
        writer.close()
        await listening.stop()
    assert not lost


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0, 1e300, 2.0**62])
def test_a_time_that_no_calendar_shows_is_malformed(time: float) -> None:
    beat = Presence(actor="a", role="learner", host="h", pid=1, state="working", time=1.0)
    forged = [
        Event(kind="k", source="s", time=1.0).to_bytes(time=time),
        LogLines(actor="a", attempt=1, lines=[], time=1.0).to_bytes(time=time),
        METRIC.to_bytes(time=time),
        beat.to_bytes(time=time),
        beat.to_bytes(missing_since=time),
    ]
    for kind, payload in zip((Event, LogLines, Metric, Presence, Presence), forged, strict=True):
        with pytest.raises(MessageError, match=r"time|missing_since"):
            kind.from_bytes(payload)
