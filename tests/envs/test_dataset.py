"""Rows as people and programs write them, and conversations among them."""

import base64
import contextlib
import datetime
import json
import os
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tinkermq.envs.data import ChatData
from tinkermq.envs.dataset import (
    Dataset,
    Record,
    answer_text,
    guard_datasets,
    parse_record,
    parse_task,
)
from tinkermq.envs.games.addition import AdditionGame
from tinkermq.envs.games.calculator import CalculatorGame
from tinkermq.envs.games.math import MathGame
from tinkermq.envs.running.episodes import Episodes, Opening
from tinkermq.envs.unpack import BATCH_ROWS, unpack
from tinkermq.envs.write_data import verl_row, write_rows
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.errors import ConfigError, DataError, GameError, StorageError


def rows(count, start=0):
    return [
        verl_row(f"{n}?", str(n), data_source="numbers", split="train", index=n)
        for n in range(start, start + count)
    ]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_any_row_of_any_file_can_be_read(tmp_path, suffix):
    count = 2 * BATCH_ROWS + 5
    first = write_rows(tmp_path / f"a{suffix}", rows(count))
    second = write_rows(tmp_path / f"b{suffix}", rows(3, start=count))
    data = Dataset([first, second])
    assert len(data) == count + 3
    for number in (0, BATCH_ROWS - 1, BATCH_ROWS, count - 1, count, count + 2):
        record = data.record(number)
        assert record.prompt == [{"role": "user", "content": f"{number}?"}]
        assert record.ground_truth == str(number)
        assert record.data_source == "numbers"
        assert record.extra_info == {"split": "train", "index": number}
    data.close()


def test_small_row_groups_do_not_shift_rows(tmp_path):
    path = tmp_path / "groups.parquet"
    pq.write_table(pa.Table.from_pylist(rows(100)), path, row_group_size=7)
    data = Dataset([path])
    assert [data.record(n).ground_truth for n in range(100)] == [str(n) for n in range(100)]
    data.close()


