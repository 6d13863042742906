"""The generator's view of a job's environment hosts: reset, step, close over the broker."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from ...broker.connection import Broker, ConnectionLost
from ...broker.rpc import call
from ...schemas.config import EnvConfig
from ...schemas.env import (
    CloseRequest,
    DescribeReply,
    DescribeRequest,
    ResetReply,
    ResetRequest,
    StepReply,
    StepRequest,
)
from ...schemas.errors import DeadlineError, GameError, NotFoundError, TinkermqError
from ...schemas.subjects import JobScope

_MARGIN_S = 5.0
_RETRY_S = 0.25
_STEP_ASKS = 4
_DESCRIBE_S = 5.0
_NOBODY = (NotFoundError, DeadlineError, ConnectionLost)

T = TypeVar("T")
Waiting = Callable[[str], AbstractContextManager[None]]


class HostGone(GameError):
    """The host that held the episode no longer answers: the episode starts again elsewhere."""

    code = "host_gone"


class Environments:
    """Calls to the environment hosts of one job.

    While a job has no host at all, `reset` and `describe` wait: `waiting` names the wait in the
    actor's heartbeat, and the wait ends when a host comes back.
    """

    def __init__(
        self, broker: Broker, scope: JobScope, config: EnvConfig, waiting: Waiting
    ) -> None:
        self._broker = broker
        self._scope = scope
        self._config = config
        self._waiting = waiting
        self._closing: set[asyncio.Task[None]] = set()

    async def describe(self) -> DescribeReply:
        """Ask any host what it serves; waits for the first host."""
        return await self._patiently(self._describe)

    async def reset(self, request: ResetRequest) -> ResetReply:
        """Start an episode on some host; waits while there is none.

        Raises GameError with the game's own words when the game failed.
        """
        return await self._patiently(lambda: self._reset(request))

    async def step(self, host: str, episode: str, turn: int, action: str) -> StepReply:
        """Give the game one action.

        A step may queue behind others at its host, whose own limit counts from when the game
        plays: a late answer is asked for again, which repeats nothing. Raises HostGone when the
        host has vanished or stays silent, GameError when the game failed.
        """
        request = StepRequest(episode=episode, turn=turn, action=action)
        for _ in range(_STEP_ASKS - 1):
            with contextlib.suppress(DeadlineError):
                return await self._step(host, request)
        try:
            return await self._step(host, request)
        except DeadlineError as error:
            raise _gone(host, error) from error

    def close(self, host: str, episode: str) -> None:
        """Free an episode, without waiting; a lost message is made up for by the lease."""
        task = asyncio.create_task(self._close(host, episode), name="close episode")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _describe(self) -> DescribeReply:
        return await call(
            self._broker,
            self._scope.env_describe,
            DescribeRequest(),
            DescribeReply,
            timeout_s=_DESCRIBE_S,
            waiting_for="an environment host to describe its game",
            idempotent=True,
        )

    async def _step(self, host: str, request: StepRequest) -> StepReply:
        try:
            return await call(
                self._broker,
                self._scope.env(host, "step"),
                request,
                StepReply,
                timeout_s=self._config.step_timeout_s + _MARGIN_S,
                waiting_for=f"environment host {host} to step",
                idempotent=True,
            )
        except (NotFoundError, ConnectionLost) as error:
            raise _gone(host, error) from error

    async def _reset(self, request: ResetRequest) -> ResetReply:
        return await call(
            self._broker,
            self._scope.env_reset,
            request,
            ResetReply,
            timeout_s=self._config.reset_timeout_s + _MARGIN_S,
            waiting_for="an environment host to reset",
            idempotent=True,
        )

    async def _close(self, host: str, episode: str) -> None:
        await self._broker.publish(
            self._scope.env(host, "close"), CloseRequest(episode=episode).to_bytes()
        )

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until a host answers; only its answer, good or bad, ends the wait."""
        try:
            return await attempt()
        except _NOBODY:
            pass
        with self._waiting("an environment host (none answers)"):
            while True:
                await asyncio.sleep(_RETRY_S)
                with contextlib.suppress(*_NOBODY):
                    return await attempt()


def _gone(host: str, error: TinkermqError) -> HostGone:
    return HostGone(
        f"environment host {host} does not answer: {error.message}",
        hint="the episode starts again on another host",
    )
