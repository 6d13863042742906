"""OpenAI's Chat Completions and legacy Completions."""

import codecs
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

from ..chat_messages import NOT_SHOWN, Origin, UnreadableMessageError, read_conversation
from ..infer import PromptScore
from . import answers
from .canonical import (
    CanonicalCall,
    ModelMessage,
    Piece,
    ReasoningPiece,
    TextPiece,
)
from .request import (
    FieldNames,
    Fields,
    ModelRequest,
    RequestError,
    custom_input,
    read_openai_tools,
    read_shared,
)

DONE = "data: [DONE]\n\n"
_OWN_FIELDS = NOT_SHOWN | {
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "reasoning",
    "reasoning_content",
}
"""Fields of a message that have their own field in a `ModelMessage`, or that no template shows."""
_CHAT = FieldNames(max_tokens=("max_completion_tokens", "max_tokens"), effort="reasoning_effort")
_COMPLETION = FieldNames(least_tokens=0)


def read_chat(body: Any) -> ModelRequest:
    """Read the body of `POST /v1/chat/completions`; raises RequestError naming the field."""
    fields = Fields(body)
    messages = _read_messages(fields)
    num_top = fields.count("top_logprobs", least=0) or 0
    tells_logprobs = fields.flag("logprobs")
    include_usage, left_out = _read_include_usage(fields)
    if num_top and not tells_logprobs:
        left_out.append("top_logprobs")
    request = read_shared(
        fields,
        _CHAT,
        read_openai_tools(fields, nested=True),
        single="parallel_tool_calls" if fields.any("parallel_tool_calls") is False else "",
        without_effect=left_out,
        messages=messages,
        top_logprobs=num_top if tells_logprobs else None,
        include_usage=include_usage,
        prompt_logprobs=(prompt_logprobs := fields.count("prompt_logprobs", least=0)),
        return_token_ids=fields.flag("return_token_ids") or prompt_logprobs is not None,
    )
    _refuse_streamed_scores(request)
    if prompt_logprobs is None:
        return request
    name = "prompt_logprobs"
    return replace(request, served_only={**request.served_only, name: name})


def read_completion(body: Any) -> ModelRequest:
    """Read the body of `POST /v1/completions`; raises RequestError naming the field."""
    fields = Fields(body)
    include_usage, left_out = _read_include_usage(fields)
    request = read_shared(
        fields,
        _COMPLETION,
        prompt_logprobs=(prompt_logprobs := fields.count("prompt_logprobs", least=0)),
        add_special_tokens=fields.flag("add_special_tokens", default=True),
        top_logprobs=fields.count("logprobs", least=0),
        prompts=_read_prompts(fields),
        repeats_prompt=fields.flag("echo"),
        include_usage=include_usage,
        return_token_ids=fields.flag("return_token_ids") or prompt_logprobs is not None,
        without_effect=left_out,
    )
    if request.max_tokens == 0 and prompt_logprobs is None and not request.repeats_prompt:
        message = "max_tokens may be 0 only with prompt_logprobs or echo"
        raise RequestError(message, param="max_tokens")
    _refuse_streamed_scores(request)
    return request


def _refuse_streamed_scores(request: ModelRequest) -> None:
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs are not streamed", param="prompt_logprobs", hint="leave stream out"
        )


def _read_include_usage(fields: Fields) -> tuple[bool, list[str]]:
    """Return whether a stream ends with token counts; and its name, if it has no effect."""
    options = fields.inner("stream_options")
    include_usage = options.flag("include_usage")
    is_lost = include_usage and not fields.flag("stream")
    return include_usage, [options.name("include_usage")] if is_lost else []


def _read_messages(fields: Fields) -> tuple[ModelMessage, ...]:
    messages = fields.items("messages")
    if not messages:
        raise fields.missing("messages", "messages must be a list of at least one message")
    try:
        return conversation(messages)
    except UnreadableMessageError as error:
        raise RequestError(error.message, param=error.place, hint=error.hint) from error


