"""An episode's calls in exact tokens: a request's prompt, and the call that its answer makes."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from ...envs.agents.call_selection import digest_of
from ...schemas.model_apis.canonical import THINK, CanonicalMessage, pictures_of
from ...schemas.wire.array import IntVector
from ..engine.engine import Generation
from ..policy.chat import ChatTokenizer
from .call_tree import CallPrompt, CallTree, ModelCall
from .template_facts import HistoryRenderer, Tools, facts_of

_NAME = re.compile(r"c([0-9]{5,9})")


class ExactCalls:
    """Turns requests into prompts and answers into calls of a tree."""

    def __init__(self, chat: ChatTokenizer, *, keeps_reasoning: bool = True) -> None:
        """Render with the template of `chat`.

        Without `keeps_reasoning`, a history that the template writes anew when a user speaks is a
        root of its own.
        """
        self.tree = CallTree()
        self._keeps_reasoning = keeps_reasoning
        self._facts = facts_of(chat)
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
    ) -> CallPrompt:
        """Find the call that a request continues, and render what is new behind it.

        The messages follow `previous`, or are the whole history; with `is_prefill` the last one is
        the beginning of the answer. Raises ModelError for a history that the model's template does
        not take.
        """
        before = previous.path_messages if previous is not None else []
        history = [*before, *self._facts.shaped(messages)]
        prefill = history.pop().text if is_prefill else ""
        context = digest_of(tools)
        prompt = self.tree.attach(history, context)
        given = self._given(prompt, tools)
        if given is None and prompt.parent is not None:
            prompt = self.tree.detached(history, context, prompt.parent)
        if given is None:
            given = self._renderer.whole(history, tools)
        thinking = self._chat.opens_thinking(given, prefill)
        if prefill:
            given = np.concatenate([given, np.array(self._chat.encode_reply(prefill), np.int32)])
        return replace(
            prompt,
            given_ids=given,
            name=self._next_name(),
            has_tools=bool(tools),
            opened=THINK if thinking else "",
            prefill=prefill,
        )

    def _given(self, prompt: CallPrompt, tools: Tools) -> IntVector | None:
        """Return int32[G]: what stands for the new messages behind the parent; None: nothing."""
        parent = prompt.parent
        if parent is None:
            return None
        new = prompt.given
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

    def another(self, prompt: CallPrompt) -> CallPrompt:
        """Return the same request once more, for another answer to it."""
        return replace(prompt, name=self._next_name())

    def under_name(self, prompt: CallPrompt, name: str) -> CallPrompt:
        """Return a request under the name that its answer has had before; no later one gets it."""
        if matched := _NAME.fullmatch(name):  # a host may send anything
            self._num_requests = max(self._num_requests, int(matched[1]) + 1)
        return replace(prompt, name=name)

    def answered(
        self,
        prompt: CallPrompt,
        generated: Generation,
        text: str | None = None,
        *,
        request: bytes = b"",
        asked: str = "",
    ) -> ModelCall:
        """Return the answered call, not yet in the tree; `text` if it is not that of the tokens."""
        reader = prompt.reader()
        written = self._chat.decode(generated.token_ids) if text is None else text
        reader.push(prompt.prefill + written)
        reader.finish()
        own = {name.name: getattr(prompt, name.name) for name in fields(CallPrompt)}
        return ModelCall(
            **own,
            generated=generated,
            text=text,
            request=request,
            asked=asked,
            reply=reader.reply,
        )

    def finish(
        self, prompt: CallPrompt, generated: Generation, text: str | None = None
    ) -> ModelCall:
        """Add the answer to a request to the tree; see `answered`."""
        call = self.answered(prompt, generated, text)
        self.tree.add(call)
        return call

    def _next_name(self) -> str:
        name = f"c{self._num_requests:05}"  # with a call's three digits as long as Mistral's ids
        self._num_requests += 1
        return name
