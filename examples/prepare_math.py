r"""Make training data of published math sets: `python examples/prepare_math.py gsm8k FOLDER OUT`.

The rows have verl's columns.

- `gsm8k`: lines of `question` and `answer`, the answer behind `####` (train.jsonl, test.jsonl, or
  the parquet files of the hub).
- `math`: `problem`, `level`, `type` and `solution`, the answer in the solution's last `\boxed{}`;
  one JSON file for each problem below train/ and test/, as published, or parquet or JSONL.
- `geo3k`: geometry3k with `images`, `problem` (with `<image>` tags) and `answer`, in parquet; the
  bytes of the images are not changed.

A set is a folder in which the files of a split have its name in theirs, or lie in a folder of that
name.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tinkermq.envs.dataset import IMAGE_TAG, is_no_answer
from tinkermq.envs.math.grading import INSTRUCTION, boxed_answers
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.wire.errors import DataError

SPLITS = ("train", "validation", "test")
_GEO3K_INSTRUCTION = (
    "You first think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process is put within <think> </think>, the final answer within "
    r"\boxed{}."
)


@dataclass(frozen=True)
class PublishedSet:
    """A published set, and how its rows are read."""

    data_source: str
    """The `data_source` of each row."""
    columns: tuple[str, ...]
    """Required columns of the original rows."""
    question: Callable[[Mapping[str, Any]], str]
    """The question of a row."""
    answer: Callable[[Mapping[str, Any]], str | None]
    """The right answer of a row, or None."""
    instruction: str = INSTRUCTION
    """Text after each question."""
    extra: tuple[str, ...] = ()
    """Columns that go to `extra_info` unchanged."""


def _gsm8k_answer(row: Mapping[str, Any]) -> str | None:
    _, marked, answer = str(row["answer"]).rpartition("####")
    return answer.strip().replace(",", "") if marked else None


def _math_answer(row: Mapping[str, Any]) -> str | None:
    # one solution in the set writes \boxed 2 without braces
    boxed = boxed_answers(re.sub(r"\\boxed\s+([^\s{$.]+)", r"\\boxed{\1}", str(row["solution"])))
    return boxed[-1] if boxed else None


SOURCES = {
    "gsm8k": PublishedSet(
        "openai/gsm8k", ("question", "answer"), lambda row: str(row["question"]), _gsm8k_answer
    ),
    "math": PublishedSet(
        "DigitalLearningGmbH/MATH-lighteval",
        ("problem", "solution"),
        lambda row: str(row["problem"]),
        _math_answer,
        extra=("level", "type"),
    ),
    "geo3k": PublishedSet(
        "hiyouga/geometry3k",
        ("images", "problem", "answer"),
        lambda row: str(row["problem"]),
        lambda row: str(row["answer"]).strip(),
        instruction=_GEO3K_INSTRUCTION,
    ),
}


def prepare(name: str, source: Path, out: Path, instruction: str | None = None) -> dict[Path, int]:
    """Write `train.parquet`, `test.parquet` … of a set to `out`; return the rows of each file.

    `instruction` replaces the text after each question. Raises DataError for an unknown set, a
    folder without its files, and a row without its columns or its answer.
    """
    preparation = SOURCES.get(name)
    if preparation is None:
        raise DataError(
            f"there is no published set {name!r}", hint=f"there is {', '.join(SOURCES)}"
        )
    if not source.is_dir():
        raise DataError(f"{source} is not a folder", hint="give the folder of the original files")
    splits = {split: files for split in SPLITS if (files := _files(source, split))}
    if not splits:
        raise DataError(
            f"{source} has no file of a split: train, validation or test",
            hint="the names of files (.jsonl, .parquet, .json) or of their folders say the split",
        )
    written: dict[Path, int] = {}
    for split, files in splits.items():
        rows = list(
            _rows(
                preparation,
                split,
                files,
                preparation.instruction if instruction is None else instruction,
            )
        )
        written[write_rows(out / f"{split}.parquet", rows)] = len(rows)
    return written


def _files(source: Path, split: str) -> list[Path]:
    """Return the files of a split, by their folder's name or their own."""

    def says(path: Path) -> bool:
        parts = path.relative_to(source).parts
        return any(re.match(rf"{split}(?![a-z])", part) for part in parts)

    files = [path for path in source.rglob("*") if path.suffix in _READERS and path.is_file()]
    return sorted((path for path in files if says(path)), key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts 2.json before 10.json."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", str(path))]


def _rows(
    source: PublishedSet, split: str, files: list[Path], instruction: str
) -> Iterator[dict[str, Any]]:
    index = 0
    for file in files:
        for row in _READERS[file.suffix](file):
            where = f"row {index} of split {split}, in {file}"
            missing = [name for name in source.columns if row.get(name) is None]
            if missing:
                raise DataError(
                    f"{where} has no {' and no '.join(missing)}; it has {', '.join(row)}",
                    hint="is this the set that was named?",
                )
            yield _row(source, row, split, index, instruction, where)
            index += 1


def _row(
    source: PublishedSet,
    row: Mapping[str, Any],
    split: str,
    index: int,
    instruction: str,
    where: str,
) -> dict[str, Any]:
    answer = source.answer(row)
    if is_no_answer(answer):
        raise DataError(f"{where} has no answer", hint="correct the row, or remove it")
    question = source.question(row)
    prompt = f"{question} {instruction}".strip()
    made = {
        "data_source": source.data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            **{name: row[name] for name in source.extra if name in row},
        },
    }
    if "images" in source.columns:
        made["images"] = [_image(image, where) for image in row["images"]]
        if prompt.count(IMAGE_TAG) != len(made["images"]):
            raise DataError(
                f"{where} has {len(made['images'])} images and {prompt.count(IMAGE_TAG)} "
                f"{IMAGE_TAG} tags",
                hint="each image needs one tag in the problem",
            )
    return made


def _image(image: Any, where: str) -> dict[str, Any]:
    """Return an image as the hub stores it: encoded bytes, possibly with a name."""
    content: Any = cast("dict[str, Any]", image).get("bytes") if isinstance(image, dict) else image
    if not isinstance(content, bytes):
        raise DataError(f"{where} has an image without bytes", hint="store images with their bytes")
    return {"bytes": content, "path": None}


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield _object(line, file)


def _json(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the one row of a file, or all rows of one that holds a list."""
    text = file.read_text(encoding="utf-8")
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    yield from cast("list[dict[str, Any]]", value if isinstance(value, list) else [value])


def _object(line: str, file: Path) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"a line of {file} is not valid JSON: {error}") from error


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as packed:
            batches = packed.iter_batches(256)  # pyright: ignore[reportUnknownMemberType] - stubs
            for batch in batches:
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file} is not a parquet file: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
}


def main() -> None:
    """Convert the set that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("source", type=Path, help="folder of the original files")
    parser.add_argument("out", type=Path, help="folder to write train.parquet, test.parquet … to")
    parser.add_argument("--instruction", help="text after each question; default: the usual one")
    for path, rows in prepare(**vars(parser.parse_args())).items():
        print(f"{path}  {rows} rows")


if __name__ == "__main__":
    main()