def test_a_process_without_pyarrow_unpacks_alike_and_stays_without(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.parquet", rows(5))
    for folder, loaded in (("here", True), ("there", False)):
        (tmp_path / folder).mkdir()
        if not loaded:
            monkeypatch.delitem(sys.modules, "pyarrow")
        unpack(path, tmp_path / folder / "rows", tmp_path / folder / "ends")
    assert "pyarrow" not in sys.modules
    for name in ("rows", "ends"):
        here, there = (tmp_path / folder / name for folder in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()


def test_a_process_unpacks_in_a_folder_with_a_file_named_as_a_module_of_python(
    tmp_path, monkeypatch
):
    path = write_rows(tmp_path / "a.parquet", rows(1))
    (tmp_path / "select.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "pyarrow")
    assert Dataset([path]).record(0).ground_truth == "0"


def test_the_process_that_unpacks_hands_its_error_on(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.parquet", [{"question": "1+1"}])
    monkeypatch.delitem(sys.modules, "pyarrow")
    assert "has no column prompt; its columns are question" in error_of(path)


def test_rows_that_cannot_be_unpacked_name_the_folder(tmp_path):
    path = write_rows(tmp_path / "a.parquet", rows(1))
    missing = tmp_path / "missing" / "rows"
    with pytest.raises(StorageError, match=r"a\.parquet cannot be unpacked to .*missing"):
        unpack(path, missing, missing)


def test_dates_in_a_row_become_texts(tmp_path):
    row = {"prompt": "when?", "answer": datetime.date(2026, 1, 2)}
    assert Dataset([write_rows(tmp_path / "d.parquet", [row])]).record(0).ground_truth == (
        "2026-01-02"
    )


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (1_234_567_891, pa.timestamp("ns"), "1970-01-01 00:00:01.234567891"),
        (1_234_567_000, pa.timestamp("ns"), "1970-01-01 00:00:01.234567"),
        (1_234_567_891, pa.time64("ns"), "00:00:01.234567891"),
        (253_402_300_800, pa.timestamp("s"), "10000-01-01 00:00:00.000"),
    ],
)
def test_a_time_that_is_finer_or_later_than_those_of_python_becomes_a_text(
    tmp_path, value, kind, text
):
    table = pa.table({**_columns(LEAST), "ground_truth": pa.array([value], kind)})
    pq.write_table(table.drop_columns("answer"), tmp_path / "a.parquet")
    assert Dataset([tmp_path / "a.parquet"]).record(0).ground_truth == text


def test_a_column_that_cannot_be_read_is_named_with_its_row(tmp_path):
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(pa.table({**_columns(LEAST), "extra": twice}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: column extra of row 0 cannot be read: "):
        Dataset([tmp_path / "a.parquet"])


def _columns(row):
    return {name: [value] for name, value in row.items()}


def test_prompt_and_answer_are_enough(tmp_path):
    path = write_rows(tmp_path / "qa.jsonl", [{"prompt": "1+1=", "answer": 2}])
    record = Dataset([path]).record(0)
    assert record.prompt == [{"role": "user", "content": "1+1="}]
    assert (record.ground_truth, record.data_source) == (2, "")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_columns_that_the_first_row_lacks_are_written(tmp_path, suffix):
    more = {"prompt": "2+2=", "answer": "4", "extra_info": {"level": 2}}
    data = Dataset([write_rows(tmp_path / f"a{suffix}", [LEAST, more])])
    assert [data.record(n).extra_info for n in range(2)] == [{}, {"level": 2}]


def test_blank_lines_and_a_missing_last_newline_do_no_harm(tmp_path):
    path = tmp_path / "loose.jsonl"
    line = json.dumps({"prompt": "a", "answer": "b"})
    path.write_text(f"\n{line}\n\n{line}")
    data = Dataset([path])
    assert [data.record(n).ground_truth for n in range(len(data))] == ["b", "b"]


def test_a_file_that_is_cut_while_it_is_in_use_costs_the_rows_that_are_gone(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "?" * 9000, "answer": n} for n in range(4)])
    data = Dataset([path])
    os.truncate(path, path.stat().st_size // 2)
    assert data.record(1).ground_truth == 1
    with pytest.raises(DataError, match=r"^row 3 of .*a\.jsonl is gone: the file was cut"):
        data.record(3)


def test_a_shuffle_depends_on_its_seed_alone_and_keeps_the_limit(tmp_path):
    path = write_rows(tmp_path / "v.jsonl", rows(50))

    def order(seed):
        data = Dataset([path]).shuffled(seed, 10)
        return [data.record(n).ground_truth for n in range(len(data))]

    assert len(set(order(1))) == 10
    assert order(1) == order(1) != order(2)


def test_images_come_along(tmp_path):
    row = {**rows(1)[0], "images": [b"png"]}
    assert Dataset([write_rows(tmp_path / "i.parquet", [row])]).record(0).images == [b"png"]


def error_of(path):
    with pytest.raises(DataError) as error:
        Dataset([path]).record(0)
    assert error.value.hint
    return error.value.message


QUESTION = [{"question": "1+1", "answer": "2"}]
UNTOLD = [{"prompt": "a", "reward_model": {"style": "rule"}}]
NO_ROWS = pa.schema({"prompt": pa.string(), "answer": pa.string()})


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.parquet", None, "there is no dataset file '{path}'"),
        ("data.csv", b"prompt,answer\n", "{path} is neither parquet, Arrow nor JSONL"),
        ("c.parquet", QUESTION, "{path} has no column prompt; its columns are question, answer"),
        (
            "c.jsonl",
            QUESTION,
            "row 0 of {path} has no column prompt; its columns are question, answer",
        ),
        ("s.parquet", [{"prompt": "1+1", "solution": "2"}], "reward_model (with ground_truth) or"),
        ("e.jsonl", b"", "{path} has no rows"),
        ("fake.parquet", b"not parquet at all", "{path} is not a parquet file: "),
        ("g.jsonl", UNTOLD, "row 0 of {path} has no gold answer"),
        *(
            ("p.jsonl", [{"prompt": prompt, "answer": "b"}], f"of row 0 of {{path}} is {prompt!r}")
            for prompt in (None, "", [{"role": "user"}], 7)
        ),
    ],
)
def test_what_is_no_dataset_is_named(tmp_path, name, content, told):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        write_rows(path, content)
    assert told.replace("{path}", str(path)) in error_of(path)


def test_a_table_without_rows_is_named(tmp_path):
    path = tmp_path / "e.parquet"
    pq.write_table(pa.Table.from_pylist([], schema=NO_ROWS), path)
    assert error_of(path) == f"{path} has no rows"


@pytest.mark.parametrize(
    ("number", "told"),
    [(1, "row 1 of .* is not valid JSON"), (2, "row 2 does not exist: .* has 2 rows")],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, number, told):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    with pytest.raises(DataError, match=told):
        Dataset([path]).record(number)


@pytest.mark.parametrize("loaded", [True, False])
def test_text_of_a_parquet_file_that_is_not_utf8_is_named_by_row_and_column(
    tmp_path, monkeypatch, loaded
):
    ends = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 2, 5)))
    texts = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"ok\xe9te")])
    path = tmp_path / "latin.parquet"
    pq.write_table(pa.table({"prompt": texts, "answer": pa.array(["1", "2"])}), path)
    if not loaded:
        monkeypatch.delitem(sys.modules, "pyarrow")
    with pytest.raises(DataError, match=r"latin.parquet: column prompt of row 1 is .* not UTF-8"):
        Dataset([path])


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "is empty"), (3, "has the"), ({"text": "?"}, "has the")]
)
def test_a_message_of_a_prompt_without_text_is_named_by_its_row(tmp_path, content, problem):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "answer": "1"}))
    with pytest.raises(
        DataError, match=rf"message 1 of the prompt of row 0 of .*a.jsonl {problem}"
    ):
        Dataset([path]).record(0)


