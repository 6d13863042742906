"""Each forbidden thing, tried over NATS with the credentials of somebody else.

Ada has a job with data of every kind. Mallory is a user of the same pool who knows its id.
"""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
import pytest_asyncio
from nats.js.errors import APIError
from tinkermq.broker.batches import BatchLog
from tinkermq.broker.connection import Broker
from tinkermq.broker.feed import publish_event, publish_log, publish_metric, read_events
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.login import AS_VARIABLE
from tinkermq.broker.presence import list_presences
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.rpc import call
from tinkermq.broker.stored import get_all
from tinkermq.broker.streams import stream_info
from tinkermq.broker.tasks import TaskQueue
from tinkermq.broker.weights import TensorBytes, WeightStore
from tinkermq.schemas.errors import AuthError, BrokerError, NotFoundError, TinkermqError
from tinkermq.schemas.job import JobReply, StopRequest
from tinkermq.schemas.message import Empty
from tinkermq.schemas.metric import Event, LogLines, Metric
from tinkermq.schemas.secret import OpenRequest
from tinkermq.schemas.subjects import AUDIT, JobScope, rpc
from tinkermq.schemas.user import (
    AddUser,
    AuditList,
    AuditRequest,
    Invite,
    JobKeyRequest,
    NameUser,
    NewKey,
    RotateKey,
    SetQuota,
    UserList,
    UserReply,
)

from tests.secured import SecuredPool, ask, environment
from tests.strategies import make_group, make_task
from tests.waiting import eventually, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
REFUSED = r"may not|refused"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job(pool: SecuredPool) -> AsyncIterator[JobScope]:
    """Ada's job, written to by its own processes."""
    await pool.user("ada")
    scope = await pool.job("ada", "01adasjob")
    learner, node = await pool.process(scope, "learner"), await pool.service("node")
    generator = await pool.process(scope, "generator-0")
    await publish_metric(learner, scope, Metric(step=1, values={"reward": 1.0}, time=1.0))
    await publish_event(learner, scope, Event(kind="started", source="learner", time=1.0))
    await publish_log(node, scope, LogLines(actor="learner", attempt=1, lines=["x"], time=1.0))
    await TaskQueue(learner, scope).publish(make_task(0))
    assert await RolloutLog(generator, scope).append(make_group(0))
    tensors = {"w": TensorBytes("float32", (4,), np.ones(4, np.float32).data)}
    await WeightStore(learner, scope).publish(1, tensors)
    yield scope


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mallory(pool: SecuredPool) -> Broker:
    """Somebody else, with a job of his own."""
    broker = await pool.user("mallory")
    await pool.job("mallory", "01mine")
    return broker


async def refused_publish(broker: Broker, subject: str, payload: bytes = b"x") -> None:
    """Publish, and see the broker refuse it."""
    errors: list[BrokerError] = []
    remove = broker.on_error(errors.append)
    await broker.nc.publish(subject, payload, reply=broker.nc.new_inbox())
    await broker.nc.flush()
    await until(lambda: bool(errors), f"{subject} to be denied")
    remove()
    assert "may not publish" in errors[0].message


async def refused_listen(broker: Broker, subject: str) -> None:
    errors: list[BrokerError] = []
    remove = broker.on_error(errors.append)
    listening = await broker.listen(subject, lambda _: None)
    await broker.nc.flush()
    await until(lambda: bool(errors), f"{subject} to be denied")
    remove()
    assert "may not subscribe" in errors[0].message
    await listening.stop()


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
    assert bytes((await store.fetch(manifest))["w"].data) == np.ones(4, np.float32).tobytes()
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
    reply = await root.request(rpc("ada", "store", f"info.{job.stream_log}"))
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
    with pytest.raises(APIError, match="may not"):
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


async def test_the_door_opens_for_ones_own_only(job: JobScope, mallory: Broker) -> None:
    door = rpc("mallory", "store", "get")
    for stream, subject in (
        ("KV_tmq-users", "$KV.tmq-users.user.mallory"),
        ("KV_tmq-users", ">"),
        ("tmq-audit", ">"),
        (job.stream_rollout, ">"),
        ("KV_tmq-jobs", ">"),
        ("KV_tmq-jobs", "$KV.tmq-jobs.>"),
        ("KV_tmq-jobs", "$KV.tmq-jobs.*.>"),
        ("KV_tmq-jobs", "$KV.tmq-jobs.ada.>"),
        ("KV_tmq-jobs", "$KV.tmq-jobs.mallory2.x"),
        ("KV_tmq-actors", "$KV.tmq-actors.>"),
        ("KV_tmq-requests", "$KV.tmq-requests.mallory.x"),
        ("KV_tmq-nodes", ">"),
        ("KV_tmq-secrets", ">"),
        ("KV_tmq-secrets", "$KV.tmq-secrets.mallory.>"),
    ):
        payload = json.dumps({"seq": 1, "next_by_subj": subject, "batch": 9}).encode()
        reply = await mallory.request(f"{door}.{stream}", payload)
        assert (reply.headers or {}).get("Status") == "403", (stream, subject)
    for request in ({"seq": 1}, {"last_by_subj": "$KV.tmq-jobs.ada.x"}, {"multi_last": [">"]}):
        reply = await mallory.request(f"{door}.KV_tmq-jobs", json.dumps(request).encode())
        assert (reply.headers or {}).get("Status") == "403", request
    for payload in (b"", b"[]", b"{", b'"x"'):
        reply = await mallory.request(f"{door}.KV_tmq-jobs", payload)
        assert (reply.headers or {}).get("Status") == "403", payload
    put = rpc("mallory", "store", "put")
    for subject in (
        job.rollout(9),
        "tmq.v1.job.mallory.01mine.metric",
        "tmq.v1.job.mallory.01mine.rollout.x",
        "$KV.tmq-jobs.mallory.01mine",
        "$KV.tmq-evals.ada.01adasjob.1",
        "$JS.API.STREAM.DELETE.tmq-mallory-01mine-log",
        AUDIT,
    ):
        reply = await mallory.request(f"{put}.{subject}", b"{}")
        assert json.loads(reply.data)["error"]["code"] == 403, subject
    for subject in (rpc("mallory", "store", "purge.x"), rpc("mallory", "store", "get")):
        await mallory.publish(subject, b"")


