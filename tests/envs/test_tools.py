"""Games whose policy calls tools: calls, their arguments and results, schemas from elsewhere."""

import asyncio
import json
from typing import Any

import pytest
from hosting import hosting
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.envs import StepResult
from tinkermq.envs.game import check_result
from tinkermq.envs.tools import MAX_TOOLS, bounded_text, checked_tools
from tinkermq.schemas.wire.errors import GameError
from tool_games import INTEGER, Adding, AddingAsync, Ending, tool


def call(name: str = "add", **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{body}</tool_call>"


def step(game: Adding, action: str) -> StepResult:
    """Play a turn as the host does."""
    if isinstance(game, AddingAsync):
        return check_result(game, asyncio.run(game.step(action)))
    return check_result(game, game.step(action))


def texts(result: StepResult) -> list[str]:
    return [message["content"] for message in result.messages()]


@pytest.mark.parametrize("game_class", [Adding, AddingAsync])
def test_each_call_of_a_turn_has_a_message_of_its_own_in_order(game_class: type[Adding]) -> None:
    game = game_class()
    result = step(game, f"I add. {call(value=2)}\n{call('repeat', text='a')}{call(value=3)}")
    assert result.messages() == [
        {"role": "tool", "content": text} for text in ("sum 2", "aaaa", "sum 5")
    ]
    assert result.observation == "sum 2\n\naaaa\n\nsum 5"
    assert (result.reward, result.done) == (1.0, False)
    assert result.info == {"sum": 5, "tool_calls": 3, "refused_calls": 0}
    last = step(game, "<think>\nfour?</think>\n\n5")
    assert (last.reward, last.done, last.info["tool_calls"]) == (1.0, True, 3)


def test_one_call_is_answered_by_one_plain_observation() -> None:
    result = step(Adding(), call(value=2))
    assert (result.observation, result.role, result.tool_results) == ("sum 2", "tool", [])


def test_a_turn_without_a_call_ends_the_episode_by_default() -> None:
    result = step(Ending(), "that is all")
    assert (result.reward, result.done, result.observation) == (0.0, True, "")


def test_calls_behind_one_that_ends_the_episode_are_not_run() -> None:
    game = Adding()
    result = step(game, call(value=1) + call("stop") + call(value=1))
    assert (game.sum, result.done, result.reward) == (1, True, 1.5)
    assert texts(result) == ["sum 1", "stopped"]


def test_what_is_reasoned_calls_nothing() -> None:
    game = Adding()
    assert step(game, f"<think>{call(value=1)}</think>{call(value=2)}").observation == "sum 2"
    assert step(game, f"<think>{call(value=1)}").done


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (call("sub", value=1), "there is no tool 'sub'; the tools are add, repeat, stop"),
        (call(), "add: value is missing"),
        (call(value="1"), "add.value: '1' is of type string, it must be integer"),
        (call(value=True), "add.value: True is of type boolean, it must be integer"),
        (call(value=1, more=2), "add: 'more' is unknown, known are value"),
        (call("stop", now=1), "stop: 'now' is unknown, known are none"),
        ('<tool_call>{"name": "add", "arguments": {"value": 1}', "cannot be read"),
        ('<tool_call>{"name": "add"}</tool_call>', "cannot be read"),
    ],
)
def test_a_call_that_cannot_be_run_is_answered_by_a_message_and_the_others_run(
    written: str, words: str
) -> None:
    game = Adding()
    before, answer = texts(step(game, call(value=1) + written))
    assert before == "sum 1"
    assert words in answer
    result = step(game, call(value=1))
    assert (result.observation, result.info["refused_calls"]) == ("sum 2", 1)


@pytest.mark.parametrize(
    "written",
    [
        "<tool_call><function=add><parameter=value>2</parameter></function></tool_call>",
        "<tool_call>add\n<arg_key>value</arg_key><arg_value>2</arg_value></tool_call>",
        '[TOOL_CALLS][{"name": "add", "arguments": {"value": 2}}]',
        '[TOOL_CALLS]add[ARGS]{"value": 2}',
        '{"name": "add", "parameters": {"value": 2}}',
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"value": 2}<｜tool▁call▁end｜>',
    ],
)
def test_calls_are_read_in_the_formats_of_other_models(written: str) -> None:
    assert step(Adding(), written).observation == "sum 2"


def test_json_that_calls_no_tool_of_the_game_is_an_answer() -> None:
    assert step(Ending(), '{"name": "Ada", "parameters": {}}').done


def test_results_calls_and_turns_are_bounded() -> None:
    game = Adding(max_result_chars=6, max_calls=2, max_tool_turns=2)
    result = step(game, call("repeat", text="äb") + call(value=1) * 2)
    assert texts(result) == [
        "äbäbäb\n[2 more characters left out]",
        "sum 1",
        "Error: not run: a turn has at most 2 calls",
    ]
    assert (game.sum, result.done) == (1, False)
    assert step(game, call(value=1)).done


