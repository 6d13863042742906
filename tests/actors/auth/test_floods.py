"""Somebody with a key who floods the pool, from a process of his own: the others are answered."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from tinkermq.actors.auth.connections import PROGRAM_SUBSCRIPTIONS
from tinkermq.broker.calls import ask_users
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.keys import (
    EpisodeIdentity,
    JobIdentity,
    episode_key,
    episode_secret,
    job_key,
)
from tinkermq.broker.client.login import CREDENTIALS_VARIABLE
from tinkermq.broker.credentials import MAX_SUBSCRIPTIONS
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.user_records import UserStore
from tinkermq.clients.pool import Pool
from tinkermq.schemas.local.process import die_with
from tinkermq.schemas.node import SchedulerLease
from tinkermq.schemas.user import AuditList, AuditRequest, SetQuota, UserReply
from tinkermq.schemas.wire.errors import BrokerError, DeadlineError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_JOBS, BUCKET_LEASES, rpc

from tests.actors.auth.flooding import opened, publication
from tests.support.secured import SecuredPool, secured
from tests.support.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="function")]
FLOODING = Path(__file__).with_name("flooding.py")
NUM_ASKED = 5
NUM_LOG_INS = 10
BOUNDED = {"max_messages_s": 1000}
"""A quota that a flood is over on a busy machine, too: it is ended after some seconds."""
MB = 1 << 20


@contextmanager
def ended_at_last(*command: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process for as long as the block does."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with(os.getpid()),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def flood(pool: SecuredPool, kind: str, user: str, *what: str) -> AsyncIterator[None]:
    """Let a user flood the pool once he is in."""
    address = ("127.0.0.1", str(pool.server.port))
    with ended_at_last(str(FLOODING), kind, *address, pool.keys[user], *what) as process:
        assert process.stdout is not None
        assert (await asyncio.to_thread(process.stdout.readline)).startswith(b"in")
        yield


@asynccontextmanager
async def scheduler_process(pool: SecuredPool) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run a scheduler beside the pool, until it answers and beyond."""
    credentials = {CREDENTIALS_VARIABLE: str(pool.secrets.credentials("scheduler"))}
    command = ("-m", "tinkermq.actors.scheduler", "--nats", pool.server.url)
    with ended_at_last(*command, **credentials) as process:
        ada = Pool(await pool.user("ada"))

        async def answers() -> bool:
            try:
                await ada.quota()
            except BrokerError:
                return False
            return True

        await eventually(answers, "the scheduler to answer")
        yield process


async def refusals(root: Broker, user: str) -> list[str]:
    """Return why a user was refused, as the audit tells an admin."""
    records = (await ask_users(root, "audit", AuditRequest(limit=500), AuditList)).records
    return [one.outcome for one in records if one.who == user and one.what in ("flood", "login")]


async def log_in(pool: SecuredPool, user: str) -> None:
    """Log in anew, and be answered; a machine that is busy may take more than one try."""

    async def attempt() -> bool:
        try:
            async with await connect(pool.server.url, name=user, api_key=pool.keys[user]) as one:
                await ask_users(one, "me", Empty(), UserReply)
        except (BrokerError, DeadlineError):
            return False
        return True

    await eventually(attempt, f"{user} to be let in")


