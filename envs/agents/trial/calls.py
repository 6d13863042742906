"""The calls of one program, and what each makes of those before it.

Pure. A call continues another where its history begins with everything that the other was given
and answered. Where it does not, what was changed is named: it is what costs rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ....schemas.output_format import OutputFormat
from ..messages import CanonicalMessage, quotes
from ..which_calls import digest_of

Change: TypeAlias = Literal[
    "text",
    "space",
    "reasoning",
    "reasoning_text",
    "arguments",
    "values",
    "ids",
    "calls",
    "dropped",
    "history",
    "system",
    "tools",
    "compacted",
    "sample",
    "apart",
]
"""What a program has made of an answer, or of the history before a call."""


@dataclass(eq=False)
class TrialCall:
    """One call of the model."""

    number: int
    """Its place among the calls, in the order in which they were asked."""
    history: Sequence[CanonicalMessage]
    """All that it was given."""
    tools: Sequence[Mapping[str, Any]] = ()
    """As chat templates take them."""
    form: OutputFormat | None = None
    """What the answer must be."""
    is_streamed: bool = False
    num_choices: int = 1
    is_retry: bool = False
    """Its client says that it has asked before."""
    without_effect: Sequence[str] = ()
    """Fields that change nothing."""
    sampled: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling that it asked for."""
    num_beside: int = 0
    """Calls that were being answered when it came."""
    asked_s: float = 0.0
    """Monotonic time at which it came."""
    answered_s: float = 0.0
    """Monotonic time at which all of its answer, or an error, was told; 0: never."""
    replies: Sequence[CanonicalMessage] = ()
    """Its answers; none where it was refused."""
    first_answer: int = 0
    """Number of the first of them among all answers of the episode."""
    num_seen: int = 0
    """Answers that there were when it came."""
    refusal: str = ""
    """The code of the error that it was told."""

    @property
    def num_characters(self) -> int:
        """How long its history is."""
        return sum(
            len(message.text)
            + len(message.reasoning or "")
            + sum(len(call.arguments) for call in message.calls)
            for message in self.history
        )

    def paths(self) -> Iterator[list[CanonicalMessage]]:
        """Yield what a program that has an answer sends as the history, for each answer."""
        for reply in self.replies:
            yield [*self.history, reply]


@dataclass(frozen=True)
class Placement:
    """Where a call stands among those before it."""

    parent: int | None
    """Number of the call that it continues; None: a root."""
    num_new: int
    """Messages that are new to the model."""
    changes: frozenset[Change] = frozenset()
    """What was changed of the answers on the way, and why it continues none."""


@dataclass(eq=False, frozen=True)
class TriedAnswer:
    """One answer to a call, as the rule of what is trained sees it."""

    call: TrialCall
    number: int
    parent: "TriedAnswer | None"
    given: Sequence[CanonicalMessage]
    reply: CanonicalMessage
    follows: "TriedAnswer | None" = None
    """Histories that a model's template writes anew are not known here."""
    delivered: bool = True

    @property
    def root(self) -> "TriedAnswer":
        """The first answer of its path."""
        return self if self.parent is None else self.parent.root

    @property
    def origin(self) -> "TriedAnswer":
        """The first answer of its history."""
        return self.root

    @property
    def context(self) -> bytes:
        """Digest of its tools."""
        return digest_of(self.call.tools)

    @property
    def has_tools(self) -> bool:
        """Whether it may call tools."""
        return bool(self.call.tools)

    @property
    def num_seen(self) -> int:
        """Answers that there were when it was asked for."""
        return self.call.num_seen

    @property
    def num_generated(self) -> int:
        """Characters of the answer: of equal conversations the main one has more."""
        return max(1, len(self.reply.text))

    @property
    def digest(self) -> bytes:
        """By which equal conversations are told apart: the earliest is the main one."""
        return (-self.number).to_bytes(8, signed=True)


def answers_of(calls: Sequence[TrialCall], placements: "Sequence[Placement]") -> list[TriedAnswer]:
    """Return the answers of the calls of a program, in the order in which they were given."""
    firsts: dict[int, TriedAnswer] = {}
    answers: list[TriedAnswer] = []
    answered = [pair for pair in zip(calls, placements, strict=True) if pair[0].replies]
    for call, placement in sorted(answered, key=lambda pair: pair[0].first_answer):
        parent = None if placement.parent is None else firsts.get(placement.parent)
        given = call.history[len(call.history) - placement.num_new :]
        for choice, reply in enumerate(call.replies):
            answers.append(TriedAnswer(call, call.first_answer + choice, parent, given, reply))
        firsts[call.number] = answers[-len(call.replies)]
    return answers


def place(call: TrialCall, earlier: Sequence[TrialCall]) -> Placement:
    """Find the call that another continues, and what was changed on the way."""
    parent, path = None, list[CanonicalMessage]()
    for one in earlier:
        for its in one.paths() if one.tools == call.tools else ():
            if len(its) >= len(path) and _begins(call.history, its):
                parent, path = one, its
    if parent is not None:
        echoed = _echoes_on_path(call, earlier[: parent.number + 1])
        beside = _beside(call, earlier[parent.number + 1 :])
        changes: set[Change] = {*echoed, *beside}
        return Placement(parent.number, len(call.history) - len(path), frozenset(changes))
    echoed = _echoes(call, [one for one in earlier if _is_about(call, one)])
    why_not: set[Change] = {*echoed, *_why_not(call, earlier)}
    return Placement(None, len(call.history), frozenset(why_not))


