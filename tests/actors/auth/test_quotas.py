"""One user who takes all that he can get: it ends at his quota, and the others go on."""

import asyncio
import time
from pathlib import Path

import pytest
from tinkermq.actors.scheduler.jobs.states import ADMINS_BYTES, USERS_BYTES
from tinkermq.broker.calls import ask_users
from tinkermq.broker.client.login import AS_VARIABLE
from tinkermq.broker.client.rpc import call
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.streams import BUCKET_BYTES
from tinkermq.broker.jobs import JobStore
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import JobList, JobRecord, ListRequest
from tinkermq.schemas.metric import EvalRecord
from tinkermq.schemas.user import (
    AddUser,
    AuditList,
    AuditRequest,
    NewKey,
    RotateKey,
    SetQuota,
    UserReply,
)
from tinkermq.schemas.wire.errors import (
    BrokerError,
    BusyError,
    MessageError,
    QuotaError,
    TinkermqError,
)
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_ACTORS, BUCKET_EVALS, BUCKET_JOBS, rpc

from tests.actors.auth.submitting import submitted
from tests.support.secured import SecuredPool, environment
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
LARGE = {"game": "bandit", "hosts": 0, "num_val": 0, "kwargs": {"text": "x" * 200_000}}


async def set_quota(pool: SecuredPool, user: str, **bounds: int) -> None:
    """Let the admin change a quota, and wait until the scheduler knows it."""
    await pool.user(user)
    root = await pool.user("root")
    await ask_users(root, "quota", SetQuota(user=user, **bounds), UserReply)
    clients = Pool(await pool.user(user))
    wanted = {name: None if most < 0 else most for name, most in bounds.items()}

    async def known() -> bool:
        quota = await clients.quota()
        return all(getattr(quota, name) == most for name, most in wanted.items())

    await eventually(known, "the scheduler to know the quota")


async def test_submissions_of_one_user_end_at_his_quota_and_others_submit_and_stop(
    scheduled: SecuredPool, tmp_path: Path
) -> None:
    await set_quota(scheduled, "greedy", max_record_bytes=700_000)
    taken = [await submitted(scheduled, "greedy", tmp_path, env=LARGE) for _ in range(3)]
    with pytest.raises(QuotaError, match=r"bytes of job records.*the quota is 700,000") as raised:
        await submitted(scheduled, "greedy", tmp_path, env=LARGE)
    assert "tinkermq delete" in raised.value.hint
    greedy, hers = Pool(await scheduled.user("greedy")), await submitted(scheduled, "ada", tmp_path)
    await Pool(await scheduled.user("ada")).stop(hers.job, now=True)
    await greedy.stop(taken[0].job, now=True)
    held = (await greedy.quota()).held
    assert (held["max_jobs"], 600_000 < held["max_record_bytes"] < 700_000) == (3, True)


async def test_a_list_that_is_too_large_for_one_answer_comes_in_pages(
    scheduled: SecuredPool, tmp_path: Path
) -> None:
    await set_quota(scheduled, "lister", max_record_bytes=-1)
    made = [(await submitted(scheduled, "lister", tmp_path, env=LARGE)).job for _ in range(7)]
    lister = Pool(await scheduled.user("lister"))
    first = await call(
        lister.broker,
        rpc("lister", "scheduler", "list"),
        ListRequest(all=True),
        JobList,
        timeout_s=10,
        waiting_for="the scheduler",
    )
    assert 1 <= len(first.records) < 7
    assert first.after
    assert [one.job for one in await lister.all_jobs()] == made[::-1]


@pytest.mark.parametrize(
    ("bound", "most", "changes", "why"),
    [
        ("max_jobs", 0, {}, "runs, ended ones included"),
        ("max_live_jobs", 0, {}, "runs that have not ended"),
        ("max_actors", 20, {"env": {"game": "bandit", "hosts": 200}}, "environment hosts included"),
        (
            "max_stored_bytes",
            1 << 34,
            {"limits": {"rollout_bytes": 1 << 35}},
            "bytes of streams",
        ),
        ("max_slots", 3, {"generator": {"count": 100}}, "slots"),
    ],
)
async def test_a_job_over_a_bound_is_refused_with_value_bound_and_what_to_do(
    scheduled: SecuredPool,
    tmp_path: Path,
    bound: str,
    most: int,
    changes: dict[str, object],
    why: str,
) -> None:
    user = bound.removeprefix("max_")
    await set_quota(scheduled, user, **{bound: most})
    with pytest.raises(QuotaError, match=rf"{why}.* is {most:,}") as raised:
        await submitted(scheduled, user, tmp_path, **changes)
    assert "ask an admin" in raised.value.hint
    assert list((tmp_path / user).glob("*")) == []
    await set_quota(scheduled, user, **{bound: -1})
    assert (await submitted(scheduled, user, tmp_path, **changes)).state == "QUEUED"


