"""An empty key opens nothing, whatever key stood in the environment of who is asked."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.errors import Error as NatsError
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.login import AS_VARIABLE, KEY_VARIABLE
from tinkermq.broker.jetstream.streams import create_shared
from tinkermq.clients import SchedulerClient
from tinkermq.schemas.local.process import die_with
from tinkermq.schemas.wire.errors import AuthError

from tests.support.gateway import Gateway, run_gateway
from tests.support.secured import SecuredPool, environment, secured

pytestmark = pytest.mark.asyncio(loop_scope="session")

EMPTY = ("", " ", "%20", "%00", "%0A", "tmq__", "tmq_root_")


@dataclass(frozen=True)
class ByHand:
    """A gateway that an admin started with his own key in the environment."""

    gateway: Gateway
    pool: SecuredPool


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def by_hand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ByHand]:
    folder = tmp_path_factory.mktemp("by-hand")
    async with secured(folder) as pool:
        await create_shared(await pool.service("scheduler"))
        of_admin = {KEY_VARIABLE: pool.admin_key, AS_VARIABLE: "ada"}
        async with AsyncExitStack() as stack:
            with environment(**of_admin):
                running = run_gateway(pool.server.url, folder)
                gateway = await stack.enter_async_context(running)
            yield ByHand(gateway, pool)


@pytest.mark.parametrize("key", EMPTY)
async def test_whoever_posts_an_empty_key_is_not_logged_in(by_hand: ByHand, key: str) -> None:
    for form in (f"key={key}".encode(), b"", b"key", b"other=1"):
        answer = await by_hand.gateway.form("/login", form)
        assert answer.status == 401
        assert "set-cookie" not in {name.lower() for name in answer.headers}


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "bearer  ", "Basic ", "", "Bearer tmq__"])
@pytest.mark.parametrize("path", ["/api/v1/whoami", "/api/v1/jobs/x/stream", "/v1/models"])
async def test_an_empty_key_in_a_header_is_refused(by_hand: ByHand, header: str, path: str) -> None:
    more = {"authorization": header, "x_api_key": "", "api_key": "", "cookie": "tinkermq_session="}
    assert (await by_hand.gateway.get(path, **more)).status == 401


async def test_an_empty_key_does_not_fall_back_to_the_session_beside_it(by_hand: ByHand) -> None:
    own = f"key={by_hand.pool.admin_key}".encode()
    cookie = (await by_hand.gateway.form("/login", own)).headers["set-cookie"].split(";")[0]
    assert (await by_hand.gateway.get("/api/v1/whoami", cookie=cookie)).json == {"user": "root"}
    for empty in ({"authorization": "Bearer "}, {"x_api_key": ""}):
        both = await by_hand.gateway.get("/api/v1/whoami", cookie=cookie, **empty)
        assert both.status == 401


async def test_every_log_in_of_a_user_beyond_sixteen_ends_the_oldest(by_hand: ByHand) -> None:
    await by_hand.pool.user("eve")
    own = f"key={by_hand.pool.keys['eve']}".encode()
    cookies: list[str] = []
    for _ in range(17):
        answer = await by_hand.gateway.form("/login", own)
        cookies.append(answer.headers["set-cookie"].split(";")[0])
    status = [(await by_hand.gateway.get("/api/v1/whoami", cookie=one)).status for one in cookies]
    assert status == [401] + [200] * 16


async def test_the_gateway_keeps_no_key_in_its_environment(by_hand: ByHand) -> None:
    held = _environment_of(by_hand.gateway.process.pid)
    assert by_hand.pool.admin_key.encode() not in held


async def test_clients_refuse_an_empty_key_instead_of_that_of_the_environment(
    by_hand: ByHand,
) -> None:
    url = by_hand.pool.server.url
    with environment(**{KEY_VARIABLE: by_hand.pool.admin_key}):
        for key in ("", " "):
            with pytest.raises(AuthError):
                await connect(url, name="test", api_key=key)
        with pytest.raises(AuthError, match="empty"):
            SchedulerClient(url, api_key="").list_jobs()


async def test_the_broker_lets_nobody_in_with_an_empty_key(by_hand: ByHand) -> None:
    for user in ("root", "job", "gateway", ""):
        client = Client()
        with pytest.raises(NatsError):
            await client.connect(
                by_hand.pool.server.url, user=user, password="", allow_reconnect=False
            )
        await client.close()  # a refused one leaves its socket open


def _environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def _erasing(code: str) -> bytes:
    """Return the environment that a process shows after it has run `code`."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; print('done', flush=True); import sys; sys.stdin.read()"],
        env={**os.environ, "TMQ_A": "sesame", "TMQ_AB": "stays"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with(os.getpid()),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        return _environment_of(process.pid)


async def test_a_variable_that_is_erased_is_gone_from_the_process() -> None:
    code = (
        "from tinkermq.schemas.local.process import erase_variable as erase;"
        "assert (erase('TMQ_A'), erase('TMQ_NOT_SET')) == ('sesame', '')"
    )
    held = await asyncio.to_thread(_erasing, code)
    assert b"sesame" not in held
    assert b"TMQ_AB=stays" in held
