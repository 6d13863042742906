"""Datasets on disk: any row of parquet, Arrow and JSONL files, without holding them in memory.

A file stays open with an index of its rows, and each row is read and decoded when it is needed: a
JSONL file directly, any other after it was unpacked to a temporary file. A folder that Hugging
Face's `save_to_disk` wrote stands for its Arrow files. Files are not mapped
into memory, because a truncated file would then kill the process.
"""

import bisect
import contextlib
import itertools
import json
import math
import os
import random
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs] - it has none

from ..schemas.chat_messages import Origin, are_messages, plain, read_conversation, shorten
from ..schemas.config.agent import TaskSource
from ..schemas.local.folder import hold, temporary_folder
from ..schemas.wire import errors
from ..schemas.wire.codec import read_json
from ..schemas.wire.foreign import blaming, plain_value, words_of
from ..schemas.wire.images import encoded_image
from .game import ChatMessage
from .task_folders import HarborTask, TaskFolders
from .unpack import unpack

# One row of a dataset, in verl's columns or as `prompt` and `answer`.

TRUTH_COLUMNS = ("reward_model", "answer", "ground_truth")
"""Columns that may hold the gold answer."""
IMAGE_TAG = "<image>"
_NOTHING = frozenset({"", "none", "null", "nan", "<na>"})
"""Texts that programs use for a missing value; in a gold answer they are what they say."""
_INDICES = "indices.arrow"
_INT64 = range(-(2**63), 2**64)
_SURE = 2**53
"""Up to here a float of a whole number is that number."""


class RowError(errors.DataError):
    """A row cannot be used; the message names it."""


@dataclass(frozen=True)
class Record:
    """A prompt and the data that judge its answer."""

    prompt: list[ChatMessage]
    """Chat messages, as chat templates take them; empty if the game writes its own prompt."""
    ground_truth: Any
    """The gold answer."""
    data_source: str = ""
    """Origin of the row; empty: the game's own name."""
    extra_info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further data of the row."""
    images: list[Any] = field(default_factory=list[Any])
    """Encoded images, in the order of the `<image>` tags of the prompt."""
    where: str = ""
    """File and row."""
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other columns of a program's task; all columns for a game that takes rows."""
    task: HarborTask | None = None
    """The Harbor task that is the row."""

    def messages(self) -> list[ChatMessage]:
        """Return a fresh copy of the prompt with its images in place of the `<image>` tags.

        Raises DataError that names the row if the numbers of images and tags differ, or if the
        prompt cannot travel.
        """
        try:
            return plain_value(place_images(self.prompt, self.images), "prompt")
        except (errors.DataError, errors.MessageError) as error:
            raise RowError(f"{self.where or 'a row'}: {error.message}", hint=error.hint) from error


def check_columns(columns: Iterable[str], where: str) -> None:
    """Raise DataError unless the columns hold a prompt and a gold answer."""
    present = list(columns)
    truth = " or ".join(("reward_model (with ground_truth)", *TRUTH_COLUMNS[1:]))
    for column, is_present in (
        ("prompt", "prompt" in present),
        (truth, any(name in present for name in TRUTH_COLUMNS)),
    ):
        if not is_present:
            raise errors.DataError(
                f"{where} has no column {column}; its columns are {', '.join(present) or 'none'}",
                hint="name the columns as verl does (prompt, reward_model.ground_truth, "
                "data_source, extra_info), or prompt and answer",
            )


def parse_record(row: Mapping[str, Any], where: str) -> Record:
    """Read a row; a DataError names `where`, and the column."""
    row = _plain_values(row)
    check_columns(row, where)
    prompt = _parse_prompt(row["prompt"], where)
    return Record(
        prompt=prompt,
        ground_truth=_ground_truth(row, where),
        data_source=_source(row, where),
        extra_info=read_map(row.get("extra_info"), "extra_info", where),
        images=read_images(row, prompt, where),
        where=where,
    )


def any_columns(columns: Iterable[str], where: str) -> None:
    """Accept any columns: the row is a program's task."""


def parse_task(row: Mapping[str, Any], where: str) -> Record:
    """Read a row that is a program's task; no column is required."""
    row = _plain_values(row)
    known = {"prompt", "data_source", "extra_info", "images", *TRUTH_COLUMNS}
    prompt = [] if row.get("prompt") is None else _parse_prompt(row["prompt"], where)
    return Record(
        prompt=prompt,
        ground_truth=_truth_if_any(row),
        data_source=_source(row, where),
        extra_info=read_map(row.get("extra_info"), "extra_info", where),
        images=read_images(row, prompt, where, passes_columns=True),
        where=where,
        columns={name: value for name, value in row.items() if name not in known},
    )


