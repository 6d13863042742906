"""Running calls of programs, and open episodes.

A call outlives its HTTP request: a client that disconnects and repeats the request finds it. If its
generator dies, another one continues the answer.
"""

import asyncio
import contextlib
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import structlog
from cachetools import FIFOCache

from ....broker.client.connection import Broker
from ....broker.client.parts import SharedInbox, ask_parts
from ....schemas.agent import CallDelivered, CallPart, CallRequest, CancelCall
from ....schemas.generation import TOKEN_COLUMNS, Delta
from ....schemas.wire import errors
from ....schemas.wire.subjects import JobScope
from ..episode import ContextTooLong, EpisodeLimit, EpisodeOver, ProgramEpisode
from .exchange import KeyRefused, NobodyPlays, TooLarge

MAX_LEFT = 64
"""Calls of one episode that are kept for a while after their clients disconnected."""
_LARGE = 64 << 10
"""Larger requests are packed in a thread, so that they do not block the loop."""
_PASSING = (
    errors.NobodyAnswersError,
    errors.DeadlineError,
    errors.BrokerError,
    errors.ConflictError,
)
_NO_TOKEN_TEXTS: dict[str, Any] = {
    name: [] for name in TOKEN_COLUMNS if name not in ("token_ids", "logprobs", "versions")
}
"""Columns of a delta that a generator does not need to continue it."""
_LASTING = (errors.DeniedError, errors.LogInRefusedError)

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class GatheredAnswer:
    """The answer to one call."""

    def __init__(self, num_choices: int) -> None:
        """Start empty."""
        self.head: CallPart | None = None
        """The first part that is not empty."""
        self.choices = [Delta(choice=number) for number in range(num_choices)]
        """The text and tokens of each choice so far, as one delta."""
        self.calls: list[int] = []
        """Numbers of the choices among the episode's calls, once it is whole."""
        self.delivery = 0
        """The newest delivery of the task among the answering generators."""
        self.num_parts = 0
        self.is_whole = False

    def add(self, part: CallPart) -> None:
        """Take the next part."""
        self.num_parts += 1
        self.delivery = max(self.delivery, part.delivery)
        if self.head is None and (part.names or part.last):
            self.head = part
        for delta in part.deltas:
            self.choices[delta.choice] = self.choices[delta.choice].extended(delta)
        if part.last:
            self.calls = part.calls
            self.is_whole = True

    @property
    def num_generated(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def read_on(self, places: list[tuple[int, int]]) -> list[Delta]:
        """Return each choice after `places` (tokens, characters), and move these to its end."""
        rests = [
            choice.of_tokens(num_tokens, text=choice.text[num_chars:])
            for choice, (num_tokens, num_chars) in zip(self.choices, places, strict=True)
        ]
        places[:] = [(len(choice.token_ids), len(choice.text)) for choice in self.choices]
        return rests

    def begun(self) -> CallPart | None:
        """Return the answer as one part, for a generator that continues it; None if it is empty."""
        if self.head is None:
            return None
        deltas = [
            choice.of_tokens(0, None, **_NO_TOKEN_TEXTS)
            for choice in self.choices
            if choice.token_ids or choice.finish
        ]
        part = {"index": 0, "last": False, "deltas": deltas, "calls": [], "prompt_token_ids": []}
        return self.head.model_copy(update=part)


@dataclass(frozen=True)
class ProxyTimes:
    """Waits of a proxy."""

    failover_s: float = 120.0
    """Wait for a generator of the episode, since its last message."""
    keepalive_s: float = 15.0
    """Interval of keep-alive signs on an idle stream."""
    adopt_s: float = 30.0
    """Wait for a repeated request, after a client disconnected before its answer was whole."""
    silence_s: float = 10.0
    """Silence after which an answering generator counts as dead."""
    pause_s: float = 0.25
    """Pause before another generator is called."""


@dataclass(frozen=True)
class CallAsker:
    """Sends the calls of one job's programs to generators."""

    broker: Broker
    times: ProxyTimes
    inbox: SharedInbox

    async def packed(self, request: CallRequest, num_bytes: int) -> bytes:
        """Return a request, read from `num_bytes`, as a message; TooLarge beyond its limit."""
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
        """Called with the names of an answered call, before its program gets it."""

    async def look_up(self, name: str) -> None:
        """Find the call that a program names, if another proxy answered it."""

    async def report_delivered(
        self, subjects: "EpisodeSubjects", calls: list[int], *, whole: bool
    ) -> None:
        """Report whether a program received the whole answer."""
        delivered = CallDelivered(calls=calls, whole=whole)
        with contextlib.suppress(errors.TinkermqError):  # unknown until a later call shows it
            await self.broker.publish(subjects.delivered, delivered.to_bytes())


class RunningCall:
    """One call of an episode's program."""

    def __init__(
        self, asker: CallAsker, opened: "OpenEpisode", request: CallRequest, num_bytes: int
    ) -> None:
        """Start a call that was read from a body of `num_bytes`."""
        self.answer = GatheredAnswer(request.decoding.num_choices)
        self.error: errors.TinkermqError | None = None
        self.request = request
        self.is_delivered = False
        """Whether a program received all of it."""
        self._asker = asker
        self._opened = opened
        self._num_bytes = num_bytes
        self._listeners: set[asyncio.Event] = set()
        self._task = asyncio.create_task(self._run(), name="a program's call")

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.answer.is_whole or self.error is not None

    @property
    def num_listeners(self) -> int:
        """Number of the program's requests that wait for it."""
        return len(self._listeners)

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each new part."""
        woken = asyncio.Event()
        self._listeners.add(woken)
        try:
            yield woken
        finally:
            self._listeners.discard(woken)

    def end(self, error: errors.TinkermqError) -> None:
        """Stop with an error, which all waiting requests get."""
        if not self.is_over:
            self.error = error
        self._task.cancel()
        self._wake()

    async def settle(self) -> None:
        """Wait until an ended call has stopped."""
        await asyncio.wait({self._task})

    async def delivered(self, *, whole: bool) -> None:
        """Record whether a program received the whole answer, and report it to the generator."""
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
        """Record the numbers of an answer, and the names of its tool calls."""
        head = self.answer.head
        self._opened.learn(head.names if head else [], self.answer.calls)
        if not self.request.count_only:
            self._opened.episode.num_calls += len(self.answer.calls)
            self._opened.episode.limit = ""

    async def _ask_until_whole(self) -> None:
        clock, times = self._asker.broker.clock, self._asker.times
        deadline = clock() + times.failover_s
        for attempt in count():
            num_parts = self.answer.num_parts
            try:
                await self._request_once(attempt)
                if self.answer.is_whole:
                    return
                continue
            except _LASTING:
                raise
            except _PASSING as error:
                if over := self._opened.episode.over:
                    raise EpisodeOver(f"the episode is over: {over}") from error
                if self.answer.num_parts > num_parts:
                    deadline = clock() + times.failover_s
                if clock() > deadline:
                    raise NobodyPlays(
                        f"no generator has answered for {times.failover_s:g} s",
                        hint="try again: another generator may take over",
                    ) from error
            await asyncio.sleep(times.pause_s)

    async def _request_once(self, attempt: int) -> None:
        """Call once; end early if a later holder of the task answers as well."""
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
        """Return the request with the part of its answer that was received."""
        again = {
            "request": f"{self.request.request}-{attempt}",
            "begun": self.answer.begun(),
            "is_retry": True,
        }
        return self.request.model_copy(update=again)


class ProgramCalls:
    """Finds the call of a repeated request.

    A request repeats an equal one if it is marked so, or if the client of the other disconnected
    before it had the whole answer. All others are new samples.
    """

    def __init__(self, adopt_s: float) -> None:
        """Keep a call for `adopt_s` after its client disconnected."""
        self._adopt_s = adopt_s
        self._calls: dict[bytes, list[RunningCall]] = {}
        self._left: dict[RunningCall, asyncio.TimerHandle] = {}

    def __iter__(self) -> Iterator[RunningCall]:
        """Yield all."""
        return iter([call for calls in self._calls.values() for call in calls])

    def join(self, digest: bytes, *, is_marked: bool) -> RunningCall | None:
        """Return the call that a request with this digest repeats, or None."""
        waiting = [call for call in self._calls.get(digest, ()) if call.error is None]
        left = [call for call in waiting if not call.num_listeners]
        joined = left or (waiting if is_marked else [])
        if not joined:
            return None
        if timer := self._left.pop(joined[-1], None):
            timer.cancel()
        return joined[-1]

    def add(self, digest: bytes, call: RunningCall) -> None:
        """Add a new call."""
        self._calls.setdefault(digest, []).append(call)

    def leave(self, digest: bytes, call: RunningCall) -> None:
        """Forget a delivered or failed call; keep any other for a while if no request waits."""
        if call.is_delivered or call.error is not None:
            self._forget(digest, call)
        elif not call.num_listeners and call in self._calls.get(digest, ()):
            loop = asyncio.get_running_loop()
            self._left[call] = loop.call_later(self._adopt_s, self._give_up, digest, call)
            if len(self._left) > MAX_LEFT:
                oldest = next(iter(self._left))
                self._left[oldest].cancel()
                of_oldest = next(key for key, calls in self._calls.items() if oldest in calls)
                self._give_up(of_oldest, oldest)

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


# -- the open episodes, by their keys --------------------------------------------------------------

KEPT_BYTES = 8 << 20
_PAST = 4096
_MOST_NAMES = 1 << 16
_PREFIXES = ("sk-ant-", "sk-")
_CALL_DIGITS = 3
_PREFIX = re.compile(r"^[^_-]*[_-]")
"""Prefix of an answer's id."""
_INPUTS_SHARE = 4
"""Additional room for the inputs of answers, as a share of the room for answers."""


@dataclass(frozen=True)
class KeptAnswer:
    """An answer that can be read again."""

    make: Callable[[], dict[str, Any]]
    """Words it."""
    num_bytes: int
    """Its approximate size."""


class KeptAnswers:
    """The newest answers that fit, by their ids."""

    def __init__(self, room: int) -> None:
        """Keep up to `room` bytes."""
        self._answers: FIFOCache[str, KeptAnswer] = FIFOCache(room, lambda answer: answer.num_bytes)

    def add(self, name: str, answer: KeptAnswer) -> None:
        """Keep an answer by its id; the oldest are dropped to make room."""
        with contextlib.suppress(ValueError):  # the answer is larger than the room
            self._answers[name] = answer

    def find(self, name: str) -> KeptAnswer:
        """Return an answer; raises NotFoundError."""
        if name not in self._answers:
            raise errors.NotFoundError(
                f"no response {name!r:.80} is kept", hint="the oldest are dropped to make room"
            )
        return self._answers[name]

    def forget(self, name: str) -> None:
        """Drop an answer."""
        self._answers.pop(name, None)


class EpisodeSubjects(NamedTuple):
    """The subjects of an episode's generator."""

    call: str
    cancel: str
    delivered: str

    @classmethod
    def of(cls, scope: JobScope, episode: str) -> "EpisodeSubjects":
        """Return those of an episode; MessageError for an id that is not allowed in subjects."""
        return cls(*(scope.episode(episode, verb) for verb in cls._fields))


@dataclass(eq=False)
class OpenEpisode:
    """One episode whose program may call."""

    episode: ProgramEpisode
    subjects: EpisodeSubjects
    calls: ProgramCalls
    """Its calls that are running or not delivered."""
    kept_bytes: int = KEPT_BYTES
    """Room for answers that can be read again."""
    posted: set[bytes] = field(default_factory=set[bytes])
    """Digests of added rewards."""
    num_requests: int = 0
    """Number of open HTTP requests of its program."""
    _names: FIFOCache[bytes, None] = field(default_factory=lambda: FIFOCache(_MOST_NAMES))
    _numbers: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])
    _known: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self.answers = KeptAnswers(self.kept_bytes)
        """Answers that can be read again, by their ids."""
        self.inputs = KeptAnswers(self.kept_bytes // _INPUTS_SHARE)
        """Inputs of these answers."""

    def learn(self, names: Iterable[str], numbers: Iterable[int]) -> None:
        """Record the numbers of calls by the names that a program may use."""
        for name, number in zip(names, numbers, strict=False):
            self._numbers[name] = self._numbers[name.strip("_-")] = number
            self._known.add(number)
        while len(self._numbers) > _MOST_NAMES:
            self._known.discard(self._numbers.popitem(last=False)[1])

    def call_number(self, named: int | str) -> int:
        """Return the number of a call, named by number, `c7`, or the id of an answer or tool call.

        Raises NotFoundError for a call that was not answered in this episode.
        """
        if isinstance(named, str):
            for name in (named, named[:-_CALL_DIGITS], _PREFIX.sub("", named)):
                if name in self._numbers:
                    return self._numbers[name]
            digits = named.removeprefix("c")
            number = int(digits) if digits.isdecimal() and len(digits) < 10 else -1
        else:
            number = named
        if number not in self._known:
            raise errors.NotFoundError(
                f"no call {named!r:.80} was answered in this episode",
                hint="give a call's number, or the id of its answer or of a tool call in it",
            )
        return number

    def is_answered(self, number: int) -> bool:
        """Return whether a call with this number was answered."""
        return number in self._known

    def is_known(self, name: bytes) -> bool:
        """Return whether a request with this name was seen before, and record the name."""
        is_repeated = name in self._names
        self._names[name] = None
        return is_repeated


class OpenEpisodes:
    """All episodes of one proxy."""

    def __init__(self) -> None:
        """Start with none."""
        self._salt = secrets.token_bytes(32)
        self._by_key: dict[bytes, OpenEpisode] = {}
        self._by_id: dict[str, OpenEpisode] = {}
        self._past: FIFOCache[bytes, str] = FIFOCache(_PAST)

    def __len__(self) -> int:
        """Number of open episodes."""
        return len(self._by_key)

    def __iter__(self) -> Iterator[OpenEpisode]:
        """Yield them."""
        return iter(self._by_id.values())

    def add(self, opened: OpenEpisode) -> None:
        """Accept an episode's key; StateError if it is open already."""
        digest = self._digest(opened.episode.key)
        if digest in self._by_key or opened.episode.episode in self._by_id:
            raise errors.StateError(f"episode {opened.episode.episode} is open already")
        self._by_key[digest] = self._by_id[opened.episode.episode] = opened

    def of(self, episode: str) -> OpenEpisode | None:
        """Return an episode by its id."""
        return self._by_id.get(episode)

    def remove(self, opened: OpenEpisode) -> None:
        """Refuse its key from now on."""
        digest = self._digest(opened.episode.key)
        self._by_key.pop(digest, None)
        self._by_id.pop(opened.episode.episode, None)
        self._past[digest] = opened.episode.over or "it has ended"

    def find(self, presented: Iterable[str]) -> OpenEpisode:
        """Return the episode of one of the keys of a request.

        Only salted digests are looked up, so that timing reveals nothing about other keys. Raises
        KeyRefused with the reason.
        """
        past = ""
        keys = [bare_key(key) for key in presented if key]
        for key in keys:
            digest = self._digest(key)
            opened = self._by_key.get(digest)
            if opened is not None and secrets.compare_digest(
                opened.episode.key.encode(), key.encode(errors="replace")
            ):
                return opened
            past = past or self._past.get(digest, "")
        if past:
            raise KeyRefused(
                f"the episode of this key is over: {past}",
                hint="each try of an episode has its own key; stop calling",
            )
        raise KeyRefused(
            "this key belongs to no episode" if keys else "no key came with the request",
            hint="send the episode's key (TINKERMQ_EPISODE_KEY) as `Authorization: Bearer KEY`, "
            "as `x-api-key: KEY`, or in the path: /e/KEY/v1/…",
        )

    def _digest(self, key: str) -> bytes:
        return blake2b(key.encode(errors="replace"), key=self._salt, digest_size=16).digest()


def bare_key(key: str) -> str:
    """Return a key without the prefix that some programs require."""
    for prefix in _PREFIXES:
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key
