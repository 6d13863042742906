"""A gathered answer as one of a program's requests is told it, bit by bit."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..dialects.answer import AnswerHead, Usage
from ..dialects.request import ModelRequest
from ..dialects.responses import input_items
from ..replies import ReplyReader
from .gathered import GatheredAnswer, GatheredChoice
from .open_episodes import KeptAnswer
from .wording import ChatWording, ModelApi, Wording

_EMPTY_BYTES, _TOKEN_BYTES = 4096, 64
"""What Python needs for an answer, and for each of its tokens."""


class AnswerReading:
    """How far a program has been told an answer."""

    def __init__(
        self, api: ModelApi, asked: ModelRequest, request: str, *, token_ids: bool
    ) -> None:
        """Read the answer to call `request` from its beginning."""
        self.id = ""
        """The answer's id, once anything of it is known."""
        self._api = api
        self._asked = asked
        self._request = request
        self._token_ids = token_ids
        self._wording: Wording | None = None
        self._usage = Usage(0, 0)
        self._readers: list[ReplyReader] = []
        self._created = int(time.time())
        self._num_texts = [0] * asked.num_choices
        self._num_logprobs = [0] * asked.num_choices

    def news(self, answer: GatheredAnswer) -> Iterator[str]:
        """Yield what the answer has gained, as events: the last ones once it is whole."""
        if answer.head is None:
            return
        if self._wording is None:
            yield from self._start(answer).start(self._usage)
        assert self._wording is not None
        for number, choice in enumerate(answer.choices):
            text = "".join(choice.texts[self._num_texts[number] :])
            self._num_texts[number] = len(choice.texts)
            if text:
                for piece in self._readers[number].push(text):
                    yield from self._wording.push(piece, number)
            yield from self._logprobs(choice, number)
        if answer.is_whole:
            yield from self._rest()
            self._usage = _usage(answer)
            extra = self._extra(answer) if self._token_ids else {}
            yield from self._wording.end(_ends(answer), self._usage, extra)

    def whole(self, answer: GatheredAnswer) -> dict[str, Any]:
        """Return an answer that is whole as one object."""
        wording = self._start(answer)
        self._num_logprobs = [0] * len(answer.choices)
        for number, choice in enumerate(answer.choices):
            reader = self._readers[number]
            for piece in (*reader.push("".join(choice.texts)), *reader.finish()):
                wording.take(piece, number)
            for _ in self._logprobs(choice, number):
                pass
        value = wording.whole(_ends(answer), _usage(answer))
        if self._token_ids:
            value |= self._extra(answer)
            if self._api.api == "chat":
                _put_token_ids(value, answer)
        return value

    def kept(self, answer: GatheredAnswer) -> KeptAnswer:
        """Return what words a whole answer again, without the history that was asked with."""
        asked = replace(self._asked, messages=(), tools=())
        again = AnswerReading(self._api, asked, self._request, token_ids=self._token_ids)
        again._created = self._created
        num_chars = sum(len(text) for choice in answer.choices for text in choice.texts)
        num_tokens = answer.num_generated + len(answer.head.prompt_ids if answer.head else ())
        num_bytes = _EMPTY_BYTES + 4 * num_chars + _TOKEN_BYTES * num_tokens
        return KeptAnswer(lambda: again.whole(answer), num_bytes)

    def kept_input(self) -> KeptAnswer:
        """Return what lists the messages that it was asked with."""
        name, messages = self.id, self._asked.messages
        num_bytes = _EMPTY_BYTES + sum(message.num_bytes for message in messages)
        return KeptAnswer(lambda: {"data": list(input_items(messages, name))}, num_bytes)

    def fail(self, told: dict[str, Any]) -> str:
        """Return the event that ends a stream which cannot go on."""
        head = AnswerHead(self._request, self._created, self._asked.model)
        return (self._wording or self._api.word(head, self._asked)).fail(told)

    def _start(self, answer: GatheredAnswer) -> Wording:
        head = answer.head
        assert head is not None
        self.id = self._api.id_of(head.names[0] if head.names else self._request)
        told = AnswerHead(self.id, self._created, self._asked.model or "policy")
        self._wording = self._api.word(told, self._asked)
        self._usage = Usage(head.num_prompt, 0, head.num_reused)
        self._readers = [
            ReplyReader(name, calls=head.has_tools, thinking=head.is_thinking)
            for name in (head.names or [f"call_{self._request}"] * len(answer.choices))
        ]
        return self._wording

    def _logprobs(self, choice: GatheredChoice, number: int) -> Iterator[str]:
        """Yield the log-probs of tokens that have come since, where they were asked for."""
        if self._asked.top_logprobs is None or not isinstance(self._wording, ChatWording):
            return
        fresh = choice.told_logprobs[self._num_logprobs[number] :]
        self._num_logprobs[number] += len(fresh)
        yield from self._wording.note_logprobs(fresh, number)

    def _rest(self) -> Iterator[str]:
        """Yield what was held back of each choice, now that nothing follows."""
        assert self._wording is not None
        for number, reader in enumerate(self._readers):
            for piece in reader.finish():
                yield from self._wording.push(piece, number)

    def _extra(self, answer: GatheredAnswer) -> dict[str, Any]:
        """Return what those are told who ask for tokens."""
        head = answer.head
        assert head is not None
        answers = [
            {
                "call": answer.calls[number] if number < len(answer.calls) else None,
                "token_ids": choice.token_ids,
                "logprobs": choice.logprobs,
                "versions": choice.versions,
            }
            for number, choice in enumerate(answer.choices)
        ]
        told = {
            "parent": head.parent,
            "reused": head.num_reused,
            "prompt_token_ids": head.prompt_ids,
            "answers": answers,
        }
        return {"tinkermq": told}


def _ends(answer: GatheredAnswer) -> list[Any]:
    return [choice.finish or "stop" for choice in answer.choices]


def _usage(answer: GatheredAnswer) -> Usage:
    head = answer.head
    assert head is not None
    return Usage(head.num_prompt, answer.num_generated, head.num_reused)


def _put_token_ids(value: dict[str, Any], answer: GatheredAnswer) -> None:
    """Put tokens where vLLM has them."""
    assert answer.head is not None
    value["prompt_token_ids"] = answer.head.prompt_ids
    for told, choice in zip(value["choices"], answer.choices, strict=True):
        told["token_ids"] = choice.token_ids
