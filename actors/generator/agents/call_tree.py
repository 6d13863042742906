"""The tree of a program's model calls: each attached behind the exact tokens that it continues.

A call continues another where its history begins with everything that the other was given and
answered, as `CanonicalMessage.key` compares it, under the same tools. Whatever differs begins a
branch at the last call before the difference, or a root of its own. No history is refused.

For each generated token the engine's context was `path_ids` up to it, id for id: a call is given
the tokens of its path and those that stand for what is new.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, Protocol, TypeAlias

import numpy as np

from ....envs.agents.messages import CanonicalMessage, quotes
from ....envs.agents.which_calls import NO_TOOLS, system_of
from ..engine.engine import Generation, IntVector

Branch: TypeAlias = Literal[
    "", "sample", "edited", "template", "system", "tools", "compacted", "apart"
]
"""Why a call is not the only continuation of another: its request was made before (`sample`), the
history is another (`edited`), or it is a root: because the template writes the history anew
(`template`), with another system message or other tools, with an earlier answer in a new history
(`compacted`), with nothing in common (`apart`)."""


class PathDigest(Protocol):
    """A digest that goes on behind what it has seen, as those of hashlib do."""

    def update(self, data: bytes, /) -> None:
        """Go on behind `data`."""
        ...

    def copy(self) -> "PathDigest":
        """Return another one that goes on from here."""
        ...

    def digest(self) -> bytes:
        """Return 16 bytes for all that it has seen."""
        ...


def new_path_digest() -> PathDigest:
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
    """The answer that the program was told, made from the tokens."""
    num_seen: int
    """Calls that had ended when it was asked for."""
    name: str = ""
    """With what the ids of its tool calls begin."""
    branch: Branch = ""
    follows: "ModelCall | None" = None
    """Of a root: the call that its history continues, though not its tokens."""
    delivered: bool | None = None
    """Whether the program has the answer: told by its proxy or by a later call; None: unknown."""
    children: "list[ModelCall]" = field(default_factory=list["ModelCall"])
    prefix: bytes = b""
    """Digest of the context and of all messages to the answer: where a history may attach."""
    digest: bytes = b""
    """Digest of all tokens to its last: the same however calls of one episode interleave."""
    num_tokens: int = 0
    """Tokens of its path, its own included."""
    digesting: PathDigest = field(default_factory=new_path_digest)
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


def digest_behind(parent: ModelCall | None, given_ids: IntVector) -> PathDigest:
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
    return all(mine.agrees(told) for mine, told in zip(path, history, strict=False))


def _likelihood(call: ModelCall, history: Sequence[CanonicalMessage]) -> tuple[int, bool, int]:
    """Tell equal paths apart: by the ids that the program echoes, then by what it has, then age."""
    pairs = zip(call.path_messages, history, strict=False)
    echoed = sum(
        mine.id == told.id
        for kept, sent in pairs
        for mine, told in zip(kept.calls, sent.calls, strict=True)
    )
    return echoed, call.delivered is True, call.number


def _same(some: Sequence[CanonicalMessage], others: Sequence[CanonicalMessage]) -> bool:
    return [message.key for message in some] == [message.key for message in others]
