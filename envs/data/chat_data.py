"""Conversations to learn from: rows of parquet or JSONL with the column `messages`.

Images stand in the messages as bytes or data URLs, or in a column `images` in the order of their
places in the text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import DataError
from ...schemas.wire.images import encoded_image, replace_images
from ..dataset import Dataset
from ..record import place_images, read_images

_SHOWN = 80


@dataclass(frozen=True)
class ChatRow:
    """One conversation."""

    messages: list[dict[str, Any]]
    """Chat messages, as they stand in the data."""
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Schemas of the tools that the assistant could call."""
    where: str = ""
    """File and row."""


class ChatData:
    """The conversations of some files."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """Open the files; DataError names the one that cannot be used, and why."""
        self._rows = Dataset(paths, check=_check_columns)

    def __len__(self) -> int:
        """Return the number of conversations."""
        return len(self._rows)

    def row(self, number: int) -> ChatRow:
        """Decode a row; DataError for one that holds no conversation."""
        row, where = self._rows.row(number)
        messages = read_messages(row.get("messages"), "messages", where)
        seen = with_images(messages, row, where)
        return ChatRow(seen, read_maps(row.get("tools")), where)

    def close(self) -> None:
        """Give the files back."""
        self._rows.close()


def _check_columns(columns: Iterable[str], where: str) -> None:
    present = list(columns)
    if "messages" not in present:
        raise DataError(
            f"{where} has no column messages; its columns are {', '.join(present) or 'none'}",
            hint="name the column with the chat messages `messages`",
        )


def read_messages(value: Any, column: str, where: str) -> list[dict[str, Any]]:
    """Read the chat messages of a row's column; DataError where it holds none."""
    messages = read_maps(value)
    if not messages or not all("role" in message for message in messages):
        raise DataError(
            f"{column} of {where} is {_shorten(value)}",
            hint="a conversation is a list of chat messages with role and content",
        )
    for number, message in enumerate(messages):
        if not {"content", "tool_calls"} & message.keys():
            named = "" if column == "messages" else f" of {column}"
            raise DataError(
                f"message {number}{named} of {where} says nothing: it has neither content nor "
                "tool_calls",
                hint="fill its content, or leave the message out",
            )
    return messages


def with_images(
    messages: Sequence[dict[str, Any]], row: Mapping[str, Any], where: str
) -> list[dict[str, Any]]:
    """Return the messages of a row with all images as bytes, those of its column `images`, too.

    DataError names the row.
    """
    images = read_images(row.get("images"), where)
    try:
        return replace_images(place_images(messages, images), encoded_image)
    except DataError as error:
        raise DataError(f"{where}: {error.message}", hint=error.hint) from error


def read_maps(value: Any) -> list[dict[str, Any]]:
    """Return a list of maps, which may stand as JSON, without what parquet fills in as null."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError:
            return []
    if not isinstance(value, list):
        return []
    found = cast("list[Any]", value)
    if not all(isinstance(one, Mapping) for one in found):
        return []
    return [_without_nulls(one) for one in found]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: _without_nulls(inner) for key, inner in items if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in cast("list[Any]", value)]
    return value


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
