"""An episode's calls in exact tokens: what a request's prompt is, and what an answer adds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...envs.agents.call_selection import digest_of
from ...envs.model_apis.canonical import (
    CanonicalMessage,
    ReplyReader,
    canonical_history,
    pictures_of,
)
from ...schemas.wire.array import IntVector
from ..engine.engine import Generation
from ..policy.chat import ChatTokenizer
from ..policy.grammar import TokenGrammar
from ..policy.template_facts import HistoryRenderer, TemplateFacts, Tools, facts_of
from .call_tree import Attachment, CallTree, ModelCall, digest_behind

_NAME = re.compile(r"c([0-9]{5,9})")


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A request that is ready for the engine."""

    attachment: Attachment
    given_ids: IntVector
    """int32[G]: the end of the prompt, which is new."""
    name: str
    """Of the answer: the ids of its calls begin with it."""
    has_tools: bool
    thinking: bool
    """Whether the prompt has opened the reasoning of the answer."""
    prefill: str = ""
    """What the program wrote of the answer itself."""
    grammar: TokenGrammar | None = None
    """What the answer's tokens must be; None: anything."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        parent = self.attachment.parent
        return len(self.given_ids) + (0 if parent is None else parent.num_tokens)

    @property
    def prompt_ids(self) -> IntVector:
        """int32[P]: the path's tokens, then those of what is new; put together at each call."""
        return self.ids_with(())

    def ids_with(self, begun: Sequence[int]) -> IntVector:
        """Return int32: the prompt, and the tokens of an answer that were drawn before."""
        parent = self.attachment.parent
        new = [self.given_ids, *([np.array(begun, np.int32)] if begun else [])]
        return np.concatenate(new) if parent is None else parent.path_ids_with(new)

    def digest(self, *limits: object) -> bytes:
        """Return 16 bytes that identify a request by the prompt's ids and its limits."""
        digesting = digest_behind(self.attachment.parent, self.given_ids)
        digesting.update(repr(limits).encode())
        return digesting.digest()

    @property
    def images(self) -> tuple[bytes, ...]:
        """The encoded images of the prompt, in order."""
        parent = self.attachment.parent
        before = [] if parent is None else parent.path_messages
        return tuple(picture.encoded for picture in pictures_of((*before, *self.attachment.given)))

    def reader(self) -> ReplyReader:
        """Return what reads the answer while it is generated."""
        return ReplyReader(self.name, calls=self.has_tools, thinking=self.thinking)


class ExactCalls:
    """Turns requests into prompts and answers into calls of a tree."""

    def __init__(
        self,
        chat: ChatTokenizer,
        *,
        keeps_reasoning: bool = True,
        facts: TemplateFacts | None = None,
    ) -> None:
        """Render with the template of `chat`, of which `facts` are known.

        Without `keeps_reasoning`, a history that the template writes anew when a user speaks is a
        root of its own.
        """
        self.tree = CallTree()
        self._keeps_reasoning = keeps_reasoning
        self._facts = facts or facts_of(chat)
        self._chat = chat
        self._renderer = HistoryRenderer(chat)
        self._num_requests = 0

    def prepare(
        self,
        messages: Sequence[CanonicalMessage],
        tools: Tools = (),
        *,
        previous: ModelCall | None = None,
        is_prefill: bool = False,
    ) -> PreparedCall:
        """Find the call that a request continues, and render what is new behind it.

        The messages follow `previous`, or are the whole history; with `is_prefill` the last one is
        the beginning of the answer. Raises ModelError for a history that the model's template does
        not take.
        """
        before = previous.path_messages if previous is not None else []
        history = [*before, *self.shaped(messages)]
        prefill = history.pop().text if is_prefill else ""
        context = digest_of(tools)
        attachment = self.tree.attach(history, context)
        given = self._given(attachment, tools)
        if given is None and attachment.parent is not None:
            attachment = self.tree.detached(history, context, attachment.parent)
        if given is None:
            given = self._renderer.whole(history, tools)
        thinking = self._chat.opens_thinking(given, prefill)
        if prefill:
            given = np.concatenate([given, np.array(self._chat.encode_reply(prefill), np.int32)])
        name = self._next_name()
        return PreparedCall(attachment, given, name, bool(tools), thinking, prefill)

    def shaped(self, messages: Sequence[CanonicalMessage]) -> list[CanonicalMessage]:
        """Return messages as they are compared and shown: canonical, and as the template can."""
        return self._facts.shaped(canonical_history(messages))

    def _given(self, attachment: Attachment, tools: Tools) -> IntVector | None:
        """Return int32[G]: what stands for the new messages behind the parent; None: nothing."""
        parent = attachment.parent
        if parent is None:
            return None
        new = attachment.given
        if any(pictures_of(new)) and self._drew_images(parent):
            return None
        if not self._keeps_reasoning and any(message.role == "user" for message in new):
            before = parent.path_messages[:-1]
            if not self._renderer.appends(before, parent.reply, new, tools):
                return None
        generated_ids = parent.generated.token_ids
        return self._renderer.following(parent.reply, generated_ids, new, tools)

    def _drew_images(self, call: ModelCall) -> bool:
        """Whether the policy has said an image's token: no image may stand behind that."""
        return any(self._chat.has_image_token(earlier.generated.token_ids) for earlier in call.path)

    def another(self, prepared: PreparedCall) -> PreparedCall:
        """Return the same request once more, for another answer to it."""
        return replace(prepared, name=self._next_name())

    def under_name(self, prepared: PreparedCall, name: str) -> PreparedCall:
        """Return a request under the name that its answer has had before; no later one gets it."""
        if matched := _NAME.fullmatch(name):  # a host may send anything
            self._num_requests = max(self._num_requests, int(matched[1]) + 1)
        return replace(prepared, name=name)

    def restore(self, prepared: PreparedCall, generated: Generation, text: str | None) -> None:
        """Add a call that was written down, in the order in which calls ended."""
        self.finish(self.under_name(prepared, prepared.name), generated, text)

    def finish(
        self, prepared: PreparedCall, generated: Generation, text: str | None = None
    ) -> ModelCall:
        """Add the answer to the tree; `text` is the sent text if it is not that of the tokens."""
        reader = prepared.reader()
        written = self._chat.decode(generated.token_ids) if text is None else text
        reader.push(prepared.prefill + written)
        reader.finish()
        given = prepared.given_ids
        return self.tree.commit(
            prepared.attachment, given, generated, reader.reply, name=prepared.name
        )

    def _next_name(self) -> str:
        name = f"c{self._num_requests:05}"  # with a call's three digits as long as Mistral's ids
        self._num_requests += 1
        return name