@pytest.mark.long
@pytest.mark.parametrize("num_bytes", [3, 1_000_000])
async def test_a_flood_of_requests_ends_neither_scheduler_nor_the_answers_to_others(
    tmp_path: Path, num_bytes: int
) -> None:
    async with secured(tmp_path) as pool, scheduler_process(pool) as scheduler:
        await pool.user("mallory")
        ada, root = Pool(await pool.user("ada")), await pool.user("root")
        low = SetQuota(user="mallory", max_messages_s=1000, max_bytes_s=4 << 20)
        await ask_users(root, "quota", low, UserReply)  # a busy machine's flood is over it, too
        leases = Bucket(await pool.service("scheduler"), BUCKET_LEASES, SchedulerLease)
        before = await leases.get("scheduler")
        subject = rpc("mallory", "scheduler", "list")
        async with flood(pool, "publish", "mallory", subject, str(num_bytes)):
            for _ in range(NUM_ASKED):
                await ada.all_jobs()
                await ask_users(ada.broker, "me", Empty(), UserReply)

            async def told() -> bool:
                return any(
                    "a second, the quota is" in one for one in await refusals(root, "mallory")
                )

            await eventually(told, "the flood to be noticed")
            await ada.all_jobs()
        after = await leases.get("scheduler")
        assert scheduler.poll() is None
        assert before is not None
        assert after is not None
        assert after.value.holder == before.value.holder


@pytest.mark.long
async def test_log_ins_of_one_user_without_end_do_not_shut_the_others_out(tmp_path: Path) -> None:
    async with secured(tmp_path) as pool:
        root = await pool.user("root")
        for user in ("ada", "mallory"):
            await pool.user(user)
        async with flood(pool, "connect", "mallory", "1000"):
            for _ in range(NUM_ASKED):
                await log_in(pool, "ada")

            async def told() -> bool:
                return any("the quota is 64" in one for one in await refusals(root, "mallory"))

            await eventually(told, "the refusals to be told")


async def test_a_flood_that_breaks_the_connection_of_requests_breaks_nothing_else(
    tmp_path: Path,
) -> None:
    async with secured(tmp_path, extra_config="max_pending: 8MB") as pool:
        await pool.user("ada")
        await pool.user("mallory")
        lost = asyncio.Event()
        assert pool.auth_broker is not None
        pool.auth_broker.on_disconnect(lost.set)
        assert pool.server.port is not None
        address = ("127.0.0.1", pool.server.port, pool.keys["mallory"])
        with await asyncio.to_thread(opened, *address) as connection:
            for _ in range(64):  # nobody reads meanwhile: the auth service shares this loop
                connection.sendall(
                    publication(rpc("mallory", "users", "me"), "_INBOX.no", b"x" * MB)
                )
        async with await pool.connected(pool.keys["ada"]) as ada:
            await ask_users(ada, "me", Empty(), UserReply)
        assert not lost.is_set()


@pytest.mark.long
async def test_log_ins_and_answers_of_others_come_through_while_one_user_floods_without_end(
    tmp_path: Path,
) -> None:
    async with secured(tmp_path) as pool:
        for user in ("ada", "mallory"):
            await pool.user(user)
        root = await pool.user("root")
        without_end = SetQuota(user="mallory", max_messages_s=-1, max_bytes_s=-1)
        await ask_users(root, "quota", without_end, UserReply)
        kept = f"{rpc('mallory', 'store', 'get')}.KV_{BUCKET_JOBS}.$KV.{BUCKET_JOBS}.mallory.none"
        async with (
            flood(pool, "publish", "mallory", rpc("mallory", "users", "me"), "3"),
            flood(pool, "publish", "mallory", kept, "3"),
        ):
            for _ in range(NUM_LOG_INS):  # each within the server's time-out, at the first try
                await (await pool.connected(pool.keys["ada"])).close()
            users = UserStore(await pool.service("auth"))
            await users.change("mallory", lambda one: one.model_copy(update=BOUNDED))
            for _ in range(NUM_ASKED):  # each within the client's
                async with await pool.connected(pool.keys["ada"]) as ada:
                    await ask_users(ada, "me", Empty(), UserReply)
                    assert await JobStore(ada).list_jobs("ada") == []


@pytest.mark.long
async def test_4096_log_ins_of_one_user_do_not_shut_the_others_out(tmp_path: Path) -> None:
    async with secured(tmp_path) as pool:
        for user in ("ada", "mallory"):
            await pool.user(user)
        async with flood(pool, "connect", "mallory", "4096"):
            for _ in range(3):
                await log_in(pool, "ada")


