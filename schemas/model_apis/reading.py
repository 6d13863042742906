"""Reads the parts of an answer and writes it in the form of an API.

The gateway uses it for answers of servers, and the proxy of agent programs for answers of
generators.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..generation import Delta, TextPart
from ..infer import InferPart
from .answers import Answer, AnswerHead, FinishReason, ModelApi, NewTokens, TokenLogprob, Usage
from .canonical import THINK, CanonicalCall, Piece, ReplyReader, TextPiece
from .chat import CompletionAnswer
from .request import ModelRequest


class AnswerReader:
    """Reads one answer from its first part to its last, choice by choice."""

    def __init__(
        self,
        api: ModelApi,
        request: ModelRequest,
        *,
        keeps_reasoning: bool = False,
        one_call: bool = False,
    ) -> None:
        """Read the answer to `request`.

        With `keeps_reasoning` reasoning stays in the text; with `one_call` a choice ends with its
        first tool call.
        """
        self._write = api.answer
        self._request: ModelRequest | None = request
        self._answer: Answer | None = None
        self._num_choices = max(1, len(request.prompts)) * request.num_choices
        self._is_chat = not request.prompts
        self._has_tools = bool(request.tools)
        self._tells_ids = request.return_token_ids
        self._tells_logprobs = request.top_logprobs is not None
        self._keeps_reasoning = keeps_reasoning
        self._one_call = one_call
        self._readers: list[ReplyReader] = []
        self._opened: list[str] = []
        """Text before the first text of each choice."""
        self._open = set(range(self._num_choices))
        """Choices that have not ended."""
        self._full: set[int] = set()
        """Choices that have made their only allowed tool call."""
        self._usage = Usage(0, 0)

    @property
    def has_begun(self) -> bool:
        """Whether the first part was read."""
        return self._answer is not None

    def begin(
        self, head: AnswerHead, part: TextPart, names: Sequence[str], num_reused: int = 0
    ) -> Iterator[str]:
        """Yield the first events; `part` is the first one with content, which `push` still has to
        read.

        `names` are the prefixes of each choice's tool call ids.
        """
        assert self._request is not None
        self._answer, self._request = self._write(head, self._request), None
        self._usage = Usage(part.prompt_tokens, 0, num_reused)
        is_read = part.opened.startswith(THINK) and not self._keeps_reasoning
        self._opened = ["" if is_read else part.opened] * self._num_choices
        if self._is_chat:
            self._readers = [
                ReplyReader(
                    name,
                    calls=self._has_tools,
                    thinking=is_read,
                    keeps_reasoning=self._keeps_reasoning,
                )
                for name in names
            ]
        self._note_prompts(part)
        yield from self._answer.start(self._usage)

    def push(self, part: TextPart) -> Iterator[str]:
        """Read a part; yield its content as events."""
        answer = self._begun()
        self._note_prompts(part)
        if isinstance(answer, CompletionAnswer) and isinstance(part, InferPart):
            answer.scores += part.scores
        for delta in part.deltas:
            usage = self._usage
            num_generated = usage.generated + len(delta.token_ids)
            self._usage = Usage(usage.prompt, num_generated, usage.reused)
            yield from answer.push(self._pieces(delta), delta.choice, self._tokens(delta))
            if delta.finish is not None:
                yield from self._finish(delta.choice, delta.finish, delta.stop)

    def end(self, extra: Mapping[str, Any] | None = None) -> Iterator[str]:
        """Yield the last events, with `extra` fields beside the usage."""
        for number in sorted(self._open):
            yield from self._finish(number, "stop", "")
        yield from self._begun().end(self._usage, extra)

    def whole(self) -> dict[str, Any]:
        """Return the answer as one object, after its last part was read."""
        for number in sorted(self._open):
            _exhaust(self._finish(number, "stop", ""))
        return self._begun().whole(self._usage)

    def fail(self, head: AnswerHead, error: Mapping[str, Any]) -> str:
        """Return the event that ends a failed stream; `head` is used if no part was read."""
        if self._request is not None:
            return self._write(head, self._request).fail(error)
        return self._begun().fail(error)

    def _begun(self) -> Answer:
        assert self._answer is not None, "begin first"
        return self._answer

    def _note_prompts(self, part: TextPart) -> None:
        if part.prompt_tokens:
            usage = self._usage
            self._usage = Usage(part.prompt_tokens, usage.generated, usage.reused)
        if part.prompt_token_ids and self._tells_ids:
            self._begun().prompt_ids = part.prompt_token_ids

    def _finish(self, number: int, reason: FinishReason, stop: str) -> Iterator[str]:
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
        if not delta.token_ids or not (self._tells_ids or self._tells_logprobs):
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
