"""Published sets, from their original files to rows of verl's columns."""

import json
import runpy

import pyarrow
import pyarrow.parquet
import pytest
from tinkermq.envs.dataset import Dataset
from tinkermq.schemas.wire.errors import DataError

from tests.support.configs import REPOSITORY

prepare = runpy.run_path(str(REPOSITORY / "examples/prepare_math.py"))["prepare"]
PNG = b"\x89PNG\r\n\x1a\n not really"


def gsm8k(folder):
    row = {"question": "Six and six?", "answer": "6+6=<<6+6=12>>12\n#### 1,012"}
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)


def math(folder):
    for split, numbers in (("train", (2, 10)), ("test", (1,))):
        for number in numbers:
            file = folder / "MATH" / split / "algebra" / f"{number}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            solution = rf"First \boxed{{0}}, then $\boxed{{\frac{{{number}}}{{3}}}}$."
            row = {"problem": f"P{number}", "level": "Level 1", "type": "Algebra"}
            file.write_text(json.dumps({**row, "solution": solution}))


def geo3k(folder):
    row = {
        "images": [{"bytes": PNG, "path": None}],
        "problem": "<image>Find x.",
        "answer": "3",
    }
    table = pyarrow.Table.from_pylist([row])
    for split in ("train", "validation", "test"):
        (folder / "data").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")


@pytest.mark.parametrize(
    ("make", "splits", "prompt", "truths", "source"),
    [
        (gsm8k, {"train": 2, "test": 2}, "Six and six? Let's", ["1012", "1012"], "openai/gsm8k"),
        (
            math,
            {"train": 2, "test": 1},
            "P2 Let's think",
            [r"\frac{2}{3}", r"\frac{10}{3}"],
            "DigitalLearningGmbH/MATH-lighteval",
        ),
        (
            geo3k,
            {"train": 1, "validation": 1, "test": 1},
            "<image>Find x. You first",
            ["3"],
            "hiyouga/geometry3k",
        ),
    ],
)
def test_a_published_set_becomes_rows(tmp_path, make, splits, prompt, truths, source):
    make(tmp_path)
    written = prepare(make.__name__, tmp_path, tmp_path / "out")
    assert written == {tmp_path / "out" / f"{split}.parquet": n for split, n in splits.items()}
    data = Dataset([tmp_path / "out" / "train.parquet"])
    records = [data.record(number) for number in range(len(data))]
    assert [record.ground_truth for record in records] == truths
    assert records[0].prompt[0]["content"].startswith(prompt)
    assert records[0].data_source == source
    assert records[0].extra_info["split"] == "train"
    if make is geo3k:
        image, text = records[0].messages()[0]["content"]
        assert image == {"type": "image", "image": {"bytes": PNG, "path": None}}
        assert text["text"].startswith("Find x.")
    if make is math:
        assert records[0].extra_info["level"] == "Level 1"


def test_the_words_behind_the_question_can_be_chosen(tmp_path):
    gsm8k(tmp_path)
    prepare("gsm8k", tmp_path, tmp_path / "out", instruction="")
    record = Dataset([tmp_path / "out" / "test.parquet"]).record(0)
    assert record.prompt == [{"role": "user", "content": "Six and six?"}]


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("gsm9k", "{}", "there is no published set 'gsm9k'"),
        ("gsm8k", '{"question": "q"}', "row 0 of split train.* has no answer"),
        ("gsm8k", '{"question": "q", "answer": "1"}', "row 0 .* has no answer"),
        ("math", '{"problem": "q", "solution": "1"}', "row 0 .* has no answer"),
        ("gsm8k", "{", "is not valid JSON"),
        ("geo3k", '{"images": ["x"], "problem": "<image>", "answer": "1"}', "without bytes"),
        ("geo3k", '{"images": [], "problem": "<image>", "answer": "1"}', "0 images and 1 <image>"),
    ],
)
def test_what_is_missing_is_named(tmp_path, name, line, words):
    (tmp_path / "train.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=words):
        prepare(name, tmp_path, tmp_path / "out")


def test_a_folder_without_splits_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no file of a split"):
        prepare("gsm8k", tmp_path, tmp_path / "out")