def parse_row(row: Mapping[str, Any], where: str) -> Record:
    """Read a row for a game that takes all columns by name; none is required."""
    return replace(parse_task(row, where), columns=_plain_values(row))


def read_map(value: Any, column: str, where: str) -> dict[str, Any]:
    """Return the map in a column, given as a map, as JSON text, or as a list of its entries.

    None and texts for a missing value mean an empty map. Raises DataError for anything else.
    """
    parsed = _from_json(value, "{")
    if isinstance(parsed, Mapping):
        return {str(key): item for key, item in cast("Mapping[Any, Any]", parsed).items()}
    if _is_absent(parsed):
        return {}
    entries = cast("list[Any]", parsed) if isinstance(parsed, list) else []
    if all(isinstance(entry, list) and len(cast("list[Any]", entry)) == 2 for entry in entries):
        if entries:  # parquet's map type
            return {str(key): item for key, item in entries}
        if isinstance(parsed, list):
            return {}
    raise errors.DataError(
        f"column {column} of {where} is {shorten(value)}",
        hint="write a map there, or one as JSON text",
    )


def read_images(
    row: Mapping[str, Any],
    messages: Sequence[ChatMessage],
    where: str,
    *,
    passes_columns: bool = False,
) -> list[Any]:
    """Return the images of a row's column `images`: a list of them, or a single one.

    An image is the bytes of a file, a map that holds them under `bytes`, or a data URL; a list may
    stand as JSON text. Raises DataError for anything else, naming its place; for an empty list, if
    `messages` have places for images; and for a column `image` in place of `images`, unless the
    row's game reads it (`passes_columns`).
    """
    parsed = _from_json(row.get("images"), "[{")
    if _is_absent(parsed) or parsed == []:
        is_misnamed, has_place = not _is_absent(row.get("image")), _has_place(messages)
        if is_misnamed and (has_place or not passes_columns):
            raise errors.DataError(
                f"{where} has a column image, and no image in column images",
                hint=f"name the column images, with one image per {IMAGE_TAG} tag of the prompt",
            )
        if parsed == [] and has_place:
            raise errors.DataError(
                f"column images of {where} is empty, and its prompt has a place for an image",
                hint=f"give one image per {IMAGE_TAG} tag; null, if the tag is plain text",
            )
        return []
    images = cast("list[Any]", parsed) if isinstance(parsed, list) else [parsed]
    for number, image in enumerate(images):
        try:
            encoded_image({"image": image})
        except errors.DataError as error:
            raise errors.DataError(
                f"image {number} in column images of {where}: {error.message}", hint=error.hint
            ) from error
    return images


def _source(row: Mapping[str, Any], where: str) -> str:
    value = row.get("data_source")
    if _is_absent(value):
        return ""
    if not isinstance(value, str | int | float):
        raise errors.DataError(
            f"column data_source of {where} is {shorten(value)}",
            hint="name there where the row comes from, as a text",
        )
    return str(value)


def _is_absent(value: Any) -> bool:
    """Return whether an optional column is empty: null, NaN, or a text for a missing value."""
    if isinstance(value, str):
        return value.strip().lower() in _NOTHING
    return not isinstance(value, list | Mapping | bytes) and is_no_answer(value)


def _from_json(value: Any, openings: str) -> Any:
    """Return the JSON value of a text that begins like one; anything else unchanged."""
    if not isinstance(value, str) or not value.strip().startswith(tuple(openings)):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


