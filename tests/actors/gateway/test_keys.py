"""Where the broker asks for keys, each visitor has the rights of their own key and no others."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import pytest_asyncio
from tinkermq.actors.gateway.rest import OPERATIONS
from tinkermq.actors.gateway.sessions import LogInError, Sessions, user_of
from tinkermq.actors.runtime import EXIT_FAILED
from tinkermq.actors.storage.access import ROOTS_VARIABLE
from tinkermq.broker.calls import ask_users
from tinkermq.broker.client.keys import new_api_key
from tinkermq.broker.client.login import (
    CREDENTIALS_VARIABLE,
)
from tinkermq.broker.jetstream.streams import create_shared
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.user import AddUser, NameUser, NewKey, UserReply

from tests.support.browser import Browser, watched_page
from tests.support.certificates import self_signed
from tests.support.gateway import Gateway, run_gateway, start
from tests.support.hollow_model import hollow_model
from tests.support.secured import SecuredPool, environment, secured
from tests.support.waiting import PATIENCE_S, eventually, until

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


@dataclass(frozen=True)
class Guarded:
    """A gateway to a pool with two users, each with a job."""

    gateway: Gateway
    pool: SecuredPool

    @property
    def credentials(self) -> str:
        return str(self.pool.secrets.credentials("gateway"))

    def key(self, user: str) -> str:
        return self.pool.keys[user]

    def bearer(self, user: str) -> dict[str, str]:
        return bearer(self.key(user))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    """A gateway to a secured pool with a scheduler and no nodes."""
    folder = tmp_path_factory.mktemp("guarded")
    async with secured(folder) as pool:
        await create_shared(await pool.service("scheduler"))
        for user in ("alice", "bob"):
            await pool.user(user)
            await pool.job(user, f"job-of-{user}")
        scheduler = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinkermq.actors.scheduler", "--nats", pool.server.url),
            env={
                **os.environ,
                CREDENTIALS_VARIABLE: str(pool.secrets.credentials("scheduler")),
                ROOTS_VARIABLE: str(tmp_path_factory.getbasetemp()),
            },
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            with environment(**{CREDENTIALS_VARIABLE: str(pool.secrets.credentials("gateway"))}):
                async with run_gateway(pool.server.url, folder) as gateway:
                    made = Guarded(gateway, pool)

                    async def answers() -> bool:
                        answer = await gateway.get("/api/v1/jobs", **made.bearer("alice"))
                        return answer.status == 200

                    await eventually(answers, "the scheduler to answer")
                    yield made
        finally:
            scheduler.terminate()
            await scheduler.wait()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_each_key_shows_the_jobs_of_its_own_user(guarded: Guarded) -> None:
    for own, other in (("alice", "bob"), ("bob", "alice")):
        key = guarded.key(own)
        listed = (await guarded.gateway.get("/api/v1/jobs", **bearer(key))).json["jobs"]
        assert [one["job"] for one in listed] == [f"job-of-{own}"]
        for told in (bearer(key), {"x_api_key": key}):
            assert (await guarded.gateway.get("/api/v1/whoami", **told)).json == {"user": own}
        base = f"/jobs/job-of-{other}"
        for operation in OPERATIONS:  # every one that is about a job
            if not operation.path.startswith("/api/v1/jobs/{job}"):
                continue
            path = operation.path.replace("{job}", f"job-of-{other}")
            path = re.sub(r"{\w+:int}", "1", path)
            ask = getattr(guarded.gateway, operation.method.lower())
            more = () if operation.method == "GET" else (_BODIES.get(path.rpartition("/")[2], {}),)
            answer = await ask(path, *more, **bearer(key))
            assert answer.status == 404, (operation, answer.text)
        for part in ("", "/rollouts", "/rollouts/1/0", "/logs", "/events", "/config"):
            assert (await guarded.gateway.get(base + part, **bearer(key))).status == 404
        for action, fields in _BODIES.items():
            form = urlencode(fields).encode()
            cookie = await logged_in(guarded, own)
            answer = await guarded.gateway.form(f"{base}/{action}", form, cookie=cookie)
            assert answer.status == 404
        config = {"model": {"path": "m"}, "env": {"game": "bandit"}}
        forked = {"config": config, "fork_of": f"job-of-{other}@1"}
        assert (await guarded.gateway.post("/api/v1/jobs", forked, **bearer(key))).status == 404
        chat = {"model": f"job-of-{other}", "messages": [{"role": "user", "content": "hi"}]}
        assert (
            await guarded.gateway.post("/v1/chat/completions", chat, **bearer(key))
        ).status == 404


_BODIES: dict[str, dict[str, Any]] = {
    "stop": {"now": "true"},
    "pause": {},
    "resume": {},
    "scale": {"role": "generator", "count": 2},
    "priority": {"priority": 3},
    "failed": {"decision": "drop", "tasks": "1"},
}


async def logged_in(guarded: Guarded, user: str) -> str:
    """Return the cookie of a session."""
    answer = await guarded.gateway.form("/login", f"key={guarded.key(user)}".encode())
    return answer.headers["set-cookie"].split(";")[0]


async def test_a_key_that_was_replaced_opens_nothing(guarded: Guarded) -> None:
    await guarded.pool.user("rosa")
    old = guarded.bearer("rosa")
    assert (await guarded.gateway.get("/api/v1/whoami", **old)).status == 200
    told = await guarded.gateway.post("/api/v1/users/rotate", {"user": "rosa"}, **old)
    assert told.status == 200, told.text

    async def refused() -> bool:
        return (await guarded.gateway.get("/api/v1/whoami", **old)).status == 401

    await eventually(refused, "the old key to be refused")
    fresh = bearer(told.json["secret"])
    assert (await guarded.gateway.get("/api/v1/whoami", **fresh)).json == {"user": "rosa"}


async def test_an_admin_is_told_how_to_look_into_the_job_of_somebody_else(guarded: Guarded) -> None:
    admin = bearer(guarded.pool.admin_key)
    for part in ("", "/logs", "/rollouts", "/stream"):
        answer = await guarded.gateway.get(f"/api/v1/jobs/job-of-alice{part}", **admin)
        assert answer.status == 403
        assert "TINKERMQ_AS=alice" in answer.json["error"]["hint"]
    assert (await guarded.gateway.get("/jobs/job-of-alice", **admin)).status == 403


async def test_an_admin_sees_who_waits_and_a_user_only_the_own_jobs(
    guarded: Guarded, tmp_path: Path
) -> None:
    admin = bearer(guarded.pool.admin_key)
    config = {
        "model": {"path": hollow_model()},
        "env": {"game": "bandit", "hosts": 0, "num_val": 0},
        "output_dir": str(tmp_path),
    }
    await guarded.pool.user("erin")
    erin, bob = guarded.bearer("erin"), guarded.bearer("bob")
    submitted = await guarded.gateway.post("/api/v1/jobs", {"config": config}, **erin)
    job = submitted.json["job"]
    try:
        for who, seen in ((admin, True), (erin, True), (bob, False)):
            queue = (await guarded.gateway.get("/api/v1/queue", **who)).json["queue"]
            assert (job in {one["job"] for one in queue}) is seen
        assert job in (await guarded.gateway.get("/pool", **admin)).text
    finally:
        stopped = await guarded.gateway.form(f"/jobs/{job}/stop", b"now=true", **admin)
    assert (stopped.status, stopped.headers["location"]) == (303, "/pool")
    told = (await guarded.gateway.get(f"/api/v1/jobs/{job}", **erin)).json
    assert (told["stop"], told["stopped_by"]) == ("now", "user root")


@pytest.mark.parametrize(
    "key", [f"tmq_alice_{'x' * 43}", "tmq_alice_short", "nonsense", "tmq__", ""]
)
async def test_a_wrong_key_is_refused(guarded: Guarded, key: str) -> None:
    answer = await guarded.gateway.get("/api/v1/jobs", **bearer(key))
    assert answer.status == 401
    assert answer.json["error"]["code"] == "unauthorized"


async def test_without_a_key_pages_lead_to_the_log_in_and_the_interface_refuses(
    guarded: Guarded,
) -> None:
    page = await guarded.gateway.get("/jobs?state=failed")
    assert page.status == 303
    assert page.headers["location"] == "/login?next=%2Fjobs%3Fstate%3Dfailed"
    assert (await guarded.gateway.get("/api/v1/jobs")).status == 401
    health = (await guarded.gateway.get("/healthz")).json
    assert health["with_keys"]
    figures = await guarded.gateway.get("/metrics")
    assert figures.status == 200
    assert "tinkermq_jobs" not in figures.text
    assert (
        "tinkermq_jobs" in (await guarded.gateway.get("/metrics", **guarded.bearer("alice"))).text
    )


async def test_the_session_cookie_is_kept_from_scripts_and_other_sites(guarded: Guarded) -> None:
    answer = await guarded.gateway.form("/login", f"key={guarded.key('alice')}".encode())
    assert answer.status == 303
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert guarded.key("alice") not in cookie
    session = cookie.split(";")[0]
    assert "run-job-of-alice" in (await guarded.gateway.get("/jobs", cookie=session)).text
    assert (await guarded.gateway.post("/logout", {}, cookie=session)).status == 403
    assert (await guarded.gateway.form("/logout", b"", cookie=session)).status == 303
    assert (await guarded.gateway.get("/jobs", cookie=session)).status == 303


@pytest.mark.parametrize("place", ["//evil.example", "https://evil.example", "/\\evil.example"])
async def test_the_log_in_leads_to_our_own_pages_only(guarded: Guarded, place: str) -> None:
    answer = await guarded.gateway.form(
        f"/login?next={place}", f"key={guarded.key('alice')}".encode()
    )
    assert answer.headers["location"] == "/jobs"


async def test_with_a_certificate_everything_is_encrypted_and_cookies_are_for_nothing_else(
    guarded: Guarded, tmp_path: Path
) -> None:
    with environment(**{CREDENTIALS_VARIABLE: guarded.credentials}):
        async with run_gateway(
            guarded.pool.server.url, tmp_path, tls=self_signed(tmp_path)
        ) as gateway:
            answer = await gateway.form("/login", f"key={guarded.key('alice')}".encode())
            assert answer.status == 303
            cookie = answer.headers["set-cookie"]
            assert "Secure" in cookie
            page = await gateway.get("/jobs", cookie=cookie.split(";")[0])
            assert "run-job-of-alice" in page.text
            stranger = Gateway(gateway.url, gateway.process, gateway.log)
            with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("/healthz")
            plain = Gateway(gateway.url.replace("https", "http"), gateway.process, gateway.log)
            with pytest.raises((OSError, HTTPException)):
                await plain.get("/healthz")


async def test_behind_a_proxy_that_speaks_tls_cookies_are_for_nothing_else(
    guarded: Guarded, tmp_path: Path
) -> None:
    with environment(**{CREDENTIALS_VARIABLE: guarded.credentials}):
        async with run_gateway(guarded.pool.server.url, tmp_path, "--behind-tls") as gateway:
            answer = await gateway.form("/login", f"key={guarded.key('alice')}".encode())
            assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (("--certificate",), "must be used together"),
        (("--certificate", "--certificate-key"), "be used"),
    ],
)
async def test_a_certificate_that_cannot_be_used_is_refused(
    tmp_path: Path, files: tuple[str, ...], told: str
) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    words = [word for name in files for word in (name, str(broken))]
    process = start("nats://127.0.0.1:1", tmp_path, *words)
    assert await asyncio.to_thread(process.wait, PATIENCE_S) == EXIT_FAILED
    assert told in (tmp_path / "gateway.log").read_text()


async def test_the_user_of_a_key_may_have_underscores() -> None:
    assert user_of(new_api_key("a_b_c")) == "a_b_c"
    for key in ("tmq_secret", "tmq_A_secret", "tmq_a.b_secret", "x_a_secret", "tmq_a_" + "s" * 300):
        with pytest.raises(LogInError):
            user_of(key)


async def test_a_revoked_key_ends_the_session(guarded: Guarded) -> None:
    await guarded.pool.user("carol")
    session = await logged_in(guarded, "carol")
    assert (await guarded.gateway.get("/jobs", cookie=session)).status == 200
    admin = await guarded.pool.connected(guarded.pool.admin_key)
    await ask_users(admin, "revoke", NameUser(user="carol"), UserReply)

    async def shut_out() -> bool:
        return (await guarded.gateway.get("/jobs", cookie=session)).status == 303

    await eventually(shut_out, "the session to end")
    assert (await guarded.gateway.get("/jobs", **guarded.bearer("carol"))).status == 303


_PATHS = ("whoami", "nodes", "jobs/{job}/metrics", "jobs/{job}/events")


@pytest.mark.parametrize("of", ["feed", "log"])
async def test_requests_and_streams_under_way_end_with_a_revoked_key(
    guarded: Guarded, of: str
) -> None:
    user = f"ann_{of}"
    await guarded.pool.user(user)
    job = f"job-of-{user}"
    await guarded.pool.job(user, job)
    own, statuses = guarded.bearer(user), list[tuple[str, int, str]]()
    has_ended = asyncio.Event()

    async def is_known() -> bool:
        return (await guarded.gateway.get(f"/api/v1/jobs/{job}", **own)).status == 200

    async def follow() -> None:
        """Read a stream of events to its end."""
        stream = await guarded.gateway.get(f"/api/v1/jobs/{job}/stream?of={of}", **own)
        assert stream.status == 200

    async def go_on_asking(path: str) -> None:
        while not has_ended.is_set():
            answer = await guarded.gateway.get(path, **own)
            statuses.append((path, answer.status, answer.text[:200]))

    await eventually(is_known, "the scheduler to know the job")
    stream = asyncio.create_task(follow())
    asking = [
        asyncio.create_task(go_on_asking(f"/api/v1/{path.format(job=job)}")) for path in _PATHS
    ]
    await until(lambda: len({path for path, _, _ in statuses}) == len(_PATHS), "all to answer")
    assert not stream.done()
    admin = await guarded.pool.connected(guarded.pool.admin_key)
    await ask_users(admin, "revoke", NameUser(user=user), UserReply)
    await asyncio.wait_for(stream, PATIENCE_S)
    await until(
        lambda: len({path for path, status, _ in statuses if status == 401}) == len(_PATHS),
        "all to be shut out",
    )
    has_ended.set()
    await asyncio.gather(*asking)
    assert not [one for one in statuses if one[1] not in (200, 401)]


async def test_a_key_that_has_run_out_is_told_to_be_expired_or_wrong(guarded: Guarded) -> None:
    admin = await guarded.pool.connected(guarded.pool.admin_key)
    added = AddUser(user="brief", days=1 / 86_400)
    key = (await ask_users(admin, "add", added, NewKey)).secret

    async def shut_out() -> bool:
        return (await guarded.gateway.get("/api/v1/jobs", **bearer(key))).status == 401

    await eventually(shut_out, "the key to run out")
    error = (await guarded.gateway.get("/api/v1/jobs", **bearer(key))).json["error"]
    assert error["message"] == "the broker refuses this key"
    assert "expired" in error["hint"]
    assert "tinkermq user rotate" in error["hint"]


async def test_an_admin_manages_users_and_reads_the_audit_in_the_browser(
    guarded: Guarded, browser: Browser
) -> None:
    async with watched_page(browser, guarded.gateway.url) as page:
        await page.goto("/users")
        await page.fill("input[name=key]", guarded.pool.admin_key)
        await page.click("main button[type=submit]")
        await page.wait_for_url("**/users")
        await page.fill("form[action='/users/add'] input[name=user]", "dave")
        await page.fill("form[action='/users/add'] input[name=max_slots]", "3")
        await page.click("form[action='/users/add'] button")
        key = await page.inner_text("#new-key")
        assert (await guarded.gateway.get("/api/v1/whoami", **bearer(key))).json == {"user": "dave"}
        assert "users.add" in await page.inner_text("main")
        row = page.locator("tr", has_text="dave").first
        assert await row.locator("input[name=max_slots]").input_value() == "3"
        await row.locator("form[action='/users/revoke'] button").click()
        await page.wait_for_function("() => document.body.innerText.includes('revoked 20')")

    async def shut_out() -> bool:
        return (await guarded.gateway.get("/api/v1/whoami", **bearer(key))).status == 401

    await eventually(shut_out, "the revoked key to be refused")


async def test_a_user_sees_the_own_record_and_may_not_manage_others(guarded: Guarded) -> None:
    own = guarded.bearer("alice")
    text = (await guarded.gateway.get("/users", **own)).text
    assert "Replace my key" in text
    assert "Audit" not in text
    for path in ("/api/v1/users", "/api/v1/audit"):
        assert (await guarded.gateway.get(path, **own)).status == 403
    refused = await guarded.gateway.post("/api/v1/users/revoke", {"user": "bob"}, **own)
    assert refused.status == 403
    malformed = await guarded.gateway.post("/api/v1/users/add", {"name": "x"}, **own)
    assert malformed.status == 400


async def test_openai_s_endpoints_ask_for_a_key_in_their_own_words(guarded: Guarded) -> None:
    assert (await guarded.gateway.get("/v1/models")).status == 401
    answer = await guarded.gateway.get("/v1/models", **guarded.bearer("alice"))
    assert answer.json == {"object": "list", "data": []}
    nowhere = await guarded.gateway.get("/v1/nope", **guarded.bearer("alice"))
    assert nowhere.status == 404
    assert nowhere.json["error"]["type"] == "not_found_error"


async def test_idle_connections_make_room_for_others(own_server: NatsServer) -> None:
    sessions = Sessions(own_server.url, with_keys=False, max_visitors=1)
    first = await sessions.visitor(session=None, key=None)
    assert await sessions.visitor(session=None, key="ignored") is first
    await sessions.close()
    assert first.broker.closed.is_set()
    assert sessions.num_visitors == 0
