"""Where the trained calls of an episode stand: what each led to, its role, its rewarded branch.

A call leads to the one that continues it; where several do, to the one from which the end of the
main conversation is reached; where none does, to the first that was given its answer to read. So
each call has at most one that follows, and what later ones earned reaches it on one way.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

import numpy as np

from ....envs.agents.reading import Readers
from ....envs.agents.which_calls import main_root
from ....schemas.agent import CallPlaces, RewardedBranch
from .call_tree import CallTree, ModelCall
from .rows import CallRow, TreeRows


@dataclass(frozen=True, slots=True)
class PostedRewards:
    """What was posted for parts of an episode, and the names of its branches; by call numbers."""

    calls: Mapping[int, float]
    branches: Mapping[int, float]
    names: Mapping[int, str]

    @classmethod
    def of(cls, info: Mapping[str, Any], tree: CallTree) -> "PostedRewards":
        """Read what the environment tells; what names no call of the episode is left out."""
        calls, branches, names = (
            {
                number: told[str(number)]
                for number in range(len(tree.calls))
                if isinstance(told.get(str(number)), kind)
            }
            for told, kind in _told(info)
        )
        return cls(_finite(calls), _finite(branches), names)


def _told(info: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Any]]:
    """Return the three maps of an environment's `info`: others than ours may write there."""
    kinds = {"call_rewards": int | float, "branch_rewards": int | float, "branch_names": str}
    found = [(info.get(name), kind) for name, kind in kinds.items()]
    return [
        (cast("Mapping[str, Any]", told) if isinstance(told, Mapping) else {}, kind)
        for told, kind in found
    ]


def _finite(rewards: Mapping[int, Any]) -> dict[int, float]:
    return {number: float(worth) for number, worth in rewards.items() if isfinite(worth)}


class EpisodeCredit:
    """Finds the places of the rows of one ended episode."""

    def __init__(self, tree: CallTree, found: TreeRows, posted: PostedRewards) -> None:
        """`found` are the rows of the tree."""
        self._tree = tree
        self._main = main_root(tree.calls)
        self._rows = found.rows
        self._posted = posted
        self._trained = {number for row in found.rows for number in row.calls}
        self._nexts = _nexts(tree, self._trained, found.rows[0].calls[-1] if found.rows else -1)
        self.rewards = self._earned()
        """What each trained call earned by itself."""

    @property
    def num_lost(self) -> int:
        """Rewards of calls and branches that reach nothing that is trained."""
        calls = [self._tree.calls[number] for number in self._posted.calls]
        used = {self._branch(self._tree.calls[number]) for number in self._trained}
        lost = sum(self._heir(call) is None for call in calls)
        return lost + len(set(self._posted.branches) - used)

    def places(self, row: CallRow, outcome: float, *, is_main: bool) -> CallPlaces:
        """Return the places of one row; `outcome` is what the episode itself earned."""
        calls = [self._tree.calls[number] for number in row.calls]
        return CallPlaces(
            numbers=_ints(row.calls),
            nexts=_ints([self._nexts.get(number, -1) for number in row.calls]),
            depths=_ints([_depth(call) for call in calls]),
            observed=_ints([len(call.given_ids) for call in calls]),
            rewards=np.array([self.rewards.get(n, 0.0) for n in row.calls], np.float32),
            branches=_ints([self._branch(call) for call in calls]),
            roles=[self._role(call) for call in calls],
            outcome=outcome if is_main else 0.0,
            rewarded=self._rewarded() if is_main else [],
        )

    def _earned(self) -> dict[int, float]:
        """Give each reward to its call, or to the last trained one before it in its history."""
        earned: dict[int, float] = {}
        for number, reward in self._posted.calls.items():
            heir = self._heir(self._tree.calls[number])
            if heir is not None:
                earned[heir] = earned.get(heir, 0.0) + float(reward)
        return earned

    def _heir(self, call: ModelCall) -> int | None:
        return next((one.number for one in _before(call) if one.number in self._trained), None)

    def _branch(self, call: ModelCall) -> int:
        begun = (one.number for one in _before(call) if one.number in self._posted.branches)
        return next(begun, -1)

    def _role(self, call: ModelCall) -> str:
        named = (self._posted.names[one.number] for one in _before(call) if self._is_named(one))
        return next(named, self._kind(call))

    def _is_named(self, call: ModelCall) -> bool:
        return call.number in self._posted.names

    def _kind(self, call: ModelCall) -> str:
        if call.origin is self._main:
            return "main"
        return "compacted" if call.origin.branch == "compacted" else "sub-agent"

    def _rewarded(self) -> list[RewardedBranch]:
        used = {self._branch(self._tree.calls[number]) for number in self._trained}
        return [
            RewardedBranch(
                call=number,
                role=self._role(self._tree.calls[number]),
                reward=float(self._posted.branches[number]),
            )
            for number in sorted(used - {-1})
        ]


def _before(call: ModelCall) -> list[ModelCall]:
    """Return a call and those before it in its history, the latest first."""
    found: list[ModelCall] = []
    at: ModelCall | None = call
    while at is not None:
        found.append(at)
        at = at.parent if at.parent is not None else at.follows
    return found


def _depth(call: ModelCall) -> int:
    return len(_before(call)) - 1


def _nexts(tree: CallTree, trained: Collection[int], end: int) -> dict[int, int]:
    """Return to which trained call each trained one led; `end` is the last of the main row.

    A call leads to later ones only, so there is no circle.
    """
    continued: dict[int, list[ModelCall]] = {}
    for call in tree.calls:
        before = call.parent if call.parent is not None else call.follows
        if before is not None:
            continued.setdefault(before.number, []).append(call)
    readers = Readers(tree.calls)
    leads = {end}
    nexts: dict[int, int] = {}
    for call in reversed(tree.calls):
        after = continued.get(call.number, [])
        if not after:
            after = readers.of(call)[:1]
        if not after:
            continue
        chosen = min(after, key=lambda one: (one.number not in leads, one.digest)).number
        if chosen in leads:
            leads.add(call.number)
        onward = chosen if chosen in trained else nexts.get(chosen, -1)
        if onward >= 0:
            nexts[call.number] = onward
    return {number: to for number, to in nexts.items() if number in trained}


def _ints(numbers: Sequence[int]) -> Any:
    return np.array(numbers, np.int32)
