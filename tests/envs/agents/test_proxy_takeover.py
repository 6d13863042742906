"""Answers that outlive who gives them and who waits for them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.proxy.calls import ProxyTimes
from tinkermq.envs.agents.proxy.proxy import ModelProxy
from tinkermq.schemas.wire.errors import StateError
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

LONG = "one two three four five six seven eight nine ten"


@pytest.fixture
async def brisk(
    broker: Broker, scope: JobScope, episode: ProgramEpisode
) -> AsyncIterator[ModelProxy]:
    """A proxy that soon takes silence for death."""
    times = ProxyTimes(silence_s=3.0, pause_s=0.02, adopt_s=0.5)
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
    broker: Broker, scope: JobScope, brisk: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    async with play(broker, scope, script, episode), http_client(brisk, episode) as http:
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
    broker: Broker, scope: JobScope, brisk: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    async with play(broker, scope, script, episode), http_client(brisk, episode) as http:
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
    broker: Broker, scope: JobScope, brisk: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.stops_at = 0
    async with play(broker, scope, script, episode), http_client(brisk, episode) as http:
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
    assert answers[0].status_code == 410
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
