"""Request bodies, and structured output of a real tiny model."""

import json
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.gateway.openai import read_query
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.rollout.completions import Answers
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.parts import Tell
from tinkermq.schemas.generation import Decoding
from tinkermq.schemas.infer import ChatRequest, CompletionRequest, InferPart
from tinkermq.schemas.model_apis.answers import ModelApi
from tinkermq.schemas.model_apis.chat import CHAT, COMPLETIONS
from tinkermq.schemas.model_apis.request import RequestError, history_of
from tinkermq.schemas.output_format import OutputFormat
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.gateway.canned import canned_server
from tests.actors.gateway.http import serving
from tests.support.models import HERMES, make_tiny_model
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "sub"}},
]
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def read(api: ModelApi, **fields: Any) -> ChatRequest | CompletionRequest:
    return read_query(json.dumps(fields).encode(), api)[1]


def chat(**fields: Any) -> ChatRequest:
    query = read(CHAT, **{**ASKED, **fields})
    assert isinstance(query, ChatRequest)
    return query


def shown(query: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages as a template gets them."""
    return [message.for_template() for message in history_of(query)]


def test_a_chat_becomes_a_servers_request() -> None:
    query = chat(n=2, stop="END", max_completion_tokens=7, temperature=0, seed=3, top_p=0.5)
    decoding = query.decoding
    assert (decoding.num_choices, decoding.stop, decoding.max_tokens) == (2, ["END"], 7)
    assert (decoding.temperature, decoding.seed, decoding.top_p) == (0, 3, 0.5)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"top_logprobs": 3}, "top_logprobs", "no effect without logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"presence_penalty": "high"}, "presence_penalty", "valid number"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "give json_schema"),
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"tool_choice": "required"}, "tool_choice", "and with tools required"),
        ({"tool_choice": "maybe", "tools": TOOLS}, "tool_choice", "give auto or none"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "mul"}}, "tools": TOOLS},
            "tool_choice",
            "'mul', which is not among the tools",
        ),
        ({"temprature": 1}, "temprature", "not supported"),
        ({"temprature": 0}, "temprature", "not supported"),
        ({"store": True}, "store", "answers are not kept"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "set by its chat template"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "not supported"),
        ({"min_p": 0.1}, "min_p", "not supported"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"n": 0}, "n", "an integer ≥ 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"messages": []}, "messages", "is empty"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options.include_usage",
            "without stream",
        ),
        ({"temperature": ""}, "temperature", "valid number"),
        ({"seed": "one"}, "seed", "valid integer"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"messages": [{"role": "bard", "content": "x"}]}, "messages[0].role", "'bard'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert said in str(caught.value)


def test_the_form_of_an_answer_reaches_the_server() -> None:
    asked = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}})
    assert asked.decoding.format == OutputFormat(functions=["add"], is_single=True)


def test_penalties_and_likeliest_tokens_reach_the_server() -> None:
    told: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2,
    }
    decoding = chat(**told, logprobs=True, top_logprobs=5).decoding
    assert decoding == Decoding(**told, top_logprobs=5)
    text = {"model": "m", "prompt": "hi", "logprobs": 3, "response_format": {"type": "json_object"}}
    wanted = OutputFormat(json_schema={"type": "object"})
    assert read(COMPLETIONS, **text, **told).decoding == Decoding(
        **told, top_logprobs=3, format=wanted
    )


def test_values_that_ask_for_nothing_are_taken() -> None:
    chat(frequency_penalty=0, logit_bias={}, response_format={"type": "text"}, top_logprobs=0)
    chat(tools=None, stop=None, parallel_tool_calls=True, store=False)
    chat(n=1, service_tier="auto", user="u", metadata={"run": "1"}, functions=[], verbosity=None)
    chat(stream_options={"include_usage": False}, function_call="auto", modalities=["text"])
    chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    chat(min_p=0.0, repetition_penalty=1.0, skip_special_tokens=True, ignore_eos=False, best_of=1)
    assert chat(stop=["", "END"]).decoding.stop == ["END"]
    assert chat(stop="").decoding.stop == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match="the body is n"):
        read_query(raw, CHAT)


def test_messages_reach_the_template_as_text_and_maps() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    query = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+2"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "4"},
        ]
    )
    system, user, assistant, tool = shown(query)
    assert system == {"role": "system", "content": "be brief"}
    assert user["content"] == "2+2"
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert tool["content"] == "4"


def test_an_image_comes_in_a_data_url() -> None:
    parts = [
        {"type": "text", "text": "What is"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}},
    ]
    (message,) = shown(chat(messages=[{"role": "user", "content": parts}]))
    assert message["content"] == [parts[0], {"type": "image", "image": b"\x89PNG"}]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "send its bytes in a data URL"),
        ({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}, "c.png"),
        ({"type": "image_url", "image_url": {"url": "data:;base64,$"}}, "is damaged"),
        ({"type": "image_url"}, "NoneType"),
        ({"type": "input_audio"}, "content of type 'input_audio'"),
    ],
)
def test_an_image_from_elsewhere_is_refused(part: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        chat(messages=[{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_prompts_come_as_texts_or_token_ids(prompt: Any, prompts: Any) -> None:
    query = read(COMPLETIONS, model="m", prompt=prompt)
    assert isinstance(query, CompletionRequest)
    assert query.prompts == prompts


def test_tools_are_left_out_when_none_shall_be_called() -> None:
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    tools: list[Any] = [{"type": "function", "function": function}]
    assert chat(tools=tools).tools == tools
    assert chat(tools=tools, tool_choice="none").tools == []
    custom: dict[str, Any] = {"type": "custom", "custom": {"name": "run"}}
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    described = {"name": "run", "description": "", "parameters": parameters}
    assert chat(tools=[*tools, custom]).tools == [
        *tools,
        {"type": "function", "function": described},
    ]


def test_fields_of_messages_that_only_a_template_knows_reach_it() -> None:
    named = {"role": "user", "content": "hi", "name": "ada"}
    assert shown(chat(messages=[named])) == [named]


@pytest.mark.parametrize("prompt", [None, [], [[]], ["a", 1], [1.5], [[True]], {"a": 1}])
def test_a_prompt_is_texts_or_token_ids(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read(COMPLETIONS, model="m", prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 129}, "n"),
        ({"prompt": [-1]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"messages": [1]}, "messages"),
        ({"stateful": True}, "stateful"),
    ],
)
def test_what_a_completion_cannot_do_is_refused_by_name(fields: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(COMPLETIONS, **{"model": "m", "prompt": "a", **fields})
    assert caught.value.param == param


def test_any_whole_number_is_a_seed_and_a_top_k_of_minus_one_is_none() -> None:
    for api, more in ((CHAT, ASKED), (COMPLETIONS, {"model": "m", "prompt": "a"})):
        decoding = read(api, **more, seed=-1, top_k=-1).decoding
        assert (decoding.seed, decoding.top_k) == ((1 << 63) - 1, 0)
    with pytest.raises(RequestError, match="top_k"):
        chat(top_k=-2)


# -- Structured output of a real tiny model, asked with the official clients -----------------------


MODEL = "my-run@4"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class Animal(Enum):
    cat = "cat"
    dog = "dog"


class Owner(BaseModel):
    initials: str = Field(pattern="^[A-C]{2}$")


class Pet(BaseModel):
    kind: Animal
    is_tame: bool
    owner: Owner | None


class Tame(BaseModel):
    """Without a pattern, which Anthropic's client takes out of a schema."""

    kind: Animal
    is_tame: bool


SCHEMA_NB = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
TOOLS_NB: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA_NB}}
    for name in ("go", "do")
]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA_NB}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def thinks() -> bool:
    """Whether the template opens the reasoning of an answer."""
    return False


