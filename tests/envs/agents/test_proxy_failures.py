"""What programs are told when a call fails, in their API's own words; and keys, and limits."""

import asyncio
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.envs.agents.episode import (
    ContextTooLong,
    EpisodeLimit,
    EpisodeOver,
    ProgramEpisode,
)
from tinkermq.envs.agents.proxy.calls import ProxyTimes
from tinkermq.envs.agents.proxy.proxy import ModelProxy
from tinkermq.schemas.wire.errors import BusyError, DataError, EngineError, TinkermqError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.program_clients import (
    anthropic_client,
    chat_body,
    http_client,
    messages_body,
    openai_client,
    response_body,
)
from tests.support.scripted_generator import Script
from tests.support.waiting import PATIENCE_S, until

PATHS = {
    "/v1/chat/completions": chat_body(),
    "/v1/responses": response_body(),
    "/v1/messages": messages_body(),
}
RETRY, NO_RETRY = "true", "false"


async def told(proxy: ModelProxy, episode: ProgramEpisode) -> list[httpx.Response]:
    """Return what each API answers."""
    async with http_client(proxy, episode) as http:
        return [await http.post(path, json=body) for path, body in PATHS.items()]


def words(answer: httpx.Response) -> str:
    """Return an error's message."""
    return answer.json()["error"]["message"]


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize(
    ("error", "statuses", "again", "code"),
    [
        (EpisodeOver("it is over"), (410, 400, 410), NO_RETRY, "episode_over"),
        (EpisodeLimit("200 calls"), (400, 400, 400), NO_RETRY, "episode_limit"),
        (EngineError("it crashed"), (500, 500, 500), RETRY, "engine"),
        (BusyError("full"), (429, 429, 429), RETRY, "busy"),
        (DataError("no images"), (400, 400, 400), NO_RETRY, "data"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_an_error_has_its_status_in_each_api(
    proxy: ModelProxy,
    episode: ProgramEpisode,
    script: Script,
    error: TinkermqError,
    statuses: tuple[int, ...],
    again: str,
    code: str,
) -> None:
    script.error = error
    answers = await told(proxy, episode)
    assert tuple(answer.status_code for answer in answers) == statuses
    assert {answer.headers["x-should-retry"] for answer in answers} == {again}
    assert all(("retry-after-ms" in answer.headers) == (again == RETRY) for answer in answers)
    assert [answer.json()["error"]["code"] for answer in answers[:2]] == [code] * 2
    assert answers[2].json()["type"] == "error"
    assert all(error.message in words(answer) for answer in answers)
    assert episode.num_open == 0


@pytest.mark.usefixtures("generator")
async def test_a_context_too_long_is_told_in_the_words_that_programs_know(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.error = ContextTooLong.of(5000, 4096)
    chat, response, message = await told(proxy, episode)
    for answer in (chat, response):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "This model's maximum context length is 4096 tokens" in words(answer)
        assert "resulted in 5000 tokens" in words(answer)
    assert message.json()["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 5000 tokens > 4096 maximum",
    }


@pytest.mark.usefixtures("generator")
async def test_the_makers_libraries_know_the_errors_and_try_again_only_what_may_pass(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.error = EpisodeOver("it is over")
    async with openai_client(proxy, episode) as client:
        with pytest.raises(openai.APIStatusError, match="it is over"):
            await client.chat.completions.create(**chat_body())
    assert len(script.asked) == 1
    script.error = BusyError("full")
    async with anthropic_client(proxy, episode, max_retries=1) as client:
        with pytest.raises(anthropic.RateLimitError, match="full"):
            await client.messages.create(**messages_body())
    assert [request.is_retry for request in script.asked[1:]] == [False, True]


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", b"{", "not valid JSON"),
        ("/v1/chat/completions", b"[]", "no object"),
        ("/v1/chat/completions", b"{}", "messages is empty"),
        ("/v1/chat/completions", json.dumps(chat_body(n=17)).encode(), "num_choices"),
        ("/v1/chat/completions", json.dumps(chat_body(stop=["x"] * 17)).encode(), "stop"),
        ("/v1/responses", b'{"input": []}', "input is empty"),
        ("/v1/messages", b'{"messages": [{"role": "x"}]}', "messages[0].role is 'x'"),
        ("/v1/messages/count_tokens", b"{}", "messages is empty"),
    ],
)
async def test_a_malformed_request_is_named(
    proxy: ModelProxy, episode: ProgramEpisode, path: str, body: bytes, says: str
) -> None:
    async with http_client(proxy, episode) as http:
        answer = await http.post(path, content=body)
    assert answer.status_code == 400
    assert says in words(answer)
    assert answer.headers["x-should-retry"] == NO_RETRY


@pytest.mark.usefixtures("generator")
async def test_a_stream_that_cannot_go_on_ends_with_an_error(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at, script.fails_at = 2, 3
    texts: list[str] = []
    async with http_client(proxy, episode) as http:
        for path, body in PATHS.items():
            script.go_on.clear()
            text = ""
            async with http.stream("POST", path, json={**body, "stream": True}) as stream:
                assert stream.status_code == 200
                async for piece in stream.aiter_text():
                    text += piece
                    script.go_on.set()  # once something was told
            texts.append(text)
    chat, response, message = texts
    assert '"message": "the engine has failed", "type": "server_error"' in chat
    assert "[DONE]" not in chat
    assert "event: response.failed\n" in response
    assert "response.completed" not in response
    assert 'event: error\ndata: {"type": "error"' in message
    assert "message_stop" not in message
    assert episode.num_calls == 0


@pytest.mark.usefixtures("generator")
async def test_what_fails_unforeseen_is_told_without_its_insides(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    def fail(request: Any, choice: int) -> str:
        raise RuntimeError("secret")

    script.say = fail
    answers = await told(proxy, episode)
    assert [answer.status_code for answer in answers] == [500] * 3
    assert all("RuntimeError" in answer.text for answer in answers)
    assert all("secret" not in answer.text for answer in answers)


async def test_nobody_plays_the_episode(
    broker: Broker, scope: JobScope, episode: ProgramEpisode
) -> None:
    times = ProxyTimes(failover_s=0.3, pause_s=0.02, keepalive_s=0.05)
    async with ModelProxy(broker, scope, times=times) as proxy:
        proxy.open(episode)
        answers = await told(proxy, episode)
        async with http_client(proxy, episode) as http:
            streams = [
                await http.post(path, json={**body, "stream": True}) for path, body in PATHS.items()
            ]
    assert [answer.status_code for answer in answers] == [503] * 3
    assert {answer.headers["x-should-retry"] for answer in answers} == {RETRY}
    assert all("no generator has answered" in words(answer) for answer in answers)
    chat, response, message = (stream.text for stream in streams)
    assert chat.startswith(": waiting\n\n")
    assert response.startswith(": waiting\n\n")
    assert message.startswith("event: ping\n")
    assert '"type": "server_error"' in chat
    assert "[DONE]" not in chat
    assert "event: response.failed\n" in response
    assert "event: error\n" in message


@pytest.mark.usefixtures("generator")
async def test_a_key_is_worth_something_in_its_episode_only(
    broker: Broker, scope: JobScope, proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    other = ProgramEpisode(episode="t3-1", task_input={})
    path, body = "/v1/chat/completions", chat_body()
    async with httpx.AsyncClient(base_url=proxy.base_url, timeout=PATIENCE_S) as http:

        async def ask(**headers: str) -> httpx.Response:
            told = {name.replace("_", "-"): value for name, value in headers.items()}
            return await http.post(path, json=body, headers=told)

        taken = [
            await ask(authorization=f"Bearer {episode.key}"),
            await ask(authorization=f"bearer sk-{episode.key}"),
            await ask(x_api_key=f"sk-ant-{episode.key}"),
            await ask(x_api_key=episode.key, authorization="Bearer something else"),
            await http.post(f"/e/{episode.key}{path}", json=body),
            await http.post(f"/e/sk-{episode.key}{path}", json=body, headers={"x-api-key": "no"}),
        ]
        refused = [
            await ask(),
            await ask(authorization="Bearer"),
            await ask(authorization=f"Basic {episode.key}"),
            await ask(x_api_key=other.key),
            await ask(x_api_key=episode.key[:-1]),
            await http.post(path, json=body, headers={b"x-api-key": b"\xff\xfe"}),
            await http.post(f"/e/x{path}", json=body, headers={"x-api-key": episode.key}),
        ]
        message = await http.post("/v1/messages", json=messages_body())
        proxy.close(episode.episode)
        past = await ask(x_api_key=episode.key)
    assert [answer.status_code for answer in taken] == [200] * 6
    assert [answer.status_code for answer in refused] == [401] * 7
    assert {answer.headers["x-should-retry"] for answer in refused} == {NO_RETRY}
    assert "no key came with the request" in words(refused[0])
    assert "this key is that of no episode" in words(refused[3])
    assert message.json()["error"]["type"] == "authentication_error"
    assert past.status_code == 401
    assert "the episode of this key is over: it has ended" in words(past)
    assert len(script.asked) == 6


@pytest.mark.usefixtures("generator")
async def test_an_episode_that_is_over_is_asked_nothing(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    async with http_client(proxy, episode) as http:
        waiting = asyncio.create_task(http.post("/v1/messages", json=messages_body()))
        await until(lambda: bool(script.asked), "the call")
        await http.post("/v1/episode/end", json={"status": "done"})
        open_one = await waiting
        episode.over = "its time is up"
        answers = await told(proxy, episode)
    assert open_one.status_code == 410
    assert [answer.status_code for answer in answers] == [410, 400, 410]
    assert all("its time is up" in words(answer) for answer in answers)
    assert len(script.asked) == 1
    await until(lambda: bool(script.cancelled), "the generator to be told")


async def test_an_episode_is_opened_once(proxy: ModelProxy, episode: ProgramEpisode) -> None:
    with pytest.raises(TinkermqError, match="is open already"):
        proxy.open(episode)
    proxy.close(episode.episode)
    proxy.close(episode.episode)
    assert proxy.num_episodes == 0


@pytest.mark.usefixtures("generator")
async def test_what_is_not_there_is_not_found(proxy: ModelProxy, episode: ProgramEpisode) -> None:
    async with http_client(proxy, episode) as http:
        answers = [
            await http.post("/v1/completions", json={}),
            await http.get("/v1/chat/completions"),
            await http.put("/v1/episode", json={}),
            await http.get("/v1/responses/resp_none"),
            await http.delete("/v1/responses/resp_none"),
            await http.post("/v1/responses/resp_none/cancel"),
        ]
        packed = await http.post("/v1/messages", content=b"x", headers={"content-encoding": "gzip"})
    assert [answer.status_code for answer in answers] == [404] * 6
    assert packed.status_code == 415
