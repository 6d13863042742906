"""Request bodies, and structured output of a real tiny model."""

import json
import re
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
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
from tinkermq.schemas.model_apis.answers import ModelApi
from tinkermq.schemas.model_apis.chat import CHAT, COMPLETIONS
from tinkermq.schemas.model_apis.messages import MESSAGES
from tinkermq.schemas.model_apis.request import RequestError
from tinkermq.schemas.model_apis.responses import RESPONSES
from tinkermq.schemas.wire.subjects import JobScope
from transformers import AutoModelForCausalLM

from tests.actors.gateway.canned import canned_server
from tests.actors.gateway.http import serving
from tests.support.models import HERMES, make_tiny_model, plain_logprobs
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full


def shown(query: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages as a template gets them."""
    return [message.for_template() for message in query.messages]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(
        RequestError, match=r"the body (cannot be read: it is not valid JSON|must be an object)"
    ):
        read_query(raw, CHAT)


HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("api", "body", "hint"),
    [
        (CHAT, {**HI, "temprature": 0.5}, "did you mean temperature?"),
        (CHAT, {**HI, "modle": "m"}, "did you mean model?"),
        (CHAT, {**HI, "topP": 0.5}, "did you mean top_p?"),
        (CHAT, {**HI, "system": "You are brief."}, "leave it out"),  # not `stream`
        (CHAT, {**HI, "stream_options": {"inclde_usage": True}}, "stream_options.include_usage?"),
        (CHAT, {"mesages": HI["messages"]}, "'mesages' was sent: did you mean messages?"),
        (COMPLETIONS, {"prompt": "hi", "max_token": 3}, "did you mean max_tokens?"),
        (COMPLETIONS, {"promt": "hi"}, "'promt' was sent: did you mean prompt?"),
        (MESSAGES, {**HI, "stop_sequence": ["a"]}, "did you mean stop_sequences?"),
        (MESSAGES, {"message": HI["messages"]}, "'message' was sent: did you mean messages?"),
        (RESPONSES, {"input": "hi", "reasoning": {"efort": "low"}}, "mean reasoning.effort?"),
        (RESPONSES, {"imput": "hi"}, "'imput' was sent: did you mean input?"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_one_that_is_meant(
    api: ModelApi, body: dict[str, Any], hint: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read_query(json.dumps(body).encode(), api)
    assert refused.value.hint.endswith(hint)


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


# -- what evaluators and vLLM's clients send -------------------------------------------------------


@pytest.fixture
def chat(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(load_tokenizer(str(folder)))


async def sent(url: str, path: str, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await client.post(f"{url}{path}", json={"model": MODEL, **fields})


async def test_a_prompt_is_repeated_with_its_log_probs(
    client: AsyncOpenAI, folder: Path, chat: ChatTokenizer
) -> None:
    texts = ["2 + 2 = é", "<|user|>hi"]
    asked: Any = {"model": MODEL, "echo": True, "logprobs": 1, "temperature": 0}
    made = await client.completions.create(**asked, prompt=texts, max_tokens=2)
    ids = [chat.encode(text, special=True) for text in texts]
    by_ids = await client.completions.create(**asked, prompt=ids, max_tokens=2)
    scored = await client.completions.create(**asked, prompt=texts, max_tokens=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for number, choice in enumerate(made.choices):
        told, tokens = choice.logprobs, ids[number]
        assert told is not None
        assert told.token_logprobs is not None
        assert told.text_offset
        assert choice.text.startswith(texts[number])
        assert len(told.token_logprobs) == len(tokens) + 2
        assert told.token_logprobs[0] is None
        assert (told.top_logprobs or [])[0] is None
        expected = plain_logprobs(model, np.array(tokens[:1]), np.array(tokens[1:]))
        np.testing.assert_allclose(told.token_logprobs[1 : len(tokens)], expected, atol=1e-4)
        for token, offset in zip(told.tokens or [], told.text_offset, strict=True):
            if "\ufffd" not in token:
                assert choice.text[offset:].startswith(token)
        assert by_ids.choices[number].logprobs == told
        assert by_ids.choices[number].text == choice.text
        alone = scored.choices[number]
        assert (alone.text, alone.finish_reason) == (texts[number], "length")
        assert alone.logprobs is not None
        assert alone.logprobs.token_logprobs == told.token_logprobs[: len(tokens)]
    assert made.usage is not None
    assert made.usage.completion_tokens == 4
    stream = await client.completions.create(**asked, prompt=texts[0], max_tokens=2, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == made.choices[0].text
    tokens = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens or []]
    assert tokens == (made.choices[0].logprobs and made.choices[0].logprobs.tokens)
    plain = await client.completions.create(model=MODEL, prompt=texts, max_tokens=2, echo=True, n=2)
    assert [choice.text.startswith(texts[choice.index // 2]) for choice in plain.choices] == [
        True
    ] * 4


async def test_a_chat_has_the_log_probs_of_its_prompt(url: str, folder: Path) -> None:
    made = (await sent(url, "/chat/completions", messages=HELLO, prompt_logprobs=2)).json()
    ids, rows = made["prompt_token_ids"], made["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == len(ids)
    expected = plain_logprobs(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        np.array(ids[:1]),
        np.array(ids[1:]),
    )
    own = [row[str(token)]["logprob"] for row, token in zip(rows[1:], ids[1:], strict=True)]
    np.testing.assert_allclose(own, expected, atol=1e-4)


async def test_biases_and_excluded_words_have_their_effect(
    client: AsyncOpenAI, chat: ChatTokenizer
) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 6, "temperature": 0}

    async def answer(**fields: Any) -> Any:
        made = await client.chat.completions.create(**asked, extra_body=fields)
        return made.choices[0]

    (a,), (b,) = chat.encode("a"), chat.encode("b")
    assert (await answer(logit_bias={str(a): 100})).message.content == "aaaaaa"
    assert (await answer(allowed_token_ids=[a, b], bad_words=["a"])).message.content == "bbbbbb"
    forced = {"logit_bias": {str(a): 100}}
    ended = await answer(**forced, stop_token_ids=[a])
    assert (ended.message.content, ended.finish_reason) == ("", "stop")
    assert ended.stop_reason == a
    late = await answer(**forced, stop=["a"], min_tokens=3)
    assert (late.message.content, late.stop_reason) == ("aaa", "a")
    end = chat.stop_token_ids[0]
    assert (await answer(logit_bias={str(end): 100})).finish_reason == "stop"
    assert (await answer(logit_bias={str(end): 100}, ignore_eos=True)).finish_reason == "length"
    assert (await answer(logit_bias={str(end): 100}, min_tokens=6)).finish_reason == "length"
    for refused in ({"allowed_token_ids": [99_999]}, {"min_tokens": 7}, {"logit_bias": {"9": 101}}):
        with pytest.raises(openai.BadRequestError, match=next(iter(refused))):
            await answer(**refused)


async def test_an_answer_has_the_form_that_vllms_clients_require(client: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 60}
    for form, pattern in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "[ab]{2}/[0-9]"}}, "[ab]{2}/[0-9]"),
        ({"guided_grammar": 'root ::= "x" ("y" | "z")'}, "x[yz]"),
        ({"structured_outputs": {"grammar": 'start: "x" NUM\nNUM: /[0-9]{2}/'}}, "x[0-9]{2}"),
        ({"guided_json": {"enum": [1, 2]}}, "1|2"),
    ):
        made = await client.chat.completions.create(**asked, extra_body=form)
        assert re.fullmatch(pattern, made.choices[0].message.content or ""), form
    with pytest.raises(openai.BadRequestError, match="look-around"):
        await client.chat.completions.create(**asked, extra_body={"guided_regex": "(?=a)b"})


async def test_a_longer_answer_than_fits_is_bounded_and_told(url: str) -> None:
    made = await sent(url, "/messages", messages=HELLO, max_tokens=32_000, temperature=0)
    assert made.status_code == 200
    bound = int(made.headers["x-tinkermq-max-tokens"])
    assert 0 < bound < 400
    assert made.json()["usage"]["output_tokens"] <= bound
    streamed = await sent(
        url, "/chat/completions", messages=HELLO, max_tokens=32_000, temperature=0, stream=True
    )
    assert streamed.headers["x-tinkermq-max-tokens"] == str(bound)
    assert (
        "x-tinkermq-max-tokens"
        not in (await sent(url, "/chat/completions", messages=HELLO, max_tokens=3)).headers
    )
    full = await sent(url, "/completions", prompt="a" * 400, max_tokens=1)
    assert full.status_code == 400
    assert "context of this model holds 400" in full.text


async def test_what_a_template_has_no_variable_for_is_told_or_refused(url: str) -> None:
    async def answer(**fields: Any) -> httpx.Response:
        return await sent(url, "/chat/completions", messages=HELLO, max_tokens=2, **fields)

    told = await answer(reasoning_effort="high", verbosity="low")
    assert told.headers["x-tinkermq-without-effect"] == "verbosity, reasoning_effort"
    assert "x-tinkermq-without-effect" not in (await answer(reasoning_effort="none")).headers
    thinking = {"type": "enabled", "budget_tokens": 1024}
    told = await sent(url, "/messages", messages=HELLO, max_tokens=2, thinking=thinking)
    assert told.headers["x-tinkermq-without-effect"] == "thinking.budget_tokens, thinking"
    assert (await answer(chat_template_kwargs={"enable_thinking": False})).status_code == 200
    for name in ("enable_thinking", "messages", "tools", "add_generation_prompt"):
        refused = await answer(chat_template_kwargs={name: ["x"]})
        assert refused.status_code == 400
        assert f"no variable '{name}'" in refused.text


@pytest.mark.parametrize("thinks", [True])
async def test_reasoning_that_cannot_be_left_out_is_refused(url: str, thinks: bool) -> None:
    refused = await sent(url, "/chat/completions", messages=HELLO, reasoning_effort="none")
    assert refused.status_code == 400
    assert "opens the reasoning" in refused.text


async def test_texts_and_conversations_are_tokenized(url: str, chat: ChatTokenizer) -> None:
    root = url.removesuffix("/v1")
    text = "hé <|user|>"
    made = (await sent(root, "/tokenize", prompt=text)).json()
    assert made["tokens"] == chat.encode(text, special=True)
    assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 400)
    assert (await sent(root, "/detokenize", tokens=made["tokens"])).json() == {"prompt": text}
    whole = (await sent(root, "/tokenize", messages=HELLO)).json()
    answered = (await sent(url, "/chat/completions", messages=HELLO, max_tokens=1)).json()
    assert whole["count"] == answered["usage"]["prompt_tokens"]
    counted = await sent(url, "/messages/count_tokens", messages=HELLO)
    assert counted.json() == {"input_tokens": whole["count"]}
    assert (await sent(root, "/tokenize", prompt="a" * 4000)).json()["count"] == 4000
    for tokens in (["a"], [[1], [2]], [], "a"):
        assert (await sent(root, "/detokenize", tokens=tokens)).status_code == 400
