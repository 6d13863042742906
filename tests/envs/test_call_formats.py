"""Tool calls in models' own formats: what is well formed is read, all else stays text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.envs.model_apis.canonical import parse_reply
from tinkermq.envs.tool_calls import (
    FORMATS,
    CallFormat,
    certain_length,
    deepseek,
    glm,
    in_hermes_form,
    llama,
    mistral,
    qwen_xml,
)

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
READ: list[tuple[CallFormat, str, str, list[tuple[str, Any]]]] = [
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


@pytest.mark.parametrize(("read", "text", "said", "calls"), READ)
@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
def test_a_call_is_read_in_the_format_of_its_model(
    read: CallFormat, text: str, said: str, calls: list[tuple[str, Any]], thought: str
) -> None:
    told = in_hermes_form(thought + text, read, TOOLS)
    reply = parse_reply(told, "c", calls=True)
    assert (reply.text, [(call.name, call.value) for call in reply.calls]) == (said, calls)
    assert reply.reasoning == ("hm" if thought else None)


TEXTS: list[tuple[CallFormat, str]] = [
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


@pytest.mark.parametrize(("read", "text"), TEXTS)
def test_what_is_not_well_formed_stays_text(read: CallFormat, text: str) -> None:
    assert in_hermes_form(text, read, TOOLS) == text
    assert not parse_reply(text, "c", calls=True).calls


@pytest.mark.parametrize("read", FORMATS)
def test_a_call_that_is_only_thought_of_is_no_call(read: CallFormat) -> None:
    for own, text, _, _ in READ:
        if own is read:
            thought = f"<think>\nI could write {text}"
            assert in_hermes_form(thought, read, TOOLS) == thought


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(data=st.data(), cut=st.floats(0, 1))
@pytest.mark.parametrize("read", FORMATS)
def test_what_is_told_of_a_growing_answer_stays(read: CallFormat, data: Any, cut: float) -> None:
    own = [text for of, text, *_ in READ if of is read] + [text for of, text in TEXTS if of is read]
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
