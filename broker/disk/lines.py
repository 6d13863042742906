"""Files to which lines are appended, each whole or not at all.

What a full disk leaves of an append is taken back. What a death leaves of one is a line without its
end: the next append begins a new line behind it, and readers skip it and say so.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import structlog

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def append_lines(path: Path, lines: Sequence[str]) -> int:
    """Append lines, making the file and its folder where need be; return the file's size.

    Without lines the file is only made. Raises OSError when they cannot be written; then none of
    them is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return append_to(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), lines)


def append_to(file: int, lines: Sequence[str]) -> int:
    """Append lines to a file that is open to read and append, and close it; as `append_lines`."""
    try:
        size = os.fstat(file).st_size
        is_cut = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        data = b"\n" * (is_cut and bool(lines)) + "".join(f"{line}\n" for line in lines).encode()
        try:
            _write(file, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, size)
            raise
        return size + len(data)
    finally:
        os.close(file)


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one a line; what was cut is left out, and logged."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield cast("dict[str, Any]", value)
            elif line.strip():
                _log.warning("line_cut", file=str(path), line=number, num_bytes=len(line))


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
