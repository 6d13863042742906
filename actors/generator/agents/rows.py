"""From a tree of calls to what is trained: each token that could matter, exactly once.

Which calls are trained, `agent.train` says (`envs/agents/which_calls.py`): by default all whose
answer arrived. They share the episode's reward, and each weighs by its tokens within the episode.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....envs.agents.which_calls import WhyNot, main_root, why_untrained
from ..engine.engine import FloatVector, IntVector
from .call_tree import CallTree, ModelCall

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
    why_not: Mapping[int, WhyNot]
    """Why calls are not trained, by their numbers."""
    num_cut: int
    """Generated tokens that stand behind the limit of a row."""

    @property
    def untrained(self) -> tuple[int, ...]:
        """Numbers of the calls that are not trained."""
        return tuple(self.why_not)


def rows_of(
    tree: CallTree, max_tokens: int, which: str = "all", left_out: Collection[int] = ()
) -> TreeRows:
    """Return the rows of an episode, none longer than `max_tokens`: a row ends at a call's end.

    `which` is a value of `agent.train` and says which calls are trained; those whose numbers are in
    `left_out` are in no case.
    """
    main = main_root(tree.calls)
    why_not = why_untrained(tree.calls, which, left_out)
    trained = {call for call, why in why_not.items() if not why}
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
        why_not={call.number: why for call, why in why_not.items() if why},
        num_cut=sum(len(call.generated.token_ids) for call in waiting),
    )


def trained_calls(tree: CallTree, which: str = "all") -> set[ModelCall]:
    """Return the calls that are trained; by default all whose answer arrived."""
    return {call for call, why in why_untrained(tree.calls, which).items() if not why}


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
