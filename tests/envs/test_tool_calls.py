"""Tool calls are cut out of generated text, also when it comes bit by bit."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.envs.model_apis.canonical import ReplyReader, parse_reply
from tinkermq.envs.tool_calls import CLOSE, OPEN, ToolText, parse_tool_calls, read_call

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
