"""From a tree of calls to what is trained: each token that could matter, exactly once.

A call is trained where it can have had a part in the outcome. That is decided by what the program
did with the answers, not by what they say: a title that is generated beside the work and read by
nothing is left out, a sub-agent whose answer is read is in.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.engine import FloatVector, IntVector
from .call_tree import CallTree, ModelCall, system_of
from .exact_calls import NO_TOOLS
from .reading import Readers

Kind: TypeAlias = Literal["main", "compacted", "sub-agent", "edited", "sample"]


@dataclass(frozen=True, slots=True)
class CallRow:
    """One row of a batch: the path to one call, T tokens, with K calls that are trained in it."""

    token_ids: IntVector
    """int32[T]."""
    mask: NDArray[np.uint8]
    """uint8[T]: 1 at the tokens of the trained calls."""
    logprobs: FloatVector
    """float32[T]: of the trained tokens as they were drawn, 0 elsewhere."""
    versions: IntVector
    """int32[T]: policy version of each trained token, -1 elsewhere."""
    turn_ends: IntVector
    """int32[K]: position of each trained call's last token."""
    calls: tuple[int, ...]
    """Numbers of the trained calls."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The rows of an episode, and what is in none."""

    rows: tuple[CallRow, ...]
    """The main row first; each trained token in one of them."""
    untrained: tuple[int, ...]
    """Numbers of the calls that cannot have mattered."""
    num_cut: int
    """Generated tokens that stand behind the limit of a row."""


Which: TypeAlias = Literal["alive", "main", "all"]


def rows_of(
    tree: CallTree, max_tokens: int, which: Which = "alive", left_out: Collection[int] = ()
) -> TreeRows:
    """Return the rows of an episode, none longer than `max_tokens`: a row ends at a call's end.

    `which` calls are trained: those that can have had a part in the outcome, those of the main
    conversation, or all that arrived; those whose numbers are in `left_out` in no case.
    """
    main = main_root(tree)
    trained = {call for call in trained_calls(tree, which) if call.number not in left_out}
    waiting = set(trained)
    rows: list[CallRow] = []
    for leaf in _leaves(trained, main):
        path = _within(leaf.path, max_tokens)
        taken = [call for call in path if call in waiting]
        if taken:
            waiting.difference_update(taken)
            rows.append(_row(path[: path.index(taken[-1]) + 1], taken, _kind(leaf, main)))
    return TreeRows(
        rows=tuple(rows),
        untrained=tuple(call.number for call in tree.calls if call not in trained),
        num_cut=sum(len(call.generated.token_ids) for call in waiting),
    )


def main_root(tree: CallTree) -> ModelCall | None:
    """Return the first call of the main conversation: the one with most calls.

    Of equals it is the one that reads the answers of most others, then one that has tools, then the
    one with most generated tokens.
    """
    histories: dict[ModelCall, list[ModelCall]] = {}
    for call in tree.calls:
        histories.setdefault(call.origin, []).append(call)
    most = max(map(len, histories.values()), default=0)
    tied = [root for root, calls in histories.items() if len(calls) == most]
    if len(tied) < 2:
        return next(iter(tied), None)
    readers = Readers(tree.calls)

    def worth(root: ModelCall) -> tuple[int, bool, int, bytes]:
        mine = histories[root]
        others = [calls for one, calls in histories.items() if one is not root]
        num_read = sum(readers.any(calls, mine) for calls in others)
        num_tokens = sum(len(call.generated.token_ids) for call in mine)
        return num_read, root.context != NO_TOOLS, num_tokens, root.digest

    return max(tied, key=worth)


def trained_calls(tree: CallTree, which: Which = "alive") -> set[ModelCall]:
    """Return the calls that are trained; by default what can have had a part in the outcome."""
    main = main_root(tree)
    if which == "alive":
        counting = _Counting(tree, main).roots
    else:
        counting = {call.root for call in tree.calls if which == "all" or call.origin is main}
    return {
        call
        for call in tree.calls
        if call.root in counting and call.delivered and len(call.generated.token_ids)
    }


class _Counting:
    """Finds the roots of the calls that can have had a part in the outcome.

    A conversation counts that the program went on with, and the main one. So does what belongs to
    one that counts: what it has read, what is asked of the same agent, and what goes on from it.
    There each answer that arrived counts, one that the program threw away too: it acted upon it.
    """

    def __init__(self, tree: CallTree, main: ModelCall | None) -> None:
        self._readers = Readers(tree.calls)
        self._calls: dict[ModelCall, list[ModelCall]] = {}
        for call in tree.calls:
            self._calls.setdefault(call.root, []).append(call)
        before = [call.parent or call.follows for call in tree.calls]
        self.roots = {call.root for call in before if call is not None}
        self._goes_on = bool(self.roots)
        if main is not None:
            self.roots.add(main)
        apart = {root for root in tree.roots if root not in self.roots}
        while found := {root for root in apart if self._has_part(root)}:
            self.roots |= found
            apart -= found

    def _has_part(self, root: ModelCall) -> bool:
        if root.follows is not None and root.follows.root in self.roots:
            return True
        if any(self._is_same_agent(root, one) for one in self.roots):
            return True
        counting = [call for one in self.roots for call in self._calls[one]]
        return self._readers.any(self._calls[root], counting) or self._takes_over(root, counting)

    def _is_same_agent(self, root: ModelCall, other: ModelCall) -> bool:
        """Whether two have the same tools, and, where they have none, the same system message.

        Where the program goes on with no conversation, each of its prompts may be a new one.
        """
        if root.context != other.context:
            return False
        same = root.context != NO_TOOLS or not self._goes_on
        return same or system_of(root.given) == system_of(other.given)

    def _takes_over(self, root: ModelCall, counting: Sequence[ModelCall]) -> bool:
        """Whether one reads what counts and has its tools, or the last word."""
        mine = self._calls[root]
        same_tools = [call for call in counting if call.context == root.context]
        if self._readers.any(same_tools, mine):
            return True
        is_last = all(call.num_seen <= mine[-1].number for call in counting)
        return is_last and self._readers.any(counting, mine)


def _leaves(trained: Collection[ModelCall], main: ModelCall | None) -> list[ModelCall]:
    """Return the trained calls that no trained call continues: main first, then the longest."""
    inner = {call.parent for leaf in trained for call in leaf.path}
    leaves = [call for call in trained if call not in inner]
    return sorted(leaves, key=lambda leaf: (leaf.origin is not main, -leaf.num_tokens, leaf.digest))


def _within(path: Sequence[ModelCall], max_tokens: int) -> list[ModelCall]:
    return [call for call in path if call.num_tokens <= max_tokens]


def _kind(leaf: ModelCall, main: ModelCall | None) -> Kind:
    if leaf.origin is not main:
        return "compacted" if leaf.origin.branch == "compacted" else "sub-agent"
    branches = [call.branch for call in leaf.path]
    return "sample" if "sample" in branches else "edited" if "edited" in branches else "main"


def _row(path: Sequence[ModelCall], taken: Iterable[ModelCall], kind: Kind) -> CallRow:
    ids = path[-1].path_ids
    mask = np.zeros(len(ids), np.uint8)
    logprobs = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), -1, np.int32)
    taken = list(taken)
    for call in taken:
        own = slice(call.num_tokens - len(call.generated.token_ids), call.num_tokens)
        mask[own] = 1
        logprobs[own] = call.generated.logprobs
        versions[own] = call.generated.versions
    return CallRow(
        token_ids=ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        turn_ends=np.array([call.num_tokens - 1 for call in taken], np.int32),
        calls=tuple(call.number for call in taken),
        kind=kind,
    )
