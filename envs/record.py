"""One row of a dataset, in verl's columns or as `prompt` and `answer`."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..schemas.wire.codec import read_json
from ..schemas.wire.errors import DataError, MessageError
from ..schemas.wire.foreign import plain_value
from ..schemas.wire.images import encoded_image
from .chat_messages import Origin, are_messages, read_conversation, shorten
from .game import ChatMessage

TRUTH_COLUMNS = ("reward_model", "answer", "ground_truth")
"""Where the gold answer may stand."""
IMAGE_TAG = "<image>"
_NOTHING = frozenset({"", "none", "null", "nan", "<na>"})
"""What programs write for a value that is not there."""


class RowError(DataError):
    """A row that cannot be used; the message names it."""


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
        """Return a fresh copy of the prompt, each `<image>` tag replaced by its image.

        Raises DataError that names the row: for other than one image for each tag, and for what of
        its prompt cannot travel.
        """
        try:
            return plain_value(place_images(self.prompt, self.images), "prompt")
        except (DataError, MessageError) as error:
            raise RowError(f"{self.where or 'a row'}: {error.message}", hint=error.hint) from error


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
    """Read a row; a DataError names `where`, and the column."""
    row = _plain_values(row)
    check_columns(row, where)
    return Record(
        prompt=_parse_prompt(row["prompt"], where),
        ground_truth=_ground_truth(row, where),
        data_source=_source(row, where),
        extra_info=read_map(row.get("extra_info"), "extra_info", where),
        images=read_images(row.get("images"), where),
        where=where,
    )


def any_columns(columns: Iterable[str], where: str) -> None:
    """Take any columns: the row is a program's task."""


def parse_task(row: Mapping[str, Any], where: str) -> Record:
    """Read a row that is a program's task: no column of it has to be there."""
    row = _plain_values(row)
    known = {"prompt", "data_source", "extra_info", "images", *TRUTH_COLUMNS}
    return Record(
        prompt=[] if row.get("prompt") is None else _parse_prompt(row["prompt"], where),
        ground_truth=_truth_if_any(row),
        data_source=_source(row, where),
        extra_info=read_map(row.get("extra_info"), "extra_info", where),
        images=read_images(row.get("images"), where),
        where=where,
        columns={name: value for name, value in row.items() if name not in known},
    )


def read_map(value: Any, column: str, where: str) -> dict[str, Any]:
    """Return the map that stands in a column: as one, as JSON text, or as a list of its entries.

    None and what programs write for it is an empty one. Raises DataError for anything else.
    """
    found = _from_json(value, "{")
    if isinstance(found, Mapping):
        return {str(key): item for key, item in cast("Mapping[Any, Any]", found).items()}
    if _is_absent(found):
        return {}
    entries = cast("list[Any]", found) if isinstance(found, list) else []
    if all(isinstance(one, list) and len(cast("list[Any]", one)) == 2 for one in entries):
        if entries:  # parquet's map type
            return {str(key): item for key, item in entries}
        if isinstance(found, list):
            return {}
    raise DataError(
        f"column {column} of {where} is {shorten(value)}",
        hint="write a map there, or one as JSON text",
    )


def read_images(value: Any, where: str) -> list[Any]:
    """Return the images of a row: a list of them, or a single one.

    An image is the bytes of a file, a map that holds them under `bytes`, or a data URL; a list may
    stand as JSON text. Raises DataError for what is no image, naming its place.
    """
    found = _from_json(value, "[{")
    if _is_absent(found):
        return []
    images = cast("list[Any]", found) if isinstance(found, list) else [found]
    for number, image in enumerate(images):
        try:
            encoded_image({"image": image})
        except DataError as error:
            raise DataError(
                f"image {number} in column images of {where}: {error.message}", hint=error.hint
            ) from error
    return images


def _source(row: Mapping[str, Any], where: str) -> str:
    value = row.get("data_source")
    if _is_absent(value):
        return ""
    if not isinstance(value, str | int | float):
        raise DataError(
            f"column data_source of {where} is {shorten(value)}",
            hint="name there where the row comes from, as a text",
        )
    return str(value)


def _is_absent(value: Any) -> bool:
    """Whether a column that may be empty is: null, NaN, or what programs write for them."""
    return not isinstance(value, list | Mapping | bytes) and is_no_answer(value)


def _from_json(value: Any, openings: str) -> Any:
    """Return what a text holds as JSON where it begins like that; anything else as it is."""
    if not isinstance(value, str) or not value.strip().startswith(tuple(openings)):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


def _plain_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with lists and numbers of Python in place of NumPy's, as pandas gives them."""
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    if callable(to_list := getattr(value, "tolist", None)):  # NumPy's, which is not needed here
        return _plain(to_list())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return value


def _truth_if_any(row: Mapping[str, Any]) -> Any:
    """Return the gold answer of a row; None where it has none."""
    reward_model = _from_json(row.get("reward_model"), "{")
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
    reward_model = _from_json(row.get("reward_model"), "{")
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
