"""An engine that says what a script tells it, and writes down what it had and drew."""

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
from tinkermq.actors.engine.engine import (
    Drawn,
    EngineStats,
    FinishReason,
    Generation,
    OnToken,
    PromptScores,
    Sampling,
)
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.schemas.wire.array import IntVector
from tinkermq.schemas.wire.errors import EngineError

from tests.actors.rollout.calls.programs import spelled
from tests.agents.scripts import Script

VERSION = 3


class ScriptedEngine:
    """Draws the answers of a script; other tokens than those in which the tokenizer spells them."""

    def __init__(self, chat: ChatTokenizer, script: Script) -> None:
        self.had: list[tuple[IntVector, Generation]] = []
        """Each prompt, with what was drawn behind it."""
        self.failure: EngineError | None = None
        self.version = VERSION
        self._chat = chat
        self._script = script
        self._random = Random(0)
        self._cancelled: set[str] = set()

    async def generate(
        self,
        prompt_ids: Sequence[int] | IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        conversation: str | None = None,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Draw the next answer of the script."""
        prompt = np.array(prompt_ids, np.int32)
        ids = [*spelled(self._chat, self._text(prompt), self._random), self._chat.stop_token_ids[0]]
        drawn: list[Drawn] = []
        reason: FinishReason = "stop" if len(ids) <= sampling.max_new_tokens else "length"
        for token in ids[: sampling.max_new_tokens]:
            await asyncio.sleep(0)
            if request_id in self._cancelled:
                reason = "cancelled"
                break
            drawn.append(Drawn(token, -self._random.random(), VERSION))
            if on_token is not None:
                on_token(drawn[-1])
        generation = Generation(
            np.array([one.token_id for one in drawn], np.int32),
            np.array([one.logprob for one in drawn], np.float32),
            np.full(len(drawn), VERSION, np.int32),
            reason,
        )
        self.had.append((prompt, generation))
        return generation

    async def score(
        self, prompt_ids: Sequence[int] | IntVector, *, request_id: str, top_k: int = 0
    ) -> PromptScores:
        """Refuse: a script knows no log-probs."""
        raise EngineError("a script scores no prompts")

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Stay as it is: a script takes no memory of a GPU."""

    @property
    def has_weights(self) -> bool:
        """Whether it can wake: it always is."""
        return True

    async def wake(self) -> None:
        """Stay as it is."""

    def cancel(self, request_id: str) -> None:
        """End a request."""
        self._cancelled.add(request_id)

    def release(self, conversation: str) -> None:
        """Keep nothing."""

    async def load_weights(
        self, version: int, tensors: Mapping[str, Any], kv: str = "keep"
    ) -> None:
        """Refuse: a script has no weights."""
        raise EngineError("a script has no weights")

    def stats(self) -> EngineStats:
        """Say that nothing is known."""
        raise EngineError("a script counts nothing")

    async def close(self) -> None:
        """End."""

    def _text(self, prompt: IntVector) -> str:
        script = self._script
        if script.in_order:
            return script.at(len(self.had))
        said = self._chat.decode(prompt)
        return script.next(said, [turn.needs for turn in script.turns if _offers(said, turn.needs)])


def _offers(prompt: str, tool: str) -> bool:
    """Whether a prompt describes a tool, as the template of Qwen's models does."""
    return f'{{"type": "function", "function": {{"name": "{tool}"' in prompt
