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
    ModelMessage,
    Piece,
    ReasoningPiece,
    ReplyReader,
    TextPiece,
    parse_reply,
)
from tinkermq.schemas.model_apis.chat import CHAT
from tinkermq.schemas.model_apis.messages import MESSAGES
from tinkermq.schemas.model_apis.request import ModelRequest
from tinkermq.schemas.model_apis.responses import RESPONSES, read_response

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


def pieces_of(text: str, seed: int = 0) -> tuple[list[Piece], ModelMessage]:
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
    assert seen[0].messages == (ModelMessage(role="user", content=("go",)),)
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
