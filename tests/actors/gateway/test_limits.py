"""Who is slow, greedy or unknown does not keep the gateway from the others."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tinkermq.actors.gateway.limits import (
    MAX_ANSWER_BYTES,
    MAX_HELD_BYTES,
    MAX_INFERENCE_BYTES,
    MAX_RUNNING,
    Share,
)
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.streams import create_shared
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.wire.errors import BusyError, ConfigError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.gateway.canned import canned_server
from tests.support.gateway import Gateway, run_gateway
from tests.support.processes import peak_mb
from tests.support.secured import SecuredPool, secured
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(frozen=True)
class Guarded:
    gateway: Gateway
    pool: SecuredPool

    def bearer(self, user: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.pool.keys[user]}"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    folder = tmp_path_factory.mktemp("limits")
    async with secured(folder) as pool:
        await create_shared(await pool.service("scheduler"))
        for user in ("alice", "bob"):
            await pool.user(user)
        async with run_gateway(pool.server.url, folder) as gateway:
            yield Guarded(gateway, pool)


# -- bodies ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def opened(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def port_of(gateway: Gateway) -> int:
    return int(gateway.url.rpartition(":")[2])


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/api/v1/jobs", "/api/v1/check", "/submit"]
)
@pytest.mark.parametrize("key", ["", "Bearer ", f"Bearer tmq_alice_{'x' * 43}"])
async def test_a_key_is_checked_before_the_body_is_read(
    guarded: Guarded, path: str, key: str
) -> None:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: {key}\r\ncontent-length: 900000\r\n\r\n"
    )
    async with opened(port_of(guarded.gateway)) as (reader, writer):
        writer.write(head.encode() + b"[")  # and nothing more
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.readline()
    assert answer.split()[1] in (b"401", b"303"), answer


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [
        ("/login", 20_000, 413),
        ("/api/v1/users/add", 20_000, 413),
        ("/api/v1/jobs/x/stop", 20_000, 413),
        ("/api/v1/check", (1 << 20) + 1, 413),
        ("/v1/chat/completions", MAX_INFERENCE_BYTES + 1, 413),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_larger_than_its_route_needs_is_refused(
    guarded: Guarded, path: str, size: int, status: int, chunked: bool
) -> None:
    kind = "application/x-www-form-urlencoded" if path == "/login" else "application/json"
    length = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n"
        f"authorization: {guarded.bearer('alice')['authorization']}\r\n{length}\r\n\r\n"
    )
    async with opened(port_of(guarded.gateway)) as (reader, writer):
        writer.write(head.encode())
        if chunked:
            writer.write(f"{size:x}\r\n".encode() + b" " * size + b"\r\n0\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.readline()
    assert int(answer.split()[1]) == status, answer


async def test_what_is_refused_before_it_is_read_is_told_in_the_words_of_its_api(
    guarded: Guarded,
) -> None:
    kinds = {"/v1/messages": "request_too_large", "/v1/responses": "invalid_request_error"}
    for path, kind in kinds.items():
        body = b" " * (MAX_INFERENCE_BYTES + 1)
        answer = await guarded.gateway.post(path, body, **guarded.bearer("alice"))
        assert (answer.status, answer.json["error"]["type"]) == (413, kind)
    answer = await guarded.gateway.get("/v1/messages", **guarded.bearer("alice"))
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("size", [3 << 20, 40 << 20])
async def test_who_sends_all_of_a_refused_body_first_still_reads_the_answer(
    guarded: Guarded, connection: str, size: int
) -> None:
    head = (
        "POST /api/v1/check HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: {guarded.bearer('alice')['authorization']}\r\n"
        f"connection: {connection}\r\ncontent-length: {size}\r\n\r\n"
    )
    async with opened(port_of(guarded.gateway)) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(head.encode())
        for _ in range(size >> 20):
            writer.write(b" " * (1 << 20))
            await writer.drain()
            await asyncio.sleep(0.005)
        answer = await reader.readuntil(b"}}")
    assert answer.split()[1] == b"413", answer
    assert b"a request may have" in answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/v1/check"])
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"model": ' + b"9" * 5000 + b"}",
        b"[" + b"{}," * 600_000 + b"{}]",
        b"\xff\xfe{}",
        b'{"model": "m", "messages": [{"role": "user", "tool_calls": ["x", 1, null]}]}',
        b'{"model": "m", "messages": [{"role": "user", "tool_calls": "x"}]}',
        b'{"model": "m", "messages": [{"role": "user", "tool_calls": [{"function": "x"}]}]}',
        b'{"config": {"env": {"kwargs": ' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"}}}",
    ],
    ids=lambda body: str(body[:12]) if isinstance(body, bytes) else body,
)
async def test_json_that_nobody_can_read_is_told_to_be_so(
    guarded: Guarded, path: str, body: bytes
) -> None:
    answer = await guarded.gateway.post(path, body, **guarded.bearer("alice"))
    assert answer.status in (400, 404, 413), answer.text
    assert answer.json["error"]["message"]


async def test_a_configuration_of_aliases_is_refused_and_takes_no_memory(guarded: Guarded) -> None:
    text = f"a: &a {'x' * 30_000}\nb: [{'*a,' * 10_000}]"
    before = peak_mb(guarded.gateway.process.pid)
    for path in ("/api/v1/check", "/api/v1/jobs"):
        sent = {"config": text}
        answer = await guarded.gateway.post(path, sent, **guarded.bearer("alice"))
        assert answer.status == 400
        assert "alias" in answer.json["error"]["message"]
    sent = {"config": {}, "overrides": [f"env.kwargs={{a: &a {'x' * 900}, b: [{'*a,' * 300}]}}"]}
    answer = await guarded.gateway.post("/api/v1/check", sent, **guarded.bearer("alice"))
    assert "alias" in answer.json["error"]["message"]
    sent = {"config": {}, "overrides": ["a=" + "1" * 1900] * 400}
    answer = await guarded.gateway.post("/api/v1/check", sent, **guarded.bearer("alice"))
    assert "64,000 characters" in answer.json["error"]["message"]
    assert peak_mb(guarded.gateway.process.pid) - before < 100


# -- shares ----------------------------------------------------------------------------------------


async def test_a_user_with_many_requests_is_told_to_wait_and_another_is_served(
    guarded: Guarded,
) -> None:
    head = (
        "POST /api/v1/check HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"authorization: {guarded.bearer('alice')['authorization']}\r\ncontent-length: 9\r\n\r\n"
    )
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_RUNNING):  # each waits for the rest of its body
            _, writer = await stack.enter_async_context(opened(port_of(guarded.gateway)))
            writer.write(head.encode())

        async with asyncio.timeout(PATIENCE_S):
            while True:
                mine = await guarded.gateway.get("/api/v1/whoami", **guarded.bearer("alice"))
                if mine.status != 200:
                    break
        assert mine.status == 429, mine.text
        assert mine.headers["retry-after"] == "1"
        assert mine.json["error"]["code"] == "busy"
        chat = await guarded.gateway.post("/v1/completions", {}, **guarded.bearer("alice"))
        assert chat.status == 429
        assert chat.json["error"]["type"] == "rate_limit_error"
        other = await guarded.gateway.get("/api/v1/whoami", **guarded.bearer("bob"))
        assert other.json == {"user": "bob"}

    async with asyncio.timeout(PATIENCE_S):
        while mine.status == 429:
            mine = await guarded.gateway.get("/api/v1/whoami", **guarded.bearer("alice"))
    assert mine.json == {"user": "alice"}


async def test_a_body_that_does_not_say_its_size_is_counted_by_it_once_it_has_come(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    number = 2 * MAX_HELD_BYTES // MAX_INFERENCE_BYTES
    asked: Any = {"model": "chunked@4", "messages": [{"role": "user", "content": "hi"}]}

    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps(asked).encode()

    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        broker = await enter(await connect(nats_server.url, name="test"))
        canned = await enter(canned_server(broker, JobScope("local", "chunked"), asked["model"]))
        gateway = await enter(run_gateway(nats_server.url, tmp_path))
        http = await enter(httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S))
        canned.hang = True
        waiting: list[asyncio.Task[httpx.Response]] = []

        def is_next_there() -> bool:
            return len(canned.asked) == len(waiting) or waiting[-1].done()

        for _ in range(number):
            posting = http.post("/v1/chat/completions", content=pieces())
            waiting.append(asyncio.create_task(posting))
            await until(is_next_there, "the next one to be asked")
            assert not waiting[-1].done(), waiting[-1].result().text
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)


async def test_the_bytes_of_a_users_bodies_are_counted_while_they_are_held() -> None:
    share = Share()
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_HELD_BYTES // MAX_INFERENCE_BYTES):
            stack.enter_context(share.taken(MAX_INFERENCE_BYTES))
        with pytest.raises(BusyError), share.taken(1):
            pass
        with share.taken(0):
            pass
    with share.taken(MAX_HELD_BYTES) as taken:
        assert share.num_running == 1
        taken.settle(MAX_HELD_BYTES + 1)
        with pytest.raises(BusyError), share.taken(1):
            pass
        taken.settle(1)
        with share.taken(MAX_HELD_BYTES - 1):
            pass
    assert share.num_running == 0


async def test_the_bytes_of_a_users_answers_are_bounded_until_they_are_read() -> None:
    share = Share()
    with share.taken() as first, share.taken() as second:
        first.hold(MAX_ANSWER_BYTES - 1)
        second.hold(1)
        with pytest.raises(BusyError, match="of your answers wait to be read"):
            second.hold(1)
        with pytest.raises(ConfigError, match="of the answer wait to be read"):
            first.hold(2)
        first.release(1)
        second.hold(1)
    with share.taken() as third:
        third.hold(MAX_ANSWER_BYTES)


# -- connections -----------------------------------------------------------------------------------


async def test_no_connection_is_turned_into_a_websocket(guarded: Guarded) -> None:
    more = {"connection": "Upgrade", "upgrade": "websocket", "sec_websocket_version": "13"}
    answer = await guarded.gateway.get("/healthz", sec_websocket_key="x" * 24, **more)
    assert answer.status == 200
