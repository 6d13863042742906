"""Recorded conversations, and renderings of them whose earlier reasoning a template leaves out.

Templates of models that reason show the reasoning of an answer only until a user speaks again, or
write an empty block in its place. An episode keeps what was generated. Pure.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...envs.reasoning import opened_by
from ...schemas.call_formats import MARKS
from ...schemas.chat_messages import REASONING_KEYS
from ...schemas.wire.array import IntVector
from ...schemas.wire.errors import DataError, ModelError

_SHOWN = 60
_TAIL = 24
_KEY = REASONING_KEYS[0]
_QUESTION = {"role": "user", "content": "stand-in"}
_WHY = "stand-in reason"
_CALL = {"name": "stand_in", "arguments": {"stand": "in"}}
_CALLED = {
    "role": "assistant",
    "content": "reply",
    "tool_calls": [{"type": "function", "id": "c00000000", "function": _CALL}],
}

_REASONING = "|".join(
    f"(?:{opens}(?:(?!{opens}).)*?)?{closes}|{opens}"
    for opens, closes in ((re.escape(mark), re.escape(end)) for mark, end in MARKS.items())
)
_UNSEEN = re.compile(rf"{_REASONING}|\s+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole conversation as tokens, T in all, with K turns of the assistant."""

    token_ids: IntVector
    """int32[T]."""
    mask: IntVector
    """int32[T]: 1 for tokens of the assistant, the end of its turn included."""
    turn_ends: IntVector
    """int32[K]: position of the last token of each assistant turn."""


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A turn of the assistant in the template's rendering."""

    place: int
    """Index of its message."""
    prompt: str
    """The rendering before it."""
    whole: str
    """The rendering up to its end."""
    following: str | None
    """A rendering that continues after it; None: it is the last message."""


def without_reasoning(rendered: str) -> str:
    """Return a rendering without reasoning, its marks and white space, for comparisons."""
    return _UNSEEN.sub("", rendered)


def behind_history(known: str, rendered: str) -> str | None:
    """Return what a rendering has after the conversation `known`; None: it has another one.

    Reasoning and white space of `known` may be missing.
    """
    if rendered.startswith(known):
        return rendered[len(known) :]
    seen = without_reasoning(known)
    left, end = len(seen), 0
    for gap in _UNSEEN.finditer(rendered):
        if gap.start() - end >= left:
            break
        left -= gap.start() - end
        end = gap.end()
    end += left
    return rendered[end:] if without_reasoning(rendered[:end]) == seen else None


def as_generated(prompt: str, message: Mapping[str, Any], place: int) -> str:
    """Return the text of a turn, without its end, as a policy generates it after a prompt.

    For templates that hide the reasoning that their prompt opens. Raises DataError for an answer
    that cannot follow the prompt; `place` is the index of its message.
    """
    text, mark = str(message.get("content") or "").lstrip(), opened_by(prompt).strip()
    if mark and (reasoning := message.get(_KEY)):
        text = f"{mark}{reasoning}\n{MARKS[mark]}\n\n{text}"
    if not (mark and text.startswith(mark)) or message.get("tool_calls"):
        raise DataError(
            f"message {place} of a conversation is the assistant's, and cannot follow the prompt "
            f"that the chat template writes for it, which ends in {prompt[-_TAIL:]!r}",
            hint="its reasoning must be as the prompt has it: set model.template_kwargs "
            "({enable_thinking: false} for answers without reasoning, where the template has it), "
            "or begin each answer with its reasoning",
        )
    return text.removeprefix(mark).lstrip("\n")


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Where a template reads the reasoning of an answer, determined by rendering some."""

    key: str = _KEY
    """The key of messages; gpt-oss reads `thinking`."""
    joins: bool = False
    """Whether it refuses a text beside reasoning and calls: gpt-oss shows either as reasoning."""

    def fit(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message in this form."""
        reasoning = message.get(_KEY)
        if self.key == _KEY or not reasoning:
            return message
        fields = {name: value for name, value in message.items() if name != _KEY}
        content = message.get("content")
        if self.joins and content and message.get("tool_calls"):
            return {**fields, "content": "", self.key: f"{reasoning}\n\n{content}"}
        return {**fields, self.key: reasoning}


def find_reasoning_form(render: Callable[[list[dict[str, Any]]], str]) -> ReasoningForm:
    """Find the form of a template; `render` raises ModelError if it refuses messages."""

    def shown(message: Mapping[str, Any], **fields: str) -> str | None:
        try:
            return render([_QUESTION, {**message, **fields}])
        except ModelError:
            return None

    answer = {"role": "assistant", "content": "reply"}
    for key in REASONING_KEYS:
        if _WHY in (shown(answer, **{key: _WHY}) or ""):
            joins = shown(_CALLED, **{key: _WHY}) is None and shown(_CALLED) is not None
            return ReasoningForm(key, joins)
    return ReasoningForm()


def num_shared(left: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common start of two texts, or of two lists of tokens."""
    pairs = enumerate(zip(left, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(other)))


def rewrites(what: str, expected: str, rendered: str) -> ModelError:
    """Return the error for a template that renders a history otherwise than an episode has it."""
    same = num_shared(expected, rendered)
    start = max(0, same - 20)
    return ModelError(
        f"the chat template rewrites the history: with {what} it was\n"
        f"    …{expected[start : same + _SHOWN]!r}\n  and becomes\n"
        f"    …{rendered[start : same + _SHOWN]!r}",
        hint="a policy must see the history that it was trained on: use a template that changes "
        "nothing but reasoning in earlier turns, set model.template_kwargs so that it does, or set "
        "rollout.max_turns to 1",
    )


def hides_reply() -> ModelError:
    """Return the error for a template that does not show what an assistant said."""
    return ModelError(
        "the chat template does not show an assistant's reply as it is",
        hint="use a template that takes contents that are texts, and shows them",
    )
