"""The tree of a program's model calls, and the training rows that are made of it.

A call continues another one if its history begins with all messages and the answer of that call,
compared by `ModelMessage.key`, with the same tools. A history that differs begins a branch at
the last call before the difference, or a new root. No history is refused. For each generated token
the engine's context was exactly `path_ids` up to that token: a prompt consists of the tokens of its
path and those of the new messages.

Each trained token is in exactly one row. `agent.train` selects the trained calls
(`envs/agents/call_selection.py`), by default all whose answer arrived. They share the episode's
reward, and each is weighted by its tokens within the episode.

For credit assignment each call has at most one next call: the one that continues it; of several,
the one that leads to the end of the main conversation; without any, the first call whose prompt
contained its answer. So later rewards reach a call on one path only.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ...envs.agents.call_selection import (
    Readers,
    WhyNot,
    main_root,
    system_of,
    why_untrained,
)
from ...schemas.agent import CallPlaces, RewardedBranch
from ...schemas.model_apis.canonical import ModelMessage, ReplyReader, pictures_of, quotes
from ...schemas.wire.array import FloatVector, IntVector
from ..engine.engine import Generation

if TYPE_CHECKING:
    from ..policy.grammar import TokenGrammar

Branch: TypeAlias = Literal[
    "", "sample", "edited", "template", "system", "tools", "compacted", "apart"
]
"""Why a call is not the only continuation of another one: the same request was made before
(`sample`), the history differs (`edited`), or it is a root. A call is a root because the template
renders the history differently (`template`), the system message or the tools differ, a new history
quotes an earlier answer (`compacted`), or nothing is in common (`apart`)."""


def new_path_digest() -> blake2b:
    """Return the digest of an empty path."""
    return blake2b(digest_size=16)


@dataclass(eq=False, slots=True, kw_only=True)
class CallPrompt:
    """A request of a program: its place in the tree of calls, and its prompt."""

    parent: "ModelCall | None"
    """The call whose tokens it continues."""
    given: tuple[ModelMessage, ...]
    """The messages since its parent's answer; the whole history if it has no parent."""
    context: bytes
    """Digest of the tools."""
    branch: Branch = ""
    num_seen: int = 0
    """Calls that had ended when it was requested."""
    follows: "ModelCall | None" = None
    """For a root: the call whose history, but not whose tokens, it continues."""
    given_ids: IntVector = field(default_factory=lambda: np.empty(0, np.int32))
    """int32[G]: tokens of the new messages, from the end of the parent's turn to the generation
    prompt."""
    name: str = ""
    """Prefix of the answer's tool call ids."""
    has_tools: bool = False
    opened: str = ""
    """The mark with which the prompt opens the reasoning that `ReplyReader` reads."""
    prefill: str = ""
    """Beginning of the answer, written by the program."""
    grammar: "TokenGrammar | None" = None
    """Constraint on the answer's tokens; None: none."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.given_ids) + (0 if self.parent is None else self.parent.num_tokens)

    @property
    def prompt_ids(self) -> IntVector:
        """int32[P]: the tokens of the path and of the new messages, concatenated at each access."""
        return self.ids_with(())

    def ids_with(self, begun: Sequence[int]) -> IntVector:
        """Return int32: the prompt, followed by the first tokens of its answer."""
        new = [self.given_ids, *([np.array(begun, np.int32)] if begun else [])]
        return np.concatenate(new) if self.parent is None else self.parent.path_ids_with(new)

    def digest_with(self, *limits: object) -> bytes:
        """Return 16 bytes that identify a request by its prompt's ids and its limits."""
        digesting = digest_behind(self.parent, self.given_ids)
        digesting.update(repr(limits).encode())
        return digesting.digest()

    @property
    def images(self) -> tuple[bytes, ...]:
        """The encoded images of the prompt, in order."""
        before = [] if self.parent is None else self.parent.path_messages
        return tuple(pictures_of((*before, *self.given)))

    def reader(self) -> ReplyReader:
        """Return a reader of the answer."""
        return ReplyReader(self.name, calls=self.has_tools, thinking=bool(self.opened))


