"""Answers the calls of one program in a generator's place: by a script, or as a person types."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

from ....broker.client.connection import Broker
from ....broker.client.parts import PartsService, Tell
from ....broker.client.rpc import Service
from ....schemas.agent import CallDelta, CallPart, CallRequest, CancelCall
from ....schemas.wire.errors import NotFoundError, TinkermqError
from ....schemas.wire.subjects import JobScope
from ..episode import ContextTooLong, EpisodeLimit
from ..messages import CanonicalMessage, canonical_history
from ..replies import parse_reply
from ..wire import unpacked
from .calls import Placement, TrialCall, place
from .script import scripted_answer

PIECE = 8
"""Characters of a streamed answer that are told at once; each is a token."""
ANSWER_S = 0.05
"""How long an answer takes at least: calls that are made beside each other meet."""
MAX_CALLS = 64
"""Calls that are answered, unless the job allows fewer."""


class Speaker(Protocol):
    """Says what the model says."""

    async def say(self, call: TrialCall, placement: Placement) -> str:
        """Return an answer, in the form in which models write tool calls; raises a refusal."""
        ...


class ScriptedSpeaker:
    """Answers by the script; from one call on it may take histories for too long."""

    def __init__(self, refuse_from: int | None = None) -> None:
        """Refuse the call of this number, and all that are as long."""
        self.refusals = 0
        """Calls that were refused."""
        self._refuse_from = refuse_from
        self._too_long: int | None = None

    async def say(self, call: TrialCall, placement: Placement) -> str:
        """Return the script's answer; raises ContextTooLong."""
        if self._too_long is None and call.number == self._refuse_from:
            self._too_long = call.num_characters
        if self._too_long is not None and call.num_characters >= self._too_long:
            self.refusals += 1
            raise ContextTooLong.of(call.num_characters, self._too_long - 1)
        return scripted_answer(call.history, call.tools, call.form)


class TrialModel:
    """The model of one episode."""

    def __init__(
        self, broker: Broker, scope: JobScope, speaker: Speaker, *, max_calls: int = MAX_CALLS
    ) -> None:
        """Answer what `speaker` says, `max_calls` times."""
        self.calls: list[TrialCall] = []
        """In the order in which they came."""
        self.changed = asyncio.Event()
        """Set at each call, and at the end of each."""
        self._broker = broker
        self._scope = scope
        self._speaker = speaker
        self._max_calls = max_calls
        self._running = 0
        self._answers: list[tuple[TrialCall, CanonicalMessage]] = []

    @contextlib.asynccontextmanager
    async def playing(self, episode: str) -> AsyncIterator["TrialModel"]:
        """Within, the calls of an episode are answered."""
        service = await Service.start(
            self._broker, name="tinkermq-trial", description=f"the model of episode {episode}"
        )
        parts = PartsService(self._broker, service)
        calls = await parts.listen(
            self._scope.episode(episode, "call"), CallRequest, CallPart, self._answer
        )
        cancels = await self._broker.listen(
            self._scope.episode(episode, "cancel"),
            lambda message: parts.cancel(CancelCall.from_bytes(message.data).request),
        )
        try:
            yield self
        finally:
            await calls.stop()
            await cancels.stop()
            await service.stop(drain_s=0)

    async def _answer(self, request: CallRequest, tell: Tell[CallPart]) -> CallPart:
        history = self._history(request)
        if request.count_only:
            size = sum(len(message.text) for message in history)
            return CallPart(num_prompt=size, names=[_name(request, 0)])
        call = self._enter(request, history)
        self._running += 1
        try:
            return await self._answered(call, request, tell)
        except TinkermqError as error:
            call.refusal = error.code
            raise
        finally:
            self._running -= 1
            call.answered_s = time.monotonic()
            self.changed.set()

    def _enter(self, request: CallRequest, history: list[CanonicalMessage]) -> TrialCall:
        call = TrialCall(
            number=len(self.calls),
            history=history,
            tools=request.tools,
            form=request.format,
            is_streamed=request.stream,
            num_choices=request.num_choices,
            is_retry=request.is_retry,
            without_effect=request.without_effect,
            sampled=request.sampled,
            num_beside=self._running,
            num_seen=len(self._answers),
            asked_s=time.monotonic(),
        )
        self.calls.append(call)
        self.changed.set()
        return call

    def _history(self, request: CallRequest) -> list[CanonicalMessage]:
        new = canonical_history([unpacked(message) for message in request.messages])
        if request.previous is None:
            return new
        if request.previous >= len(self._answers):
            raise NotFoundError(
                f"the episode has no answer {request.previous} that could be continued",
                hint="send the whole history",
            )
        before, reply = self._answers[request.previous]
        return [*before.history, reply, *new]

    async def _answered(
        self, call: TrialCall, request: CallRequest, tell: Tell[CallPart]
    ) -> CallPart:
        if call.number >= self._max_calls:
            raise EpisodeLimit(f"the episode has had its {self._max_calls} calls")
        placement = place(call, self.calls[: call.number])
        texts = [await self._speaker.say(call, placement) for _ in range(request.num_choices)]
        head = _head(request, call, placement)
        numbers = self._settle(call, request, texts)
        deltas = [delta for choice, text in enumerate(texts) for delta in _deltas(choice, text)]
        if not request.stream:
            await asyncio.sleep(ANSWER_S)
            return head.model_copy(update={"deltas": deltas, "calls": numbers})
        await tell(head)
        for delta in deltas:
            await asyncio.sleep(ANSWER_S / len(deltas))
            await tell(CallPart(deltas=[delta]))
        return CallPart(calls=numbers)

    def _settle(self, call: TrialCall, request: CallRequest, texts: Sequence[str]) -> list[int]:
        """Take the answers; return their numbers."""
        call.replies = [
            parse_reply(text, _name(request, choice), calls=bool(request.tools))
            for choice, text in enumerate(texts)
        ]
        first = call.first_answer = len(self._answers)
        self._answers += [(call, reply) for reply in call.replies]
        return list(range(first, len(self._answers)))


def _head(request: CallRequest, call: TrialCall, placement: Placement) -> CallPart:
    num_new = sum(len(message.text) for message in call.history[-placement.num_new :])
    return CallPart(
        names=[_name(request, choice) for choice in range(request.num_choices)],
        has_tools=bool(request.tools),
        num_prompt=call.num_characters,
        num_reused=0 if placement.parent is None else max(0, call.num_characters - num_new),
        parent=placement.parent,
    )


def _deltas(choice: int, text: str) -> Iterator[CallDelta]:
    """Yield an answer bit by bit: a token for each character."""
    for at in range(0, len(text), PIECE):
        piece = text[at : at + PIECE]
        yield CallDelta(
            choice=choice,
            text=piece,
            token_ids=[ord(letter) for letter in piece],
            logprobs=[0.0] * len(piece),
            versions=[0] * len(piece),
        )
    yield CallDelta(choice=choice, finish="stop")


def _name(request: CallRequest, choice: int) -> str:
    return f"call_{request.request.split('-')[0][:12]}{choice:02}_"
