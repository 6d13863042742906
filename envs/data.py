"""Conversations for SFT: rows of parquet or JSONL files with the column `messages`.

Messages contain images as bytes or data URLs; otherwise the column `images` has them in the order
of their tags.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachetools import FIFOCache

from ..schemas.chat_messages import REASONING_KEYS, Origin, read_conversation, read_tools
from ..schemas.config.job import EnvConfig
from ..schemas.env import Split
from ..schemas.wire.errors import DataError
from ..schemas.wire.images import encoded_image, replace_images
from .dataset import (
    Dataset,
    Record,
    any_columns,
    parse_row,
    parse_task,
    place_images,
    read_images,
)
from .registry import plays_any_row


@dataclass(frozen=True)
class ChatRow:
    """One conversation."""

    messages: list[dict[str, Any]]
    """Chat messages, as chat templates take them."""
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Schemas of the tools that the assistant could call."""
    where: str = ""
    """File and row."""
    trained: frozenset[int] = frozenset()
    """Indices of the assistant's messages that are learnt."""


TRAINED_KEYS = ("weight", "trainable", "train", "training", "loss")
"""Keys of a message that say whether it is learnt, in the formats of OpenAI and others."""
_KNOWN_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "id", "images"}
    | {*REASONING_KEYS}
)


class ChatData:
    """The conversations of some files."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """Open the files; DataError names an unusable file and the reason."""
        self._rows = Dataset(paths, check=_check_columns)
        self.unknown_keys = dict[str, str]()
        """Keys of messages that may have no effect, and the first row that has each."""

    def __len__(self) -> int:
        """Return the number of conversations."""
        return len(self._rows)

    def row(self, number: int) -> ChatRow:
        """Decode a row; DataError for one without a message that is learnt."""
        row, where = self._rows.row(number)
        messages = read_conversation(row.get("messages"), Origin("messages", where))
        trained = frozenset(n for n, item in enumerate(messages) if _is_trained(item, n, where))
        plain = [{k: v for k, v in item.items() if k not in TRAINED_KEYS} for item in messages]
        for key in {key for item in plain for key in item} - _KNOWN_KEYS:
            self.unknown_keys.setdefault(key, where)
        seen = _with_images(plain, row, where)
        tools = read_tools(row.get("tools"), Origin("tools", where))
        if not trained:
            raise DataError(
                f"no assistant message is learnt in {where}",
                hint="only the assistant's messages are learnt, except those that a key "
                f"({', '.join(TRAINED_KEYS)}) excludes: leave the row out",
            )
        return ChatRow(seen, tools, where, trained)

    @property
    def note(self) -> str:
        """Describe the keys of messages, in the rows read so far, that may have no effect."""
        keys = [f"{key!r:.40} ({where})" for key, where in sorted(self.unknown_keys.items())]
        if not keys:
            return ""
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        return f"keys of messages that only a chat template may read: {', '.join(keys[:5])}{more}"

    def close(self) -> None:
        """Close the files."""
        self._rows.close()


def _is_trained(message: Mapping[str, Any], number: int, where: str) -> bool:
    """Return whether a message is learnt; DataError names a key that cannot be honoured."""
    is_assistant = message["role"] == "assistant"
    is_trained = is_assistant
    for key in TRAINED_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise DataError(
                f"{where}: message {number} has {key} {value!r:.40}",
                hint="it must be 0 or false (not learnt), or 1 or true: messages are learnt with "
                "equal weight",
            )
        if value and not is_assistant:
            raise DataError(
                f"{where}: message {number} has {key} {value!r}, and its role is "
                f"{message['role']!r:.40}",
                hint="only messages of the assistant are learnt: remove the key",
            )
        is_trained = is_trained and bool(value)
    return is_trained


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
    """Return the messages of a row with all images as bytes, including those of the column
    `images`.

    DataError names the row.
    """
    images = read_images(row, messages, where)
    try:
        return replace_images(place_images(messages, images), encoded_image)
    except DataError as error:
        raise DataError(f"{where}: {error.message}", hint=error.hint) from error


# The data of a host's episodes.

RECENT = 64
"""Decoded rows in memory: the episodes of a group ask for the same row."""


class HostData:
    """Training and validation rows of a job; both absent for a game that generates its states."""

    def __init__(self, config: EnvConfig, seed: int, *, needs_answers: bool = True) -> None:
        """Open the files; `seed` selects the validation rows, the same on every host.

        Without `needs_answers` a row is the task of a program, with any columns.
        """
        rows = Dataset if needs_answers else _tasks
        rows = _whole_rows if plays_any_row(config.game) else rows
        self._train = rows(config.train_data) if config.train_data else None
        self._val = None
        if config.val_data:
            self._val = rows(config.val_data).shuffled(seed, config.num_val)
        self.num_train = len(self._train) if self._train else None
        self.num_val = self._count_val(config)
        self._recent: FIFOCache[tuple[Split, int], Record] = FIFOCache(RECENT)

    def _count_val(self, config: EnvConfig) -> int:
        if self._val is not None:
            return len(self._val)
        return config.num_val if self._train is None else 0

    def record(self, split: Split, sample: int | None) -> Record | None:
        """Return a row, or None for an episode whose state the game generates."""
        if sample is None:
            return None
        recent = self._recent.get((split, sample))
        return recent if recent is not None else self._decode(split, sample)

    def source(self, split: Split, sample: int | None) -> str:
        """Return the data source of a row, or an empty text."""
        try:
            record = self.record(split, sample)
        except DataError:
            return ""  # the error is raised again at the start of the episode
        return record.data_source if record is not None else ""

    def _decode(self, split: Split, sample: int) -> Record | None:
        dataset = self._train if split == "train" else self._val
        if dataset is None:
            if self._train is None and split == "val":
                return None  # a generated game: the sample is the number of its seed
            raise DataError(
                f"row {sample} was asked for, but there is no {split} data",
                hint=f"set env.{split}_data, or ask with a seed and without a row",
            )
        record = dataset.record(sample)
        self._recent[split, sample] = record
        return record

    def close(self) -> None:
        """Close the files."""
        for dataset in (self._train, self._val):
            if dataset is not None:
                dataset.close()


def _whole_rows(paths: list[str]) -> Dataset:
    return Dataset(paths, any_columns, parse_row)


def _tasks(paths: list[str]) -> Dataset:
    return Dataset(paths, any_columns, parse_task)
