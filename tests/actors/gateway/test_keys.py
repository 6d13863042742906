"""Where the broker asks for keys, each visitor has the rights of their own key and no others."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tinkermq.actors.gateway.sessions import LogInError, Sessions, user_of
from tinkermq.broker.connection import connect
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.server import NatsServer
from tinkermq.broker.streams import create_shared
from tinkermq.schemas.job import JobRecord

from tests.browser import Browser, watched_page
from tests.gateway import Gateway, run_gateway
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALICE, BOB = "tmq_alice_5ecret", "tmq_bob_5ecret"
_USERS = """
authorization {{
  users = [
    {{ user: admin, password: admin }}
    {alice}
    {bob}
  ]
}}
"""


def _user(name: str, key: str) -> str:
    allowed = (
        f"tmq.v1.rpc.{name}.>", f"tmq.v1.job.{name}.>", "$JS.API.INFO",
        f"$JS.API.DIRECT.GET.tmq-{name}-*", f"$JS.API.DIRECT.GET.tmq-{name}-*.>",
        f"$JS.API.STREAM.INFO.tmq-{name}-*", f"$JS.API.CONSUMER.*.tmq-{name}-*",
        f"$JS.API.CONSUMER.*.tmq-{name}-*.>",
    )  # fmt: skip
    subjects = ", ".join(f'"{subject}"' for subject in allowed)
    return (
        f"{{ user: {name}, password: {key}, permissions: "
        f'{{ publish: [{subjects}], subscribe: ["_INBOX_{name}.>"] }} }}'
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway to a broker with two users, each with a job in a scheduler without nodes."""
    folder = tmp_path_factory.mktemp("guarded")
    users = _USERS.format(alice=_user("alice", ALICE), bob=_user("bob", BOB))
    with NatsServer(folder / "nats", extra_config=users) as server:
        url = server.url.replace("//", "//admin:admin@")
        async with await connect(url, name="test") as admin:
            await create_shared(admin)
            for user in ("alice", "bob"):
                record = JobRecord(
                    job=f"job-of-{user}",
                    name=f"run-of-{user}",
                    user=user,
                    state="CANCELLED",
                    config={},
                    created=1.0,
                )
                with contextlib.suppress(Exception):  # it has no streams to tell its event on
                    await JobStore(admin).create(record, "test")
        scheduler = await asyncio.create_subprocess_exec(
            *_scheduler(url), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with run_gateway(server.url, folder) as gateway:

                async def answers() -> bool:
                    return (await gateway.get("/api/v1/jobs", **bearer(ALICE))).status == 200

                await eventually(answers, "the scheduler to answer")
                yield gateway
        finally:
            scheduler.terminate()
            await scheduler.wait()


def _scheduler(url: str) -> list[str]:
    return [sys.executable, "-m", "tinkermq.actors.scheduler", "--nats", url]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_each_key_shows_the_jobs_of_its_own_user(guarded: Gateway) -> None:
    for key, own, other in ((ALICE, "alice", "bob"), (BOB, "bob", "alice")):
        listed = (await guarded.get("/api/v1/jobs", **bearer(key))).json["jobs"]
        assert [one["name"] for one in listed] == [f"run-of-{own}"]
        assert (await guarded.get("/api/v1/whoami", **bearer(key))).json == {"user": own}
        for part in ("", "/metrics", "/logs", "/rollouts", "/config", "/checkpoints/1"):
            path = f"/api/v1/jobs/job-of-{other}{part}"
            assert (await guarded.get(path, **bearer(key))).status == 404
        answer = await guarded.post(f"/api/v1/jobs/job-of-{other}/resume", {}, **bearer(key))
        assert answer.status == 404


@pytest.mark.parametrize("key", ["tmq_alice_wrong", "tmq_bob_5ecreT", "nonsense", "tmq__", ""])
async def test_a_wrong_key_is_refused(guarded: Gateway, key: str) -> None:
    answer = await guarded.get("/api/v1/jobs", **bearer(key))
    assert answer.status == 401
    assert answer.json["error"]["code"] == "unauthorized"


async def test_without_a_key_pages_lead_to_the_log_in_and_the_interface_refuses(
    guarded: Gateway,
) -> None:
    page = await guarded.get("/jobs?state=failed")
    assert page.status == 303
    assert page.headers["location"] == "/login?next=%2Fjobs%3Fstate%3Dfailed"
    assert (await guarded.get("/api/v1/jobs")).status == 401
    health = (await guarded.get("/healthz")).json
    assert health["with_keys"]
    figures = await guarded.get("/metrics")
    assert figures.status == 200
    assert "tinkermq_jobs" not in figures.text
    assert "tinkermq_jobs" in (await guarded.get("/metrics", **bearer(ALICE))).text


async def test_the_session_cookie_is_kept_from_scripts_and_other_sites(guarded: Gateway) -> None:
    answer = await guarded.form("/login", f"key={ALICE}".encode())
    assert answer.status == 303
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert ALICE not in cookie
    session = cookie.split(";")[0]
    assert "run-of-alice" in (await guarded.get("/jobs", cookie=session)).text
    assert (await guarded.post("/logout", {}, cookie=session)).status == 403
    assert (await guarded.form("/logout", b"", cookie=session)).status == 303
    assert (await guarded.get("/jobs", cookie=session)).status == 303


@pytest.mark.parametrize("place", ["//evil.example", "https://evil.example", "/\\evil.example"])
async def test_the_log_in_leads_to_our_own_pages_only(guarded: Gateway, place: str) -> None:
    answer = await guarded.form(f"/login?next={place}", f"key={ALICE}".encode())
    assert answer.headers["location"] == "/jobs"


async def test_two_users_in_two_browsers_see_their_own(guarded: Gateway, browser: Browser) -> None:
    async with (
        watched_page(browser, guarded.url) as alice,
        watched_page(browser, guarded.url) as bob,
    ):
        for page, key in ((alice, ALICE), (bob, BOB)):
            await page.goto("/jobs")
            await page.fill("input[name=key]", key)
            await page.click("main button[type=submit]")
            await page.wait_for_url("**/jobs")
        assert await alice.locator("a.name").all_inner_texts() == ["run-of-alice"]
        assert await bob.locator("a.name").all_inner_texts() == ["run-of-bob"]
        assert await alice.inner_text(".who") == "alice"
        await alice.click("text=Log out")
        await alice.wait_for_url("**/login")
        await bob.reload()
        assert await bob.inner_text(".who") == "bob"


async def test_the_user_of_a_key_may_have_underscores() -> None:
    assert user_of("tmq_a_b_c_secret") == "a_b_c"
    for key in ("tmq_secret", "tmq_A_secret", "tmq_a.b_secret", "x_a_secret", "tmq_a_" + "s" * 300):
        with pytest.raises(LogInError):
            user_of(key)


async def test_idle_connections_make_room_for_others(own_server: NatsServer) -> None:
    sessions = Sessions(own_server.url, with_keys=False, max_visitors=1)
    first = await sessions.visitor(session=None, key=None)
    assert await sessions.visitor(session=None, key="ignored") is first
    await sessions.close()
    assert first.broker.closed.is_set()
    assert sessions.num_visitors == 0
