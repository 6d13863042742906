"""Rewards from a Python function of the user's, async or not.

A function that is not async runs in a thread of the host, which one that hangs keeps. All calls of
an async one wait together in an event loop in a thread of its own; one that computes where it
should wait holds up the others, and after `env.reward.timeout_s` the loop is given up with them.
"""

import asyncio
import importlib
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ...schemas.config.sections import RewardConfig
from ...schemas.wire.errors import ConfigError, RewardError, TinkermqError, root_cause
from ...schemas.wire.foreign import blaming, lines_of, place_of, words_of
from ..running.foreign_loop import ForeignLoop
from .endpoint import Case, Score, read_score

MAX_HUNG = 16
"""Calls of a function that hang at the same time; past it the host says it cannot go on."""


class FunctionSource:
    """Calls a Python function off the host's event loop."""

    def __init__(self, config: RewardConfig, function: Callable[..., Any] | None) -> None:
        self._target = config.function or getattr(function, "__qualname__", "the function")
        self._function = function
        self._num_running = 0
        self._limit = config.max_requests
        self._timeout_s = config.timeout_s
        self._wanted: frozenset[str] | None = None
        self._is_async = False
        self._loop: ForeignLoop | None = None
        self._num_given_up = 0

    async def start(self) -> None:
        """Import the function and see which arguments it takes; ConfigError if it cannot be."""
        found = self._function = self._function or load_function(self._target)
        refuse_generator(found, self._target)
        self._is_async = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(
            getattr(found, "__call__", None)  # noqa: B004 - of an object with an async one
        )
        try:
            parameters = inspect.signature(found).parameters.values()
        except (TypeError, ValueError):  # one of C that does not tell: it gets all there is
            return
        if not any(item.kind is item.VAR_KEYWORD for item in parameters):
            self._wanted = frozenset(item.name for item in parameters)

    async def score(self, case: Case) -> Score:
        """Call the function; RewardError with its traceback for what it raises."""
        if self._is_async:
            return await self._in_loop(lambda: self._called(case))
        answer = await self._in_thread(case)
        if isinstance(answer, Score):
            return answer
        return await self._in_loop(lambda: answer)  # it has handed on what another async one gave

    async def stop(self) -> None:
        """End the event loop of an async function."""
        if self._loop is not None:
            await asyncio.to_thread(self._loop.end)

    async def _in_thread(self, case: Case) -> "Score | Awaitable[Any]":
        if self._num_running >= self._limit + MAX_HUNG:
            raise self._hung(self._num_running)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Score | Awaitable[Any]] = loop.create_future()

        def settle(answer: "Score | Awaitable[Any] | None", error: TinkermqError | None) -> None:
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
                    told = (answer if is_later else read_score(answer, self._target), None)
            except TinkermqError as error:
                told = (None, error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, *told)

        self._num_running += 1
        threading.Thread(target=run, name=f"reward-{self._target}", daemon=True).start()
        return await outcome

    async def _in_loop(self, call: Callable[[], Any]) -> Score:
        """Await what a call returns in the loop of the function's own."""

        async def run() -> Score:
            return read_score(await call(), self._target)

        return await self._turning_loop().submit(run, self._failure)

    def _turning_loop(self) -> ForeignLoop:
        """Return the function's event loop; one that has not turned for long is replaced."""
        if self._loop is not None and self._loop.is_stuck(self._timeout_s):
            self._num_given_up += 1
            if self._num_given_up > MAX_HUNG:
                raise self._hung(self._num_given_up)
            self._loop.give_up(
                RewardError(
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
        given = case.arguments()
        if self._wanted is not None:
            given = {name: value for name, value in given.items() if name in self._wanted}
        return self._function(**given)

    def _failure(self, error: BaseException) -> TinkermqError:
        if isinstance(ours := root_cause(error), RewardError):
            return ours
        return RewardError(
            f"{self._target} raised {words_of(error)}\n{lines_of(error, (__file__,))}",
            hint="the traceback is the reward function's own",
        )

    def _hung(self, count: int) -> RewardError:
        return RewardError(
            f"{count} calls of {self._target} hang, no more are made",
            hint="bound what the function does, or restart the environment host",
        )


def load_function(target: str) -> Callable[..., Any]:
    """Import `package.module:function`, also from the working folder; ConfigError if it is none."""
    module, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)

    def blame(error: BaseException) -> ConfigError:
        place = place_of(error, (__file__,))
        return ConfigError(
            f"the reward function {target!r} cannot be imported: {words_of(error)}",
            hint=f"{f'raised at {place}; ' if place else ''}env.reward.function is "
            "`package.module:function`, importable where games run",
        )

    with blaming(blame):
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"the reward function {target!r} is {type(found).__name__}, not a function",
            hint="env.reward.function is `package.module:function`",
        )
    refuse_generator(found, target)
    return found


def refuse_generator(function: Callable[..., Any], target: str) -> None:
    """Raise ConfigError for a function that yields: what it answers is no reward."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"the reward function {target!r} yields in place of returning a reward",
            hint="return a number, or a map whose `score` or `reward` is one; it may be async def",
        )