def conversation(messages: Sequence[Any]) -> tuple[ModelMessage, ...]:
    """Read chat messages in any spelling.

    Raises UnreadableMessageError, and RequestError for an unknown role.
    """
    origin = Origin(is_request=True, keeps_text=True)
    read = read_conversation(messages, origin)
    return tuple(canonical_message(message, f"messages[{n}]") for n, message in enumerate(read))


def canonical_message(message: Mapping[str, Any], place: str) -> ModelMessage:
    """Return a message that `read_conversation` read; RequestError for an unknown role."""
    role = message["role"]
    if role not in ("system", "user", "assistant", "tool"):
        raise RequestError(
            f"{place}.role must be system, user, assistant or tool, and is {role!r}",
            param=f"{place}.role",
        )
    content = message["content"]
    parts = [content] if isinstance(content, str) else [_part(part) for part in content]
    name = message.get("tool_call_id") or message.get("name") if role == "tool" else ""
    reasoning = message.get("reasoning_content") if role == "assistant" else None
    return ModelMessage(
        role=role,
        content=tuple(parts),
        calls=tuple(_call(call) for call in message.get("tool_calls", ())),
        reasoning=reasoning if isinstance(reasoning, str) else None,
        call_id=name if isinstance(name, str) else "",
        extra={field: value for field, value in message.items() if field not in _OWN_FIELDS},
    )


def _part(part: Mapping[str, Any]) -> str | bytes:
    return part["text"] if part["type"] == "text" else part["image"]


def _call(call: Mapping[str, Any]) -> CanonicalCall:
    arguments, name = call["function"]["arguments"], call.get("id")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return CanonicalCall(call["function"]["name"], text, name if isinstance(name, str) else "")