async def test_what_the_door_refuses_is_written_down(
    pool: SecuredPool, job: JobScope, mallory: Broker
) -> None:
    await mallory.request(rpc("mallory", "store", "get.tmq-audit"), b'{"seq":1}')
    root = await pool.user("root")

    async def told() -> bool:
        records = (await ask(root, "audit", AuditRequest(limit=1000), AuditList)).records[::-1]
        return any((one.who, one.what) == ("mallory", "store") for one in records)

    await eventually(told, "the refusal to be written down")


async def test_nobody_lends_his_rights_to_a_forged_reply_subject(
    pool: SecuredPool, job: JobScope, mallory: Broker
) -> None:
    """Whoever answers with more rights than the asker must not answer to any subject."""
    scheduler = await pool.service("scheduler")
    before = await RolloutLog(scheduler, job).last_seq()
    own = JobScope("mallory", "01mine")
    assert await RolloutLog(mallory, own).append(make_group(1))
    victim = job.rollout(66)
    get, put = rpc("mallory", "store", "get"), rpc("mallory", "store", "put")
    for subject, payload in (
        (f"{get}.{own.stream_rollout}", b'{"seq":1}'),
        (f"{put}.{own.rollout(2)}", make_group(2).to_bytes()),
        (rpc("mallory", "store", f"info.{own.stream_rollout}"), b""),
        (rpc("mallory", "users", "me"), Empty().to_bytes()),
    ):
        await mallory.nc.publish(subject, payload, reply=victim)
    await ask(mallory, "me", Empty(), UserReply)  # the service has taken those before
    await mallory.request(f"{get}.{own.stream_rollout}", b'{"seq":1}')
    assert await RolloutLog(scheduler, job).last_seq() == before


async def test_users_cannot_manage_users(pool: SecuredPool, job: JobScope, mallory: Broker) -> None:
    for method, request, reply in (
        ("list", Empty(), UserList),
        ("add", AddUser(user="eve", role="admin"), NewKey),
        ("rotate", RotateKey(user="ada"), NewKey),
        ("revoke", NameUser(user="ada"), UserReply),
        ("quota", SetQuota(user="mallory", max_slots=-1), UserReply),
        ("invite", Invite(), NewKey),
        ("audit", AuditRequest(), AuditList),
    ):
        with pytest.raises(AuthError, match="may not do this"):
            await ask(mallory, method, request, reply)
    for subject in (rpc("root", "users", "list"), rpc("ada", "users", "me")):
        await refused_publish(mallory, subject, Empty().to_bytes())
    key = JobKeyRequest(user="mallory", job="01mine", actor="learner", attempt=1)
    await refused_publish(mallory, rpc("node", "keys", "job"), key.to_bytes())
    opening = OpenRequest(user="mallory", job="01mine", actor="learner", attempt=1)
    for asker in (mallory, await pool.user("root")):
        await refused_publish(asker, rpc("node", "secrets", "open"), opening.to_bytes())


async def test_only_an_admin_may_act_for_another(pool: SecuredPool, job: JobScope) -> None:
    await pool.user("mallory")
    with environment(**{AS_VARIABLE: "ada"}):
        mallory = await pool.connected(pool.keys["mallory"])
    with pytest.raises(BrokerError, match="may not publish"):
        await JobStore(mallory).find_by_id("ada", job.job)


async def test_an_admin_cannot_ask_in_the_name_of_another_admin(pool: SecuredPool) -> None:
    root = await pool.user("root")
    await refused_publish(root, rpc("ada", "users", "rotate"), RotateKey(user="ada").to_bytes())


# -- processes of jobs -----------------------------------------------------------------------------


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
        job.door("learner") + ".get.KV_tmq-evals",
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
    for subject in (job.rollout("*"), job.metric, job.log("*"), f"{job.inbox('learner')}.>"):
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
        await refused_listen(process, job.rollout("*"))
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
