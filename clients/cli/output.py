"""Output of commands: text for a terminal, plain lines for a pipe, JSON for a program."""

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # imported late: a command that prints plain text does not need rich
    from rich.console import Console

Row = Sequence[object]
_CONTROLS = re.compile(r"\x1b\[[0-9;]*m|([\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f])")


@cache
def stdout() -> "Console":
    """The console of the output; without colour when piped or under NO_COLOR."""
    from rich.console import Console

    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, emoji=False)
    console.on_broken_pipe = _pass_on  # rich would exit with code 1
    return console


def _pass_on() -> None:
    """Raise the error that is being handled again."""
    raise


@cache
def stderr() -> "Console":
    """The console of notes and errors."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=not sys.stderr.isatty(), highlight=False, emoji=False)


def is_terminal() -> bool:
    """Whether the output is a terminal."""
    return sys.stdout.isatty()


def print_text(text: str) -> None:
    """Print one line with rich markup; use `literal` for texts that may contain brackets."""
    stdout().print(text)


def literal(text: str) -> str:
    """Return text so that rich prints its brackets instead of reading them as markup."""
    from rich.markup import escape

    return escape(harmless(text))


def harmless(text: str) -> str:
    """Return text with its control characters escaped, except for those of colours.

    Texts of models, games and other users may contain such characters, which a terminal executes.
    """
    return _CONTROLS.sub(lambda match: match[0] if match[1] is None else _escape(match[1]), text)


def _escape(character: str) -> str:
    return f"\\x{ord(character):02x}"


def print_plain(text: str) -> None:
    """Print text without markup or wrapping: unchanged in a pipe, `harmless` on a terminal."""
    sys.stdout.write((harmless(text) if is_terminal() else text) + "\n")
    sys.stdout.flush()


def print_note(text: str) -> None:
    """Print one line of progress or advice to standard error, without markup."""
    stderr().print(harmless(text), markup=False)


def print_json(value: Any) -> None:
    """Print one JSON document on one line when piped, indented on a terminal."""
    print_plain(json.dumps(jsonable(value), indent=2 if is_terminal() else None, allow_nan=False))


def print_result(value: Any, text: str, *, as_json: bool) -> int:
    """Print the result of a command, as a JSON document or as plain text; return its exit code."""
    if as_json:
        print_json(value)
    else:
        print_plain(text)
    return 0


def print_rows(value: Any, columns: Sequence[str], rows: Iterable[Row], *, as_json: bool) -> int:
    """Print the result of a command, as a JSON document or as a table; return its exit code."""
    if as_json:
        print_json(value)
    else:
        print_table(columns, list(rows))
    return 0


def print_json_line(value: Any) -> None:
    """Print one line of a JSON stream."""
    print_plain(json.dumps(jsonable(value), allow_nan=False))


def jsonable(value: Any) -> Any:
    """Return `value` as JSON values: NaN as null, arrays as lists, bytes as hexadecimal text."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[Any, Any]", value)
        return {str(key): jsonable(inner) for key, inner in fields.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner) for inner in cast("Sequence[Any]", value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    return value


def print_table(columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Print rows in columns: a table on a terminal, aligned text without a frame when piped."""
    texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if not is_terminal():
        _print_aligned(columns, texts)
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column)
    for row in texts:
        table.add_row(*(literal(cell) for cell in row))
    stdout().print(table)


def _print_aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [list(columns), *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print_plain("  ".join(cells).rstrip())


def duration(seconds: float) -> str:
    """Format a duration: `45s`, `3m 20s`, `2h 05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m"


def print_commands(commands: Mapping[str, str]) -> None:
    """Print possible next commands, each with its meaning."""
    width = max(map(len, commands))
    for command, meaning in commands.items():
        print_text(f"  {literal(command.ljust(width))}   [dim]{literal(meaning)}[/]")
