"""OpenAI's endpoints, asked with the official client; the servers behind them are canned."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.wire.errors import BusyError, ConfigError

from tests.actors.gateway.canned import Canned
from tests.actors.gateway.http import openai_client, serving
from tests.support.waiting import PATIENCE_S

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
STATEFUL = {"x-tinkermq-stateful": "1"}
ASKED: Any = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def client(broker: Broker, canned: Canned) -> AsyncIterator[AsyncOpenAI]:
    """The official client."""
    async with openai_client(broker) as client:
        yield client


async def test_models_are_listed_under_run_and_step(client: AsyncOpenAI) -> None:
    models = [model.id for model in (await client.models.list()).data]
    assert models == ["my-run@4", "other-run@2"]
    assert (await client.models.retrieve("my-run@4")).owned_by == "local"


async def test_a_chat_is_answered_whole_with_logprobs_and_usage(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="my-run@4", messages=ASKED, logprobs=True)
    (choice,) = chat.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert [(one.token, one.logprob) for one in choice.logprobs.content or []] == [
        ("Hel", 0.0),
        ("lo", -0.5),
    ]
    assert chat.model == "my-run@4"
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.total_tokens) == (3, 5)


async def test_an_adapter_beside_what_is_served_is_asked_by_its_name(
    client: AsyncOpenAI, canned: Canned
) -> None:
    for model, adapter in (("other-run@2", "other-run@2"), ("my-run@4", "")):
        await client.chat.completions.create(model=model, messages=ASKED)
        await client.completions.create(model=model, prompt="Oh ")
        assert [request.adapter for request in canned.asked[-2:]] == [adapter, adapter]


async def test_a_stream_comes_in_pieces_and_ends_with_the_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="my-run@4",
        messages=ASKED,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert [text for text in deltas if text] == ["Hel", "lo"]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_tool_calls_come_as_such_whole_and_streamed(
    client: AsyncOpenAI, canned: Canned
) -> None:
    canned.words = ["So: ", CALL[:5], CALL[5:30], CALL[30:]]
    chat = await client.chat.completions.create(model="my-run@4", messages=ASKED, tools=TOOLS)
    (call,) = chat.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1}
    assert chat.choices[0].message.content == "So:"
    assert chat.choices[0].finish_reason == "tool_calls"
    assert canned.asked[-1].to_map()["tools"] == TOOLS

    stream = await client.chat.completions.create(
        model="my-run@4", messages=ASKED, tools=TOOLS, stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "So:"
    (streamed,) = [one for chunk in chunks for one in chunk.delta.tool_calls or []]
    assert streamed.function is not None
    assert (streamed.index, streamed.function.name) == (0, "add")
    assert chunks[-1].finish_reason == "tool_calls"


async def test_completions_continue_texts_and_token_ids(
    client: AsyncOpenAI, canned: Canned
) -> None:
    done = await client.completions.create(model="my-run@4", prompt="Oh ", logprobs=0)
    assert done.choices[0].text == "Hello"
    assert done.choices[0].logprobs is not None
    assert done.choices[0].logprobs.token_logprobs == [0.0, -0.5]
    assert done.choices[0].logprobs.text_offset == [0, 3]
    stream = await client.completions.create(model="my-run@4", prompt=[1, 2], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"
    assert canned.asked[-1].to_map()["prompts"] == [[1, 2]]


async def test_tokens_stand_where_vllm_has_them(client: AsyncOpenAI) -> None:
    asked: Any = {"model": "my-run@4", "extra_body": {"return_token_ids": True}}
    chat: Any = await client.chat.completions.create(messages=ASKED, **asked)
    assert (chat.prompt_token_ids, chat.choices[0].token_ids) == ([5, 6, 7], [0, 1])
    text: Any = (await client.completions.create(prompt="Oh ", **asked)).choices[0]
    assert (text.prompt_token_ids, text.token_ids) == ([5, 6, 7], [0, 1])
    plain: Any = await client.chat.completions.create(model="my-run@4", messages=ASKED)
    assert not {"prompt_token_ids", "token_ids"} & {*plain.model_extra, *plain.choices[0].to_dict()}


async def test_tokens_are_streamed_with_their_text(client: AsyncOpenAI) -> None:
    asked: Any = {"model": "my-run@4", "extra_body": {"return_token_ids": True}, "stream": True}
    stream: Any = await client.chat.completions.create(messages=ASKED, **asked)
    chunks = [chunk.to_dict() async for chunk in stream]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
        [5, 6, 7]
    ]
    assert [one["choices"][0].get("token_ids") for one in chunks] == [None, [0], [1], None]
    stream = await client.completions.create(prompt="Oh ", **asked)
    texts = [chunk.choices[0].to_dict() async for chunk in stream]
    assert [text.get("prompt_token_ids") for text in texts] == [[5, 6, 7], None, None]
    assert [text.get("token_ids") for text in texts] == [[0], [1], None]


@pytest.mark.parametrize("how", [{"extra_body": {"stateful": True}}, {"extra_headers": STATEFUL}])
async def test_a_stateful_chat_is_refused_as_removed(
    client: AsyncOpenAI, canned: Canned, how: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match="stateful' was removed"):
        await client.chat.completions.create(model="my-run@4", messages=ASKED, **how)
    assert not canned.asked


async def test_an_unknown_model_is_404_and_names_those_there_are(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there are: my-run@4, other-run@2") as caught:
        await client.chat.completions.create(model="other", messages=ASKED)
    assert caught.value.code == "model_not_found"


async def test_a_parameter_without_effect_is_refused_by_name(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="my-run@4", messages=ASKED, logit_bias={"5": 1})
    assert caught.value.param == "logit_bias"
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_server_refuses_has_a_status_of_its_own(
    client: AsyncOpenAI, canned: Canned, stream: bool
) -> None:
    canned.error = BusyError("this server is full", hint="ask again later")
    with pytest.raises(openai.RateLimitError, match=r"this server is full\. ask again") as busy:
        await client.chat.completions.create(model="my-run@4", messages=ASKED, stream=stream)
    headers = busy.value.response.headers
    assert (headers["x-should-retry"], headers["retry-after"]) == ("true", "1")
    canned.error = ConfigError("the prompt is too long")
    with pytest.raises(openai.BadRequestError, match="too long") as refused:
        await client.chat.completions.create(model="my-run@4", messages=ASKED, stream=stream)
    assert refused.value.response.headers["x-should-retry"] == "false"
    canned.error = RuntimeError("secret")
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="my-run@4", messages=ASKED, stream=stream)
    assert "secret" not in str(caught.value)


async def test_a_reader_who_leaves_a_stream_ends_the_work_for_it(
    client: AsyncOpenAI, canned: Canned
) -> None:
    canned.hang = True
    stream = await client.chat.completions.create(model="my-run@4", messages=ASKED, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await asyncio.wait_for(canned.cancelled.wait(), PATIENCE_S)


async def test_a_caller_who_hangs_up_ends_the_work_for_it(
    client: AsyncOpenAI, canned: Canned
) -> None:
    canned.hang = True
    asking = asyncio.create_task(
        client.chat.completions.create(model="my-run@4", messages=ASKED), name="caller"
    )
    while not canned.asked:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait_for(canned.cancelled.wait(), PATIENCE_S)


async def test_a_body_that_is_no_json_gets_the_envelope(broker: Broker) -> None:
    async with serving(broker) as url, httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/chat/completions", content=b"{")
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
