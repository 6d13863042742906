"""Conversations of parquet and JSONL files."""

import json
from pathlib import Path

import pytest
from tinkermq.envs.data import ChatData
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.wire.errors import DataError

CHAT = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_conversations_and_tools_are_read(tmp_path: Path, suffix: str) -> None:
    named = [*CHAT, {"role": "user", "content": "thanks", "name": "ada"}]
    rows = [{"messages": CHAT, "tools": json.dumps([TOOL])}, {"messages": named, "tools": None}]
    data = ChatData([write_rows(tmp_path / f"a.{suffix}", rows)])
    assert len(data) == 2
    assert data.row(0).messages == CHAT  # parquet gives every message the keys of all
    assert data.row(0).tools == [TOOL]
    assert (data.row(1).messages, data.row(1).tools) == (named, [])
    data.close()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+2"}, "row 0 of .* has no column messages; its columns are prompt"),
        ({"messages": "2+2"}, "messages of row 0 of .* is '2\\+2'"),
        ({"messages": []}, r"messages of row 0 of .* is \[\]"),
        ({"messages": [{"content": "2+2"}]}, "messages of row 0 of .* is"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "message 0 of row 0 of .* says nothing",
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_named(
    tmp_path: Path, row: dict[str, object], message: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=message) as caught:
        ChatData([path]).row(0)
    assert caught.value.hint


def test_a_conversation_with_half_a_character_costs_itself(tmp_path: Path) -> None:
    def row(text: str) -> str:
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
        return json.dumps({"messages": said})

    path = tmp_path / "chats.jsonl"
    path.write_text(f"{row('ok')}\n{row(chr(0xD83D))}\n{row('fine')}\n")
    data = ChatData([path])
    assert [data.row(number).messages[1]["content"] for number in (0, 2)] == ["ok", "fine"]
    with pytest.raises(DataError, match=r"row 1 of .*chats.jsonl .* in the column 'messages'"):
        data.row(1)
