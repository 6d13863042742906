"""Reads chat messages and tools of any origin into the form of chat templates. Pure.

Rows of data, prompts of games and requests of programs spell one message in many ways: a call's
arguments as JSON text or as an object, absent fields as null, a call with or without its type, the
legacy `function_call`. This is the only module that reads them. It reads its own results unchanged.

- A message has a role and a content: a text, or a list of parts if some are images. With calls or
  reasoning the content may be null, which becomes the empty text. A tool result that is not text
  becomes JSON. `developer` becomes `system`; `function` and `ipython` become `tool`.
- `tool_calls` is a list of `{"type": "function", "function": {"name": …, "arguments": {…}}}`. The
  arguments are an object; texts within them that look like JSON stay texts.
- Null means absent in a message, a call and a tool. It is a value within arguments, and where a
  JSON schema has values (`default`, `const`, `enum`, `examples`). The structs of a parquet file
  have the keys of all rows; their nulls are removed when the file is read (`data.unpack`).
"""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar, cast

from .wire.codec import read_json
from .wire.errors import DataError
from .wire.images import encoded_image

T = TypeVar("T")
Messages: TypeAlias = list[dict[str, Any]]

LABELS = frozenset(
    {
        "cache_control",
        "cache_salt",
        "guided_decoding_backend",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "user",
        "user_id",
    }
)
"""Fields that label or speed up a request, and never change an answer."""
NOT_SHOWN = LABELS | {"id", "phase", "status", "type"}
"""Fields of a message that belong to an API, and that no template shows."""

_ROLES = {"developer": "system", "function": "tool", "ipython": "tool"}
_TEXTS = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")
_IMAGES = ("image", "image_url", "input_image")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of an answer's reasoning; the first is ours."""
_CONTENT_FIELDS = frozenset({"content", "tool_calls", "function_call", "refusal", *REASONING_KEYS})
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a JSON schema that map names to schemas."""
_VALUES = ("default", "const", "enum", "example", "examples")
"""Keywords of a JSON schema whose values may be null."""
_OF_FUNCTION = frozenset({"name", "arguments", "description", "strict"})
_SHOWN = 80
_CALL = 'a call is {"type": "function", "function": {"name": …, "arguments": {…}}}'


class UnreadableMessageError(DataError):
    """A malformed chat message or tool; names the place."""

    def __init__(self, message: str, *, place: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.place = place
        """The field, such as `messages[3].content[0].type`."""


@dataclass(frozen=True)
class Origin:
    """The source of messages, for errors."""

    column: str = "messages"
    """Column of a row, or parameter of a request."""
    where: str = ""
    """File and row; empty for a request."""
    is_request: bool = False
    """A history that a program sends: its messages may be empty, the arguments of its calls may be
    any text that the model wrote, and its images are decoded."""
    keeps_text: bool = False
    """Arguments that are the JSON text of an object stay texts."""

    @property
    def of_messages(self) -> str:
        """Text that follows a message's number in errors."""
        if self.is_request:
            return ""
        words = "the prompt" if self.column == "prompt" else self.column
        column = "" if self.column == "messages" else f" of {words}"
        return f"{column} of {self.where}" if self.where else column

    def error(self, path: str, value: Any, problem: str, hint: str) -> UnreadableMessageError:
        """Return the error of a field; `path` is its path within the column."""
        of = f" of {self.where}" if self.where else ""
        place = f"{self.column}{path}"
        message = f"{place}{of} is {shorten(value)}{problem}"
        return UnreadableMessageError(message, place=place, hint=hint)

    def message_error(
        self, number: int, problem: str, *, path: str = "", hint: str = ""
    ) -> UnreadableMessageError:
        """Return the error of a message; `number` is its index."""
        place = f"{self.column}[{number}]{path}"
        text = f"message {number}{self.of_messages} {problem}"
        return UnreadableMessageError(text, place=place, hint=hint)


