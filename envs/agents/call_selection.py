"""Select which calls of a program's episode are trained, and find its main conversation.

Pure. `agent.train` selects all answers that arrived (the default), those of the main conversation,
or those of conversations whose opening matches a pattern or does not.

`call_lines` formats an episode's calls, and why some are not trained.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import isfinite
from typing import Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ...schemas.config.agent import train_pattern
from ...schemas.model_apis.canonical import MIN_QUOTE, ModelMessage, marks_of

# A request has read an answer if it holds the id of one of its tool calls, the answer itself, or a
# new part of it: a run of 16 characters (all of a shorter answer) that is neither in a request made
# before the answer, nor in the answer's own prompt.

_FACTOR = 0x9E3779B97F4A7C15


class Answered(Protocol):
    """An answered call of the model, as `Readers` needs it."""

    @property
    def number(self) -> int:
        """Its index among the calls of the episode, in the order in which they ended."""
        ...

    @property
    def given(self) -> Sequence[ModelMessage]:
        """The messages that are new in its prompt."""
        ...

    @property
    def reply(self) -> ModelMessage:
        """The answer that the program got."""
        ...

    @property
    def num_seen(self) -> int:
        """Number of calls that had ended when it was made."""
        ...


OneCall = TypeVar("OneCall", bound=Answered)


class Readers(Generic[OneCall]):
    """The readers of an episode's answers; sets of calls are integers, with one bit per call."""

    def __init__(self, calls: Sequence[OneCall]) -> None:
        """`calls` are all calls of the episode, by number."""
        self._calls = calls
        self._known: dict[int, int] = {}
        self._with_short: dict[str, int] = {}

    def of(self, answer: OneCall) -> list[OneCall]:
        """Return the calls that read an answer, ordered by number."""
        readers = self._of(answer)
        return [call for call in self._calls if readers >> call.number & 1]

    def any(self, answers: Collection[OneCall], readers: Collection[OneCall]) -> bool:
        """Return whether one of the calls read one of the answers."""
        reader_bits = _bits(readers)
        return any(self._of(answer) & reader_bits for answer in answers)

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
        all_readers = self._with_whole(answer.reply)
        for readers in parts:
            if not readers & earlier:
                all_readers |= readers
        return all_readers & later

    def _with_whole(self, reply: ModelMessage) -> int:
        """Return the calls whose prompt has the whole answer, or an id of its tool calls."""
        marks = marks_of(reply)
        all_readers = self._given.get(reply.key, (reply, 0))[1]
        for call in reply.calls:
            all_readers |= self._by_id.get(call.id, 0) if call.id else 0
        for message, readers in self._given.values() if marks else ():
            if any(mark in message.text for mark in marks):
                all_readers |= readers
        return all_readers

    def _with_parts(self, text: str) -> Iterator[int]:
        """Yield the calls whose prompts have each part of a text."""
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
    def _given(self) -> dict[bytes, tuple[ModelMessage, int]]:
        """Messages of prompts by their keys, with the calls that had them."""
        by_key: dict[bytes, tuple[ModelMessage, int]] = {}
        for call in self._calls:
            for message in call.given:
                _, readers = by_key.get(message.key, (message, 0))
                by_key[message.key] = message, readers | 1 << call.number
        return by_key

    @cached_property
    def _by_id(self) -> dict[str, int]:
        """Calls whose prompt has a tool call or its result, by its id."""
        counts = defaultdict[str, int](int)
        for call in self._calls:
            for message in call.given:
                for call_id in (message.call_id, *(tool_call.id for tool_call in message.calls)):
                    counts[call_id] |= 1 << call.number
        return counts

    @cached_property
    def _with_run(self) -> dict[int, int]:
        """Calls whose prompt has each run of the answers."""
        texts = {text for call in self._calls for text in _texts(call.reply)}
        answer_runs = np.unique(np.concatenate([*map(_runs, texts), np.empty(0, np.uint64)]))
        counts = defaultdict[int, int](int)
        for message, readers in self._given.values():
            runs = _runs(message.text)
            at = np.searchsorted(answer_runs, runs)
            inside = at < len(answer_runs)
            for run in runs[inside][answer_runs[at[inside]] == runs[inside]].tolist():
                counts[run] |= readers
        return counts


def _texts(reply: ModelMessage) -> Iterator[str]:
    """Yield the text of an answer, and the values of its calls' arguments."""
    yield reply.text.strip()
    for call in reply.calls:
        yield from _words(call.value)


