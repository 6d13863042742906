"""Who is let in and who is not; keys that end; users who take all that they can get."""

import asyncio
import itertools
import time
from pathlib import Path

import pytest
from tinkermq.actors.scheduler.jobs.states import ADMINS_BYTES, USERS_BYTES
from tinkermq.broker.calls import ask_users
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.keys import JobIdentity, job_key, new_api_key
from tinkermq.broker.client.login import AS_VARIABLE, Login
from tinkermq.broker.client.rpc import call
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.objects import ObjectStore
from tinkermq.broker.jetstream.streams import BUCKET_BYTES
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.user_records import UserStore
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import JobList, JobRecord, ListRequest
from tinkermq.schemas.metric import EvalRecord
from tinkermq.schemas.user import (
    AddUser,
    AuditList,
    AuditRecord,
    AuditRequest,
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
    BusyError,
    ConflictError,
    LogInRefusedError,
    MessageError,
    QuotaError,
    StateError,
    TinkermqError,
)
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_ACTORS, BUCKET_EVALS, BUCKET_JOBS, rpc

from tests.actors.auth.submitting import submitted
from tests.support.secured import SecuredPool, environment
from tests.support.strategies import make_group
from tests.support.waiting import PATIENCE_S, eventually, until

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]

REFUSED = "refuses this user"


async def audit(pool: SecuredPool) -> list[AuditRecord]:
    root = await pool.user("root")
    return (await ask_users(root, "audit", AuditRequest(limit=1000), AuditList)).records[::-1]


async def until_audited(pool: SecuredPool, *refusals: tuple[str, str]) -> None:
    """Wait until these users were written down with why; a refusal is answered before."""

    async def written() -> bool:
        return set(refusals) <= {
            (one.who, one.outcome) for one in await audit(pool) if one.what == "login"
        }

    await eventually(written, "the refusals to be written down")


async def refused(pool: SecuredPool, key: str) -> None:
    with pytest.raises(BrokerError, match=REFUSED):
        await connect(pool.server.url, name="test", api_key=key)


def watched(broker: Broker) -> list[BrokerError]:
    """Return the list into which a connection's errors go from now on."""
    errors: list[BrokerError] = []
    broker.on_error(errors.append)
    return errors


async def shut_out(broker: Broker, errors: list[BrokerError]) -> None:
    """Wait until a connection was closed and is not let in again."""
    await until(lambda: any(REFUSED in one.message for one in errors), "the refusal")
    assert not broker.is_connected
    await broker.close()


async def test_a_user_gets_in_with_the_own_key_and_learns_who_he_is(pool: SecuredPool) -> None:
    ada = await pool.user("ada")
    told = (await ask_users(ada, "me", Empty(), UserReply)).user
    assert (told.user, told.role, told.revoked) == ("ada", "user", None)
    assert told.expires is not None
    assert told.expires > time.time()


async def test_nobody_gets_in_without_a_key_or_with_one_that_is_made_up(pool: SecuredPool) -> None:
    with pytest.raises(BrokerError, match=REFUSED):
        await connect(pool.server.url, name="test")
    await pool.user("ada")
    await refused(pool, new_api_key("ada"))
    await refused(pool, new_api_key("nobody"))
    with pytest.raises(AuthError, match="not an API key"):
        await connect(pool.server.url, name="test", api_key="hello")
    for name, password in (("root", pool.keys["ada"]), ("scheduler", "x"), ("job", "tmqj.a.b")):
        login = Login(name, f"_INBOX_{name}", {"user": name, "password": password})
        with pytest.raises(BrokerError, match=REFUSED):
            await Broker(pool.server.url, "test", login).open(20, {})
    await until_audited(pool, ("ada", "an unknown key"), ("root", "the key of another user"))


async def test_a_key_is_kept_by_its_hash_only(pool: SecuredPool) -> None:
    await pool.user("ada")
    stored = await get_all(await pool.service("auth"), "KV_tmq-users", "$KV.tmq-users.>")
    files = [path.read_bytes() for path in pool.secrets.folder.iterdir()]
    log = pool.server.log_path.read_bytes()
    for key in pool.keys.values():
        assert not any(key.encode() in data for data in [m.payload for m in stored] + files + [log])


