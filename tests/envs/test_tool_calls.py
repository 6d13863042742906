"""Tool calls are cut out of generated text, also when it comes bit by bit."""

import json

import pytest
from tinkermq.envs.tool_calls import ToolText, parse_tool_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'


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
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        '<tool_call>{"name": "add"',
    ],
)
def test_what_is_no_well_formed_call_stays_text(text: str) -> None:
    assert parse_tool_calls(text) == (text, [])


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
