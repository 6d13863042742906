"""HTTP servers on real sockets: slow, silent and greedy clients leave the rest served."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tinkermq.schemas.http_server import (
    MAX_HEAD_BYTES,
    HttpBounds,
    HttpServer,
    listening_socket,
)
from tinkermq.schemas.wire.errors import StorageError

from tests.support.waiting import PATIENCE_S, until

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Served:
    """A server on a free port."""

    port: int
    release: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets the requests end that wait for it."""
    num_waiting: int = 0
    clients: list[Client] = field(default_factory=list[Client])

    async def open(self, request: str = "", body: bytes = b"", **headers: str) -> Client:
        """Open a connection; send a request line, if one is given."""
        client = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(client)
        if request:
            self.ask(client, request, body, **headers)
        return client

    def ask(self, client: Client, request: str, body: bytes = b"", **headers: str) -> None:
        """Send a request."""
        lines = [f"{request} HTTP/1.1", "host: a", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        client[1].write("\r\n".join([*lines, "", ""]).encode() + body)

    async def hold(self, num: int) -> None:
        """Let so many further requests wait for their answers."""
        wanted = self.num_waiting + num
        for _ in range(num):
            await self.open("GET /wait")
        await until(lambda: self.num_waiting == wanted, "the requests to wait")


@contextlib.asynccontextmanager
async def served(**bounds: Any) -> AsyncIterator[Served]:
    """Serve within bounds."""

    async def wait(_: Request) -> Response:
        here.num_waiting += 1
        await here.release.wait()
        return PlainTextResponse("waited")

    async def read(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def refuse(_: Request) -> Response:
        return PlainTextResponse("no", 403)

    async def flood(_: Request) -> Response:
        async def blocks() -> AsyncIterator[bytes]:
            while True:
                await asyncio.sleep(0)  # or nothing else runs once the client is gone
                yield b"x" * 100_000

        return StreamingResponse(blocks())

    routes = [
        Route("/wait", wait),
        Route("/read", read, methods=["POST"]),
        Route("/refuse", refuse, methods=["POST"]),
        Route("/flood", flood),
        Route("/light", read, methods=["GET", "POST"]),
    ]
    bounds = {"is_light": lambda scope: scope["path"] == "/light", **bounds}
    server = HttpServer("server", Starlette(routes=routes), HttpBounds(**bounds))
    with listening_socket("127.0.0.1", 0) as listening:
        await server.listen(listening)
        here = Served(listening.getsockname()[1])
        try:
            yield here
        finally:
            here.release.set()
            await server.stop(0.5)
            for _, writer in here.clients:
                writer.close()


async def answer_of(client: Client) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the next answer on a connection."""
    async with asyncio.timeout(PATIENCE_S):
        head = (await client[0].readuntil(b"\r\n\r\n")).decode().split("\r\n")
        lines = [line.partition(": ") for line in head[1:] if line]
        headers = {name.lower(): value for name, _, value in lines}
        body = await client[0].readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split()[1]), headers, body


async def rest_of(client: Client) -> bytes:
    """Read until the server ends the connection."""
    read = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            while more := await client[0].read(1 << 16):
                read += more
    return read


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    """What is logged meanwhile."""
    with structlog.testing.capture_logs() as entries:
        yield entries


# -- connections -----------------------------------------------------------------------------------


async def test_300_idle_connections_of_one_address_leave_the_rest_served() -> None:
    async with served() as here:
        silent = [await here.open() for _ in range(100)]
        for number in range(100):
            reader, writer = await here.open()
            writer.write(b"GET /light HTTP/1.1\r\nhost: a\r\nx-more: "[: 10 + number % 30])
            silent.append((reader, writer))
        for _ in range(100):
            client = await here.open("POST /read", b"ab")
            assert (await answer_of(client))[2] == b"2"
            silent.append(client)
        for request in ("POST /read", "POST /light"):
            client = await here.open(request, b"abc")
            assert (await answer_of(client))[::2] == (200, b"3")
        assert not any(client[0].at_eof() for client in silent)


@pytest.mark.parametrize("sent", [b"", b"GET /wait HT", b"GET /wait HTTP/1.1\r\nhost: a\r\n"])
async def test_a_head_that_never_ends_has_a_deadline(sent: bytes) -> None:
    async with served(idle_s=0.3) as here:
        client = await here.open()
        client[1].write(sent)
        assert await rest_of(client) == b""


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_head_that_comes_byte_by_byte_has_the_same_deadline(is_first: bool) -> None:
    async with served(idle_s=0.5) as here:
        client = await here.open()
        if not is_first:
            here.ask(client, "POST /read", b"ab")
            assert (await answer_of(client))[2] == b"2"
        ended = asyncio.create_task(rest_of(client))
        client[1].write(b"GET /wait HTTP/1.1\r\n")
        while not ended.done():
            client[1].write(b"a")
            await asyncio.wait({ended}, timeout=0.05)
        assert await ended == b""


@pytest.mark.parametrize("ahead", ["", "POST /read", "GET /wait"])
async def test_a_head_over_64_kib_is_refused(ahead: str) -> None:
    async with served() as here:
        client = await here.open(ahead, b"ab" if "POST" in ahead else b"")
        if "POST" in ahead:
            assert (await answer_of(client))[2] == b"2"
        if "wait" in ahead:
            await until(lambda: here.num_waiting == 1, "the request before it")
        client[1].write(b"GET /light HTTP/1.1\r\nx: ")
        for _ in range(2 * MAX_HEAD_BYTES >> 10):
            client[1].write(b"y" * 1024)
            await asyncio.sleep(0)
        assert b"200 OK" not in await rest_of(client)


async def test_a_whole_head_over_64_kib_is_refused() -> None:
    async with served() as here:
        client = await here.open("POST /light", b"", more="y" * (MAX_HEAD_BYTES + 1))
        assert b"200 OK" not in await rest_of(client)
        client = await here.open(f"POST /light?{'y' * MAX_HEAD_BYTES}", b"")
        assert b"200 OK" not in await rest_of(client)
        short = {f"a{number}": "" for number in range(9_000)}
        client = await here.open("POST /light", b"", **short)
        assert b"200 OK" not in await rest_of(client)
        client = await here.open("POST /light", b"ab" * MAX_HEAD_BYTES, more="y" * 60_000)
        assert (await answer_of(client))[2] == str(2 * MAX_HEAD_BYTES).encode()


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    async with served(stalled_s=0.3) as here:
        with socket.create_connection(("127.0.0.1", here.port)) as client:
            client.sendall(b"GET /flood HTTP/1.1\r\nhost: a\r\n\r\n")

            def is_reset() -> bool:
                try:
                    client.sendall(b"x")
                except OSError:
                    return True
                return False

            await until(is_reset, "the connection to be closed")


async def test_a_client_that_waits_for_an_answer_may_take_longer_than_any_deadline() -> None:
    async with served(idle_s=0.3, body_s=0.3, stalled_s=0.3) as here:
        client = await here.open("GET /wait")
        await until(lambda: here.num_waiting == 1, "the request to wait")
        await asyncio.sleep(1.5)
        here.release.set()
        assert (await answer_of(client))[2] == b"waited"
        here.ask(client, "POST /read", b"ab")
        assert (await answer_of(client))[2] == b"2"


async def test_a_server_that_stops_lets_requests_end_and_closes_the_rest() -> None:
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(served())
        idle = await here.open()
        await here.hold(1)
        reading = asyncio.create_task(answer_of(here.clients[1]))
        ended = asyncio.create_task(rest_of(idle))
        await stack.aclose()
        assert (await reading)[2] == b"waited"
        assert await ended == b""


async def test_an_address_in_use_is_named() -> None:
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StorageError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            listening_socket("127.0.0.1", port)


# -- requests --------------------------------------------------------------------------------------


async def test_a_body_that_comes_too_slowly_has_a_deadline() -> None:
    async with served(body_s=0.3) as here:
        client = await here.open()
        client[1].write(b"POST /read HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\nx")
        assert await rest_of(client) == b""


async def test_a_body_without_end_is_dropped_once_its_request_was_answered() -> None:
    async with served() as here:
        client = await here.open()
        client[1].write(b"POST /refuse HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        status, headers, body = await answer_of(client)
        assert (status, headers["connection"], body) == (403, "close", b"no")
        ended = asyncio.create_task(rest_of(client))
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not ended.done():
                client[1].write(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
                await client[1].drain()
                sent += 1 << 20
        assert await ended == b""
        assert sent > 32 << 20, "who sends a large body first still reads the answer"


async def test_an_answer_before_the_whole_body_is_read_in_full() -> None:
    async with served() as here:
        client = await here.open()
        size = 40 << 20
        client[1].write(
            f"POST /refuse HTTP/1.1\r\nhost: a\r\ncontent-length: {size}\r\n\r\n".encode()
        )
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(size >> 20):
                client[1].write(b" " * (1 << 20))
                await client[1].drain()
        assert (await answer_of(client))[::2] == (403, b"no")
        assert await rest_of(client) == b""


async def test_requests_beyond_the_bound_are_refused_in_json_and_light_ones_are_not(
    logged: list[Any],
) -> None:
    async with served(max_running=3, retry_after_s=5) as here:
        await here.hold(3)
        for _ in range(3):
            status, headers, body = await answer_of(await here.open("POST /read", b"x" * 300_000))
            assert (status, headers["retry-after"], headers["connection"]) == (503, "5", "close")
            assert headers["content-type"] == "application/json"
            value = json.loads(body)
            assert "3 requests run, as many as this server serves" in value["error"]["message"]
            assert value["error"]["code"] == "busy"
            assert value["detail"].startswith(value["error"]["message"])
            assert (await answer_of(await here.open("POST /light", b"ab")))[2] == b"2"
        here.release.set()
        for client in here.clients[:3]:
            assert (await answer_of(client))[2] == b"waited"
        assert (await answer_of(await here.open("POST /read", b"ab")))[2] == b"2"
    assert [entry["event"] for entry in logged] == ["requests_refused"], "one line for the minute"