def _plain_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with Python's lists and numbers in place of NumPy's (from pandas).

    Integers of more than 64 bits, which messages cannot hold, become texts.
    """
    return {name: _without_large(plain(value)) for name, value in row.items()}


def _without_large(value: Any) -> Any:
    if isinstance(value, int):
        return value if value in _INT64 else str(value)
    if isinstance(value, list):
        return [_without_large(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _without_large(each) for key, each in cast("dict[Any, Any]", value).items()}
    return value


def _whole(answer: Any) -> Any:
    """Return a gold answer; a whole number as an integer.

    pandas and parquet write integers as floats where a row of the column has none.
    """
    if isinstance(answer, float) and answer.is_integer() and abs(answer) <= _SURE:
        return int(answer)
    return answer


def _truth_if_any(row: Mapping[str, Any]) -> Any:
    """Return the gold answer of a row, or None."""
    reward_model = _from_json(row.get("reward_model"), "{")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return _whole(cast("Any", reward_model["ground_truth"]))
    answers = (row[name] for name in TRUTH_COLUMNS[1:] if row.get(name) is not None)
    return _whole(next(answers, None))


def _parse_prompt(value: Any, where: str) -> list[ChatMessage]:
    """Read a prompt: a text that the user says, or chat messages, which may stand as JSON text."""
    if isinstance(value, str) and value and not are_messages(value):
        return [{"role": "user", "content": value}]
    if value == []:
        return []
    if not are_messages(value):
        raise errors.DataError(
            f"the prompt of {where} is {shorten(value)}",
            hint="a prompt is a text, or a list of chat messages with role and content; an empty "
            "list where the game words it",
        )
    return read_conversation(value, Origin("prompt", where))


def answer_text(ground_truth: Any) -> str:
    """Return a gold answer as text, for a game that compares texts; numbers without an exponent.

    Raises DataError if it is neither a text nor a number, since the text of any other value depends
    on the program that wrote it.
    """
    if is_no_answer(ground_truth) or not isinstance(ground_truth, str | int | float):
        raise errors.DataError(
            f"the gold answer {shorten(ground_truth)} is neither a text nor a number",
            hint="write it into the data as the policy shall say it",
        )
    if isinstance(ground_truth, float) and math.isfinite(ground_truth):
        number = Decimal(repr(ground_truth))
        return f"{number.to_integral_value() if ground_truth.is_integer() else number:f}"
    return str(ground_truth)


def is_no_answer(value: Any) -> bool:
    """Return whether a value means a missing answer: null, NaN, or a blank text.

    A list without any answer counts as missing.
    """
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list | tuple):
        return all(is_no_answer(each) for each in cast("Sequence[Any]", value))
    if isinstance(value, Mapping):
        return all(is_no_answer(each) for each in cast("Mapping[Any, Any]", value).values())
    return value is None


def _ground_truth(row: Mapping[str, Any], where: str) -> Any:
    reward_model = _from_json(row.get("reward_model"), "{")
    answers = {name: row[name] for name in TRUTH_COLUMNS[1:] if row.get(name) is not None}
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        answers = {"reward_model.ground_truth": cast("Any", reward_model["ground_truth"])}
    for name, value in answers.items():
        if is_no_answer(value):
            raise errors.DataError(
                f"{where} has no gold answer: {name} is {shorten(value)}",
                hint="fill it, or leave the row out of the data",
            )
        return _whole(value)
    raise errors.DataError(
        f"{where} has no gold answer: reward_model is {shorten(reward_model)}",
        hint="fill reward_model.ground_truth, or the column answer",
    )


def _has_place(messages: Sequence[ChatMessage]) -> bool:
    """Return whether messages have a place for an image."""
    try:
        for message in messages:
            _with_images(message, iter(()))
    except errors.DataError:
        return True
    return False


def place_images(messages: Sequence[ChatMessage], images: Sequence[Any]) -> list[ChatMessage]:
    """Return copies of a row's messages with its images inserted.

    A place is an `<image>` tag of a text, or an empty part `{"type": "image"}`. Without images a
    tag is plain text. Raises DataError unless the numbers of images and places are equal.
    """
    if not images:
        return [dict(message) for message in messages]
    rest = iter(images)
    placed = [_with_images(message, rest) for message in messages]
    if (left := len(list(rest))) > 0:
        raise errors.DataError(
            f"a row has {len(images)} images, its prompt names {len(images) - left}",
            hint=f"write one {IMAGE_TAG} tag into the prompt for each image",
        )
    return placed


def _with_images(message: ChatMessage, images: Iterator[Any]) -> ChatMessage:
    content = message.get("content")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        return {**message, "content": [_filled(part, images) for part in parts]}
    if not isinstance(content, str) or IMAGE_TAG not in content:
        return dict(message)
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(IMAGE_TAG)):
        if number:
            parts.append({"type": "image", "image": _next_image(images, content)})
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _filled(part: Any, images: Iterator[Any]) -> Any:
    if not isinstance(part, Mapping):
        return part
    fields = cast("Mapping[str, Any]", part)
    if fields.get("type") != "image" or fields.get("image") is not None:
        return fields
    return {**fields, "image": _next_image(images, repr(fields))}


def _next_image(images: Iterator[Any], content: str) -> Any:
    image = next(images, None)
    if image is None:
        raise errors.DataError(
            f"a prompt has more {IMAGE_TAG} tags than its row has images: {shorten(content)}",
            hint="give one image per tag in the column images",
        )
    return image


_unpackb = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


class Dataset:
    """The rows of one or more files, in the files' order or in that of a seed."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        check: Callable[[Iterable[str], str], None] = check_columns,
        parse: Callable[[Mapping[str, Any], str], Record] = parse_record,
    ) -> None:
        """Open the files; DataError names an unusable file and the reason.

        `check` raises DataError for wrong columns, `parse` reads a row.
        """
        if not paths:
            raise errors.DataError("a dataset has no files", hint="set env.train_data")
        named = [Path(path).expanduser() for path in paths]
        self.paths = [file for path in named for file in _files_of(path)]
        with contextlib.ExitStack() as opened:
            self._files = [_open_file(path, opened, check) for path in self.paths]
            self._closing = opened.pop_all()
        self._ends = list(itertools.accumulate(len(file) for file in self._files))
        self._order: list[int] | None = None
        self._parse = parse

    def shuffled(self, seed: int, limit: int) -> "Dataset":
        """Keep the first `limit` rows after a shuffle that depends on the seed only."""
        total = len(self)
        shuffler = random.Random(seed)  # noqa: S311 - a data order, not a secret
        self._order = shuffler.sample(range(total), min(limit, total))
        return self

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._ends[-1] if self._order is None else len(self._order)

    def record(self, number: int) -> Record:
        """Decode row `number`; DataError for one that does not exist or cannot be read."""
        index, local = self._place(number)
        row, where = self.row(number)
        with blaming(lambda error: _unreadable(error, where)):
            record = self._parse(row, where)
        file = self._files[index]
        is_task = isinstance(file, TaskFolders)
        return replace(record, task=file.tasks[local]) if is_task else record

    def row(self, number: int) -> tuple[Mapping[str, Any], str]:
        """Return row `number` undecoded, and its place."""
        index, local = self._place(number)
        return self._files[index].row(local), f"row {local} of {self.paths[index]}"

    def _place(self, number: int) -> tuple[int, int]:
        """Return the file of a row, and its number there."""
        if not 0 <= number < len(self):
            raise errors.DataError(
                f"row {number} does not exist: {self._names()} has {len(self)} rows",
                hint="all hosts of a run must read the same files",
            )
        number = number if self._order is None else self._order[number]
        index = bisect.bisect_right(self._ends, number)
        return index, number - (self._ends[index - 1] if index else 0)

    def close(self) -> None:
        """Close the files."""
        self._closing.close()

    def _names(self) -> str:
        return ", ".join(str(path) for path in self.paths)


