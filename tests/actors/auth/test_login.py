"""Who is let in and who is not; keys that are replaced, revoked or run out."""

import asyncio
import time

import pytest
from tinkermq.broker.calls import ask_users
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.keys import JobIdentity, job_key, new_api_key
from tinkermq.broker.client.login import Login
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.broker.jetstream.objects import ObjectStore
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.user_records import UserStore
from tinkermq.schemas.user import (
    AddUser,
    AuditList,
    AuditRecord,
    AuditRequest,
    Invite,
    NameUser,
    NewKey,
    Register,
    RotateKey,
    SetQuota,
    UserList,
    UserReply,
)
from tinkermq.schemas.wire.errors import (
    AuthError,
    BrokerError,
    ConflictError,
    MessageError,
    StateError,
)
from tinkermq.schemas.wire.message import Empty

from tests.support.secured import SecuredPool
from tests.support.strategies import make_group
from tests.support.waiting import PATIENCE_S, eventually, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
REFUSED = "refuses this user"


async def audit(pool: SecuredPool) -> list[AuditRecord]:
    root = await pool.user("root")
    return (await ask_users(root, "audit", AuditRequest(limit=1000), AuditList)).records[::-1]


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
    outcomes = {(one.who, one.outcome) for one in await audit(pool)}
    assert {("ada", "an unknown key"), ("root", "the key of another user")} <= outcomes


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
    request = AddUser(user="brief", days=4 / 86_400)
    key = (await ask_users(root, "add", request, NewKey)).secret
    broker = await pool.connected(key)
    await asyncio.wait_for(broker.closed.wait(), PATIENCE_S)
    with pytest.raises(BrokerError, match=r"is closed: .*authentication expired"):
        await ask_users(broker, "me", Empty(), UserReply)
    with pytest.raises(BrokerError, match=rf"{REFUSED}(.|\n)*expired"):
        await connect(pool.server.url, name="test", api_key=key)
    outcomes = {(one.who, one.what, one.outcome) for one in await audit(pool)}
    assert ("brief", "login", "a key that has expired") in outcomes


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
    added, invited = AddUser(user="twice"), Invite(uses=1)
    made = await ask_users(root, "add", added, NewKey)
    assert await ask_users(root, "add", added, NewKey) == made
    with pytest.raises(ConflictError, match="already"):
        await ask_users(root, "add", AddUser(user="twice"), NewKey)
    rotated = RotateKey(user="twice")
    fresh = await ask_users(root, "rotate", rotated, NewKey)
    assert fresh.secret != made.secret
    await pool.connected(fresh.secret)
    assert await ask_users(root, "rotate", rotated, NewKey) == fresh
    code = await ask_users(root, "invite", invited, NewKey)
    assert await ask_users(root, "invite", invited, NewKey) == code
    guest = await pool.connected(code.secret)
    registered = Register(code=code.secret, user="once")
    key = await ask_users(guest, "register", registered, NewKey)
    assert await ask_users(guest, "register", registered, NewKey) == key
    with pytest.raises(ConflictError, match="already"):
        await ask_users(guest, "register", Register(code=code.secret, user="once"), NewKey)
    for one in (fresh, key):
        told = await ask_users(await pool.connected(one.secret), "me", Empty(), UserReply)
        assert told.user.user == one.user


async def test_who_has_an_invitation_may_register_and_nothing_else(pool: SecuredPool) -> None:
    root = await pool.user("root")
    code = (await ask_users(root, "invite", Invite(uses=1, max_slots=2), NewKey)).secret
    guest = await pool.connected(code)
    with pytest.raises(BrokerError, match="may not publish"):
        await ask_users(guest, "list", Empty(), UserList)
    with pytest.raises(ConflictError):
        await ask_users(guest, "register", Register(code=code, user="root"), NewKey)
    key = (await ask_users(guest, "register", Register(code=code, user="zoe"), NewKey)).secret
    told = (await ask_users(await pool.connected(key), "me", Empty(), UserReply)).user
    assert (told.role, told.max_slots) == ("user", 2)
    with pytest.raises(AuthError, match="used up"):
        await ask_users(guest, "register", Register(code=code, user="zoe2"), NewKey)
    with pytest.raises(BrokerError, match=rf"{REFUSED}: the invitation is .*used up") as spent:
        await connect(pool.server.url, name="test", api_key=code)
    assert "tinkermq user invite" in spent.value.hint


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


@pytest.mark.long
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
