"""Unpack a parquet or Arrow file to rows that can be read one by one without pyarrow.

A compressed row group cannot be entered in its middle, and pyarrow takes more memory than all
else in an environment host; so a file is unpacked once, by a process that then ends. The results
are a file of msgpack maps and a file of the offsets where they end.

A struct of a parquet file has the keys of all rows, null where a row has none: in the columns
that hold chat messages and tools those keys are left out. A null in the data of these columns
looks the same and is left out, too; it is kept in a column of maps (`map<string, …>`) and in JSON
text.
"""

import contextlib
import json
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs] - it has none

from ..schemas.local.process import is_killed_from_outside, num_oom_kills
from ..schemas.wire import errors

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch

MESSAGE_COLUMNS = frozenset({"messages", "prompt", "chosen", "rejected", "tools"})
"""Columns of chat messages or tools."""
_FEATHER = b"ARROW1"
_A = {"parquet": "a parquet", "arrow": "an Arrow"}
BATCH_ROWS = 1024
"""Rows in memory at the same time."""
_packb = cast("Callable[..., bytes]", msgpack.packb)  # pyright: ignore[reportUnknownMemberType]


def unpack(path: Path, rows: Path, ends: Path, source: Path | None = None) -> None:
    """Write the rows of a parquet or Arrow file to `rows`, and the end of each to `ends`.

    It is read from `source`, by default its path. Runs in a process of its own, unless pyarrow is
    already imported here. Raises DataError for a file that is neither, StorageError if the rows
    cannot be written.
    """
    if "pyarrow" in sys.modules:
        _unpack(path, rows, ends, source or path)
        return
    oom_kills = num_oom_kills()
    done = subprocess.run(
        # -P: a file in the working folder, such as queue.py, must not hide a module of Python
        [sys.executable, "-P", "-m", __name__, *map(str, (path, rows, ends, source or path))],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if is_killed_from_outside(done.returncode, oom_kills):
        unpack(path, rows, ends, source)
        return
    if done.returncode == 2:
        raise errors.error_from_reply(*json.loads(done.stdout))
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise errors.DataError(
            f"{path} was not unpacked: the process for it ended with {done.returncode}: {last}",
            hint="see whether `python -c 'import pyarrow.parquet'` works here",
        )


def _unpack(path: Path, rows: Path, ends: Path, source: Path) -> None:
    import pyarrow

    kind = path.suffix.removeprefix(".")
    try:
        _write(_batches(kind, source), rows, ends)
    except errors.DataError as error:
        raise errors.DataError(f"{path}: {error.message}", hint=error.hint) from error
    except pyarrow.ArrowInvalid as error:
        raise errors.DataError(
            f"{path} is not {_A[kind]} file: {error}", hint="write it again"
        ) from error
    except pyarrow.ArrowException as error:
        raise errors.DataError(
            f"{path} cannot be read as {kind}: {error}",
            hint="write it again, with a codec that this pyarrow has",
        ) from error
    except OSError as error:
        if error.errno is None:  # Arrow's own error for a damaged page
            raise errors.DataError(
                f"{path} is damaged: {error}", hint="copy or write the file again"
            ) from error
        raise errors.StorageError(
            f"{path} cannot be unpacked to {rows.parent}: {error}",
            hint="free some space there, or set TMPDIR to a larger disk",
        ) from error


def _batches(kind: str, source: Path) -> "Iterator[RecordBatch]":
    import pyarrow.parquet

    if kind == "parquet":
        with pyarrow.parquet.ParquetFile(source) as packed:
            yield from packed.iter_batches(BATCH_ROWS)  # pyright: ignore[reportUnknownMemberType] - stubs
        return
    with pyarrow.OSFile(str(source), "r") as file:  # a stream as save_to_disk writes it, or Feather
        is_stream = file.read(len(_FEATHER)) != _FEATHER
        file.seek(0)
        if is_stream:
            batches = iter(pyarrow.ipc.open_stream(file))
        else:
            packed = pyarrow.ipc.open_file(file)
            batches = map(packed.get_batch, range(packed.num_record_batches))
        for batch in batches:
            for first in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(first, BATCH_ROWS)


def _write(batches: "Iterable[RecordBatch]", rows: Path, ends: Path) -> None:
    places = array("Q")
    place = 0
    with rows.open("wb") as file:
        for batch in batches:
            for row in _decoded(batch, len(places)):
                place += file.write(_packb(row, default=str))
                places.append(place)
    with ends.open("wb") as file:
        places.tofile(file)


def _decoded(batch: "RecordBatch", first: int) -> list[dict[str, Any]]:
    """Return the rows of a batch; DataError names the first that cannot be read, and its column."""
    names = batch.schema.names
    for place, name in enumerate(names):
        if getattr(cast("Any", batch.column(place)).type, "unit", "") == "ns":
            column = _as_python_has_it(batch.column(place))
            batch = cast("Any", batch).set_column(place, name, column)
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):
        columns = [
            _values(cast("Array[Any]", batch.column(n)), name, first)
            for n, name in enumerate(names)
        ]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    for name in MESSAGE_COLUMNS.intersection(names):
        kind = cast("Any", batch.column(name)).type
        for row in rows:
            row[name] = _without_filled(row[name], kind)
    return rows