@pytest_asyncio.fixture
async def url(broker: Broker, scope: JobScope, folder: Path, thinks: bool) -> AsyncIterator[str]:
    """A gateway before a server of a tiny model whose template writes Hermes' calls."""
    tokenizer = load_tokenizer(str(folder))
    opening = "{{ '<|assistant|><think>' }}" if thinks else "{{ '<|assistant|>' }}"
    template = HERMES.replace("{{ '<|assistant|>' }}", opening)
    names = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    tokenizer.chat_template = names + template
    chat = ChatTokenizer(tokenizer)
    engine = await TransformersEngine.start(str(folder), max_slots=8, max_context=400)
    answers = Answers(engine, chat, lambda: MODEL, max_context=400, max_open=64)

    async def answer(request: ChatRequest | CompletionRequest, tell: Tell[InferPart]) -> InferPart:
        if isinstance(request, ChatRequest):
            return await answers.chat(request, tell)
        return await answers.complete(request, tell)

    async with canned_server(broker, scope, MODEL, answer), serving(broker) as at:
        yield at
    await engine.close()


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=url, api_key="any", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


async def test_the_official_client_parses_chats_and_responses(client: AsyncOpenAI) -> None:
    chat = await client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Pet, n=3
    )
    for choice in chat.choices:
        assert isinstance(choice.message.parsed, Pet)
        assert choice.finish_reason == "stop"
    response = await client.responses.parse(model=MODEL, input="hello", text_format=Pet)
    assert isinstance(response.output_parsed, Pet)