def test_no_files_at_all_are_refused():
    with pytest.raises(DataError, match="a dataset has no files"):
        Dataset([])


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("truth", [None, "", "  ", float("nan"), [], [None]])
@pytest.mark.parametrize("column", ["reward_model", "answer"])
def test_a_row_without_a_gold_answer_is_refused_with_its_number_and_file(
    tmp_path, suffix, truth, column
):
    def row(answer):
        if column == "answer":
            return {"prompt": "1?", "answer": answer}
        return {"prompt": "1?", "reward_model": {"style": "rule", "ground_truth": answer}}

    good = ["1"] if isinstance(truth, list) else 1.0 if isinstance(truth, float) else "1"
    path = write_rows(tmp_path / f"a{suffix}", [row(good), row(truth), row(good)])
    data = Dataset([path])
    assert data.record(0).ground_truth == good
    with pytest.raises(DataError, match=rf"row 1 of .*a\{suffix} has no gold answer"):
        data.record(1)
    data.close()


@pytest.mark.parametrize(
    "truth", [0, 0.0, False, "0", "None", "NaN", "null", ["None", "4"], {"a": 1}]
)
def test_a_gold_answer_may_look_empty_and_be_one(truth):
    row = {"prompt": "1?", "reward_model": {"ground_truth": truth}}
    assert parse_record(row, "row 0").ground_truth == truth


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        (4.0, "4"),
        (-0.0, "0"),
        (2.5, "2.5"),
        (1e30, "1" + "0" * 30),
        (10**30, "1" + "0" * 30),
        (1e-7, "0.0000001"),
        ("4.0", "4.0"),
    ],
)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("column", ["reward_model", "answer"])
def test_a_number_is_the_gold_answer_that_a_person_would_write(
    tmp_path, truth, text, suffix, column
):
    if truth == 10**30 and isinstance(truth, int) and suffix == ".parquet":
        truth = Decimal(truth)
    value = {"style": "rule", "ground_truth": truth} if column == "reward_model" else truth
    path = write_rows(tmp_path / f"a{suffix}", [{"prompt": "?", column: value}])
    data = Dataset([path])
    found = data.record(0).ground_truth
    assert answer_text(found) == text
    if text == "4":
        assert str(found) == "4"  # reward functions compare texts
    pack({"truth": found})
    data.close()


def saved(folder, rows, *, stream=True, shards=1):
    """Write a folder as `save_to_disk` of Hugging Face's datasets does."""
    folder.mkdir(parents=True)
    for number in range(shards):
        table = pa.Table.from_pylist(rows[number::shards])
        new = pa.ipc.new_stream if stream else pa.ipc.new_file
        file = folder / f"data-{number:05}-of-{shards:05}.arrow"
        with new(str(file), table.schema) as writer:
            writer.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text("{}")
    return folder