def _words(value: Any) -> Iterator[str]:
    """Yield the texts and numbers of a JSON value."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _words(item)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value).strip()


def _runs(text: str) -> NDArray[np.uint64]:
    """Return uint64[R]: digests of all distinct runs of 16 characters, sorted."""
    raw = text.encode("utf-32-le", errors="surrogatepass")
    digests = np.frombuffer(raw, np.uint32).astype(np.uint64)
    for width in (1, 2, 4, 8):  # runs of twice the width, from runs of the width
        factor = np.uint64(pow(_FACTOR, width, 1 << 64))
        digests = digests[:-width] * factor + digests[width:]
    return np.unique(digests)


def _bits(calls: Collection[Answered]) -> int:
    bits = 0
    for call in calls:
        bits |= 1 << call.number
    return bits


WhyNot: TypeAlias = Literal["", "undelivered", "left out", "other", "pattern"]
"""Why a call is not trained: its answer did not arrive, the program excluded it, it is outside of
the main conversation, or a pattern excludes it; empty: it is trained."""


class AnsweredCall(Answered, Protocol):
    """An answered call of the model, and its place in the tree of its episode."""

    @property
    def root(self) -> Self:
        """The first call of its path."""
        ...

    @property
    def origin(self) -> Self:
        """The first call of its history."""
        ...

    @property
    def context(self) -> bytes:
        """Digest of its tools."""
        ...

    @property
    def has_tools(self) -> bool:
        """Whether it may call tools."""
        ...

    @property
    def delivered(self) -> bool | None:
        """Whether its program received the answer."""
        ...

    @property
    def num_generated(self) -> int:
        """Number of the answer's tokens."""
        ...

    @property
    def digest(self) -> bytes:
        """Digest that is independent of how the calls of an episode interleave."""
        ...


Call = TypeVar("Call", bound=AnsweredCall)


def why_untrained(
    calls: Sequence[Call], which: str = "all", left_out: Collection[int] = ()
) -> dict[Call, WhyNot]:
    """Return for each call why it is not trained, by the value of `agent.train`.

    Calls with numbers in `left_out` are never trained. Raises ValueError for an unknown value.
    """
    why_not = _why_not(calls, which)

    def why(call: Call) -> WhyNot:
        if not call.delivered or not call.num_generated:
            return "undelivered"
        return "left out" if call.number in left_out else why_not(call)

    return {call: why(call) for call in calls}


def _why_not(calls: Sequence[Call], which: str) -> Callable[[Call], WhyNot]:
    """Return why `which` excludes a call."""
    if which == "all":
        return lambda _: ""
    if which == "main":
        origins = _main_origins(calls)
        return lambda call: "" if call.origin in origins else "other"
    pattern, is_trained = train_pattern(which)

    def by_opening(call: Call) -> WhyNot:
        matches = pattern.search(opening_of(call.root.given)) is not None
        return "" if matches is is_trained else "pattern"

    return by_opening


def opening_of(messages: Sequence[ModelMessage]) -> str:
    """Return the text of a conversation that patterns are matched with.

    It is the text of the system messages or, without any, of the first message.
    """
    systems = [message.text for message in messages if message.role == "system"]
    return "\n".join(systems or [message.text for message in messages[:1]])


# -- the main conversation -------------------------------------------------------------------------


def main_root(calls: Sequence[Call]) -> Call | None:
    """Return the first call of the main conversation: the one from which all others derive.

    A conversation derives from another that continues with its answers (which it helps), and from
    one whose answers it begins with (it summarizes that, or works on its history after its end);
    but one with tools never derives from one without. Of several that derive from none, the one
    with tools is the main one, then the one with most calls, then with most generated tokens: this
    does not depend on how calls interleave.
    """
    histories: dict[Call, list[Call]] = {}
    for call in calls:
        histories.setdefault(call.origin, []).append(call)
    if len(histories) < 2:
        return next(iter(histories), None)
    derived = _derived(calls)
    own = [root for root in histories if root not in derived] or list(histories)

    def worth(root: Call) -> tuple[bool, int, int, bytes]:
        mine = histories[root]
        num_tokens = sum(call.num_generated for call in mine)
        return any(call.has_tools for call in mine), len(mine), num_tokens, root.digest

    return max(own, key=worth)


def _main_origins(calls: Sequence[Call]) -> set[Call]:
    """Return the origins of the main conversation and of those that continue it.

    These begin with its answers, as after a compaction, and have its system message or, without
    one, its tools.
    """
    main = main_root(calls)
    if main is None:
        return set()
    systems = system_of(main.given)
    begun = {call for call in calls if call is call.origin and call is not main}
    like_main = {
        call
        for call in begun
        if system_of(call.given) == systems and (systems or call.context == main.context)
    }
    readers, origins = Readers(calls), {main}
    while more := {
        call
        for call in like_main - origins
        if readers.any([earlier for earlier in calls if earlier.origin in origins], [call])
    }:
        origins |= more
    return origins


