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
from tinkermq.schemas.infer import ChatRequest, CompletionRequest, InferPart
from tinkermq.schemas.model_apis.chat import CHAT
from tinkermq.schemas.model_apis.request import RequestError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.gateway.canned import canned_server
from tests.actors.gateway.http import serving
from tests.support.models import HERMES, make_tiny_model
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full


def shown(query: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages as a template gets them."""
    return [message.for_template() for message in query.messages]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match=r"the body (is not|must be an object)"):
        read_query(raw, CHAT)


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
