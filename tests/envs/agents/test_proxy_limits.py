"""ConnectionBounds of what one program may take of a proxy: bytes, requests, connections, time."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import structlog
from tinkermq.broker.client.connection import Broker
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.proxy.proxy import ModelProxy
from tinkermq.envs.agents.proxy.routes import MAX_REQUESTS
from tinkermq.envs.http_server import ConnectionBounds, Connections, Deadlines, HttpServer
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.program_clients import (
    chat_body,
    http_client,
    messages_body,
    response_body,
)
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import PATIENCE_S, until

RETRY, NO_RETRY = "true", "false"


def words(answer: httpx.Response) -> str:
    """Return an error's message."""
    return answer.json()["error"]["message"]


@pytest.mark.usefixtures("generator")
async def test_a_body_over_the_limit_is_refused_while_it_is_read(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1 << 20
            yield b"x" * (1 << 20)

    async with http_client(proxy, episode) as http:
        declared = await http.post("/v1/responses", content=b"x" * (33 << 20))
        chunked = await http.post("/v1/messages", content=endless())
        after = await http.post("/v1/chat/completions", json=chat_body())
    assert declared.status_code == chunked.status_code == 413
    assert "over the limit of 33,554,432 bytes" in words(declared)
    assert chunked.json()["error"]["type"] == "request_too_large"
    assert after.status_code == 200
    assert len(script.asked) == 1


@pytest.mark.usefixtures("generator")
async def test_a_call_that_no_message_holds_is_refused(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    async with http_client(proxy, episode) as http:
        answer = await http.post("/v1/chat/completions", json=chat_body("x" * (9 << 20)))
        posted = await http.post("/v1/episode/reward", content=b" " * (2 << 20))
    assert answer.status_code == 413
    assert "and the broker takes" in words(answer)
    assert answer.headers["x-should-retry"] == NO_RETRY
    assert posted.status_code == 413
    assert not script.asked


@pytest.mark.usefixtures("generator")
async def test_an_episode_has_so_many_requests_at_once(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    async with http_client(proxy, episode) as http:
        waiting = [
            asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(str(number))))
            for number in range(MAX_REQUESTS)
        ]
        await until(lambda: episode.num_open == MAX_REQUESTS, "all to be open")
        one_more = await http.post("/v1/messages", json=messages_body())
        script.go_on.set()
        answers = [await each for each in waiting]
    assert one_more.status_code == 429
    assert one_more.headers["x-should-retry"] == RETRY
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ",
        b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: KEY\r\ncontent-length: 9\r\n\r\n{",
        b"GET / HTTP/1.1\r\n" + b"x: " * 200_000,
    ],
    ids=["nothing", "half a head", "half a body", "an endless head"],
)
async def test_whoever_sends_no_whole_request_is_dropped(
    broker: Broker, scope: JobScope, episode: ProgramEpisode, sent: bytes
) -> None:
    deadlines = Deadlines(head_s=0.2, idle_s=0.2, body_s=0.2)
    async with ModelProxy(broker, scope, deadlines=deadlines) as proxy:
        proxy.open(episode)
        port = int(proxy.base_url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent.replace(b"KEY", episode.key.encode()))
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                await reader.read()
        writer.close()
        assert episode.num_open == 0


async def test_a_program_that_reads_nothing_is_dropped(
    broker: Broker, scope: JobScope, episode: ProgramEpisode, script: Script
) -> None:
    script.say, script.token_chars = (lambda request, choice: "x" * (24 << 20)), 1 << 20
    deadlines = Deadlines(stalled_s=0.2)
    body = json.dumps(chat_body(stream=True)).encode()
    async with (
        ScriptedGenerator(broker, scope, script).playing(episode.episode),
        ModelProxy(broker, scope, deadlines=deadlines) as proxy,
    ):
        proxy.open(episode)
        port = int(proxy.base_url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        head = f"POST /e/{episode.key}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: bool(script.delivered), "it to be given up")
        writer.close()
    assert not script.delivered[0].whole


@pytest.mark.usefixtures("generator")
async def test_the_oldest_answers_make_room(
    broker: Broker, scope: JobScope, episode: ProgramEpisode
) -> None:
    async with ModelProxy(broker, scope, kept_bytes=12_000) as proxy:
        proxy.open(episode)
        async with http_client(proxy, episode) as http:
            ids = [
                (await http.post("/v1/responses", json=response_body(str(number)))).json()["id"]
                for number in range(4)
            ]
            found = [(await http.get(f"/v1/responses/{name}")).status_code for name in ids]
    assert found == [404, 404, 200, 200]


async def test_a_connection_too_many_is_told_so_in_json_and_idle_ones_make_room() -> None:
    release, num_waiting = asyncio.Event(), 0

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_waiting
        if scope["path"] == "/wait":
            num_waiting += 1
            await release.wait()
        head = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"ok"})

    server = HttpServer(application, Connections("proxy", bounds=ConnectionBounds(3, 3, 3)))
    url = f"http://127.0.0.1:{await server.listen()}"
    with structlog.testing.capture_logs() as logged:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(httpx.AsyncClient()) for _ in range(4)]
            assert (await clients[0].get(f"{url}/now")).text == "ok"
            waiting = [asyncio.create_task(one.get(f"{url}/wait")) for one in clients[1:]]
            await until(lambda: num_waiting == 3, "the idle connection to make room")
            for _ in range(3):
                refused = await clients[0].get(f"{url}/now")
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert "all 3 connections of this proxy are taken" in words(refused)
            release.set()
            assert [(await one).text for one in waiting] == ["ok"] * 3
            assert (await clients[0].get(f"{url}/now")).text == "ok"
    assert [one["event"] for one in logged] == ["connections_refused"]
    await server.stop()