@given(st.text(st.characters(), max_size=20), st.integers(0, 20))
def test_a_bounded_text_can_travel_and_is_the_whole_where_it_fits(text: str, most: int) -> None:
    bounded = bounded_text(text, most)
    bounded.encode()
    assert len(bounded.partition("\n[")[0]) <= most or "\n[" in text
    if len(text) <= most:
        assert bounded == text.encode(errors="replace").decode()


def _problem(schema: dict[str, Any], value: Any) -> str:
    class Asking(Adding):
        def get_tools(self) -> list[dict[str, Any]]:
            parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFS}
            return [{"function": {"name": "repeat", "parameters": parameters}}]

        def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
            return Adding.call_tool(self, name, {"text": "fits"})

    text = step(Asking(), call("repeat", x=value)).observation
    return "" if text == "fits" * 4 else text


DEFS: dict[str, Any] = {
    "side": {"enum": ["left", "right"]},
    "bomb": {"anyOf": [{"$ref": "#/$defs/bomb"}, {"$ref": "#/$defs/bomb"}, {"type": "null"}]},
}
PAIR = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "value", "words"),
    [
        ({"type": ["string", "null"]}, None, ""),
        ({"anyOf": [INTEGER, {"type": "null"}]}, None, ""),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "a", "x: 'a' fits no choice"),
        ({"type": "number"}, 1, ""),
        ({"type": "number"}, "1", "must be number"),
        ({"type": "array", "items": INTEGER}, [1, "b"], "repeat.x[1]: 'b' is of type string"),
        (PAIR, {"a": 1, "b": 2}, ""),
        (PAIR, {}, "repeat.x: a is missing"),
        (PAIR | {"additionalProperties": False}, {"a": 1, "b": 2}, "'b' is unknown"),
        ({"$ref": "#/$defs/side"}, "left", ""),
        ({"$ref": "#/$defs/side"}, "up", 'x: \'up\' is none of "left", "right"'),
        ({"const": 4}, 5, "5 is none of 4"),
        ({"allOf": [INTEGER, {"enum": [1]}]}, 2, "2 is none of 1"),
        ({"type": "whatever", "anyOf": 3, "enum": "no", "required": {}}, 5, ""),
        ({"$ref": "#/$defs/bomb"}, [[[1]]], ""),
        ({"$ref": "elsewhere.json"}, 1, ""),
    ],
)
def test_arguments_are_compared_with_their_schema(
    schema: dict[str, Any], value: Any, words: str
) -> None:
    problem = _problem(schema, value)
    assert (words in problem) if words else not problem


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([tool("add it")], "a tool of the name 'add it'"),
        ([tool("x" * 65)], "a tool of the name"),
        ([tool("a\x1b[2Jb")], "a tool of the name"),
        ([{"type": "function"}], "a tool of the name None"),
        ([3], "a tool of the name None"),
        ([tool(), tool()], "several tools of the name add"),
        ([tool(f"t{number}") for number in range(MAX_TOOLS + 1)], "has 129 tools, at most 128 fit"),
        ([tool(value=_nested(40))], "the tool add cannot be offered: its schema nests over 32"),
        ([tool(value={"enum": ["x" * 70_000]})], "characters of 65,536"),
        ([tool(value={"properties": {"\x1b]0;title\x07": INTEGER}})], "has a control character"),
        ([tool(value={"title": "a\x00"})], "has a control character"),
        ([tool(value={"default": float("nan")})], "its schema is not JSON"),
        ([tool(value={"default": {1, 2}})], "its schema is not JSON"),
        ([{"name": "f", "parameters": {"type": "array"}}], "no object schema"),
        ([{"name": "f", "description": 4}], "its description is 4, no text"),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_with_its_source(
    tools: list[Any], words: str
) -> None:
    with pytest.raises(GameError, match="its server") as refused:
        checked_tools(tools, "its server")
    assert words in refused.value.message
    assert refused.value.hint


def test_a_tool_without_arguments_or_description_gets_empty_ones() -> None:
    (checked,) = checked_tools([{"name": "look"}], "a server")
    empty = {"type": "object", "properties": {}}
    assert checked == {
        "type": "function",
        "function": {"name": "look", "description": "", "parameters": empty},
    }


@pytest.mark.parametrize(
    "result",
    [
        StepResult("", 0.0, done=False, tool_results=["a", "b"]),
        StepResult("", 0.0, done=False, role="tool", tool_results="ab"),  # pyright: ignore[reportArgumentType]
        StepResult("", 0.0, done=False, role="tool", tool_results=["a", 1]),  # pyright: ignore[reportArgumentType]
    ],
)
def test_results_that_are_no_texts_of_a_tool_are_refused(result: StepResult) -> None:
    with pytest.raises(GameError, match=r"Adding\.step's tool_results"):
        check_result(Adding(), result)


async def test_a_host_refuses_a_game_with_a_tool_that_cannot_be_called(broker, scope) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        async with hosting(broker, scope, "tool_games:Unnameable"):
            pass
    assert failed.group_contains(GameError, match="Unnameable has a tool of the name 'add it'")
