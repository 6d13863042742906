"""Log-probs of prompts, as a server tells them: in pieces that fit a message."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from ...schemas.infer import PromptScore
from ..generator.engine.engine import PromptScores

_PIECE_VALUES = 1 << 17
"""Log-probs and ids of one message: one megabyte at most."""

Score = Callable[[int, Sequence[int]], Awaitable[PromptScores]]
TellScores = Callable[[list[PromptScore]], Awaitable[None]]


async def score_prompts(prompts: Sequence[Sequence[int]], score: Score, tell: TellScores) -> None:
    """Score prompts at once, by number and tokens, and tell each as soon as it is there."""

    async def one(number: int, ids: Sequence[int]) -> None:
        for piece in pieces(number, await score(number, ids)):
            await tell([piece])

    async with asyncio.TaskGroup() as group:
        for number, ids in enumerate(prompts):
            group.create_task(one(number, ids), name=f"score {number}")


def pieces(prompt: int, scores: PromptScores) -> list[PromptScore]:
    """Cut the scores of a prompt into messages."""
    rows = max(1, _PIECE_VALUES // (1 + 2 * scores.top_ids.shape[1]))
    return [
        PromptScore(
            prompt=prompt,
            start=start,
            logprobs=scores.logprobs[start : start + rows],
            top_ids=np.ascontiguousarray(scores.top_ids[start : start + rows]),
            top_logprobs=np.ascontiguousarray(scores.top_logprobs[start : start + rows]),
        )
        for start in range(0, len(scores.logprobs), rows)
    ]
