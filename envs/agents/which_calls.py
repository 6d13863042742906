"""Which calls of a program's episode are trained, and which conversation is its main one.

Pure. `agent.train` says which: all answers that arrived (the default), those of the main
conversation, those of conversations whose opening a pattern matches or does not, or (`alive`) those
that can have had a part in the outcome, as far as that is to be seen from outside.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

from ...schemas.config.agent import train_pattern
from .messages import CanonicalMessage
from .reading import Answered, Readers

WhyNot: TypeAlias = Literal["", "undelivered", "left out", "other", "pattern", "apart"]
"""Why a call is not trained: its answer did not arrive, the program took it out, it is not of the
main conversation, by a pattern, or nothing of it was read; empty: it is trained."""


class AnsweredCall(Answered, Protocol):
    """A call of the model that was answered, and where it stands in the tree of its episode."""

    @property
    def parent(self) -> Self | None:
        """The call whose tokens it continues."""
        ...

    @property
    def follows(self) -> Self | None:
        """Of a root: the call that its history continues, though not its tokens."""
        ...

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
        """Whether its program has the answer."""
        ...

    @property
    def num_generated(self) -> int:
        """Tokens of the answer."""
        ...

    @property
    def digest(self) -> bytes:
        """The same however calls of one episode interleave."""
        ...


Call = TypeVar("Call", bound=AnsweredCall)


def why_untrained(
    calls: Sequence[Call], which: str = "all", left_out: Collection[int] = ()
) -> dict[Call, WhyNot]:
    """Return for each call why it is not trained, by the value of `agent.train`.

    Those whose numbers are in `left_out` are trained in no case. Raises ValueError for a value that
    is none.
    """
    why_not = _why_not(calls, which)

    def why(call: Call) -> WhyNot:
        if not call.delivered or not call.num_generated:
            return "undelivered"
        return "left out" if call.number in left_out else why_not(call)

    return {call: why(call) for call in calls}


def _why_not(calls: Sequence[Call], which: str) -> Callable[[Call], WhyNot]:
    """Return what tells of a call why `which` leaves it out."""
    if which == "all":
        return lambda _: ""
    if which == "main":
        origins = _main_origins(calls)
        return lambda call: "" if call.origin in origins else "other"
    if which == "alive":
        roots = _Counting(calls, main_root(calls)).roots
        return lambda call: "" if call.root in roots else "apart"
    pattern, is_trained = train_pattern(which)

    def by_opening(call: Call) -> WhyNot:
        found = pattern.search(opening_of(call.root.given)) is not None
        return "" if found is is_trained else "pattern"

    return by_opening


def opening_of(given: Sequence[CanonicalMessage]) -> str:
    """Return the text by which a pattern knows a conversation, of the messages that began it.

    It is that of its system messages, or where there are none of its first message.
    """
    systems = [message.text for message in given if message.role == "system"]
    return "\n".join(systems or [message.text for message in given[:1]])


# -- the main conversation -------------------------------------------------------------------------


def main_root(calls: Sequence[Call]) -> Call | None:
    """Return the first call of the main conversation: the one from which all others come.

    A conversation comes from another that goes on with its answers (a helper of it), and from one
    whose answers it begins with (what sums it up, or works on its history after its end); one
    without tools is nothing that one with tools begins with, however. Of several that come from
    none it is the one with tools, then with most calls, then with most generated tokens: that does
    not depend on how calls interleave.
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
    """Return the origins of the main conversation and of those that go on with it.

    Those begin with its answers, as after a compaction, and have its system message; where there is
    none, its tools.
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
    readers, found = Readers(calls), {main}
    while more := {
        call
        for call in like_main - found
        if readers.any([one for one in calls if one.origin in found], [call])
    }:
        found |= more
    return found


def _derived(calls: Sequence[Call]) -> set[Call]:
    """Return the origins of the conversations that come from another."""
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


# -- what can have had a part in the outcome -------------------------------------------------------


class _Counting(Generic[Call]):
    """Finds the roots of the calls that can have had a part in the outcome.

    A conversation counts that the program went on with, and the main one. So does what belongs to
    one that counts: what it has read, what is asked of the same agent, and what goes on from it.
    There each answer that arrived counts, one that the program threw away too: it acted upon it.
    """

    def __init__(self, calls: Sequence[Call], main: Call | None) -> None:
        self._readers = Readers(calls)
        self._calls: dict[Call, list[Call]] = {}
        for call in calls:
            self._calls.setdefault(call.root, []).append(call)
        before = [call.parent or call.follows for call in calls]
        self.roots = {call.root for call in before if call is not None}
        self._goes_on = bool(self.roots)
        if main is not None:
            self.roots.add(main)
        apart = {root for root in self._calls if root not in self.roots}
        while found := {root for root in apart if self._has_part(root)}:
            self.roots |= found
            apart -= found

    def _has_part(self, root: Call) -> bool:
        if root.follows is not None and root.follows.root in self.roots:
            return True
        if any(self._is_same_agent(root, one) for one in self.roots):
            return True
        counting = [call for one in self.roots for call in self._calls[one]]
        return self._readers.any(self._calls[root], counting) or self._takes_over(root, counting)

    def _is_same_agent(self, root: Call, other: Call) -> bool:
        """Whether two have the same tools, and, where they have none, the same system message.

        Where the program goes on with no conversation, each of its prompts may be a new one.
        """
        if root.context != other.context:
            return False
        same = root.has_tools or not self._goes_on
        return same or system_of(root.given) == system_of(other.given)

    def _takes_over(self, root: Call, counting: Sequence[Call]) -> bool:
        """Whether one reads what counts and has its tools, or the last word."""
        mine = self._calls[root]
        same_tools = [call for call in counting if call.context == root.context]
        if self._readers.any(same_tools, mine):
            return True
        is_last = all(call.num_seen <= mine[-1].number for call in counting)
        return is_last and self._readers.any(counting, mine)


def system_of(messages: Sequence[CanonicalMessage]) -> list[bytes]:
    """Return the keys of the system messages."""
    return [message.key for message in messages if message.role == "system"]


def digest_of(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a call's context, which tells sets of tools apart; other orders are other sets."""
    told = json.dumps([dict(tool) for tool in tools], sort_keys=True)
    return blake2b(told.encode(), digest_size=16).digest()


NO_TOOLS = digest_of(())
"""The context of calls without tools."""
