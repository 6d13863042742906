"""Client of a job's environment hosts: reset, step and close over the broker.

The requests of one turn of the event loop travel in one message: the resets of a task's episodes,
the steps of all episodes at one host. A host quickly answers with the ready results and names the
others, so a slow game delays no other. The other results are requested again, which plays nothing
twice, until the game's time limit. Such a request also detects a dead host.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..broker.client.connection import Broker
from ..broker.client.faults import ConnectionLost
from ..broker.client.rpc import call
from ..broker.jetstream.direct_get import RequestBatcher
from ..schemas import env
from ..schemas.config.job import EnvConfig
from ..schemas.local.disk import Waiting
from ..schemas.local.process import owned
from ..schemas.wire.codec import pack
from ..schemas.wire.errors import DeadlineError, NotFoundError, TinkermqError
from ..schemas.wire.subjects import JobScope
from .game import StepResult, join_texts
from .host import HostGone
from .running.episodes import TimedOut

_ANSWER_S = 4.0
_HOLD_S = 1.0
_HOLD_MANY_S = 0.02
_PART_CHARS = 2**20
_RETRY_S = 0.25
_MARGIN_S = 5.0
_STEP_PATIENCE = 4
_NOBODY = (NotFoundError, DeadlineError, ConnectionLost)

T = TypeVar("T")
Action = tuple[str, int, str, bool]
"""Episode, turn, text, and whether the episode ends early."""


@dataclass(frozen=True)
class RoleAddress:
    """The place of a role in a game with roles."""

    host: str
    """The host of the game."""
    table: str
    """Episode of the table."""
    role: str


@dataclass(frozen=True)
class Start:
    """The start of an episode; the same for all episodes of a task."""

    split: env.Split
    sample: int | None
    seed: int
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    seat: RoleAddress | None = None
    """In a game with roles: the seat that the episode takes; None for the table itself."""
    traceparent: str = ""
    """W3C trace context of the task."""

    only_held: bool = False
    """Only find an episode that was started before."""

    def request(self, episodes: list[str], wait_s: float) -> env.ResetRequest:
        """Return the message that starts these episodes."""
        return env.ResetRequest(
            episodes=episodes,
            split=self.split,
            sample=self.sample,
            seed=self.seed,
            kwargs=self.kwargs,
            wait_s=wait_s,
            only_held=self.only_held,
            table=self.seat.table if self.seat else None,
            role=self.seat.role if self.seat else "",
        )


@dataclass(frozen=True)
class Started:
    """An episode that has started."""

    host: str
    """The host that holds it."""
    messages: list[dict[str, Any]]
    """Chat messages of its first prompt."""
    data_source: str = ""
    """The `data_source` of the row."""
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Function schemas of the tools that the policy may call."""
    rewards_ends: bool = False
    """Whether its game has a reward for an episode that a limit ends."""


