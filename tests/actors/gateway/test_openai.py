"""Served models asked with their makers' clients; the servers behind them are canned."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic, beta_async_tool
from openai import AsyncOpenAI
from openai.types.responses import Response
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jobs import JobStore
from tinkermq.schemas.infer import ChatRequest
from tinkermq.schemas.wire.errors import BusyError, ConfigError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.gateway.canned import Canned, canned_server, serving_record
from tests.actors.gateway.http import openai_client, serving
from tests.support.waiting import PATIENCE_S

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


async def test_a_long_answer_with_logprobs_is_whole(client: AsyncOpenAI, canned: Canned) -> None:
    canned.words = ["é", '"', "\n"] * 400
    asked: Any = {"model": "my-run@4", "extra_body": {"return_token_ids": True}}
    chat: Any = await client.chat.completions.create(messages=ASKED, logprobs=True, **asked)
    (choice,) = chat.choices
    assert choice.message.content == "".join(canned.words)
    assert [one.token for one in choice.logprobs.content] == canned.words
    assert choice.token_ids == list(range(1200))
    text = (await client.completions.create(prompt="Oh ", logprobs=0, **asked)).choices[0]
    assert text.text == "".join(canned.words)
    assert text.logprobs is not None
    assert text.logprobs.text_offset == list(range(1200))


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
        await client.chat.completions.create(model="my-run@4", messages=ASKED, store=True)
    assert caught.value.param == "store"
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


@pytest.mark.parametrize("words", [[], ["Hel"]], ids=["before its first word", "behind a word"])
@pytest.mark.parametrize(
    ("path", "sign"), [("chat/completions", ": waiting"), ("messages", "event: ping")]
)
async def test_a_stream_that_has_nothing_to_say_is_kept_alive(
    broker: Broker, canned: Canned, words: list[str], path: str, sign: str
) -> None:
    canned.words, canned.hang = words, True
    asked = {"model": "my-run@4", "messages": ASKED, "max_tokens": 9, "stream": True}
    async with serving(broker, keepalive_s=0.05) as url, httpx.AsyncClient() as http:
        async with http.stream("POST", f"{url}/{path}", json=asked, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line == sign:
                    break
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


async def test_a_caller_who_hangs_up_before_a_stream_begins_ends_the_work_for_it(
    client: AsyncOpenAI, canned: Canned
) -> None:
    canned.words, canned.hang = [], True
    asking = asyncio.create_task(
        client.chat.completions.create(model="my-run@4", messages=ASKED, stream=True),
        name="caller",
    )
    while not canned.asked:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait_for(canned.cancelled.wait(), PATIENCE_S)


async def test_a_job_answers_as_long_as_any_of_its_servers_does(
    broker: Broker, scope: JobScope
) -> None:
    async with canned_server(broker, scope, actor="server-1"), openai_client(broker) as client:
        chat = await client.chat.completions.create(model="my-run@4", messages=ASKED)
    assert chat.choices[0].message.content == "Hello"


async def test_a_model_whose_servers_are_away_is_asked_again_and_not_unknown(
    broker: Broker, scope: JobScope
) -> None:
    record = serving_record(scope)
    await JobStore(broker).create(record, "test")
    async with openai_client(broker) as client:
        for model in ("my-run@4", record.name, "other-run@2"):
            with pytest.raises(openai.InternalServerError, match="the run is RUNNING") as raised:
                await client.chat.completions.create(model=model, messages=ASKED)
            assert raised.value.status_code == 503
            assert raised.value.response.headers["x-should-retry"] == "true"
        assert not (await client.models.list()).data
    await JobStore(broker).transition(record, "COMPLETED", "the test is over", "test")


async def test_a_body_that_is_no_json_gets_the_envelope(broker: Broker) -> None:
    async with serving(broker) as url, httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/chat/completions", content=b"{")
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# -- A served model asked through Responses and Messages, with their makers' clients ---------------


WORDS = [
    "<think>\nhm",
    "\n</think>I lo",
    'ok.<tool_call>{"name": "add", "argu',
    'ments": {"a": 1}}',
]
WORDS += ["</tool_call>"]
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJ"
    "RU5ErkJggg=="
)
ASKED_RESPONSE: Any = {"model": "my-run@4", "input": "2+2?"}


@pytest_asyncio.fixture
async def responses(broker: Broker, canned: Canned) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client."""
    canned.words = WORDS
    async with openai_client(broker) as client:
        yield client


@pytest_asyncio.fixture
async def messages(broker: Broker, canned: Canned) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's client."""
    canned.words = WORDS
    async with serving(broker) as url:
        base = url.removesuffix("/v1")
        async with AsyncAnthropic(base_url=base, api_key="any", max_retries=0) as client:
            yield client


def chats(canned: Canned) -> list[ChatRequest]:
    """Return the chats that a server was asked."""
    return [asked for asked in canned.asked if isinstance(asked, ChatRequest)]


