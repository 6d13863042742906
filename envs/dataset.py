"""Datasets on disk: parquet and JSONL, any row at once, without holding them in memory.

A parquet file is unpacked once into a temporary Arrow file that is mapped into memory, because a
compressed row group cannot be entered in its middle; a JSONL file is mapped as it is, with an
index of its lines. Rows are decoded one by one when asked for.
"""

import bisect
import contextlib
import importlib
import itertools
import json
import mmap
import random
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from ..schemas.errors import DataError, StorageError
from .record import Record, check_columns, parse_record

BATCH_ROWS = 1024
"""Rows that are unpacked together."""


class RowFile(Protocol):
    """Rows of one file, by their number."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def row(self, number: int) -> Mapping[str, Any]:
        """Decode one row."""
        ...

    def close(self) -> None:
        """Give the file back."""
        ...


class Dataset:
    """The rows of one or more files, in the files' order or in that of a seed."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """Open the files; DataError names the one that cannot be used, and why."""
        if not paths:
            raise DataError("a dataset has no files", hint="set env.train_data")
        self.paths = [Path(path).expanduser() for path in paths]
        with contextlib.ExitStack() as opened:
            self._files = [_open_file(path, opened) for path in self.paths]
            self._closing = opened.pop_all()
        self._ends = list(itertools.accumulate(len(file) for file in self._files))
        self._order: list[int] | None = None

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
        if not 0 <= number < len(self):
            raise DataError(
                f"row {number} does not exist: {self._names()} has {len(self)} rows",
                hint="all hosts of a job must read the same files",
            )
        number = number if self._order is None else self._order[number]
        index = bisect.bisect_right(self._ends, number)
        local = number - (self._ends[index - 1] if index else 0)
        where = f"row {local} of {self.paths[index]}"
        return parse_record(self._files[index].row(local), where)

    def close(self) -> None:
        """Give the files back."""
        self._closing.close()

    def _names(self) -> str:
        return ", ".join(str(path) for path in self.paths)


def _open_file(path: Path, opened: contextlib.ExitStack) -> RowFile:
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
    return file


class _JsonLines:
    """The lines of a JSONL file, mapped into memory with the place of each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q")
        self._map: mmap.mmap | None = None
        with path.open("rb") as file:
            if path.stat().st_size:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._index_lines()
        if self._starts:
            check_columns(self.row(0), f"line 1 of {path}")

    def _index_lines(self) -> None:
        if self._map is None:
            return
        start = 0
        for line in iter(self._map.readline, b""):
            if not line.isspace():
                self._starts.append(start)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, number: int) -> Mapping[str, Any]:
        assert self._map is not None
        start = self._starts[number]
        end = self._map.find(b"\n", start)
        line = self._map[start : end if end >= 0 else len(self._map)]
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"row {number} of {self._path} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"row {number} of {self._path} is not a JSON object")
        return cast("dict[str, Any]", value)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()


class _Parquet:
    """The rows of a parquet file, unpacked to a temporary Arrow file that is mapped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._source: Any = None
        self._ends: list[int] = []
        pyarrow = _pyarrow()
        try:
            with pyarrow.parquet.ParquetFile(path) as packed:
                check_columns(packed.schema_arrow.names, str(path))
                self._unpack(pyarrow, packed)
        except pyarrow.ArrowInvalid as error:
            raise DataError(
                f"{path} is not a parquet file: {error}", hint="write it again"
            ) from error

    def _unpack(self, pyarrow: Any, packed: Any) -> None:
        try:
            with tempfile.NamedTemporaryFile(prefix="tinkermq-data-", suffix=".arrow") as spool:
                with pyarrow.ipc.new_file(spool.name, packed.schema_arrow) as writer:
                    for batch in packed.iter_batches(batch_size=BATCH_ROWS):
                        writer.write_batch(batch)
                        self._ends.append((self._ends[-1] if self._ends else 0) + len(batch))
                self._source = pyarrow.memory_map(spool.name)
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be unpacked to {tempfile.gettempdir()}: {error}",
                hint="free some space there, or set TMPDIR to a larger disk",
            ) from error
        self._reader = pyarrow.ipc.open_file(self._source)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> Mapping[str, Any]:
        index = bisect.bisect_right(self._ends, number)
        local = number - (self._ends[index - 1] if index else 0)
        return self._reader.get_batch(index).slice(local, 1).to_pylist()[0]

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


_READERS = {".parquet": _Parquet, ".jsonl": _JsonLines, ".ndjson": _JsonLines}


def _pyarrow() -> Any:
    """Import pyarrow when a parquet file is opened: a client without data stays light."""
    importlib.import_module("pyarrow.parquet")
    return importlib.import_module("pyarrow")
