"""The generator's view of a job's environment hosts: reset, step, close over the broker."""

import asyncio
import contextlib
import time
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
_STEP_PATIENCE = 4
_ASK_AGAIN_S = 2.0
_SLOW_RESETS = 4
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
        self._slow_reset_s: float | None = None
        """How long the slowest of the last hundred resets or so took."""

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
        plays. It is asked for again every two seconds, which repeats nothing but finds out when
        the host has died. Raises HostGone when the host has vanished or stays silent, GameError
        when the game failed.
        """
        request = StepRequest(episode=episode, turn=turn, action=action)
        patience_s = _STEP_PATIENCE * (self._config.step_timeout_s + _MARGIN_S)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return await self._step(host, request)
            except DeadlineError as error:
                if time.monotonic() > deadline:
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
                timeout_s=_ASK_AGAIN_S,
                waiting_for=f"environment host {host} to step",
                idempotent=True,
            )
        except (NotFoundError, ConnectionLost) as error:
            raise _gone(host, error) from error

    async def _reset(self, request: ResetRequest) -> ResetReply:
        """Ask any host, and soon another one when a reset takes much longer than they do here.

        The host that was asked may have died. If it has not, what it opened runs out by its lease.
        """
        patience_s = self._config.reset_timeout_s + _MARGIN_S
        if self._slow_reset_s is not None:
            soon_s = max(_ASK_AGAIN_S, _SLOW_RESETS * self._slow_reset_s)
            if soon_s < patience_s / 2:
                with contextlib.suppress(DeadlineError):
                    return await self._ask_reset(request, soon_s)
        return await self._ask_reset(request, patience_s)

    async def _ask_reset(self, request: ResetRequest, timeout_s: float) -> ResetReply:
        started = time.monotonic()
        reply = await call(
            self._broker,
            self._scope.env_reset,
            request,
            ResetReply,
            timeout_s=timeout_s,
            waiting_for="an environment host to reset",
            idempotent=True,
        )
        took_s = time.monotonic() - started
        self._slow_reset_s = max(took_s, 0.99 * (self._slow_reset_s or 0.0))
        return reply

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