def _unreadable(error: BaseException, where: str) -> errors.TinkermqError:
    """Return the error of a row of unexpected form."""
    if isinstance(error, errors.TinkermqError):
        return error
    return errors.DataError(
        f"{where} cannot be read: {words_of(error)}",
        hint="see how its columns look beside those of other rows",
    )


def is_dataset_name(path: Path) -> bool:
    """Return whether a file of this name can be a dataset."""
    return path.suffix in _READERS


def saved_files(path: Path) -> list[Path]:
    """Return the Arrow files of a folder that `save_to_disk` of Hugging Face's datasets wrote.

    One whose rows have another order than its files, as old versions wrote it, has none.
    """
    if (path / _INDICES).exists():
        return []
    return sorted(path.glob("data-*-of-*.arrow")) or [*path.glob("dataset.arrow")]


def _files_of(path: Path) -> list[Path]:
    """Return a data file itself, or the files of a saved folder; DataError for another folder."""
    if TaskSource.parse(str(path)) is not None or not path.is_dir():
        return [path]
    files = saved_files(path)
    if files:
        return files
    if (path / _INDICES).exists():
        raise errors.DataError(
            f"the rows of {path} stand in another order than in its files",
            hint="call flatten_indices() before save_to_disk",
        )
    splits = sorted(inner.name for inner in path.iterdir() if saved_files(inner))
    if splits:
        raise errors.DataError(
            f"{path} holds several datasets: {', '.join(splits)}",
            hint=f"name one of them: {path / splits[0]}",
        )
    raise errors.DataError(
        f"the folder {path} holds no dataset",
        hint="name a parquet or JSONL file, or a folder that save_to_disk of Hugging Face's "
        "datasets wrote",
    )


