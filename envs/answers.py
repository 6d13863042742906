"""What a host answers about many episodes at once: what is ready, what went wrong, what lasts.

An answer is bounded: what comes after the first megabyte is told as not ready, and asked after by
itself. So one episode's long observation cannot make the message of all others too long.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from ..schemas.codec import pack
from ..schemas.env import Observed, Opened, Stepped
from ..schemas.errors import TinkermqError
from ..schemas.reply import ErrorReply
from .game import ChatMessage, StepResult

MAX_BYTES = 2**20


async def wait_for_some(futures: "Sequence[asyncio.Future[Any]]", seconds: float) -> None:
    """Wait until all are done, but no longer than this."""
    running = [future for future in futures if not future.done()]
    if running:
        await asyncio.wait(running, timeout=seconds)


class ResetAnswer:
    """Collects what became of the starts of episodes."""

    def __init__(self) -> None:
        self.prompts: list[list[ChatMessage]] = []
        """Each different first prompt, once."""
        self.episodes: list[Opened] = []
        self._num_bytes = 0

    def add(self, opening: "asyncio.Future[list[ChatMessage]]") -> None:
        """Add the next episode."""
        self.episodes.append(self._opened(opening))

    def _opened(self, opening: "asyncio.Future[list[ChatMessage]]") -> Opened:
        if not opening.done():
            return Opened()
        if error := opening.exception():
            return Opened(error=_told(error))
        messages = opening.result()
        if messages in self.prompts:
            return Opened(prompt=self.prompts.index(messages))
        self._num_bytes += len(pack(messages))
        if self._num_bytes > MAX_BYTES and self.prompts:
            return Opened()
        self.prompts.append(messages)
        return Opened(prompt=len(self.prompts) - 1)


class StepAnswer:
    """Collects what became of actions."""

    def __init__(self) -> None:
        self.actions: list[Stepped] = []
        self._num_bytes = 0

    def add(self, answer: "asyncio.Future[StepResult] | TinkermqError") -> None:
        """Add the next action: the game's answer, or why it was not asked."""
        self.actions.append(self._stepped(answer))

    def _stepped(self, answer: "asyncio.Future[StepResult] | TinkermqError") -> Stepped:
        if isinstance(answer, TinkermqError):
            return Stepped(error=_told(answer))
        if not answer.done():
            return Stepped()
        if error := answer.exception():
            return Stepped(error=_told(error))
        result = answer.result()
        try:
            info_bytes = len(pack(result.info)) if result.info else 0
        except TinkermqError as error:  # the game's `info` cannot travel
            return Stepped(error=_told(error))
        self._num_bytes += len(result.observation) + info_bytes
        if self._num_bytes > MAX_BYTES and self.actions:
            return Stepped()
        observed = Observed(
            observation=result.observation,
            reward=result.reward,
            done=result.done,
            info=result.info,
        )
        return Stepped(result=observed)


def _told(error: BaseException) -> ErrorReply:
    """Return an error as it travels; what is not ours is the host's own failure, and raised."""
    if not isinstance(error, TinkermqError):
        raise error
    return ErrorReply.of(error.code, error.message, error.hint)
