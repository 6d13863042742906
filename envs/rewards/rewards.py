"""Rewards from beyond the game: what the policy said is handed to a source, which says its worth.

A source is a function of the user's, an HTTP endpoint, or a model that judges. It is asked here,
where the game is hosted. A source that fails raises RewardError, which fails the episode and is
blamed on the reward: it is never a reward of 0.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from ...broker.client.connection import Broker
from ...schemas.config.sections import RewardConfig
from ...schemas.wire.errors import NotFoundError, RewardError, TinkermqError
from ...schemas.wire.foreign import blaming_awaited, lines_of, words_of
from ..datasets import Record
from ..game import ChatMessage, StepResult
from ..running.episodes import TimedOut
from .endpoint import Case, EndpointSource, Score, Source, SourceUnusableError
from .function import FunctionSource
from .judge import JudgeSource


class Rewards:
    """Follows the episodes of one host and adds to each answer what it is worth."""

    def __init__(self, config: RewardConfig, source: Source) -> None:
        self._source = source
        self._config = config
        self._cases: dict[str, Case] = {}
        self._free = asyncio.Semaphore(config.max_requests)
        self.unusable: SourceUnusableError | None = None
        """Why the source fails every episode, once it is known to."""
        self.given_up = asyncio.Event()
        """Set with `unusable`."""

    async def __aenter__(self) -> "Rewards":
        await self._source.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._source.stop()

    def begin(self, episode: str, record: Record | None, messages: list[ChatMessage]) -> None:
        """Take notice of an episode that has started."""
        self._cases[episode] = Case(
            data_source=record.data_source if record else "",
            ground_truth=record.ground_truth if record else None,
            extra_info=dict(record.extra_info) if record else {},
            messages=[dict(message) for message in messages],
        )

    def forget(self, episode: str) -> None:
        """Let go of an episode."""
        self._cases.pop(episode, None)

    def step(
        self, episode: str, action: str, playing: Awaitable[StepResult]
    ) -> Coroutine[Any, Any, StepResult]:
        """Await the game's answer to an action, and add what the action has earned."""
        return self._step(self._case(episode), action, playing)

    def finish(self, episode: str) -> Coroutine[Any, Any, StepResult]:
        """Reward an episode that ends though its game has not: of its answer only that counts."""
        return self._finish(self._case(episode))

    def _case(self, episode: str) -> Case:
        case = self._cases.get(episode)
        if case is None:
            raise NotFoundError(f"episode {episode!r} has not started here")
        return case

    async def _step(self, case: Case, action: str, playing: Awaitable[StepResult]) -> StepResult:
        result, config = await playing, self._config
        if isinstance(result, TimedOut):
            return result
        case.solution_str, case.info = action, result.info
        case.game_return += result.reward
        case.messages.append({"role": "assistant", "content": action})
        reward, told = config.game_weight * result.reward, Score(0.0)
        if config.per == "turn" or result.done:
            told = await self._score(case)
        case.messages.append({"role": result.role, "content": result.observation})
        info = {**result.info, **told.info, "game_reward": case.game_return}
        return replace(result, reward=reward + config.weight * told.value, info=info)

    async def _finish(self, case: Case) -> StepResult:
        told = Score(0.0) if self._config.per == "turn" else await self._score(case)
        info = {**case.info, **told.info, "game_reward": case.game_return}
        return StepResult("", self._config.weight * told.value, done=True, info=info)

    async def _score(self, case: Case) -> Score:
        """Ask the source, a bounded number of times at once, for a bounded time."""
        limit_s = self._config.timeout_s
        async with self._free:
            try:
                async with asyncio.timeout(limit_s):
                    with blaming_awaited(self._failure):
                        return await self._source.score(case)
            except SourceUnusableError as error:
                self.unusable = error
                self.given_up.set()
                raise
            except TimeoutError as error:
                raise RewardError(
                    f"no reward came within {limit_s:g} s (env.reward.source="
                    f"{self._config.source})",
                    hint="raise env.reward.timeout_s if it may take longer",
                ) from error

    def _failure(self, error: BaseException) -> TinkermqError:
        if isinstance(error, TinkermqError):
            return error
        return RewardError(
            f"the reward (env.reward.source={self._config.source}) failed: {words_of(error)}\n"
            f"{lines_of(error, (__file__,))}",
            hint="see what it is asked: the conversation, the row's gold answer and its extra_info",
        )


def make_rewards(
    config: RewardConfig,
    broker: Broker,
    user: str,
    function: Callable[..., Any] | None = None,
    judge_job: str | None = None,
) -> Rewards | None:
    """Return what adds the rewards that a configuration asks for; None for the game's own.

    `function` stands for `config.function` where a client hosts the game; `judge_job` is the id
    of the job `config.judge`, where it is known.
    """
    if config.source == "function":
        return Rewards(config, FunctionSource(config, function))
    if config.source == "endpoint":
        return Rewards(config, EndpointSource(config))
    if config.source == "judge":
        return Rewards(config, JudgeSource(config, broker, user, judge_job))
    return None