class Environments:
    """Calls to the environment hosts of one job.

    Without any host `reset` and `describe` wait for one; the actor's heartbeat shows the wait
    (`waiting`).
    """

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        config: EnvConfig,
        waiting: Waiting = contextlib.nullcontext,
    ) -> None:
        self._broker = broker
        self._scope = scope
        self._config = config
        self._waiting = waiting
        self._resets = RequestBatcher[bytes, tuple[str, Start], Started | str](self._send_resets)
        self._steps = RequestBatcher[str, Action, StepResult | None](self._send_steps)
        self._closing: set[asyncio.Task[None]] = set()
        self._last_host = ""

    async def describe(self) -> env.DescribeReply:
        """Return any host's description of the game; waits for the first host."""
        return await self._patiently(self._describe)

    async def reset(self, episode: str, start: Start) -> Started:
        """Start an episode on some host; waits while there is none.

        Raises GameError with the game's message if the game failed, HostGone if the host vanished
        meanwhile. After an error or a cancellation no host holds the episode.
        """
        if start.seat is not None:
            return await self._sit(episode, start, start.seat)
        answer = await self._patiently(lambda: self._ask_reset(episode, start))
        if isinstance(answer, Started):
            return answer
        try:
            return await self.rejoin(answer, episode, start)
        except BaseException:
            self.close(answer, episode)
            raise

    async def rejoin(self, host: str, episode: str, start: Start) -> Started:
        """Ask a host for an episode that it starts, or has started for another caller.

        A host that does not hold it starts it anew, unless `start` says `only_held`. Raises
        HostGone if the host does not exist or does not hold the episode.
        """
        deadline = self._broker.clock() + self._config.reset_timeout_s + _MARGIN_S
        answer: Started | str = host
        while isinstance(answer, str):
            answer = await self._ask_after_reset(answer, episode, start, deadline)
        return answer

    @property
    def rewards_ends(self) -> bool:
        """Return whether an episode that a limit ends has a further reward."""
        reward = self._config.reward
        return reward.source != "game" and reward.per == "episode"

    async def finish(self, host: str, episode: str, turn: int) -> StepResult:
        """Return the reward of an episode that a limit ends, as its next turn.

        Raises RewardError without one, HostGone as `step` does.
        """
        return await self._step(host, (episode, turn, "", True), self._patience_s)

    async def step(
        self, host: str, episode: str, turn: int, action: str, *, seated: bool = False
    ) -> StepResult:
        """Give the game one action.

        A step may be queued at its host, whose time limit starts when the game plays it. A step of
        a role (`seated`) also waits for the other roles, each of which has a lease at the host.
        Raises HostGone if the host has vanished or does not answer, GameError if the game failed.
        """
        patience_s = math.inf if seated else self._patience_s
        return await self._step(host, (episode, turn, action, False), patience_s)

    @property
    def _patience_s(self) -> float:
        """Time that a host may take for one action, including its queue."""
        config = self._config
        patience_s = _STEP_PATIENCE * (config.step_timeout_s + _MARGIN_S)
        if config.reward.source != "game":
            patience_s += _STEP_PATIENCE * (config.reward.timeout_s + _MARGIN_S)
        return patience_s

    async def _step(self, host: str, action: Action, patience_s: float) -> StepResult:
        deadline = self._broker.clock() + patience_s
        try:
            answer = await self._steps.ask(host, action)
            while answer is None:
                self._check(deadline, host, "step")
                (answer,) = await self._ask_steps(host, [action], _HOLD_S)
                if isinstance(answer, TinkermqError):
                    raise answer
        except _NOBODY as error:
            raise _gone(host, error) from error
        return answer

    def close(self, host: str, episode: str) -> None:
        """Free an episode without waiting; if the message is lost, the lease ends it."""
        task = asyncio.create_task(self._close(host, episode), name="close episode")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _ask_reset(self, episode: str, start: Start) -> Started | str:
        """Return the started episode or its host; if cancelled, free it once its host is known."""
        key = pack([start.split, start.sample, start.seed, start.kwargs])

        def give_back(answer: Started | str) -> None:
            self.close(answer.host if isinstance(answer, Started) else answer, episode)

        return await owned(self._resets.ask(key, (episode, start)), give_back)

    async def _sit(self, episode: str, start: Start, seat: RoleAddress) -> Started:
        """Join as a role and wait for its first turn; the other roles have leases at the host."""
        try:
            while True:
                answer = await self._ask_after_reset(seat.host, episode, start, math.inf)
                if isinstance(answer, Started):
                    return answer
        except BaseException:
            self.close(seat.host, episode)
            raise

    async def _describe(self) -> env.DescribeReply:
        request = env.DescribeRequest()
        reply: env.DescribeReply = await self._call(
            self._scope.env_describe, request, env.DescribeReply, "any host"
        )
        self._last_host = reply.host
        return reply

    async def _send_resets(
        self, _: bytes, requests: list[tuple[str, Start]]
    ) -> list[Started | str | TinkermqError]:
        """Start episodes of one task, spread over the job's hosts."""
        episodes, start = [episode for episode, _ in requests], requests[0][1]
        share = -(-len(episodes) // max(1, self._config.hosts))
        shares = [episodes[at : at + share] for at in range(0, len(episodes), share)]
        answers = await asyncio.gather(*(self._open(start, some) for some in shares))
        return [answer for some in answers for answer in some]

    async def _open(self, start: Start, episodes: list[str]) -> list[Started | str | TinkermqError]:
        hold_s = _HOLD_S if len(episodes) == 1 else _HOLD_MANY_S
        request = start.request(episodes, hold_s)
        try:
            reply = await self._call(
                self._scope.env_reset, request, env.ResetReply, "any host", start.traceparent
            )
        except TinkermqError as error:
            return [error] * len(episodes)
        self._last_host = reply.host
        return [_started(opened, reply) for opened in reply.episodes]

    async def _ask_after_reset(
        self, host: str, episode: str, start: Start, deadline: float
    ) -> Started | str:
        """Ask the host of an episode whether it is ready; returns the host if not."""
        self._check(deadline, host, "reset")
        request = start.request([episode], _HOLD_S)
        try:
            reply = await self._call(self._scope.env(host, "reset"), request, env.ResetReply, host)
        except _NOBODY as error:
            raise _gone(host, error) from error
        answer = _started(reply.episodes[0], reply)
        if isinstance(answer, TinkermqError):
            raise answer
        return answer

    async def _send_steps(
        self, host: str, actions: list[Action]
    ) -> Sequence[StepResult | TinkermqError | None]:
        hold_s = _HOLD_S if len(actions) == 1 else _HOLD_MANY_S
        parts = [self._ask_steps(host, part, hold_s) for part in _parts(actions)]
        return [answer for some in await asyncio.gather(*parts) for answer in some]

    async def _ask_steps(
        self, host: str, actions: list[Action], hold_s: float
    ) -> Sequence[StepResult | TinkermqError | None]:
        episodes, turns, texts, final = zip(*actions, strict=True)
        request = env.StepRequest(
            episodes=list(episodes),
            turns=list(turns),
            actions=list(texts),
            final=list(final) if any(final) else [],
            wait_s=hold_s,
        )
        reply = await self._call(self._scope.env(host, "step"), request, env.StepReply, host)
        return _results(reply)

    async def _call(
        self, subject: str, request: Any, reply_model: Any, whom: str, traceparent: str = ""
    ) -> Any:
        return await call(
            self._broker,
            subject,
            request,
            reply_model,
            timeout_s=_ANSWER_S,
            waiting_for=f"environment host {whom}",
            idempotent=True,
            traceparent=traceparent,
        )

    def _check(self, deadline: float, host: str, what: str) -> None:
        if self._broker.clock() > deadline:
            late = DeadlineError(f"it did not finish a {what} in time", hint="see the host's log")
            raise _gone(host, late)

    async def _close(self, host: str, episode: str) -> None:
        await self._broker.publish(
            self._scope.env(host, "close"), env.CloseRequest(episode=episode).to_bytes()
        )

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry until a host answers; an error is an answer, too."""
        try:
            return await attempt()
        except _NOBODY:
            pass
        with self._waiting(self._awaited_host()):
            while True:
                await asyncio.sleep(_RETRY_S)
                with contextlib.suppress(*_NOBODY):
                    return await attempt()

    def _awaited_host(self) -> str:
        """Return the missing host, so that the user of a stuck job can restart it."""
        game = f"a host of {self._config.game or 'its game'}"
        if self._last_host:
            return f"{game} ({self._last_host} was the last one, and has ended)"
        return f"{game} (none has answered yet)"


def _started(opened: env.Opened, reply: env.ResetReply) -> Started | str | TinkermqError:
    """Return a started episode, the host that still starts it, or an error."""
    if opened.error is not None:
        return opened.error.to_error()
    if opened.prompt is None:
        return reply.host
    messages = reply.prompts[opened.prompt]
    return Started(
        reply.host, messages, reply.data_source, reply.tools, rewards_ends=reply.rewards_ends
    )


def _parts(actions: list[Action]) -> list[list[Action]]:
    """Divide actions into parts of about a megabyte of text, each of which fits into a message."""
    parts: list[list[Action]] = [[]]
    num_chars = 0
    for action in actions:
        num_chars += len(action[2])
        if num_chars > _PART_CHARS and parts[-1]:
            parts.append([])
            num_chars = len(action[2])
        parts[-1].append(action)
    return parts


def _results(reply: env.StepReply) -> list[StepResult | TinkermqError | None]:
    """Return the game's answer to each action, an error, or None if it is not ready."""
    roles = reply.roles or ["user"] * len(reply.observations)
    several = reply.tool_results or [[]] * len(reply.observations)
    columns = zip(
        reply.observations, several, reply.rewards, reply.done, reply.infos, roles, strict=True
    )
    results: list[StepResult | TinkermqError | None] = [
        None
        if observation is None
        else StepResult(
            join_texts(*texts) if texts else observation,
            reward,
            done,
            info,
            role,
            tool_results=texts,
        )
        for observation, texts, reward, done, info, role in columns
    ]
    for at in reply.timed_out:
        results[at] = TimedOut("", reply.rewards[at], done=True, info=reply.infos[at])
    for failed in reply.failed:
        results[failed.index] = failed.error.to_error()
    return results


def _gone(host: str, error: TinkermqError) -> HostGone:
    return HostGone(
        f"environment host {host} does not answer: {error.message}",
        hint="the episode starts again on another host",
    )