@dataclass(eq=False, slots=True, kw_only=True)
class ModelCall(CallPrompt):
    """One call of the model that was answered."""

    generated: Generation
    """N tokens as the engine drew them."""
    text: str | None = None
    """The text that was sent, if it differs from that of the tokens."""
    request_digest: bytes = b""
    """Identifies equal requests."""
    request_id: str = ""
    """Id of the proxy's first request for it, equal for all choices of an answer."""
    reply: ModelMessage
    """The answer as a message, as the program got it."""
    number: int = -1
    """Index among the episode's calls, in the order in which they ended; -1: not in the tree."""
    ended: float = 0.0
    """When it was answered; 0: another generator recorded it."""
    delivered: bool | None = None
    """Whether the program has the answer, according to its proxy or a later call; None: unknown."""
    children: "list[ModelCall]" = field(default_factory=list["ModelCall"])
    prefix: bytes = b""
    """Digest of the context and all messages including the answer, by which histories attach."""
    digest: bytes = b""
    """Digest of all tokens of its path; independent of the order of concurrent calls."""
    num_tokens: int = 0
    """Tokens of its path, its own included."""
    digesting: blake2b = field(default_factory=new_path_digest)
    """Digest of the ids of its path, to be continued."""

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
    def path_messages(self) -> list[ModelMessage]:
        """The history that a program sends after its answer."""
        return [message for call in self.path for message in (*call.given, call.reply)]


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

    def attach(self, history: Sequence[ModelMessage], context: bytes) -> CallPrompt:
        """Find the deepest call whose messages are a prefix of the history."""
        digests = list(prefixes(context, history))
        for length in range(len(history), 0, -1):
            known = self._by_prefix.get(digests[length - 1], ())
            fitting = [call for call in known if _agree(call.path_messages, history)]
            if fitting:
                parent = max(fitting, key=lambda call: _likelihood(call, history))
                return self._prompt(parent, history[length:], context)
        return self._prompt(None, history, context)

    def detached(
        self, history: Sequence[ModelMessage], context: bytes, follows: ModelCall
    ) -> CallPrompt:
        """Return a root for a request that continues the messages of a call, not its tokens."""
        return CallPrompt(
            parent=None,
            given=tuple(history),
            context=context,
            branch="template",
            num_seen=len(self.calls),
            follows=follows,
        )

    def add(self, call: ModelCall) -> None:
        """Add an answered call. The request shows that its parent's answer had arrived."""
        parent = call.parent
        known = parent or call.follows
        if known is not None:
            for earlier in known.path:
                earlier.delivered = True
        call.number = len(self.calls)
        before = parent.digest if parent is not None else call.context
        tokens = call.given_ids.tobytes() + b"|" + call.generated.token_ids.tobytes()
        call.digest = _digest(before, tokens)
        start = parent.prefix if parent is not None else call.context
        *_, call.prefix = prefixes(start, (*call.given, call.reply))
        call.num_tokens = call.num_prompt + len(call.generated.token_ids)
        call.digesting = digest_behind(parent, call.given_ids)
        call.digesting.update(call.generated.token_ids.tobytes())
        self.calls.append(call)
        self._by_prefix[call.prefix].append(call)
        if parent is not None:
            parent.children.append(call)

    def _prompt(
        self, parent: ModelCall | None, messages: Sequence[ModelMessage], context: bytes
    ) -> CallPrompt:
        return CallPrompt(
            parent=parent,
            given=tuple(messages),
            context=context,
            branch=self._branch(parent, messages, context),
            num_seen=len(self.calls),
        )

    def _branch(
        self, parent: ModelCall | None, messages: Sequence[ModelMessage], context: bytes
    ) -> Branch:
        if parent is not None or not self.calls:
            same = (
                [call for call in parent.children if _same(call.given, messages)] if parent else []
            )
            return "sample" if same else "edited" if parent and parent.children else ""
        if any(_same(root.given, messages) and root.context == context for root in self.roots):
            return "sample"
        if any(quotes(messages, call.reply) for call in self.calls):
            return "compacted"
        if all(root.context != context for root in self.roots):
            return "tools"
        if all(system_of(root.given) != system_of(messages) for root in self.roots):
            return "system"
        return "apart"