def read_conversation(value: Any, origin: Origin) -> Messages:
    """Return chat messages in the form of chat templates; `value` may be JSON text.

    Raises UnreadableMessageError, a DataError, which names file, row and column if there are any.
    """
    try:
        messages = _maps(plain(value))
        if not messages or not (origin.is_request or _have_roles(messages)):
            hint = "a conversation is a list of chat messages with role and content"
            raise origin.error("", value, "", hint)
        return [_Message(fields, number, origin).read() for number, fields in enumerate(messages)]
    except RecursionError as error:
        raise _too_deep(origin) from error


def _too_deep(origin: Origin) -> UnreadableMessageError:
    return origin.error("", "…", ", and is nested too deeply", "flatten it")


def are_messages(value: Any) -> bool:
    """Whether a value, or its JSON text, is a list of chat messages with content."""
    messages = _maps(plain(value))
    return (
        bool(messages)
        and _have_roles(messages)
        and all(_CONTENT_FIELDS & fields.keys() for fields in messages)
    )


def read_tools(value: Any, origin: Origin) -> list[dict[str, Any]]:
    """Return tools in the form of chat templates; the list or its items may be JSON text.

    Null, an empty text and an empty list mean that there are none. Raises UnreadableMessageError
    for anything else.
    """
    try:
        return _tools(value, origin)
    except RecursionError as error:
        raise _too_deep(origin) from error


def _tools(value: Any, origin: Origin) -> list[dict[str, Any]]:
    value = plain(value)
    if _is_absent(value) or (isinstance(value, str) and not value.strip()):
        return []
    tools = _from_json(value)
    listed = cast("list[Any]", [tools] if isinstance(tools, Mapping) else tools)
    schemas = [_from_json(tool) for tool in listed] if isinstance(tools, list | Mapping) else [None]
    if not all(isinstance(tool, Mapping) for tool in schemas):
        hint = "tools must be a list of function schemas, or its JSON text"
        raise origin.error("", value, "", hint)
    return [_tool(tool) for tool in schemas]


NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def template_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the keys that a chat template sees, however it was given.

    They are the name, the description, the parameters and transformers' `return`. What a tool says
    to an API alone (`strict`) is left out.
    """
    inner = tool.get("function", tool)
    function = _present(cast("Mapping[str, Any]", inner)) if isinstance(inner, Mapping) else {}
    if "name" not in function:
        return dict(tool)
    parameters = function.get("parameters") or function.get("input_schema") or NO_PARAMETERS
    shown = {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": _schema(parameters),
    }
    returned = {"return": _schema(function["return"])} if "return" in function else {}
    return {"type": "function", "function": {**shown, **returned}}


def template_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return messages with the keys that a chat template sees, however they were given.

    Tool results stand in the order of their calls.
    """
    return in_call_order(
        [_template_message(message) for message in messages],
        lambda message: [call["id"] for call in message.get("tool_calls", ())],
        lambda message: message.get("tool_call_id", "") if message["role"] == "tool" else None,
    )


def in_call_order(
    messages: Sequence[T],
    calls_of: Callable[[T], Sequence[str]],
    answered: Callable[[T], str | None],
) -> list[T]:
    """Return messages with tool results in the order of their calls.

    `calls_of` returns the ids of a message's calls, `answered` that of a tool result; None: the
    message is not one.
    """
    ordered: list[T] = []
    results: list[tuple[int, T]] = []
    order: dict[str, int] = {}
    for message in messages:
        call = answered(message)
        if call is not None:
            results.append((order.get(call, len(order)), message))
            continue
        ordered += [result for _, result in sorted(results, key=itemgetter(0))]
        results = []
        order = {call: place for place, call in enumerate(calls_of(message))}
        ordered.append(message)
    return [*ordered, *(result for _, result in sorted(results, key=itemgetter(0)))]


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.pop("role", "")
    role = _ROLES.get(role, role)
    content = fields.pop("content", "")
    if role == "tool" and not (isinstance(content, str) or _are_parts(content)):
        content = json.dumps(content, ensure_ascii=False, default=json_default)
    content = _template_content(content)
    calls = fields.pop("tool_calls", None)
    reasoning = _take_reasoning(fields)
    answered = fields.pop("tool_call_id", None)
    shown: dict[str, Any] = {"role": role, "content": content}
    shown |= {key: value for key, value in fields.items() if key not in NOT_SHOWN}
    if calls:
        shown["tool_calls"] = [_template_call(call) for call in calls]
    if role == "assistant" and reasoning:
        shown[REASONING_KEYS[0]] = reasoning
    answered = answered or (fields.get("name") if role == "tool" else None)
    return {**shown, "tool_call_id": answered} if isinstance(answered, str) and answered else shown


