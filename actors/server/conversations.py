"""Conversations that go on behind the exact tokens that the engine generated for them.

The pieces are those of an agent's episodes: a request attaches where its history begins with what a
call was given and said, and only what is new is rendered. What is kept is a cache: a history that
is unknown here, since another server answered it or it was forgotten, is rendered as a whole.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ...envs.agents.messages import CanonicalMessage
from ...envs.agents.replies import call_name
from ...envs.agents.which_calls import digest_of
from ...schemas.infer import ChatRequest
from ..generator.agents.answer import GrowingChoice
from ..generator.agents.call_tree import ModelCall, prefixes
from ..generator.agents.exact_calls import ExactCalls, PreparedCall
from ..generator.agents.template_facts import TemplateFacts, facts_of, told_text
from ..generator.engine.engine import Drawn, Generation
from ..generator.episodes.chat import ChatTokenizer
from .histories import history_of

Rendered: TypeAlias = Literal["", "first", "unknown", "edited", "template", "fields"]
"""Why tokens of earlier answers were not continued, or not all: there are none (`first`), they are
not known here (`unknown`), the history was changed behind some of them (`edited`), the model's
template cannot go on there (`template`), or a message has fields of its own (`fields`)."""

MAX_BYTES = 256 << 20
"""Of what one server keeps."""
IDLE_S = 3600.0
_CALL_BYTES = 2048
"""What a call takes besides its tokens and texts."""


@dataclass(eq=False)
class _Conversation:
    """A tree of answers that have a beginning in common."""

    exact: ExactCalls
    used: float
    num_bytes: int = 0
    keys: list[bytes] = field(default_factory=list[bytes])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class StatefulPrompt:
    """A request whose answer can be continued."""

    prepared: PreparedCall
    rendered: Rendered
    conversation: _Conversation
    request: ChatRequest

    @property
    def num_reused(self) -> int:
        """Tokens of the prompt that come from earlier calls, as they were."""
        parent = self.prepared.attachment.parent
        return 0 if parent is None else parent.num_tokens


class Conversations:
    """What one model has said, as far as it fits; of the event loop."""

    def __init__(
        self, chat: ChatTokenizer, *, max_bytes: int = MAX_BYTES, idle_s: float = IDLE_S
    ) -> None:
        """Keep `max_bytes`, and what nobody has continued for `idle_s` no longer."""
        self._chat = chat
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._facts: TemplateFacts | None = None
        self._known: dict[bytes, _Conversation] = {}
        self._kept: OrderedDict[int, _Conversation] = OrderedDict()
        self.num_bytes = 0
        """Roughly what is kept."""

    def __len__(self) -> int:
        """Conversations that are kept."""
        return len(self._kept)

    async def prepare(self, request: ChatRequest) -> StatefulPrompt | None:
        """Return the prompt of a chat behind what is known of it; None: it is to be rendered.

        Raises ModelError for a chat that the model's template does not take.
        """
        self.forget_idle()
        read = await asyncio.to_thread(self._read, request)
        if read is None:
            return None
        history, ends = read
        known = next((self._known[end] for end in reversed(ends) if end in self._known), None)
        if known is None:
            chat = self._chat.at(time.time())  # one time for all of a conversation
            known = _Conversation(ExactCalls(chat, facts=self._facts), time.monotonic())
        async with known.lock:
            prepared = await asyncio.to_thread(known.exact.prepare, history, request.tools)
        return StatefulPrompt(prepared, _why(prepared, history), known, request)

    async def keep(
        self, prompt: StatefulPrompt, choice: int, drawn: Sequence[Drawn], generation: Generation
    ) -> None:
        """Take an answer, so that it can be continued."""
        name = call_name(prompt.request.request, choice)
        prepared = replace(prompt.prepared, name=name)
        stops = prompt.request.decoding.stop
        growing = GrowingChoice(prepared, self._chat, stops, by_token=False)
        conversation = prompt.conversation
        async with conversation.lock:
            key, num_bytes = await asyncio.to_thread(
                self._commit, prompt, growing, drawn, generation
            )
        self._known[key] = conversation
        conversation.keys.append(key)
        conversation.used = time.monotonic()
        kept = id(conversation) in self._kept
        self.num_bytes += num_bytes if kept else num_bytes + conversation.num_bytes
        conversation.num_bytes += num_bytes
        self._kept[id(conversation)] = conversation
        self._kept.move_to_end(id(conversation))
        while self.num_bytes > self._max_bytes and self._kept:
            self._forget(next(iter(self._kept.values())))

    def forget_idle(self) -> None:
        """Forget what nobody has continued for long."""
        before = time.monotonic() - self._idle_s
        while self._kept and (oldest := next(iter(self._kept.values()))).used < before:
            self._forget(oldest)

    def _forget(self, conversation: _Conversation) -> None:
        del self._kept[id(conversation)]
        self.num_bytes -= conversation.num_bytes
        for key in conversation.keys:
            if self._known.get(key) is conversation:
                del self._known[key]
        conversation.keys.clear()

    def _commit(
        self,
        prompt: StatefulPrompt,
        growing: GrowingChoice,
        drawn: Sequence[Drawn],
        generation: Generation,
    ) -> tuple[bytes, int]:
        """Add an answer to its tree; return where it may be continued, and its size."""
        for one in drawn:
            growing.add(one)
        growing.end(generation, b"", "")
        answered = growing.answered
        assert answered is not None
        generated, text = answered.generated, answered.text
        if text is None:
            text = told_text(
                self._chat, self._chat.decode(generated.token_ids), prompt.request.tools
            )
        call = prompt.conversation.exact.finish(answered.prepared, generated, text)
        return call.prefix, _size_of(call)

    def _read(self, request: ChatRequest) -> tuple[list[CanonicalMessage], list[bytes]] | None:
        """Return a chat's history, and where it may attach."""
        self._facts = self._facts or facts_of(self._chat)
        history = history_of(request.messages)
        if history is None:
            return None
        shaped = ExactCalls(self._chat, facts=self._facts).shaped(history)
        return history, list(prefixes(digest_of(request.tools), shaped))


def _size_of(call: ModelCall) -> int:
    """Return about what a call takes."""
    texts = sum(
        len(part) if isinstance(part, str) else len(part.encoded)
        for message in (*call.given, call.reply)
        for part in (*message.content, *(tool.arguments for tool in message.calls))
    )
    tokens = 4 * len(call.given_ids) + 12 * len(call.generated.token_ids)
    return _CALL_BYTES + tokens + 2 * texts


def _why(prepared: PreparedCall, history: Sequence[CanonicalMessage]) -> Rendered:
    """Return why not all that was said is continued by its tokens."""
    attachment = prepared.attachment
    if attachment.follows is not None:
        return "template"
    if not any(message.role == "assistant" for message in history):
        return "first"
    if attachment.parent is None:
        return "unknown"
    is_edited = any(message.role == "assistant" for message in attachment.given)
    return "edited" if is_edited else ""
