"""What a request asks of a model, whichever API it comes in.

A reader of an API (`chat.py`, `responses.py`, `messages.py`) goes through a body field by field and
returns a `ModelRequest`. What it has not read is named in `without_effect`, unless it is a label or
its value asks for nothing: makers' libraries and frameworks send many such fields with every
request. A value that would change the answer is never one of them, and `null` asks for nothing
wherever it stands.

What a request demands of its answer's form (`response_format`, Responses' `text.format`, Messages'
`output_config.format`, `tool_choice`) is read here, too. Schemas are checked at once, so that an
error names the place.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, cast

from ..agent import CallMessage, CallRequest
from ..output_format import ANY_OBJECT, OutputFormat, SchemaError, check_schema
from ..wire.errors import DataError, TinkermqError
from ..wire.images import encoded_image
from .canonical import CanonicalCall, CanonicalMessage, Picture, canonical_history, joined

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
    """One request of any API; of an episode before it is attached to the calls before it."""

    messages: tuple[CanonicalMessage, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    """As chat templates take them."""
    prompts: tuple[str | list[int], ...] = ()
    """Of legacy completions, in place of messages: texts or token ids to continue."""
    prompt_logprobs: int | None = None
    """Tell the log-probs of the prompts' tokens, and so many of the likeliest; None: neither."""
    add_special_tokens: bool = True
    """Whether texts to continue get the tokens that the tokenizer puts around them."""
    num_choices: int = 1
    """Of each prompt."""
    max_tokens: int | None = None
    format: OutputFormat | None = None
    """The form that an answer must have; None: any."""
    calls_one: bool = False
    """Whether an answer may call one tool at most."""
    top_logprobs: int | None = None
    """Tell each token's text and log-prob, and so many of the likeliest; None: neither."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """Whether a stream of Chat Completions ends with its token counts."""
    return_token_ids: bool = False
    """Whether an answer has token ids, where vLLM has them."""
    is_prefill: bool = False
    """Whether the last message is the beginning of the answer."""
    previous: str = ""
    """Id of the response that the messages follow; empty: they are the whole history."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the tools that take any text, where the answer names them so."""
    echo: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of its request that an answer repeats, where its API does so."""
    model: str = ""
    """As the request names it."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What it says of sampling, as it says it; in episodes the job decides."""
    without_effect: tuple[str, ...] = ()
    """Fields that were sent, ask for something, and change nothing."""
    sent_messages: tuple[Mapping[str, Any], ...] = ()
    """The messages of Chat Completions with all of their fields, as chat templates take them."""
    sent_tools: tuple[Mapping[str, Any], ...] = ()
    """Its tools, likewise."""

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages for a chat template."""
        if self.sent_messages:
            return [dict(message) for message in self.sent_messages]
        return [message.for_template() for message in canonical_history(self.messages, ())]

    def template_tools(self) -> list[dict[str, Any]]:
        """Return the tools for a chat template."""
        return [dict(tool) for tool in self.sent_tools or self.tools]


class Fields:
    """A JSON object that is read field by field; it records which fields were not read."""

    def __init__(self, value: Any, place: str = "") -> None:
        """Read an object; `place` names it in errors."""
        if not isinstance(value, dict):
            raise RequestError(f"{place or 'the body'} is no object", param=place)
        self._value = cast("dict[str, Any]", value)
        self._place = place
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """Return a field's name, counted from the body."""
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

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a truth value; null and missing are the default."""
        value = self.any(key)
        if not isinstance(value, _FLAG):
            raise self._wrong(key, "true or false")
        return default if value is None else value

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


def read_content(fields: Fields, key: str = "content") -> tuple[str | Picture, ...]:
    """Read texts and images: a text, null, or a list of parts."""
    value = fields.any(key)
    if isinstance(value, _TEXT):
        return (value,) if value else ()
    return joined(read_part(part) for part in fields.objects(key))


def read_part(part: Fields) -> str | Picture:
    """Read a part of a message: a text or an image."""
    kind = part.text("type", "text")
    if kind in TEXT_PARTS:
        return part.text("refusal" if kind == "refusal" else "text")
    if kind in ("image_url", "input_image"):
        return read_picture({"type": "image_url", "image_url": _url(part)}, part)
    raise RequestError(
        f"{part.name('type')} is {kind!r}, and this model takes texts and images",
        param=part.name("type"),
    )


def read_picture(image: Mapping[str, Any], part: Fields) -> Picture:
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


def read_openai_tools(
    fields: Fields, *, nested: bool
) -> tuple[tuple[dict[str, Any], ...], list[str]]:
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
        function = Fields(tool.any(kind), tool.name(kind)) if nested else tool
        parameters = FREE_TEXT if kind == "custom" else function.any("parameters")
        tools.append(function_tool(function.text("name"), function.text("description"), parameters))
    return tuple(tools), left_out


def custom_call(name: str, text: str, call_id: str) -> CanonicalCall:
    """Return a call of a tool that takes any text."""
    return CanonicalCall(name, json.dumps({"input": text}, ensure_ascii=False), call_id)


def custom_input(call: CanonicalCall) -> str:
    """Return the text of a call of a tool that takes any text."""
    value = call.value
    return str(value.get("input", "")) if isinstance(value, dict) else ""


def custom_names(fields: Fields, *, nested: bool) -> frozenset[str]:
    """Return the names of OpenAI's tools that take any text; `nested` as in `read_openai_tools`."""
    tools = [tool for tool in fields.objects("tools") if tool.text("type") == "custom"]
    if nested:
        tools = [Fields(tool.any("custom"), tool.name("custom")) for tool in tools]
    return frozenset(tool.text("name") for tool in tools)