def _as_python_has_it(column: Any) -> Any:
    """Return times in nanoseconds as microseconds, or as texts where that would lose some.

    pyarrow makes of them what pandas has, or cuts them, where pandas is installed.
    """
    from pyarrow import ArrowException, duration, string, time64, timestamp, types

    kind = column.type
    if types.is_timestamp(kind):
        coarse: Any = timestamp("us", kind.tz)
    else:
        coarse = time64("us") if types.is_time(kind) else duration("us")
    for target in (coarse, string()):
        with contextlib.suppress(ArrowException):
            return column.cast(target)
    return column


def _values(column: "Array[Any]", name: str, first: int) -> list[Any]:
    """Return the values of a column; times become texts if Python's types are less precise."""
    from pyarrow import ArrowException, string, types

    try:
        return column.to_pylist()
    except (ValueError, OverflowError) as error:
        if types.is_temporal(column.type):
            with contextlib.suppress(ArrowException):
                return column.cast(string()).to_pylist()
        raise _unreadable_column(column, name, first) from error


def _unreadable_column(column: "Array[Any]", name: str, first: int) -> errors.DataError:
    """Return the error that names the first value of a column that Python cannot represent."""
    for number in range(len(column)):
        try:
            column.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            return errors.DataError(
                f"column {name} of row {first + number} is text that is not UTF-8: {error}",
                hint="write the file again with its text decoded as what it is",
            )
        except (ValueError, OverflowError) as error:
            return errors.DataError(
                f"column {name} of row {first + number} cannot be read: {error}",
                hint="write the file again with this column as text, or without it",
            )
    raise AssertionError(f"each value of {name} can be read, but not all of them")


def _without_filled(value: Any, kind: Any) -> Any:
    """Return a value without the keys that its arrow type fills in as null; maps stay maps."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_struct(kind):
        fields = cast("list[Any]", cast("Any", kind).fields)
        present = [field for field in fields if value[field.name] is not None]
        return {field.name: _without_filled(value[field.name], field.type) for field in present}
    if types.is_map(kind):
        return {key: _without_filled(inner, kind.item_type) for key, inner in value}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_without_filled(inner, kind.value_type) for inner in value]
    return value


def main(argv: Sequence[str]) -> int:
    """Unpack one file; print a TinkermqError as JSON and exit with code 2."""
    path, rows, ends, source = (Path(argument) for argument in argv)
    try:
        _unpack(path, rows, ends, source)
    except errors.TinkermqError as error:
        sys.stdout.write(json.dumps([error.code, error.message, error.hint]))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
