"""What another user may not do with a job, tried over NATS with credentials of his own.

Ada has a job with data of every kind. Mallory is a user of the same pool who knows its id.
"""

import json
from contextlib import aclosing

import numpy as np
import pytest
from tinkermq.broker.batches import BatchLog
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.login import AS_VARIABLE
from tinkermq.broker.client.rpc import call
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.presence import list_presences
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.weights.store import WeightStore
from tinkermq.schemas.job import JobReply, StopRequest
from tinkermq.schemas.wire.errors import BrokerError, NotFoundError, TinkermqError
from tinkermq.schemas.wire.subjects import AUDIT, JobScope, acting, rpc

from tests.support.models import bytes_of
from tests.support.secured import (
    REFUSED,
    SecuredPool,
    environment,
    refused_listen,
    refused_publish,
)
from tests.support.strategies import make_group

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_owner_reads_all_of_it(pool: SecuredPool, job: JobScope) -> None:
    ada = await pool.user("ada")
    assert (await JobStore(ada).get("ada", job.job)).name == "run-01adasjob"
    assert [one.job for one in await JobStore(ada).list_jobs("ada")] == [job.job]
    assert [one.kind for one in await read_events(ada, job)][-1] == "started"
    assert await RolloutLog(ada, job).contains(0)
    assert await RolloutLog(ada, job).last_seq() == 1
    assert await BatchLog(ada, job).read_all() == []
    store = WeightStore(ada, job)
    manifest = await store.latest()
    assert manifest is not None
    assert bytes_of((await store.fetch(manifest))["w"]) == np.ones(4, np.float32).tobytes()
    async with aclosing(RolloutLog(ada, job).read()) as entries:
        assert (await anext(entries)).number == 0
    assert await RolloutLog(ada, job).append(make_group(77))
    assert not await RolloutLog(ada, job).append(make_group(77))
    assert await list_presences(ada, "pool") == []


async def test_an_admin_may_look_at_it(pool: SecuredPool, job: JobScope) -> None:
    with environment(**{AS_VARIABLE: "ada"}):
        as_ada = await pool.connected(pool.admin_key)
    assert [one.job for one in await JobStore(as_ada).list_jobs("ada")] == [job.job]
    assert [one.kind for one in await read_events(as_ada, job)][-1] == "started"
    async with aclosing(RolloutLog(as_ada, job).read()) as entries:
        assert (await anext(entries)).number == 0
    root = await pool.user("root")
    await refused_publish(root, "$JS.API.STREAM.DELETE." + job.stream_log)
    await refused_publish(root, rpc("ada", "store", f"info.{job.stream_log}"))
    reply = await root.request(acting("root", "ada", "store", f"info.{job.stream_log}"))
    assert json.loads(reply.data)["state"]["messages"] == 1


async def test_a_job_its_log_rollouts_weights_and_metrics_cannot_be_read(
    job: JobScope, mallory: Broker
) -> None:
    with pytest.raises(BrokerError, match=REFUSED):
        await JobStore(mallory).find_by_id("ada", job.job)
    with pytest.raises(BrokerError, match=REFUSED):
        await JobStore(mallory).list_jobs("ada")
    with pytest.raises(BrokerError, match=REFUSED):
        await JobStore(mallory).list_jobs()
    with pytest.raises(BrokerError, match=REFUSED):
        await read_events(mallory, job)
    with pytest.raises(BrokerError, match=REFUSED):
        await get_all(mallory, job.stream_log, job.log("*"))
    with pytest.raises(BrokerError, match=REFUSED):
        await RolloutLog(mallory, job).get(1)
    with pytest.raises(BrokerError, match="may not"):
        await RolloutLog(mallory, job).last_seq()
    with pytest.raises(BrokerError, match=REFUSED):
        await WeightStore(mallory, job).latest()
    with pytest.raises(BrokerError, match=REFUSED):
        await get_all(mallory, f"OBJ_{job.object_weights}", ">")
    with pytest.raises(BrokerError, match=REFUSED):
        await list_presences(mallory, job.key)


async def test_ids_that_are_guessed_lead_nowhere(job: JobScope, mallory: Broker) -> None:
    assert await JobStore(mallory).find("mallory", job.job) is None
    own = JobScope("mallory", job.job)
    with pytest.raises(NotFoundError):
        await read_events(mallory, own)
    with pytest.raises(TinkermqError):
        await RolloutLog(mallory, own).append(make_group(1), deadline_s=2)