def read_sampling(fields: Fields, names: Sequence[str]) -> dict[str, Any]:
    """Read how tokens are to be drawn: fields as they are, but for numbers that ask for nothing."""
    values = {name: fields.any(name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if not (value is None or (isinstance(value, int | float) and asks_nothing(name, value)))
    }


_NO_CHOICE = (None, "auto", "none")
_NAMED = ("function", "custom", "tool")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a `tool_choice` says."""

    functions: tuple[str, ...] = ()
    """Tools of which one at least is called; none: the model may call or not."""
    is_single: bool = False
    """Only one is called."""
    hides_tools: bool = False
    """The model is shown no tools."""
    without_effect: tuple[str, ...] = ()
    """Fields that ask for what cannot be had."""


def read_tool_choice(
    value: Any, tools: Sequence[Mapping[str, Any]], *, single: str = ""
) -> ToolChoice:
    """Read the `tool_choice` of any API; RequestError for one that names no tool of `tools`.

    `single` names the field by which the request says that tools are called one at a time.
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
                hint="name one of `tools`",
            )
    return tuple(dict.fromkeys(called))


def read_format(value: Any, place: str) -> dict[str, Any] | bool | None:
    """Return the schema that a `response_format` (or its like, at `place`) demands; None: none.

    Raises RequestError, which names the place, for one that is malformed or not supported.
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
    """Return what an answer must be; None: anything.

    Where a format is demanded and tools may be called, the answer is either. Raises RequestError
    for parameters of tools that no call can be held to.
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
    """Return what a tool, as chat templates take it, says of its function."""
    inner = tool.get("function")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else tool


def _check(schema: Any, place: str) -> None:
    try:
        check_schema(schema, place)
    except SchemaError as error:
        raise RequestError(error.message, param=error.place, hint=error.hint) from error


