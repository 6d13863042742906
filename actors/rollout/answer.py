"""One answer of the model as it grows, for its readers, also repeated ones."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...broker.client.parts import Tell
from ...schemas.agent import CallDelta, CallPart, CallRequest
from ...schemas.wire.array import FloatVector
from ..engine.engine import Drawn, Generation
from ..policy.chat import ChatTokenizer
from ..policy.token_text import TextStream
from .exact_calls import LoggedAnswer, PreparedCall
from .template_facts import Tools, certain_text, read_text, reads_whole

_GATHER_S = 0.02
"""Tokens within this time are sent together: fewer messages, still faster than reading."""


class GrowingChoice:
    """One of the answers to a request, token by token."""

    def __init__(
        self,
        prepared: PreparedCall,
        chat: ChatTokenizer,
        stops: Sequence[str],
        tools: Tools = (),
        *,
        by_token: bool = True,
        tells_tokens: bool = False,
    ) -> None:
        """`stops` are texts before which it ends; only with them and `by_token` is text made of
        each token, which costs more than the whole at once.

        With `tools` and a model that writes calls in a format of its own, they are sent when the
        answer is whole; with a tokenizer that says how answers are parsed, all of it is.
        """
        self.prepared = prepared
        self.tells_tokens = tells_tokens
        """Whether the text of each token is sent by itself."""
        self.drawn: list[Drawn] = []
        self.text = ""
        """What can be sent."""
        self.answered: LoggedAnswer | None = None
        """The whole, once it has ended."""
        self._chat = chat
        self._tools = tools if tools and reads_whole(chat) else ()
        self._plain = ""
        self._by_token = by_token or bool(stops)
        self._stream = TextStream(chat.decode, stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop text was met."""
        return self._stream.stopped

    def add(self, drawn: Drawn) -> None:
        """Take the next token; nothing counts behind a stop text."""
        if self.stopped:
            return
        self.drawn.append(drawn)
        if self._by_token:
            self._plain += self._stream.push(drawn.token_id)
            if not self._tools:
                self.text = self._plain
            elif not self._chat.parses_responses:
                self.text = certain_text(self._chat, self._plain, self._tools)

    def describe_tokens(self, drawn: Sequence[Drawn]) -> dict[str, Any]:
        """Return the texts of tokens and of the likeliest in their places, where asked for."""
        if not self.tells_tokens:
            return {}
        return {
            "tokens": [self._chat.token_text(drawn_token.token_id) for drawn_token in drawn],
            "top_tokens": [
                [self._chat.token_text(token) for token, _ in drawn_token.top]
                for drawn_token in drawn
            ],
            "top_logprobs": [[logprob for _, logprob in drawn_token.top] for drawn_token in drawn],
        }

    def end(self, generation: Generation, request: bytes, asking: str) -> None:
        """Take note of the end; tokens that reach into a stop text are not kept."""
        text = None
        masked = _masked(generation, len(self.drawn))
        if self.stopped:
            text = self.text = self._plain
            generation = _generation(self.drawn[: self._whole_tokens(text)], "stop", masked)
        else:
            if self._tools:
                ids = [drawn.token_id for drawn in self.drawn]
                prompt = self.prepared.prompt_ids.tolist()
                text = self.text = read_text(self._chat, prompt, ids, self._tools)
            elif self._by_token:
                self.text = self._plain + self._stream.finish()
            else:
                self.text = self._chat.decode([drawn.token_id for drawn in self.drawn])
            ended = generation.finish_reason
            is_stop = ended == "cancelled" or ended == "stop"  # cancelled: it had ended before
            generation = _generation(self.drawn, "stop" if is_stop else "length", masked)
        self.answered = LoggedAnswer(self.prepared, generation, text, request, asking)

    @classmethod
    def from_log(cls, answered: LoggedAnswer, chat: ChatTokenizer) -> "GrowingChoice":
        """Return an answer that was given before."""
        choice = cls(answered.prepared, chat, ())
        choice._replay(answered)
        return choice

    def _replay(self, answered: LoggedAnswer) -> None:
        generated = answered.generated
        columns = (generated.token_ids, generated.logprobs, generated.versions)
        self.drawn = [Drawn(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
        text = answered.text
        self.text = self._chat.decode(generated.token_ids) if text is None else text
        self.answered = answered

    def _whole_tokens(self, text: str) -> int:
        """Return how many tokens say no more than a text."""
        num_tokens = len(self.drawn)
        while num_tokens and len(self._text_of(num_tokens)) > len(text):
            num_tokens -= 1
        return num_tokens

    def _text_of(self, num: int) -> str:
        return self._chat.decode([drawn.token_id for drawn in self.drawn[:num]])


def _masked(generation: Generation, num: int) -> FloatVector | None:
    """Return float32[num]: what a grammar took out of the choice, 0 where it is not known.

    That is where another generator drew the token, before those of `generation`.
    """
    if generation.masked is None:
        return None
    known = generation.masked[:num]
    return np.concatenate([np.zeros(num - len(known), np.float32), known])


def _generation(
    drawn: Sequence[Drawn], finish: Literal["stop", "length"], masked: FloatVector | None
) -> Generation:
    return Generation(
        np.array([token.token_id for token in drawn], np.int32),
        np.array([token.logprob for token in drawn], np.float32),
        np.array([token.version for token in drawn], np.int32),
        finish,
        masked=None if masked is None else masked[: len(drawn)],
    )


def asking_of(request: CallRequest) -> str:
    """Return the id by which a proxy asked for an answer first."""
    return request.request.partition("-")[0]


def is_asked_again(request: CallRequest) -> bool:
    """Whether a proxy asks for what it lacks of an answer, as who gave it has died."""
    return "-" in request.request


def begun_names(request: CallRequest) -> Sequence[str]:
    """Return the names of the choices of which a program has a part."""
    return request.begun.names if request.begun is not None else ()


@dataclass(eq=False)
class GrowingAnswer:
    """The answer to one request: its choices, and who waits for them."""

    digest: bytes
    """Of the request, by its prompt and limits."""
    opening: CallPart
    choices: list[GrowingChoice]
    askings: list[str]
    """Ids by which proxies asked for it; the first began it."""
    task: "asyncio.Task[list[int]]" = field(init=False)
    """Generates it and writes it down; its result is the numbers of the calls."""
    num_listeners: int = 0
    """Its readers; a program that hangs up may come back for the answer."""
    on_change: "set[asyncio.Event]" = field(default_factory=set["asyncio.Event"])

    def is_known_to(self, request: CallRequest) -> bool:
        """Whether who asks has asked for it before, or has a part of it."""
        names = begun_names(request)
        named = any(choice.prepared.name in names for choice in self.choices)
        return named or asking_of(request) in self.askings

    def changed(self) -> None:
        """Wake its readers."""
        for event in self.on_change:
            event.set()

    async def send_parts(
        self,
        tell: Tell[CallPart],
        *,
        stream: bool,
        begun: CallPart | None,
        on_alone: Callable[[], None],
    ) -> CallPart:
        """Send the answer as it grows, after what was sent before; return the last part.

        `on_alone` is called when the last reader has left.
        """
        changed = asyncio.Event()
        self.on_change.add(changed)
        self.num_listeners += 1
        writer = _PartWriter(self, begun)
        try:
            if stream:
                await self._stream(writer, changed, tell)
            calls = await asyncio.shield(self.task)
            return writer.part(finished=True).model_copy(update={"calls": calls})
        finally:
            self.on_change.discard(changed)
            self.num_listeners -= 1
            if not self.num_listeners:
                on_alone()

    async def _stream(
        self, writer: "_PartWriter", changed: asyncio.Event, tell: Tell[CallPart]
    ) -> None:
        await tell(writer.part())
        while not self.task.done():
            waiting = asyncio.ensure_future(changed.wait())
            try:
                await asyncio.wait({self.task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
            changed.clear()
            part = writer.part()
            if part.deltas:
                await tell(part)
                await asyncio.sleep(_GATHER_S)


class _PartWriter:
    """Keeps what was sent to one reader."""

    def __init__(self, answer: GrowingAnswer, begun: CallPart | None) -> None:
        self._answer = answer
        self._sent = [(0, 0)] * len(answer.choices)
        self._ended: set[int] = set()
        for delta in begun.deltas if begun is not None else ():
            self._sent[delta.choice] = len(delta.token_ids), len(delta.text)
            if delta.finish is not None:
                self._ended.add(delta.choice)
        self._opened = False

    def part(self, *, finished: bool = False) -> CallPart:
        """Return what is new."""
        head = (
            self._answer.opening
            if not self._opened
            else CallPart(delivery=self._answer.opening.delivery)
        )
        self._opened = True
        deltas = [
            delta
            for number, choice in enumerate(self._answer.choices)
            if number not in self._ended
            and (delta := self._delta(number, choice, finished=finished))
        ]
        return head.model_copy(update={"deltas": deltas})

    def _delta(self, number: int, choice: GrowingChoice, *, finished: bool) -> CallDelta | None:
        tokens, chars = self._sent[number]
        fresh, text = choice.drawn[tokens:], choice.text[chars:]
        if not (fresh or text or finished):
            return None
        self._sent[number] = tokens + len(fresh), chars + len(text)
        finish = None
        if finished and choice.answered is not None:
            finish = choice.answered.generated.finish_reason
        return CallDelta(
            choice=number,
            text=text,
            token_ids=[drawn.token_id for drawn in fresh],
            logprobs=[drawn.logprob for drawn in fresh],
            versions=[drawn.version for drawn in fresh],
            finish=finish,
            **choice.describe_tokens(fresh),
        )
