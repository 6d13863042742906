"""The tree of a program's model calls, and the rows that are trained of it.

A call continues another where its history begins with everything that the other was given and
answered, as `CanonicalMessage.key` compares it, under the same tools. Whatever differs begins a
branch at the last call before the difference, or a root of its own. No history is refused. For each
generated token the engine's context was `path_ids` up to it, id for id: a call is given the tokens
of its path and those that stand for what is new.

Rows contain each token that could matter exactly once. Which calls are trained, `agent.train` says
(`envs/agents/call_selection.py`): by default all whose answer arrived. They share the episode's
reward, and each weighs by its tokens within the episode.

For credit, a call leads to the one that continues it; where several do, to the one from which the
end of the main conversation is reached; where none does, to the first that was given its answer to
read. So each call has at most one that follows, and what later ones earned reaches it on one way.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isfinite
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ...envs.agents.call_selection import (
    NO_TOOLS,
    Readers,
    WhyNot,
    main_root,
    system_of,
    why_untrained,
)
from ...schemas.agent import CallPlaces, RewardedBranch
from ...schemas.model_apis.canonical import CanonicalMessage, quotes
from ...schemas.wire.array import FloatVector, IntVector
from ..engine.engine import Generation

Branch: TypeAlias = Literal[
    "", "sample", "edited", "template", "system", "tools", "compacted", "apart"
]
"""Why a call is not the only continuation of another: its request was made before (`sample`), the
history is another (`edited`), or it is a root: because the template writes the history anew
(`template`), with another system message or other tools, with an earlier answer in a new history
(`compacted`), with nothing in common (`apart`)."""


def new_path_digest() -> blake2b:
    """Return what digests the ids of a path from its beginning."""
    return blake2b(digest_size=16)


@dataclass(eq=False, slots=True)
class ModelCall:
    """One call of the model that was answered."""

    number: int
    """Its place among the calls of the episode, in the order in which they ended."""
    parent: "ModelCall | None"
    context: bytes
    """Digest of the tools and of what else shapes the prompt."""
    given: tuple[CanonicalMessage, ...]
    """The messages since its parent's answer."""
    given_ids: IntVector
    """int32[G]: what stands for them, from the end of the parent's turn to the generation
    prompt."""
    generated: Generation
    """N tokens as the engine drew them."""
    reply: CanonicalMessage
    """The answer that the program got, made from the tokens."""
    num_seen: int
    """Calls that had ended when it was asked for."""
    name: str = ""
    """With what the ids of its tool calls begin."""
    branch: Branch = ""
    follows: "ModelCall | None" = None
    """Of a root: the call that its history continues, though not its tokens."""
    delivered: bool | None = None
    """Whether the program has the answer, by its proxy or a later call; None: unknown."""
    children: "list[ModelCall]" = field(default_factory=list["ModelCall"])
    prefix: bytes = b""
    """Digest of the context and of all messages to the answer: where a history may attach."""
    digest: bytes = b""
    """Digest of all tokens to its last: the same however calls of one episode interleave."""
    num_tokens: int = 0
    """Tokens of its path, its own included."""
    digesting: blake2b = field(default_factory=new_path_digest)
    """What goes on digesting behind the ids of its path."""

    @property
    def path(self) -> "list[ModelCall]":
        """The calls from its root to itself."""
        calls: list[ModelCall] = []
        call: ModelCall | None = self
        while call is not None:
            calls.append(call)
            call = call.parent
        return calls[::-1]

    @property
    def root(self) -> "ModelCall":
        """The first call of its path."""
        return self.path[0]

    @property
    def origin(self) -> "ModelCall":
        """The first call of its history."""
        call = self.root
        while call.follows is not None:
            call = call.follows.root
        return call

    @property
    def has_tools(self) -> bool:
        """Whether it may call tools."""
        return self.context != NO_TOOLS

    @property
    def num_generated(self) -> int:
        """Tokens of its answer."""
        return len(self.generated.token_ids)

    @property
    def path_ids(self) -> IntVector:
        """int32[num_tokens]: the engine's context behind its last token."""
        return self.path_ids_with(())

    def path_ids_with(self, new: Iterable[IntVector]) -> IntVector:
        """Return int32: the ids of its path, then new ones."""
        mine = (ids for call in self.path for ids in (call.given_ids, call.generated.token_ids))
        return np.concatenate([*mine, *new], dtype=np.int32)

    @property
    def path_messages(self) -> list[CanonicalMessage]:
        """What a program that has its answer sends as the history."""
        return [message for call in self.path for message in (*call.given, call.reply)]


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a request stands in the tree."""

    parent: ModelCall | None
    given: tuple[CanonicalMessage, ...]
    """What is new behind the parent; the whole history where there is none."""
    context: bytes
    branch: Branch
    num_seen: int
    follows: ModelCall | None = None
    """The call whose history it continues, where that is rendered anew."""


class CallTree:
    """All calls of one episode."""

    def __init__(self) -> None:
        """Begin without calls."""
        self.calls: list[ModelCall] = []
        """In the order in which they ended."""
        self._by_prefix = defaultdict[bytes, list[ModelCall]](list)

    @property
    def roots(self) -> list[ModelCall]:
        """The calls that continue no other."""
        return [call for call in self.calls if call.parent is None]

    def attach(self, history: Sequence[CanonicalMessage], context: bytes) -> Attachment:
        """Find the call that a request continues: the deepest whose messages begin its history."""
        digests = list(prefixes(context, history))
        for length in range(len(history), 0, -1):
            known = self._by_prefix.get(digests[length - 1], ())
            fitting = [call for call in known if _agree(call.path_messages, history)]
            if fitting:
                parent = max(fitting, key=lambda call: _likelihood(call, history))
                return self._attachment(parent, history[length:], context)
        return self._attachment(None, history, context)

    def detached(
        self, history: Sequence[CanonicalMessage], context: bytes, follows: ModelCall
    ) -> Attachment:
        """Return a root for a request that continues a call, but not its tokens."""
        return Attachment(None, tuple(history), context, "template", len(self.calls), follows)

    def commit(
        self,
        attachment: Attachment,
        given_ids: IntVector,
        generated: Generation,
        reply: CanonicalMessage,
        name: str = "",
    ) -> ModelCall:
        """Add an answered call. That it was asked shows that its parent's answer had arrived."""
        parent = attachment.parent
        known = parent or attachment.follows
        if known is not None:
            for call in known.path:
                call.delivered = True
        before = parent.digest if parent is not None else attachment.context
        tokens = given_ids.tobytes() + b"|" + generated.token_ids.tobytes()
        *_, prefix = prefixes(
            parent.prefix if parent is not None else attachment.context,
            (*attachment.given, reply),
        )
        digesting = digest_behind(parent, given_ids)
        digesting.update(generated.token_ids.tobytes())
        call = ModelCall(
            number=len(self.calls),
            parent=parent,
            context=attachment.context,
            given=attachment.given,
            given_ids=given_ids,
            generated=generated,
            reply=reply,
            num_seen=attachment.num_seen,
            name=name,
            branch=attachment.branch,
            follows=attachment.follows,
            prefix=prefix,
            digest=_digest(before, tokens),
            num_tokens=(parent.num_tokens if parent is not None else 0)
            + len(given_ids)
            + len(generated.token_ids),
            digesting=digesting,
        )
        self.calls.append(call)
        self._by_prefix[prefix].append(call)
        if parent is not None:
            parent.children.append(call)
        return call

    def _attachment(
        self, parent: ModelCall | None, given: Sequence[CanonicalMessage], context: bytes
    ) -> Attachment:
        branch = self._branch(parent, given, context)
        return Attachment(parent, tuple(given), context, branch, len(self.calls))

    def _branch(
        self, parent: ModelCall | None, given: Sequence[CanonicalMessage], context: bytes
    ) -> Branch:
        if parent is not None or not self.calls:
            same = [call for call in parent.children if _same(call.given, given)] if parent else []
            return "sample" if same else "edited" if parent and parent.children else ""
        if any(_same(root.given, given) and root.context == context for root in self.roots):
            return "sample"
        if any(quotes(given, call.reply) for call in self.calls):
            return "compacted"
        if all(root.context != context for root in self.roots):
            return "tools"
        if all(system_of(root.given) != system_of(given) for root in self.roots):
            return "system"
        return "apart"


