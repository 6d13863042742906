"""New messages behind exact tokens, as a chat template writes them.

What the policy said is never rendered again. To learn what a template writes between the end of
a turn and the next one, a short conversation with the *shape* of the turn is rendered instead: the
same calls, with their names and ids, and a mark where the last of it would stand. What follows
the mark is what follows the turn. Templates look back at names and ids, so a plain text in place
of the turn would not do; and they rewrite what came long before, so what stands before the mark
is not looked at.

Whether that is the true continuation is proved for each template at start-up, by rendering it
behind other histories. What a template cannot do is told, and costs rows, not exactness: there the
whole history is rendered as a root of its own.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ....envs.agents.messages import CanonicalCall, CanonicalMessage, pictures_of
from ....schemas.wire.errors import ModelError
from ..engine.engine import IntVector
from ..episodes.chat import ChatTokenizer

Tools: TypeAlias = Sequence[Mapping[str, Any]]

_USER = CanonicalMessage("user", ("stand-in",))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rendering, cut behind a turn: the text before it, and the tokens from its end on."""

    before: str
    after: list[int]


class HistoryRenderer:
    """Renders the histories of a program's calls with a model's template."""

    def __init__(self, chat: ChatTokenizer) -> None:
        """Render with the template of `chat`."""
        self._chat = chat

    def whole(self, messages: Sequence[CanonicalMessage], tools: Tools) -> IntVector:
        """Return int32[T]: a history from its beginning, and the generation prompt.

        Raises ModelError for roles, tools or images that the model or its template does not take.
        """
        told = [message.for_template() for message in messages]
        return np.array(self._chat.prompt(told, tools), np.int32)

    def following(
        self,
        reply: CanonicalMessage,
        generated_ids: Sequence[int] | IntVector,
        new: Sequence[CanonicalMessage],
        tools: Tools,
    ) -> IntVector | None:
        """Return int32[G]: what follows a turn up to the next one; None: this cannot be said.

        G begins with the end of the turn, unless the policy said that itself.
        """
        cut = self._cut((_USER,), reply, new, tools)
        if cut is None:
            return None
        num_said = self._chat.num_said(generated_ids[-1:], cut.after)
        return np.array(cut.after[num_said:], np.int32)

    def continues(
        self,
        history: Sequence[CanonicalMessage],
        reply: CanonicalMessage,
        new: Sequence[CanonicalMessage],
        tools: Tools,
    ) -> bool:
        """Whether the template writes behind this history what it writes behind a stand-in."""
        stand_in = self._cut((_USER,), reply, new, tools)
        true = self._cut(history, reply, new, tools)
        return stand_in is not None and true is not None and stand_in.after == true.after

    def appends(
        self,
        history: Sequence[CanonicalMessage],
        reply: CanonicalMessage,
        new: Sequence[CanonicalMessage],
        tools: Tools,
    ) -> bool:
        """Whether the template leaves the history as it was before `new` came."""
        now = self._cut(history, reply, (), tools, prompt=False)
        later = self._cut(history, reply, new, tools)
        return now is not None and later is not None and now.before == later.before

    def _cut(
        self,
        history: Sequence[CanonicalMessage],
        reply: CanonicalMessage,
        new: Sequence[CanonicalMessage],
        tools: Tools,
        *,
        prompt: bool = True,
    ) -> _Cut | None:
        """Find the end of the turn: the first token behind it that ends one, or else the first
        that depends on what follows. None where that is no special token."""
        mark = _new_mark()
        turn = _marked(reply, mark)
        try:
            alone = self._render([*history, turn], tools, prompt=False)
            whole = self._render([*history, turn, *new], tools, prompt=prompt)
            before, _, behind = whole.rpartition(mark)
            ids = self._chat.encode_seen(behind, [one.encoded for one in pictures_of(new)])
        except ModelError:
            return None
        if not 0 < alone.count(mark) == whole.count(mark):
            return None
        pairs = zip(self._chat.encode_seen(alone.rpartition(mark)[2]), ids, strict=False)
        at = 0
        for lone, token in pairs:
            if lone != token or token in self._chat.stop_token_ids:
                break
            at += 1
        is_end = ids[at:] and self._chat.is_special(ids[at])
        return _Cut(before.replace(mark, ""), ids[at:]) if is_end else None

    def _render(self, messages: Sequence[CanonicalMessage], tools: Tools, *, prompt: bool) -> str:
        told = [message.for_template() for message in messages]
        return self._chat.render(told, prompt=prompt, tools=tools)


def _new_mark() -> str:
    """Return a text that no program can have guessed."""
    return f"mark{secrets.token_hex(16)}"


def _marked(reply: CanonicalMessage, mark: str) -> CanonicalMessage:
    """Return a turn of the same shape whose last word is the mark."""
    if not reply.calls:
        return CanonicalMessage("assistant", (mark,))
    *calls, last = (CanonicalCall(call.name, "{}", call.id) for call in reply.calls)
    marked = CanonicalCall(last.name, f'{{"mark": "{mark}"}}', last.id)
    return CanonicalMessage("assistant", (), (*calls, marked))
