"""What programs are told when a call fails; limits; answers that outlive who gives them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
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
from tinkermq.envs.agents.proxy.routes import MAX_REQUESTS
from tinkermq.schemas.http_server import HttpBounds
from tinkermq.schemas.wire.errors import (
    BusyError,
    DataError,
    EngineError,
    StateError,
    TinkermqError,
)
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.program_clients import (
    anthropic_client,
    chat_body,
    http_client,
    messages_body,
    openai_client,
    response_body,
)
from tests.support.scripted_generator import Script, ScriptedGenerator
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
        (EpisodeOver("it is over"), (401, 401, 401), NO_RETRY, "episode_over"),
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
    async with (
        openai_client(proxy, episode, max_retries=2) as client,
        anthropic_client(proxy, episode, max_retries=2) as other,
    ):
        with pytest.raises(openai.AuthenticationError, match="it is over"):
            await client.chat.completions.create(**chat_body())
        with pytest.raises(openai.AuthenticationError, match="it is over"):
            await client.responses.create(**response_body())
        with pytest.raises(anthropic.AuthenticationError, match="it is over"):
            await other.messages.create(**messages_body())
        assert len(script.asked) == 3
        script.error = BusyError("full")
        with pytest.raises(anthropic.RateLimitError, match="full"):
            await other.with_options(max_retries=1).messages.create(**messages_body())
    assert [request.is_retry for request in script.asked[3:]] == [False, True]


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", b"{", "not valid JSON"),
        ("/v1/chat/completions", b"[]", "must be an object"),
        ("/v1/chat/completions", b"{}", "messages must be a list of at least one message"),
        ("/v1/chat/completions", json.dumps(chat_body(n=17)).encode(), "the parameter 'n' is 17"),
        ("/v1/chat/completions", json.dumps(chat_body(stop=["x"] * 17)).encode(), "stop"),
        ("/v1/responses", b'{"input": []}', "input is empty"),
        ("/v1/messages", b'{"messages": [{"role": "x"}]}', "messages[0].role is 'x'"),
        ("/v1/messages/count_tokens", b"{}", "messages must be a list of at least one message"),
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
    assert "this key belongs to no episode" in words(refused[3])
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
    assert open_one.status_code == 401
    assert [answer.status_code for answer in answers] == [401, 401, 401]
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


# ConnectionBounds of what one program may take of a proxy: bytes, requests, connections, time.


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
    bounds = HttpBounds(idle_s=0.2, body_s=0.2)
    async with ModelProxy(broker, scope, bounds=bounds) as proxy:
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
    bounds = HttpBounds(stalled_s=0.2)
    body = json.dumps(chat_body(stream=True)).encode()
    async with (
        ScriptedGenerator(broker, scope, script).playing(episode.episode),
        ModelProxy(broker, scope, bounds=bounds) as proxy,
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


# -- Answers that outlive who gives them and who waits for them ------------------------------------


LONG = "one two three four five six seven eight nine ten"


@pytest.fixture
async def brisk(
    broker: Broker, scope: JobScope, episode: ProgramEpisode
) -> AsyncIterator[ModelProxy]:
    """A proxy that soon takes silence for death."""
    times = ProxyTimes(silence_s=3.0, pause_s=0.02)
    async with ModelProxy(broker, scope, times=times) as proxy:
        proxy.open(episode)
        yield proxy


def play(broker: Broker, scope: JobScope, script: Script, episode: ProgramEpisode) -> Any:
    """Play the episode by a script."""
    return ScriptedGenerator(broker, scope, script).playing(episode.episode)


def content_of(answer: httpx.Response) -> str:
    """Return the first choice's text."""
    return answer.json()["choices"][0]["message"]["content"]


async def text_of(proxy: ModelProxy, episode: ProgramEpisode, heard: asyncio.Event) -> str:
    """Return what a stream says; `heard` is set at its first text."""
    text = ""
    async with openai_client(proxy, episode) as client:
        stream = await client.chat.completions.create(**chat_body(stream=True))
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text:
                heard.set()
    return text


