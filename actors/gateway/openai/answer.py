"""A server's answer in OpenAI's words: whole, or as the events of a stream."""

import codecs
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....envs.agents.replies import (
    Piece,
    ReasoningPiece,
    ReplyReader,
    TextPiece,
    call_name,
)
from ....envs.tool_calls import ToolText
from ....schemas.infer import Delta, InferPart, PromptScore
from .body import ChatBody, CompletionBody

DONE = "data: [DONE]\n\n"
_LEAST = -9999.0
"""In the place of -inf, which JSON does not have."""


class Answer:
    """Collects the parts of one answer, and words them for a chat or a completion."""

    def __init__(self, body: ChatBody | CompletionBody, name: str, num_choices: int) -> None:
        """Word the answer to `body`; `name` is its id."""
        self._body = body
        self._chat = isinstance(body, ChatBody)
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{name}"
        self._created = int(time.time())
        tools = isinstance(body, ChatBody) and body.uses_tools
        self._num_choices = body.n
        """Of each prompt."""
        self._choices = [_Choice(number, tools, name) for number in range(num_choices)]
        self._wants_logprobs = body.logprobs is not None and body.logprobs is not False
        self._num_top = body.top_logprobs if isinstance(body, ChatBody) else body.logprobs or 0
        self._wants_ids = body.return_token_ids
        self._has_form = isinstance(body, ChatBody) and body.format is not None
        self._prompt_ids: list[list[int]] = []
        self._scores: dict[int, list[PromptScore]] = {}
        self._vocabulary = ""
        self._model = ""
        self._usage: dict[str, Any] = _usage(0, 0)

    def take(self, part: InferPart) -> None:
        """Take the next part."""
        self._model = part.model or self._model
        self._prompt_ids = part.prompt_token_ids or self._prompt_ids
        if part.last:
            self._usage = _usage(part.prompt_tokens, part.completion_tokens)
        self._vocabulary = part.vocabulary or self._vocabulary
        if part.is_thinking and self._has_form:
            for choice in self._choices:
                choice.begin_with_reasoning()
        for score in part.scores:
            self._scores.setdefault(score.prompt, []).append(score)
        for delta in part.deltas:
            self._choices[delta.choice].take(delta)

    def whole(self) -> dict[str, Any]:
        """Return the answer as one object."""
        top = {"prompt_token_ids": self._prompt_ids[0]} if self._chat and self._prompt_ids else {}
        return {
            **self._head("chat.completion" if self._chat else "text_completion"),
            **top,
            **({"tinkermq": {"vocabulary": self._vocabulary}} if self._scores else {}),
            "choices": [
                self._whole_chat(choice) if self._chat else self._whole_text(choice)
                for choice in self._choices
            ],
            "usage": self._usage,
        }

    def start(self, first: InferPart) -> Iterator[str]:
        """Yield the events before the first text: for a chat, whose turn it is."""
        if self._chat:
            self._model, ids = first.model, first.prompt_token_ids
            top = {"prompt_token_ids": ids[0]} if ids else {}
            for choice in self._choices:
                begun = {"role": "assistant", "content": ""}
                yield self._event(choice, begun, None, None, top=top)
                top = {}

    def events(self, part: InferPart) -> Iterator[str]:
        """Take a part; yield what is new as events."""
        self.take(part)
        for choice in self._choices:
            yield from self._news(choice)

    def end(self) -> Iterator[str]:
        """Yield the last events: the token counts, if they were asked for, and the end."""
        if self._body.include_usage:
            head = self._head("chat.completion.chunk" if self._chat else "text_completion")
            yield event({**head, "choices": [], "usage": self._usage})
        yield DONE

    def _news(self, choice: "_Choice") -> Iterator[str]:
        text, deltas = choice.news()
        logprobs = self._logprobs(deltas, choice) if self._wants_logprobs and deltas else None
        ids = self._ids(deltas, choice)
        if reasoning := choice.new_reasoning():
            yield self._event(choice, {"reasoning_content": reasoning}, None, None)
        if text or logprobs is not None or ids.get("token_ids"):
            yield self._event(choice, {"content": text}, logprobs, None, ids=ids)
        if choice.finish is not None and not choice.told_end:
            choice.told_end = True
            if last := choice.end_text():
                yield self._event(choice, {"content": last}, None, None)
            rest, calls = choice.tools.finish()
            if rest:
                yield self._event(choice, {"content": rest}, None, None)
            for number, call in enumerate(calls):
                yield self._event(choice, {"tool_calls": [{"index": number, **call}]}, None, None)
            yield self._event(choice, {}, None, _reason(choice.finish, bool(calls)))

    def _event(
        self,
        choice: "_Choice",
        delta: dict[str, Any],
        logprobs: Any,
        finish: str | None,
        *,
        ids: Mapping[str, Any] | None = None,
        top: Mapping[str, Any] | None = None,
    ) -> str:
        usage = {"usage": None} if self._body.include_usage else {}
        said: dict[str, Any] = (
            {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        )
        one = {"index": choice.number, **said, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            one["stop_reason"] = choice.stop
        one |= ids or {}
        head = self._head("chat.completion.chunk" if self._chat else "text_completion")
        return event({**head, **(top or {}), "choices": [one], **usage})

    def _whole_chat(self, choice: "_Choice") -> dict[str, Any]:
        before, deltas = choice.news()
        before += choice.end_text()
        rest, calls = choice.tools.finish()
        text = (before + rest).rstrip() if calls else before + rest
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := choice.new_reasoning():
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {
            "index": choice.number,
            "message": message,
            "logprobs": self._logprobs(deltas, choice) if self._wants_logprobs else None,
            "finish_reason": _reason(choice.finish, bool(calls)),
            "stop_reason": choice.stop,
            **self._ids(deltas, choice),
        }

    def _whole_text(self, choice: "_Choice") -> dict[str, Any]:
        text, deltas = choice.news()
        return {
            "index": choice.number,
            "text": text,
            "logprobs": self._logprobs(deltas, choice) if self._wants_logprobs else None,
            "finish_reason": _reason(choice.finish, calls=False),
            "stop_reason": choice.stop,
            **self._ids(deltas, choice),
            **self._of_prompt(choice.number // self._num_choices),
        }

    def _of_prompt(self, number: int) -> dict[str, Any]:
        """Return the log-probs of a prompt's tokens where vLLM has them, if they were asked for."""
        if number not in self._scores:
            return {}
        told = [row for piece in self._scores[number] for row in _rows(piece, self._prompt_ids)]
        return {"prompt_logprobs": told}

    def _ids(self, deltas: list[Delta], choice: "_Choice") -> dict[str, Any]:
        """Return new tokens where vLLM has them; a completion has its prompt's once, too."""
        if not self._wants_ids:
            return {}
        told: dict[str, Any] = {"token_ids": [one for delta in deltas for one in delta.token_ids]}
        if not self._chat and self._prompt_ids and not choice.told_prompt:
            choice.told_prompt = True
            told["prompt_token_ids"] = self._prompt_ids[choice.number // self._num_choices]
        return told

    def _logprobs(self, deltas: list[Delta], choice: "_Choice") -> dict[str, Any]:
        pairs = [
            pair for delta in deltas for pair in zip(delta.tokens, delta.logprobs, strict=True)
        ]
        encoded = [one for delta in deltas for one in delta.token_bytes]
        tops = [top for delta in deltas for top in _tops(delta)]
        if self._chat:
            columns = zip(pairs, encoded, tops, strict=True)
            told = [_token(*pair, one, top) for pair, one, top in columns]
            return {"content": told, "refusal": None}
        offsets: list[int] = []
        for one in encoded:
            offsets.append(choice.offset)
            choice.offset += len(choice.decoder.decode(one))
        likeliest = [{text: value for text, value, _ in top} for top in tops]
        return {
            "tokens": [token for token, _ in pairs],
            "token_logprobs": [logprob for _, logprob in pairs],
            "top_logprobs": likeliest if self._num_top else None,
            "text_offset": offsets,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


class _Choice:
    """One choice, and what of it has not been told."""

    def __init__(self, number: int, tools: bool, name: str) -> None:
        self.number = number
        self.tools = ToolText(parse=tools, name=call_name(name, number))
        self.told_prompt = False
        self.finish: str | None = None
        self.stop: str | None = None
        """The stop text that ended it, where vLLM tells it."""
        self.told_end = False
        self.offset = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        """Of the bytes of tokens: a character begins where its first byte stands."""
        self._text = ""
        self._deltas: list[Delta] = []
        self._reader: ReplyReader | None = None
        self._reasoning = ""

    def begin_with_reasoning(self) -> None:
        """Take what comes first for reasoning, up to its mark: the prompt has opened it."""
        if self._reader is None:
            self._reader = ReplyReader("", calls=False)

    def _said(self, pieces: list[Piece]) -> str:
        """Return the text among pieces, and keep the reasoning."""
        self._reasoning += "".join(one.text for one in pieces if isinstance(one, ReasoningPiece))
        return "".join(one.text for one in pieces if isinstance(one, TextPiece))

    def new_reasoning(self) -> str:
        """Return what of the reasoning has not been told."""
        told, self._reasoning = self._reasoning, ""
        return told

    def end_text(self) -> str:
        """Return what was held back between reasoning and text, now that nothing follows."""
        return "" if self._reader is None else self.tools.push(self._said(self._reader.finish()))

    def take(self, delta: Delta) -> None:
        text = delta.text
        if self._reader is not None:
            text = self._said(self._reader.push(text))
        self._text += self.tools.push(text)
        if delta.token_ids:
            self._deltas.append(delta)
        self.finish = delta.finish or self.finish
        self.stop = delta.stop or self.stop

    def news(self) -> tuple[str, list[Delta]]:
        text, deltas = self._text, self._deltas
        self._text, self._deltas = "", []
        return text, deltas


def event(value: dict[str, Any]) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _reason(finish: str | None, calls: bool) -> str:
    if calls:
        return "tool_calls"
    return "length" if finish == "length" else "stop"


def _token(token: str, logprob: float, encoded: bytes, top: "_Tops | None" = ()) -> dict[str, Any]:
    told = {"token": token, "logprob": max(logprob, _LEAST), "bytes": list(encoded)}
    if top is None:  # itself one of those
        return told
    others = [_token(text, value, those, None) for text, value, those in top]
    return {**told, "top_logprobs": others}


_Tops = Sequence[tuple[str, float, bytes]]


def _tops(delta: Delta) -> "list[_Tops]":
    """Return the likeliest tokens in the place of each, best first: text, log-prob and bytes."""
    if not delta.top_tokens:
        return [[] for _ in delta.tokens]
    columns = zip(delta.top_tokens, delta.top_logprobs, delta.top_bytes, strict=True)
    return [
        [(text, max(value, _LEAST), those) for text, value, those in zip(*one, strict=True)]
        for one in columns
    ]


def _rows(piece: PromptScore, prompts: Sequence[Sequence[int]]) -> Iterator[dict[str, Any] | None]:
    """Yield what is told of each token: itself and the likeliest in its place, by their ids."""
    ids = prompts[piece.prompt][piece.start : piece.start + len(piece.logprobs)]
    columns = (piece.logprobs, piece.top_ids, piece.top_logprobs)
    for token, own, top, logprobs in zip(ids, *(one.tolist() for one in columns), strict=True):
        if math.isnan(own):
            yield None  # nothing stands before it
            continue
        ranked = enumerate(zip(top, logprobs, strict=True), 1)
        told = {str(other): _ranked(value, rank) for rank, (other, value) in ranked}
        yield {str(token): _ranked(own, None), **told}


def _ranked(logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": max(logprob, _LEAST), "rank": rank, "decoded_token": None}


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
