"""A generator that plays the episodes of programs by a script: it says what a test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.parts import PartsService, Tell
from tinkermq.broker.client.rpc import Service
from tinkermq.schemas.agent import (
    CallDelivered,
    CallPart,
    CallRequest,
    CancelCall,
)
from tinkermq.schemas.generation import Delta
from tinkermq.schemas.wire.errors import EngineError, TinkermqError
from tinkermq.schemas.wire.subjects import JobScope


def last_text(request: CallRequest) -> str:
    """The last message's text."""
    return "".join(part for part in request.messages[-1].content if isinstance(part, str))


def echoed(request: CallRequest, choice: int) -> str:
    """Answer with what was said."""
    return f"You said: {last_text(request)}" + (f" ({choice})" if choice else "")


@dataclass
class Script:
    """What a scripted generator says, shared by those that take an episode over."""

    say: Callable[[CallRequest, int], str] = echoed
    """What it answers: to a request, as which choice."""
    error: TinkermqError | None = None
    """Raised in place of an answer."""
    stops_at: int | None = None
    """Tokens after which it waits for `go_on`."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    fails_at: int | None = None
    """Tokens after which the engine fails."""
    thinking: bool = False
    """Whether the prompt has opened the reasoning."""
    token_chars: int = 3
    """Characters of a token."""
    numbers: Any = field(default_factory=count)
    """Of the calls of the episode."""
    asked: list[CallRequest] = field(default_factory=list[CallRequest])
    cancelled: list[str] = field(default_factory=list[str])
    delivered: list[CallDelivered] = field(default_factory=list[CallDelivered])


def _token_texts(request: CallRequest, text: str) -> dict[str, Any]:
    """Return a token's text, and those of likelier ones, where they are asked for."""
    if not request.logprobs:
        return {}
    num = request.decoding.top_logprobs
    tops = {
        "top_tokens": [[f"t{n}" for n in range(num)]],
        "top_logprobs": [[-0.1 * n for n in range(num)]],
    }
    return {"tokens": [text], **tops}


class ScriptedGenerator:
    """Answers the calls of episodes, a few characters a token."""

    def __init__(
        self, broker: Broker, scope: JobScope, script: Script, *, delivery: int = 1
    ) -> None:
        """Play by a script."""
        self.script = script
        self._broker = broker
        self._scope = scope
        self._delivery = delivery

    @asynccontextmanager
    async def playing(self, *episodes: str) -> AsyncIterator["ScriptedGenerator"]:
        """Within, the calls of some episodes are answered; at the end it stops as if it died."""
        description = "plays programs by a script"
        service = await Service.start(self._broker, name="scripted", description=description)
        parts = PartsService(self._broker, service, alive_s=0.2)
        listening: list[Any] = []
        for episode in episodes:
            subject = self._scope.episode(episode, "call")
            blank = CallPart(delivery=self._delivery)
            listening += [
                await parts.listen(subject, CallRequest, CallPart, self._answer, blank=blank),
                await self._broker.listen(
                    self._scope.episode(episode, "cancel"),
                    lambda message: self._cancel(parts, CancelCall.from_bytes(message.data)),
                ),
                await self._broker.listen(
                    self._scope.episode(episode, "delivered"),
                    lambda message: self.script.delivered.append(
                        CallDelivered.from_bytes(message.data)
                    ),
                ),
            ]
        try:
            yield self
        finally:
            for each in listening:
                await each.stop()
            await service.stop(drain_s=0)

    def _cancel(self, parts: PartsService, cancel: CancelCall) -> None:
        self.script.cancelled.append(cancel.request)
        parts.cancel(cancel.request)

    async def _answer(self, request: CallRequest, tell: Tell[CallPart]) -> CallPart:
        script = self.script
        script.asked.append(request)
        if script.error is not None:
            raise script.error
        head = self._head(request)
        if request.count_only:
            return head
        tokens = [
            _tokens(script.say(request, choice), script.token_chars)
            for choice in range(request.decoding.num_choices)
        ]
        begun = request.begun.deltas if request.begun is not None else []
        told = {delta.choice: len(delta.token_ids) for delta in begun}
        deltas = [
            Delta(
                choice=choice,
                text=text,
                token_ids=[1000 * choice + place],
                logprobs=[-0.5],
                versions=[self._delivery],
                **_token_texts(request, text),
            )
            for place in range(max(map(len, tokens)))
            for choice, said in enumerate(tokens)
            for text in said[place : place + 1]
            if place >= told.get(choice, 0)
        ]
        ends = [Delta(choice=choice, finish="stop") for choice in range(len(tokens))]
        if not request.stream:
            await self._pause(0)
            return self._last(head, [*deltas, *ends])
        await tell(head)
        for number, delta in enumerate(deltas):
            await self._pause(number)
            await tell(CallPart(delivery=self._delivery, deltas=[delta]))
        await self._pause(len(deltas))
        return self._last(CallPart(delivery=self._delivery), ends, len(tokens))

    def _head(self, request: CallRequest) -> CallPart:
        name = request.request.split("-")[0][:12]
        names = [f"call_{name}{choice:02}_" for choice in range(request.decoding.num_choices)]
        return CallPart(
            delivery=self._delivery,
            names=request.begun.names if request.begun is not None else names,
            opened="<think>" if self.script.thinking else "",
            prompt_tokens=11,
            prompt_token_ids=[list(range(11))] if request.token_ids else [],
            num_reused=4,
            parent=request.previous,
        )

    def _last(self, part: CallPart, deltas: list[Delta], num: int = 0) -> CallPart:
        numbers = [next(self.script.numbers) for _ in range(num or len(part.names))]
        return part.model_copy(update={"deltas": deltas, "calls": numbers})

    async def _pause(self, number: int) -> None:
        if number == self.script.fails_at:
            raise EngineError("the engine has failed")
        if number == self.script.stops_at:
            await self.script.go_on.wait()


def _tokens(text: str, chars: int) -> list[str]:
    return [text[at : at + chars] for at in range(0, len(text), chars)]