def test_a_folder_of_save_to_disk_is_read_and_one_of_several_splits_names_them(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": float(n)} for n in range(3000)]
    for stream in (True, False):
        folder = saved(tmp_path / str(stream) / "train", rows, stream=stream, shards=2)
        (folder / "cache-1.arrow").write_bytes(b"")
        data = Dataset([folder])
        assert len(data) == 3000
        assert [data.record(n).ground_truth for n in (0, 1499, 1500, 2999)] == [0, 2998, 1, 2999]
        assert "row 1 of" in data.row(1)[1]
        data.close()
        saved(folder.parent / "test", rows[:2])
        with pytest.raises(DataError, match="holds several datasets: test, train") as error:
            Dataset([folder.parent])
        assert str(folder.parent / "test") in error.value.hint
    folder = saved(tmp_path / "old", rows[:2])
    (folder / "indices.arrow").write_bytes(b"")
    with pytest.raises(DataError, match="in another order than in its files"):
        Dataset([folder])
    with pytest.raises(DataError, match=r"the folder .* holds no dataset"):
        Dataset([tmp_path])
    (tmp_path / "cut.arrow").write_bytes(b"ARROW1 and no more")
    with pytest.raises(DataError, match=r"cut.arrow is not an Arrow file"):
        Dataset([tmp_path / "cut.arrow"])


@pytest.mark.parametrize("game", [MathGame, AdditionGame, CalculatorGame])
def test_a_game_that_compares_texts_refuses_a_gold_answer_that_is_no_text(game):
    for truth in (["4"], {"target": "4"}, None, b"4"):
        with pytest.raises(DataError, match="is neither a text nor a number"):
            game().reset(ground_truth=truth)
    played = game()
    played.reset(ground_truth=4)
    assert played.get_state()["ground_truth"] == "4"


CUT = {
    "an answer": {"prompt": "a", "answer": "\ud83d"},
    "a prompt": {"prompt": "cut \udcff here", "answer": "b"},
    "a message": {"prompt": [{"role": "user", "content": "\ud83d"}], "answer": "b"},
    "a part": {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "\ude00"}]}],
        "answer": "b",
    },
    "a key deep within": {"prompt": "a", "answer": "b", "extra_info": {"x": [{"\udfff": 1}]}},
    "two halves in the wrong order": {"prompt": "\ude00\ud83d", "answer": "b"},
}


@pytest.mark.parametrize("row", CUT.values(), ids=CUT)
def test_a_row_with_half_a_character_costs_itself_and_is_named_by_file_row_and_column(
    tmp_path, row
):
    whole = {"prompt": "whole \U0001f600", "answer": "b"}  # written as two escapes
    path = tmp_path / "cut.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in (row, whole)))
    data = Dataset([path])
    column = next(name for name in row if "\\u" in json.dumps(row[name]))
    with pytest.raises(DataError, match=r"row 0 of .*cut\.jsonl has half a character") as error:
        data.record(0)
    assert f"in the column '{column}'" in error.value.message
    error.value.message.encode()
    assert data.record(1).messages() == [{"role": "user", "content": "whole \U0001f600"}]


def test_a_row_that_nests_too_deep_costs_itself(tmp_path):
    path = tmp_path / "deep.jsonl"
    deep = "[" * 100_000 + "]" * 100_000
    path.write_text(f'{{"prompt": "a", "answer": "b"}}\n{{"prompt": {deep}, "answer": "b"}}\n')
    data = Dataset([path])
    assert data.record(0).ground_truth == "b"
    with pytest.raises(DataError, match=r"row 1 of .*deep\.jsonl is not valid JSON"):
        data.record(1)


def test_a_prompt_that_cannot_travel_names_its_row_and_the_place():
    prompt = [{"role": "user", "content": "go", "tool_calls": [{"arguments": {"n": 2**70}}]}]
    record = Record(prompt, "b", where="row 3 of x.jsonl")
    with pytest.raises(DataError, match=r"row 3 of x.jsonl: prompt\[0\]\['tool_calls'\]\[0\]"):
        record.messages()