async def test_anthropics_client_parses_messages(url: str) -> None:
    async with AsyncAnthropic(
        base_url=url.removesuffix("/v1"), api_key="any", max_retries=0
    ) as client:
        made = await client.messages.parse(
            model=MODEL, max_tokens=300, messages=HELLO, output_format=Tame
        )
        assert isinstance(made.parsed_output, Tame)
        async with client.messages.stream(
            model=MODEL, max_tokens=300, messages=HELLO, output_format=Tame
        ) as stream:
            assert isinstance((await stream.get_final_message()).parsed_output, Tame)


@pytest.mark.parametrize("choice", ["required", "do"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_demanded_calls_are_made(client: AsyncOpenAI, choice: str, stream: bool) -> None:
    told: Any = choice if choice == "required" else {"type": "function", "function": {"name": "do"}}
    asked: Any = {"model": MODEL, "messages": HELLO, "tools": TOOLS_NB, "tool_choice": told}
    if choice == "required":
        asked["parallel_tool_calls"] = False
    if stream:
        chunks = await client.chat.completions.create(**asked, stream=True)
        deltas = [chunk.choices[0] async for chunk in chunks]
        calls: Any = [call for delta in deltas for call in delta.delta.tool_calls or []]
        assert not any(delta.delta.content for delta in deltas)
        reason = deltas[-1].finish_reason
    else:
        one = (await client.chat.completions.create(**asked)).choices[0]
        calls, reason = one.message.tool_calls or [], one.finish_reason
        assert not one.message.content
    assert reason == "tool_calls"
    (call,) = calls
    assert call.function.name in (("do",) if choice == "do" else ("go", "do"))
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA_NB)


@pytest.mark.parametrize("thinks", [True])
async def test_where_the_prompt_opens_the_reasoning_the_form_follows_it(
    client: AsyncOpenAI, thinks: bool
) -> None:
    """A random model seldom ends its reasoning: its answer is cut there, and no form is claimed."""
    asked: Any = {"model": MODEL, "messages": HELLO, "response_format": FORMAT, "max_tokens": 200}
    made = await client.chat.completions.create(**asked, n=4, extra_body={"return_token_ids": True})
    for choice in made.choices:
        told = choice.message.to_dict()
        assert told.get("reasoning_content")
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA_NB)
        else:
            assert choice.finish_reason == "length"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"type": "foo"}, "schema.type must be one of"),
    ({"properties": {"a": {"items": {"$ref": "#/$defs/no"}}}}, "properties.a.items.$ref"),
    ({"items": {"minLength": 1, "pattern": "a{2"}}, "(at schema.items.pattern)"),
]
"""Others are in tests/schemas/test_output_format.py."""


@pytest.mark.parametrize("bad", BAD, ids=[place for _, place in BAD])
async def test_a_bad_schema_is_told_with_its_place(
    client: AsyncOpenAI, bad: tuple[dict[str, Any], str]
) -> None:
    schema, place = bad
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
    assert place in str(caught.value)
    if place.startswith("schema."):
        assert caught.value.param == f"response_format.json_schema.{place.split()[0]}"


async def test_the_likeliest_tokens_are_told_in_the_words_of_each_api(client: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "seed": 5, "max_tokens": 6}
    chat = await client.chat.completions.create(
        **asked, messages=HELLO, logprobs=True, top_logprobs=3, temperature=0
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    for one in logprobs.content or []:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob == pytest.approx(one.logprob, abs=1e-4)
        values = [top.logprob for top in one.top_logprobs]
        assert values == sorted(values, reverse=True)
    stream = await client.chat.completions.create(
        **asked, messages=HELLO, logprobs=True, top_logprobs=3, temperature=0, stream=True
    )
    told = [
        one
        async for chunk in stream
        if chunk.choices and chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content or []
    ]
    assert [one.token for one in told] == [one.token for one in logprobs.content or []]
    assert all(len(one.top_logprobs) == 3 for one in told)
    text = await client.completions.create(**asked, prompt="hello", logprobs=4)
    tops = text.choices[0].logprobs
    assert tops is not None
    assert len(tops.top_logprobs or []) == len(tops.tokens or [])
    # by their texts, as OpenAI tells them: bytes that are no characters are all alike
    assert all(1 <= len(top) <= 4 for top in tops.top_logprobs or [])
