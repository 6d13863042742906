"""What users, processes, programs and services may not do, tried over NATS.

What another user may not do with a job, tried over NATS with credentials of his own.

Ada has a job with data of every kind. Mallory is a user of the same pool who knows its id.
"""

import json
from contextlib import aclosing

import numpy as np
import pytest
from tinkermq.actors.auth.callout import PROGRAM_CONNECTIONS
from tinkermq.actors.weights.store import WeightStore
from tinkermq.broker.calls import ask_users
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.keys import EpisodeIdentity, episode_key, episode_secret
from tinkermq.broker.client.login import AS_VARIABLE
from tinkermq.broker.feed import publish_event, read_events
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.objects import ObjectStore
from tinkermq.broker.jetstream.streams import (
    ensure_stream,
    object_store_config,
)
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.presence import list_presences
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.envs.agents.proxy.proxy import EpisodeSigner
from tinkermq.schemas.job import OpenRequest
from tinkermq.schemas.metric import EvalRecord, Event
from tinkermq.schemas.user import (
    AddUser,
    AuditList,
    AuditRequest,
    JobKeyRequest,
    NameUser,
    NewKey,
    RotateKey,
    SetQuota,
    UserList,
    UserReply,
)
from tinkermq.schemas.wire.errors import (
    AuthError,
    BrokerError,
    LogInRefusedError,
    NotFoundError,
    TinkermqError,
)
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import AUDIT, BUCKET_EVALS, JobScope, acting, rpc

from tests.support.models import bytes_of
from tests.support.permission_matrix import ALL, Rights, in_table, refused
from tests.support.secured import (
    REFUSED,
    SecuredPool,
    environment,
    refused_publish,
)
from tests.support.strategies import make_group
from tests.support.waiting import eventually, until

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


CONNECTIONS = {
    "user": "user ada",
    "admin": "user root",
    "learner": "learner",
    "generator": "generator-0",
    "evaluator": "evaluator-0",
    "environment": "environment-0",
    "program": "episode g-1-0",
    "node": "service node",
    "gateway": "service gateway",
}


@pytest.mark.parametrize("kind", CONNECTIONS)
async def test_the_pool_refuses_whatever_the_table_of_permissions_does_not_grant(
    pool: SecuredPool, kind: str
) -> None:
    scope = JobScope("ada", "j1")
    if await JobStore(await pool.service("scheduler")).find_by_id("ada", scope.job) is None:
        await pool.job("ada", scope.job)
    way, _, name = CONNECTIONS[kind].rpartition(" ")
    if way == "user":
        broker = await pool.user(name)
    elif way == "service":
        broker = await pool.service(name)
    elif way == "episode":
        broker = await pool.connected(await key_of(pool, scope, name))
    else:
        broker = await pool.process(scope, name)
    granted = in_table(kind)
    others = Rights(ALL.publish - granted.publish, ALL.listen - granted.listen)
    errors: list[str] = []
    broker.on_error(lambda error: errors.append(error.message))
    assert await refused(broker.nc, errors, others) == others


# What the processes of jobs and the services of a pool may not do, tried with their credentials.
#
# Ada and Mallory are those of `conftest`.


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


async def test_the_scheduler_does_not_write_users(pool: SecuredPool) -> None:
    await refused_publish(await pool.service("scheduler"), "$KV.tmq-users.user.ada")


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
    for actor in ("generator-0", "evaluator-0"):
        read = ObjectStore(await pool.process(job, actor), bucket)
        assert [info.name for info in await read.infos()] == ["a"]


# -- What a program may not do with the key of its episode, tried over NATS without any gateway ----
#
# Ada and Mallory are those of `conftest`.


EPISODE = "generator-0-1-3-0"


async def key_of(pool: SecuredPool, job: JobScope, episode: str = EPISODE) -> str:
    """The key of an episode, as the host in the pool makes it."""
    host = await pool.process(job, "environment-0")
    return (await EpisodeSigner.of_job(host, job)).key(episode)


async def test_both_kinds_of_hosts_sign_keys_that_the_broker_takes(
    pool: SecuredPool, job: JobScope
) -> None:
    ada = await pool.user("ada")
    assert (await EpisodeSigner.of_job(ada, job)).key(EPISODE) == await key_of(pool, job)
    program = await pool.connected(await key_of(pool, job))
    assert program.user == "ada"
    host = await pool.process(job, "environment-0")
    listening = await host.listen(job.episode(EPISODE, "post"), lambda _: None)
    await host.nc.flush()
    await program.publish(job.episode(EPISODE, "post"), b"x")
    await program.nc.flush()
    await listening.stop()


async def test_forged_keys_are_refused(pool: SecuredPool, job: JobScope, mallory: Broker) -> None:
    key = await key_of(pool, job)
    signer = await EpisodeSigner.of_job(mallory, JobScope("mallory", "01mine"))
    signature = signer.key(EPISODE).rpartition(".")[2]
    own = episode_secret("mallory", "01mine", pool.secrets.job_secret())
    for forged in (
        key.replace(".generator-0-1-3-0.", ".generator-0-1-3-1."),
        key.replace("_ada.", "_mallory."),
        key.replace(f".{job.job}.", ".01mine."),
        key[:-1] + ("0" if key[-1] != "0" else "1"),
        f"{key.rpartition('.')[0]}.{signature}",
        episode_key(EpisodeIdentity("ada", job.job, EPISODE), own),
        episode_key(EpisodeIdentity("ada", job.job, EPISODE), None),
    ):
        with pytest.raises(LogInRefusedError):
            await pool.connected(forged)