def _derived(calls: Sequence[Call]) -> set[Call]:
    """Return the origins of the conversations that derive from another."""
    readers = Readers(calls)
    derived: set[Call] = set()
    for answer in calls:
        begun = answer.origin
        for reader in readers.of(answer):
            other = reader.origin
            if other is begun:
                continue
            if reader is not other:
                derived.add(begun)
            elif begun.has_tools or not other.has_tools:
                derived.add(other)
    return derived


def system_of(messages: Sequence[ModelMessage]) -> list[bytes]:
    """Return the keys of the system messages."""
    return [message.key for message in messages if message.role == "system"]


def digest_of(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a call's context: a digest of its tools, in their order."""
    text = json.dumps([dict(tool) for tool in tools], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).digest()


# -- the tree of calls as text lines, from the main row of an episode ------------------------------

_MAX_CHARS = 200
_MAX_LINES = 1000
_MAX_DEPTH = 8
WHY_NOT = {
    "other": "not of the main conversation",
    "pattern": "left out by the pattern of agent.train",
    "undelivered": "its answer did not arrive",
    "left out": "taken out by the program",
    "cut": "behind the longest row",
}
"""Texts of the reasons."""
_BRANCHES = {
    "sample": "another answer to the same request",
    "edited": "the history was edited",
    "template": "the template writes the history anew",
    "system": "another system message",
    "tools": "other tools",
    "compacted": "a compacted history",
    "apart": "a history of its own",
}


@dataclass(frozen=True)
class CallLine:
    """One call of the model."""

    call: int
    """Its number in the episode."""
    depth: int
    """Number of branches above it."""
    branch: str
    """Why it is a branch of its own; empty: it continues the call before."""
    row: int | None
    """The row of the episode that trains it; None: no row."""
    why_not: str
    """Why it is not trained; empty: it is."""
    tokens: int
    """Number of generated tokens."""
    given_tokens: int
    """Number of new tokens in its prompt."""
    reward: float | None
    """Its own reward, if any."""
    branch_reward: float | None
    """The reward of the branch that begins with it, if any."""
    name: str
    """The program's name for the branch that begins with it."""
    finish: str
    """Why it ended: stop or length."""
    text: str
    """The beginning of its answer."""
    tools: list[str]
    """Names of the tools that it called."""


def call_lines(info: Mapping[str, Any]) -> list[CallLine]:
    """Return the calls of a program's episode, in order; empty for other episodes.

    `info` is that of its main row; malformed calls are skipped.
    """
    calls = info.get("calls")
    if not isinstance(calls, list):
        return []
    lines: list[CallLine] = []
    depths: dict[int, int] = {}
    for call in cast("list[Any]", calls)[:_MAX_LINES]:
        if isinstance(call, dict) and isinstance(cast("dict[str, Any]", call).get("call"), int):
            line = _line(cast("dict[str, Any]", call), depths)
            depths[line.call] = line.depth
            lines.append(line)
    return lines


def _line(call: Mapping[str, Any], depths: Mapping[int, int]) -> CallLine:
    branch = str(call.get("branch") or "")
    parent = call.get("parent")
    if parent is None:
        parent = call.get("follows")
    above = depths.get(parent, 0) if isinstance(parent, int) else 0
    row, why = call.get("row"), str(call.get("untrained") or "")
    tools = call.get("tools")
    return CallLine(
        call=int(call["call"]),
        depth=min(above + bool(branch), _MAX_DEPTH),
        branch=_BRANCHES.get(branch, branch[:_MAX_CHARS]),
        row=row if isinstance(row, int) else None,
        why_not=WHY_NOT.get(why, why[:_MAX_CHARS]),
        tokens=_whole(call.get("tokens")),
        given_tokens=_whole(call.get("given_tokens")),
        reward=_number(call.get("reward")),
        branch_reward=_number(call.get("branch_reward")),
        name=str(call.get("name") or "")[:_MAX_CHARS],
        finish=str(call.get("finish") or "")[:_MAX_CHARS],
        text=str(call.get("text") or "")[:_MAX_CHARS],
        tools=[str(name)[:_MAX_CHARS] for name in cast("list[Any]", tools)]
        if isinstance(tools, list)
        else [],
    )


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and isfinite(value) else None
