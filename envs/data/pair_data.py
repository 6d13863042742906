"""Pairs of answers, the better one and the worse: rows with `prompt`, `chosen` and `rejected`.

A prompt is chat messages, or a text that the user says; an answer is messages that follow it, or a
text that the assistant says. Where answers are whole conversations, as in many preference datasets
of Hugging Face, what both begin with is the prompt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...schemas.config.sft import SftConfig
from ...schemas.wire.errors import DataError
from ..chat_messages import Messages, Origin, are_messages, read_conversation, read_tools
from ..dataset import Dataset
from .chat_data import ChatData, ChatRow, with_images

_ANSWERS = ("chosen", "rejected")
_COLUMNS = "pairs have the columns prompt, chosen and rejected"


@dataclass(frozen=True)
class PairRow:
    """A prompt and two answers to it."""

    prompt: Messages
    """Chat messages before the answers; nothing in them is learnt."""
    chosen: Messages
    """The better answer: messages that follow the prompt, of which the first is the assistant's."""
    rejected: Messages
    """The worse one."""
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Schemas of the tools that the assistant could call."""
    where: str = ""
    """File and row."""


class PairData:
    """The pairs of some files."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        """Open the files; DataError names the one that cannot be used, and why."""
        self._rows = Dataset(paths, check=_check_columns)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._rows)

    def row(self, number: int) -> PairRow:
        """Decode a row; DataError for one that is no pair of different answers."""
        row, where = self._rows.row(number)
        chosen, rejected = (_messages(row, column, "assistant", where) for column in _ANSWERS)
        if _is_answer(chosen) and _is_answer(rejected):
            if row.get("prompt") is None:
                raise DataError(f"{where} has answers, and no prompt", hint=_COLUMNS)
            prompt = _messages(row, "prompt", "user", where)
        else:
            prompt = _common(chosen, rejected)
            if not prompt:
                raise DataError(
                    f"chosen and rejected of {where} are conversations that begin differently",
                    hint="what both begin with is the prompt; two answers may stand beside a "
                    "column prompt instead",
                )
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if chosen == rejected:
            raise DataError(
                f"chosen and rejected of {where} are equal",
                hint="nothing can be learnt of which is better: leave the row out",
            )
        for column, answer in zip(_ANSWERS, (chosen, rejected), strict=True):
            _check_answer(answer, column, where)
        seen = with_images(prompt, row, where)
        tools = read_tools(row.get("tools"), Origin("tools", where))
        return PairRow(seen, chosen, rejected, tools, where)

    def close(self) -> None:
        """Give the files back."""
        self._rows.close()


def open_rows(config: SftConfig, files: Sequence[str] | None = None) -> ChatData | PairData:
    """Open what an SFT job learns from, or `files` of the same kind.

    Raises DataError that names the file that cannot be used, and why.
    """
    files = config.data if files is None else files
    return PairData(files) if config.has_pairs else ChatData(files)


def check_row(row: ChatRow | PairRow) -> None:
    """Raise DataError for a conversation in which the assistant says nothing."""
    if isinstance(row, PairRow):
        return  # its answers were looked at as they were read
    if not any(message["role"] == "assistant" for message in row.messages):
        raise DataError(
            f"the assistant says nothing in {row.where}",
            hint="its messages are what is learnt: leave the row out",
        )


def _check_columns(columns: Iterable[str], where: str) -> None:
    present = list(columns)
    for column in _ANSWERS:
        if column not in present:
            raise DataError(
                f"{where} has no column {column}; its columns are {', '.join(present) or 'none'}",
                hint=_COLUMNS,
            )


def _messages(row: Mapping[str, Any], column: str, role: str, where: str) -> Messages:
    """Read a column that holds messages, which may stand as JSON, or a text of one role."""
    value = row.get(column)
    if isinstance(value, str) and not are_messages(value):
        return [{"role": role, "content": value}]
    return read_conversation(value, Origin(column, where))


def _is_answer(messages: Messages) -> bool:
    return messages[0]["role"] == "assistant"


def _common(chosen: Messages, rejected: Messages) -> Messages:
    """Return the messages with which two conversations begin."""
    count = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        count += 1
    return chosen[:count]


def _check_answer(answer: Messages, column: str, where: str) -> None:
    if not answer or answer[0]["role"] != "assistant":
        begins = f"a message of {answer[0]['role']}" if answer else "nothing"
        raise DataError(
            f"{column} of {where} goes on behind the prompt with {begins}",
            hint="an answer begins with a message of the assistant",
        )
    for message in answer:
        if message["role"] == "assistant" and not (
            message.get("content") or message.get("tool_calls")
        ):
            raise DataError(
                f"the assistant says nothing in {column} of {where}",
                hint="an answer has content, or calls of tools: leave the row out",
            )