def digest_behind(parent: ModelCall | None, given_ids: IntVector) -> blake2b:
    """Return what goes on digesting behind the ids of a path and those that are new."""
    digesting = new_path_digest() if parent is None else parent.digesting.copy()
    digesting.update(given_ids.tobytes())
    return digesting


def prefixes(start: bytes, messages: Iterable[CanonicalMessage]) -> Iterator[bytes]:
    """Yield the digest of each beginning of a history: that of a call is its `prefix`."""
    digest = start
    for message in messages:
        digest = _digest(digest, message.key)
        yield digest


def _digest(before: bytes, new: bytes) -> bytes:
    return blake2b(new, key=before[:64], digest_size=16).digest()


def _agree(path: Sequence[CanonicalMessage], history: Sequence[CanonicalMessage]) -> bool:
    return all(mine.agrees(theirs) for mine, theirs in zip(path, history, strict=False))


def _likelihood(call: ModelCall, history: Sequence[CanonicalMessage]) -> tuple[int, bool, int]:
    """Tell equal paths apart: by the ids that the program echoes, then by what it has, then age."""
    pairs = zip(call.path_messages, history, strict=False)
    echoed = sum(
        mine.id == theirs.id
        for ours, sent in pairs
        for mine, theirs in zip(ours.calls, sent.calls, strict=True)
    )
    return echoed, call.delivered is True, call.number