LABELS = frozenset(
    {
        "cache_control",
        "cache_salt",
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
"""What is written down about a request or speeds it up, and changes no answer."""

_OFF: tuple[Any, ...] = (False, 0)
_NEUTRAL: Mapping[str, Iterable[Any]] = {
    # Chat Completions and Completions
    "best_of": (1,),
    "echo": _OFF,
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default", "standard_only"),
    "store": _OFF,
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "stateful": (True,),  # episodes always are
    # Responses
    "background": _OFF,
    "include": (["reasoning.encrypted_content"],),  # reasoning comes whole, without a cipher
    "text.verbosity": ("medium",),
    "reasoning": ({"summary": ("auto", "concise", "detailed"), "generate_summary": ("auto",)},),
    "truncation": ("disabled",),
    # Messages
    "output_config.effort": ("high",),
    "thinking": ({"type": "disabled"},),
    "tool_choice.disable_parallel_tool_use": _OFF,
    "stream_options.include_obfuscation": _OFF,
    # what vLLM's and other servers take besides
    "add_generation_prompt": (True,),
    "add_special_tokens": _OFF,
    "continue_final_message": _OFF,
    "detokenize": (True,),
    "ignore_eos": _OFF,
    "include_reasoning": (True,),
    "include_stop_str_in_output": _OFF,
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "priority": (0,),
    "repetition_penalty": (1,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": _OFF,
}
_EMPTY: tuple[Any, ...] = ([], {}, "")


def is_label(name: str) -> bool:
    """Whether a field changes no answer, whatever its value."""
    return name in LABELS


def asks_nothing(name: str, value: Any) -> bool:
    """Whether a field's value is what happens without it; `name` with the object it stands in."""
    if value is None or value in _EMPTY:
        return True
    if name not in _NEUTRAL:
        return value is False
    return any(_is(value, neutral) for neutral in _NEUTRAL[name])


def _is(value: Any, neutral: Any) -> bool:
    if not isinstance(neutral, dict) or not isinstance(value, dict):
        return bool(value == neutral)
    fields = cast("dict[str, Any]", neutral)
    return all(
        given is None or _is_one_of(given, fields.get(name, ()))
        for name, given in cast("dict[str, Any]", value).items()
    )


def _is_one_of(value: Any, neutral: Any) -> bool:
    """Whether a value within an object is one of those, or the one, that ask for nothing."""
    return value in neutral if isinstance(neutral, tuple) else bool(value == neutral)


# The request as it travels to a generator.


def packed(message: CanonicalMessage) -> CallMessage:
    """Return a message as it travels."""
    return CallMessage(**_fields(message))


def _fields(message: CanonicalMessage) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": [part if isinstance(part, str) else part.encoded for part in message.content],
        "calls": [(call.name, call.arguments, call.id) for call in message.calls],
        "reasoning": message.reasoning,
        "call_id": message.call_id,
    }


def unpacked(message: CallMessage) -> CanonicalMessage:
    """Return a message that has travelled."""
    content: tuple[str | Picture, ...]
    match message.content:
        case [str(text)] if text:  # of most messages: a history comes with each call
            content = (text,)
        case parts:
            content = joined(part if isinstance(part, str) else Picture(part) for part in parts)
    return CanonicalMessage(
        role=message.role,
        content=content,
        calls=tuple(CanonicalCall(*call) for call in message.calls),
        reasoning=message.reasoning,
        call_id=message.call_id,
    )


def call_request(
    asked: ModelRequest, request: str, *, previous: int | None = None, is_retry: bool = False
) -> CallRequest:
    """Return a request as it travels; ValidationError for what is out of bounds."""
    return CallRequest(
        request=request,
        messages=cast("list[CallMessage]", [_fields(message) for message in asked.messages]),
        tools=[dict(tool) for tool in asked.tools],
        num_choices=asked.num_choices,
        max_tokens=asked.max_tokens,
        format=asked.format,
        top_logprobs=asked.top_logprobs,
        stop=list(asked.stop),
        stream=asked.stream,
        is_prefill=asked.is_prefill,
        previous=previous,
        sampled=dict(asked.sampling),
        without_effect=list(asked.without_effect),
        is_retry=is_retry,
        token_ids=asked.return_token_ids,
    )


def history_of(request: CallRequest) -> Sequence[CanonicalMessage]:
    """Return the messages of a request."""
    return [unpacked(message) for message in request.messages]
