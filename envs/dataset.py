"""Datasets on disk: parquet and JSONL, any row at once, without holding them in memory.

A file is mapped into memory with an index of where its rows end, and rows are decoded one by one
when asked for: a JSONL file as it is, a parquet file after it has been unpacked to a temporary
one.
"""

import bisect
import contextlib
import itertools
import json
import mmap
import random
import tempfile
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs] - it has none

from ..schemas.wire.errors import DataError, TinkermqError
from ..schemas.wire.foreign import blaming, words_of
from .data.unpack import unpack_parquet
from .record import Record, check_columns, parse_record

_unpackb = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


class RowFile(Protocol):
    """Rows of one file, by their number."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def row(self, number: int) -> Mapping[str, Any]:
        """Decode one row; DataError with file, row and column for one that cannot be read."""
        ...

    def columns(self) -> list[str]:
        """Return the names of the first row's columns, whatever they hold."""
        ...

    def close(self) -> None:
        """Give the file back."""
        ...


class Dataset:
    """The rows of one or more files, in the files' order or in that of a seed."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        check: Callable[[Iterable[str], str], None] = check_columns,
        parse: Callable[[Mapping[str, Any], str], Record] = parse_record,
    ) -> None:
        """Open the files; DataError names the one that cannot be used, and why.

        `check` raises DataError for columns that are not the wanted ones, `parse` reads a row.
        """
        if not paths:
            raise DataError("a dataset has no files", hint="set env.train_data")
        self.paths = [Path(path).expanduser() for path in paths]
        with contextlib.ExitStack() as opened:
            self._files = [_open_file(path, opened, check) for path in self.paths]
            self._closing = opened.pop_all()
        self._ends = list(itertools.accumulate(len(file) for file in self._files))
        self._order: list[int] | None = None
        self._parse = parse

    def shuffled(self, seed: int, limit: int) -> "Dataset":
        """Keep the first `limit` rows after a shuffle that the seed alone decides."""
        total = len(self)
        shuffler = random.Random(seed)  # noqa: S311 - a data order, not a secret
        self._order = shuffler.sample(range(total), min(limit, total))
        return self

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._ends[-1] if self._order is None else len(self._order)

    def record(self, number: int) -> Record:
        """Decode row `number`; DataError for one that does not exist or cannot be read."""
        row, where = self.row(number)
        with blaming(lambda error: _unreadable(error, where)):
            return self._parse(row, where)

    def row(self, number: int) -> tuple[Mapping[str, Any], str]:
        """Return row `number` as it stands in its file, and where that is."""
        if not 0 <= number < len(self):
            raise DataError(
                f"row {number} does not exist: {self._names()} has {len(self)} rows",
                hint="all hosts of a job must read the same files",
            )
        number = number if self._order is None else self._order[number]
        index = bisect.bisect_right(self._ends, number)
        local = number - (self._ends[index - 1] if index else 0)
        return self._files[index].row(local), f"row {local} of {self.paths[index]}"

    def close(self) -> None:
        """Give the files back."""
        self._closing.close()

    def _names(self) -> str:
        return ", ".join(str(path) for path in self.paths)


def _unreadable(error: BaseException, where: str) -> TinkermqError:
    """Return what is raised of a row whose form was not foreseen."""
    if isinstance(error, TinkermqError):
        return error
    return DataError(
        f"{where} cannot be read: {words_of(error)}",
        hint="see how its columns look beside those of other rows",
    )


def is_dataset_name(path: Path) -> bool:
    """Whether a file of this name can be a dataset at all."""
    return path.suffix in _READERS


def _open_file(
    path: Path, opened: contextlib.ExitStack, check: Callable[[Iterable[str], str], None]
) -> RowFile:
    if not path.is_file():
        raise DataError(
            f"there is no dataset file {str(path)!r}",
            hint="give a path that the environment host can read; the examples' make_data.py "
            "scripts write theirs",
        )
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DataError(
            f"{path} is neither parquet nor JSONL",
            hint="name the file .parquet, .jsonl or .ndjson",
        )
    file = reader(path)
    opened.callback(file.close)
    if not len(file):
        raise DataError(f"{path} has no rows", hint="write at least one row into it")
    check(file.columns(), f"row 0 of {path}")
    return file


class _MappedRows:
    """Rows that stand one after the other in a file mapped into memory."""

    def __init__(self, path: Path, mapped: Path) -> None:
        self._path = path
        self._ends = array("Q")
        self._map: mmap.mmap | None = None
        with mapped.open("rb") as file:
            if mapped.stat().st_size:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends)

    def _bytes(self, number: int) -> bytes:
        assert self._map is not None
        return self._map[self._ends[number - 1] if number else 0 : self._ends[number]]

    def close(self) -> None:
        if self._map is not None:
            self._map.close()


class _JsonLines(_MappedRows):
    """The lines of a JSONL file as it is; lines without text belong to the one that follows."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path)
        self._index_lines()

    def _index_lines(self) -> None:
        if self._map is None:
            return
        end = 0
        for line in iter(self._map.readline, b""):
            end += len(line)
            if not line.isspace():
                self._ends.append(end)

    def row(self, number: int) -> Mapping[str, Any]:
        raw = self._bytes(number)
        found = self._decode(number, raw)
        if b"\\ud" in raw or b"\\uD" in raw:  # the only way in which half a character gets here
            for column, value in found.items():
                self._check_text(number, column, value)
        return found

    def columns(self) -> list[str]:
        return list(self._decode(0, self._bytes(0)))

    def _decode(self, number: int, raw: bytes) -> Mapping[str, Any]:
        try:
            value = json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"row {number} of {self._path} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise DataError(
                f"row {number} of {self._path} is not a JSON object",
                hint="write one object on each line",
            )
        return cast("dict[str, Any]", value)

    def _check_text(self, number: int, column: str, value: Any) -> None:
        try:
            json.dumps([column, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"row {number} of {self._path} has half a character (a lone surrogate, "
                f"{str(error.object)[error.start]!a}) in the column {column!a}",
                hint="an emoji is one character, or two escapes (\\ud83d\\ude00): a text was cut "
                "between the two; mend the text, or leave the row out",
            ) from error


class _Parquet(_MappedRows):
    """The rows of a parquet file, unpacked to a temporary file that lives as long as its map."""

    def __init__(self, path: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="tinkermq-data-") as folder:
            rows, ends = Path(folder) / "rows", Path(folder) / "ends"
            unpack_parquet(path, rows, ends)
            super().__init__(path, rows)
            self._ends.frombytes(ends.read_bytes())

    def row(self, number: int) -> Mapping[str, Any]:
        return _unpackb(self._bytes(number), raw=False, strict_map_key=False)

    def columns(self) -> list[str]:
        return list(self.row(0))


_READERS = {".parquet": _Parquet, ".jsonl": _JsonLines, ".ndjson": _JsonLines}
