"""An episode's calls in exact tokens: what a request's prompt is, and what an answer adds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ....envs.agents.messages import CanonicalMessage, canonical_history
from ....envs.agents.replies import THINK, ReplyReader
from ..engine.engine import Generation, IntVector
from ..episodes.chat import ChatTokenizer
from .call_tree import Attachment, CallTree, ModelCall
from .rendering import HistoryRenderer, Tools

_TAIL = 8
"""Tokens at the end of a prompt that may open the reasoning."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A request that is ready for the engine."""

    attachment: Attachment
    prompt_ids: IntVector
    """int32[P]: the path's tokens, then those of what is new."""
    given_ids: IntVector
    """int32[G]: the end of `prompt_ids`, which is new."""
    name: str
    """Of the answer: the ids of its calls begin with it."""
    has_tools: bool
    thinking: bool
    """Whether the prompt has opened the reasoning of the answer."""

    def reader(self) -> ReplyReader:
        """Return what reads the answer while it is generated."""
        return ReplyReader(self.name, calls=self.has_tools, thinking=self.thinking)


class ExactCalls:
    """Turns requests into prompts and answers into calls of a tree."""

    def __init__(self, chat: ChatTokenizer) -> None:
        """Render with the template of `chat`."""
        self.tree = CallTree()
        self._chat = chat
        self._renderer = HistoryRenderer(chat)
        self._num_asked = 0

    def prepare(self, messages: Sequence[CanonicalMessage], tools: Tools = ()) -> PreparedCall:
        """Find what a request continues, and render what is new behind it.

        Raises ModelError for a history that the model's template does not take.
        """
        history = canonical_history(messages)
        context = _digest(tools)
        attachment = self.tree.attach(history, context)
        if parent := attachment.parent:
            said = parent.generated.token_ids
            given = self._renderer.following(parent.reply, said, attachment.given, tools)
            if given is not None:
                prompt = np.concatenate([parent.path_ids, given])
                return self._prepared(attachment, prompt, given, tools)
            attachment = self.tree.detached(history, context)
        prompt = self._renderer.whole(history, tools)
        return self._prepared(attachment, prompt, prompt, tools)

    def finish(self, prepared: PreparedCall, generated: Generation) -> ModelCall:
        """Add the answer to the tree."""
        reader = prepared.reader()
        reader.push(self._chat.decode(generated.token_ids))
        reader.finish()
        return self.tree.commit(prepared.attachment, prepared.given_ids, generated, reader.reply)

    def _prepared(
        self, attachment: Attachment, prompt: IntVector, given: IntVector, tools: Tools
    ) -> PreparedCall:
        name = f"c{self._num_asked:05}"  # with a call's three digits as long as Mistral's ids
        self._num_asked += 1
        tail = "".join(map(self._chat.token_text, given[-_TAIL:]))
        thinking = tail.rstrip().endswith(THINK)
        return PreparedCall(attachment, prompt, given, name, bool(tools), thinking)


def _digest(tools: Tools) -> bytes:
    """Return what tells sets of tools apart: the same tools in another order are others."""
    told = json.dumps([dict(tool) for tool in tools], sort_keys=True)
    return blake2b(told.encode(), digest_size=16).digest()
