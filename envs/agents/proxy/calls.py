"""The calls of a program while they are asked for and answered.

A call outlives the request that began it: a program's client that hangs up and sends the same again
finds it, and a generator that dies is followed by another one, which goes on behind what came.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import structlog

from ....broker.client.connection import Broker
from ....broker.client.parts import SharedInbox, ask_parts
from ....schemas.agent import CallDelivered, CallDelta, CallPart, CallRequest, CancelCall
from ....schemas.wire import errors
from ...model_apis.answers import FinishReason, TokenLogprob
from ..episode import ContextTooLong, EpisodeLimit, EpisodeOver
from .exchange import NobodyPlays, TooLarge

if TYPE_CHECKING:
    from .open_episodes import EpisodeSubjects, OpenEpisode

MAX_LEFT = 64
"""Calls of one episode whose programs have gone, and that are kept for a while."""
_LARGE = 64 << 10
"""Bytes of a request that is packed in a thread: the loop serves others meanwhile."""
_PASSING = (
    errors.NobodyAnswersError,
    errors.DeadlineError,
    errors.BrokerError,
    errors.ConflictError,
)
_LASTING = (errors.DeniedError, errors.LogInRefusedError)

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(slots=True)
class GatheredChoice:
    """One choice as far as it has come."""

    texts: list[str]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: FinishReason | None = None
    token_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    """Of each token by itself, where asked for."""

    def add(self, delta: CallDelta) -> None:
        """Take more of it."""
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.versions += delta.versions
        tops = [
            tuple(zip(*top, strict=True))
            for top in zip(delta.top_tokens, delta.top_logprobs, strict=True)
        ]
        tops += [()] * (len(delta.tokens) - len(tops))
        for text, logprob, top in zip(delta.tokens, delta.logprobs, tops, strict=False):
            likeliest = tuple(TokenLogprob(*other) for other in top)
            self.token_logprobs.append(TokenLogprob(text, logprob, likeliest))
        self.finish = delta.finish or self.finish

    def as_delta(self, number: int) -> CallDelta:
        """Return all of it as one delta."""
        return CallDelta(
            choice=number,
            text="".join(self.texts),
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish=self.finish,
        )


class GatheredAnswer:
    """The answer to one call."""

    def __init__(self, num_choices: int) -> None:
        """Begin with nothing."""
        self.head: CallPart | None = None
        """The first part that holds anything."""
        self.choices = [GatheredChoice([], [], [], []) for _ in range(num_choices)]
        self.calls: list[int] = []
        """Numbers of the choices among the episode's calls, once it is whole."""
        self.delivery = 0
        """Of the task, as the newest of those who answer has it."""
        self.num_parts = 0
        self.is_whole = False

    def add(self, part: CallPart) -> None:
        """Take the next part."""
        self.num_parts += 1
        self.delivery = max(self.delivery, part.delivery)
        if self.head is None and (part.names or part.last):
            self.head = part
        for delta in part.deltas:
            self.choices[delta.choice].add(delta)
        if part.last:
            self.calls = part.calls
            self.is_whole = True

    @property
    def num_generated(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def begun(self) -> CallPart | None:
        """Return all of it as one part, for a generator that goes on with it; None for nothing."""
        if self.head is None:
            return None
        deltas = [
            choice.as_delta(number)
            for number, choice in enumerate(self.choices)
            if choice.token_ids or choice.finish
        ]
        whole = {"index": 0, "last": False, "deltas": deltas, "calls": [], "prompt_ids": []}
        return self.head.model_copy(update=whole)


@dataclass(frozen=True)
class ProxyTimes:
    """How long a proxy waits."""

    failover_s: float = 120.0
    """For a generator of the episode, from the last message."""
    keepalive_s: float = 15.0
    """Between signs of life on a stream that has nothing to say."""
    adopt_s: float = 30.0
    """For the same request once more, when a program has gone before its answer was whole."""
    silence_s: float = 10.0
    """Silence after which an answering generator counts as dead."""
    pause_s: float = 0.25
    """Wait before another generator is looked for."""


@dataclass(frozen=True)
class CallAsker:
    """How the calls of one job's programs are asked for."""

    broker: Broker
    times: ProxyTimes
    inbox: SharedInbox

    async def packed(self, request: CallRequest, num_bytes: int) -> bytes:
        """Return a request that came in `num_bytes` as a message; TooLarge for what none holds."""
        large = num_bytes > _LARGE
        payload = await asyncio.to_thread(request.to_bytes) if large else request.to_bytes()
        if len(payload) > self.broker.max_payload_bytes:
            raise TooLarge(
                f"the call is {len(payload):,} bytes as a message, and the broker takes "
                f"{self.broker.max_payload_bytes:,}",
                hint="send smaller images and tool results",
            )
        return payload

    def parts(
        self, subjects: "EpisodeSubjects", request: str, payload: bytes, delivery: int
    ) -> AsyncGenerator[CallPart, None]:
        """Call the episode's generator of this or a later delivery of its task."""
        return ask_parts(
            self.broker,
            subjects.call,
            payload,
            CallPart,
            waiting_for="the generator that plays the episode",
            cancel=(subjects.cancel, CancelCall(request=request)),
            silence_s=self.times.silence_s,
            rank=lambda part: part.delivery,
            least_rank=delivery,
            shared=self.inbox,
        )

    async def note_answered(self, names: list[str], calls: list[int]) -> None:
        """Hear of an answered call before its program does: by the names it will know it by."""

    async def look_up(self, name: str) -> None:
        """See to it that the call which a program names is known, if it is one."""

    async def report_delivered(
        self, subjects: "EpisodeSubjects", calls: list[int], *, whole: bool
    ) -> None:
        """Say whether a program has the end of an answer."""
        delivered = CallDelivered(calls=calls, whole=whole)
        with contextlib.suppress(
            errors.TinkermqError
        ):  # unknown, then, until a later call shows it
            await self.broker.publish(subjects.delivered, delivered.to_bytes())


class RunningCall:
    """One call of an episode's program."""

    def __init__(
        self, asker: CallAsker, opened: "OpenEpisode", request: CallRequest, num_bytes: int
    ) -> None:
        """Begin to ask what came in a body of `num_bytes`."""
        self.answer = GatheredAnswer(request.num_choices)
        self.error: errors.TinkermqError | None = None
        self.request = request
        self.is_delivered = False
        """Whether a program has all of it."""
        self._asker = asker
        self._opened = opened
        self._num_bytes = num_bytes
        self._listeners: set[asyncio.Event] = set()
        self._task = asyncio.create_task(self._run(), name="a program's call")

    @property
    def is_over(self) -> bool:
        """Whether nothing will be added."""
        return self.answer.is_whole or self.error is not None

    @property
    def num_listeners(self) -> int:
        """Requests of the program that wait for it."""
        return len(self._listeners)

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Within, the event is set each time that something was added."""
        woken = asyncio.Event()
        self._listeners.add(woken)
        try:
            yield woken
        finally:
            self._listeners.discard(woken)

    def end(self, error: errors.TinkermqError) -> None:
        """Stop with an error, which every request that waits for it gets."""
        if not self.is_over:
            self.error = error
        self._task.cancel()
        self._wake()

    async def settle(self) -> None:
        """Wait until an ended call has stopped."""
        await asyncio.wait({self._task})

    async def delivered(self, *, whole: bool) -> None:
        """Record, and report to the generator, whether a program has all of the answer."""
        if self.is_delivered:
            return
        self.is_delivered = whole
        await self._asker.report_delivered(self._opened.subjects, self.answer.calls, whole=whole)

    def _wake(self) -> None:
        for woken in self._listeners:
            woken.set()

    async def _run(self) -> None:
        try:
            await self._ask_until_whole()
            self._note()
        except errors.TinkermqError as error:
            self.error = error
            if isinstance(error, EpisodeLimit | ContextTooLong):
                self._opened.episode.limit = error.code
        except Exception as error:  # noqa: BLE001  the call's boundary: record, reveal no details
            _log.exception("call_failed", episode=self._opened.episode.episode)
            self.error = errors.InternalError(f"the call failed: {type(error).__name__}")
        self._wake()
        if self.answer.is_whole and not self._listeners and not self.request.count_only:
            await self.delivered(whole=False)

    def _note(self) -> None:
        """Take note of an answer's numbers, and of the names of its tool calls."""
        head = self.answer.head
        self._opened.learn(head.names if head else [], self.answer.calls)
        if not self.request.count_only:
            self._opened.episode.num_calls += len(self.answer.calls)
            self._opened.episode.limit = ""

    async def _ask_until_whole(self) -> None:
        clock, times = self._asker.broker.clock, self._asker.times
        deadline = clock() + times.failover_s
        for attempt in count():
            heard = self.answer.num_parts
            try:
                await self._ask(attempt)
                if self.answer.is_whole:
                    return
                continue
            except _LASTING:
                raise
            except _PASSING as error:
                if over := self._opened.episode.over:
                    raise EpisodeOver(f"the episode is over: {over}") from error
                if self.answer.num_parts > heard:
                    deadline = clock() + times.failover_s
                if clock() > deadline:
                    raise NobodyPlays(
                        f"no generator has answered for {times.failover_s:g} s",
                        hint="ask again: another generator may take it over",
                    ) from error
            await asyncio.sleep(times.pause_s)

    async def _ask(self, attempt: int) -> None:
        """Call once; end early if a later holder of the task answers after the first."""
        request = self.request if not attempt else self._again(attempt)
        source = -1
        payload = await self._asker.packed(request, self._num_bytes)
        subjects, delivery = self._opened.subjects, self.answer.delivery
        asking = self._asker.parts(subjects, request.request, payload, delivery)
        async with aclosing(asking) as parts:
            async for part in parts:
                if source >= 0 and part.delivery > source and self.answer.head is not None:
                    return
                source = part.delivery
                if part.last and not self.request.count_only:
                    head = self.answer.head
                    names = part.names or (head.names if head is not None else [])
                    await self._asker.note_answered(names, part.calls)
                self.answer.add(part)
                self._wake()

    def _again(self, attempt: int) -> CallRequest:
        """Return the request with what has come of its answer."""
        again = {
            "request": f"{self.request.request}-{attempt}",
            "begun": self.answer.begun(),
            "is_retry": True,
        }
        return self.request.model_copy(update=again)


class ProgramCalls:
    """Finds the call that a repeated request means.

    A request repeats another if it says so, or if the other is no longer awaited, whose
    program has gone before it had the whole answer. All others are new samples.
    """

    def __init__(self, adopt_s: float) -> None:
        """Keep a call `adopt_s` for a program that comes back."""
        self._adopt_s = adopt_s
        self._calls: dict[bytes, list[RunningCall]] = {}
        self._left: dict[RunningCall, asyncio.TimerHandle] = {}

    def __iter__(self) -> Iterator[RunningCall]:
        """Yield all."""
        return iter([call for calls in self._calls.values() for call in calls])

    def join(self, digest: bytes, *, is_marked: bool) -> RunningCall | None:
        """Return the call that a request with this digest repeats, if there is one."""
        waiting = [call for call in self._calls.get(digest, ()) if call.error is None]
        left = [call for call in waiting if not call.num_listeners]
        joined = left or (waiting if is_marked else [])
        if not joined:
            return None
        if timer := self._left.pop(joined[-1], None):
            timer.cancel()
        return joined[-1]

    def add(self, digest: bytes, call: RunningCall) -> None:
        """Take a new call."""
        self._calls.setdefault(digest, []).append(call)

    def leave(self, digest: bytes, call: RunningCall) -> None:
        """Forget a call that has arrived or failed; keep another one if it is not awaited."""
        if call.is_delivered or call.error is not None:
            self._forget(digest, call)
        elif not call.num_listeners and call in self._calls.get(digest, ()):
            loop = asyncio.get_running_loop()
            self._left[call] = loop.call_later(self._adopt_s, self._give_up, digest, call)
            if len(self._left) > MAX_LEFT:
                oldest = next(iter(self._left))
                self._left[oldest].cancel()
                self._give_up(_digest_of(self._calls, oldest), oldest)

    def end(self, error: errors.TinkermqError) -> list[RunningCall]:
        """End all of them; return them."""
        for timer in self._left.values():
            timer.cancel()
        ended = list(self)
        for call in ended:
            call.end(error)
        self._left.clear()
        self._calls.clear()
        return ended

    def _give_up(self, digest: bytes, call: RunningCall) -> None:
        call.end(EpisodeOver("its program has disconnected"))
        self._forget(digest, call)

    def _forget(self, digest: bytes, call: RunningCall) -> None:
        self._left.pop(call, None)
        calls = self._calls.get(digest, [])
        if call in calls:
            calls.remove(call)
        if not calls:
            self._calls.pop(digest, None)


def _digest_of(calls: dict[bytes, list[RunningCall]], call: RunningCall) -> bytes:
    return next(digest for digest, same in calls.items() if call in same)