@pytest.mark.parametrize("value", ["a text", 7, [1, 2], [[1, 2, 3]]])
@pytest.mark.parametrize("column", ["extra_info", "images"])
def test_a_row_of_another_form_is_told_by_its_file_and_number(tmp_path, column, value):
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "b", column: value}]
    data = Dataset([write_rows(tmp_path / "odd.jsonl", rows)])
    assert data.record(0).ground_truth == "b"
    with contextlib.suppress(DataError):  # which is none where the column can be read so
        assert data.record(1).where.startswith("row 1 of ")
        data.record(1).messages()


# -- Rows as people and programs write them: what is read, and how what is not is named ------------


PNG = b"\x89PNG\r\n\x1a\n..."
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
WHERE = "row 3 of data.jsonl"
LEAST = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize("parse", [parse_record, parse_task])
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, {}),
        ("", {}),
        ("  ", {}),
        ("null", {}),
        ("None", {}),
        (float("nan"), {}),
        ({}, {}),
        ("{}", {}),
        ({"index": 1}, {"index": 1}),
        ('{"index": 1, "split": "train"}', {"index": 1, "split": "train"}),
        (' {"a": {"b": [1, null]}} ', {"a": {"b": [1, None]}}),
        ([["index", 1], ["split", "train"]], {"index": 1, "split": "train"}),
        ([], {}),
        ({1: "a"}, {"1": "a"}),
        ({"a": np.float32(0.5), "b": np.array([1, 2])}, {"a": 0.5, "b": [1, 2]}),
        ({"a": np.array([{"b": np.array(["x"])}], dtype=object)}, {"a": [{"b": ["x"]}]}),
    ],
)
def test_extra_info_is_a_map_however_it_was_written(parse, value, found):
    assert parse({**LEAST, "extra_info": value}, WHERE).extra_info == found


@pytest.mark.parametrize("parse", [parse_record, parse_task])
@pytest.mark.parametrize(
    "value",
    ["hard", "[1, 2]", "{'index': 1}", '{"a": ', [1, 2], [{"a": 1}], 7, True, b"{}", ["ab", "cd"]],
)
def test_extra_info_that_is_no_map_is_named_by_row_and_column(parse, value):
    with pytest.raises(DataError, match=rf"^column extra_info of {WHERE} is "):
        parse({**LEAST, "extra_info": value}, WHERE)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, []),
        ([], []),
        ("", []),
        (float("nan"), []),
        (PNG, [PNG]),
        ({"bytes": PNG, "path": None}, [{"bytes": PNG, "path": None}]),
        (URL, [URL]),
        ({"url": URL}, [{"url": URL}]),
        ([PNG, {"bytes": PNG}], [PNG, {"bytes": PNG}]),
        (json.dumps([URL, {"url": URL}]), [URL, {"url": URL}]),
        (np.array([PNG], dtype=object), [PNG]),
        (({"bytes": PNG},), [{"bytes": PNG}]),
    ],
)
def test_images_are_a_list_or_a_single_one(value, found):
    assert parse_record({**LEAST, "images": value}, WHERE).images == found
    assert parse_task({"images": value}, WHERE).images == found


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("cat.png", 0),
        (["cat.png"], 0),
        ([PNG, "https://a/cat.png"], 1),
        ([PNG, None], 1),
        ({"bytes": None, "path": "cat.png"}, 0),
        ([PNG, {"path": "cat.png"}], 1),
        (7, 0),
        ([0], 0),
        ("data:image/png;base64,??", 0),
    ],
)
def test_an_image_without_bytes_is_named_by_its_place_and_row(value, number):
    words = rf"^image {number} in column images of {WHERE}: "
    with pytest.raises(DataError, match=words):
        parse_record({**LEAST, "images": value}, WHERE)


@pytest.mark.parametrize("image", [PNG, {"bytes": PNG, "path": "a.png"}, [{"bytes": PNG}]])
def test_one_image_as_a_struct_stands_in_its_place(tmp_path, image):
    row = {"prompt": "<image>What is it?", "answer": "a cat", "images": image}
    (message,) = Dataset([write_rows(tmp_path / "a.parquet", [row])]).record(0).messages()
    parts = message["content"]
    assert [part["type"] for part in parts] == ["image", "text"]
    asked = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a cat"}]
    chats = write_rows(tmp_path / "b.parquet", [{"messages": asked, "images": image}])
    (shown, _) = ChatData([chats]).row(0).messages
    assert shown["content"][0] == {"type": "image", "image": PNG}