async def respond(client: AsyncOpenAI, *, stream: bool = False, **more: Any) -> Any:
    tool: Any = {"type": "function", "name": "add", "parameters": {}, "strict": False}
    asked = {**ASKED_RESPONSE, "instructions": "be brief", "tools": [tool], **more}
    if not stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        return await events.get_final_response()


async def message(client: AsyncAnthropic, *, stream: bool = False, **more: Any) -> Any:
    tool: Any = {"name": "add", "input_schema": {"type": "object"}}
    asked: Any = {"model": "my-run@4", "messages": [{"role": "user", "content": "2+2?"}]}
    asked |= {"tools": [tool], "system": "be brief", "max_tokens": 9, **more}
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_response_has_reasoning_text_call_and_counts(
    responses: AsyncOpenAI, canned: Canned, stream: bool
) -> None:
    made = await respond(
        responses, stream=stream, temperature=0.5, store=False, max_output_tokens=7
    )
    thought, said, call = made.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert (said.type, said.content[0].text) == ("message", "I look.")
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 1}')
    assert (made.model, made.status) == ("my-run@4", "completed")
    assert (made.usage.input_tokens, made.usage.output_tokens) == (3, 5)
    (asked,) = canned.asked
    assert isinstance(asked, ChatRequest)
    assert [told.content for told in asked.messages] == [("be brief",), ("2+2?",)]
    assert (asked.decoding.temperature, asked.decoding.max_tokens) == (0.5, 7)
    assert asked.stream == stream


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_message_has_thinking_text_call_and_counts(
    messages: AsyncAnthropic, canned: Canned, stream: bool
) -> None:
    made = await message(messages, stream=stream, stop_sequences=["!"], metadata={"user_id": "u"})
    thought, said, call = made.content
    assert (thought.type, thought.thinking) == ("thinking", "hm")
    assert (said.type, said.text) == ("text", "I look.")
    assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1})
    assert (made.model, made.stop_reason) == ("my-run@4", "tool_use")
    assert made.usage.output_tokens == 5
    (asked,) = canned.asked
    assert isinstance(asked, ChatRequest)
    assert [told.content for told in asked.messages] == [("be brief",), ("2+2?",)]
    assert asked.decoding.stop == ["!"]


TWO_CALLS = [*WORDS, '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>', "So."]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_calls_one_tool_where_it_may_call_no_more(
    responses: AsyncOpenAI, messages: AsyncAnthropic, canned: Canned, stream: bool
) -> None:
    canned.words = TWO_CALLS
    made = await respond(responses, stream=stream)
    assert [item.type for item in made.output].count("function_call") == 2
    made = await respond(responses, stream=stream, parallel_tool_calls=False)
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
    assert made.output[-1].arguments == '{"a": 1}'
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    made = await message(messages, stream=stream, tool_choice=choice)
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use"]
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
    asked: Any = {"model": "my-run@4", "messages": ASKED, "tools": [tool]}
    asked["parallel_tool_calls"] = False
    if stream:
        async with responses.chat.completions.stream(**asked) as events:
            chat: Any = await events.get_final_completion()
    else:
        chat = await responses.chat.completions.create(**asked)
    (call,) = chat.choices[0].message.tool_calls
    assert (call.function.arguments, chat.choices[0].finish_reason) == ('{"a": 1}', "tool_calls")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_tokens_are_told_as_of_episodes(
    responses: AsyncOpenAI, messages: AsyncAnthropic, stream: bool
) -> None:
    body = {"return_token_ids": True}
    made = await respond(responses, stream=stream, extra_body=body)
    told = {"prompt_token_ids": [5, 6, 7], "answers": [{"token_ids": [0, 1, 2, 3, 4]}]}
    assert made.to_dict()["tinkermq"] == told
    if not stream:  # this client's last message has no room for it
        other = await message(messages, extra_body=body)
        assert other.to_dict()["tinkermq"] == told


@pytest.mark.parametrize(
    "how",
    [{"extra_body": {"stateful": True}}, {"extra_headers": {"x-tinkermq-stateful": "true"}}],
    ids=["body", "header"],
)
async def test_a_stateful_conversation_is_refused_as_removed(
    responses: AsyncOpenAI, messages: AsyncAnthropic, canned: Canned, how: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match="stateful' was removed"):
        await respond(responses, **how)
    with pytest.raises(anthropic.BadRequestError, match="stateful' was removed"):
        await message(messages, **how)
    assert not canned.asked


async def test_results_of_tools_and_images_reach_the_server(
    messages: AsyncAnthropic, canned: Canned
) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    image = {"type": "base64", "media_type": "image/png", "data": PNG}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "3"}
    history = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "image", "source": image}]},
    ]
    await message(messages, messages=history)
    (asked,) = canned.asked
    assert isinstance(asked, ChatRequest)
    _, _, called, answered, shown = (one.for_template() for one in asked.messages)
    function = {"name": "add", "arguments": {"a": 1}}
    assert called["tool_calls"] == [{"type": "function", "id": "c1", "function": function}]
    assert (answered["role"], answered["content"]) == ("tool", "3")
    assert answered["tool_call_id"] == "c1"
    assert shown["content"][0]["image"].startswith(b"\x89PNG")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_stop_text_that_ended_a_message_is_told(
    messages: AsyncAnthropic, canned: Canned, stream: bool
) -> None:
    canned.words = ["ok"]
    made = await message(messages, stream=stream, stop_sequences=["END"])
    assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
    canned.stop = "END"
    made = await message(messages, stream=stream, stop_sequences=["END"])
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "END")