async def test_an_old_key_ends_with_its_replacement_and_closes_its_connections(
    pool: SecuredPool,
) -> None:
    bob = await pool.user("bob")
    old, errors = pool.keys["bob"], watched(bob)
    root = await pool.user("root")
    fresh = (await ask_users(root, "rotate", RotateKey(user="bob"), NewKey)).secret
    await shut_out(bob, errors)
    await refused(pool, old)
    again = await pool.connected(fresh)
    errors = watched(again)
    own = (await ask_users(again, "rotate", RotateKey(user="bob", days=0), NewKey)).secret
    await shut_out(again, errors)
    await refused(pool, fresh)
    told = (await ask_users(await pool.connected(own), "me", Empty(), UserReply)).user
    assert told.expires is None


async def test_a_revoked_user_is_thrown_out_for_good(pool: SecuredPool) -> None:
    eve, root = await pool.user("eve"), await pool.user("root")
    errors = watched(eve)
    await ask_users(root, "revoke", NameUser(user="eve"), UserReply)
    await shut_out(eve, errors)
    await refused(pool, pool.keys["eve"])
    with pytest.raises(StateError, match="was revoked"):
        await ask_users(root, "rotate", RotateKey(user="eve"), NewKey)
    with pytest.raises(ConflictError, match="there is a user 'eve' already"):
        await ask_users(root, "add", AddUser(user="eve"), NewKey)
    with pytest.raises(StateError, match="cannot revoke himself"):
        await ask_users(root, "revoke", NameUser(user="root"), UserReply)
    done = {(one.who, one.what, one.target) for one in await audit(pool) if one.outcome == "done"}
    assert {("root", "users.add", "eve"), ("root", "users.revoke", "eve")} <= done


async def test_a_key_that_runs_out_closes_its_connections(pool: SecuredPool) -> None:
    root = await pool.user("root")
    names = (f"brief{number}" for number in itertools.count())

    async def let_in() -> tuple[str, str, Broker] | None:
        name = next(names)
        request = AddUser(user=name, days=4 / 86_400)
        key = (await ask_users(root, "add", request, NewKey)).secret
        try:
            return name, key, await pool.connected(key)
        except LogInRefusedError:  # the machine is slow: it is over
            return None

    name, key, broker = await eventually(let_in, "a log-in while the key is good")
    await asyncio.wait_for(broker.closed.wait(), PATIENCE_S)
    with pytest.raises(BrokerError, match=r"is closed: .*authentication expired"):
        await ask_users(broker, "me", Empty(), UserReply)
    with pytest.raises(BrokerError, match=rf"{REFUSED}(.|\n)*expired"):
        await connect(pool.server.url, name="test", api_key=key)
    await until_audited(pool, (name, "a key that has expired"))


async def test_the_quota_is_where_the_scheduler_reads_it(pool: SecuredPool) -> None:
    await pool.user("ada")
    root, scheduler = await pool.user("root"), await pool.service("scheduler")
    await ask_users(root, "quota", SetQuota(user="ada", max_slots=3, weight=2), UserReply)
    record = await UserStore(scheduler).get("ada")
    assert record is not None
    assert (record.max_slots, record.weight) == (3, 2.0)
    await ask_users(root, "quota", SetQuota(user="ada", max_slots=-1), UserReply)
    users = (await ask_users(root, "list", Empty(), UserList)).users
    assert [one.max_slots for one in users if one.user == "ada"] == [None]


async def test_names_that_mean_something_else_are_refused(pool: SecuredPool) -> None:
    root = await pool.user("root")
    for name in ("scheduler", "pool", "job", "a-b", "A", "a.b", "*", ">", "", "x" * 33):
        with pytest.raises(MessageError):
            await ask_users(root, "add", AddUser(user=name), NewKey)


async def test_a_request_that_comes_again_makes_no_second_key(pool: SecuredPool) -> None:
    root = await pool.user("root")
    added = AddUser(user="twice")
    made = await ask_users(root, "add", added, NewKey)
    assert await ask_users(root, "add", added, NewKey) == made
    with pytest.raises(ConflictError, match="already"):
        await ask_users(root, "add", AddUser(user="twice"), NewKey)
    rotated = RotateKey(user="twice")
    fresh = await ask_users(root, "rotate", rotated, NewKey)
    assert fresh.secret != made.secret
    await pool.connected(fresh.secret)
    assert await ask_users(root, "rotate", rotated, NewKey) == fresh
    told = await ask_users(await pool.connected(fresh.secret), "me", Empty(), UserReply)
    assert told.user.user == "twice"


