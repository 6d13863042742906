"""Calls in the texts of models, and the formats in which they write them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.schemas.argument_types import argument_value
from tinkermq.schemas.call_formats import FORMATS, AnswerConverter, in_hermes_form
from tinkermq.schemas.model_apis.canonical import ReplyReader, parse_reply
from tinkermq.schemas.tool_calls import (
    CLOSE,
    OPEN,
    CallFormat,
    CallSplitter,
    parse_tool_calls,
    read_call,
)

CASES: list[dict[str, Any]] = [
    {**case, "calls": [tuple(call) for call in case["calls"]]}
    for case in map(
        json.loads, Path(__file__).with_name("tool_calls.jsonl").read_text().splitlines()
    )
]
"""What models write in a tag, or in a format of their own, and the calls that it is."""
READ = {case["tag"]: case["calls"] for case in CASES if "tag" in case and case["calls"]}
TEXTS = [case["tag"] for case in CASES if "tag" in case and not case["calls"]] + ["[" * 3000]
OWN = [case for case in CASES if "format" in case]
BY_NAME = {form.name: form for form in FORMATS}
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
    reader, at, turn = _reader(), 0, 0
    while at < len(whole):
        bit = whole[at : at + cuts[turn % len(cuts)]]
        reader.push(bit)
        at, turn = at + len(bit), turn + 1
    reader.finish()
    _, calls = parse_tool_calls(whole, "c")
    reply = parse_reply(whole, "c", calls=True)
    assert (reader.reply, reader.reply.calls) == (reply, reply.calls)
    names = [call["function"]["name"] for call in calls]
    assert [call.name for call in reply.calls] == names


def test_an_answer_that_repeats_broken_tags_is_read_in_little_time() -> None:
    started = time.process_time()
    for broken in (f'{OPEN}{{"a{CALL[-12:]}x"', OPEN, f'{OPEN}[{{"{CLOSE}', f'"{CLOSE}{OPEN}'):
        stream = CallSplitter()
        told = [piece for _ in range(500) for piece in stream.push(broken)]
        told += stream.push("", last=True)
        assert "".join(map(str, told)) == broken * 500
    assert time.process_time() - started < 20


@pytest.mark.parametrize("size", [1, 2, 5, 200])
def test_a_call_is_held_back_while_the_text_before_it_flows(size: int) -> None:
    whole = f"a < b, so {CALL[:-1]}"
    stream = CallSplitter()
    told = [p for at in range(0, len(whole), size) for p in stream.push(whole[at : at + size])]
    assert "".join(map(str, told)) == "a < b, so "
    (calls,) = stream.push(CALL[-1])
    assert len(calls) == 1


def test_an_unfinished_marker_is_told_at_the_end() -> None:
    stream = CallSplitter()
    assert [*stream.push("x <tool_c")] == ["x "]
    assert [*stream.push("", last=True)] == ["<tool_c"]


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
ONE = "<｜tool▁call▁begin｜>"


@pytest.mark.parametrize("case", OWN, ids=lambda case: f"{case['format']} {case['text']}")
@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
def test_a_call_is_read_in_the_format_of_its_model_and_all_else_stays_text(
    case: dict[str, Any], thought: str
) -> None:
    told = in_hermes_form(thought + case["text"], BY_NAME[case["format"]], TOOLS)
    reply = parse_reply(told, "c", calls=True)
    assert [(call.name, call.value) for call in reply.calls] == case["calls"]
    if case["calls"]:
        assert (reply.text, reply.reasoning) == (case["said"], "hm" if thought else None)
    else:
        assert told == thought + case["text"]


DEFS: dict[str, Any] = {
    "count": {"type": "integer"},
    "colour": {"enum": ["red", 3]},
    "alias": {"$ref": "#/definitions/size"},
    "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}},
    "loop": {"$ref": "#/$defs/loop"},
    "deep": {"anyOf": [{"$ref": "#/$defs/deep"}, {"type": "integer"}]},
    "a/b c": {"type": "boolean"},
}
REF = {name: {"$ref": f"#/$defs/{name}"} for name in DEFS}
TYPED: list[tuple[Any, str, Any]] = [
    # references, nested and recursive
    (REF["count"], "5", 5),
    (REF["colour"], "3", 3),
    (REF["colour"], "red", "red"),
    (REF["alias"], "1.5", 1.5),
    (REF["node"], '{"next": {"next": null}}', {"next": {"next": None}}),
    (REF["loop"], "5", "5"),
    (REF["deep"], "5", 5),
    ({"$ref": "#/$defs/a~1b%20c"}, "True", True),
    ({"$ref": "#/$defs/missing"}, "5", "5"),
    ({"$ref": "https://example.org/x"}, "5", "5"),
    ({"$ref": "#/$defs/own", "$defs": {"own": {"type": "array"}}}, "[1]", [1]),
    # combinations
    ({"allOf": [REF["count"], {"description": "how many"}]}, "5", 5),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, "5", "5"),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}, '["a"]', ["a"]),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}, "[a", "[a"),
    ({"oneOf": [{"type": "integer"}, {"const": "auto"}]}, "auto", "auto"),
    ({"oneOf": [{"type": "integer"}, {"const": "auto"}]}, "5", 5),
    ({"anyOf": [REF["node"], {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "integer"}, {}]}, "5", "5"),
    ({"anyOf": [{"anyOf": [REF["count"], {"type": "null"}]}, {"type": "boolean"}]}, "None", None),
    # choices, and keywords of one type, without `type`
    ({"enum": [1, 2, 3]}, "2", 2),
    ({"enum": ["1", "2"]}, "2", "2"),
    ({"enum": ["1", 2.5]}, "1", "1"),
    ({"enum": ["on", None]}, "null", None),
    ({"const": 5}, "5", 5),
    ({"const": True}, "true", True),
    ({"const": "5"}, "5", "5"),
    ({"items": {"type": "integer"}}, "[1, 2]", [1, 2]),
    ({"properties": {"a": {}}}, '{"a": "1"}', {"a": "1"}),
    ({"minimum": 0}, "0.5", 0.5),
    ({"pattern": "^[0-9]+$"}, "55", "55"),
    # null, numbers and Booleans
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "string", "nullable": True}, "None", None),
    ({"type": ["integer", "null"]}, "7", 7),
    ({"type": ["string", "integer"]}, "7", 7),
    ({"type": "number"}, "-1e3", -1000.0),
    ({"type": "number"}, "12345678901234567890", 12345678901234567890),
    ({"type": "boolean"}, "False", False),
    ({"type": "integer"}, "NaN", "NaN"),
    ({"type": "int"}, "7", 7),
    # text
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, "true", "true"),
    ({"type": "string"}, '"quoted"', '"quoted"'),
    ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
    ({"description": "anything"}, "5", "5"),
]
WRITTEN: dict[str, str] = {
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{}</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
def test_an_argument_in_xml_has_the_type_that_its_schema_allows(
    name: str, schema: dict[str, Any], text: str, value: Any
) -> None:
    top = {"$defs": DEFS, "definitions": {"size": {"type": "number"}}}
    own: dict[str, Any] = {"type": "object", "properties": {"x": schema}, **top}
    for parameters in (
        own,
        {"$ref": "#/$defs/all", **top, "$defs": {**DEFS, "all": {"properties": {"x": schema}}}},
        {"allOf": [{"properties": {"y": {}}}, {"properties": {"x": schema}}], **top},
        {"anyOf": [{"properties": {"x": schema}}, {"properties": {"y": {}}}], **top},
        {"type": "object", "additionalProperties": schema, **top},
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        told = in_hermes_form(WRITTEN[name].replace("{}", text), BY_NAME[name], [tool])
        (call,) = parse_reply(told, "c", calls=True).calls
        assert json.dumps(call.value) == json.dumps({"x": value})


def test_a_schema_of_references_to_references_is_read_once_each() -> None:
    twice = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
    schema = {"$defs": {**twice, "d30": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    assert argument_value("5", {**schema, "additionalProperties": {"$ref": "#/$defs/d0"}}, "x") == 5


@pytest.mark.parametrize("case", OWN, ids=lambda case: f"{case['format']} {case['text']}")
def test_an_answer_is_converted_alike_whatever_its_pieces_are(case: dict[str, Any]) -> None:
    form, text = BY_NAME[case["format"]], case["text"]
    for before, thinking in (
        ("", False),
        ("a < b", False),
        ("<think>\nhm</think> ", False),
        ("hm</think>", True),
    ):
        whole = before + text
        wanted = in_hermes_form(whole, form, TOOLS, thinking=thinking)
        cuts = [[at] for at in range(len(whole))] + [list(range(0, len(whole), n)) for n in (1, 3)]
        for cut in cuts:
            convert = AnswerConverter(form, TOOLS, thinking=thinking)
            said = ""
            for begin, end in zip([0, *cut], [*cut, len(whole)], strict=True):
                said += convert.push(whole[begin:end])
                assert wanted.startswith(said)
            assert said + convert.push("", last=True) == wanted


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_call_that_is_only_thought_of_is_no_call(form: CallFormat) -> None:
    for case in OWN:
        if case["calls"] and case["format"] == form.name:
            thought = f"<think>\nI could write {case['text']}"
            assert in_hermes_form(thought, form, TOOLS) == thought
            assert in_hermes_form(thought[8:], form, TOOLS, thinking=True) == thought[8:]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("text", ["", " ", "plain", "{", "[", "<tool_call>", "[TOOL_CALLS]", ONE])
def test_other_text_is_as_it_was(form: CallFormat, text: str) -> None:
    assert in_hermes_form(text, form, TOOLS) == text
    assert in_hermes_form(text, form, []) == text