async def test_evaluations_are_small_few_and_of_jobs_that_are_there(scheduled: SecuredPool) -> None:
    await set_quota(scheduled, "tester", max_evaluations=3)
    await scheduled.job("tester", "01tested")
    bucket = Bucket(await scheduled.user("tester"), BUCKET_EVALS, EvalRecord)
    large = EvalRecord(version=1, step=1, blame="x" * 7_000_000)
    with pytest.raises(BrokerError, match=r"bytes for .*may be stored"):
        await bucket.put("tester.01tested.1", large)
    with pytest.raises(BrokerError, match="has no job 01other"):
        await bucket.put("tester.01other.1", EvalRecord(version=1, step=1))
    for version in (1, 2, 3, 3, 2):
        await bucket.put(f"tester.01tested.{version}", EvalRecord(version=version, step=1))
    with pytest.raises(BrokerError, match="has 3 evaluations, the quota is 3"):
        await bucket.put("tester.01tested.4", EvalRecord(version=4, step=1))


async def test_a_hosted_game_cannot_fill_the_bucket_of_heartbeats(scheduled: SecuredPool) -> None:
    await scheduled.user("ada")
    scope = await scheduled.job("ada", "01beating")
    host = await scheduled.process(scope, "environment-0")
    bucket = Bucket(host, BUCKET_ACTORS, EvalRecord)
    small, large = (EvalRecord(version=1, step=1, blame="x" * size) for size in (1, 1_000_000))
    await bucket.put(f"{scope.key}.environment-0", small)
    with pytest.raises(BrokerError, match="may be stored"):
        await bucket.put(f"{scope.key}.environment-0", large)
    for name in ("environment-1", "learner"):
        with pytest.raises(BrokerError, match="has no environment of the name"):
            await bucket.put(f"{scope.key}.{name}", small)


async def test_refusals_are_short_bounded_and_push_out_nothing(scheduled: SecuredPool) -> None:
    eager, root = await scheduled.user("eager"), await scheduled.user("root")
    for _ in range(3):
        with pytest.raises((MessageError, BrokerError)):
            await ask_users(
                eager, "rotate", RotateKey.model_construct(user="x" * 7_000_000), NewKey
            )
    for number in range(80):
        with pytest.raises(TinkermqError):
            await ask_users(eager, "add", AddUser(user=f"{number}{'x' * 3000}"), NewKey)
    records = (await ask_users(root, "audit", AuditRequest(limit=2000), AuditList)).records
    assert max(len(one.to_bytes()) for one in records) < 2000
    mine = [one for one in records if one.who == "eager"]
    assert 10 <= len(mine) <= 30
    assert any(one.what == "users.add" and one.target == "eager" for one in records)


async def test_an_own_key_cannot_be_replaced_without_end(scheduled: SecuredPool) -> None:
    turner = await scheduled.user("turner")
    request = RotateKey(user="turner")
    answers = await asyncio.gather(
        *(ask_users(turner, "rotate", request, NewKey) for _ in range(20)), return_exceptions=True
    )
    refused = [one for one in answers if isinstance(one, BusyError)]
    assert len(refused) >= 10
    assert "replaced the own key 10 times" in refused[0].message


async def test_an_empty_request_may_not_be_a_large_one(scheduled: SecuredPool) -> None:
    ada = await scheduled.user("ada")
    junk = JobList(records=[], after="x" * 500_000)
    for method in ("list", "nodes", "submit"):
        with pytest.raises(MessageError, match="over the limit"):
            await call(
                ada,
                rpc("ada", "scheduler", method),
                junk if method != "submit" else JobList(records=[], after="x" * 3_000_000),
                Empty,
                timeout_s=10,
                waiting_for="the scheduler",
            )


@pytest.mark.long
async def test_stops_and_repairs_find_room_when_the_bucket_of_jobs_is_full(
    scheduled: SecuredPool, tmp_path: Path
) -> None:
    hers = await submitted(scheduled, "ada", tmp_path)
    jobs = JobStore(await scheduled.service("scheduler"))
    text, room = "x" * 1_000_000, USERS_BYTES
    for number in range(BUCKET_BYTES):
        filler = JobRecord(
            job=f"01filler{number}",
            name=f"filler-{number}",
            user="filler",
            state="CANCELLED",
            config={"text": text},
            created=time.time(),
        )
        await jobs.create(filler, "test")
        room -= len(filler.to_bytes())
        if room < 0:
            break

    async def refused() -> bool:
        try:
            await submitted(scheduled, "ada", tmp_path)
        except QuotaError:
            return True
        return False

    await eventually(refused, "the scheduler to have read the records")
    with pytest.raises(QuotaError, match="the records of all jobs of the pool take"):
        await submitted(scheduled, "ada", tmp_path)
    assert (await submitted(scheduled, "root", tmp_path)).state == "QUEUED"
    with environment(**{AS_VARIABLE: "ada"}):
        as_ada = Pool(await scheduled.connected(scheduled.admin_key))
    await as_ada.stop(hers.job, now=True)
    bucket = Bucket(await scheduled.service("scheduler"), BUCKET_JOBS, JobRecord)
    entry = await bucket.get(hers.scope.key)
    assert entry is not None
    assert entry.value.stop == "now"
    assert ADMINS_BYTES > USERS_BYTES
