"""A request to a model in one form for all APIs.

The reader of an API (`chat.py`, `responses.py`, `messages.py`) reads a body field by field and
returns a `ModelRequest`. `without_effect` names the fields that it did not read, except labels and
fields whose value is the default, which client libraries and frameworks send with every request. A
value that would change the answer is always named, `null` never.

This module also reads the required form of the answer (`response_format`, Responses' `text.format`,
Messages' `output_config.format`, `tool_choice`). It checks schemas at once, so that an error names
the place.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from ..agent import MAX_CALL_CHOICES, CallRequest
from ..chat_messages import NOT_SHOWN, template_tool
from ..generation import (
    EPISODE_SAMPLING,
    MAX_COUNT,
    MAX_SEED,
    MAX_TEMPERATURE,
    SAMPLING,
    Decoding,
)
from ..infer import ChatRequest, CompletionRequest
from ..output_format import (
    ANY_OBJECT,
    MAX_PENALTY,
    MAX_REPETITION,
    OutputFormat,
    SchemaError,
    check_schema,
)
from ..wire.codec import read_json
from ..wire.errors import DataError, MessageError, TinkermqError, did_you_mean
from ..wire.images import encoded_image
from ..wire.message import requirement
from .canonical import CanonicalCall, ModelMessage, joined
from .neutral import asks_nothing, is_label

_TEXT, _FLAG, _LIST = (str, NoneType), (bool, NoneType), (list, NoneType)
"""Created once, since each request is read field by field."""


T = TypeVar("T")
_SHOWN = 100
_ALIKE = 0.75
"""Similarity of a misspelt field: of other APIs' fields, which are not meant, few are so near."""


