"""Which calls of an episode were given which answers to read.

An answer was read by a request that holds the id of one of its tool calls, the answer itself, or a
part of it that is new: a run of 16 characters (all of an answer that is shorter) that stands in no
request made before the answer had come. What the answer took from its own prompt tells nothing, and
neither does what its reader had been told before.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from .messages import MIN_QUOTE, CanonicalMessage, marks_of

_FACTOR = 0x9E3779B97F4A7C15


class Answered(Protocol):
    """A call of the model that was answered, as far as reading goes."""

    @property
    def number(self) -> int:
        """Its place among the calls of the episode, in the order in which they ended."""
        ...

    @property
    def given(self) -> Sequence[CanonicalMessage]:
        """The messages that are new in its prompt."""
        ...

    @property
    def reply(self) -> CanonicalMessage:
        """The answer that the program was told."""
        ...

    @property
    def num_seen(self) -> int:
        """Calls that had ended when it was asked for."""
        ...


OneCall = TypeVar("OneCall", bound=Answered)


class Readers(Generic[OneCall]):
    """The readers of the answers of an episode; sets of calls are integers, a bit for each."""

    def __init__(self, calls: Sequence[OneCall]) -> None:
        """`calls` are all calls of the episode, by number."""
        self._calls = calls
        self._known: dict[int, int] = {}
        self._with_short: dict[str, int] = {}

    def of(self, answer: OneCall) -> list[OneCall]:
        """Return the calls that were given an answer to read, in the order of their numbers."""
        found = self._of(answer)
        return [call for call in self._calls if found >> call.number & 1]

    def any(self, answers: Collection[OneCall], readers: Collection[OneCall]) -> bool:
        """Whether one of the answers was read by one of the calls."""
        wanted = _bits(readers)
        return any(self._of(answer) & wanted for answer in answers)

    def _of(self, answer: OneCall) -> int:
        if answer.number not in self._known:
            self._known[answer.number] = self._found(answer)
        return self._known[answer.number]

    def _found(self, answer: OneCall) -> int:
        later = _bits([call for call in self._calls if answer.number < call.num_seen])
        if not later:
            return 0
        earlier = _bits(self._calls) & ~later
        parts = (part for text in _texts(answer.reply) for part in self._with_parts(text))
        found = self._with_whole(answer.reply)
        for readers in parts:
            if not readers & earlier:
                found |= readers
        return found & later

    def _with_whole(self, reply: CanonicalMessage) -> int:
        """Return the calls that were given an answer as it was, or an id of its calls."""
        marks = marks_of(reply)
        found = self._given.get(reply.key, (reply, 0))[1]
        for call in reply.calls:
            found |= self._by_id.get(call.id, 0) if call.id else 0
        for message, readers in self._given.values() if marks else ():
            if any(mark in message.text for mark in marks):
                found |= readers
        return found

    def _with_parts(self, text: str) -> Iterator[int]:
        """Yield the calls that were given each part of a text, which may be there already."""
        if len(text) >= MIN_QUOTE:
            yield from (self._with_run.get(run, 0) for run in _runs(text).tolist())
        elif text:
            yield self._with_word(text)

    def _with_word(self, text: str) -> int:
        if text not in self._with_short:
            alone = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
            self._with_short[text] = 0
            for message, readers in self._given.values():
                if text in message.text and alone.search(message.text):
                    self._with_short[text] |= readers
        return self._with_short[text]

    @cached_property
    def _given(self) -> dict[bytes, tuple[CanonicalMessage, int]]:
        """Each message that a call was given, by its key, and the calls that were."""
        given: dict[bytes, tuple[CanonicalMessage, int]] = {}
        for call in self._calls:
            for message in call.given:
                _, readers = given.get(message.key, (message, 0))
                given[message.key] = message, readers | 1 << call.number
        return given

    @cached_property
    def _by_id(self) -> dict[str, int]:
        """The calls that were given a tool call or its result, by its id."""
        found = defaultdict[str, int](int)
        for call in self._calls:
            for message in call.given:
                for call_id in (message.call_id, *(one.id for one in message.calls)):
                    found[call_id] |= 1 << call.number
        return found

    @cached_property
    def _with_run(self) -> dict[int, int]:
        """The calls that were given each run of the answers."""
        texts = {text for call in self._calls for text in _texts(call.reply)}
        wanted = np.unique(np.concatenate([*map(_runs, texts), np.empty(0, np.uint64)]))
        found = defaultdict[int, int](int)
        for message, readers in self._given.values():
            runs = _runs(message.text)
            at = np.searchsorted(wanted, runs)
            inside = at < len(wanted)
            for run in runs[inside][wanted[at[inside]] == runs[inside]].tolist():
                found[run] |= readers
        return found


def _texts(reply: CanonicalMessage) -> Iterator[str]:
    """Yield what an answer says: its text, and what it fills into the arguments of its calls."""
    yield reply.text.strip()
    for call in reply.calls:
        yield from _words(call.value)


def _words(value: Any) -> Iterator[str]:
    """Yield the texts and numbers of a JSON value."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from _words(one)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value).strip()


def _runs(text: str) -> NDArray[np.uint64]:
    """Return uint64[R]: digests of all distinct runs of 16 characters, sorted."""
    raw = text.encode("utf-32-le", errors="surrogatepass")
    digests = np.frombuffer(raw, np.uint32).astype(np.uint64)
    for width in (1, 2, 4, 8):  # runs of twice the width, of those of the width
        factor = np.uint64(pow(_FACTOR, width, 1 << 64))
        digests = digests[:-width] * factor + digests[width:]
    return np.unique(digests)


def _bits(calls: Collection[Answered]) -> int:
    bits = 0
    for call in calls:
        bits |= 1 << call.number
    return bits
