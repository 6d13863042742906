"""What a teacher reads and the policy does not: a text that the game tells, in the first prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from ....schemas.config.algorithms.algorithm import AlgorithmConfig
from ....schemas.wire.errors import DataError
from ..engine.engine import IntVector
from ..episodes.chat import ChatMessage, ChatTokenizer


class TeacherContext:
    """Makes the first prompts of teachers."""

    def __init__(self, key: str, max_tokens: int, chat: ChatTokenizer) -> None:
        """`key` names the text in a game's `info`; `max_tokens` bounds what it adds."""
        self._key = key
        self._max_tokens = max_tokens
        self._chat = chat

    @classmethod
    def of(cls, config: AlgorithmConfig, chat: ChatTokenizer) -> "TeacherContext | None":
        """Return what the configuration asks for; None: teachers read what the policy reads."""
        if config.teacher_context is None:
            return None
        return cls(config.teacher_context, config.teacher_context_tokens, chat)

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        num_prompt: int,
        info: Mapping[str, Any],
        seconds: float | None = None,
    ) -> IntVector:
        """Return int32[P]: the first prompt with the text that the game has told at the end.

        `num_prompt` is the length of the policy's, `seconds` its time. Raises DataError where the
        game has told none, or one that is too long.
        """
        text = info.get(self._key)
        if not isinstance(text, str) or not text:
            raise DataError(
                f"algorithm.teacher_context={self._key}: the game told {text!r:.40} under this "
                "name in `info` at the episode's end",
                hint=f"it must be a text; there are {', '.join(sorted(map(str, info)))[:200]}",
            )
        chat = self._chat if seconds is None else self._chat.at(seconds)
        prompt = chat.first_prompt(with_text(messages, text), tools)
        more = len(prompt) - num_prompt
        if more > self._max_tokens:
            raise DataError(
                f"what the teacher reads is {more} tokens longer than the prompt, "
                f"algorithm.teacher_context_tokens is {self._max_tokens}",
                hint=f"raise it to {more}, with learner.row_tokens, or let the game tell less",
            )
        return prompt


def with_text(messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """Return messages with a text at the end of the last one, as part of the user's words."""
    last = messages[-1]
    if last.get("role") != "user":
        return [*messages, {"role": "user", "content": text}]
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": f"{content}\n\n{text}"}]
    parts = [*(content or ()), {"type": "text", "text": f"\n\n{text}"}]
    return [*messages[:-1], {**last, "content": parts}]