def _open_file(
    path: Path, opened: contextlib.ExitStack, check: Callable[[Iterable[str], str], None]
) -> "_JsonLines | _Unpacked | TaskFolders":
    if (source := TaskSource.parse(str(path))) is not None:
        return TaskFolders(source)
    if not path.is_file():
        raise errors.DataError(
            f"there is no dataset file {str(path)!r}",
            hint="give a path that the environment host can read",
        )
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise errors.DataError(
            f"{path} is neither parquet, Arrow nor JSONL",
            hint="name the file .parquet, .arrow, .jsonl or .ndjson",
        )
    file = reader(path)
    opened.callback(file.close)
    if not len(file):
        raise errors.DataError(f"{path} has no rows", hint="write at least one row into it")
    check(file.columns(), f"row 0 of {path}")
    return file


_guards: list[Callable[[Path], None]] = []


def guard_datasets(may_read: Callable[[Path], None]) -> None:
    """Let this process follow links to a dataset only if `may_read` accepts the real path.

    It raises ConfigError for others. Files are opened once: links that take their place later are
    not followed.
    """
    _guards[:] = [may_read]


def _open(path: Path) -> int:
    """Open a dataset to read; raises DataError, ConfigError."""
    try:
        file, real = hold(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise errors.DataError(
            f"{path} cannot be opened: {error.strerror}", hint="see its rights and its folder"
        ) from error
    try:
        named = os.path.abspath(path)  # noqa: PTH100 Path.absolute leaves `..` in it
        for may_read in _guards:
            if str(real) != named:
                may_read(real)
    except BaseException:
        os.close(file)
        raise
    return file


class _StoredRows:
    """Rows stored one after the other in a file that stays open."""

    def __init__(self, path: Path, file: int) -> None:
        self._path = path
        self._ends = array("Q")
        self._file = file
        self._closed = weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._ends)

    def _bytes(self, number: int) -> bytes:
        assert self._closed.alive
        start, end = self._ends[number - 1] if number else 0, self._ends[number]
        raw = os.pread(self._file, end - start, start)
        if len(raw) < end - start:
            raise errors.DataError(
                f"row {number} of {self._path} is gone: the file was cut after it had been opened",
                hint="begin the run again; write data of a run that goes on to a file of another "
                "name",
            )
        return raw

    def close(self) -> None:
        self._closed()


class _JsonLines(_StoredRows):
    """The lines of a JSONL file; a blank line belongs to the next line."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _open(path))
        end = 0
        with open(self._file, "rb", closefd=False) as lines:
            for line in lines:
                end += len(line)
                if not line.isspace():
                    self._ends.append(end)

    def row(self, number: int) -> Mapping[str, Any]:
        raw = self._bytes(number)
        decoded = self._decode(number, raw)
        if b"\\ud" in raw or b"\\uD" in raw:  # the only source of half a character
            for column, value in decoded.items():
                self._check_text(number, column, value)
        return decoded

    def columns(self) -> list[str]:
        return list(self._decode(0, self._bytes(0)))

    def _decode(self, number: int, raw: bytes) -> Mapping[str, Any]:
        try:
            value = json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise errors.DataError(
                f"row {number} of {self._path} is not valid JSON: {error}"
            ) from error
        if not isinstance(value, dict):
            raise errors.DataError(
                f"row {number} of {self._path} is not a JSON object",
                hint="write one object on each line",
            )
        return cast("dict[str, Any]", value)

    def _check_text(self, number: int, column: str, value: Any) -> None:
        try:
            json.dumps([column, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise errors.DataError(
                f"row {number} of {self._path} has half a character (a lone surrogate, "
                f"{str(error.object)[error.start]!a}) in the column {column!a}",
                hint="an emoji is one character, or two escapes (\\ud83d\\ude00): a text was cut "
                "between the two; correct the text, or leave the row out",
            ) from error


class _Unpacked(_StoredRows):
    """The rows of a parquet or Arrow file, unpacked to a temporary file while it is open."""

    def __init__(self, path: Path) -> None:
        with temporary_folder("data") as folder:
            rows, ends = folder / "rows", folder / "ends"
            packed = _open(path)
            try:
                unpack(path, rows, ends, Path(f"/proc/{os.getpid()}/fd/{packed}"))
            finally:
                os.close(packed)
            super().__init__(path, os.open(rows, os.O_RDONLY | os.O_CLOEXEC))
            self._ends.frombytes(ends.read_bytes())

    def row(self, number: int) -> Mapping[str, Any]:
        return _unpackb(self._bytes(number), raw=False, strict_map_key=False)

    def columns(self) -> list[str]:
        return list(self.row(0))


_READERS = {".parquet": _Unpacked, ".arrow": _Unpacked, ".jsonl": _JsonLines, ".ndjson": _JsonLines}
