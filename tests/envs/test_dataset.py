"""Datasets on disk: every row, every column convention, every error."""

import contextlib
import datetime
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tinkermq.envs.dataset import BATCH_ROWS, Dataset, Record, parse_record, unpack_parquet
from tinkermq.envs.games.addition import AdditionGame
from tinkermq.envs.games.calculator import CalculatorGame
from tinkermq.envs.games.math import MathGame
from tinkermq.envs.write_data import verl_row, write_rows
from tinkermq.schemas.wire.errors import DataError, StorageError


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
        unpack_parquet(path, tmp_path / folder / "rows", tmp_path / folder / "ends")
    assert "pyarrow" not in sys.modules
    for name in ("rows", "ends"):
        here, there = (tmp_path / folder / name for folder in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()


def test_the_process_that_unpacks_hands_its_error_on(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.parquet", [{"question": "1+1"}])
    monkeypatch.delitem(sys.modules, "pyarrow")
    assert "has no column prompt; its columns are question" in error_of(path)


def test_rows_that_cannot_be_unpacked_name_the_folder(tmp_path):
    path = write_rows(tmp_path / "a.parquet", rows(1))
    missing = tmp_path / "missing" / "rows"
    with pytest.raises(StorageError, match=r"a\.parquet cannot be unpacked to .*missing"):
        unpack_parquet(path, missing, missing)


def test_dates_in_a_row_become_texts(tmp_path):
    row = {"prompt": "when?", "answer": datetime.date(2026, 1, 2)}
    assert Dataset([write_rows(tmp_path / "d.parquet", [row])]).record(0).ground_truth == (
        "2026-01-02"
    )


def test_prompt_and_answer_are_enough(tmp_path):
    path = write_rows(tmp_path / "qa.jsonl", [{"prompt": "1+1=", "answer": 2}])
    record = Dataset([path]).record(0)
    assert record.prompt == [{"role": "user", "content": "1+1="}]
    assert (record.ground_truth, record.data_source) == (2, "")


def test_blank_lines_and_a_missing_last_newline_do_no_harm(tmp_path):
    path = tmp_path / "loose.jsonl"
    line = json.dumps({"prompt": "a", "answer": "b"})
    path.write_text(f"\n{line}\n\n{line}")
    data = Dataset([path])
    assert [data.record(n).ground_truth for n in range(len(data))] == ["b", "b"]


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


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "none.parquet"
    assert error_of(path) == f"there is no dataset file '{path}'"


def test_an_unknown_format_is_named(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("prompt,answer\n")
    assert error_of(path) == f"{path} is neither parquet nor JSONL"


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_missing_column_is_named_with_those_there_are(tmp_path, suffix):
    path = write_rows(tmp_path / f"c{suffix}", [{"question": "1+1", "answer": "2"}])
    message = error_of(path)
    assert "has no column prompt; its columns are question, answer" in message
    assert str(path) in message


def test_a_missing_gold_answer_is_named(tmp_path):
    path = write_rows(tmp_path / "c.parquet", [{"prompt": "1+1", "solution": "2"}])
    assert "has no column reward_model (with ground_truth) or answer" in error_of(path)


def test_an_empty_file_is_named(tmp_path):
    lines = tmp_path / "e.jsonl"
    lines.write_text("")
    table = tmp_path / "e.parquet"
    schema = pa.schema({"prompt": pa.string(), "answer": pa.string()})
    pq.write_table(pa.Table.from_pylist([], schema=schema), table)
    assert error_of(lines) == f"{lines} has no rows"
    assert error_of(table) == f"{table} has no rows"


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    path = tmp_path / "fake.parquet"
    path.write_bytes(b"not parquet at all")
    assert error_of(path).startswith(f"{path} is not a parquet file: ")


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


@pytest.mark.parametrize("content", [None, 3, {"text": "?"}])
def test_a_message_of_a_prompt_without_text_is_named_by_its_row(tmp_path, content):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "answer": "1"}))
    with pytest.raises(DataError, match=r"message 1 of the prompt of row 0 of .*a.jsonl has the"):
        Dataset([path]).record(0)


def test_a_broken_line_is_named_by_its_row(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"row 1 of .*broken\.jsonl is not valid JSON"):
        Dataset([path]).record(1)


@pytest.mark.parametrize("prompt", [None, "", [{"role": "user"}], 7])
def test_a_prompt_of_another_form_is_refused(tmp_path, prompt):
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": prompt, "answer": "b"}])
    assert f"the prompt of row 0 of {path} is {prompt!r}" in error_of(path)


def test_a_row_without_gold_answer_is_refused(tmp_path):
    path = write_rows(tmp_path / "g.jsonl", [{"prompt": "a", "reward_model": {"style": "rule"}}])
    assert f"row 0 of {path} has no gold answer" in error_of(path)


def test_a_row_beyond_the_end_is_refused(tmp_path):
    path = write_rows(tmp_path / "s.jsonl", rows(2))
    with pytest.raises(DataError, match=r"row 2 does not exist: .*s\.jsonl has 2 rows"):
        Dataset([path]).record(2)


def test_no_files_at_all_are_refused():
    with pytest.raises(DataError, match="a dataset has no files"):
        Dataset([])


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("truth", [None, "", "  ", "None", "NaN", "null", float("nan"), [], [None]])
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


@pytest.mark.parametrize("truth", [0, 0.0, False, "0", "none of these", ["None", "4"], {"a": 1}])
def test_a_gold_answer_may_look_empty_and_be_one(truth):
    row = {"prompt": "1?", "reward_model": {"ground_truth": truth}}
    assert parse_record(row, "row 0").ground_truth == truth


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
