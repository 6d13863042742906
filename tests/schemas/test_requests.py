"""Requests of all model APIs: what they ask for, and what is said of those that are refused."""

import json
from pathlib import Path
from typing import Any

from tinkermq.actors.gateway.openai import read_query
from tinkermq.schemas.model_apis.answers import ModelApi
from tinkermq.schemas.model_apis.canonical import canonical_history
from tinkermq.schemas.model_apis.chat import CHAT, COMPLETIONS
from tinkermq.schemas.model_apis.messages import MESSAGES
from tinkermq.schemas.model_apis.request import RequestError
from tinkermq.schemas.model_apis.responses import RESPONSES

from tests.support.snapshots import assert_transcript

FILE = Path(__file__).with_name("requests.txt")
ASKED = [{"role": "user", "content": "hi"}]
APIS: dict[str, tuple[ModelApi, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": ASKED}),
    "completions": (COMPLETIONS, {"prompt": "a"}),
    "responses": (RESPONSES, {"input": "hi"}),
    "messages": (MESSAGES, {"messages": ASKED, "max_tokens": 9}),
}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tools_of(api: str, names: str) -> list[dict[str, Any]]:
    """Return tools as an API has them."""
    if api == "messages":
        return [{"name": name, "input_schema": OBJECT} for name in names.split()]
    tools = [{"name": name, "parameters": OBJECT} for name in names.split()]
    if api == "responses":
        return [{"type": "function", **tool} for tool in tools]
    return [{"type": "function", "function": tool} for tool in tools]


def shown(value: Any) -> str:
    return json.dumps(value, default=repr, ensure_ascii=False)


def read_line(line: str) -> tuple[str, ModelApi, Any]:
    """Return who reads a line's request, its API and its body, completed by what it leaves out."""
    reader, name, text = line.split(" ", 2)
    api, defaults = APIS[name]
    body = json.loads(text)
    if isinstance(body, dict):
        if reader == "served" or not set(defaults) & set(body):
            body = {"model": "m", **defaults, **body}
        if isinstance(body.get("tools"), str):
            body["tools"] = tools_of(name, body["tools"])
    return reader, api, body


def answer(line: str) -> str:
    """Return what a request asks of a server, or of an episode's generator, or its refusal."""
    reader, api, body = read_line(line)
    try:
        if reader == "served":
            query = read_query(json.dumps(body).encode(), api)[1]
            return shown(query.model_dump(exclude_defaults=True, exclude={"request"}))
        read = api.read(body)
    except RequestError as error:
        said = f"{error.param or 'the body'}: {error.message}\n  {error.hint}"
        return said if error.hint else said.splitlines()[0]
    told = {
        "messages": [message.for_template() for message in canonical_history(read.messages)],
        "tools": [
            tool["function"]["name"] if tool["function"].get("parameters") == OBJECT else tool
            for tool in read.tools
        ],
        "format": read.format and read.format.model_dump(exclude_defaults=True),
        "sampling": read.sampling,
        "without_effect": read.without_effect,
    }
    return shown({name: value for name, value in told.items() if value})


def test_each_request_asks_for_what_it_says_or_is_refused_by_name() -> None:
    assert_transcript(FILE, answer)


def test_a_conversation_is_the_same_in_all_apis() -> None:
    """System, user, reasoning, two calls, their results in another order, and a question."""
    section = FILE.read_text().split("# one conversation in each API")[1].split("\n#")[0]
    lines = [line[2:] for line in section.splitlines() if line.startswith("$ ")]
    assert len(lines) == 3
    assert len({answer(line) for line in lines}) == 1
