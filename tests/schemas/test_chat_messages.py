"""One reader for the messages of all origins: calls as objects, nulls where they mean something."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tinkermq.actors.gateway.openai import read_query
from tinkermq.envs.data import ChatData
from tinkermq.envs.dataset import Dataset
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.chat_messages import (
    Origin,
    UnreadableMessageError,
    are_messages,
    read_conversation,
    read_object,
    read_tools,
    with_text_arguments,
)
from tinkermq.schemas.infer import ChatRequest
from tinkermq.schemas.model_apis.chat import CHAT as CHAT_API
from tinkermq.schemas.model_apis.chat import read_chat
from tinkermq.schemas.model_apis.request import RequestError
from tinkermq.schemas.wire.errors import DataError

ASKED = {"role": "user", "content": "write it"}
ARGUMENTS = {"path": "a.txt", "mode": None, "raw": '{"not": "an object"}', "n": 1.0}
TEXT = json.dumps(ARGUMENTS)
CALL = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": ARGUMENTS}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "ok", "tool_call_id": "c1"}
DONE = {"role": "assistant", "content": "done"}
CHAT = [ASKED, CALLED, RESULT, DONE]
ABSENT = {
    "tool_calls": None,
    "tool_call_id": None,
    "name": None,
    "reasoning_content": None,
    "function_call": None,
    "refusal": None,
    "audio": None,
}


def spelled(**call: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


SPELLINGS: dict[str, dict[str, Any]] = {
    "as templates take it": CALLED,
    "arguments as text": spelled(**CALL | {"function": {"name": "write", "arguments": TEXT}}),
    "arguments as indented text": spelled(
        **CALL | {"function": {"name": "write", "arguments": json.dumps(ARGUMENTS, indent=2)}}
    ),
    "without a type": spelled(id="c1", function={"name": "write", "arguments": TEXT}),
    "flat": spelled(id="c1", name="write", arguments=ARGUMENTS),
    "flat, arguments as text": spelled(id="c1", name="write", arguments=TEXT, function=None),
    "as Llama writes it": spelled(id="c1", name="write", parameters=ARGUMENTS),
    "with absent keys": {**ABSENT, **spelled(**CALL, index=None, custom=None)},
    "content of no parts": {**CALLED, "content": []},
    "without content": {"role": "assistant", "tool_calls": [CALL]},
    "calls as text": {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
    "with NaN": {**CALLED, "name": float("nan")},
}


def of_jsonl(folder: Path, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return ChatData([write_rows(folder / "a.jsonl", [{"messages": chat}])]).row(0).messages


def of_json_text(folder: Path, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [{"messages": json.dumps(chat)}]
    return ChatData([write_rows(folder / "a.parquet", rows)]).row(0).messages


def of_prompt(folder: Path, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [{"prompt": chat, "answer": "x"}]
    return Dataset([write_rows(folder / "a.jsonl", rows)]).record(0).messages()


def of_body(folder: Path, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    body = json.dumps({"model": "m", "messages": chat}).encode()
    _, query = read_query(body, CHAT_API)
    assert isinstance(query, ChatRequest)
    return [message.for_template() for message in query.messages]


def of_program(folder: Path, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message.for_template() for message in read_chat({"messages": chat}).messages]


ORIGINS: list[Callable[[Path, list[dict[str, Any]]], list[dict[str, Any]]]] = [
    of_jsonl,
    of_json_text,
    of_prompt,
    of_body,
    of_program,
]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_call_is_an_object_wherever_it_stands_and_however_it_is_spelled(
    tmp_path: Path, origin: Callable[..., Any], spelling: str
) -> None:
    assert origin(tmp_path, [ASKED, SPELLINGS[spelling], RESULT, DONE]) == CHAT


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"role": "developer", "content": "be brief"}, {"role": "system", "content": "be brief"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}, "b"]},
            {"role": "user", "content": "ab"},
        ),
        ({"role": "user", "content": {"type": "text", "text": "a"}}, ASKED | {"content": "a"}),
        ({"role": "ipython", "content": "3", "tool_call_id": "c"}, RESULT | {"content": "3"}),
        ({"role": "tool", "content": {"x": None}}, RESULT | {"content": '{"x": null}'}),
        ({"role": "tool", "content": 22.0}, RESULT | {"content": "22.0"}),
        ({"role": "tool", "content": []}, RESULT | {"content": "[]"}),
        ({"role": "tool", "content": {}}, RESULT | {"content": "{}"}),
        ({"role": "tool", "content": ["a", None]}, RESULT | {"content": '["a", null]'}),
        ({"role": "tool", "content": {"type": "text"}}, RESULT | {"content": '{"type": "text"}'}),
        ({"role": "tool", "content": [{"x": "é"}]}, RESULT | {"content": '[{"x": "é"}]'}),
        ({"role": "tool", "content": {"text": "a"}}, RESULT | {"content": '{"text": "a"}'}),
        ({"role": "tool", "content": [{"type": "text", "text": "a"}]}, RESULT | {"content": "a"}),
        ({"role": "assistant", "content": None, "refusal": "no"}, DONE | {"content": "no"}),
        ({"role": "assistant", "content": "x", "tool_calls": []}, DONE | {"content": "x"}),
        ({"role": "assistant", "content": "x", "tool_calls": "[]"}, DONE | {"content": "x"}),
    ],
)
def test_roles_and_contents_are_alike_wherever_they_stand(
    tmp_path: Path, origin: Callable[..., Any], given: dict[str, Any], read: dict[str, Any]
) -> None:
    if read["role"] == "tool":
        given, read = given | {"tool_call_id": "c1"}, read | {"tool_call_id": "c1"}
    assert origin(tmp_path, [ASKED, given, ASKED, DONE]) == [ASKED, read, ASKED, DONE]


@pytest.mark.parametrize("origin", ORIGINS)
def test_calls_of_earlier_years_are_calls(tmp_path: Path, origin: Callable[..., Any]) -> None:
    asked = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": "{}"},
    }
    told = {"role": "function", "name": "f", "content": "ok"}
    read = origin(tmp_path, [ASKED, asked, told, DONE])
    (call,) = read[1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {}}
    assert "function_call" not in read[1]
    assert (read[2]["role"], read[2]["content"]) == ("tool", "ok")


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("arguments", [None, "", " \n", {}, "{}", "missing"])
def test_no_arguments_are_an_empty_object(
    tmp_path: Path, origin: Callable[..., Any], arguments: Any
) -> None:
    function = {"name": "now", "arguments": arguments}
    if arguments == "missing":
        del function["arguments"]
    call = {"id": "c1", "type": "function", "function": function}
    read = origin(tmp_path, [ASKED, CALLED | {"tool_calls": [call]}, RESULT, DONE])
    assert read[1]["tool_calls"][0]["function"]["arguments"] == {}


NO_OBJECTS = [
    '{"a": 1e999}',
    '"text"',
    "[1]",
    "3",
    "null",
    "{",
    "{} x",
    '{"a": 1, "a": 2}',
    '{"a": NaN}',
    "x=1",
]


@pytest.mark.parametrize("arguments", [*NO_OBJECTS, [1], 3, True])
@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_arguments_that_are_no_object_are_refused_with_file_row_and_column(
    tmp_path: Path, column: str, arguments: Any
) -> None:
    chat = [ASKED, spelled(name="write", arguments=arguments), RESULT, DONE]
    good = {"messages": CHAT, "prompt": CHAT, "answer": "x"}
    path = write_rows(tmp_path / "a.jsonl", [good, {**good, column: chat}])
    with pytest.raises(DataError) as caught:
        ChatData([path]).row(1) if column == "messages" else Dataset([path]).record(1)
    place = f"{column}[1].tool_calls[0].function.arguments of row 1 of {path} is {arguments!r}"
    assert place in caught.value.message
    assert "not a JSON object" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("arguments", NO_OBJECTS)
@pytest.mark.parametrize("origin", [of_body, of_program])
def test_in_a_request_arguments_are_what_the_model_wrote(
    tmp_path: Path, origin: Callable[..., Any], arguments: str
) -> None:
    chat = [ASKED, spelled(**CALL | {"function": {"name": "f", "arguments": arguments}}), RESULT]
    assert origin(tmp_path, chat)[1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (spelled(name="", arguments={}), "messages[1].tool_calls[0].function.name"),
        (spelled(name="  ", arguments={}), "messages[1].tool_calls[0].function.name"),
        (spelled(function={"name": 3}), "messages[1].tool_calls[0].function.name"),
        (spelled(function="write"), "messages[1].tool_calls[0].function"),
        (spelled(id="c1"), "messages[1].tool_calls[0].function"),
        (spelled(name="f", args={"a": 1}), "messages[1].tool_calls[0].function.arguments"),
        (spelled() | {"tool_calls": "no calls"}, "messages[1].tool_calls[0].function"),
        (spelled() | {"tool_calls": ["f"]}, "messages[1].tool_calls[0].function"),
        (spelled() | {"tool_calls": [None]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "function_call": "f"}, "messages[1].function_call"),
        (
            {"role": "assistant", "function_call": {"arguments": "{}"}},
            "messages[1].function_call.name",
        ),
        ({"role": "assistant", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": {"text": "?"}}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "video"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [3]}, "messages[1].content[0].type"),
        ({"role": "tool", "content": {1, 2}}, "messages[1].content"),
    ],
)
@pytest.mark.parametrize("is_request", [True, False])
def test_a_message_that_cannot_be_read_names_the_place(
    message: dict[str, Any], place: str, is_request: bool
) -> None:
    with pytest.raises(UnreadableMessageError) as caught:
        read_conversation([ASKED, message, RESULT], Origin(is_request=is_request))
    assert caught.value.place == place
    assert caught.value.hint


def test_a_body_that_cannot_be_read_is_the_askers_mistake() -> None:
    body = {"model": "m", "messages": [ASKED, spelled(name="", arguments={})]}
    with pytest.raises(RequestError, match="a tool call whose name is ''") as caught:
        read_query(json.dumps(body).encode(), CHAT_API)
    assert caught.value.param.startswith("messages[1]")


@pytest.mark.parametrize("arguments", [ARGUMENTS, TEXT, "no object", {}])
def test_an_api_of_openais_is_sent_arguments_as_text(arguments: Any) -> None:
    read = read_conversation(
        [ASKED, spelled(name="f", arguments=arguments)], Origin(is_request=True)
    )
    told = [with_text_arguments(message) for message in read]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    assert told[0] == ASKED
    assert told[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": text}


@pytest.mark.parametrize("said", ["reasoning", "reasoning_content", "thinking"])
def test_a_turn_may_only_reason(said: str) -> None:
    turn = {"role": "assistant", "content": None, said: "hm", "tool_calls": None}
    (read,) = read_conversation([turn], Origin(where="row 0"))
    assert (read["content"], read["reasoning_content"]) == ("", "hm")


def test_what_is_read_is_read_again_to_the_same() -> None:
    for message in SPELLINGS.values():
        read = read_conversation([ASKED, message, RESULT], Origin())
        assert read_conversation(read, Origin()) == read
        assert read_conversation(read, Origin(is_request=True)) == read


def test_scalars_and_arrays_of_numpy_and_pyarrow_are_those_of_python() -> None:
    arguments = {"n": np.int64(3), "x": np.float32(0.5), "ok": np.bool_(True), "t": pa.scalar("é")}
    call = {"name": np.str_("f"), "arguments": arguments | {"all": np.array([1, 2])}}
    turn = {"role": "assistant", "content": None, "tool_calls": np.array([call], dtype=object)}
    read = read_conversation(np.array([ASKED, turn], dtype=object), Origin(where="row 0"))
    told = read[1]["tool_calls"][0]["function"]
    assert json.dumps(told, ensure_ascii=False) == (
        '{"name": "f", "arguments": {"n": 3, "x": 0.5, "ok": true, "t": "é", "all": [1, 2]}}'
    )


def test_what_nests_too_deep_is_refused() -> None:
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(DataError, match="is nested too deeply"):
        read_conversation([spelled(name="f", arguments={"a": deep})], Origin(where="row 0"))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": deep}}}
    with pytest.raises(DataError, match="tools is '…', and is nested too deeply"):
        read_tools([tool], Origin("tools", is_request=True))


@pytest.mark.parametrize(
    ("value", "known"),
    [
        ([ASKED], True),
        (json.dumps([ASKED]), True),
        ([{"role": "user"}], False),
        ([{"content": "x"}], False),
        ("[]", False),
        ("[1]", False),
        ("write it", False),
        ([{"role": 3, "content": "x"}], False),
    ],
)
def test_messages_are_known_from_texts(value: Any, known: bool) -> None:
    assert are_messages(value) == known


@pytest.mark.parametrize(
    ("text", "value"),
    [("{}", {}), (' {"a": null} ', {"a": None}), ('{"a": "{}"}', {"a": "{}"})]
    + [(text, None) for text in (*NO_OBJECTS, "", "nothing", '{"a": {"b": 1, "b": 1}}', "\\ud83d")],
)
def test_an_object_says_each_key_once(text: str, value: Any) -> None:
    assert read_object(text) == value


# Parquet: the structs of a file have the keys of all rows.


def test_keys_that_parquet_fills_in_are_left_out(tmp_path: Path) -> None:
    first = [ASKED, {"role": "assistant", "content": "hello"}]
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": {"path": "a"}}}
    other = {"id": "c2", "type": "function", "function": {"name": "r", "arguments": {"n": 2}}}
    second = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call, other]}, RESULT]
    path = write_rows(tmp_path / "a.parquet", [{"messages": first}, {"messages": second}])
    assert pq.read_table(path)["messages"][0][0].as_py()["tool_calls"] is None
    data = ChatData([path])
    assert data.row(0).messages == first
    read = data.row(1).messages
    assert read[1] == {"role": "assistant", "content": "", "tool_calls": [call, other]}
    assert read[2] == RESULT


def test_keys_that_parquet_fills_in_are_left_out_of_prompts(tmp_path: Path) -> None:
    rows = [
        {"prompt": [ASKED, {"role": "assistant", "content": "a", "name": "ada"}], "answer": "x"},
        {"prompt": [ASKED, {"role": "assistant", "content": "b", "name": None}], "answer": "x"},
    ]
    path = write_rows(tmp_path / "a.parquet", rows)
    read = Dataset([path]).record(1).messages()[1]
    assert read == {"role": "assistant", "content": "b"}


def test_nulls_of_maps_and_of_json_text_in_parquet_are_values(tmp_path: Path) -> None:
    function = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    call = pa.struct([("id", pa.string()), ("function", function)])
    calls = pa.list_(call)
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", calls)])
    arguments = [("path", "a"), ("mode", None)]
    turn = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "w", "arguments": arguments}}],
    }
    table = pa.table({"messages": pa.array([[ASKED, turn]], pa.list_(message))})
    pq.write_table(table, tmp_path / "maps.parquet")
    text = spelled(name="w", arguments='{"path": "a", "mode": null}')
    write_rows(tmp_path / "texts.parquet", [{"messages": [ASKED, text]}])
    for name in ("maps", "texts"):
        read = ChatData([tmp_path / f"{name}.parquet"]).row(0).messages[1]
        assert read["tool_calls"][0]["function"]["arguments"] == {"path": "a", "mode": None}


def test_other_columns_of_parquet_are_as_they_were(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1", "extra_info": {"a": 1}}]
    rows += [{"prompt": "b", "answer": "2", "extra_info": {"b": 2}}]
    data = Dataset([write_rows(tmp_path / "a.parquet", rows)])
    assert data.record(0).extra_info == {"a": 1, "b": None}


# Tools.

SCHEMA = {
    "type": "object",
    "properties": {
        "mode": {"type": ["string", "null"], "default": None, "enum": ["r", None]},
        "default": {"type": "string", "const": None},
    },
    "required": ["mode"],
}
TOOL = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}
FILLED = {
    "type": "function",
    "strict": None,
    "function": {
        "name": "write",
        "description": None,
        "strict": None,
        "parameters": {
            **SCHEMA,
            "title": None,
            "properties": {**SCHEMA["properties"], "query": None},
        },
    },
}


@pytest.mark.parametrize(
    "tools",
    [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [FILLED], json.dumps([FILLED]), TOOL],
)
def test_tools_lose_what_is_absent_and_keep_the_nulls_of_their_schemas(
    tmp_path: Path, tools: Any
) -> None:
    assert read_tools(tools, Origin("tools", "row 0")) == [TOOL]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT, "tools": tools}])
    assert ChatData([path]).row(0).tools == [TOOL]


@pytest.mark.parametrize("tools", [None, "", " ", [], "[]", float("nan")])
def test_no_tools_are_no_tools(tools: Any) -> None:
    assert read_tools(tools, Origin("tools", "row 0")) == []


@pytest.mark.parametrize("tools", ["write", "[1]", [1], 3, ["write"], '"write"', [[TOOL]]])
def test_tools_that_cannot_be_read_are_named_by_file_row_and_column(
    tmp_path: Path, tools: Any
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT, "tools": tools}])
    with pytest.raises(DataError) as caught:
        ChatData([path]).row(0)
    assert f"tools of row 0 of {path} is {tools!r}"[:60] in caught.value.message


def test_tools_of_parquet_lose_the_keys_of_others(tmp_path: Path) -> None:
    def tool(name: str) -> dict[str, Any]:
        properties = {name: {"type": "string"}}
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    rows = [{"messages": CHAT[:1] + CHAT[3:], "tools": [tool(name)]} for name in ("a", "b")]
    data = ChatData([write_rows(tmp_path / "a.parquet", rows)])
    assert [data.row(n).tools for n in range(2)] == [[tool("a")], [tool("b")]]
