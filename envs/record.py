"""One row of a dataset, in verl's columns or as `prompt` and `answer`."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..schemas.wire.errors import DataError
from .chat_messages import Origin, are_messages, read_conversation, shorten
from .game import ChatMessage

TRUTH_COLUMNS = ("reward_model", "answer", "ground_truth")
"""Where the gold answer may stand."""
IMAGE_TAG = "<image>"
_NOTHING = frozenset({"", "none", "null", "nan", "<na>"})
"""What programs write for a value that is not there."""


@dataclass(frozen=True)
class Record:
    """A prompt and what is needed to judge its answer."""

    prompt: list[ChatMessage]
    """Chat messages, as chat templates take them; empty where the game words its own prompt."""
    ground_truth: Any
    """The gold answer."""
    data_source: str = ""
    """Where the row comes from; empty: the game's own name."""
    extra_info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else the row says."""
    images: list[Any] = field(default_factory=list[Any])
    """Encoded images, in the order of the `<image>` tags of the prompt."""
    where: str = ""
    """File and row."""
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else the row of a program's task has."""

    def messages(self) -> list[ChatMessage]:
        """Return a fresh copy of the prompt, each `<image>` tag replaced by its image."""
        return place_images(self.prompt, self.images)


def check_columns(columns: Iterable[str], where: str) -> None:
    """Raise DataError unless the columns hold a prompt and a gold answer."""
    present = list(columns)
    truth = " or ".join(("reward_model (with ground_truth)", *TRUTH_COLUMNS[1:]))
    for missing, found in (
        ("prompt", "prompt" in present),
        (truth, any(name in present for name in TRUTH_COLUMNS)),
    ):
        if not found:
            raise DataError(
                f"{where} has no column {missing}; its columns are {', '.join(present) or 'none'}",
                hint="name the columns as verl does (prompt, reward_model.ground_truth, "
                "data_source, extra_info), or prompt and answer",
            )


def parse_record(row: Mapping[str, Any], where: str) -> Record:
    """Read a row; `where` names it in a DataError."""
    check_columns(row, where)
    return Record(
        prompt=_parse_prompt(row["prompt"], where),
        ground_truth=_ground_truth(row, where),
        data_source=str(row.get("data_source") or ""),
        extra_info=dict(row.get("extra_info") or {}),
        images=list(row.get("images") or []),
        where=where,
    )


def any_columns(columns: Iterable[str], where: str) -> None:
    """Take any columns: the row is a program's task."""


def parse_task(row: Mapping[str, Any], where: str) -> Record:
    """Read a row that is a program's task: no column of it has to be there."""
    known = {"prompt", "data_source", "extra_info", "images", *TRUTH_COLUMNS}
    return Record(
        prompt=[] if row.get("prompt") is None else _parse_prompt(row["prompt"], where),
        ground_truth=_truth_if_any(row),
        data_source=str(row.get("data_source") or ""),
        extra_info=dict(row.get("extra_info") or {}),
        images=list(row.get("images") or []),
        where=where,
        columns={name: value for name, value in row.items() if name not in known},
    )


def _truth_if_any(row: Mapping[str, Any]) -> Any:
    """Return the gold answer of a row; None where it has none."""
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return cast("Any", reward_model["ground_truth"])
    found = (row[name] for name in TRUTH_COLUMNS[1:] if row.get(name) is not None)
    return next(found, None)


def _parse_prompt(value: Any, where: str) -> list[ChatMessage]:
    """Read a prompt: a text that the user says, or chat messages, which may stand as JSON text."""
    if isinstance(value, str) and value and not are_messages(value):
        return [{"role": "user", "content": value}]
    if value == []:
        return []
    if not are_messages(value):
        raise DataError(
            f"the prompt of {where} is {shorten(value)}",
            hint="a prompt is a text, or a list of chat messages with role and content; an empty "
            "list where the game words it",
        )
    return read_conversation(value, Origin("prompt", where))


def answer_text(ground_truth: Any) -> str:
    """Return a gold answer as text, for a game that compares texts.

    Raises DataError for one that is neither a text nor a number: its form as text would be some
    program's, and no answer.
    """
    if is_no_answer(ground_truth) or not isinstance(ground_truth, str | int | float):
        raise DataError(
            f"the gold answer {shorten(ground_truth)} is neither a text nor a number",
            hint="write it into the data as the policy shall say it",
        )
    return str(ground_truth)


def is_no_answer(value: Any) -> bool:
    """Whether a value stands for a missing one: null, NaN, nothing, or what a program wrote then.

    A list without any answer is one of them, too.
    """
    if isinstance(value, str):
        return value.strip().lower() in _NOTHING
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, list | tuple):
        return all(is_no_answer(each) for each in cast("Sequence[Any]", value))
    if isinstance(value, Mapping):
        return all(is_no_answer(each) for each in cast("Mapping[Any, Any]", value).values())
    return value is None


def _ground_truth(row: Mapping[str, Any], where: str) -> Any:
    reward_model = row.get("reward_model")
    found = {name: row[name] for name in TRUTH_COLUMNS[1:] if row.get(name) is not None}
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        found = {"reward_model.ground_truth": cast("Any", reward_model["ground_truth"])}
    for name, value in found.items():
        if is_no_answer(value):
            raise DataError(
                f"{where} has no gold answer: {name} is {shorten(value)}",
                hint="fill it, or leave the row out of the data",
            )
        return value
    raise DataError(
        f"{where} has no gold answer: reward_model is {shorten(reward_model)}",
        hint="fill reward_model.ground_truth, or the column answer",
    )


def place_images(messages: Sequence[ChatMessage], images: Sequence[Any]) -> list[ChatMessage]:
    """Return copies of the messages of a row with its images in their places.

    A place is an `<image>` tag of a text, or a part `{"type": "image"}` that holds none. Without
    images a tag is text. Raises DataError unless there is one image for each place.
    """
    if not images:
        return [dict(message) for message in messages]
    rest = iter(images)
    placed = [_with_images(message, rest) for message in messages]
    if (left := len(list(rest))) > 0:
        raise DataError(
            f"a row has {len(images)} images, its prompt names {len(images) - left}",
            hint=f"write one {IMAGE_TAG} tag into the prompt for each image",
        )
    return placed


def _with_images(message: ChatMessage, images: Iterator[Any]) -> ChatMessage:
    content = message.get("content")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        return {**message, "content": [_filled(part, images) for part in parts]}
    if not isinstance(content, str) or IMAGE_TAG not in content:
        return dict(message)
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(IMAGE_TAG)):
        if number:
            parts.append({"type": "image", "image": _next_image(images, content)})
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _filled(part: Any, images: Iterator[Any]) -> Any:
    if not isinstance(part, Mapping):
        return part
    fields = cast("Mapping[str, Any]", part)
    if fields.get("type") != "image" or fields.get("image") is not None:
        return fields
    return {**fields, "image": _next_image(images, repr(fields))}


def _next_image(images: Iterator[Any], content: str) -> Any:
    image = next(images, None)
    if image is None:
        raise DataError(
            f"a prompt has more {IMAGE_TAG} tags than its row has images: {shorten(content)}",
            hint="give one image per tag in the column images",
        )
    return image