GRAMMAR = {"type": "custom", "name": "run", "description": "runs a script"}
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
BARE = {"type": "function", "name": "look"}
ECHOED: list[dict[str, Any]] = [
    {},
    {"tools": [ADD]},
    {"tools": [ADD, GRAMMAR, BARE], "tool_choice": "auto"},
    {"tools": [ADD], "tool_choice": "none", "parallel_tool_calls": True},
    {"temperature": 0.25, "top_p": 0.5, "max_output_tokens": 17},
    {"temperature": 0.0},
    {"instructions": "be brief", "metadata": {"run": "7"}, "user": "u1"},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "truncation": "disabled"},
    {"reasoning": {"summary": "auto"}, "service_tier": "auto", "background": False},
    {"prompt_cache_key": "k", "safety_identifier": "s", "top_logprobs": 0},
    {"tools": None, "temperature": None, "instructions": None, "metadata": None},
]
DEFAULTS: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "service_tier": "default",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_response_tells_what_was_asked(
    broker: Broker, canned: Canned, stream: bool
) -> None:
    canned.words = ["ok"]
    async with serving(broker) as url, httpx.AsyncClient() as http:
        for asked in ECHOED:
            await _tells(http, f"{url}/responses", asked, stream=stream)


async def _tells(http: httpx.AsyncClient, url: str, asked: dict[str, Any], *, stream: bool) -> None:
    """Ask, and compare what is told with what was asked."""
    body = {**ASKED_RESPONSE, **asked, "stream": stream}
    answer = await http.post(url, json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        told = [answer.json()]
    else:
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        told = [event["response"] for event in events if "response" in event]
        assert len(told) == 3  # created, in progress, completed
    given = {name: value for name, value in asked.items() if value is not None}
    if "reasoning" in given:
        given["reasoning"] = {"effort": None, **given["reasoning"]}
    if given.get("service_tier") == "auto":
        given["service_tier"] = "default"
    for response in told:
        assert {**response, **DEFAULTS, **given} == response
        Response.model_validate(response)


async def test_a_tool_runner_that_keeps_threads_sends_the_whole_history(
    messages: AsyncAnthropic, canned: Canned
) -> None:
    canned.words = WORDS

    @beta_async_tool
    async def add(a: int) -> str:
        """Add.

        Args:
            a: A number.
        """
        canned.words = ["It is ", str(a)]
        return str(a)

    runner = messages.beta.messages.tool_runner(
        model="my-run@4", max_tokens=9, tools=[add], messages=[{"role": "user", "content": "2?"}]
    )
    last = await runner.until_done()
    assert [block.text for block in last.content if block.type == "text"] == ["It is 1"]
    roles = [[message.role for message in asked.messages] for asked in chats(canned)]
    assert roles == [["user"], ["user", "assistant", "tool"]]


async def test_errors_come_in_the_words_of_each_api(
    responses: AsyncOpenAI, messages: AsyncAnthropic, canned: Canned
) -> None:
    with pytest.raises(openai.BadRequestError, match="answers are not kept") as refused:
        await respond(responses, extra_body={"store": True})
    assert refused.value.param == "store"
    with pytest.raises(anthropic.BadRequestError, match="'betas' is not supported here"):
        await message(messages, extra_body={"betas": ["a"]})
    assert not canned.asked
    canned.error = BusyError("too much to do", hint="ask again")
    with pytest.raises(openai.RateLimitError, match="too much to do"):
        await respond(responses)
    with pytest.raises(anthropic.RateLimitError, match="too much to do") as raised:
        await message(messages)
    assert raised.value.body == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "too much to do. ask again"},
    }
    with pytest.raises(anthropic.NotFoundError, match="my-run@4"):
        await message(messages, model="nothing")


async def test_a_body_that_is_no_json_is_told_in_the_words_of_messages(broker: Broker) -> None:
    async with serving(broker) as url, httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/messages", content=b"{no")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "not valid JSON" in answer.json()["error"]["message"]


async def test_a_stream_that_breaks_says_so(
    responses: AsyncOpenAI, messages: AsyncAnthropic, canned: Canned
) -> None:
    canned.fails_late = BusyError("the engine is gone")
    *_, last = [
        event async for event in await responses.responses.create(**ASKED_RESPONSE, stream=True)
    ]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "the engine is gone"
    with pytest.raises(anthropic.APIError, match="the engine is gone"):
        await message(messages, stream=True)
