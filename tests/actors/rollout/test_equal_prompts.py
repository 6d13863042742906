"""An episode of a program and a served model show the model the same for the same request."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import pytest
from tinkermq.actors.gateway.openai import read_query
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.rollout.completions import Answers
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.schemas.infer import ChatRequest
from tinkermq.schemas.model_apis.answers import ModelApi
from tinkermq.schemas.model_apis.chat import CHAT
from tinkermq.schemas.model_apis.messages import MESSAGES
from tinkermq.schemas.model_apis.request import call_request
from tinkermq.schemas.model_apis.responses import RESPONSES
from tinkermq.schemas.wire.errors import ModelError

from tests.actors.rollout.calls.programs import chat_of
from tests.actors.server.test_answers import Saying

Body = dict[str, Any]

PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
NAMED = {"name": "search", "description": "Search the web.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": NAMED}
STRICT_TOOL = {"type": "function", "function": {**NAMED, "strict": True}}
BARE_TOOL = {"type": "function", "function": {"name": "look"}}
USER = {"role": "user", "content": "2+2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
LATE_SYSTEM = {"role": "system", "content": "Be polite."}
REPLY = {"role": "assistant", "content": "4"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": f"call_{n}", "type": "function", "function": {"name": "search", "arguments": text}}
        for n, text in enumerate(('{"q": "a"}', '{"q": "b"}'))
    ],
}
RESULTS = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"found {n}"} for n in (1, 0)]
BILLING = {"role": "system", "content": "x-anthropic-billing-header: cc_version=1\nBe brief."}
CHATS: dict[str, Body] = {
    "a system message": {"messages": [SYSTEM, USER]},
    "two system messages": {"messages": [SYSTEM, LATE_SYSTEM, USER]},
    "a late system message": {"messages": [USER, REPLY, LATE_SYSTEM, USER]},
    "a tool": {"messages": [USER], "tools": [TOOL]},
    "a strict tool": {"messages": [USER], "tools": [STRICT_TOOL]},
    "a tool without parameters": {"messages": [USER], "tools": [BARE_TOOL]},
    "results out of order": {"messages": [USER, CALLED, *RESULTS], "tools": [TOOL]},
    "a name": {"messages": [{**USER, "name": "ada"}]},
    "a header that changes": {"messages": [BILLING, USER]},
}
CALLED_IN_MESSAGES = {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "a"}}
IN_MESSAGES: dict[str, Body] = {
    "a failed tool": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "a"}}
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True}
                ],
            },
        ],
        "tools": [{"name": "search", "description": "Search.", "input_schema": PARAMETERS}],
        "max_tokens": 9,
    },
    "system messages": {
        "system": "Be brief.",
        "messages": [USER, REPLY, {"role": "system", "content": "Be polite."}, USER],
        "max_tokens": 9,
    },
}
IN_RESPONSES: dict[str, Body] = {
    "a strict tool": {"input": "2+2?", "tools": [{"type": "function", **NAMED, "strict": True}]},
    "instructions": {"instructions": "Be brief.", "input": [SYSTEM, USER]},
}
REQUESTS = [
    *(pytest.param(CHAT, body, id=f"chat: {name}") for name, body in CHATS.items()),
    *(pytest.param(MESSAGES, body, id=f"messages: {name}") for name, body in IN_MESSAGES.items()),
    *(
        pytest.param(RESPONSES, body, id=f"responses: {name}")
        for name, body in IN_RESPONSES.items()
    ),
]
FIRST_SYSTEM_ONLY = (
    "{%- for message in messages -%}{%- if message.role == 'system' and not loop.first -%}"
    "{{- raise_exception('a system message stands first') -}}{%- endif -%}"
    "{{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}{%- endfor -%}"
    "{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def first_system_only() -> ChatTokenizer:
    """Return a tokenizer whose template takes one system message, at the beginning."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = FIRST_SYSTEM_ONLY
    return ChatTokenizer(tokenizer)


def prompt_of_episode(chat: ChatTokenizer, api: ModelApi, body: Body) -> list[int]:
    request = call_request(api.read({"model": "m", **body}), "r")
    prompt = ExactCalls(chat).prepare(request.messages, request.tools)
    return prompt.prompt_ids.tolist()


async def served_prompt(chat: ChatTokenizer, api: ModelApi, body: Body) -> list[int]:
    engine: Any = Saying()
    answers = Answers(engine, chat, lambda: "m", max_context=9999, max_open=9)
    _, query = read_query(json.dumps({"model": "m", **body}).encode(), api)

    async def tell(part: object) -> None:
        del part

    assert isinstance(query, ChatRequest)
    await answers.chat(query, tell)
    (prompt,) = engine.prompts
    return prompt


async def outcome(prompt: Awaitable[list[int]]) -> list[int] | str:
    """Return the tokens of a prompt, or why the model's template refuses it."""
    try:
        return await prompt
    except ModelError as error:
        return error.message


@pytest.mark.parametrize(("api", "body"), REQUESTS)
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3_1", "first system only"])
async def test_an_episode_and_a_served_model_render_a_request_alike(
    template: str, api: ModelApi, body: Body
) -> None:
    chat = first_system_only() if template == "first system only" else chat_of(template)
    episode = await outcome(asyncio.to_thread(prompt_of_episode, chat, api, body))
    assert await outcome(served_prompt(chat, api, body)) == episode


async def test_what_a_tool_says_to_the_api_alone_is_shown_in_neither() -> None:
    chat = chat_of("qwen2_5")
    plain = await served_prompt(chat, CHAT, CHATS["a tool"])
    strict = await served_prompt(chat, CHAT, CHATS["a strict tool"])
    assert plain == strict
    in_responses = IN_RESPONSES["a strict tool"]
    assert await served_prompt(chat, RESPONSES, in_responses) == plain


async def test_a_late_system_message_is_shown_as_words_of_the_user() -> None:
    chat = first_system_only()
    text = chat.decode_all(await served_prompt(chat, CHAT, CHATS["a late system message"]))
    assert "<|user|><system-reminder>\nBe polite.\n</system-reminder><|end|>" in text
