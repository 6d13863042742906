"""The bodies of OpenAI's requests: what of them is understood, and what is refused.

A parameter that would be without effect is refused instead of ignored, unless it is a label, or its
value asks for nothing (`presence_penalty: 0`).
"""

import uuid
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ....envs.agents.dialects.formats import (
    ToolChoice,
    output_format,
    read_format,
    read_tool_choice,
)
from ....envs.agents.dialects.neutral import asks_nothing, is_label
from ....envs.agents.dialects.request import RequestError
from ....envs.chat_messages import Origin, read_conversation, read_tools
from ....schemas.bounds.defaults import MAX_TOP_K
from ....schemas.infer import (
    MAX_CHOICES,
    MAX_STOPS,
    MAX_TEMPERATURE,
    ChatRequest,
    CompletionRequest,
    Decoding,
)
from ....schemas.output_format import (
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_TOP_LOGPROBS,
    OutputFormat,
)
from ....schemas.wire.codec import read_json
from ....schemas.wire.errors import ConfigError, DataError, MessageError
from .asking import refuse_stateful_body

B = TypeVar("B", bound="_Body")

_WHY = {
    "functions": "give tools instead",
    "tool_choice": "give auto or none, and with tools required or the name of a function",
    "parallel_tool_calls": "how many tools are called is the model's choice, unless tool_choice "
    "demands one: leave it out",
    "reasoning_effort": "how much a model thinks is set by its chat template: leave it out",
    "store": "answers are not kept: give false",
    "verbosity": "how long an answer is, is the model's choice: say it in the prompt",
}

_SHOWN = 100


class BodyError(ConfigError):
    """A request body that cannot be served; names the parameter."""

    def __init__(self, message: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class StreamOptions(BaseModel):
    """What a stream says besides the text."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Body(BaseModel):
    """What both kinds of request have in common."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    presence_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    repetition_penalty: float = Field(default=1.0, gt=0, le=MAX_REPETITION)
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.include_usage and not self.stream:
            raise ValueError("stream_options has no effect without stream")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop holds at most {MAX_STOPS} texts")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def decoding(self) -> Decoding:
        """Return how tokens are drawn."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Decoding(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            stop=[text for text in stop if text],
            seed=None if self.seed is None else self.seed % (1 << 63),
            num_choices=self.n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            format=self.format,
        )

    @property
    def format(self) -> OutputFormat | None:
        """The form that an answer must have; RequestError for one that none can be held to."""
        schema = read_format(self.response_format, "response_format")
        return output_format(schema, ToolChoice(), ())


class ChatBody(_Body):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _tells_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs has no effect without logprobs")
        return self

    @property
    def uses_tools(self) -> bool:
        """Whether the model is shown tools."""
        return bool(self.tools) and not self.choice.hides_tools

    @property
    def choice(self) -> ToolChoice:
        """What `tool_choice` says; RequestError for what cannot be had."""
        single = "" if self.parallel_tool_calls else "parallel_tool_calls"
        choice = read_tool_choice(self.tool_choice, self.tools, single=single)
        for param in choice.without_effect:
            raise RequestError(
                f"the parameter {param!r} cannot be used so", param=param, hint=_WHY[param]
            )
        return choice

    @property
    def format(self) -> OutputFormat | None:
        """The form that an answer must have, by `response_format` and `tool_choice`."""
        schema = read_format(self.response_format, "response_format")
        return output_format(schema, self.choice, self.tools)

    def request(self) -> ChatRequest:
        """Return the request that a server takes."""
        decoding = self.decoding().model_copy(update={"top_logprobs": self.top_logprobs})
        if self.max_completion_tokens is not None:
            decoding = decoding.model_copy(update={"max_tokens": self.max_completion_tokens})
        return ChatRequest(
            request=uuid.uuid4().hex,
            messages=_read(read_conversation, self.messages, "messages"),
            tools=_read(read_tools, self.tools, "tools") if self.uses_tools else [],
            decoding=decoding,
            stream=self.stream,
            logprobs=self.logprobs,
            token_ids=self.return_token_ids,
        )


class CompletionBody(_Body):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_K)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens is 0, which is for prompt_logprobs alone")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not streamed: leave stream out")
        return self

    def request(self) -> CompletionRequest:
        """Return the request that a server takes."""
        return CompletionRequest(
            request=uuid.uuid4().hex,
            prompts=_prompts(self.prompt),
            decoding=self.decoding().model_copy(update={"top_logprobs": self.logprobs or 0}),
            stream=self.stream,
            logprobs=self.logprobs is not None,
            token_ids=self.return_token_ids or self.prompt_logprobs is not None,
            prompt_logprobs=self.prompt_logprobs,
            add_special_tokens=self.add_special_tokens,
        )


def parse_body(raw: bytes, model: type[B]) -> B:
    """Read a request body; BodyError or RequestError names what cannot be used."""
    try:
        value: Any = read_json(raw)
    except MessageError as error:
        raise BodyError(f"the body is not valid JSON: {error.message}") from error
    if not isinstance(value, dict):
        raise BodyError("the body is not a JSON object")
    refuse_stateful_body(cast("dict[str, Any]", value))
    fields = {
        key: given
        for key, given in cast("dict[str, Any]", value).items()
        if given is not None
        and (key in model.model_fields or not (is_label(key) or asks_nothing(key, given)))
    }
    for key in fields:
        if key not in model.model_fields:
            raise BodyError(
                f"the parameter {key[:_SHOWN]!r} is not supported here",
                param=key[:_SHOWN],
                hint=_WHY.get(key, "leave it out"),
            )
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _malformed(error) from error


def query_of(body: ChatBody | CompletionBody) -> ChatRequest | CompletionRequest:
    """Return the request that a server takes; BodyError names what it would refuse."""
    try:
        return body.request()
    except ValidationError as error:
        raise _malformed(error) from error
    except RequestError as error:
        raise BodyError(error.message, param=error.param or None, hint=error.hint) from error


def _malformed(error: ValidationError) -> BodyError:
    problem = error.errors()[0]
    param = str(problem["loc"][0])[:_SHOWN] if problem["loc"] else None
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return BodyError(f"the parameter {param!r} is missing", param=param)
    if param is None:
        return BodyError(text)
    return BodyError(
        f"the parameter {param!r} cannot be used: {text}", param=param, hint=_WHY.get(param, "")
    )


def _read(
    read: Callable[[Any, Origin], list[dict[str, Any]]], given: Any, param: str
) -> list[dict[str, Any]]:
    """Return messages or tools as chat templates take them; BodyError for what cannot be read."""
    try:
        return read(given, Origin(param, is_request=True))
    except DataError as error:
        raise BodyError(error.message, param=param, hint=error.hint) from error


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [cast("list[int]", prompt)]
    if not prompt:
        raise BodyError("the parameter 'prompt' is empty", param="prompt")
    return list(cast("list[str | list[int]]", prompt))