async def test_the_key_of_a_process_is_worth_something_while_its_job_has_it(
    pool: SecuredPool,
) -> None:
    await pool.user("ada")
    scope = await pool.job("ada", "01short")
    secret = pool.secrets.job_secret()
    good = JobIdentity("ada", "01short", "generator", "generator-0", 1)
    await pool.connected(job_key(good, secret))
    for forged in (
        job_key(good, b"another secret"),
        job_key(good, secret).replace(".generator.", ".learner."),
        job_key(good._replace(role="learner"), secret),
        job_key(good._replace(actor="generator-7"), secret),
        job_key(good._replace(attempt=2), secret),
        job_key(good._replace(job="01other"), secret),
    ):
        await refused(pool, forged)
    jobs = JobStore(await pool.service("scheduler"))
    record = await jobs.get("ada", scope.job)
    await jobs.transition(record, "COMPLETED", "done", "test")
    await refused(pool, job_key(good, secret))


async def test_the_end_of_a_job_closes_the_connections_of_its_processes(pool: SecuredPool) -> None:
    ada = await pool.user("ada")
    ended, live = await pool.job("ada", "01ended"), await pool.job("ada", "01lives")
    process, other = await pool.process(ended, "learner"), await pool.process(live, "learner")
    errors = watched(process)
    jobs = JobStore(await pool.service("scheduler"))
    record = await jobs.transition(await jobs.get("ada", ended.job), "COMPLETED", "done", "test")
    await shut_out(process, errors)
    record = await jobs.transition(record, "QUEUED", "resumed", "test", attempt=2)
    identity = JobIdentity("ada", ended.job, "learner", "learner", 2)
    again = await pool.connected(job_key(identity, pool.secrets.job_secret()))
    assert again.is_connected
    assert other.is_connected
    assert ada.is_connected


async def test_who_is_in_stays_while_the_auth_service_is_away(pool: SecuredPool) -> None:
    ada = await pool.user("ada")
    await pool.stop_auth()
    assert ada.is_connected
    reading = asyncio.create_task(JobStore(ada).list_jobs("ada"))
    await asyncio.sleep(0.1)
    assert not reading.done()
    await pool.start_auth()
    await reading

    async def back() -> bool:
        return (await ask_users(ada, "me", Empty(), UserReply)).user.user == "ada"

    await eventually(back, "an answer")


async def test_weights_wait_for_an_auth_service_that_is_away(pool: SecuredPool) -> None:
    scope = await pool.job("ada", "01waits")
    learner = await pool.process(scope, "learner")
    learner.availability.set_patient(True)
    learner.availability.outlasts_refusal = True
    await pool.stop_auth()
    store = ObjectStore(learner, scope.object_weights)
    payload = memoryview(b"weights" * 100_000)
    putting = asyncio.create_task(store.put("v1", [payload], deadline_s=1.0))
    await until(lambda: learner.availability.trouble is not None, "the wait to be told")
    assert not putting.done()
    await pool.start_auth()
    info = await asyncio.wait_for(putting, PATIENCE_S)
    assert info.num_bytes == len(payload)


async def test_everybody_is_let_in_again_after_a_restart_of_the_server(pool: SecuredPool) -> None:
    ada = await pool.user("ada")
    scope = await pool.job("ada", "01again")
    generator = await pool.process(scope, "generator-0")
    pool.server.kill()
    pool.server.start()
    assert await RolloutLog(generator, scope).append(make_group(1))
    assert await RolloutLog(ada, scope).append(make_group(2))
    assert (await JobStore(ada).get("ada", scope.job)).state == "RUNNING"


async def test_a_pool_without_users_has_no_quotas(nats_server: NatsServer) -> None:
    async with await connect(nats_server.url, name="test") as broker:
        assert await UserStore(broker).get("ada") is None


# -- One user who takes all that he can get: it ends at his quota, and the others go on ------------

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
            kind="tinker",  # others are archived, which makes room
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
    with pytest.raises(QuotaError, match="the records of all runs of the pool have"):
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