@pytest.mark.parametrize(("tags", "num"), [(0, 1), (2, 1), (1, 2)])
def test_images_and_their_places_are_counted_and_the_row_is_named(tags, num):
    row = {"prompt": "<image>" * tags + "?", "answer": "2", "images": [PNG] * num}
    with pytest.raises(DataError, match=f"^{WHERE}: "):
        parse_record(row, WHERE).messages()


@pytest.mark.parametrize("tag", ["<image>?", [{"type": "image"}, {"type": "text", "text": "?"}]])
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"images": []}, f"column images of {WHERE} is empty"),
        ({"images": "[]"}, f"column images of {WHERE} is empty"),
        ({"image": PNG}, f"{WHERE} has a column image,"),
        ({"image": PNG, "images": []}, f"{WHERE} has a column image,"),
    ],
)
def test_images_that_are_missing_beside_a_place_are_told(tmp_path, tag, columns, words):
    asked = [{"role": "user", "content": tag}]
    for parse in (parse_record, parse_task):
        with pytest.raises(DataError, match=f"^{re.escape(words)}"):
            parse({"prompt": asked, "answer": "2", **columns}, WHERE)
    chats = [{"messages": [*asked, {"role": "assistant", "content": "a"}], "images": []}]
    with pytest.raises(DataError, match=r"column images of .*a\.jsonl is empty"):
        ChatData([write_rows(tmp_path / "a.jsonl", chats)]).row(0)


def test_a_tag_without_a_column_of_images_is_text_and_a_task_may_have_a_column_image():
    row = {"prompt": "<image>?", "answer": "2"}
    assert parse_record(row, WHERE).messages() == [{"role": "user", "content": "<image>?"}]
    assert parse_record({**row, "prompt": "?", "images": []}, WHERE).images == []
    assert parse_task({"image": "a.png"}, WHERE).columns == {"image": "a.png"}


@pytest.mark.parametrize(
    ("value", "found"),
    [("gsm8k", "gsm8k"), (None, ""), ("", ""), (float("nan"), ""), ("null", ""), (3, "3")],
)
def test_the_source_of_a_row_is_a_text_or_nothing(value, found):
    assert parse_record({**LEAST, "data_source": value}, WHERE).data_source == found


@pytest.mark.parametrize("value", [["a"], {"name": "a"}, b"a"])
def test_a_source_that_is_no_text_is_named(value):
    with pytest.raises(DataError, match=rf"^column data_source of {WHERE} is "):
        parse_record({**LEAST, "data_source": value}, WHERE)


@pytest.mark.parametrize(
    ("reward_model", "truth"),
    [
        ('{"style": "rule", "ground_truth": "4"}', "4"),
        ('{"ground_truth": ["a", "b"]}', ["a", "b"]),
        ({"ground_truth": np.int64(4)}, 4),
        ({"ground_truth": np.array(["a"])}, ["a"]),
        ({"ground_truth": {"target": 4}}, {"target": 4}),
    ],
)
def test_a_reward_model_may_stand_as_json(reward_model, truth):
    row = {"prompt": "?", "reward_model": reward_model}
    assert parse_record(row, WHERE).ground_truth == truth
    assert parse_task(row, WHERE).ground_truth == truth


@pytest.mark.parametrize("reward_model", ["4", "{'ground_truth': 4}", "{}", ["4"], 4, "rule"])
def test_a_reward_model_without_truth_is_named(reward_model):
    with pytest.raises(DataError, match=f"^{WHERE} has no gold answer: reward_model is "):
        parse_record({"prompt": "?", "reward_model": reward_model}, WHERE)


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("1+1=", [{"role": "user", "content": "1+1="}]),
        ("[1, 2, 3] is a list?", [{"role": "user", "content": "[1, 2, 3] is a list?"}]),
        ("[1, 2, 3]", [{"role": "user", "content": "[1, 2, 3]"}]),
        (np.array([{"role": "user", "content": "a"}], dtype=object), None),
        (({"role": "user", "content": "a"},), [{"role": "user", "content": "a"}]),
    ],
)
def test_a_prompt_is_a_text_or_messages(prompt, messages):
    wanted = messages or [{"role": "user", "content": "a"}]
    assert parse_record({"prompt": prompt, "answer": "2"}, WHERE).prompt == wanted