class RequestError(TinkermqError):
    """A request is invalid or unsupported; names the field."""

    code = "request"
    status = 400

    def __init__(self, message: str, *, param: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param
        """The field, such as `messages[3].content`."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request of any API."""

    messages: tuple[ModelMessage, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    """In the form of chat templates."""
    prompts: tuple[str | list[int], ...] = ()
    """Of legacy completions, instead of messages: texts or token ids to continue."""
    prompt_logprobs: int | None = None
    """Return the log-probs of the prompts' tokens, and so many of the likeliest; None: neither."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to texts of `prompts`."""
    num_choices: int = 1
    """Answers per prompt."""
    max_tokens: int | None = None
    format: OutputFormat | None = None
    """Required form of an answer; None: any."""
    calls_one: bool = False
    """An answer may have one tool call at most."""
    repeats_prompt: bool = False
    """An answer of legacy completions begins with its prompt."""
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Variables of the chat template, as sent in `chat_template_kwargs`."""
    effort: str = ""
    """How much to think; empty: not said."""
    thinks: bool | None = None
    """Think or not; None: not said."""
    served_only: Mapping[str, str] = field(default_factory=dict[str, str])
    """The names in the API of the fields above that were sent: they have no effect in episodes."""
    top_logprobs: int | None = None
    """Return each token's text and log-prob, and so many of the likeliest; None: neither."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """A stream of Chat Completions ends with its token counts."""
    return_token_ids: bool = False
    """Return token ids, in the fields that vLLM has."""
    is_prefill: bool = False
    """The last message is the beginning of the answer."""
    previous: str = ""
    """Id of the response that the messages follow; empty: they are the whole history."""
    custom_tools: frozenset[str] = frozenset()
    """Names of tools that take any text."""
    echo: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the request that the answer repeats."""
    model: str = ""
    """Name of the model."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling options as sent."""
    without_effect: tuple[str, ...] = ()
    """Fields that were sent and have no effect, though their value asks for one."""
    ignored: tuple[str, ...] = ()
    """Such fields within tools: servers take them too, since clients send them unasked."""
    known: tuple[str, ...] = ()
    """The names of the fields that were read."""


def json_of(raw: bytes) -> Any:
    """Return the JSON value of a body; RequestError if it is invalid."""
    try:
        return read_json(raw)
    except MessageError as error:
        raise RequestError(f"the body cannot be read: {error.message}") from error


def refused_field(
    name: str, known: Iterable[str], *, message: str = "", hint: str = ""
) -> RequestError:
    """Return the error of a field that is not supported.

    Without a `hint` it names the field of `known` that is meant, or says to leave it out.
    """
    name = name[:_SHOWN]
    message = message or f"the parameter {name!r} is not supported here"
    hint = hint or did_you_mean(name.lower(), known, otherwise="leave it out", similarity=_ALIKE)
    return RequestError(message, param=name, hint=hint)


class Fields:
    """Reads a JSON object field by field, and records which fields were not read."""

    def __init__(self, value: Any, place: str = "") -> None:
        """Read an object; `place` names it in errors."""
        if not isinstance(value, dict):
            raise RequestError(f"{place or 'the body'} must be an object", param=place)
        self._value = cast("dict[str, Any]", value)
        self._place = place
        self._read: set[str] = set()
        self._inner: dict[str, Fields] = {}

    def name(self, key: str) -> str:
        """Return a field's full name, from the body on."""
        return f"{self._place}.{key}" if self._place else key

    def any(self, key: str) -> Any:
        """Return a field's value; None if it is missing."""
        self._read.add(key)
        return self._value.get(key)

    def inner(self, key: str) -> "Fields":
        """Return the object in a field, whose fields count as this one's; empty if missing."""
        if key not in self._inner:
            self._inner[key] = Fields(self.any(key) or {}, self.name(key))
        return self._inner[key]

    def text(self, key: str, default: str = "") -> str:
        """Return a text; the default if it is null or missing."""
        value = self.any(key)
        if not isinstance(value, _TEXT):
            raise self._wrong(key, "a text")
        return default if value is None else value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a Boolean; the default if it is null or missing."""
        value = self.any(key)
        if not isinstance(value, _FLAG):
            raise self._wrong(key, "true or false")
        return default if value is None else value

    def count(self, key: str, least: int = 1) -> int | None:
        """Return an integer of at least `least`; None if it is null or missing."""
        value = self.any(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"an integer ≥ {least}")
        return value

    def items(self, key: str) -> list[Any]:
        """Return a list; empty if it is null or missing."""
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

    def extra(self) -> dict[str, Any]:
        """Return the fields of a message that were not read, which a chat template may show."""
        return {
            key: value
            for key, value in self._value.items()
            if key not in self._read and value is not None and key not in NOT_SHOWN
        }

    def unread(self) -> tuple[str, ...]:
        """Return the fields that were not read and whose value is not a default."""
        own = (
            self.name(key)
            for key, value in self._value.items()
            if key not in self._read and not asks_nothing(self.name(key), value)
        )
        return (*own, *(name for inner in self._inner.values() for name in inner.unread()))

    def known(self) -> tuple[str, ...]:
        """Return the names of the fields that were read."""
        inner = (name for inner in self._inner.values() for name in inner.known())
        return (*map(self.name, self._read), *inner)

    def refuse_unread(self) -> None:
        """Raise RequestError for a field that was not read and whose value is not a default."""
        for name in self.unread():
            raise refused_field(name, self.known())

    def missing(self, key: str, message: str) -> RequestError:
        """Return the error of a required field, with a misspelt one that was sent instead."""
        near = difflib.get_close_matches(key, self._value.keys() - {key}, n=1, cutoff=_ALIKE)
        hint = f"{self.name(near[0])!r} was sent: did you mean {key}?" if near else ""
        return RequestError(message, param=self.name(key), hint=hint)

    def _wrong(self, key: str, allowed: str) -> RequestError:
        name = self.name(key)
        message = f"{name} must be {allowed}, and is {self._value[key]!r:.60}"
        return RequestError(message, param=name)


TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")


def read_content(fields: Fields, key: str = "content") -> tuple[str | bytes, ...]:
    """Read texts and images: a text, null, or a list of parts."""
    value = fields.any(key)
    if isinstance(value, _TEXT):
        return (value,) if value else ()
    return joined(read_part(part) for part in fields.objects(key))


def read_part(part: Fields) -> str | bytes:
    """Read a part of a message: a text or an image."""
    kind = part.text("type", "text")
    if kind in TEXT_PARTS:
        return part.text("refusal" if kind == "refusal" else "text")
    if kind in ("image_url", "input_image"):
        return read_picture({"type": "image_url", "image_url": _url(part)}, part)
    raise RequestError(
        f"{part.name('type')} is {kind!r}, only texts and images are supported",
        param=part.name("type"),
    )


def read_picture(image: Mapping[str, Any], part: Fields) -> bytes:
    """Return the image of a part; RequestError for one that is not part of the request."""
    try:
        return encoded_image(image)
    except DataError as error:
        raise RequestError(error.message, param=part.name("type"), hint=error.hint) from error


def _url(part: Fields) -> Any:
    value = part.any("image_url")
    return cast("Any", value) if isinstance(value, dict) else {"url": value}


def function_tool(
    name: str, description: str, parameters: Any, returned: Any = None
) -> dict[str, Any]:
    """Return a tool in the form of chat templates."""
    function = {"name": name, "description": description, "parameters": parameters}
    return template_tool({"function": {**function, "return": returned}})


def without_effect_in(*parts: Fields) -> Iterator[str]:
    """Yield the fields of a tool that were not read, as `tools.strict`."""
    for part in parts:
        for name in part.unread():
            key = name.rpartition(".")[2]
            if not is_label(key):
                yield f"tools.{key}"


FREE_TEXT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters of a tool that takes any text."""


@dataclass(frozen=True, slots=True)
class ReadTools:
    """The tools of a request."""

    shown: tuple[dict[str, Any], ...] = ()
    """In the form of chat templates."""
    custom: frozenset[str] = frozenset()
    """Names of those that take any text."""
    left_out: tuple[str, ...] = ()
    """Those of unsupported kinds."""
    ignored: tuple[str, ...] = ()
    """Fields in them that have no effect."""


def read_openai_tools(fields: Fields, *, nested: bool) -> ReadTools:
    """Read OpenAI's tools: functions and tools that take any text.

    `nested`: a tool's definition is in a field named after its type.
    """
    tools: list[dict[str, Any]] = []
    left_out: list[str] = []
    ignored: list[str] = []
    custom: set[str] = set()
    for tool in fields.objects("tools"):
        kind = tool.text("type", "function")
        if kind not in ("function", "custom"):
            left_out.append(f"tools: {kind}")
            continue
        function = Fields(tool.any(kind), tool.name(kind)) if nested else tool
        name = function.text("name")
        if kind == "custom":
            custom.add(name)
        parameters = FREE_TEXT if kind == "custom" else function.any("parameters")
        returned = function.any("return")
        tools.append(function_tool(name, function.text("description"), parameters, returned))
        ignored += without_effect_in(tool, *([function] if nested else []))
    return ReadTools(tuple(tools), frozenset(custom), tuple(left_out), tuple(ignored))


def custom_call(name: str, text: str, call_id: str) -> CanonicalCall:
    """Return a call of a tool that takes any text."""
    return CanonicalCall(name, json.dumps({"input": text}, ensure_ascii=False), call_id)


def custom_input(call: CanonicalCall) -> str:
    """Return the text of a call of a tool that takes any text."""
    value = call.value
    return str(value.get("input", "")) if isinstance(value, dict) else ""


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names that an API gives to the fields that all APIs have; empty: it has none."""

    max_tokens: tuple[str, ...] = ("max_tokens",)
    """Of several, and of several `formats`, the first that was sent counts."""
    effort: str = ""
    """Path of how much to think."""
    least_tokens: int = 1
    formats: tuple[str, ...] = ("response_format",)
    """Paths of the required form of an answer."""
    stop: str = "stop"
    num_choices: str = "n"


def read_shared(
    fields: Fields,
    names: FieldNames,
    sent: ReadTools | None = None,
    *,
    single: str = "",
    without_effect: Iterable[str] = (),
    **own: Any,
) -> ModelRequest:
    """Read the fields that all APIs have; return them with those that an API has of its `own`.

    `sent` are the tools; None: the API has none. `single` is the name of the field that limits an
    answer to one call, if it was sent. `without_effect` names other fields without effect. Raises
    RequestError naming a field.
    """
    tools, choice = sent or ReadTools(), ToolChoice()
    if sent is not None:
        choice = read_tool_choice(fields.any("tool_choice"), tools.shown, single=single)
    schemas = (read_format(*_at(fields, path)) for path in names.formats)
    limits = [fields.count(name, names.least_tokens) for name in names.max_tokens]
    differing = [limit for limit in limits if limit is not None and limit != _first(limits)]
    chosen = _first(schemas)
    required = output_format(chosen, choice, tools.shown)
    if (other := read_structure(fields)) is not None:
        if required is not None:
            raise RequestError(
                "an answer has one form: structured_outputs were sent beside another one",
                param="structured_outputs",
                hint="leave out response_format, text.format, output_config.format or tool_choice",
            )
        required = other
    shared: dict[str, Any] = {
        "tools": () if choice.hides_tools else tools.shown,
        "ignored": tuple(dict.fromkeys(tools.ignored)),
        "custom_tools": tools.custom,
        "format": required,
        "calls_one": choice.is_single,
        "max_tokens": _first(limits),
        "num_choices": (names.num_choices and fields.count(names.num_choices)) or 1,
        "stop": fields.texts(names.stop) if names.stop else (),
        "stream": fields.flag("stream"),
        "model": fields.text("model"),
        "sampling": _read_sampling(fields),
        **(_read_reasoning(fields, names.effort) if names.effort else {}),
        "return_token_ids": fields.flag("return_token_ids"),
    }
    unread = (*tools.left_out, *without_effect, *fields.unread(), *choice.without_effect)
    if differing:
        unread += (names.max_tokens[-1],)
    return ModelRequest(**{**shared, **own}, without_effect=unread, known=fields.known())


def _first(values: Iterable[T | None]) -> T | None:
    """Return the first value that is not None; later ones are not read."""
    return next((value for value in values if value is not None), None)


def _at(fields: Fields, path: str) -> tuple[Any, str]:
    """Return the value at a path (`text.format`), and the path."""
    *outer, key = path.split(".")
    for name in outer:
        fields = fields.inner(name)
    return fields.any(key), path


def _read_sampling(fields: Fields) -> dict[str, Any]:
    """Return the sampling options as sent, without those that are the default."""
    values = {name: fields.any(name) for name in SAMPLING}
    return {
        name: value
        for name, value in values.items()
        if not (value is None or (not isinstance(value, str) and asks_nothing(name, value)))
    }


def _read_reasoning(fields: Fields, effort: str) -> dict[str, Any]:
    """Return what is said of reasoning and of the template's variables; `effort` is a path."""
    *outer, key = effort.split(".")
    holder = fields.inner(outer[0]) if outer else fields
    read: dict[str, Any] = {"effort": holder.text(key)}
    read["template_options"] = fields.any("chat_template_kwargs") or {}
    if not isinstance(read["template_options"], dict):
        raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    if isinstance(thinks := fields.any("thinking"), bool):
        read["thinks"] = thinks
    else:
        kind = fields.inner("thinking").text("type")
        read["thinks"] = {"": None, "disabled": False}.get(kind, True)
    names = {"effort": effort, "template_options": "chat_template_kwargs", "thinks": "thinking"}
    sent = {name: place for name, place in names.items() if read[name] not in ("", {}, None)}
    return {**read, "served_only": sent}


_STRUCTURES = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice"}
_STRUCTURES["grammar"] = "guided_grammar"
"""Fields of vLLM's `structured_outputs`, and their older names."""


def read_structure(fields: Fields) -> OutputFormat | None:
    """Return the form that vLLM's `structured_outputs`, or an older field, requires; None: any."""
    outer = fields.inner("structured_outputs")
    sent = [
        (place, name, value)
        for name, older in _STRUCTURES.items()
        for holder, key in ((outer, name), (fields, older))
        for place, value in [(holder.name(key), holder.any(key))]
        if value is not None
    ]
    if outer.flag("json_object"):
        sent.append((outer.name("json_object"), "json", dict(ANY_OBJECT)))
    if not sent:
        return None
    (place, name, value), *others = sent
    if others:
        raise RequestError(f"an answer has one form: {place} and {others[0][0]}", param=place)
    if name == "json":
        schema = _schema_of(value, place)
        _check(schema, place)
        return OutputFormat(json_schema=schema)
    wrong = not isinstance(value, str) or not value
    if name == "choice":
        texts = cast("list[Any]", value) if isinstance(value, list) else []
        wrong = not (texts and all(isinstance(text, str) and text for text in texts))
    if wrong:
        kind = "a list of texts" if name == "choice" else "a text"
        raise RequestError(f"{place} must be {kind}, and is {value!r:.60}", param=place)
    try:
        return OutputFormat.model_validate({"choices" if name == "choice" else name: value})
    except ValidationError as error:
        raise RequestError(f"{place} {requirement(error.errors()[0])}", param=place) from error


def _schema_of(value: Any, place: str) -> Any:
    """Return a schema that may be sent as JSON's text."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except MessageError as error:
        raise RequestError(f"{place} is not JSON: {error.message}", param=place) from error


_NO_CHOICE = (None, "auto", "none")
_NAMED = ("function", "custom", "tool")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The meaning of a `tool_choice`."""

    functions: tuple[str, ...] = ()
    """Tools of which at least one must be called; empty: calls are optional."""
    is_single: bool = False
    """Only one tool is called."""
    hides_tools: bool = False
    """The model is shown no tools."""
    without_effect: tuple[str, ...] = ()
    """Fields that ask for something unsupported."""


def read_tool_choice(
    value: Any, tools: Sequence[Mapping[str, Any]], *, single: str = ""
) -> ToolChoice:
    """Read the `tool_choice` of any API; RequestError if it names a tool that is not in `tools`.

    `single` is the name of the field that limits an answer to one call; empty: it was not sent.
    """
    is_single = bool(single)
    names = tuple(str(function_of(tool).get("name")) for tool in tools)
    if isinstance(value, dict) and cast("dict[str, Any]", value).get("type") in ("auto", "none"):
        value = cast("dict[str, Any]", value)["type"]
    if value in _NO_CHOICE:
        has_no_effect = is_single and bool(tools) and value != "none"
        return ToolChoice((), is_single, value == "none", (single,) if has_no_effect else ())
    if value in ("required", "any") and names:
        return ToolChoice(tuple(dict.fromkeys(names)), is_single)
    if not isinstance(value, dict) or not names:
        return ToolChoice(without_effect=("tool_choice",))
    fields = Fields(value, "tool_choice")
    kind = fields.text("type")
    nested = fields.any(kind)
    choice = Fields(nested, fields.name(kind)) if isinstance(nested, dict) else fields
    if kind in _NAMED:
        return ToolChoice(_known((choice.text("name"),), names), is_single=True)
    if kind == "allowed_tools" and choice.text("mode") == "required" and choice.items("tools"):
        allowed = [
            Fields(tool.any("function"), tool.name("function")) if tool.any("function") else tool
            for tool in choice.objects("tools")
        ]
        return ToolChoice(_known([tool.text("name") for tool in allowed], names), is_single)
    if kind in ("any", "required"):
        return read_tool_choice(kind, tools, single=single)
    return ToolChoice(without_effect=("tool_choice",))


def _known(called: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    for name in called:
        if name not in names:
            raise RequestError(
                f"tool_choice names {name!r:.80}, which is not among the tools",
                param="tool_choice",
                hint=did_you_mean(name, names, otherwise="name one of `tools`"),
            )
    return tuple(dict.fromkeys(called))


def read_format(value: Any, place: str) -> dict[str, Any] | bool | None:
    """Return the schema that a `response_format` or its equivalent at `place` requires, or None.

    Raises RequestError, naming the place, for a malformed or unsupported one.
    """
    if value is None:
        return None
    fields = Fields(value, place)
    kind = fields.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return dict(ANY_OBJECT)
    if kind != "json_schema":
        raise RequestError(
            f"{fields.name('type')} is {kind!r:.80}",
            param=fields.name("type"),
            hint="give json_schema, json_object or text",
        )
    nested = fields.any("json_schema")
    holder = fields if nested is None else Fields(nested, fields.name("json_schema"))
    schema = holder.any("schema")
    if schema is None:
        return dict(ANY_OBJECT)
    _check(schema, holder.name("schema"))
    return cast("dict[str, Any] | bool", schema)


def output_format(
    schema: dict[str, Any] | bool | None,
    choice: ToolChoice,
    tools: Sequence[Mapping[str, Any]],
) -> OutputFormat | None:
    """Return the required form of an answer; None: any.

    If a format is required and tools may be called, the answer has either form. Raises RequestError
    for tool parameters that cannot be enforced.
    """
    functions = choice.functions
    if schema is not None and not functions and not choice.hides_tools:
        functions = tuple(str(function_of(tool).get("name")) for tool in tools)
    elif functions:
        schema = None
    if schema is None and not functions:
        return None
    for number, tool in enumerate(tools):
        function = function_of(tool)
        if function.get("name") in functions and function.get("parameters"):
            _check(function["parameters"], f"tools[{number}].function.parameters")
    return OutputFormat(
        json_schema=schema,
        functions=list(functions),
        is_single=bool(functions) and choice.is_single,
    )


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool that is in the form of chat templates."""
    inner = tool.get("function")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else tool


def _check(schema: Any, place: str) -> None:
    try:
        check_schema(schema, place)
    except SchemaError as error:
        raise RequestError(error.message, param=error.place, hint=error.hint) from error


# -- the request as a message ----------------------------------------------------------------------

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (1e-6, 1.0),
    "top_k": (0, MAX_COUNT - 1),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": (0.1, MAX_REPETITION),
}
"""Minimum and maximum of an episode's sampling options."""
_NAMES = {
    ("", "num_choices"): "n",
    ("", "template_options"): "chat_template_kwargs",
    ("chat", "effort"): "reasoning_effort",
    ("responses", "effort"): "reasoning.effort",
    ("messages", "effort"): "output_config.effort",
    ("completions", "prompts"): "prompt",
    ("completions", "top_logprobs"): "logprobs",
    ("messages", "stop"): "stop_sequences",
    ("responses", "max_tokens"): "max_output_tokens",
}
"""Names of message fields in the APIs, if they differ."""


def call_request(
    model_request: ModelRequest,
    request: str,
    *,
    previous: int | None = None,
    is_retry: bool = False,
) -> CallRequest:
    """Return a program's call as a message; ValidationError for a value out of bounds.

    The job decides on sampling: options that cannot be used are left out or moved into their
    bounds.
    """
    if (num := model_request.num_choices) > MAX_CALL_CHOICES:
        raise RequestError(f"the parameter 'n' is {num}, over {MAX_CALL_CHOICES}", param="n")
    sampling: dict[str, Any] = {
        name: min(max(least, value), most)
        for name, (least, most) in _BOUNDS.items()
        if isinstance(value := model_request.sampling.get(name), int | float)
    }
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    if isinstance(seed := model_request.sampling.get("seed"), int):
        sampling["seed"] = seed % MAX_SEED
    unknown = sorted(model_request.sampling.keys() - EPISODE_SAMPLING)
    return CallRequest(
        **_shared_fields(model_request, request, sampling),
        **_conversation_fields(model_request),
        is_prefill=model_request.is_prefill,
        previous=previous,
        without_effect=[
            *model_request.without_effect,
            *model_request.ignored,
            *unknown,
            *_served_only(model_request),
        ],
        is_retry=is_retry,
    )


def _served_only(model_request: ModelRequest) -> list[str]:
    """Return the fields without effect in episodes; what thinks without being asked to is none."""
    return [
        place
        for name, place in model_request.served_only.items()
        if not asks_nothing(place, getattr(model_request, name))
    ]


def served_request(model_request: ModelRequest, request: str) -> ChatRequest | CompletionRequest:
    """Return the request to a server; ValidationError for a value that is out of bounds."""
    shared = _shared_fields(model_request, request, _served_sampling(model_request.sampling))
    if model_request.prompts:
        return CompletionRequest(
            **shared,
            prompts=list(model_request.prompts),
            prompt_logprobs=model_request.prompt_logprobs,
            add_special_tokens=model_request.add_special_tokens,
            echo=model_request.repeats_prompt,
        )
    return ChatRequest(
        **shared,
        **_conversation_fields(model_request),
        template_options=dict(model_request.template_options),
        effort=model_request.effort,
        thinks=model_request.thinks,
        prompt_logprobs=model_request.prompt_logprobs,
    )


def _shared_fields(
    model_request: ModelRequest, request: str, sampling: Mapping[str, Any]
) -> dict[str, Any]:
    decoding = Decoding(
        max_tokens=model_request.max_tokens,
        stop=list(model_request.stop),
        num_choices=model_request.num_choices,
        format=model_request.format,
        top_logprobs=model_request.top_logprobs or 0,
        **sampling,
    )
    return {
        "request": request,
        "decoding": decoding,
        "stream": model_request.stream,
        "logprobs": model_request.top_logprobs is not None,
        "token_ids": model_request.return_token_ids,
    }


def _conversation_fields(model_request: ModelRequest) -> dict[str, Any]:
    return {
        "messages": list(model_request.messages),
        "tools": [dict(tool) for tool in model_request.tools],
    }


def _served_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling options; any integer is a seed, and a `top_k` of -1 keeps all tokens."""
    values = dict(sampling)
    if isinstance(values.get("seed"), int):
        values["seed"] %= MAX_SEED
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return values


def bounds_error(error: ValidationError, api: str) -> RequestError:
    """Return the error of a request that cannot be sent, with the field's name in the API."""
    problem = error.errors()[0]
    place = str(problem["loc"][0]) if problem["loc"] else ""
    param = _NAMES.get((api, place)) or _NAMES.get(("", place), place)
    return RequestError(f"the parameter {param!r} {requirement(problem)}", param=param)
