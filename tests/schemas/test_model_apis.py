"""The model APIs as their makers' own libraries read and write them."""

import json
import threading
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tinkermq.schemas.model_apis.answers import AnswerHead, FinishReason, ModelApi, Usage
from tinkermq.schemas.model_apis.canonical import (
    CanonicalCall,
    CanonicalMessage,
    Piece,
    ReasoningPiece,
    ReplyReader,
    TextPiece,
    canonical_history,
    parse_reply,
)
from tinkermq.schemas.model_apis.chat import CHAT, read_chat
from tinkermq.schemas.model_apis.messages import MESSAGES, messages_error, read_messages
from tinkermq.schemas.model_apis.request import ModelRequest, RequestError
from tinkermq.schemas.model_apis.responses import RESPONSES, read_response
from tinkermq.schemas.output_format import OutputFormat

CALL = '<tool_call>\n{"name": "search", "arguments": {"query":  "é x", "n": 1.0}}\n</tool_call>'
ANSWERS = {
    "text": "  I will look.\n\n",
    "reasoning": "<think>\nLet me think.\n</think>\n\nI will look.",
    "call": CALL,
    "all": f"<think>hm\n</think>I look.\n{CALL}\n{CALL}",
    "between": f"first {CALL} then",
    "malformed": "<tool_call>{no json}</tool_call> so",
    "open call": '<tool_call>{"name": "search"',
    "open reasoning": "<think>and so on",
    "tags": "a <b> and </think or <tool_cal",
    "empty": "",
}
HEAD = AnswerHead("r1", 1, "policy")
USAGE = Usage(prompt=11, generated=7, reused=3)


def pieces_of(text: str, seed: int = 0) -> tuple[list[Piece], CanonicalMessage]:
    """Read an answer in pieces of random lengths."""
    random, reader = Random(seed), ReplyReader("c00000", calls=True)
    pieces: list[Piece] = []
    while text:
        length = random.randrange(1, 9)
        pieces += reader.push(text[:length])
        text = text[length:]
    return [*pieces, *reader.finish()], reader.reply


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_the_same_however_it_comes(text: str) -> None:
    whole = parse_reply(text, "c00000", calls=True)
    for seed in range(40):
        pieces, reply = pieces_of(text, seed)
        assert (reply, reply.reasoning) == (whole, whole.reasoning)
        told = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
        thought = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
        calls = tuple(piece for piece in pieces if isinstance(piece, CanonicalCall))
        assert (told, thought, calls) == (whole.text, whole.reasoning or "", whole.calls)


Served = Callable[[str, dict[str, Any]], "str | dict[str, Any] | tuple[int, dict[str, Any]]"]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, list[Served]]]:
    """A server that answers as it is told to; its URL, and who answers."""
    answers: list[Served] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made = answers[-1](self.path, body)
            status, told = made if isinstance(made, tuple) else (200, made)
            stream = isinstance(told, str)
            data = told.encode() if stream else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", answers
        server.shutdown()
        thread.join()


def worded(api: ModelApi, request: ModelRequest, pieces: list[Piece], end: FinishReason) -> Any:
    """Return an answer's events where a stream is asked for, else the whole."""
    answer = api.answer(HEAD, request)
    events = [*answer.start(USAGE)]
    for piece in pieces:
        events += answer.push([piece])
    events += answer.finish(end)
    return "".join([*events, *answer.end(USAGE)]) if request.stream else answer.whole(USAGE)


@cache
def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


@cache
def anthropic_client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)


def ask_chat(url: str, stream: bool) -> tuple[Any, list[dict[str, Any]]]:
    client = openai_client(url)
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    asked["tools"] = [{"type": "function", "function": {"name": "search"}}]
    if not stream:
        made = client.chat.completions.create(**asked)
    else:
        with client.chat.completions.stream(**asked) as events:
            made = events.get_final_completion()
    message = made.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})
    return made, [*asked["messages"], message]


def ask_responses(url: str, stream: bool) -> tuple[Any, list[dict[str, Any]]]:
    client = openai_client(url)
    asked: Any = {"model": "m", "input": [{"role": "user", "content": "go"}]}
    asked["tools"] = [{"type": "function", "name": "search", "parameters": {}, "strict": False}]
    if not stream:
        made = client.responses.create(**asked)
    else:
        with client.responses.stream(**asked) as events:
            made = events.get_final_response()
    items = [item.model_dump(exclude_none=True) for item in made.output]
    return made, [*asked["input"], *items]


def ask_messages(url: str, stream: bool) -> tuple[Any, list[dict[str, Any]]]:
    client = anthropic_client(url)
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    asked["max_tokens"] = 9
    asked["tools"] = [{"name": "search", "input_schema": {"type": "object"}}]
    if not stream:
        made = client.messages.create(**asked)
    else:
        with client.messages.stream(**asked) as events:
            made = events.get_final_message()
    content = [block.model_dump(exclude_none=True) for block in made.content]
    return made, [*asked["messages"], {"role": "assistant", "content": content}]


