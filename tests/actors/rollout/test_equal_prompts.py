"""A conversation has one prompt: of a program, a served model, a game and a demonstration."""

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.actors.gateway.openai import read_query
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.tiny_models import IMAGE, make_tokenizer
from tinkermq.actors.policy.vision import ImageReader, load_image_reader
from tinkermq.actors.rollout.completions import Answers
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.schemas.chat_messages import Origin, read_conversation, read_tools
from tinkermq.schemas.infer import ChatRequest
from tinkermq.schemas.model_apis.answers import ModelApi
from tinkermq.schemas.model_apis.chat import CHAT
from tinkermq.schemas.model_apis.messages import MESSAGES
from tinkermq.schemas.model_apis.request import call_request
from tinkermq.schemas.model_apis.responses import RESPONSES
from tinkermq.schemas.wire.errors import ModelError
from tinkermq.schemas.wire.images import data_url

from tests.actors.rollout.calls.programs import chat_of
from tests.actors.server.test_answers import Saying
from tests.support.images import make_vision_model, png

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


async def test_what_has_no_effect_in_a_tool_is_told_to_programs_and_taken_by_servers() -> None:
    told = {"strict": True, "input_examples": [{"q": "a"}]}
    alone = {**told, "cache_control": {"type": "ephemeral"}, "defer_loading": False, "x": None}
    bodies: dict[ModelApi, Body] = {
        CHAT: {"messages": [USER], "tools": [{**TOOL, "function": {**NAMED, **alone}}]},
        RESPONSES: {"input": "2+2?", "tools": [{"type": "function", **NAMED, **alone}]},
        MESSAGES: {
            "messages": [USER],
            "tools": [{"name": "search", "input_schema": PARAMETERS, **alone}],
            "max_tokens": 9,
        },
    }
    for api, body in bodies.items():
        request = call_request(api.read({"model": "m", **body}), "r")
        assert request.without_effect == ["tools.strict", "tools.input_examples"]
        assert await served_prompt(chat_of("qwen2_5"), api, body)
    beside = {"messages": [USER], "tools": [{**TOOL, "strict": True}]}
    assert call_request(CHAT.read({"model": "m", **beside}), "r").without_effect == ["tools.strict"]


async def test_a_late_system_message_is_shown_as_words_of_the_user() -> None:
    chat = first_system_only()
    text = chat.decode_all(await served_prompt(chat, CHAT, CHATS["a late system message"]))
    assert "<|user|><system-reminder>\nBe polite.\n</system-reminder><|end|>" in text


# -- Any conversation, in the forms of the three APIs, of a game's prompt and of a row of data -----


