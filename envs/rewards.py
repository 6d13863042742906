"""Rewards from outside the game: a function, an endpoint or a judge model scores each action.

The source is called on the host of the game. If it fails, the episode fails with a RewardError,
which blames the reward; a failure never becomes a reward of 0. A function that hangs keeps its
thread; an async one that blocks delays the others, and after `env.reward.timeout_s` its event loop
is replaced.
"""

import asyncio
import importlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeAlias

from ..broker.client.connection import Broker
from ..schemas.config.sections import RewardConfig
from ..schemas.wire import errors
from ..schemas.wire.foreign import (
    blaming,
    blaming_awaited,
    lines_of,
    look_here,
    place_of,
    words_of,
)
from .dataset import Record
from .game import ChatMessage, StepResult
from .reward_sources import (
    Case,
    EndpointSource,
    JudgeSource,
    Score,
    SourceUnusableError,
    read_score,
)
from .running.episodes import TimedOut
from .running.runners import ForeignLoop


class Rewards:
    """Adds a source's rewards to the answers of one host's episodes."""

    def __init__(self, config: RewardConfig, source: "Source") -> None:
        self._source = source
        self._config = config
        self._cases: dict[str, Case] = {}
        self._free = asyncio.Semaphore(config.max_requests)
        self.unusable: SourceUnusableError | None = None
        """The error that fails every episode, once it occurred."""
        self.given_up = asyncio.Event()
        """Set with `unusable`."""

    async def __aenter__(self) -> "Rewards":
        await self._source.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._source.stop()

    def begin(self, episode: str, record: Record | None, messages: list[ChatMessage]) -> None:
        """Record the start of an episode."""
        self._cases[episode] = Case(
            data_source=record.data_source if record else "",
            ground_truth=record.ground_truth if record else None,
            extra_info=dict(record.extra_info) if record else {},
            messages=[dict(message) for message in messages],
        )

    def forget(self, episode: str) -> None:
        """Drop an episode."""
        self._cases.pop(episode, None)

    def step(
        self, episode: str, action: str, playing: Awaitable[StepResult]
    ) -> Coroutine[Any, Any, StepResult]:
        """Await the game's answer to an action, and add the source's reward."""
        return self._step(self._case(episode), action, playing)

    def finish(
        self, episode: str, finishing: Awaitable[StepResult] | None = None
    ) -> Coroutine[Any, Any, StepResult]:
        """Reward an episode that a limit ends; only the reward and info count.

        `finishing` is the game's own result for it.
        """
        return self._finish(self._case(episode), finishing)

    def _case(self, episode: str) -> Case:
        case = self._cases.get(episode)
        if case is None:
            raise errors.NotFoundError(f"episode {episode!r} has not started here")
        return case

    async def _step(self, case: Case, action: str, playing: Awaitable[StepResult]) -> StepResult:
        result, config = await playing, self._config
        if isinstance(result, TimedOut):
            return result
        case.solution_str, case.info = action, result.info
        case.game_return += result.reward
        case.messages.append({"role": "assistant", "content": action})
        reward, score = config.game_weight * result.reward, Score(0.0)
        if config.per == "turn" or result.done:
            score = await self._score(case)
        case.messages += result.messages()
        info = {**result.info, **score.info, "game_reward": case.game_return}
        return replace(result, reward=reward + config.weight * score.value, info=info)

    async def _finish(self, case: Case, finishing: Awaitable[StepResult] | None) -> StepResult:
        result = StepResult("", 0.0, done=True) if finishing is None else await finishing
        if isinstance(result, TimedOut):
            return result
        case.game_return += result.reward
        case.info = {**case.info, **result.info}
        score = Score(0.0) if self._config.per == "turn" else await self._score(case)
        info = {**case.info, **score.info, "game_reward": case.game_return}
        reward = self._config.game_weight * result.reward + self._config.weight * score.value
        return StepResult("", reward, done=True, info=info)

    async def _score(self, case: Case) -> Score:
        """Call the source, with limits on concurrency and time."""
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
                raise errors.RewardError(
                    f"no reward came within {limit_s:g} s (env.reward.source="
                    f"{self._config.source})",
                    hint="raise env.reward.timeout_s if it may take longer",
                ) from error

    def _failure(self, error: BaseException) -> errors.TinkermqError:
        if isinstance(error, errors.TinkermqError):
            return error
        return errors.RewardError(
            f"the reward (env.reward.source={self._config.source}) failed: {words_of(error)}\n"
            f"{lines_of(error, (__file__,))}",
            hint="see what it is asked: the conversation, the row's gold answer and its extra_info",
        )


Source: TypeAlias = "FunctionSource | EndpointSource | JudgeSource"


def make_rewards(
    config: RewardConfig,
    broker: Broker,
    user: str,
    function: Callable[..., Any] | None = None,
    judge_job: str | None = None,
) -> Rewards | None:
    """Return the rewards of a configuration; None for the game's own.

    A client that hosts the game passes `function` in place of `config.function`; `judge_job` is the
    id of the job `config.judge`, if it is known.
    """
    if config.source == "function":
        return Rewards(config, FunctionSource(config, function))
    if config.source == "endpoint":
        return Rewards(config, EndpointSource(config))
    if config.source == "judge":
        return Rewards(config, JudgeSource(config, broker, user, judge_job))
    return None


# Rewards from a function. One that is not async runs in a thread of the host; all calls of an async
# one share an event loop in a thread of its own.

