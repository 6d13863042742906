"""Unpack a parquet file to rows that can be read one by one without pyarrow.

A compressed row group cannot be entered in its middle, and pyarrow takes more memory than all else
in an environment host; so a file is unpacked once, by a process that then ends. The result is a
file of msgpack maps and a file of the places where they end.

A struct of a parquet file has the keys of all rows, null where a row has none: in the columns that
hold chat messages and tools those keys are left out. A null that somebody wrote there looks the
same and goes, too; it stays in a column of maps (`map<string, …>`), and in JSON text.
"""

import json
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs] - it has none

from ...schemas.wire.errors import DataError, StorageError, TinkermqError, error_from_reply

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

MESSAGE_COLUMNS = frozenset({"messages", "prompt", "chosen", "rejected", "tools"})
"""Columns that hold chat messages, or tools."""
BATCH_ROWS = 1024
"""Rows that are in memory at the same time."""
_packb = cast("Callable[..., bytes]", msgpack.packb)  # pyright: ignore[reportUnknownMemberType]


def unpack_parquet(path: Path, rows: Path, ends: Path) -> None:
    """Write the rows of a parquet file to `rows`, and where each ends to `ends`.

    Works in a process of its own, unless pyarrow is loaded here anyway. Raises DataError for a
    file that is no parquet, StorageError when the rows cannot be written.
    """
    if "pyarrow" in sys.modules:
        _unpack(path, rows, ends)
        return
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(path), str(rows), str(ends)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode == 2:
        raise error_from_reply(*json.loads(done.stdout))
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise DataError(
            f"{path} was not unpacked: the process for it ended with {done.returncode}: {last}",
            hint="see whether `python -c 'import pyarrow.parquet'` works here",
        )


def _unpack(path: Path, rows: Path, ends: Path) -> None:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as packed:
            _write(packed, rows, ends)
    except DataError as error:
        raise DataError(f"{path}: {error.message}", hint=error.hint) from error
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file: {error}", hint="write it again") from error
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path} cannot be read as parquet: {error}",
            hint="write it again, with a codec that this pyarrow has",
        ) from error
    except OSError as error:
        if error.errno is None:  # Arrow's own, of a page that is damaged
            raise DataError(
                f"{path} is damaged: {error}", hint="copy or write the file again"
            ) from error
        raise StorageError(
            f"{path} cannot be unpacked to {rows.parent}: {error}",
            hint="free some space there, or set TMPDIR to a larger disk",
        ) from error


def _write(packed: "ParquetFile", rows: Path, ends: Path) -> None:
    places = array("Q")
    place = 0
    with rows.open("wb") as file:
        batches = packed.iter_batches(BATCH_ROWS)  # pyright: ignore[reportUnknownMemberType] - stubs
        for batch in batches:
            for row in _decoded(batch, len(places)):
                place += file.write(_packb(row, default=str))
                places.append(place)
    with ends.open("wb") as file:
        places.tofile(file)


def _decoded(batch: "RecordBatch", first: int) -> list[dict[str, Any]]:
    """Return the rows of a batch; DataError names the first that is not UTF-8, and its column."""
    try:
        rows = batch.to_pylist()
        for name in MESSAGE_COLUMNS.intersection(batch.schema.names):
            kind = cast("Any", batch.column(name)).type
            for row in rows:
                row[name] = _without_filled(row[name], kind)
        return rows
    except UnicodeDecodeError:
        for number in range(len(batch)):
            for column in batch.schema.names:
                try:
                    batch.column(column).slice(number, 1).to_pylist()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"column {column} of row {first + number} is text that is not UTF-8: "
                        f"{error}",
                        hint="write the file again with its text decoded as what it is",
                    ) from error
        raise


def _without_filled(value: Any, kind: Any) -> Any:
    """Return a value without the keys that its arrow type fills in as null; maps are maps."""
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
    """Unpack one file; an error of ours goes to standard output, as JSON, with exit code 2."""
    path, rows, ends = (Path(argument) for argument in argv)
    try:
        _unpack(path, rows, ends)
    except TinkermqError as error:
        sys.stdout.write(json.dumps([error.code, error.message, error.hint]))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
