"""An episode's calls in exact tokens: the prompt of a request, and the call with its answer."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ...envs.agents.call_selection import digest_of
from ...schemas.model_apis.canonical import ModelMessage, canonical_history, pictures_of
from ...schemas.tool_calls import THINK
from ...schemas.wire.array import IntVector
from ..engine.engine import Generation
from ..policy.chat import ChatTokenizer
from .call_tree import CallPrompt, CallTree, ModelCall
from .template_facts import HistoryRenderer, Tools

_NAME = re.compile(r"c([0-9]{5,9})")


class ExactCalls:
    """Makes prompts from requests, and calls of a tree from answers."""

    def __init__(self, chat: ChatTokenizer, *, keeps_reasoning: bool = True) -> None:
        """Render with the template of `chat`.

        Without `keeps_reasoning`, a history becomes a new root if the template renders it
        differently after a user's message.
        """
        self.tree = CallTree()
        self._keeps_reasoning = keeps_reasoning
        self._chat = chat
        self._renderer = HistoryRenderer(chat)
        self._num_requests = 0

    def prepare(
        self,
        messages: Sequence[ModelMessage],
        tools: Tools = (),
        *,
        previous: ModelCall | None = None,
        is_prefill: bool = False,
    ) -> CallPrompt:
        """Find the call that a request continues, and render its new messages.

        The messages follow `previous`, or are the whole history; with `is_prefill` the last one is
        the beginning of the answer. Raises ModelError if the template does not accept the history.
        """
        before = previous.path_messages if previous is not None else []
        history = [*before, *canonical_history(messages)]
        prefill = history.pop().text if is_prefill else ""
        context = digest_of(tools)
        prompt = self.tree.attach(history, context)
        new_ids = self._ids_behind_parent(prompt, tools)
        if new_ids is None and prompt.parent is not None:
            prompt = self.tree.detached(history, context, prompt.parent)
        if new_ids is None:
            new_ids = self._renderer.whole(history, tools)
        thinking = self._chat.opens_thinking(new_ids, prefill)
        if prefill:
            prefill_ids = np.array(self._chat.encode_reply(prefill), np.int32)
            new_ids = np.concatenate([new_ids, prefill_ids])
        return replace(
            prompt,
            given_ids=new_ids,
            name=self._next_name(),
            has_tools=bool(tools),
            opened=THINK if thinking else "",
            prefill=prefill,
        )

    def _ids_behind_parent(self, prompt: CallPrompt, tools: Tools) -> IntVector | None:
        """Return int32[G]: tokens of the new messages; None if the parent cannot be continued."""
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
        """Whether the policy generated an image token, after which no image can be shown."""
        return any(self._chat.has_image_token(earlier.generated.token_ids) for earlier in call.path)

    def another(self, prompt: CallPrompt) -> CallPrompt:
        """Return the same request with a new name, for another answer."""
        return replace(prompt, name=self._next_name())

    def under_name(self, prompt: CallPrompt, name: str) -> CallPrompt:
        """Return a request under the name of an earlier answer, and reserve that name."""
        if matched := _NAME.fullmatch(name):  # names from a host are untrusted
            self._num_requests = max(self._num_requests, int(matched[1]) + 1)
        return replace(prompt, name=name)

    def answered(
        self,
        prompt: CallPrompt,
        generated: Generation,
        text: str | None = None,
        *,
        request_digest: bytes = b"",
        request_id: str = "",
        ended: float = 0.0,
    ) -> ModelCall:
        """Return the answered call, outside of the tree; `text` if it differs from the tokens'."""
        reader = prompt.reader()
        written = self._chat.decode(generated.token_ids) if text is None else text
        reader.push(prompt.prefill + written)
        reader.finish()
        own = {part.name: getattr(prompt, part.name) for part in fields(CallPrompt)}
        return ModelCall(
            **(own | {"grammar": None}),  # which is large
            generated=generated,
            text=text,
            request_digest=request_digest,
            request_id=request_id,
            reply=reader.reply,
            ended=ended,
        )

    def finish(
        self, prompt: CallPrompt, generated: Generation, text: str | None = None, **request: Any
    ) -> ModelCall:
        """Add the answer to a request to the tree; see `answered`."""
        call = self.answered(prompt, generated, text, **request)
        self.tree.add(call)
        return call

    def _next_name(self) -> str:
        name = f"c{self._num_requests:05}"  # with a call's three digits as long as Mistral's ids
        self._num_requests += 1
        return name