def _read_prompts(fields: Fields) -> tuple[str | list[int], ...]:
    """Return one or several prompts: texts or lists of token ids."""
    value = fields.any("prompt")
    if value is None:
        raise fields.missing("prompt", "the parameter 'prompt' is missing")
    prompts = cast("list[Any]", value) if isinstance(value, list) else [value]
    if prompts and all(map(_is_token, prompts)):
        return (cast("list[int]", prompts),)
    for prompt in prompts:
        ids = cast("list[Any]", prompt) if isinstance(prompt, list) else []
        if not isinstance(prompt, str) and not (ids and all(map(_is_token, ids))):
            raise RequestError(
                f"prompt must be texts or token ids, and has {prompt!r:.60}", param="prompt"
            )
    if not prompts:
        raise RequestError("the parameter 'prompt' is empty", param="prompt")
    return tuple(prompts)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Choice:
    """The written part of one choice."""

    def __init__(
        self, number: int, custom_tools: Collection[str] = (), *, is_streamed: bool = False
    ) -> None:
        self.number = number
        self._is_streamed = is_streamed
        self._custom_tools = custom_tools
        self.text = ""
        self.reasoning: str | None = None
        self.calls: list[CanonicalCall] = []
        self.ids: list[int] | None = None
        self.logprobs: list[answers.TokenLogprob] | None = None
        self.finish: str | None = None
        self.stop: str | int | None = None
        """The stop text or token that ended it, in the field that vLLM's server has."""

    def add(self, piece: Piece) -> dict[str, Any]:
        """Add a piece; return it as a chunk's delta."""
        if isinstance(piece, TextPiece):
            self.text += piece.text
            return {"content": piece.text}
        if isinstance(piece, ReasoningPiece):
            self.reasoning = (self.reasoning or "") + piece.text
            return {"reasoning_content": piece.text}
        call = {"index": len(self.calls), **_called_function(piece)}
        self.calls.append(piece)
        return {"tool_calls": [call]}

    def add_tokens(self, tokens: answers.NewTokens) -> None:
        """Add new tokens, unless a stream has sent them."""
        if self._is_streamed:
            return
        if tokens.ids is not None:
            self.ids = self.ids or []
            self.ids += tokens.ids
        if tokens.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += tokens.logprobs

    def close(self, reason: answers.FinishReason, stop: str | int) -> None:
        """End it."""
        self.finish = "tool_calls" if self.calls else "length" if reason == "length" else "stop"
        self.stop = None if stop == "" else stop

    def message(self) -> dict[str, Any]:
        """Return it as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [self._worded_call(call) for call in self.calls]
        return message

    def _worded_call(self, call: CanonicalCall) -> dict[str, Any]:
        if call.name not in self._custom_tools:
            return _called_function(call)
        custom = {"name": call.name, "input": custom_input(call)}
        return {"id": call.id, "type": "custom", "custom": custom}


def _called_function(call: CanonicalCall) -> dict[str, Any]:
    """Return a call as a function call, the only kind in chunks."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class OpenAIAnswer:
    """The common parts of answers of Chat Completions and of Completions; see `Answer`."""

    chunk_kind: ClassVar[str]
    """The `object` of an event."""

    def __init__(self, head: answers.AnswerHead, request: ModelRequest) -> None:
        """Write the answer to a request."""
        self.prompt_ids: Sequence[Sequence[int]] = ()
        """Tokens of each prompt, if requested and known."""
        self.scores: list[PromptScore] = []
        """Log-probs of the prompts' tokens, if requested."""
        self._head = head
        self._include_usage = request.include_usage
        self._is_streamed = request.stream

    def end(self, usage: answers.Usage, extra: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Yield extra fields, the token counts if requested, and the end."""
        top: dict[str, Any] = {**self._top(self.chunk_kind), "choices": []}
        if extra:
            yield answers.event({**top, **extra})
        if self._include_usage:
            yield answers.event({**top, "usage": worded_usage(usage)})
        yield DONE

    def fail(self, error: Mapping[str, Any]) -> str:
        """Return the event that ends a failed stream."""
        return answers.event(error)

    def _top(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model}

    def _scores(self, prompt: int) -> dict[str, Any]:
        """Return the log-probs of a prompt's tokens in the field that vLLM has, if known."""
        scores = [score for score in self.scores if score.prompt == prompt]
        rows = [row for score in scores for row in _score_rows(score, self.prompt_ids[prompt])]
        return {"prompt_logprobs": rows} if scores else {}

    def _event(self, choice: Mapping[str, Any], top: Mapping[str, Any] | None = None) -> str:
        """Return an event with a choice, and further fields beside it."""
        usage = {"usage": None} if self._include_usage else {}
        fields = {**self._top(self.chunk_kind), **(top or {})}
        return answers.event({**fields, "choices": [choice], **usage})


class ChatCompletionAnswer(OpenAIAnswer):
    """The choices of an answer of Chat Completions; see `Answer`."""

    chunk_kind = "chat.completion.chunk"

    def __init__(self, head: answers.AnswerHead, request: ModelRequest) -> None:
        """Write the answer to a request."""
        super().__init__(head, request)
        self._choices = [
            _Choice(number, request.custom_tools, is_streamed=request.stream)
            for number in range(request.num_choices)
        ]

    def start(self, usage: answers.Usage) -> Iterator[str]:
        """Yield the first chunks, with the role."""
        del usage
        top = self._prompt_fields()
        for choice in self._choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""}, top=top)
            top = {}

    def push(
        self, pieces: Sequence[Piece], choice: int = 0, tokens: answers.NewTokens | None = None
    ) -> Iterator[str]:
        """Add to a choice; yield chunks; the first one with text has the new tokens."""
        of = self._choices[choice]
        if tokens is not None:
            of.add_tokens(tokens)
        for piece in pieces:
            delta = of.add(piece)
            yield self._chunk(of, delta, tokens=tokens if "content" in delta else None)
            tokens = None if "content" in delta else tokens
        if tokens:
            yield self._chunk(of, {"content": ""}, tokens=tokens)

    def finish(
        self, reason: answers.FinishReason, choice: int = 0, stop: str | int = ""
    ) -> Iterator[str]:
        """End a choice."""
        of = self._choices[choice]
        of.close(reason, stop)
        yield self._chunk(of, {})

    def whole(self, usage: answers.Usage) -> dict[str, Any]:
        """Return the answer as one object."""
        return {
            **self._top("chat.completion"),
            **self._prompt_fields(),
            **self._scores(0),
            "choices": [
                {
                    "index": choice.number,
                    "message": choice.message(),
                    "logprobs": _worded_logprobs(choice.logprobs),
                    "finish_reason": choice.finish,
                    "stop_reason": choice.stop,
                    **({} if choice.ids is None else {"token_ids": choice.ids}),
                }
                for choice in self._choices
            ],
            "usage": worded_usage(usage),
        }

    def _chunk(
        self,
        of: _Choice,
        delta: dict[str, Any],
        *,
        tokens: answers.NewTokens | None = None,
        top: Mapping[str, Any] | None = None,
    ) -> str:
        if not self._is_streamed:  # chunks are not read here, and log-probs take time
            return ""
        tokens = tokens or answers.NewTokens()
        choice: dict[str, Any] = {
            "index": of.number,
            "delta": delta,
            "logprobs": _worded_logprobs(tokens.logprobs),
            "finish_reason": of.finish,
        }
        if of.finish is not None:
            choice["stop_reason"] = of.stop
        if tokens.ids is not None:
            choice["token_ids"] = list(tokens.ids)
        return self._event(choice, top)

    def _prompt_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.prompt_ids[0])} if self.prompt_ids else {}


