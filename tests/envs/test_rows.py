"""Rows as people and programs write them: what is read, and how what is not is named."""

import base64
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tinkermq.envs.data import ChatData
from tinkermq.envs.dataset import Dataset, parse_record, parse_task
from tinkermq.envs.games.math import MathGame
from tinkermq.envs.running.episodes import Episodes, Opening
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.wire.errors import DataError, GameError

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