async def test_nothing_can_be_put_into_it(
    pool: SecuredPool, job: JobScope, mallory: Broker
) -> None:
    with pytest.raises(BrokerError, match=REFUSED):
        await RolloutLog(mallory, job).append(make_group(5))
    for subject in (
        job.rollout(5),
        job.task(5),
        job.batch,
        job.metric,
        job.event,
        job.log("learner"),
        job.weights,
        job.control("learner"),
        job.env_reset,
        job.env("host", "step"),
        f"$KV.{job.bucket_weights}.latest",
        f"$KV.tmq-jobs.{job.key}",
        f"$KV.tmq-jobs.mallory.{job.job}",
        "$KV.tmq-users.user.mallory",
        "$KV.tmq-nodes.evil",
        AUDIT,
        "tmq.v1.node.node.sync",
        acting("mallory", "ada", "scheduler", "stop"),
        acting("root", "ada", "scheduler", "stop"),
        acting("root", "mallory", "scheduler", "stop"),
        job.control_by("mallory", "learner"),
        job.control_by("root", "learner"),
        f"_INBOX_ada.{'x' * 22}",
        "_INBOX_scheduler.x",
    ):
        await refused_publish(mallory, subject)
    scheduler = await pool.service("scheduler")
    numbers = await RolloutLog(scheduler, job).numbers()
    assert 5 not in numbers


async def test_it_cannot_be_cancelled(job: JobScope, mallory: Broker) -> None:
    with pytest.raises(BrokerError, match="may not publish"):
        await call(
            mallory,
            rpc("ada", "scheduler", "stop"),
            StopRequest(job=job.job, now=True),
            JobReply,
            timeout_s=20,
            waiting_for="the scheduler",
        )


async def test_wildcards_do_not_listen_to_others(job: JobScope, mallory: Broker) -> None:
    for subject in (
        ">",
        "tmq.>",
        "tmq.v1.job.>",
        "tmq.v1.job.*.*.metric",
        "tmq.v1.rpc.>",
        "tmq.v1.rpc.*.scheduler.submit",
        "tmq.v1.rpc.mallory.>",
        "tmq.v1.as.>",
        "tmq.v1.as.*.mallory.>",
        "$SRV.>",
        "$SRV.PING",
        "tmq.v1.job.mallory.*.store.>",
        "tmq.v1.job.mallory.*.ctl.>",
        "tmq.v1.node.>",
        job.metric,
        "_INBOX.>",
        "_INBOX_ada.>",
        "_INBOX_job.>",
        "_INBOX_scheduler.>",
        "$KV.>",
        "$JS.>",
        "$SYS.>",
        AUDIT,
    ):
        await refused_listen(mallory, subject)


async def test_jetstream_cannot_be_asked_at_all(job: JobScope, mallory: Broker) -> None:
    own = JobScope("mallory", "01mine")
    for verb in (
        "INFO",
        "STREAM.LIST",
        "STREAM.NAMES",
        "STREAM.CREATE.evil",
        f"STREAM.UPDATE.{own.stream_log}",
        f"STREAM.DELETE.{job.stream_log}",
        f"STREAM.PURGE.{job.stream_rollout}",
        f"STREAM.INFO.{own.stream_rollout}",
        f"STREAM.MSG.GET.{job.stream_rollout}",
        f"STREAM.MSG.DELETE.{job.stream_rollout}",
        f"CONSUMER.CREATE.{own.stream_rollout}",
        f"CONSUMER.CREATE.{own.stream_rollout}.evil",
        f"CONSUMER.DURABLE.CREATE.{own.stream_rollout}.evil",
        f"CONSUMER.MSG.NEXT.{job.stream_task}.generators",
        f"DIRECT.GET.{job.stream_rollout}",
        f"DIRECT.GET.{own.stream_rollout}",
        "DIRECT.GET.KV_tmq-users.$KV.tmq-users.user.ada",
        f"DIRECT.GET.KV_tmq-jobs.$KV.tmq-jobs.{job.key}",
    ):
        await refused_publish(mallory, f"$JS.API.{verb}", b"{}")
    await refused_publish(mallory, f"$JS.ACK.{job.stream_task}.generators.1.1.1.1.0", b"+ACK")
    await refused_publish(mallory, "$SYS.REQ.USER.AUTH")
    await refused_publish(mallory, "$SRV.PING")