def digest_behind(parent: ModelCall | None, given_ids: IntVector) -> blake2b:
    """Return the digest of the ids of a path and of new ones, to be continued."""
    digesting = new_path_digest() if parent is None else parent.digesting.copy()
    digesting.update(given_ids.tobytes())
    return digesting


def prefixes(start: bytes, messages: Iterable[ModelMessage]) -> Iterator[bytes]:
    """Yield the digest of each prefix of a history; that of a call is its `prefix`."""
    digest = start
    for message in messages:
        digest = _digest(digest, message.key)
        yield digest


def _digest(before: bytes, new: bytes) -> bytes:
    return blake2b(new, key=before[:64], digest_size=16).digest()


def _agree(path: Sequence[ModelMessage], history: Sequence[ModelMessage]) -> bool:
    return all(mine.agrees(theirs) for mine, theirs in zip(path, history, strict=False))


def _likelihood(call: ModelCall, history: Sequence[ModelMessage]) -> tuple[int, bool, int]:
    """Rank equal paths: by the ids that the program echoes, then by delivery, then by age."""
    pairs = zip(call.path_messages, history, strict=False)
    echoed = sum(
        mine.id == theirs.id
        for ours, sent in pairs
        for mine, theirs in zip(ours.calls, sent.calls, strict=True)
    )
    return echoed, call.delivered is True, call.number


def _same(some: Sequence[ModelMessage], others: Sequence[ModelMessage]) -> bool:
    return [message.key for message in some] == [message.key for message in others]


# -- from the tree to rows -------------------------------------------------------------------------

Kind: TypeAlias = Literal["main", "compacted", "sub-agent", "edited", "sample"]


@dataclass(frozen=True, slots=True)
class CallRow:
    """One training row: the path to one call, T tokens, with K trained calls."""

    token_ids: IntVector
    """int32[T]."""
    mask: NDArray[np.uint8]
    """uint8[T]: 1 at the tokens of the trained calls."""
    logprobs: FloatVector
    """float32[T]: behaviour log-prob of each trained token, 0 elsewhere."""
    versions: IntVector
    """int32[T]: policy version of each trained token, -1 elsewhere."""
    turn_ends: IntVector
    """int32[K]: position of each trained call's last token."""
    calls: tuple[int, ...]
    """Numbers of the trained calls."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The rows of an episode, and the calls that are not in any row."""

    rows: tuple[CallRow, ...]
    """The main row first; each trained token is in one row."""
    why_not: Mapping[int, WhyNot]
    """Why calls are not trained, by their numbers."""
    num_cut: int
    """Generated tokens beyond the length limit of a row."""

    @property
    def untrained(self) -> tuple[int, ...]:
        """Numbers of the calls that are not trained."""
        return tuple(self.why_not)


def rows_of(
    tree: CallTree, max_tokens: int, which: str = "all", left_out: Collection[int] = ()
) -> TreeRows:
    """Return the rows of an episode, each of up to `max_tokens` and ending with a call.

    `which` is a value of `agent.train` and selects the trained calls; those whose numbers are in
    `left_out` are not trained.
    """
    main = main_root(tree.calls)
    why_not = why_untrained(tree.calls, which, left_out)
    trained = {call for call, why in why_not.items() if not why}
    waiting = set(trained)
    rows: list[CallRow] = []
    for leaf in _leaves(trained, main):
        path = [call for call in leaf.path if call.num_tokens <= max_tokens]
        in_row = [call for call in path if call in waiting]
        if in_row:
            waiting.difference_update(in_row)
            rows.append(_row(path[: path.index(in_row[-1]) + 1], in_row, _kind(leaf, main)))
    return TreeRows(
        rows=tuple(rows),
        why_not={call.number: why for call, why in why_not.items() if why},
        num_cut=sum(len(call.generated.token_ids) for call in waiting),
    )


def _leaves(trained: Collection[ModelCall], main: ModelCall | None) -> list[ModelCall]:
    """Return the trained calls without a trained continuation: main ones first, then by length."""
    inner = {call.parent for leaf in trained for call in leaf.path}
    leaves = [call for call in trained if call not in inner]
    return sorted(leaves, key=lambda leaf: (leaf.origin is not main, -leaf.num_tokens, leaf.digest))


