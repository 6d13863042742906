"""Reads the parts of an answer and writes it in the form of an API.

The gateway uses it for answers of servers, and the proxy of agent programs for answers of
generators.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..agent import CallPart
from ..generation import Delta, TextPart
from ..infer import InferPart
from ..tool_calls import THINK
from .answers import Answer, AnswerHead, FinishReason, ModelApi, NewTokens, TokenLogprob, Usage
from .canonical import CanonicalCall, Piece, ReplyReader, TextPiece, call_name
from .chat import CHAT, OpenAIAnswer
from .request import ModelRequest

_RETURNED_COLUMNS = ("token_ids", "logprobs", "versions")


class AnswerReader:
    """Reads one answer from its first part to its last, choice by choice."""

    def __init__(
        self, api: ModelApi, request: ModelRequest, name: str, *, is_call: bool = False
    ) -> None:
        """Read the answer to `request`, sent under the id `name`, a program's call with `is_call`.

        A served chat of Chat Completions keeps its reasoning in the text, unless its form excludes
        it, and a required single tool call ends a served answer. An episode's answer is returned as
        it was generated, and a stream of it has its tokens in the last event only.
        """
        self.id = api.id_of(name)
        """The answer's id, from its first part on."""
        self.head: InferPart | None = None
        """The part of a server that says what it takes of the request."""
        self._api = api
        self._name = name
        self._is_call = is_call
        self._created = int(time.time())
        self._request: ModelRequest | None = request
        self._answer: Answer | None = None
        self._num_choices = max(1, len(request.prompts)) * request.num_choices
        self._is_chat = not request.prompts
        self._tells_ids = request.return_token_ids and not (is_call and request.stream)
        self._tells_logprobs = request.top_logprobs is not None
        self._one_call = request.calls_one and not is_call
        self._readers: list[ReplyReader] = []
        self._opened: list[str] = []
        """Text before the first text of each choice."""
        self._open = set(range(self._num_choices))
        """Choices that have not ended."""
        self._full: set[int] = set()
        """Choices that have made their only allowed tool call."""
        self._usage = Usage(0, 0)
        has_own_field = is_call or api.name in ("responses", "messages")
        self._returned: list[dict[str, Any]] | None = None
        """Tokens of each choice, for the additional field of an answer."""
        if request.return_token_ids and has_own_field:
            self._returned = [{} for _ in range(self._num_choices)]
        self._extra: dict[str, Any] = {}

    def _begin(self, part: TextPart) -> Iterator[str]:
        """Yield the first events; `part` is the first one with content."""
        request = self._request
        assert request is not None
        names = [call_name(self._name, number) for number in range(request.num_choices)]
        model, num_reused = request.model or "policy", 0
        if isinstance(part, CallPart) and part.names:
            names, num_reused = part.names, part.num_reused
            self.id = self._api.id_of(names[0])
        elif isinstance(part, InferPart):
            model = part.model
        self._answer = self._api.answer(AnswerHead(self.id, self._created, model), request)
        self._request = None  # it may be large
        self._usage = Usage(part.prompt_tokens, 0, num_reused)
        has_form = bool(part.opened) and request.format is not None
        keeps_reasoning = self._api is CHAT and not self._is_call and not has_form
        is_read = part.opened.startswith(THINK) and not keeps_reasoning
        self._opened = ["" if is_read else part.opened] * self._num_choices
        if self._is_chat:
            self._readers = [
                ReplyReader(
                    name,
                    calls=bool(request.tools),
                    thinking=is_read,
                    keeps_reasoning=keeps_reasoning,
                )
                for name in names
            ]
        self._note(part)
        yield from self._answer.start(self._usage)

    def push(self, part: TextPart) -> Iterator[str]:
        """Read a part; yield its content as events."""
        if self._answer is None:
            yield from self._begin(part)
        else:
            self._note(part)
        answer = self._begun()
        if isinstance(answer, OpenAIAnswer) and isinstance(part, InferPart):
            answer.scores += part.scores
        for delta in part.deltas:
            usage = self._usage
            num_generated = usage.generated + len(delta.token_ids)
            self._usage = Usage(usage.prompt, num_generated, usage.reused)
            yield from answer.push(self._pieces(delta), delta.choice, self._tokens(delta))
            if delta.finish is not None:
                yield from self._finish(delta.choice, delta.finish, delta.stop)

    def end(self) -> Iterator[str]:
        """Yield the last events."""
        for number in sorted(self._open):
            yield from self._finish(number, "stop", "")
        yield from self._begun().end(self._usage, self._own_field())

    def whole(self) -> dict[str, Any]:
        """Return the answer as one object, after its last part was read."""
        for number in sorted(self._open):
            _exhaust(self._finish(number, "stop", ""))
        return self._begun().whole(self._usage) | self._own_field()

    def fail(self, error: Mapping[str, Any]) -> str:
        """Return the event that ends a failed stream."""
        if self._request is not None:
            head = AnswerHead(self.id, self._created, self._request.model)
            return self._api.answer(head, self._request).fail(error)
        return self._begun().fail(error)

    def _own_field(self) -> dict[str, Any]:
        """Return the additional field of an answer whose tokens were requested."""
        answers = {} if self._returned is None else {"answers": self._returned}
        return {"tinkermq": {**self._extra, **answers}} if answers or self._extra else {}

    def _begun(self) -> Answer:
        assert self._answer is not None, "begin first"
        return self._answer

    def _note(self, part: TextPart) -> None:
        """Record the fields about the prompts, and those of the additional field."""
        if part.prompt_tokens:
            usage = self._usage
            self._usage = Usage(part.prompt_tokens, usage.generated, usage.reused)
        if part.prompt_token_ids and self._tells_ids:
            self._begun().prompt_ids = part.prompt_token_ids
        if isinstance(part, InferPart) and part.max_context:
            self.head = part
        if isinstance(part, InferPart) and part.vocabulary:
            self._extra["vocabulary"] = part.vocabulary
        if self._returned is None:
            return
        if part.prompt_token_ids:
            self._extra["prompt_token_ids"] = [i for ids in part.prompt_token_ids for i in ids]
        if isinstance(part, CallPart) and part.names:
            self._extra |= {"parent": part.parent, "reused": part.num_reused}
        if isinstance(part, CallPart) and part.calls:
            for columns, call in zip(self._returned, part.calls, strict=False):
                columns["call"] = call
        for delta in part.deltas:
            columns = self._returned[delta.choice]
            for column in _RETURNED_COLUMNS:
                if values := getattr(delta, column):
                    columns.setdefault(column, []).extend(values)

    def _finish(self, number: int, reason: FinishReason, stop: str | int) -> Iterator[str]:
        """End a choice, once, with the text that its reader held back."""
        if number not in self._open:
            return
        self._open.discard(number)
        if self._is_chat and (pieces := self._up_to_call(self._readers[number].finish(), number)):
            yield from self._begun().push(pieces, number)
        yield from self._begun().finish(reason, number, stop)

    def _pieces(self, delta: Delta) -> list[Piece]:
        """Return the pieces of a choice that a delta adds."""
        text, number = delta.text, delta.choice
        if text and self._opened[number]:
            text, self._opened[number] = self._opened[number] + text, ""
        if not self._is_chat:
            return [TextPiece(text)] if text else []
        return self._up_to_call(self._readers[number].push(text), number)

    def _up_to_call(self, pieces: list[Piece], number: int) -> list[Piece]:
        """Return the pieces, with `one_call` only up to the first tool call."""
        if not self._one_call:
            return pieces
        allowed: list[Piece] = []
        for piece in pieces:
            if number not in self._full:
                allowed.append(piece)
            if isinstance(piece, CanonicalCall):
                self._full.add(number)
        return allowed

    def _tokens(self, delta: Delta) -> NewTokens | None:
        """Return the new tokens of a choice in the requested form; None: not requested."""
        is_new = bool(delta.token_ids or delta.tokens)
        if not is_new or not (self._tells_ids or self._tells_logprobs):
            return None
        return NewTokens(
            ids=delta.token_ids if self._tells_ids else None,
            logprobs=_logprobs(delta) if self._tells_logprobs else None,
        )


def _logprobs(delta: Delta) -> list[TokenLogprob]:
    """Return the log-probs of new tokens, each with the likeliest tokens at its position."""
    num = len(delta.tokens)
    rows: list[tuple[TokenLogprob, ...]] = [() for _ in range(num)]
    if delta.top_tokens:
        top_bytes = delta.top_bytes or [[None] * len(row) for row in delta.top_tokens]
        columns = zip(delta.top_tokens, delta.top_logprobs, top_bytes, strict=True)
        rows = [
            tuple(
                TokenLogprob(text, logprob, (), encoded)
                for text, logprob, encoded in zip(*column, strict=True)
            )
            for column in columns
        ]
    token_bytes = delta.token_bytes or [None] * num
    tokens = zip(delta.tokens, delta.logprobs, rows, token_bytes, strict=True)
    return [TokenLogprob(*token) for token in tokens]


def _exhaust(events: Iterable[str]) -> None:
    for _ in events:
        pass
