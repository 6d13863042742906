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
from .call_tree import CallTree, ModelCall, quotes

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
    """Return the first call of the history with most calls, then most generated tokens."""
    counts: dict[ModelCall, tuple[int, int]] = {}
    for call in tree.calls:
        calls, tokens = counts.get(root := call.origin, (0, 0))
        counts[root] = (calls + 1, tokens + len(call.generated.token_ids))
    return max(counts, key=lambda root: (counts[root], root.digest), default=None)


def trained_calls(tree: CallTree, which: Which = "alive") -> set[ModelCall]:
    """Return the calls that are trained; by default what can have had a part in the outcome."""
    main = main_root(tree)
    if which == "alive":
        counting = _counting(tree, main)
    else:
        counting = {call.root for call in tree.calls if which == "all" or call.origin is main}
    return {
        call
        for call in tree.calls
        if call.root in counting and call.delivered and len(call.generated.token_ids)
    }


def _counting(tree: CallTree, main: ModelCall | None) -> set[ModelCall]:
    """Return the roots of the calls that can have had a part in the outcome.

    A root counts where it is the main one or continues what counts, where a tool ran for it, where
    an answer of it was read in one that counts, and where it goes on from one that counts with the
    same tools. There each answer that arrived counts, one that the program threw away too: it acted
    upon it. The first answer was thrown away where a root that counts begins with all that it was
    given.
    """
    counting = {call.root for call in tree.calls if call.parent and _had_tools_run(call)}
    if main is not None:
        counting.add(main)
    apart = {root for root in tree.roots if root not in counting}
    while found := {root for root in apart if _has_part(tree, root, counting)}:
        counting |= found
        apart -= found
    return counting


def _had_tools_run(call: ModelCall) -> bool:
    return any(message.role == "tool" for message in call.given)


def _has_part(tree: CallTree, root: ModelCall, counting: Collection[ModelCall]) -> bool:
    if root.follows is not None and root.follows.root in counting:
        return True
    mine = [call for call in tree.calls if call.root is root]
    others = [call for call in tree.calls if call.root in counting]
    if _read(mine, others):
        return True
    same_tools = [call for call in others if call.context == root.context]
    return _read(same_tools, mine) or any(_begins(root, call) for call in same_tools)


def _begins(root: ModelCall, other: ModelCall) -> bool:
    """Whether another root goes on from what this one was given, as if it had not been answered."""
    if other.parent is not None or len(other.given) < len(root.given):
        return False
    given = other.given[: len(root.given)]
    return all(mine.key == theirs.key for mine, theirs in zip(root.given, given, strict=True))


def _read(answers: Sequence[ModelCall], readers: Sequence[ModelCall]) -> bool:
    """Whether an answer that was there when a reader asked stands in what that was given."""
    return any(
        answer.number < reader.num_seen and quotes(reader.given, answer.reply)
        for reader in readers
        for answer in answers
    )


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
