"""Calls in the texts of models, and the formats in which they write them."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.schemas.model_apis.canonical import ReplyReader, parse_reply
from tinkermq.schemas.tool_calls import (
    CLOSE,
    FORMATS,
    OPEN,
    CallFormat,
    ToolText,
    certain_length,
    deepseek,
    glm,
    in_hermes_form,
    llama,
    mistral,
    parse_tool_calls,
    qwen_xml,
    read_call,
)

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'


def _tagged(body: str) -> str:
    return f"{OPEN}{body}{CLOSE}"


def _reader() -> ReplyReader:
    return ReplyReader("c", calls=True)


def test_a_call_becomes_a_function_with_its_arguments_as_text() -> None:
    text, (call,) = parse_tool_calls(f"Let me see.\n{CALL}")
    assert text == "Let me see."
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "ü"}


def test_several_calls_keep_their_order_and_have_ids_of_their_own() -> None:
    _, calls = parse_tool_calls(CALL + CALL.replace("add", "sub"))
    assert [call["function"]["name"] for call in calls] == ["add", "sub"]
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "add"',
        '<tool_call>{"name": "add", "arguments": {}}',
        '<tool_call>{"name": "add", "arguments": {}}</tool_cal',
        '{"name": "add", "parameters": {"a": 1}}',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
        "<tool_call></tool_call>",
        "<tool_call>",
        "</tool_call> <tool_call>",
    ],
)
def test_what_is_no_well_formed_call_stays_text(text: str) -> None:
    assert parse_tool_calls(text) == (text, [])


READ = {
    '{"name": "add", "arguments": {"a": 1}}': [("add", {"a": 1})],
    '{"arguments": {"a": null}, "name": "add"}': [("add", {"a": None})],
    '{"name": "add", "parameters": {"a": 1}}': [("add", {"a": 1})],
    '{"name": "add", "arguments": "{\\"a\\": 1}"}': [("add", {"a": 1})],
    '{"name": "add", "parameters": "{}"}': [("add", {})],
    '{"name": "add", "arguments": {}}': [("add", {})],
    '{"name": "add", "arguments": {"raw": "{\\"b\\": 2}"}}': [("add", {"raw": '{"b": 2}'})],
    '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}': [("add", {"a": 1})],
    '{"id": "c1", "function": {"name": "add", "arguments": "{}"}}': [("add", {})],
    '[{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "parameters": {}}]': [
        ("add", {"a": 1}),
        ("sub", {}),
    ],
    '{"name": "say", "arguments": {"text": "a </tool_call> b"}}': [
        ("say", {"text": "a </tool_call> b"})
    ],
    '{"name": "say", "arguments": {"text": "<tool_call>{\\"</tool_call>"}}': [
        ("say", {"text": '<tool_call>{"</tool_call>'})
    ],
    '\n {"name": "add",\n "arguments": {"a": [1, {"b": true}]}} \n': [
        ("add", {"a": [1, {"b": True}]})
    ],
}
"""What a tag may hold, and the calls that it is."""
TEXTS = [
    "{}",
    "[]",
    "null",
    '["add"]',
    "<tool_call>",
    '"name"',
    '{"arguments": {}}',
    '{"name": "add"}',
    '{"name": "", "arguments": {}}',
    '{"name": "  ", "arguments": {}}',
    '{"name": null, "arguments": {}}',
    '{"name": 3, "arguments": {}}',
    '{"name": ["add"], "arguments": {}}',
    '{"name": "add", "args": {"a": 1}}',
    '{"name": "add", "input": {"a": 1}}',
    '{"name": "add", "a": 1}',
    '{"name": "add", "arguments": null}',
    '{"name": "add", "parameters": null}',
    '{"name": "add", "arguments": []}',
    '{"name": "add", "arguments": [1]}',
    '{"name": "add", "arguments": 3}',
    '{"name": "add", "arguments": true}',
    '{"name": "add", "arguments": ""}',
    '{"name": "add", "arguments": "a=1"}',
    '{"name": "add", "arguments": "[1]"}',
    '{"name": "add", "arguments": "\\"{}\\""}',
    '{"name": "add", "arguments": {}, "parameters": {"a": 1}}',
    '{"name": "add", "name": "sub", "arguments": {}}',
    '{"name": "add", "arguments": {"a": 1, "a": 2}}',
    '{"name": "add", "arguments": {"a": NaN}}',
    '{"name": "add", "arguments": {"a": Infinity}}',
    "{'name': 'add', 'arguments': {}}",
    '{"name": "add", "arguments": {}} and more',
    'now {"name": "add", "arguments": {}}',
    '{"name": "add", "arguments": {}}\n{"name": "sub", "arguments": {}}',
    '[{"name": "add", "arguments": {}}, {"name": "sub"}]',
    '[{"name": "add", "arguments": {}}] more',
    '[{"name": "add", "arguments": {}}], "x": [1]',
    '[[{"name": "add", "arguments": {}}]]',
    '{"name": "add", "arguments": {"a": 1}',
    '{"name": "add", "arguments": {"a": 1}}}',
    '{"name": "add", "arguments": {"a": "\\ud83d"}}',
    '{"function": "add", "arguments": {"a": 1}}',
    '{"function": {"name": "add"}, "arguments": {"a": 1}}',
    "add(a=1)",
    "<function=add><parameter=a>1</parameter></function>",
    "[" * 3000,
]
"""What a tag may hold that is no call."""


@pytest.mark.parametrize("body", READ)
def test_the_forms_that_models_write_are_read(body: str) -> None:
    text, calls = parse_tool_calls(f"So: <tool_call>{body}</tool_call>\n")
    told = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert (text, told) == ("So:", READ[body])
    reply = parse_reply(f"So: <tool_call>{body}</tool_call>\n", "c", calls=True)
    assert (reply.text, [(call.name, call.value) for call in reply.calls]) == ("So:", READ[body])


@pytest.mark.parametrize("body", TEXTS)
def test_a_tag_without_a_call_stays_text_and_hides_none(body: str) -> None:
    assert read_call(body) is None
    text = f"<tool_call>{body}</tool_call>"
    assert parse_tool_calls(text) == (text, [])
    assert parse_reply(text, "c", calls=True).text == text
    more, calls = parse_tool_calls(f"{text}\n{CALL}")
    assert (more, len(calls)) == (text, 1)
    assert len(parse_reply(f"{text}\n{CALL}", "c", calls=True).calls) == 1


def test_a_tag_that_is_named_or_not_closed_does_not_hide_the_call_behind_it() -> None:
    text, calls = parse_tool_calls(f"I write <tool_call> first: {CALL}")
    assert (text, len(calls)) == ("I write <tool_call> first:", 1)
    text, calls = parse_tool_calls(f'<tool_call>{{"name": "add", "arguments": {{"a": {CALL}')
    assert (text, len(calls)) == ('<tool_call>{"name": "add", "arguments": {"a":', 1)


BITS = [*READ, *TEXTS[:-1], OPEN, CLOSE, OPEN, CLOSE, '{"name": "', '"', "\\", " \n", "a < b", "<"]


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    bits=st.lists(st.sampled_from(BITS) | st.sampled_from(list(READ)).map(_tagged), max_size=6),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_bit_by_bit_is_read_what_the_whole_is(bits: list[str], cuts: list[int]) -> None:
    whole = "".join(bits)
    stream, reader, told, at, turn = ToolText(parse=True, name="c"), _reader(), "", 0, 0
    while at < len(whole):
        bit = whole[at : at + cuts[turn % len(cuts)]]
        told += stream.push(bit)
        reader.push(bit)
        at, turn = at + len(bit), turn + 1
    rest, calls = stream.finish()
    reader.finish()
    text, wanted = parse_tool_calls(whole, "c")
    assert calls == wanted
    assert (told + rest).strip() == text.strip()
    assert calls or told + rest == whole
    reply = parse_reply(whole, "c", calls=True)
    assert (reader.reply, reader.reply.calls) == (reply, reply.calls)
    names = [call["function"]["name"] for call in calls]
    assert [call.name for call in reply.calls] == names


def test_an_answer_that_repeats_broken_tags_is_read_in_little_time() -> None:
    started = time.process_time()
    for broken in (f'{OPEN}{{"a{CALL[-12:]}x"', OPEN, f'{OPEN}[{{"{CLOSE}', f'"{CLOSE}{OPEN}'):
        stream = ToolText(parse=True)
        told = "".join(stream.push(broken) for _ in range(500))
        rest, calls = stream.finish()
        assert (told + rest, calls) == (broken * 500, [])
    assert time.process_time() - started < 20


@pytest.mark.parametrize("size", [1, 2, 5, 200])
def test_a_call_is_held_back_while_the_text_before_it_flows(size: int) -> None:
    whole = f"a < b, so {CALL}"
    stream = ToolText(parse=True)
    told = "".join(stream.push(whole[at : at + size]) for at in range(0, len(whole), size))
    assert told == "a < b, so "
    rest, calls = stream.finish()
    assert (rest, len(calls)) == ("", 1)


def test_an_unfinished_marker_is_told_at_the_end() -> None:
    stream = ToolText(parse=True)
    assert stream.push("x <tool_c") == "x "
    assert stream.finish() == ("<tool_c", [])


def test_without_tools_everything_is_text() -> None:
    stream = ToolText(parse=False)
    assert stream.push(CALL) == CALL
    assert stream.finish() == ("", [])


# -- Tool calls in models' own formats: what is well formed is read, all else stays text -----------


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "n": {"type": "integer"},
                    "x": {"type": "number"},
                    "ok": {"type": "boolean"},
                    "all": {"type": "array"},
                    "map": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                    "maybe": {"type": ["string", "null"]},
                    "any": {},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, SEP, STOP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def xml(body: str) -> str:
    return f"<tool_call>\n<function=write>\n{body}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def argument(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"


def fenced(name: str, arguments: str) -> str:
    return f"{ONE}function{SEP}{name}\n```json\n{arguments}\n```{STOP}"


WRITE = ("write", {"path": "a"})
KNOWN: list[tuple[CallFormat, str, str, list[tuple[str, Any]]]] = [
    (llama, '{"name": "write", "parameters": {"path": "a"}}', "", [WRITE]),
    (llama, '\n{"name": "write", "arguments": {"path": "a"}}<|eot_id|>', "", [WRITE]),
    (llama, '<|python_tag|>{"name": "write", "parameters": {"path": "a"}}<|eom_id|>', "", [WRITE]),
    (llama, '{"name": "now", "parameters": {}}', "", [("now", {})]),
    (
        llama,
        '{"name": "write", "parameters": {"path": "a"}}; {"name": "now", "parameters": {}}',
        "",
        [WRITE, ("now", {})],
    ),
    (mistral, '[TOOL_CALLS] [{"name": "write", "arguments": {"path": "a"}}]</s>', "", [WRITE]),
    (
        mistral,
        'So [TOOL_CALLS][{"name": "write", "arguments": {"path": "a"}, "id": "abcdefghi"}]',
        "So",
        [WRITE],
    ),
    (mistral, ' [{"name": "now", "arguments": {}}]', "", [("now", {})]),
    (mistral, '[TOOL_CALLS]write{"path": "a"}', "", [WRITE]),
    (
        mistral,
        '[TOOL_CALLS]write[ARGS]{"path": "a"}[TOOL_CALLS]now[ARGS]{}',
        "",
        [WRITE, ("now", {})],
    ),
    (mistral, '[TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]{"path": "a"}</s>', "", [WRITE]),
    (qwen_xml, f"So\n{xml(parameter('path', 'a'))}", "So", [WRITE]),
    (qwen_xml, xml("<parameter=path>a</parameter>"), "", [WRITE]),
    (qwen_xml, xml(""), "", [("write", {})]),
    (
        qwen_xml,
        xml(parameter("n", "3") + parameter("x", "0.5") + parameter("ok", "True")),
        "",
        [("write", {"n": 3, "x": 0.5, "ok": True})],
    ),
    (
        qwen_xml,
        xml(parameter("all", "[1, 2]") + parameter("map", '{"a": null}')),
        "",
        [("write", {"all": [1, 2], "map": {"a": None}})],
    ),
    (
        qwen_xml,
        xml(parameter("map", "None") + parameter("maybe", "null") + parameter("any", "3")),
        "",
        [("write", {"map": None, "maybe": None, "any": "3"})],
    ),
    (qwen_xml, xml(parameter("path", '{"a": 1}')), "", [("write", {"path": '{"a": 1}'})]),
    (qwen_xml, xml(parameter("n", "three")), "", [("write", {"n": "three"})]),
    (
        qwen_xml,
        xml(parameter("path", "a\n\n  b </parameter> c")),
        "",
        [("write", {"path": "a\n\n  b </parameter> c"})],
    ),
    (qwen_xml, xml("") + "\n" + xml(parameter("path", "a")), "", [("write", {}), WRITE]),
    (glm, f"<tool_call>write\n{argument('path', 'a')}</tool_call>", "", [WRITE]),
    (glm, "<tool_call>now\n</tool_call>", "", [("now", {})]),
    (glm, "<tool_call>now</tool_call>", "", [("now", {})]),
    (
        glm,
        f"So\n<tool_call>write\n{argument('n', '3')}{argument('all', '[true]')}</tool_call>",
        "So",
        [("write", {"n": 3, "all": [True]})],
    ),
    (deepseek, f"So{BEGIN}{fenced('write', json.dumps(WRITE[1]))}{END}", "So", [WRITE]),
    (
        deepseek,
        f"{BEGIN}{fenced('write', json.dumps(WRITE[1]))}\n{fenced('now', '{}')}{END}",
        "",
        [WRITE, ("now", {})],
    ),
    (deepseek, f'{BEGIN}{ONE}write{SEP}{{"path": "a"}}{STOP}{END}', "", [WRITE]),
]


@pytest.mark.parametrize(("read", "text", "said", "calls"), KNOWN)
@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
def test_a_call_is_read_in_the_format_of_its_model(
    read: CallFormat, text: str, said: str, calls: list[tuple[str, Any]], thought: str
) -> None:
    told = in_hermes_form(thought + text, read, TOOLS)
    reply = parse_reply(told, "c", calls=True)
    assert (reply.text, [(call.name, call.value) for call in reply.calls]) == (said, calls)
    assert reply.reasoning == ("hm" if thought else None)


PLAIN_TEXTS: list[tuple[CallFormat, str]] = [
    (llama, '{"name": "write"}'),
    (llama, '{"name": "", "parameters": {}}'),
    (llama, '{"name": "write", "parameters": "a"}'),
    (llama, '{"name": "write", "parameters": [1]}'),
    (llama, '{"name": "ada", "parameters": {"age": 36}}'),  # no tool: some JSON that is an answer
    (llama, 'So {"name": "write", "parameters": {"path": "a"}}'),
    (llama, '{"name": "write", "parameters": {"path": "a"}} is what I would call'),
    (llama, '{"name": "write", "parameters": {"path": "a"}'),
    (llama, '{"name": "write", "parameters": {"path": "a", "path": "b"}}'),
    (llama, 'write(path="a")'),
    (mistral, '[{"name": "ada", "arguments": {}}]'),
    (mistral, '[TOOL_CALLS] [{"name": "write"}]'),
    (mistral, '[TOOL_CALLS] [{"name": "write", "arguments": {}}'),
    (mistral, "[TOOL_CALLS] []"),
    (mistral, "[TOOL_CALLS]write"),
    (mistral, '[TOOL_CALLS]write{"path": '),
    (mistral, '[TOOL_CALLS]write{"path": "a"} and more'),
    (mistral, 'write{"path": "a"}'),
    (qwen_xml, xml('{"path": "a"}')),
    (qwen_xml, xml(parameter("path", "a") + "more")),
    (qwen_xml, xml("more" + parameter("path", "a"))),
    (qwen_xml, xml(parameter("path", "a") * 2)),
    (qwen_xml, xml("<parameter=path>\na\n")),
    (qwen_xml, f"<tool_call>\n<function=write>\n{parameter('path', 'a')}"),
    (qwen_xml, "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    (qwen_xml, f"<function=write>\n{parameter('path', 'a')}</function>"),
    (glm, '<tool_call>write\n{"path": "a"}</tool_call>'),
    (glm, "<tool_call>write\n<arg_key>path</arg_key>\n</tool_call>"),
    (glm, f"<tool_call>write\n{argument('path', 'a')}"),
    (glm, f"<tool_call>write it\n{argument('path', 'a')}</tool_call>"),
    (glm, "<tool_call>\n</tool_call>"),
    (deepseek, f"{BEGIN}{ONE}function{SEP}write\n```json\n[1]\n```{STOP}{END}"),
    (deepseek, f"{BEGIN}{ONE}function{SEP}write\n{STOP}{END}"),
    (deepseek, f"{BEGIN}{ONE}function{SEP}\n```json\n{{}}\n```{STOP}{END}"),
    (deepseek, f'{BEGIN}{ONE}function{SEP}write\n```json\n{{"path": "a"}}'),
]


@pytest.mark.parametrize(("read", "text"), PLAIN_TEXTS)
def test_what_is_not_well_formed_stays_text(read: CallFormat, text: str) -> None:
    assert in_hermes_form(text, read, TOOLS) == text
    assert not parse_reply(text, "c", calls=True).calls


@pytest.mark.parametrize("read", FORMATS)
def test_a_call_that_is_only_thought_of_is_no_call(read: CallFormat) -> None:
    for own, text, _, _ in KNOWN:
        if own is read:
            thought = f"<think>\nI could write {text}"
            assert in_hermes_form(thought, read, TOOLS) == thought


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(data=st.data(), cut=st.floats(0, 1))
@pytest.mark.parametrize("read", FORMATS)
def test_what_is_told_of_a_growing_answer_stays(read: CallFormat, data: Any, cut: float) -> None:
    own = [text for of, text, *_ in KNOWN if of is read] + [
        text for of, text in PLAIN_TEXTS if of is read
    ]
    bits = [*own, "<think>", "</think>", " \n", "a < b", "{", "[", "x", "<tool_c", "[TOOL"]
    whole = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=5)))
    begun = whole[: round(cut * len(whole))]
    certain = begun[: certain_length(begun, read)]
    assert in_hermes_form(whole, read, TOOLS).startswith(certain)


def test_text_before_a_call_is_told_as_it_comes() -> None:
    assert certain_length("<think>hm", llama) == len("<think>hm")
    assert certain_length("The answer", llama) == len("The answer")
    assert certain_length('{"name"', llama) == 0
    assert certain_length("So [TOOL_C", mistral) == len("So")
    assert certain_length("So\n<tool_call>\n<function", qwen_xml) == len("So")
    assert certain_length("a <b", qwen_xml) == len("a <b")


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("text", ["", " ", "plain", "{", "[", "<tool_call>", "[TOOL_CALLS]", ONE])
def test_other_text_is_as_it_was(read: CallFormat, text: str) -> None:
    assert in_hermes_form(text, read, TOOLS) == text
    assert in_hermes_form(text, read, []) == text
