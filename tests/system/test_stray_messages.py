"""Whatever is published on the subjects of a running job, the job goes on and says what it saw."""

from pathlib import Path

import pytest
from tinkermq.broker.client.rpc import call
from tinkermq.schemas.control import ControlReply, ControlRequest
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.configs import small_job
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

JUNK = [
    b"",
    b"\xff\xfe\x00",
    pack({"v": 99, "task": 1}),
    pack({"v": 1, "task": -1, "seed": "seven", "group_size": 0}),
    pack([[[[[[[[[[[[1]]]]]]]]]]]]),
    b"\xdd\xff\xff\xff\xff",
]
FAR = 1_000_000


async def test_junk_on_every_subject_of_a_running_job_harms_nothing(
    stack: Stack, model: Path
) -> None:
    env = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.05}, "num_val": 0}
    job = await stack.submit(small_job(model, env=env, training={"num_steps": 20}))
    await job.until_step(3)
    before = {name: actor.pid for name, actor in (await job.actors()).items()}
    num_stored = await _throw(stack, job.scope)
    asked = job.scope.control_by("root", "learner")
    request = ControlRequest(verb="status")
    await call(stack.broker, asked, request, ControlReply, timeout_s=30, waiting_for="the learner")
    told = await job.until_event("control_by_admin")
    assert told.message == "status asked for by user root for local"
    await job.until("COMPLETED")
    entries = {entry.seq: entry for entry in await job.entries()}
    strange = {seq for seq, entry in entries.items() if entry.error is not None}
    assert len(strange) == num_stored
    records = await job.batches()
    dropped = {item.seq for record in records for item in record.dropped}
    assert strange <= dropped
    assert {item.reason for record in records for item in record.dropped} == {"malformed"}
    trained = [number for record in records for number in record.tasks]
    assert len(trained) == len(set(trained)) == 20 * 4
    assert [record.step for record in records] == list(range(1, 21))
    restarts = {actor.name: actor.restarts for actor in job.record.actors}
    assert set(restarts.values()) == {0}, f"an actor of {before} was started again"


async def _throw(stack: Stack, scope: JobScope) -> int:
    """Publish junk everywhere; return how much of it the rollout log holds."""
    hosts = [scope.env_reset, scope.env_describe, scope.env("nobody", "step")]
    plain = [scope.weights, scope.control("learner"), scope.control("generator-0"), *hosts]
    for subject in plain:
        for payload in JUNK:
            await stack.broker.send(subject, payload, reply="_INBOX.nobody")
    for number, payload in enumerate(JUNK):
        await stack.broker.publish(scope.task(FAR + number), payload)
        await stack.broker.publish(scope.rollout(FAR + number), payload)
    await stack.broker.publish(scope.rollout("seven"), JUNK[1])
    await stack.broker.publish(scope.task("seven"), JUNK[1])
    return len(JUNK) + 1