MAX_HUNG = 16
"""Maximum number of hung calls of a function; beyond it no more calls are made."""


class FunctionSource:
    """Calls a Python function off the host's event loop."""

    def __init__(self, config: RewardConfig, function: Callable[..., Any] | None) -> None:
        self._target = config.function or getattr(function, "__qualname__", "the function")
        self._function = function
        self._num_running = 0
        self._limit = config.max_requests
        self._timeout_s = config.timeout_s
        self._parameters: frozenset[str] | None = None
        self._is_async = False
        self._loop: ForeignLoop | None = None
        self._num_given_up = 0

    async def start(self) -> None:
        """Import the function and read its parameters; ConfigError if it cannot be imported."""
        function = self._function = self._function or load_function(self._target)
        refuse_generator(function, self._target)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - of an object with an async one
        )
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a function in C without a signature gets all arguments
            return
        if not any(item.kind is item.VAR_KEYWORD for item in parameters):
            self._parameters = frozenset(item.name for item in parameters)

    async def score(self, case: Case) -> Score:
        """Call the function; RewardError with the traceback of its exception."""
        if self._is_async:
            return await self._in_loop(lambda: self._called(case))
        answer = await self._in_thread(case)
        if isinstance(answer, Score):
            return answer
        return await self._in_loop(lambda: answer)  # it may return another function's coroutine

    async def stop(self) -> None:
        """End the event loop of an async function."""
        if self._loop is not None:
            await asyncio.to_thread(self._loop.end)

    async def _in_thread(self, case: Case) -> "Score | Awaitable[Any]":
        if self._num_running >= self._limit + MAX_HUNG:
            raise self._hung(self._num_running)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Score | Awaitable[Any]] = loop.create_future()

        def settle(
            answer: "Score | Awaitable[Any] | None", error: errors.TinkermqError | None
        ) -> None:
            self._num_running -= 1
            if not outcome.done() and answer is not None:
                outcome.set_result(answer)
            elif not outcome.done() and error is not None:
                outcome.set_exception(error)

        def run() -> None:
            try:
                with blaming(self._failure):
                    answer = self._called(case)
                    is_later = inspect.isawaitable(answer)
                    outcome = (answer if is_later else read_score(answer, self._target), None)
            except errors.TinkermqError as error:
                outcome = (None, error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, *outcome)

        self._num_running += 1
        threading.Thread(target=run, name=f"reward-{self._target}", daemon=True).start()
        return await outcome

    async def _in_loop(self, call: Callable[[], Any]) -> Score:
        """Await the result of a call in the function's own event loop."""

        async def run() -> Score:
            return read_score(await call(), self._target)

        return await self._turning_loop().submit(run, self._failure)

    def _turning_loop(self) -> ForeignLoop:
        """Return the function's event loop; one that was blocked for long is replaced."""
        if self._loop is not None and self._loop.is_stuck(self._timeout_s):
            self._num_given_up += 1
            if self._num_given_up > MAX_HUNG:
                raise self._hung(self._num_given_up)
            self._loop.give_up(
                errors.RewardError(
                    f"{self._target} held up its event loop for {self._timeout_s:g} s",
                    hint="an async function awaits whatever takes long; write one that computes "
                    "without async",
                )
            )
            self._loop = None
        if self._loop is None:
            self._loop = ForeignLoop(f"reward-{self._target}")
        return self._loop

    def _called(self, case: Case) -> Any:
        assert self._function is not None
        arguments = case.arguments()
        if self._parameters is not None:
            arguments = {
                name: value for name, value in arguments.items() if name in self._parameters
            }
        return self._function(**arguments)

    def _failure(self, error: BaseException) -> errors.TinkermqError:
        if isinstance(ours := errors.root_cause(error), errors.RewardError):
            return ours
        return errors.RewardError(
            f"{self._target} raised {words_of(error)}\n{lines_of(error, (__file__,))}",
            hint="the traceback is the reward function's own",
        )

    def _hung(self, count: int) -> errors.RewardError:
        return errors.RewardError(
            f"{count} calls of {self._target} hang, no more are made",
            hint="bound what the function does, or restart the environment host",
        )


def load_function(target: str) -> Callable[..., Any]:
    """Import `package.module:function`, also from the working folder; raises ConfigError."""
    module, _, name = target.partition(":")
    look_here()

    def blame(error: BaseException) -> errors.ConfigError:
        place = place_of(error, (__file__,))
        return errors.ConfigError(
            f"the reward function {target!r} cannot be imported: {words_of(error)}",
            hint=f"{f'raised at {place}; ' if place else ''}env.reward.function is "
            "`package.module:function`, importable where games run",
        )

    with blaming(blame):
        target_object: Any = importlib.import_module(module)
        for part in name.split("."):
            target_object = getattr(target_object, part)
    if not callable(target_object):
        raise errors.ConfigError(
            f"the reward function {target!r} is {type(target_object).__name__}, not a function",
            hint="env.reward.function is `package.module:function`",
        )
    refuse_generator(target_object, target)
    return target_object


def refuse_generator(function: Callable[..., Any], target: str) -> None:
    """Raise ConfigError for a function that yields: it returns no reward."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise errors.ConfigError(
            f"the reward function {target!r} yields in place of returning a reward",
            hint="return a number, or a map whose `score` or `reward` is one; it may be async def",
        )