def _beside(call: TrialCall, later: Sequence[TrialCall]) -> Iterator[Change]:
    """Name what a call does with answers that came after the one that it continues."""
    for one in later:
        if one.replies and one.tools == call.tools and _begins(call.history, list(one.history)):
            yield "sample" if len(one.history) == len(call.history) else "dropped"


def _why_not(call: TrialCall, earlier: Sequence[TrialCall]) -> Iterator[Change]:
    """Name what keeps a call from continuing any of those before it."""
    paths = [(one, its) for one in earlier for its in one.paths()]
    if not paths:
        return
    near, path = max(paths, key=lambda pair: (_common(call.history, pair[1]), pair[0].number))
    common = _common(call.history, path)
    if common == len(call.history) == len(near.history) and call.tools == near.tools:
        yield "sample"
        return
    if call.tools != near.tools and _is_about(call, near):
        if _systems(call.history) != _systems(near.history):
            yield "apart"  # another agent, which is told the same
            return
        yield "tools"
    if common == len(path):
        return
    is_about = _is_about(call, near)
    if is_about and _systems(call.history) != _systems(path):
        yield "system"
    elif path[common].role == "assistant" and is_about:
        if not _echo_of(path[common], call.history[common:], 0):
            yield "compacted" if len(call.history) < len(path) else "dropped"
    elif any(quotes(call.history, reply) for one in earlier for reply in one.replies):
        yield "compacted" if len(call.history) < len(path) else "history"
    else:
        yield "history" if is_about and common else "apart"


def _echoes_on_path(call: TrialCall, earlier: Sequence[TrialCall]) -> Iterator[Change]:
    """Name what is spelt otherwise of the answers that a call continues."""
    for one in earlier:
        for its in one.paths() if one.tools == call.tools else ():
            if _begins(call.history, its):
                yield from _changed(its[-1], call.history[len(its) - 1])


def _echoes(call: TrialCall, earlier: Sequence[TrialCall]) -> set[Change]:
    """Name what a program has changed of the answers that it sends back."""
    changes: set[Change] = set()
    for one in earlier:
        for reply in one.replies:
            echo = _echo_of(reply, call.history, len(one.history))
            if echo is not None and one.num_choices == 1:
                changes |= set(_changed(reply, echo))
    return changes


def _echo_of(
    reply: CanonicalMessage, history: Sequence[CanonicalMessage], at: int
) -> CanonicalMessage | None:
    """Find an answer in a history: by the ids of its calls, by its text, by its place."""
    ids = {call.id for call in reply.calls}
    said = [message for message in history if message.role == "assistant"]
    for message in said:
        if ids & {call.id for call in message.calls}:
            return message
    for message in said:
        if reply.text.strip() and _bare(reply.text) in _bare(message.text):
            return message
    there = history[at] if at < len(history) else None
    if there is None or there.role != "assistant":
        return None
    same = [one.name for one in there.calls] == [one.name for one in reply.calls]
    return there if same and reply.calls else None


def _changed(reply: CanonicalMessage, echo: CanonicalMessage) -> Iterator[Change]:
    if reply.text != echo.text:
        yield "space" if _bare(reply.text) == _bare(echo.text) else "text"
    if reply.reasoning is not None and reply.reasoning != echo.reasoning:
        yield "reasoning" if echo.reasoning is None else "reasoning_text"
    if [call.name for call in reply.calls] != [call.name for call in echo.calls]:
        yield "calls"
        return
    for mine, told in zip(reply.calls, echo.calls, strict=True):
        if mine.key != told.key:
            yield "values"
        elif mine.arguments != told.arguments:
            yield "arguments"
        if mine.id != told.id:
            yield "ids"


def _begins(history: Sequence[CanonicalMessage], path: Sequence[CanonicalMessage]) -> bool:
    return len(path) <= len(history) and _common(history, path) == len(path)


def _common(history: Sequence[CanonicalMessage], path: Sequence[CanonicalMessage]) -> int:
    """Return how many messages at the beginning agree."""
    pairs = zip(history, path, strict=False)
    agreeing = (number for number, (one, other) in enumerate(pairs) if not one.agrees(other))
    return next(agreeing, min(len(history), len(path)))


def _is_about(call: TrialCall, other: TrialCall) -> bool:
    """Whether two calls have the same task: what the user says first."""
    mine, others = _asked(call.history), _asked(other.history)
    return mine is not None and others is not None and mine.key == others.key


def _asked(history: Sequence[CanonicalMessage]) -> CanonicalMessage | None:
    return next((message for message in history if message.role == "user"), None)


def _systems(history: Sequence[CanonicalMessage]) -> list[bytes]:
    """Return the system messages before anything else."""
    keys: list[bytes] = []
    for message in history:
        if message.role != "system":
            break
        keys.append(message.key)
    return keys


def _bare(text: str) -> str:
    return "".join(text.split())
