"""What another user may not ask of the auth service: its store proxy, and its users.

Ada and Mallory are those of `conftest`.
"""

import json

import pytest
from tinkermq.broker.calls import ask_users
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.login import AS_VARIABLE
from tinkermq.broker.feed import publish_event, read_events
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.schemas.job import OpenRequest
from tinkermq.schemas.metric import EvalRecord, Event
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
from tinkermq.schemas.wire.errors import AuthError, BrokerError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import AUDIT, BUCKET_EVALS, JobScope, rpc

from tests.support.secured import SecuredPool, environment, refused_publish
from tests.support.strategies import make_group
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
        ("invite", Invite(), NewKey),
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
