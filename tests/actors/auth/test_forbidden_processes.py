"""What the processes of jobs and the services of a pool may not do, tried with their credentials.

Ada and Mallory are those of `conftest`.
"""

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.objects import ObjectStore
from tinkermq.broker.jetstream.streams import (
    ensure_stream,
    object_store_config,
    stream_info,
)
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.broker.weights.store import WeightStore
from tinkermq.schemas.wire.errors import BrokerError
from tinkermq.schemas.wire.subjects import BUCKET_EVALS, JobScope, rpc

from tests.support.secured import REFUSED, SecuredPool, refused_listen, refused_publish

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_generator_cannot_publish_weights_nor_batches(
    pool: SecuredPool, job: JobScope
) -> None:
    generator = await pool.process(job, "generator-0")
    bucket = job.bucket_weights
    for subject in (
        f"$KV.{bucket}.latest",
        f"$O.{bucket}.C.x",
        job.weights,
        job.batch,
        job.task(9),
        job.metric,
        job.log("learner"),
        f"$KV.tmq-evals.{job.key}.1",
        f"$KV.tmq-actors.{job.key}.learner",
        f"$JS.API.STREAM.PURGE.{job.stream_rollout}",
        f"$JS.API.STREAM.DELETE.{job.stream_rollout}",
        f"$JS.API.DIRECT.GET.{job.stream_log}",
        f"$JS.API.CONSUMER.CREATE.{job.stream_task}.generators.{job.task('*')}",
        job.store("learner") + ".get.KV_tmq-evals",
    ):
        await refused_publish(generator, subject)
    [lease] = await TaskQueue(generator, job).pull(1, 20)
    await lease.done()


async def test_an_environment_host_reads_neither_log_nor_rollouts(
    pool: SecuredPool, job: JobScope
) -> None:
    host = await pool.process(job, "environment-0")
    assert (await JobStore(host).find_by_id("ada", job.job)) is not None
    with pytest.raises(BrokerError, match=REFUSED):
        await RolloutLog(host, job).get(1)
    with pytest.raises(BrokerError, match=REFUSED):
        await read_events(host, job)
    with pytest.raises(BrokerError, match=REFUSED):
        await WeightStore(host, job).latest()
    with pytest.raises(BrokerError, match=REFUSED):
        await JobStore(host).list_jobs("ada")
    for subject in (job.rollout(8), job.metric, job.task(8), job.control("learner")):
        await refused_publish(host, subject)
    inboxes = ("", "_root", "_scheduler", "_job.bob.j.learner")
    for subject in (f"_INBOX{owner}.x" for owner in inboxes):
        await refused_publish(host, subject)
    heard = (job.rollout("*"), job.metric, job.log("*"), f"{job.inbox('learner')}.>")
    for subject in (*heard, "$SRV.>", "$SRV.PING", "$SRV.INFO.>"):
        await refused_listen(host, subject)


async def test_the_processes_of_one_job_reach_no_other_job(
    pool: SecuredPool, job: JobScope, mallory: Broker
) -> None:
    other = JobScope("mallory", "01mine")
    for actor in ("learner", "generator-0", "evaluator-0", "environment-0"):
        process = await pool.process(other, actor)
        for subject in (job.rollout(9), job.env_reset, f"$KV.tmq-actors.{job.key}.x"):
            await refused_publish(process, subject)
        await refused_publish(process, f"$JS.API.DIRECT.GET.{job.stream_rollout}", b"{}")
        for heard in (job.rollout("*"), f"$KV.{BUCKET_EVALS}.{job.key}.>", f"$KV.{BUCKET_EVALS}.>"):
            await refused_listen(process, heard)
        with pytest.raises(BrokerError, match=REFUSED):
            await JobStore(process).find_by_id("ada", job.job)


async def test_a_service_has_its_own_rights_only(pool: SecuredPool, job: JobScope) -> None:
    node, gateway = await pool.service("node"), await pool.service("gateway")
    for subject in (job.rollout(9), "$KV.tmq-users.user.x", rpc("ada", "scheduler", "stop")):
        await refused_publish(node, subject)
        await refused_publish(gateway, subject)
    await refused_publish(await pool.service("scheduler"), "$KV.tmq-users.user.ada")
    await refused_listen(node, job.rollout("*"))
    with pytest.raises(BrokerError, match="may not publish"):
        await stream_info(node, "tmq-audit")


async def test_only_the_learner_of_a_job_writes_its_checkpoints_in_the_broker(
    pool: SecuredPool, job: JobScope
) -> None:
    bucket = job.object_checkpoints
    config = object_store_config(bucket, "checkpoints", 1 << 20)
    await ensure_stream(await pool.service("scheduler"), config)
    store = ObjectStore(await pool.process(job, "learner"), bucket)
    await store.put("a", [memoryview(b"a")], deadline_s=10)
    assert [info.name for info in await store.infos()] == ["a"]
    await store.delete("a")
    await store.put("a", [memoryview(b"a")], deadline_s=10)
    for actor in ("generator-0", "evaluator-0", "environment-0"):
        process = await pool.process(job, actor)
        await refused_publish(process, f"$O.{bucket}.C.x")
        await refused_publish(process, f"$JS.API.STREAM.DELETE.OBJ_{bucket}", b"{}")
        if actor == "environment-0":  # which runs games, and loads no model
            await refused_publish(process, f"$JS.API.DIRECT.GET.OBJ_{bucket}", b"{}")
        else:
            read = ObjectStore(process, bucket)
            assert [info.name for info in await read.infos()] == ["a"]
    stranger = await pool.process(JobScope("mallory", "01mine"), "learner")
    await refused_publish(stranger, f"$O.{bucket}.C.x")
    await refused_publish(stranger, f"$JS.API.DIRECT.GET.OBJ_{bucket}", b"{}")