SHOWS_ALL = (
    "{%- for tool in tools or [] -%}{{ tool | tojson }}{%- endfor -%}"
    "{%- for message in messages -%}{{ '<|' + message.role + '|>' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{{ part.text if part.type == 'text' else '<|image|>' }}"
    "{%- endfor -%}{%- endif -%}"
    "{%- for key, value in message | dictsort -%}{%- if key not in ('role', 'content') -%}"
    "{{ '[' + key + ' ' + (value | tojson) + ']' }}"
    "{%- endif -%}{%- endfor -%}{{ '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""Shows every key that it is given."""
LATE_RAISES = (
    "{%- for message in messages -%}{%- if message.role == 'system' and not loop.first -%}"
    "{{- raise_exception('a system message stands first') -}}{%- endif -%}{%- endfor -%}"
)
LATE_OMITTED = SHOWS_ALL.replace(
    "in messages -%}",
    "in messages if loop is undefined and message.role != 'system' "
    "or message is sameas messages[0] -%}",
).replace("loop is undefined and ", "")
LATE_FIRST = (
    "{%- for message in messages -%}{%- if message.role == 'system' -%}"
    "{{ message.content }}{%- endif -%}{%- endfor -%}"
) + SHOWS_ALL.replace("in messages -%}", "in messages if message.role != 'system' -%}")
NO_SYSTEM = LATE_RAISES.replace(" and not loop.first", "") + SHOWS_ALL
FORMS = {
    "shows all": SHOWS_ALL,
    "raises on late ones": LATE_RAISES + SHOWS_ALL,
    "omits late ones": LATE_OMITTED,
    "moves late ones": LATE_FIRST,
    "raises on any": NO_SYSTEM,
    "omits any": SHOWS_ALL.replace(
        "in messages -%}", "in messages if message.role != 'system' -%}"
    ),
}
"""Templates by what they do with system messages."""


@dataclass
class Said:
    """A message apart from any API."""

    role: str
    parts: list[str | bytes]
    calls: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    reasoning: str = ""
    answers: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    spelling: int = 0
    """Chooses between equal forms."""


@dataclass
class Tool:
    """A tool apart from any API."""

    name: str
    fields: dict[str, Any]
    api_only: dict[str, Any]


TEXTS = st.sampled_from(["hi", "", "a b\n", "<|end|>", "<tool_call>", "5", "é"])
ARGUMENTS: Any = st.dictionaries(
    st.sampled_from(["q", "n"]), st.sampled_from(["x", 1, 1.5, None, True, [1, "a"], {"k": {}}])
)
EXTRA = st.sampled_from([{}, {}, {"name": "ada"}, {"mood": "glad"}, {"is_error": True}])
PICTURES = [png(8, 8, seed) for seed in range(2)]
CONTENT: Any = st.lists(TEXTS | st.sampled_from(PICTURES), max_size=3)
TOOLS: Any = st.lists(
    st.builds(
        Tool,
        st.sampled_from(["search", "look"]),
        st.fixed_dictionaries(
            {},
            optional={
                "description": st.sampled_from(["Search.", ""]),
                "parameters": st.sampled_from([PARAMETERS, {}, {"type": "object", "title": None}]),
                "return": st.just({"type": "string"}),
            },
        ),
        st.fixed_dictionaries(
            {},
            optional={
                "strict": st.booleans(),
                "cache_control": st.just({"type": "ephemeral"}),
                "unheard_of": st.just(1),
            },
        ),
    ),
    max_size=2,
    unique_by=lambda tool: tool.name,
)


@st.composite
def conversations(draw: Any) -> list[Said]:
    """Draw a conversation that ends with words of the user or results of tools."""

    def said(role: str, parts: list[Any], **fields: Any) -> Said:
        return Said(role, parts, extra=draw(EXTRA), spelling=draw(st.integers(0, 2)), **fields)

    def system() -> list[Said]:
        return [said("system", [draw(TEXTS)]) for _ in range(draw(st.integers(0, 2)))]

    made = [*system(), said("user", draw(CONTENT))]
    for turn in range(draw(st.integers(0, 2))):
        names = [f"call_{turn}_{n}" for n in range(draw(st.integers(0, 2)))]
        calls = [(draw(st.sampled_from(["search", "look"])), draw(ARGUMENTS), n) for n in names]
        answer = said("assistant", [draw(TEXTS)], calls=calls, reasoning=draw(TEXTS))
        made.append(answer if any(answer.parts) else replace(answer, extra={}))
        results = [
            said("tool", draw(CONTENT), answers=name) for name in draw(st.permutations(names))
        ]
        made += [*results, *system()]
        if not results or draw(st.booleans()):
            made.append(said("user", draw(CONTENT)))
    return made


def picture_url(picture: bytes) -> dict[str, Any]:
    return {"url": data_url(picture)}


def in_chat(messages: list[Said]) -> list[Body]:
    made: list[Body] = []
    for one in messages:
        role = "developer" if one.role == "system" and one.spelling else one.role
        message: Body = {
            "role": role,
            **one.extra,
            "content": [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image_url", "image_url": picture_url(part)}
                for part in one.parts
            ],
        }
        if all(isinstance(part, str) for part in one.parts):
            text = "".join(map(str, one.parts))
            spelling = one.spelling if one.parts else 0  # a tool's `[]` is its own list
            message["content"] = [text, message["content"], text or None][spelling]
        if one.calls:
            message["tool_calls"] = [
                {
                    "id": name,
                    "type": "function",
                    "index": place,
                    "function": {
                        "name": function,
                        "arguments": json.dumps(arguments) if arguments or one.spelling else "",
                    },
                }
                for place, (function, arguments, name) in enumerate(one.calls)
            ]
        if one.reasoning:
            message[["reasoning_content", "reasoning"][one.spelling % 2]] = one.reasoning
        if one.answers:
            message["tool_call_id"] = one.answers
        made.append(message)
    return made


def in_responses(messages: list[Said]) -> list[Body]:
    made: list[Body] = []
    for one in messages:
        kind = "output_text" if one.role == "assistant" else "input_text"
        content: Any = [
            {"type": kind, "text": part}
            if isinstance(part, str)
            else {"type": "input_image", "image_url": data_url(part)}
            for part in one.parts
        ]
        if all(isinstance(part, str) for part in one.parts) and one.spelling:
            content = "".join(map(str, one.parts))
        if one.reasoning:
            thought = [{"type": "reasoning_text", "text": one.reasoning}]
            made.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": thought})
        if one.role == "tool":
            output = {"type": "function_call_output", "call_id": one.answers, "output": content}
            made.append({**output, **one.extra, "id": "fc_1", "status": "completed"})
        else:
            role = "developer" if one.role == "system" and one.spelling else one.role
            made.append({"type": "message", "role": role, "content": content, **one.extra})
        made += [
            {
                "type": "function_call",
                "call_id": name,
                "name": function,
                "id": "fc_2",
                "arguments": json.dumps(arguments),
            }
            for function, arguments, name in one.calls
        ]
    return made


def in_messages(messages: list[Said]) -> list[Body]:
    made: list[Body] = []
    for one in messages:
        blocks: list[Body] = []
        if one.reasoning:
            blocks.append({"type": "thinking", "thinking": one.reasoning, "signature": "s"})
        for part in one.parts:
            if isinstance(part, str):
                blocks.append(
                    {"type": "text", "text": part, "cache_control": {"type": "ephemeral"}}
                )
            else:
                data = data_url(part).partition(",")[2]
                source = {"type": "base64", "media_type": "image/png", "data": data}
                blocks.append({"type": "image", "source": source})
        blocks += [
            {"type": "tool_use", "id": name, "name": function, "input": arguments}
            for function, arguments, name in one.calls
        ]
        if one.role != "tool":
            made.append({"role": one.role, "content": blocks, **one.extra})
            continue
        result = {"type": "tool_result", "tool_use_id": one.answers, "content": blocks, **one.extra}
        if made and made[-1].get("is_of_tools"):
            made[-1]["content"].append(result)
        else:
            made.append({"role": "user", "content": [result], "is_of_tools": True})
    return [{k: v for k, v in message.items() if k != "is_of_tools"} for message in made]


def tools_in(tools: list[Tool], api: ModelApi) -> list[Body]:
    if api is MESSAGES:
        names = {"parameters": "input_schema"}
        renamed = [{names.get(k, k): v for k, v in tool.fields.items()} for tool in tools]
        return [
            {"name": tool.name, **fields, **tool.api_only}
            for tool, fields in zip(tools, renamed, strict=True)
        ]
    whole = [{"name": tool.name, **tool.fields, **tool.api_only} for tool in tools]
    if api is RESPONSES:
        return [{"type": "function", **tool} for tool in whole]
    return [{"type": "function", "function": tool} for tool in whole]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ImageReader:
    found = load_image_reader(str(make_vision_model(tmp_path_factory.mktemp("model"))))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def seeing(reader: ImageReader) -> dict[str, ChatTokenizer]:
    """Return a tokenizer with each template, for a model that reads images."""
    chats: dict[str, ChatTokenizer] = {}
    for name, template in FORMS.items():
        tokenizer = make_tokenizer([IMAGE])
        tokenizer.chat_template = template
        chats[name] = ChatTokenizer(tokenizer, image_reader=reader)
    return chats


def prompt_of_demonstration(
    chat: ChatTokenizer, messages: list[Body], tools: list[Body]
) -> list[int]:
    answer = {"role": "assistant", "content": "So."}
    whole = chat.conversation([*messages, answer], tools, [len(messages)])
    assert whole.mask.sum() == len(chat.encode("So.")) + 1
    return whole.token_ids[whole.mask == 0].tolist()


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(messages=conversations(), tools=TOOLS)
@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_has_one_prompt_in_whatever_form_it_is_given(
    seeing: dict[str, ChatTokenizer], form: str, messages: list[Said], tools: list[Tool]
) -> None:
    chat = seeing[form]
    bodies: dict[ModelApi, Body] = {
        CHAT: {"messages": in_chat(messages), "tools": tools_in(tools, CHAT)},
        RESPONSES: {"input": in_responses(messages), "tools": tools_in(tools, RESPONSES)},
        MESSAGES: {"messages": in_messages(messages), "tools": tools_in(tools, MESSAGES)},
    }
    given, given_tools = bodies[CHAT]["messages"], bodies[CHAT]["tools"]
    rows = read_conversation(given, Origin()) if all_have_content(given) else given
    row_tools = read_tools(json.dumps([one["function"] for one in given_tools]), Origin("tools"))

    async def outcomes() -> list[list[int] | str]:
        found: list[list[int] | str] = []
        for api, body in bodies.items():
            whole = {**body, "max_tokens": 9} if api is MESSAGES else body
            episode = asyncio.to_thread(prompt_of_episode, chat, api, whole)
            found += [await outcome(episode), await outcome(served_prompt(chat, api, whole))]
        for some, its_tools in ((rows, row_tools), (given, given_tools)):
            game = asyncio.to_thread(lambda m=some, t=its_tools: chat.first_prompt(m, t).tolist())
            shown = asyncio.to_thread(prompt_of_demonstration, chat, some, its_tools)
            found += [await outcome(game), await outcome(shown)]
        return found

    first, *others = asyncio.run(outcomes())
    assert others == [first] * len(others)
    refuses = form in ("raises on any", "omits any")
    if refuses and any(one.role == "system" for one in messages):
        assert "takes no system message" in str(first)
    else:
        assert isinstance(first, list)


def all_have_content(messages: list[Body]) -> bool:
    """Whether a row of data may have these messages, none of which may be empty."""
    return all(one["content"] is not None or "tool_calls" in one for one in messages)