APIS = {
    "chat": (CHAT, ask_chat, "messages"),
    "responses": (RESPONSES, ask_responses, "input"),
    "messages": (MESSAGES, ask_messages, "messages"),
}


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", APIS)
def test_what_a_library_reads_and_sends_back_is_what_was_answered(
    served: tuple[str, list[Served]], name: str, stream: bool, text: str
) -> None:
    url, answers = served
    api, ask, key = APIS[name]
    pieces, reply = pieces_of(text)
    seen: list[ModelRequest] = []

    def answer(path: str, body: dict[str, Any]) -> Any:
        seen.append(api.read(body))
        return worded(api, seen[-1], pieces, "stop")

    answers.append(answer)
    _, history = ask(url, stream)
    assert seen[0].stream == stream
    assert seen[0].messages == (CanonicalMessage("user", ("go",)),)
    assert [tool["function"]["name"] for tool in seen[0].tools] == ["search"]
    echoed = api.read({"model": "m", key: history}).messages
    assert echoed[0] == seen[0].messages[0]
    if reply.content or reply.calls or reply.reasoning:
        (back,) = echoed[1:]
        assert back.agrees(reply)
        assert [call.id for call in back.calls] == [call.id for call in reply.calls]


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_each_event_and_answer_of_responses_has_the_shape_of_openais_own_types(text: str) -> None:
    pieces, _ = pieces_of(text)
    request = read_response({"input": "go", "stream": True})
    events = worded(RESPONSES, request, pieces, "length").split("\n\n")[:-1]
    read: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)  # pyright: ignore[reportArgumentType]
    numbers: list[int] = []
    for event in events:
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        numbers.append(read.validate_python(value).sequence_number)
    assert numbers == list(range(len(events)))
    whole = worded(RESPONSES, read_response({"input": "go"}), pieces, "length")
    assert Response.model_validate(whole).status == "incomplete"


@pytest.mark.parametrize(
    ("name", "body", "param", "message"),
    [
        ("chat", [], "", "the body must be an object"),
        ("chat", {"messages": []}, "messages", "messages is empty"),
        ("chat", {"messages": [{"role": "bard"}]}, "messages[0].role", "'bard'"),
        ("chat", {"messages": "go"}, "messages", "must be a list, and is 'go'"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
            "texts and images",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x"}], "n": 0},
            "n",
            "must be an integer",
        ),
        ("responses", {"input": []}, "input", "input is empty"),
        ("responses", {"input": [{"role": "bard", "content": ""}]}, "input[0].role", "'bard'"),
        ("responses", {"input": "x", "metadata": {"a": 1e999}}, "metadata", "not finite"),
        ("messages", {"messages": [{"role": "tool"}]}, "messages[0].role", "'tool'"),
        (
            "messages",
            {"messages": [{"role": "user"}], "thread": {"type": "create"}},
            "thread",
            "does not store conversations",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type",
            "'document'",
        ),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
                        ],
                    }
                ]
            },
            "messages[0].content[0].type",
            "",
        ),
    ],
)
def test_what_cannot_be_served_is_named(name: str, body: Any, param: str, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        APIS[name][0].read(body)
    assert raised.value.param == param
    assert message in raised.value.message
    assert message in json.dumps(messages_error(raised.value, 400))


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}]])
def test_a_message_that_says_nothing_is_one_in_each_api(content: Any) -> None:
    user = {"role": "user", "content": content}
    for name, body in (
        ("chat", {"messages": [user]}),
        ("responses", {"input": [user]}),
        ("messages", {"messages": [user]}),
    ):
        assert APIS[name][0].read(body).messages == (CanonicalMessage("user"),), name