def test_rows_of_pandas_are_read_as_those_of_the_file(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>?"}],
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 1, "marks": [1, 2]},
            "images": [{"bytes": PNG, "path": None}],
            "data_source": "a",
        }
    ]
    path = write_rows(tmp_path / "a.parquet", rows)
    frame = {
        "prompt": np.array(rows[0]["prompt"], dtype=object),
        "reward_model": rows[0]["reward_model"],
        "extra_info": {"index": np.int64(1), "marks": np.array([1, 2])},
        "images": np.array(rows[0]["images"], dtype=object),
        "data_source": "a",
    }
    assert parse_record(frame, f"row 0 of {path}") == Dataset([path]).record(0)


def test_a_map_of_parquet_is_a_map(tmp_path):
    kind = pa.map_(pa.string(), pa.int64())
    table = pa.table(
        {
            "prompt": ["?"],
            "answer": ["2"],
            "extra_info": pa.array([[("a", 1), ("b", 2)]], type=kind),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert Dataset([tmp_path / "a.parquet"]).record(0).extra_info == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "line",
    ["[1]", '"text"', "7", "{", "{'a': 1}", "[" * 100_000, '{"prompt": "\\ud83d", "answer": "1"}'],
)
def test_a_line_that_is_no_row_is_named_with_its_file(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(LEAST)}\n{line}\n")
    with pytest.raises(DataError, match=r"^row 1 of .*a\.jsonl (is not|has half) "):
        Dataset([path]).record(1)


def test_a_damaged_parquet_file_is_no_full_disk(tmp_path):
    rows = [{"prompt": f"{number} " * 50, "answer": "2"} for number in range(2000)]
    path = write_rows(tmp_path / "a.parquet", rows)
    content = bytearray(path.read_bytes())
    content[100:400] = b"\xff" * 300
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet"):
        Dataset([path])


class _Strict(MathGame):
    def reset(self, *, ground_truth, **_):
        return str({"a": 1}[str(ground_truth)])


def test_a_row_that_a_game_cannot_start_with_is_named():
    row = parse_record({"prompt": "?", "reward_model": {"ground_truth": ["a"]}}, WHERE)
    for game, kind in ((MathGame, DataError), (_Strict, GameError)):
        with pytest.raises(kind, match=f"^{WHERE}: "):
            Episodes(game, {}).reset(Opening("e", 0, row))


# -- Conversations of parquet and JSONL files ------------------------------------------------------


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
            "message 0 of row 0 of .* is empty",
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


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Path]:
    """A folder of another user, whose files this process may not open."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()

    def may_read(real: Path) -> None:
        if real.is_relative_to(theirs):
            raise ConfigError(f"{real} is not yours")

    guard_datasets(may_read)
    yield theirs
    guard_datasets(lambda real: None)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_dataset_that_a_link_replaces_is_not_opened(
    tmp_path: Path, guarded: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, is_late: bool
) -> None:
    own, theirs = tmp_path / f"rows{suffix}", guarded / f"rows{suffix}"
    for file, text in ((own, "own"), (theirs, "secret")):
        rows = [{"prompt": text, "answer": text}]
        if suffix == ".jsonl":
            file.write_text("".join(json.dumps(row) for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), file)
    data = Dataset([own])
    assert data.record(0).ground_truth == "own"
    data.close()
    look = os.path.realpath

    def replaced(path: str | Path, **options: Any) -> str:
        real = look(path, **options)
        if str(path) == str(own) and not own.is_symlink():
            own.unlink()
            own.symlink_to(theirs)
        return real

    if is_late:
        monkeypatch.setattr(os.path, "realpath", replaced)
    else:
        replaced(own)
    with pytest.raises((ConfigError, DataError), match=r"is not yours|has become a link"):
        Dataset([own])
