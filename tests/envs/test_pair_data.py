"""Pairs of answers in parquet and JSONL files, in the forms in which datasets have them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tinkermq.envs.data.chat_data import ChatData
from tinkermq.envs.data.pair_data import PairData, open_rows
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.config.sft import SftConfig
from tinkermq.schemas.wire.errors import DataError

ASKED = {"role": "user", "content": "2+2"}
RIGHT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
        {"prompt": "not read", "chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]},
        {"chosen": json.dumps([ASKED, RIGHT]), "rejected": json.dumps([ASKED, WRONG])},
    ],
    ids=["texts", "messages", "conversations", "conversations and a prompt", "JSON"],
)
def test_each_form_of_a_pair_is_read_alike(
    tmp_path: Path, row: dict[str, Any], suffix: str
) -> None:
    rows = [{**row, "tools": json.dumps([TOOL])}]
    data = PairData([write_rows(tmp_path / f"a.{suffix}", rows)])
    pair = data.row(0)
    assert (len(data), pair.prompt, pair.chosen, pair.rejected) == (1, [ASKED], [RIGHT], [WRONG])
    assert pair.tools == [TOOL]
    assert pair.where.startswith("row 0 of ")
    data.close()


def test_what_conversations_have_in_common_is_the_prompt(tmp_path: Path) -> None:
    common = [ASKED, RIGHT, {"role": "user", "content": "and 3+3?"}]
    chosen, rejected = [*common, RIGHT, ASKED, RIGHT], [*common, WRONG]
    path = write_rows(tmp_path / "a.jsonl", [{"chosen": chosen, "rejected": rejected}])
    pair = PairData([path]).row(0)
    assert (pair.prompt, pair.chosen) == (common, [RIGHT, ASKED, RIGHT])


def test_a_text_that_looks_like_a_list_is_a_text(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "[1]", "chosen": "[2]", "rejected": "[]"}])
    pair = PairData([path]).row(0)
    assert [one[0]["content"] for one in (pair.prompt, pair.chosen, pair.rejected)] == [
        "[1]",
        "[2]",
        "[]",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "4"}, "has no column rejected; its columns are prompt, chosen"),
        ({"messages": [ASKED]}, "has no column chosen; its columns are messages"),
        ({"chosen": "4", "rejected": "5"}, "row 0 of .* has answers, and no prompt"),
        ({"prompt": "x", "chosen": "4", "rejected": "4"}, "chosen and rejected of .* are equal"),
        (
            {"chosen": [ASKED, RIGHT], "rejected": [ASKED, RIGHT]},
            "chosen and rejected of .* are equal",
        ),
        (
            {"prompt": "x", "chosen": "4", "rejected": ""},
            "the assistant says nothing in rejected of row 0",
        ),
        ({"prompt": "x", "chosen": "4", "rejected": None}, "rejected of row 0 of .* is None"),
        (
            {"prompt": "x", "chosen": [{"role": "assistant"}], "rejected": "4"},
            "message 0 of chosen of row 0 of .* says nothing",
        ),
        (
            {"chosen": [ASKED, RIGHT], "rejected": [{**ASKED, "content": "x"}, WRONG]},
            "conversations that begin differently",
        ),
        (
            {"chosen": [ASKED, RIGHT], "rejected": [ASKED, RIGHT, ASKED, WRONG]},
            "chosen of row 0 of .* goes on behind the prompt with nothing",
        ),
        (
            {"chosen": [ASKED, RIGHT], "rejected": [ASKED, ASKED, WRONG]},
            "rejected of row 0 of .* goes on behind the prompt with a message of user",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError, match=message) as caught:
        PairData([path]).row(0)
    assert caught.value.hint


def test_the_objective_says_what_rows_are(tmp_path: Path) -> None:
    chats = write_rows(tmp_path / "c.jsonl", [{"messages": [ASKED, RIGHT]}])
    pairs = write_rows(tmp_path / "p.jsonl", [{"prompt": "x", "chosen": "4", "rejected": "5"}])
    assert isinstance(open_rows(SftConfig(data=[str(chats)])), ChatData)
    assert isinstance(open_rows(SftConfig(data=[str(pairs)], objective="reward")), PairData)
    with pytest.raises(DataError, match="has no column chosen"):
        open_rows(SftConfig(data=[str(chats)], objective="dpo"))