def test_a_conversation_is_the_same_in_all_apis() -> None:
    """System, user, reasoning, two calls, their results in another order, and a question."""
    arguments = '{"query": "x"}'
    ids = ("call00001", "call00002")
    tool = {"type": "object", "properties": {"query": {"type": "string"}}}
    chat = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": name,
                        "type": "function",
                        "function": {"name": "search", "arguments": arguments},
                    }
                    for name in ids
                ],
            },
            {"role": "tool", "tool_call_id": ids[1], "content": "two"},
            {"role": "tool", "tool_call_id": ids[0], "content": "one"},
            {"role": "user", "content": "and?"},
        ],
        "tools": [{"type": "function", "function": {"name": "search", "parameters": tool}}],
    }
    calls = [
        {"type": "function_call", "call_id": name, "name": "search", "arguments": arguments}
        for name in ids
    ]
    responses = {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            *calls,
            {"type": "function_call_output", "call_id": ids[0], "output": "one"},
            {"type": "function_call_output", "call_id": ids[1], "output": "two"},
            {"role": "user", "content": "and?"},
        ],
        "tools": [{"type": "function", "name": "search", "parameters": tool}],
    }
    messages = {
        "system": [
            {"type": "text", "text": "be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief"},
        ],
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]
                + [
                    {"type": "tool_use", "id": name, "name": "search", "input": {"query": "x"}}
                    for name in ids
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": ids[0], "content": "one"},
                    {
                        "type": "tool_result",
                        "tool_use_id": ids[1],
                        "content": [{"type": "text", "text": "two"}],
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        "tools": [{"name": "search", "input_schema": tool}],
    }
    read = [read_chat(chat), read_response(responses), read_messages(messages)]
    histories = [canonical_history(request.messages) for request in read]
    assert histories[0] == histories[1] == histories[2]
    assert [message.reasoning for message in histories[0]] == [
        message.reasoning for message in histories[2]
    ]
    assert read[0].tools == read[1].tools == read[2].tools


@pytest.mark.parametrize("arguments", [None, "", " "])
def test_a_call_without_arguments_is_one_with_an_empty_object(arguments: str | None) -> None:
    item = {"type": "function_call", "call_id": "c", "name": "now", "arguments": arguments}
    call = {"id": "c", "function": {"name": "now", "arguments": arguments}}
    block = {"type": "tool_use", "id": "c", "name": "now", "input": None}
    for request in (
        read_response({"input": [item]}),
        read_chat({"messages": [{"role": "assistant", "tool_calls": [call]}]}),
        read_messages({"messages": [{"role": "assistant", "content": [block]}]}),
    ):
        assert [one.value for one in request.messages[0].calls] == [{}]


def test_what_has_no_effect_is_listed_and_hosted_tools_are_left_out() -> None:
    request = read_response(
        {
            "input": "go",
            "tools": [{"type": "web_search"}, {"type": "custom", "name": "shell"}],
            "tool_choice": "required",
            "store": True,
            "prompt_cache_key": "k",
            "metadata": {},
            "temperature": 0,
        }
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["shell"]
    assert request.without_effect == (
        "tools: web_search",
        "store",
        "prompt_cache_key",
    )
    assert request.format == OutputFormat(functions=["shell"])
    assert request.sampling == {"temperature": 0}


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON: Any = {"response_format": {"type": "json_object"}}
ANY = {"json_schema": {"type": "object"}}
NAMED = {"type": "function", "function": {"name": "add"}}
FLAT = {"type": "function", "name": "add"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [FLAT]}
CHOSEN = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
PARALLEL = {"parallel_tool_calls": False}
BOTH = {"functions": ["add", "sub"]}
ONE = {"functions": ["add"], "is_single": True}
OF_SCHEMA = {"type": "json_schema", "schema": OBJECT}


def tools_of(read: Callable[[Any], ModelRequest]) -> list[dict[str, Any]]:
    """Return two tools as an API has them."""
    if read is read_messages:
        return [{"name": name, "input_schema": OBJECT} for name in ("add", "sub")]
    tools = [{"name": name, "parameters": OBJECT} for name in ("add", "sub")]
    if read is read_response:
        return [{"type": "function", **tool} for tool in tools]
    return [{"type": "function", "function": tool} for tool in tools]


@pytest.mark.parametrize(
    ("read", "fields", "form"),
    [
        (read_chat, {**JSON, "tools": []}, ANY),
        (
            read_chat,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            {**ANY, **BOTH},
        ),
        (
            read_chat,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}},
            {"json_schema": OBJECT, "functions": ["add", "sub"]},
        ),
        (read_chat, {"tool_choice": "required"}, BOTH),
        (read_chat, {"tool_choice": NAMED}, ONE),
        (read_chat, {"tool_choice": CHOSEN}, {"functions": ["add"]}),
        (read_chat, {"tool_choice": "required", **PARALLEL}, {**BOTH, "is_single": True}),
        (read_chat, JSON, {**ANY, **BOTH}),
        (read_chat, {**JSON, "tool_choice": "none", **PARALLEL}, ANY),
        (read_chat, {**JSON, "tool_choice": "required"}, BOTH),
        (read_response, {"text": {"format": {"type": "json_object"}}, "tools": []}, ANY),
        (read_response, {"text": {"format": OF_SCHEMA}, "tools": []}, {"json_schema": OBJECT}),
        (read_response, {"tool_choice": "required"}, BOTH),
        (read_response, {"tool_choice": FLAT}, ONE),
        (read_response, {"tool_choice": ALLOWED, **PARALLEL}, ONE),
        (
            read_messages,
            {"output_config": {"format": OF_SCHEMA, "effort": "high"}, "tools": []},
            {"json_schema": OBJECT},
        ),
        (read_messages, {"output_format": OF_SCHEMA, "tools": []}, {"json_schema": OBJECT}),
        (read_messages, {"tool_choice": {"type": "any"}}, BOTH),
        (
            read_messages,
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {**BOTH, "is_single": True},
        ),
        (read_messages, {"tool_choice": {"type": "tool", "name": "add"}}, ONE),
    ],
)
def test_the_form_of_an_answer_is_read_in_each_api(
    read: Callable[[Any], ModelRequest], fields: dict[str, Any], form: dict[str, Any]
) -> None:
    turns = [{"role": "user", "content": "go"}]
    body = {"input": "go"} if read is read_response else {"messages": turns}
    assert read({**body, "tools": tools_of(read), **fields}).format == OutputFormat(**form)
