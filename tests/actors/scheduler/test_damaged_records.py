"""Records that do not say what their key says, or nothing at all, in every bucket of the pool."""

import time
from typing import Any

from tinkermq.broker.calls import SchedulerCalls
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.user_records import create_user_stores
from tinkermq.schemas.job import ActorPlacement, JobRecord, SealedSecrets
from tinkermq.schemas.metric import EvalRecord, Presence
from tinkermq.schemas.node import ActorStatus, NodeStatus
from tinkermq.schemas.user import UserRecord
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.message import Message
from tinkermq.schemas.wire.subjects import (
    BUCKET_ACTORS,
    BUCKET_EVALS,
    BUCKET_JOBS,
    BUCKET_NODES,
    BUCKET_REQUESTS,
    BUCKET_SECRETS,
    BUCKET_USERS,
)

from tests.actors.scheduler.conftest import Stack


def _node(name: str, **more: Any) -> NodeStatus:
    return NodeStatus(node=name, host="h", slots=2, time=time.time(), **more)


def _job(job: str, user: str = "local", **more: Any) -> JobRecord:
    fields: dict[str, Any] = {"state": "QUEUED", "config": {}, "created": 0.0, **more}
    return JobRecord(job=job, name=job, user=user, **fields)


def _beat(actor: str) -> Presence:
    return Presence(actor=actor, role="learner", host="h", pid=1, state="working", time=0.0)


def _user(name: str) -> UserRecord:
    return UserRecord(user=name, created=0.0, key_hash="0" * 64)


class Raw(Message):
    """Bytes that are no message of ours, where one is expected."""

    def to_bytes(self) -> bytes:
        return b"\xc1no message"


class Map(Message):
    """A map of another kind."""

    fields: dict[str, Any]

    def to_bytes(self) -> bytes:
        return pack({"v": 1, **self.fields})


_STRAY = ActorStatus(user="A b.c", job="../x", name="*", attempt=1, state="running")
_STAR = ActorPlacement(name="*", role="learner", node="n1")
FALSE: list[tuple[str, str, Message]] = [
    (BUCKET_NODES, "ghost", _node("other")),
    (BUCKET_NODES, "ghost.two", _node("ghost.two")),
    (BUCKET_NODES, "Spaced", _node("Spaced")),
    (BUCKET_NODES, "stray", _node("stray", actors=[_STRAY])),
    (BUCKET_NODES, "huge", Map(fields={**_node("huge").to_map(), "slots": 1 << 40})),
    (BUCKET_NODES, "raw", Raw()),
    (BUCKET_JOBS, "local.j1", _job("j2")),
    (BUCKET_JOBS, "local.j3", _job("j3", user="somebody")),
    (BUCKET_JOBS, "x.local.j4", _job("j4")),
    (BUCKET_JOBS, "local.j5", _job("j5", user="A.b", untold=[])),
    (BUCKET_JOBS, "local.j6", _job("j6", state="RUNNING")),
    (
        BUCKET_JOBS,
        "local.j7",
        _job("j7", state="RUNNING", actors=[_STAR]),
    ),
    (BUCKET_JOBS, "j8", Raw()),
    (BUCKET_ACTORS, "pool.n9", _beat("n10")),
    (BUCKET_ACTORS, "local.j1.learner", Raw()),
    (BUCKET_EVALS, "local.j1.3", EvalRecord(version=4, step=4)),
    (BUCKET_EVALS, "local.j1.last", Raw()),
    (BUCKET_SECRETS, "nobody", SealedSecrets(sealed=b"x")),
    (BUCKET_SECRETS, "local.j1", Raw()),
    (BUCKET_USERS, "user.ada", _user("bob")),
    (BUCKET_USERS, "user.B", Raw()),
    (BUCKET_REQUESTS, "local.r1", Raw()),
]


async def _write_all(broker: Broker) -> None:
    await create_user_stores(broker)
    for bucket, key, value in FALSE:
        await Bucket(broker, bucket, type(value)).put(key, value)


async def test_no_record_that_belies_its_key_keeps_a_scheduler_from_placing_jobs(
    stack: Stack,
) -> None:
    await _write_all(stack.broker)
    first = await stack.running()
    await _write_all(stack.broker)
    await Bucket(stack.broker, BUCKET_ACTORS, Raw).put(f"{first.scope.key}.learner", Raw())
    stack.do(first, "learner", "done")
    await stack.until(first, "COMPLETED")
    second = await stack.until(await stack.submit(), "RUNNING")
    assert [node.node for node in await stack.nodes()] == ["n1"]
    states = {one.job: one.state for one in await stack.jobs.list_jobs()}
    assert states == {first.job: "COMPLETED", second.job: "RUNNING", "j6": "FAILED"}
    told = await SchedulerCalls(stack.broker).damaged()
    named = {(one.bucket, one.key) for one in told.records}
    assert named >= {(bucket, key) for bucket, key, _ in FALSE if key not in ("nobody", "local.j6")}
    assert not [key for _, key in named if second.job in key]