class CompletionAnswer(OpenAIAnswer):
    """The choices of an answer of Completions, of one or several prompts; see `Answer`."""

    chunk_kind = "text_completion"

    def __init__(self, head: answers.AnswerHead, request: ModelRequest) -> None:
        """Write the answer to a request."""
        super().__init__(head, request)
        self._num_top = request.top_logprobs or 0
        self._per_prompt = request.num_choices
        num = request.num_choices * len(request.prompts)
        self._choices = [_Text(number, is_streamed=request.stream) for number in range(num)]

    def start(self, usage: answers.Usage) -> Iterator[str]:
        """Yield nothing, since the first event has text."""
        del usage
        yield from ()

    def push(
        self, pieces: Sequence[Piece], choice: int = 0, tokens: answers.NewTokens | None = None
    ) -> Iterator[str]:
        """Add to a choice; yield the addition as an event."""
        of = self._choices[choice]
        text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
        of.text += text
        if tokens is not None:
            of.add_tokens(tokens)
        if self._is_streamed and (text or tokens):
            new = self._choice(of, text, tokens or answers.NewTokens())
            yield self._event({**new, "finish_reason": None})

    def finish(
        self, reason: answers.FinishReason, choice: int = 0, stop: str | int = ""
    ) -> Iterator[str]:
        """End a choice."""
        of = self._choices[choice]
        of.close(reason, stop)
        end = {"finish_reason": of.finish, "stop_reason": of.stop}
        yield self._event({"index": of.number, "text": "", "logprobs": None, **end})

    def whole(self, usage: answers.Usage) -> dict[str, Any]:
        """Return the answer as one object."""
        choices: list[dict[str, Any]] = []
        for of in self._choices:
            of.has_prompt, of.offset = False, _Offset()
            whole = self._choice(of, of.text, answers.NewTokens(of.ids, of.logprobs))
            scores = self._scores(of.number // self._per_prompt)
            end = {"finish_reason": of.finish, "stop_reason": of.stop}
            choices.append({**whole, **end, **scores})
        usage_fields = {"usage": worded_usage(usage)}
        return {**self._top(self.chunk_kind), "choices": choices, **usage_fields}

    def _choice(self, of: "_Text", text: str, tokens: answers.NewTokens) -> dict[str, Any]:
        """Return a part of a choice; the first part has the prompt's tokens, as in vLLM."""
        choice: dict[str, Any] = {"index": of.number, "text": text, "logprobs": None}
        if tokens.logprobs is not None:
            choice["logprobs"] = self._logprobs(of, tokens.logprobs)
        if tokens.ids is not None:
            choice["token_ids"] = list(tokens.ids)
            if self.prompt_ids and not of.has_prompt:
                of.has_prompt = True
                ids = self.prompt_ids[of.number // self._per_prompt]
                choice["prompt_token_ids"] = list(ids)
        return choice

    def _logprobs(self, of: "_Text", logprobs: Sequence[answers.TokenLogprob]) -> dict[str, Any]:
        rows = [_by_text(token) for token in logprobs]
        likeliest = [
            row if token.is_known else None for (row, _), token in zip(rows, logprobs, strict=True)
        ]
        repeated = [others for _, others in rows]
        return {
            "tokens": [token.text for token in logprobs],
            "token_logprobs": [token.logprob if token.is_known else None for token in logprobs],
            "top_logprobs": likeliest if self._num_top else None,
            "text_offset": [of.offset.behind(token) for token in logprobs],
            **({"repeated_top_logprobs": repeated} if any(repeated) else {}),
        }


def _by_text(token: answers.TokenLogprob) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the likeliest tokens at a position by text, and those of a text that is taken.

    The API has one number for a text, which is that of its likeliest token.
    """
    likeliest: dict[str, float] = {}
    repeated: list[dict[str, Any]] = []
    for other in sorted(token.top, key=lambda other: -other.logprob):
        if other.text in likeliest:
            repeated.append(other.fields())
        else:
            likeliest[other.text] = max(other.logprob, answers.LEAST_LOGPROB)
    return likeliest, repeated


class _Offset:
    """Offset of the next token in a text; the offset of a character is that of its first byte."""

    def __init__(self) -> None:
        self._place = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def behind(self, token: answers.TokenLogprob) -> int:
        """Return a token's offset, and move behind it."""
        encoded = token.text.encode(errors="replace") if token.encoded is None else token.encoded
        begun = self._decoder.getstate()[0]
        text = self._decoder.decode(encoded)
        # an unfinished character that this token does not continue has its own position
        is_broken = bool(begun and text) and not (begun + encoded).startswith(text[0].encode())
        place = self._place + is_broken
        self._place += len(text)
        return place


class _Text(_Choice):
    """One continued text."""

    def __init__(self, number: int, *, is_streamed: bool = False) -> None:
        super().__init__(number, is_streamed=is_streamed)
        self.has_prompt = False
        """Whether its prompt's tokens have been written."""
        self.offset = _Offset()


def _worded_logprobs(logprobs: Sequence[answers.TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    return {"content": [token.worded() for token in logprobs], "refusal": None}


def _score_rows(score: PromptScore, prompt: Sequence[int]) -> Iterator[dict[str, Any] | None]:
    """Yield a row for each token: the token and the likeliest at its position, by id."""
    ids = prompt[score.start : score.start + len(score.logprobs)]
    columns = (score.logprobs, score.top_ids, score.top_logprobs)
    for token, own, top, logprobs in zip(
        ids, *(column.tolist() for column in columns), strict=True
    ):
        if math.isnan(own):
            yield None  # the first token has no log-prob
            continue
        ranked = enumerate(zip(top, logprobs, strict=True), 1)
        likeliest = {str(other): _ranked(value, rank) for rank, (other, value) in ranked}
        yield {str(token): _ranked(own, None), **likeliest}


def _ranked(logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": max(logprob, answers.LEAST_LOGPROB), "rank": rank, "decoded_token": None}


def worded_usage(usage: answers.Usage) -> dict[str, Any]:
    """Return token counts in the form of Chat Completions."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.reused},
    }


CHAT = answers.ModelApi("chat", "chatcmpl-", read_chat, ChatCompletionAnswer, answers.openai_error)
COMPLETIONS = answers.ModelApi(
    "completions", "cmpl-", read_completion, CompletionAnswer, answers.openai_error
)