def _kind(leaf: ModelCall, main: ModelCall | None) -> Kind:
    if leaf.origin is not main:
        return "compacted" if leaf.origin.branch == "compacted" else "sub-agent"
    branches = [call.branch for call in leaf.path]
    return "sample" if "sample" in branches else "edited" if "edited" in branches else "main"


def _row(path: Sequence[ModelCall], trained: Sequence[ModelCall], kind: Kind) -> CallRow:
    ids = path[-1].path_ids
    mask = np.zeros(len(ids), np.uint8)
    logprobs = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), -1, np.int32)
    for call in trained:
        own = slice(call.num_tokens - len(call.generated.token_ids), call.num_tokens)
        mask[own] = 1
        logprobs[own] = call.generated.logprobs
        versions[own] = call.generated.versions
    return CallRow(
        token_ids=ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        turn_ends=np.array([call.num_tokens - 1 for call in trained], np.int32),
        calls=tuple(call.number for call in trained),
        kind=kind,
    )


# -- places of calls, for credit -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PostedRewards:
    """Posted rewards of calls and branches, and names of branches, by call numbers."""

    calls: Mapping[int, float]
    branches: Mapping[int, float]
    names: Mapping[int, str]

    @classmethod
    def of(cls, info: Mapping[str, Any], tree: CallTree) -> "PostedRewards":
        """Read an environment's `info`; entries for unknown calls are skipped."""
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
    """Return three maps of an environment's `info`, whose content is untrusted."""
    kinds = {"call_rewards": int | float, "branch_rewards": int | float, "branch_names": str}
    fields = [(info.get(name), kind) for name, kind in kinds.items()]
    return [
        (cast("Mapping[str, Any]", entry) if isinstance(entry, Mapping) else {}, kind)
        for entry, kind in fields
    ]


def _finite(rewards: Mapping[int, Any]) -> dict[int, float]:
    return {number: float(worth) for number, worth in rewards.items() if isfinite(worth)}


class EpisodeCredit:
    """Finds the positions of an ended episode's rows among its calls."""

    def __init__(self, tree: CallTree, tree_rows: TreeRows, posted: PostedRewards) -> None:
        """Prepare for the rows of a tree and the rewards posted for its episode."""
        self._tree = tree
        self._main = main_root(tree.calls)
        self._posted = posted
        self._trained = {number for row in tree_rows.rows for number in row.calls}
        self._nexts = _nexts(
            tree, self._trained, tree_rows.rows[0].calls[-1] if tree_rows.rows else -1
        )
        self.rewards = self._earned()
        """Own reward of each trained call."""

    @property
    def num_lost(self) -> int:
        """Number of posted rewards that reach no trained call."""
        calls = [self._tree.calls[number] for number in self._posted.calls]
        used = {self._branch(self._tree.calls[number]) for number in self._trained}
        lost = sum(self._heir(call) is None for call in calls)
        return lost + len(set(self._posted.branches) - used)

    def places(self, row: CallRow, outcome: float, *, is_main: bool) -> CallPlaces:
        """Return the positions of one row; `outcome` is the episode's own reward."""
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
        """Assign each reward to its call, or to the last trained call before it."""
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
    """Return a call and the earlier calls of its history, the latest first."""
    calls: list[ModelCall] = []
    at: ModelCall | None = call
    while at is not None:
        calls.append(at)
        at = at.parent if at.parent is not None else at.follows
    return calls


def _nexts(tree: CallTree, trained: Collection[int], end: int) -> dict[int, int]:
    """Map each trained call to the next one; `end` is the last one of the main row.

    The next call always ended later, so cycles are impossible.
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
        chosen = min(after, key=lambda call: (call.number not in leads, call.digest)).number
        if chosen in leads:
            leads.add(call.number)
        onward = chosen if chosen in trained else nexts.get(chosen, -1)
        if onward >= 0:
            nexts[call.number] = onward
    return {number: to for number, to in nexts.items() if number in trained}


def _ints(numbers: Sequence[int]) -> Any:
    return np.array(numbers, np.int32)