async def test_a_generator_that_dies_within_a_stream_is_followed_by_another(
    broker: Broker, scope: JobScope, brisk: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.say, script.stops_at = (lambda request, choice: LONG), 5
    heard = asyncio.Event()
    async with ScriptedGenerator(broker, scope, script).playing(episode.episode):
        reading = asyncio.create_task(text_of(brisk, episode, heard))
        await asyncio.wait_for(heard.wait(), PATIENCE_S)
        await until(lambda: bool(script.asked), "the call")
    script.stops_at = None
    second = ScriptedGenerator(broker, scope, script, delivery=2)
    async with second.playing(episode.episode):
        assert await asyncio.wait_for(reading, PATIENCE_S) == LONG
        await until(lambda: bool(script.delivered), "the delivery")
    first, again = script.asked
    assert again.request == f"{first.request}-{again.request.rpartition('-')[2]}"
    assert again.is_retry
    assert again.begun is not None
    assert again.begun.deltas[0].token_ids == list(range(len(again.begun.deltas[0].token_ids)))
    assert LONG.startswith(again.begun.deltas[0].text)
    assert again.begun.deltas[0].versions == [1] * len(again.begun.deltas[0].token_ids)
    assert again.begun.names == [f"call_{first.request[:12]}00_"]
    assert episode.num_calls == 1


async def test_a_call_waits_for_somebody_who_plays_the_episode(
    broker: Broker, scope: JobScope, proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    async with http_client(proxy, episode) as http:
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        await until(lambda: episode.num_open == 1, "the call")
        async with ScriptedGenerator(broker, scope, script).playing(episode.episode):
            assert content_of(await waiting) == "You said: Hello"
    assert script.asked[0].begun is None


async def test_who_was_overtaken_is_not_heard(
    broker: Broker, scope: JobScope, brisk: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    """Both play: the first goes on telling, and whatever he says after the second is dropped."""
    script.say, script.stops_at = (lambda request, choice: LONG), 5
    other = Script(say=lambda request, choice: LONG, numbers=script.numbers)
    heard = asyncio.Event()
    async with ScriptedGenerator(broker, scope, script).playing(episode.episode):
        reading = asyncio.create_task(text_of(brisk, episode, heard))
        await asyncio.wait_for(heard.wait(), PATIENCE_S)
    # silent for good; the one who follows is heard by the second request, as is another of before
    script.stops_at = None
    old = ScriptedGenerator(broker, scope, Script(say=lambda request, choice: "no"), delivery=0)
    new = ScriptedGenerator(broker, scope, other, delivery=2)
    async with old.playing(episode.episode), new.playing(episode.episode):
        assert await asyncio.wait_for(reading, PATIENCE_S) == LONG


async def test_a_program_that_hangs_up_and_comes_back_finds_its_call(
    broker: Broker, scope: JobScope, proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    async with play(broker, scope, script, episode), http_client(proxy, episode) as http:
        first = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        await until(lambda: bool(script.asked), "the call")
        first.cancel()
        await until(lambda: episode.num_open == 0, "the hang-up to be noticed")
        again = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body()))
        await until(lambda: episode.num_open == 1, "the second request")
        script.go_on.set()
        assert content_of(await again) == "You said: Hello"
        await until(lambda: bool(script.delivered), "the delivery")
    assert len(script.asked) == 1
    assert not script.cancelled
    assert [told.whole for told in script.delivered] == [True]


async def test_a_program_that_hangs_up_for_good_ends_its_call(
    broker: Broker, scope: JobScope, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    async with (
        play(broker, scope, script, episode),
        ModelProxy(broker, scope, times=ProxyTimes(adopt_s=0.5)) as proxy,
    ):
        proxy.open(episode)
        async with http_client(proxy, episode) as http:
            first = asyncio.create_task(http.post("/v1/messages", json=messages_body()))
            await until(lambda: bool(script.asked), "the call")
            first.cancel()
            await until(lambda: bool(script.cancelled), "the call to be cancelled")
            assert script.cancelled == [script.asked[0].request]
            script.stops_at = None
            answer = await http.post("/v1/messages", json=messages_body())
    assert answer.status_code == 200
    assert len(script.asked) == 2
    assert not script.asked[1].is_retry


async def test_an_answer_that_found_nobody_is_told_as_undelivered_and_given_again(
    broker: Broker, scope: JobScope, proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    async with play(broker, scope, script, episode), http_client(proxy, episode) as http:
        first = asyncio.create_task(http.post("/v1/responses", json=response_body()))
        await until(lambda: bool(script.asked), "the call")
        first.cancel()
        await until(lambda: episode.num_open == 0, "the hang-up to be noticed")
        script.go_on.set()
        await until(lambda: bool(script.delivered), "it to be told")
        answer = await http.post("/v1/responses", json=response_body())
        await until(lambda: len(script.delivered) == 2, "the delivery")
        fresh = await http.post("/v1/responses", json=response_body())
    assert answer.json()["output"][0]["content"][0]["text"] == "You said: Hello"
    assert [told.whole for told in script.delivered[:2]] == [False, True]
    assert len(script.asked) == 2
    assert fresh.json()["id"] != answer.json()["id"]


async def test_equal_requests_are_samples_of_their_own_unless_they_say_otherwise(
    broker: Broker, scope: JobScope, proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    path, body = "/v1/chat/completions", chat_body()
    async with play(broker, scope, script, episode), http_client(proxy, episode) as http:
        retry, named = {"x-stainless-retry-count": "1"}, {"idempotency-key": "one"}
        waiting = [
            asyncio.create_task(http.post(path, json=body, headers=headers))
            for headers in ({}, {"x-stainless-retry-count": "0"}, named, named)
        ]
        await until(lambda: episode.num_open == 4, "all to be open")
        waiting.append(asyncio.create_task(http.post(path, json=body, headers=retry)))
        await until(lambda: episode.num_open == 5, "all to be open")
        script.go_on.set()
        ids = [(await each).json()["id"] for each in waiting]
        late = await http.post(path, json=body, headers=retry)
    assert len(script.asked) == 4
    assert len(set(ids)) == 3
    assert ids[2] == ids[3]
    assert ids[4] in ids[:2]
    assert late.status_code == 200
    assert [request.is_retry for request in script.asked] == [False, False, False, True]


async def test_requests_of_one_key_that_differ_get_their_own_answers(
    broker: Broker, scope: JobScope, proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    async with play(broker, scope, script, episode), http_client(proxy, episode) as http:
        named = {"idempotency-key": "the same for a whole program"}
        waiting = [
            asyncio.create_task(
                http.post("/v1/chat/completions", json=chat_body(text, **more), headers=named)
            )
            for text, more in (("a", {}), ("b", {}), ("b", {"n": 2}))
        ]
        await until(lambda: len(script.asked) == 3, "all to be asked")
        script.go_on.set()
        said = [(await each).json()["choices"] for each in waiting]
    texts = [[choice["message"]["content"] for choice in choices] for choices in said]
    assert texts == [["You said: a"], ["You said: b"], ["You said: b", "You said: b (1)"]]


async def test_a_response_is_cancelled_by_its_id(
    broker: Broker, scope: JobScope, proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 2
    ids: list[str] = []
    async with (
        ScriptedGenerator(broker, scope, script).playing(episode.episode),
        openai_client(proxy, episode) as client,
    ):
        stream = await client.responses.create(**response_body(), stream=True)
        kinds: list[str] = []
        async for event in stream:
            kinds.append(event.type)
            if event.type == "response.created":
                ids.append(event.response.id)
                cancelled = await client.responses.cancel(event.response.id)
                assert cancelled.status == "cancelled"
        await until(lambda: bool(script.cancelled), "the generator to be told")
    assert kinds[-1] == "response.failed"


async def test_a_proxy_that_stops_ends_what_is_open(
    broker: Broker, scope: JobScope, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    async with ScriptedGenerator(broker, scope, script).playing(episode.episode):
        async with ModelProxy(broker, scope) as proxy:
            proxy.open(episode)
            url = proxy.base_url
            http = http_client(proxy, episode)
            whole = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body("a")))
            stream = asyncio.create_task(
                http.post("/v1/chat/completions", json=chat_body("b", stream=True))
            )
            await until(lambda: len(script.asked) == 2, "the calls")
        answers = [await whole, await stream]
        await http.aclose()
    assert answers[0].status_code == 401
    assert "episode_over" in answers[1].text
    with pytest.raises(StateError, match="does not listen"):
        _ = proxy.base_url
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(url)


async def test_streams_show_that_they_wait_and_the_libraries_bear_it(
    broker: Broker, scope: JobScope, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 3
    times = ProxyTimes(pause_s=0.02, keepalive_s=0.05)

    async def chat() -> str:
        async with openai_client(proxy, episode) as client:
            stream = await client.chat.completions.create(**chat_body(stream=True))
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def response() -> str:
        async with (
            openai_client(proxy, episode) as client,
            client.responses.stream(**response_body()) as stream,
        ):
            return (await stream.get_final_response()).output_text

    async def message() -> str:
        async with (
            anthropic_client(proxy, episode) as client,
            client.messages.stream(**messages_body()) as stream,
        ):
            return await stream.get_final_text()

    async with ModelProxy(broker, scope, times=times) as proxy:
        proxy.open(episode)
        waiting = [asyncio.create_task(each()) for each in (chat, response, message)]
        await until(lambda: episode.num_open == 3, "the calls")
        await asyncio.sleep(0.2)  # nobody plays: the streams begin with signs of life
        async with play(broker, scope, script, episode):
            await until(lambda: len(script.asked) == 3, "the calls to be heard")
            await asyncio.sleep(0.2)  # and have some within
            script.go_on.set()
            assert await asyncio.gather(*waiting) == ["You said: Hello"] * 3
