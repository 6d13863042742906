"""Rewards from a Python function of the user's."""

import asyncio
import importlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...schemas.config.reward import RewardConfig
from ...schemas.wire.errors import ConfigError, RewardError
from .source import Case, Score, read_score

MAX_HUNG = 16
"""Calls of a function that hang at the same time; past it the host says it cannot go on."""
_NUM_FRAMES = 6


class FunctionSource:
    """Calls a Python function in a thread of the host, which a function that hangs keeps."""

    def __init__(self, config: RewardConfig, function: Callable[..., Any] | None) -> None:
        self._target = config.function or ""
        self._function = function
        self._num_running = 0
        self._limit = config.max_requests
        self._wanted: frozenset[str] | None = None

    async def start(self) -> None:
        """Import the function and see which arguments it takes."""
        self._function = self._function or load_function(self._target)
        parameters = inspect.signature(self._function).parameters.values()
        if not any(item.kind is item.VAR_KEYWORD for item in parameters):
            self._wanted = frozenset(item.name for item in parameters)

    async def score(self, case: Case) -> Score:
        """Call the function."""
        if self._num_running >= self._limit + MAX_HUNG:
            raise RewardError(
                f"{self._num_running} calls of {self._target} hang, no more are made",
                hint="bound what the function does, or restart the environment host",
            )
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Score] = loop.create_future()

        def settle(score: Score | None, error: BaseException | None) -> None:
            self._num_running -= 1
            if not outcome.done() and score is not None:
                outcome.set_result(score)
            elif not outcome.done() and error is not None:
                outcome.set_exception(error)

        def run() -> None:
            try:
                told = (self._call(case), None)
            except BaseException as error:  # noqa: BLE001 - handed on to the one who asked
                told = (None, error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, *told)

        self._num_running += 1
        threading.Thread(target=run, name=f"reward-{self._target}", daemon=True).start()
        return await outcome

    async def stop(self) -> None:
        """Nothing is held."""

    def _call(self, case: Case) -> Score:
        assert self._function is not None
        given = case.arguments()
        if self._wanted is not None:
            given = {name: value for name, value in given.items() if name in self._wanted}
        try:
            answer = self._function(**given)
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)[1:][-_NUM_FRAMES:]
            lines = "".join(traceback.format_list(frames))
            raise RewardError(
                f"{self._target} raised {type(error).__name__}: {error}\n{lines.rstrip()}",
                hint="the traceback is the reward function's own",
            ) from error
        return read_score(answer, self._target)


def load_function(target: str) -> Callable[..., Any]:
    """Import `package.module:function`, also from the working folder; ConfigError if it is none."""
    module, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        last = traceback.format_exception_only(error)[-1].strip()
        raise ConfigError(
            f"the reward function {target!r} cannot be imported: {last}",
            hint="env.reward.function is `package.module:function`, importable where games run",
        ) from error
    if not callable(found):
        raise ConfigError(
            f"the reward function {target!r} is {type(found).__name__}, not a function",
            hint="env.reward.function is `package.module:function`",
        )
    return found
