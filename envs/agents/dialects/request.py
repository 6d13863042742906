"""What a program asks of a model, whichever API it speaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, cast

from ....schemas.output_format import OutputFormat
from ....schemas.wire.errors import DataError, TinkermqError
from ....schemas.wire.images import encoded_image
from ..messages import CanonicalMessage, Picture, joined
from .neutral import asks_nothing

_TEXT, _FLAG, _LIST = (str, NoneType), (bool, NoneType), (list, NoneType)
"""Made once: each call of the model is read field by field."""


class RequestError(TinkermqError):
    """A request that cannot be answered as it stands; names the place."""

    code = "request"
    status = 400

    def __init__(self, message: str, *, param: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param
        """Which field: `messages[3].content`."""


def text_of(error: TinkermqError) -> str:
    """Return what an error says, remedy included."""
    return f"{error.message}. {error.hint}" if error.hint else error.message


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One call of the model, before it is attached to the calls before it."""

    messages: tuple[CanonicalMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """As chat templates take them."""
    num_choices: int = 1
    max_tokens: int | None = None
    format: OutputFormat | None = None
    """The form that an answer must have; None: any."""
    top_logprobs: int | None = None
    """Tell each token's text and log-prob, and so many of the likeliest; None: neither."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """Whether a stream of Chat Completions ends with its token counts."""
    is_prefill: bool = False
    """Whether the last message is the beginning of the answer."""
    previous: str = ""
    """Id of the response that the messages follow; empty: they are the whole history."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the tools that take any text, where the answer names them so."""
    echo: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What an answer tells of its request, where its API does so."""
    model: str = ""
    """As the program names it, which decides nothing."""
    overruled: Mapping[str, Any] | None = None
    """Sampling that the program asks for; what the job says goes before it."""
    without_effect: tuple[str, ...] = ()
    """Fields that were sent and change nothing, to be told once."""


class Fields:
    """A JSON object that is read field by field, so that what nobody read can be told."""

    def __init__(self, value: Any, place: str = "") -> None:
        """Read an object; `place` names it in errors."""
        if not isinstance(value, dict):
            raise RequestError(f"{place or 'the body'} is no object", param=place)
        self._value = cast("dict[str, Any]", value)
        self._place = place
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """Return a field's name from the body on."""
        return f"{self._place}.{key}" if self._place else key

    def any(self, key: str) -> Any:
        """Return a field as it is, None where it is missing."""
        self._read.add(key)
        return self._value.get(key)

    def text(self, key: str, default: str = "") -> str:
        """Return a text; null and missing are the default."""
        value = self.any(key)
        if not isinstance(value, _TEXT):
            raise self._wrong(key, "a text")
        return default if value is None else value

    def flag(self, key: str) -> bool:
        """Return a truth value; null and missing are false."""
        value = self.any(key)
        if not isinstance(value, _FLAG):
            raise self._wrong(key, "true or false")
        return bool(value)

    def count(self, key: str, least: int = 1) -> int | None:
        """Return a whole number of at least `least`; None where it is missing."""
        value = self.any(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"a whole number of at least {least}")
        return value

    def items(self, key: str) -> list[Any]:
        """Return a list; null and missing are empty."""
        value = self.any(key)
        if not isinstance(value, _LIST):
            raise self._wrong(key, "a list")
        return cast("list[Any]", value or [])

    def objects(self, key: str) -> "list[Fields]":
        """Return a list of objects."""
        return [
            Fields(value, f"{self.name(key)}[{number}]")
            for number, value in enumerate(self.items(key))
        ]

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a text or a list of texts as texts."""
        if isinstance(value := self.any(key), str):
            return (value,) if value else ()
        values = self.items(key)
        if not all(isinstance(text, str) for text in values):
            raise self._wrong(key, "a text or a list of texts")
        return tuple(text for text in values if text)

    def unread(self) -> tuple[str, ...]:
        """Return the fields that were sent, ask for something, and were not read."""
        return tuple(
            self.name(key)
            for key, value in self._value.items()
            if key not in self._read and not asks_nothing(self.name(key), value)
        )

    def _wrong(self, key: str, wanted: str) -> RequestError:
        name = self.name(key)
        return RequestError(f"{name} must be {wanted}, and is {self._value[key]!r:.60}", param=name)


TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")


def content_of(fields: Fields, key: str = "content") -> tuple[str | Picture, ...]:
    """Read texts and images: a text, null, or a list of parts."""
    value = fields.any(key)
    if isinstance(value, _TEXT):
        return (value,) if value else ()
    return joined(part_of(part) for part in fields.objects(key))


def part_of(part: Fields) -> str | Picture:
    """Read a part of a message: a text or an image."""
    kind = part.text("type", "text")
    if kind in TEXT_PARTS:
        return part.text("refusal" if kind == "refusal" else "text")
    if kind in ("image_url", "input_image"):
        return picture_of({"type": "image_url", "image_url": _url(part)}, part)
    raise RequestError(
        f"{part.name('type')} is {kind!r}, and this model takes texts and images",
        param=part.name("type"),
    )


def picture_of(image: Mapping[str, Any], part: Fields) -> Picture:
    """Return the image of a part; RequestError for one that is not sent along."""
    try:
        return Picture(encoded_image(image))
    except DataError as error:
        raise RequestError(error.message, param=part.name("type"), hint=error.hint) from error


def _url(part: Fields) -> Any:
    value = part.any("image_url")
    return cast("Any", value) if isinstance(value, dict) else {"url": value}


def function_tool(name: str, description: str, parameters: Any) -> dict[str, Any]:
    """Return a tool as chat templates take it."""
    function: dict[str, Any] = {"name": name, "description": description}
    return {"type": "function", "function": {**function, "parameters": parameters or NO_PARAMETERS}}


NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
FREE_TEXT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a tool that takes any text."""


def tools_of(fields: Fields, *, nested: bool) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    """Read OpenAI's tools: functions and those that take any text; also name what is left out.

    `nested`: what a tool is stands in a field that is called like its type.
    """
    tools: list[dict[str, Any]] = []
    left_out: list[str] = []
    for tool in fields.objects("tools"):
        kind = tool.text("type", "function")
        if kind not in ("function", "custom"):
            left_out.append(f"tools: {kind}")
            continue
        told = Fields(tool.any(kind), tool.name(kind)) if nested else tool
        parameters = FREE_TEXT if kind == "custom" else told.any("parameters")
        tools.append(function_tool(told.text("name"), told.text("description"), parameters))
    return tuple(tools), left_out


def sampling_of(fields: Fields, names: Sequence[str]) -> dict[str, Any]:
    """Read what the job decides in the program's place."""
    told = {name: fields.any(name) for name in names}
    return {name: value for name, value in told.items() if not asks_nothing(name, value)}