def _take_reasoning(fields: dict[str, Any]) -> str:
    """Remove the reasoning of an answer from its fields; return the first that is not empty."""
    names = [name for name in REASONING_KEYS if isinstance(fields.get(name), str)]
    texts: list[str] = [fields.pop(name) for name in names]
    return next((text for text in texts if text), "")


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments: Any = function.get("arguments") or {}
    value: Any = arguments
    if isinstance(arguments, str):
        value = read_object(arguments) if arguments.strip() else {}
    shown = {"name": function.get("name"), "arguments": arguments if value is None else value}
    name = call.get("id")
    return {"type": "function", "id": name if isinstance(name, str) else "", "function": shown}


def _template_content(content: Any) -> Any:
    """Return a text, or a list of texts and images; a list of texts is one text."""
    if not isinstance(content, list):
        return content
    parts = [_template_part(part) for part in cast("list[Any]", content)]
    if all(part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _template_part(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        return {"type": "text", "text": str(part)}
    fields = _present(cast("dict[str, Any]", part))
    kind = _kind(fields)
    if kind in _TEXTS:
        text = fields.get("refusal" if kind == "refusal" else "text", "")
        return {"type": "text", "text": str(text)}
    if kind in _IMAGES:
        return {"type": "image", "image": fields.get("image", fields.get("image_url"))}
    return fields


def with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text, the form of OpenAI's API."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_with_text(call) for call in calls]}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def read_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text; None if it is not one, by the rules of `read_value`."""
    value = read_value(text)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def read_value(text: str) -> Any:
    """Return the JSON value of a text; None if it is invalid, repeats a key, or has NaN or inf."""
    try:
        value: Any = read_json(text)
        json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return value


def plain(value: Any) -> Any:
    """Return a value with Python's own maps, lists, texts and numbers."""
    if isinstance(value, str | int | float | bool | bytes) or value is None:
        return value if type(value).__module__ == "builtins" else _unwrapped(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(plain(key)): plain(inner) for key, inner in items}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in cast("Sequence[Any]", value)]
    return _unwrapped(value)


def json_default(value: Any) -> Any:
    """Convert a value that JSON cannot express: bytes to base64, arrays to lists."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.tolist() if hasattr(value, "tolist") else str(value)


def shorten(value: Any) -> str:
    """Return a value's representation for an error, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _unwrapped(value: Any) -> Any:
    """Return the Python value of a scalar or array of NumPy, pandas or pyarrow."""
    if isinstance(value, bytearray | memoryview):
        return bytes(cast("bytearray", value))
    for name in ("as_py", "tolist"):
        unwrap: Callable[[], Any] | None = getattr(value, name, None)
        if callable(unwrap):
            inner = unwrap()
            return plain(inner) if type(inner) is not type(value) else inner
    return value


def _maps(value: Any) -> list[dict[str, Any]] | None:
    """Return a list of maps, or the one that a JSON text holds; None for anything else."""
    parsed = _from_json(value)
    if not isinstance(parsed, list):
        return None
    listed = cast("list[Any]", parsed)
    return listed if all(isinstance(item, dict) for item in listed) else None


def _have_roles(messages: list[dict[str, Any]]) -> bool:
    return all(isinstance(fields.get("role"), str) for fields in messages)


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError:
        return None


def _is_absent(value: Any) -> bool:
    """Whether a value means absent: null, or the NaN that pandas fills in."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if not _is_absent(value)}


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError
    return fields


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


class _Message:
    """Reads one message."""

    def __init__(self, fields: Mapping[str, Any], number: int, origin: Origin) -> None:
        self._fields = _present(fields)
        self._number = number
        self._origin = origin

    def read(self) -> dict[str, Any]:
        fields = self._fields
        role = fields.pop("role", None)
        if not isinstance(role, str) or not role:
            raise self._error("has no role", path=".role", hint="give it a role and a content")
        role = _ROLES.get(role, role)
        calls = self._calls()
        if reasoning := _take_reasoning(fields):
            fields[REASONING_KEYS[0]] = reasoning
        content = self._content(role, fields.pop("content", None))
        if content is None:
            content = self._in_place_of_content(has_calls=bool(calls))
        message = {"role": role, "content": content, **fields}
        return {**message, "tool_calls": calls} if calls else message

    def _in_place_of_content(self, *, has_calls: bool) -> str:
        refused = self._fields.get("refusal")
        if isinstance(refused, str) and refused:
            return self._fields.pop("refusal")
        if has_calls or self._origin.is_request:
            return ""
        if any(self._fields.get(name) for name in REASONING_KEYS):
            return ""
        raise self._error(
            "is empty: its content is None, and it has neither tool_calls nor reasoning",
            path=".content",
            hint="add content, or remove the message",
        )

    def _content(self, role: str, content: Any) -> str | list[dict[str, Any]] | None:
        if content is None or isinstance(content, str):
            return content
        if _is_part(content):
            content = [content]
        if role == "tool" and not _are_parts(content):
            return self._json(content)
        if not isinstance(content, list):
            raise self._error(
                f"has the content {shorten(content)}",
                path=".content",
                hint="a message's content is a text or a list of parts; remove empty messages",
            )
        listed = cast("list[Any]", content)
        parts = [self._part(part, place) for place, part in enumerate(listed)]
        if all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
        return parts

    def _json(self, result: Any) -> str:
        """Return a tool result that is not text as JSON."""
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise self._error(
                f"has the content {shorten(result)}",
                path=".content",
                hint="a tool result must be a text or a value that JSON can express",
            ) from error

    def _part(self, part: Any, place: int) -> dict[str, Any]:
        content: Any = {"type": "text", "text": part} if isinstance(part, str) else part
        fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {"type": content}
        kind = _kind(fields)
        if kind in _TEXTS:
            text = fields.get("refusal" if kind == "refusal" else "text")
            if text is None or isinstance(text, str):
                return {"type": "text", "text": text or ""}
        if kind in _IMAGES:
            return self._image(_present(fields), kind, place)
        shown = shorten(fields.get("type"))
        raise self._error(
            f"has content of type {shown}, and a model here takes texts and images",
            path=f".content[{place}].type",
            hint="give text, or images as image_url",
        )

    def _image(self, fields: dict[str, Any], kind: str, place: int) -> dict[str, Any]:
        if kind == "input_image":
            url = fields.pop("image_url", None)
            fields |= {"type": "image_url", "image_url": url}
        if not self._origin.is_request:
            return {"type": kind, **fields}  # its image may be in another column
        if isinstance(url := fields.get("image_url"), str):
            fields["image_url"] = {"url": url}
        try:
            return {"type": "image", "image": encoded_image(fields)}
        except DataError as error:
            raise self._error(
                f"has an image that cannot be used: {error.message}",
                path=f".content[{place}].type",
                hint="send its bytes in a data URL: data:image/png;base64,…",
            ) from error

    def _calls(self) -> list[dict[str, Any]]:
        """Return the calls of a message, including the legacy `function_call`."""
        fields = self._fields
        value = _from_json(fields.pop("tool_calls", None) or [])
        listed = cast("list[Any]", value if isinstance(value, list) else [value])
        calls = [self._call(call, f".tool_calls[{n}]") for n, call in enumerate(listed)]
        legacy = _from_json(fields.pop("function_call", {}))
        if isinstance(legacy, dict) and not _present(cast("dict[str, Any]", legacy)):
            return calls
        function = self._function(legacy, ".function_call")
        if all(function != other["function"] for other in calls):
            calls.append({"type": "function", "function": function})
        return calls

    def _call(self, call: Any, path: str) -> dict[str, Any]:
        fields = _present(cast("dict[str, Any]", call)) if isinstance(call, dict) else {}
        if isinstance(custom := fields.get("custom"), dict):
            tool_use = cast("dict[str, Any]", fields.pop("custom"))
            arguments = {"input": tool_use.get("input") or ""}
            fields |= {"type": "function"}
            fields["function"] = {"name": cast("Any", custom).get("name"), "arguments": arguments}
        elif "function" not in fields and isinstance(fields.get("name"), str):
            inside = [key for key in fields if key not in ("id", "type", "index")]
            fields["function"] = {key: fields.pop(key) for key in inside}
        fields["function"] = self._function(_from_json(fields.get("function")), f"{path}.function")
        return fields if isinstance(fields.get("type"), str) else {**fields, "type": "function"}

    def _function(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._error("has a tool call without a function", path=path, hint=_CALL)
        function = _present(cast("dict[str, Any]", value))
        name = function.get("name")
        if not isinstance(name, str) or not name.strip():
            raise self._error(
                f"has a tool call whose name is {shorten(name)}", path=f"{path}.name", hint=_CALL
            )
        if "arguments" not in function and "parameters" in function:  # Llama's form
            function = {"arguments" if k == "parameters" else k: v for k, v in function.items()}
        if "arguments" not in value and (others := function.keys() - _OF_FUNCTION):
            raise self._error(
                f"has a call of {shorten(name)} with {sorted(others)} instead of arguments",
                path=f"{path}.arguments",
                hint=_CALL,
            )
        return {**function, "arguments": self._arguments(function.get("arguments"), path)}

    def _arguments(self, arguments: Any, path: str) -> dict[str, Any] | str:
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            return {}
        if isinstance(arguments, dict):
            return cast("dict[str, Any]", arguments)
        if isinstance(arguments, str):
            parsed = read_object(arguments)
            if parsed is not None:
                return arguments if self._origin.keeps_text else parsed
            if self._origin.is_request:
                return arguments  # the model wrote this text, and the template renders it
        raise self._origin.error(
            f"[{self._number}]{path}.arguments",
            arguments,
            ", not a JSON object",
            "the arguments of a call must be an object, or its JSON text, without repeated keys",
        )

    def _error(self, problem: str, *, path: str, hint: str) -> UnreadableMessageError:
        return self._origin.message_error(self._number, problem, path=path, hint=hint)


def _kind(part: Any) -> str | None:
    """Return the type of a part of a message; None if it is not a part."""
    if not isinstance(part, dict):
        return None
    fields = cast("dict[str, Any]", part)
    kind = fields.get("type")
    if kind is None:
        return next((name for name in ("text", "image", "image_url") if name in fields), None)
    return kind if kind in (*_TEXTS, *_IMAGES) else None


def _are_parts(content: Any) -> bool:
    """Whether a tool result is a list of message parts, not the tool's own list."""
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    return bool(parts) and all(map(_is_part, parts))


def _is_part(part: Any) -> bool:
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    kind = fields.get("type")
    is_text = kind in _TEXTS and isinstance(fields.get("text", fields.get("refusal")), str)
    return is_text or kind in _IMAGES


def _tool(tool: Any) -> dict[str, Any]:
    fields = _present(tool)
    if isinstance(function := fields.get("function"), Mapping):
        fields["function"] = _function_schema(cast("Mapping[str, Any]", function))
        return fields
    return _function_schema(fields)


def _function_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _schema(value) if isinstance(value, Mapping) else value
        for key, value in _present(function).items()
    }


def _schema(schema: Any) -> Any:
    """Return a JSON schema without null keywords and schemas."""
    if isinstance(schema, list):
        return [_schema(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    declared: dict[str, Any] = {}
    for key, value in cast("Mapping[str, Any]", schema).items():
        if key in _VALUES:
            declared[key] = value
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            by_name = cast("Mapping[str, Any]", value)
            declared[key] = {name: _schema(v) for name, v in by_name.items() if v is not None}
        elif value is not None:
            declared[key] = _schema(value)
    return declared