async def test_nobody_signs_for_the_job_of_another(
    pool: SecuredPool, job: JobScope, mallory: Broker
) -> None:
    with pytest.raises(TinkermqError, match="may not"):
        await EpisodeSigner.of_job(mallory, job)
    program = await pool.connected(await key_of(pool, job))
    with pytest.raises(TinkermqError, match="may not"):
        await EpisodeSigner.of_job(program, job)
    with pytest.raises(AuthError, match="runs no job"):
        await EpisodeSigner.of_job(mallory, JobScope("mallory", "02none"))


async def test_connections_with_one_key_are_bounded(pool: SecuredPool, job: JobScope) -> None:
    key = await key_of(pool, job, "greedy-0")
    refused = 0
    for _ in range(3 * PROGRAM_CONNECTIONS):  # servers tell of new connections a moment later
        try:
            await pool.connected(key)
        except LogInRefusedError:
            refused += 1
    assert refused >= PROGRAM_CONNECTIONS
    assert await pool.connected(await key_of(pool, job, "greedy-1"))


async def test_the_end_of_its_job_ends_a_programs_connection(pool: SecuredPool) -> None:
    scope = await pool.job("ada", "01ends")
    key = await key_of(pool, scope)
    program = await pool.connected(key)
    errors: list[BrokerError] = []
    program.on_error(errors.append)
    jobs = JobStore(await pool.service("scheduler"))
    await jobs.transition(await jobs.get("ada", scope.job), "FAILED", "it ended", "test")
    await until(lambda: any(isinstance(one, LogInRefusedError) for one in errors), "the refusal")
    assert not program.is_connected
    with pytest.raises(LogInRefusedError):
        await pool.connected(key)


# -- What another user may not ask of the auth service: its store proxy, and its users -------------
#
# Ada and Mallory are those of `conftest`.


async def test_the_store_proxy_reads_and_writes_ones_own_only(
    job: JobScope, mallory: Broker
) -> None:
    place = rpc("mallory", "store", "get")
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
        reply = await mallory.request(f"{place}.{stream}", payload)
        assert (reply.headers or {}).get("Status") == "403", (stream, subject)
    for request in ({"seq": 1}, {"last_by_subj": "$KV.tmq-jobs.ada.x"}, {"multi_last": [">"]}):
        reply = await mallory.request(f"{place}.KV_tmq-jobs", json.dumps(request).encode())
        assert (reply.headers or {}).get("Status") == "403", request
    for payload in (b"", b"[]", b"{", b'"x"'):
        reply = await mallory.request(f"{place}.KV_tmq-jobs", payload)
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


async def test_what_the_store_proxy_refuses_is_written_down(
    pool: SecuredPool, job: JobScope, mallory: Broker
) -> None:
    await mallory.request(rpc("mallory", "store", "get.tmq-audit"), b'{"seq":1}')
    root = await pool.user("root")

    async def told() -> bool:
        records = (await ask_users(root, "audit", AuditRequest(limit=1000), AuditList)).records[
            ::-1
        ]
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
    await ask_users(mallory, "me", Empty(), UserReply)  # the service has taken those before
    await mallory.request(f"{get}.{own.stream_rollout}", b'{"seq":1}')
    assert await RolloutLog(scheduler, job).last_seq() == before


async def test_a_message_id_of_one_user_hides_nothing_that_another_stores(
    pool: SecuredPool, job: JobScope, mallory: Broker
) -> None:
    ada, headers = await pool.user("ada"), {"Nats-Msg-Id": "the-same-for-both"}
    for who, of, broker in (("mallory", "01mine", mallory), ("ada", job.job, ada)):
        subject = rpc(who, "store", f"put.$KV.{BUCKET_EVALS}.{who}.{of}.1")
        payload = EvalRecord(version=1, step=1).to_bytes()
        reply = json.loads((await broker.request(subject, payload, headers=headers)).data)
        assert "seq" in reply
        assert not reply.get("duplicate"), who
        found = await Bucket(broker, BUCKET_EVALS, EvalRecord).get(f"{who}.{of}.1")
        assert found is not None, who


async def test_an_environment_host_hides_no_event_of_the_pool_by_its_message_id(
    pool: SecuredPool, job: JobScope
) -> None:
    host, learner = await pool.process(job, "environment-0"), await pool.process(job, "learner")
    before = len(await read_events(await pool.user("ada"), job))
    for broker, source in ((host, "environment-0"), (learner, "learner")):
        event = Event(kind="k", source=source, time=1.0)
        await publish_event(broker, job, event, message_id="the-next")
    events = await read_events(await pool.user("ada"), job)
    assert [one.source for one in events[before:]] == ["environment-0", "learner"]


async def test_users_cannot_manage_users(pool: SecuredPool, job: JobScope, mallory: Broker) -> None:
    for method, request, reply in (
        ("list", Empty(), UserList),
        ("add", AddUser(user="eve", role="admin"), NewKey),
        ("rotate", RotateKey(user="ada"), NewKey),
        ("revoke", NameUser(user="ada"), UserReply),
        ("quota", SetQuota(user="mallory", max_slots=-1), UserReply),
        ("audit", AuditRequest(), AuditList),
    ):
        with pytest.raises(AuthError, match="may not do this"):
            await ask_users(mallory, method, request, reply)
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