def _same(some: Sequence[CanonicalMessage], others: Sequence[CanonicalMessage]) -> bool:
    return [message.key for message in some] == [message.key for message in others]


# -- from the tree to rows -------------------------------------------------------------------------

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
        path = [call for call in leaf.path if call.num_tokens <= max_tokens]
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


# -- places of calls, for credit -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PostedRewards:
    """What was posted for parts of an episode, and the names of its branches; by call numbers."""

    calls: Mapping[int, float]
    branches: Mapping[int, float]
    names: Mapping[int, str]

    @classmethod
    def of(cls, info: Mapping[str, Any], tree: CallTree) -> "PostedRewards":
        """Read what the environment reports; leave out what names no call of the episode."""
        calls, branches, names = (
            {
                number: entry[str(number)]
                for number in range(len(tree.calls))
                if isinstance(entry.get(str(number)), kind)
            }
            for entry, kind in _named_fields(info)
        )
        return cls(_finite(calls), _finite(branches), names)


def _named_fields(info: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Any]]:
    """Return the three maps of an environment's `info`: others than ours may write there."""
    kinds = {"call_rewards": int | float, "branch_rewards": int | float, "branch_names": str}
    fields = [(info.get(name), kind) for name, kind in kinds.items()]
    return [
        (cast("Mapping[str, Any]", entry) if isinstance(entry, Mapping) else {}, kind)
        for entry, kind in fields
    ]


def _finite(rewards: Mapping[int, Any]) -> dict[int, float]:
    return {number: float(worth) for number, worth in rewards.items() if isfinite(worth)}


class EpisodeCredit:
    """Finds the places of the rows of one ended episode."""

    def __init__(self, tree: CallTree, tree_rows: TreeRows, posted: PostedRewards) -> None:
        """Take what was posted for the episode of a tree, and the rows of the tree."""
        self._tree = tree
        self._main = main_root(tree.calls)
        self._posted = posted
        self._trained = {number for row in tree_rows.rows for number in row.calls}
        self._nexts = _nexts(
            tree, self._trained, tree_rows.rows[0].calls[-1] if tree_rows.rows else -1
        )
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
            depths=_ints([len(_before(call)) - 1 for call in calls]),
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
        return next(
            (earlier.number for earlier in _before(call) if earlier.number in self._trained), None
        )

    def _branch(self, call: ModelCall) -> int:
        begun = (
            earlier.number for earlier in _before(call) if earlier.number in self._posted.branches
        )
        return next(begun, -1)

    def _role(self, call: ModelCall) -> str:
        named = (
            self._posted.names[earlier.number]
            for earlier in _before(call)
            if earlier.number in self._posted.names
        )
        return next(named, self._kind(call))

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
    calls: list[ModelCall] = []
    at: ModelCall | None = call
    while at is not None:
        calls.append(at)
        at = at.parent if at.parent is not None else at.follows
    return calls


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
