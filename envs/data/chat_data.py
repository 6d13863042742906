"""Conversations to learn from: rows of parquet or JSONL with the column `messages`.

Images stand in the messages as bytes or data URLs, or in a column `images` in the order of their
places in the text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...schemas.wire.errors import DataError
from ...schemas.wire.images import encoded_image, replace_images
from ..chat_messages import Origin, read_conversation, read_tools
from ..dataset import Dataset
from ..record import place_images, read_images


@dataclass(frozen=True)
class ChatRow:
    """One conversation."""

    messages: list[dict[str, Any]]
    """Chat messages, as chat templates take them."""
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
        messages = read_conversation(row.get("messages"), Origin("messages", where))
        seen = _with_images(messages, row, where)
        return ChatRow(seen, read_tools(row.get("tools"), Origin("tools", where)), where)

    def check_row(self, number: int) -> ChatRow:
        """Decode a row; DataError for one in which the assistant says nothing, too."""
        row = self.row(number)
        if not any(message["role"] == "assistant" for message in row.messages):
            raise DataError(
                f"the assistant says nothing in {row.where}",
                hint="its messages are what is learnt: leave the row out",
            )
        return row

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


def _with_images(
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
