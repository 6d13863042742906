"""A host's answers about many episodes: ready results, errors, and unfinished ones.

An answer is bounded: results after the first megabyte are marked as not ready and requested one by
one, so that one long observation does not make the message of all others too long. A result that
exceeds a message is an error of its episode, except that `info` is cut and marked.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import structlog

from ..schemas.env import FailedStep, Opened, StepReply
from ..schemas.wire.codec import MAX_MESSAGE_BYTES, cut_info, pack, packed_bytes
from ..schemas.wire.errors import GameError, InternalError, TinkermqError
from ..schemas.wire.foreign import words_of
from ..schemas.wire.message import ErrorReply
from .game import ChatMessage, StepResult
from .running.episodes import TimedOut

MAX_BYTES = 2**20
MAX_ITEM_BYTES = MAX_MESSAGE_BYTES // 2
"""Bytes of one episode in one answer."""
_CONTAINER_BYTES = 8
"""Bytes counted for a list or map, since a message may have a limited number of them."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


async def wait_for_some(futures: "Sequence[asyncio.Future[Any]]", seconds: float) -> None:
    """Wait until all futures are done, for a limited time."""
    running = [future for future in futures if not future.done()]
    if running:
        await asyncio.wait(running, timeout=seconds)


class ResetAnswer:
    """Collects the results of episode starts."""

    def __init__(self, most: int = MAX_ITEM_BYTES) -> None:
        """At most `most` bytes of one episode are sent."""
        self._most = most
        self.prompts: list[list[ChatMessage]] = []
        """Each different first prompt, once."""
        self.episodes: list[Opened] = []
        self._num_bytes = 0

    def add(self, opening: "asyncio.Future[list[ChatMessage]]") -> bool:
        """Add the next episode; return False if it cannot be played."""
        self.episodes.append(self._opened(opening))
        return self.episodes[-1].error is None

    def _opened(self, opening: "asyncio.Future[list[ChatMessage]]") -> Opened:
        if not opening.done():
            return Opened()
        if error := _error_of(opening):
            return Opened(error=_told(error))
        messages = opening.result()
        if messages in self.prompts:
            return Opened(prompt=self.prompts.index(messages))
        try:
            num_bytes = len(pack(messages))
        except TinkermqError as error:
            return Opened(error=_told(error))
        if num_bytes > self._most:
            return Opened(error=_told(_too_large("the first prompt", num_bytes, self._most)))
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_BYTES and self.prompts:
            return Opened()
        self.prompts.append(messages)
        return Opened(prompt=len(self.prompts) - 1)


class StepAnswer:
    """Collects the results of actions."""

    def __init__(self, most: int = MAX_ITEM_BYTES) -> None:
        """At most `most` bytes of one action's answer are sent."""
        self._most = most
        self._results: list[StepResult | None] = []
        self._failed: list[FailedStep] = []
        self._num_bytes = 0

    def add(self, answer: "asyncio.Future[StepResult] | TinkermqError") -> None:
        """Add the next action: the game's answer, or the error that refused it."""
        self._results.append(self._result(answer))

    def reply(self) -> StepReply:
        """Return the message."""
        none = StepResult("", 0.0, done=False)
        results = [result or none for result in self._results]
        texts = [result.tool_results for result in results]
        roles: list[Literal["user", "tool"]] = [result.role for result in results]
        return StepReply(
            observations=[
                None if result is None else "" if result.tool_results else result.observation
                for result in self._results
            ],
            rewards=[result.reward for result in results],
            done=[result.done for result in results],
            infos=[result.info for result in results],
            roles=roles if "tool" in roles else [],
            tool_results=texts if any(texts) else [],
            failed=self._failed,
            timed_out=[n for n, result in enumerate(results) if isinstance(result, TimedOut)],
        )

    def _result(self, answer: "asyncio.Future[StepResult] | TinkermqError") -> StepResult | None:
        """Return the present result of one action; an error is added to the failed actions."""
        if isinstance(answer, TinkermqError):
            self._fail(answer)
            return None
        if not answer.done():
            return None
        if error := _error_of(answer):
            self._fail(error)
            return None
        result = answer.result()
        try:
            result, num_bytes = self._fitting(result)
        except GameError as error:
            self._fail(error)
            return None
        except (TinkermqError, ValueError) as error:  # a program's result is not checked before
            self._fail(GameError(f"an episode's answer cannot travel: {words_of(error)}"))
            return None
        self._num_bytes += num_bytes + _CONTAINER_BYTES * _num_containers(result.info)
        return None if self._num_bytes > MAX_BYTES and self._results else result

    def _fitting(self, result: StepResult) -> tuple[StepResult, int]:
        """Return an answer that fits one message, its `info` cut if necessary, and its bytes.

        Raises GameError for an observation that is too long.
        """
        text_bytes = len(result.observation.encode())
        if text_bytes > self._most // 2:
            raise _too_large("an observation", text_bytes, self._most // 2)
        info_bytes = len(pack(result.info)) if result.info else 0
        if info_bytes > self._most - text_bytes:
            result = replace(result, info=cut_info(result.info, self._most - text_bytes))
            info_bytes = packed_bytes(result.info)
            if info_bytes > self._most - text_bytes:
                raise _too_large("`info`", info_bytes, self._most - text_bytes)
        return result, text_bytes + info_bytes

    def _fail(self, error: BaseException) -> None:
        self._failed.append(FailedStep(index=len(self._results), error=_told(error)))


def _error_of(answer: "asyncio.Future[Any]") -> BaseException | None:
    """Return the error of a done future."""
    if answer.cancelled():
        return InternalError("the episode's call was cancelled", hint="it can be tried again")
    return answer.exception()


def _too_large(what: str, num_bytes: int, most: int) -> GameError:
    return GameError(
        f"{what} of the game has {num_bytes:,} bytes, one message of it takes at most {most:,}",
        hint="let the game return less: a part of a long text, a file's name in place of its bytes",
    )


def _told(error: BaseException) -> ErrorReply:
    """Return an error in its message form; other exceptions are the host's failures, and logged."""
    if not isinstance(error, TinkermqError):
        _log.error("episode_failed_in_host", exc_info=error)
        error = InternalError(
            f"the environment host failed: {words_of(error)}", hint="its log has the details"
        )
    return ErrorReply.of(error.code, error.message, error.hint)


def _num_containers(info: dict[str, Any]) -> int:
    """Return the number of lists and maps in a value."""
    level: list[Any] = [info]
    count = 0
    while level:
        count += len(level)
        inner: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                inner += cast("dict[Any, Any]", container).values()
            else:
                inner += cast("list[Any]", container)
        level = [value for value in inner if isinstance(value, dict | list)]
    return count