async def test_a_user_has_so_many_connections_as_the_quota_allows(tmp_path: Path) -> None:
    async with secured(tmp_path) as pool:
        await pool.user("bob")
        root = await pool.user("root")
        await ask_users(root, "quota", SetQuota(user="bob", max_connections=3), UserReply)

        async def refused() -> bool:
            try:
                await pool.connected(pool.keys["bob"])
            except BrokerError:
                return True
            return False

        await eventually(refused, "the fourth connection to be refused")

        async def told() -> bool:  # a refusal is answered before it is written down
            return any("connections, the quota is 3" in one for one in await refusals(root, "bob"))

        await eventually(told, "the refusal to be written down")
        await ask_users(root, "quota", SetQuota(user="bob", max_connections=-1), UserReply)

        async def let_in() -> bool:
            return not await refused()

        await eventually(let_in, "a further connection to be let in")


async def test_who_subscribes_to_more_than_the_quota_allows_is_shut_out(tmp_path: Path) -> None:
    async with secured(tmp_path) as pool:
        bob, root = await pool.user("bob"), await pool.user("root")
        await ask_users(root, "quota", SetQuota(user="bob", max_subscriptions=50), UserReply)
        for number in range(200):
            await bob.listen(f"_INBOX_bob.{number}", lambda _: None)

        async def told() -> bool:
            return any(
                "subscriptions, the quota is 50" in one for one in await refusals(root, "bob")
            )

        await eventually(told, "the refusal")
        with pytest.raises(BrokerError):
            await pool.connected(pool.keys["bob"])


async def subscribe(pool: SecuredPool, key: str, subject: str, num: int) -> bytes:
    """Subscribe with a key without end; return what the server says when it has enough."""
    assert pool.server.port is not None
    with await asyncio.to_thread(opened, "127.0.0.1", pool.server.port, key) as connection:
        asked = b"".join(b"SUB %s.%d %d\r\n" % (subject.encode(), n, n) for n in range(num))
        connection.sendall(asked)
        said = b""
        while b"-ERR" not in said and (more := await asyncio.to_thread(connection.recv, 65536)):
            said += more
        return said


async def test_no_process_of_a_job_fills_the_memory_of_the_server_with_subscriptions(
    tmp_path: Path,
) -> None:
    async with secured(tmp_path) as pool:
        await pool.user("mallory")
        root, scope = await pool.user("root"), await pool.job("mallory", "01mine")
        secret = pool.secrets.job_secret()
        host = JobIdentity("mallory", "01mine", "environment", "environment-0", 1)
        games = f"{scope.env('host', 'x')}"
        said = await subscribe(pool, job_key(host, secret), games, MAX_SUBSCRIPTIONS + 1)
        assert b"maximum subscriptions exceeded" in said
        episode = EpisodeIdentity("mallory", "01mine", "e")
        key = episode_key(episode, episode_secret("mallory", "01mine", secret))
        num = PROGRAM_SUBSCRIPTIONS + 1
        await subscribe(pool, key, scope.episode_inbox("e"), num)

        async def told() -> bool:
            records = (await ask_users(root, "audit", AuditRequest(limit=99), AuditList)).records
            return any(f"{num} subscriptions, a program may" in one.outcome for one in records)

        await eventually(told, "the refusal")


async def test_what_a_flood_leaves_waiting_is_refused_to_its_user_alone(tmp_path: Path) -> None:
    async with secured(tmp_path) as pool:
        eager, ada = await pool.user("eager"), await pool.user("ada")
        calls = [ask_users(eager, "me", Empty(), UserReply) for _ in range(180)]
        flooding = asyncio.gather(*calls, return_exceptions=True)
        for _ in range(NUM_ASKED):
            await ask_users(ada, "me", Empty(), UserReply)
        answers = await flooding
        kinds = {type(one).__name__ for one in answers}
        assert kinds <= {"UserReply", "BusyError"}
        assert "UserReply" in kinds, kinds
