"""Run a host's games off its event loop: in threads, in processes, or in a loop of their own.

`make_runner` chooses by `env.isolation` and by whether the game is async; `process_runner.py` has
the processes.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ...schemas.config.job import EnvConfig
from ...schemas.local.process import in_daemon_thread
from ...schemas.profile import TimeUse
from ...schemas.wire.errors import GameError, StateError, TinkermqError
from ...schemas.wire.foreign import Blame, clear_frames
from ..game import AbstractGame, ChatMessage, StepResult, game_failure
from ..registry import import_needs, load_game
from .episodes import (
    Call,
    Episodes,
    GameFacts,
    GameHung,
    Opening,
    TimeLimits,
    end_of_hung,
    hung,
    is_async,
    refuse_async,
    retrieve_error,
)
from .process_runner import ProcessRunner

T = TypeVar("T")


class Runner(Protocol):
    """Plays the games of many episodes off the event loop."""

    async def start(self) -> GameFacts:
        """Start, make one game as a trial, and return its description."""
        ...

    def reset(self, opening: Opening) -> Awaitable[list[ChatMessage]]:
        """Start an episode; GameError when the game fails."""
        ...

    def step(self, episode: str, action: str) -> Awaitable[StepResult]:
        """Play one action; GameError when the game fails, which ends the episode."""
        ...

    def finish(self, episode: str) -> Awaitable[StepResult]:
        """Return the last result of an episode that a limit ends; GameError when the game fails."""
        ...

    def turn(self, episode: str) -> Awaitable[tuple[str, list[ChatMessage]]]:
        """Return the role whose turn it is, and the messages that open that role's conversation."""
        ...

    def drop(self, episode: str) -> None:
        """Forget an episode; a call that is cancelled forgets its episode, too."""
        ...

    def end_overdue(self) -> None:
        """End calls that have run past their limit; called every `LOOK_S`."""
        ...

    async def stop(self) -> None:
        """End the threads or processes that play games."""
        ...


class BoundedRunner(Runner, Protocol):
    """A runner with a bound on the episodes that run at the same time."""

    @property
    def places(self) -> int:
        """Episodes at the same time."""
        ...


class TimedRunner:
    """A runner that measures how long games play, and how long all its workers are busy.

    A step that takes too long ends its episode here as the configuration says.
    """

    def __init__(
        self, runner: Runner, config: EnvConfig, num_workers: int, time_use: TimeUse
    ) -> None:
        """`time_use` measures `play` (a game was called and has not answered) and `full`."""
        self._runner = runner
        self._config = config
        self._time_use = time_use
        self._room = math.inf if isinstance(runner, AsyncRunner) else num_workers
        self._num_open = 0
        self.start = runner.start
        self.drop = runner.drop
        self.end_overdue = runner.end_overdue
        self.stop = runner.stop

    def reset(self, opening: Opening) -> Awaitable[list[ChatMessage]]:
        """Start an episode; GameError when the game fails."""
        return self._timed(self._runner.reset(opening))

    def step(self, episode: str, action: str) -> Awaitable[StepResult]:
        """Play one action; GameError when the game fails, which ends the episode."""
        return self._timed(self._step(episode, action))

    def finish(self, episode: str) -> Awaitable[StepResult]:
        """Return the last result of an episode that a limit ends; GameError when the game fails."""
        return self._timed(self._runner.finish(episode))

    async def _step(self, episode: str, action: str) -> StepResult:
        try:
            return await self._runner.step(episode, action)
        except GameHung as error:
            return end_of_hung(self._config, error)

    def turn(self, episode: str) -> Awaitable[tuple[str, list[ChatMessage]]]:
        """Return the role whose turn it is, and the messages that open that role's conversation."""
        return self._timed(self._runner.turn(episode))

    def _timed(self, answer: Awaitable[T]) -> "asyncio.Future[T]":
        self._num_open += 1
        self._time_use.begin("play")
        if self._num_open == self._room:
            self._time_use.begin("full")
        future = asyncio.ensure_future(answer)
        future.add_done_callback(self._played)
        return future

    def _played(self, _: "asyncio.Future[T]") -> None:
        if self._num_open == self._room:
            self._time_use.end("full")
        self._num_open -= 1
        self._time_use.end("play")


def make_runner(config: EnvConfig, game_class: type[AbstractGame] | None = None) -> Runner:
    """Return the runner for `config.isolation` or, where it is unset, for the game's own.

    Games whose steps may hang (`config.on_step_timeout`) run in processes, which can be killed,
    unless the configuration asks for threads.

    `game_class` replaces `config.game` where a client hosts a class of its own. Raises GameError.
    """
    limits = TimeLimits(config.reset_timeout_s, config.step_timeout_s)
    if config.isolation == "process" and game_class is None:
        return _process_runner(config, config.game, limits)
    game = game_class or load_game(config.game)
    isolation = config.isolation or game.isolation
    if is_async(game):
        if isolation == "process":
            refuse_async(game)
        return AsyncRunner(game, config.kwargs, limits=limits)
    if config.on_step_timeout != "retry":
        isolation = config.isolation or "process"
    if isolation == "process":
        target = config.game if game_class is None else _importable(game_class)
        return _process_runner(config, target, limits)
    return ThreadRunner(game, config.kwargs, num_workers=config.workers, limits=limits)


def _process_runner(config: EnvConfig, target: str, limits: TimeLimits) -> ProcessRunner:
    return ProcessRunner(
        target,
        config.kwargs,
        num_workers=config.workers,
        worker_memory_mb=config.worker_memory_mb,
        limits=limits,
    )


def _importable(game_class: type[AbstractGame]) -> str:
    target = f"{game_class.__module__}:{game_class.__qualname__}"
    if game_class.__module__ == "__main__" or "<locals>" in target:
        raise GameError(
            f"{game_class.__qualname__} cannot be imported by a worker process",
            hint="move the class to an importable module, or set env.isolation=thread",
        )
    return target


# Threads of the host's own process: the fastest way, for games that neither hang nor crash.
#
# Worker threads take work from one queue and put finished work on another. They are woken once for
# all calls of one iteration of the event loop, and the loop once for all work that finished
# meanwhile. A thread cannot be killed; a hung one is replaced, a bounded number of times.

MAX_GIVEN_UP = 16
"""Maximum number of hung threads that are replaced; beyond it the host refuses calls."""


@dataclass
class _Work(Call):
    """One call into a game, and its outcome."""

    call: Callable[[], Any]
    outcome: Any = None
    error: TinkermqError | None = None

    def run(self) -> None:
        self.started = time.monotonic()
        try:
            self.outcome = self.call()
        except TinkermqError as error:
            self.error = error
        except BaseException as error:  # noqa: BLE001 - raised where the call was made
            self.error = game_failure("the game", self.verb, error)
        clear_frames(self.error)

    def finish(self) -> bool:
        """Deliver the outcome; return False if it is no longer awaited."""
        return _settle(self.future, self.outcome, self.error)


@dataclass
class _Worker:
    """One thread and its current work."""

    thread: threading.Thread = field(init=False)
    work: _Work | None = None
    given_up: bool = False


class ThreadRunner:
    """Plays games in `num_workers` threads."""

    def __init__(
        self,
        game_class: type[AbstractGame],
        kwargs: dict[str, Any],
        *,
        num_workers: int,
        limits: TimeLimits,
    ) -> None:
        self._episodes = Episodes(game_class, kwargs)
        self._class, self._name = game_class, game_class.__name__
        self._kwargs = kwargs
        self._num_workers = num_workers
        self._limits = limits
        self._queue: deque[_Work] = deque()
        self._num_new = 0
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        """An entry wakes a worker, which plays until the queue is empty; False ends a worker."""
        self._finished: deque[_Work] = deque()
        self._waking = threading.Lock()
        self._workers: list[_Worker] = []
        self._num_given_up = 0
        self._loop: asyncio.AbstractEventLoop

    async def start(self) -> GameFacts:
        """Start the threads and make one game as a trial; return its description."""
        self._loop = asyncio.get_running_loop()
        for _ in range(self._num_workers):
            self._add_worker()
        await self._submit("import", "", lambda: import_needs(self._class, self._kwargs))
        return await self._submit("__init__", "", self._episodes.probe)

    def reset(self, opening: Opening) -> "asyncio.Future[list[ChatMessage]]":
        """Start an episode."""
        return self._submit("reset", opening.episode, lambda: self._episodes.reset(opening))

    def step(self, episode: str, action: str) -> "asyncio.Future[StepResult]":
        """Play one action."""
        return self._submit("step", episode, lambda: self._episodes.step(episode, action))

    def finish(self, episode: str) -> "asyncio.Future[StepResult]":
        """Return the last result of an episode that a limit ends."""
        return self._submit("finish", episode, lambda: self._episodes.finish(episode))

    def turn(self, episode: str) -> "asyncio.Future[tuple[str, list[ChatMessage]]]":
        """Return the role whose turn it is, and the messages that open its conversation."""
        return self._submit("turn", episode, lambda: self._episodes.turn(episode))

    def drop(self, episode: str) -> None:
        """Forget an episode; a thread closes its game."""
        if episode in self._episodes:
            dropped = self._submit("drop", episode, lambda: self._episodes.drop(episode))
            dropped.add_done_callback(retrieve_error)  # it is not awaited

    def end_overdue(self) -> None:
        """Abandon threads whose game has hung past its limit, and fail its episode."""
        for worker in list(self._workers):
            if (work := worker.work) is not None and work.is_overdue:
                self._give_up(worker, work)
        if not self._workers:
            self._refuse_queued()

    async def stop(self) -> None:
        """Close the games and let the threads end; a hung thread ends with the process."""
        if self._workers and len(self._episodes):
            dropped = self._submit("drop", "", self._episodes.drop_all)
            dropped.add_done_callback(retrieve_error)
            await asyncio.wait({dropped}, timeout=_END_S)
        for _ in self._workers:
            self._wakes.put(False)

    def _submit(self, verb: str, episode: str, call: Callable[[], Any]) -> "asyncio.Future[Any]":
        future = self._loop.create_future()
        work = _Work(verb, episode, self._limits.of(verb), future, call)
        self._queue.append(work)
        if not self._num_new:
            self._loop.call_soon(self._wake_workers)
        self._num_new += 1
        return work.future

    def _wake_workers(self) -> None:
        for _ in range(min(self._num_new, self._num_workers)):
            self._wakes.put(True)
        self._num_new = 0

    def _add_worker(self) -> None:
        worker = _Worker()
        worker.thread = threading.Thread(
            target=self._serve, args=(worker,), name=f"game-{self._name}", daemon=True
        )
        self._workers.append(worker)
        worker.thread.start()

    def _serve(self, worker: _Worker) -> None:
        """Play queued calls until stopped or abandoned."""
        while self._wakes.get():
            while True:
                try:
                    work = self._queue.popleft()
                except IndexError:
                    break
                if work.future.cancelled():
                    continue
                worker.work = work
                work.run()
                worker.work = None
                self._finished.append(work)
                self._wake_loop()
                if worker.given_up:
                    self._episodes.drop(work.episode)
                    self._on_loop(self._return_thread)
                    return

    def _wake_loop(self) -> None:
        """Wake the event loop, unless it was woken and has not collected yet."""
        if self._waking.acquire(blocking=False):
            self._on_loop(self._collect)

    def _on_loop(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no waiters are left
            self._loop.call_soon_threadsafe(function)

    def _collect(self) -> None:
        self._waking.release()
        while self._finished:
            work = self._finished.popleft()
            if not work.finish():
                self.drop(work.episode)

    def _give_up(self, worker: _Worker, work: _Work) -> None:
        worker.given_up = True
        self._workers.remove(worker)
        self._num_given_up += 1
        if self._num_given_up <= MAX_GIVEN_UP:
            self._add_worker()
            self._wakes.put(True)  # for work that may be left in the queue
        work.error = work.hung(self._name)
        work.finish()

    def _return_thread(self) -> None:
        """Free the place of an abandoned thread that has ended."""
        self._num_given_up -= 1
        if len(self._workers) < self._num_workers:
            self._add_worker()
            self._wakes.put(True)

    def _refuse_queued(self) -> None:
        while self._queue:
            work = self._queue.popleft()
            work.error = GameError(
                f"{self._num_given_up} calls of {self._name} have hung, no thread is left",
                hint="set env.isolation=process: a hung game is killed there",
            )
            work.finish()


# Async games, all in one event loop.
#
# The loop has its own thread, so that a game that blocks delays the other episodes of its host but
# never the host. A call past its limit is cancelled. A loop that is blocked for as long as a step
# may take is replaced with all its episodes, a bounded number of times.


class AsyncRunner:
    """Plays games in one event loop."""

    def __init__(
        self,
        game_class: type[AbstractGame],
        kwargs: dict[str, Any],
        *,
        limits: TimeLimits,
    ) -> None:
        self._class = game_class
        self._kwargs = kwargs
        self._limits = limits
        self._longest_s = max(limits)
        self._num_given_up = 0
        self._loop: ForeignLoop
        self._episodes: Episodes

    async def start(self) -> GameFacts:
        """Start the loop and make one game as a trial; return its description."""
        self._begin()
        limit_s = self._limits.of("import")
        try:
            async with asyncio.timeout(limit_s):
                await in_daemon_thread(
                    lambda: import_needs(self._class, self._kwargs), "import of a game"
                )
        except TimeoutError:
            raise hung(self._class.__name__, "import", limit_s) from None
        probe = self._episodes.probe

        async def made() -> GameFacts:
            return probe()

        return await self._play("__init__", "", made)

    async def reset(self, opening: Opening) -> list[ChatMessage]:
        """Start an episode."""
        episodes = self._episodes
        return await self._play("reset", opening.episode, lambda: episodes.reset_async(opening))

    async def step(self, episode: str, action: str) -> StepResult:
        """Play one action."""
        episodes = self._episodes
        return await self._play("step", episode, lambda: episodes.step_async(episode, action))

    async def finish(self, episode: str) -> StepResult:
        """Return the last result of an episode that a limit ends."""
        episodes = self._episodes
        return await self._play("finish", episode, lambda: episodes.finish_async(episode))

    async def turn(self, episode: str) -> tuple[str, list[ChatMessage]]:
        """Return the role whose turn it is, and the messages that open its conversation."""
        play = self._episodes.turn

        async def turn() -> tuple[str, list[ChatMessage]]:
            return play(episode)

        return await self._play("turn", episode, turn)

    def drop(self, episode: str) -> None:
        """Forget an episode; the games' loop closes its game."""
        self._loop.post(self._episodes.drop, episode)

    def end_overdue(self) -> None:
        """Abandon the loop if it has been blocked for as long as a call may take."""
        if not self._loop.is_stuck(self._longest_s):
            return
        stuck, self._num_given_up = self._loop, self._num_given_up + 1
        stuck.post(self._episodes.drop_all)
        if self._num_given_up <= MAX_GIVEN_UP:
            self._begin()
            stuck.give_up(self._blocked("its episodes are lost"))
        else:
            stuck.give_up(self._blocked(f"it was given {MAX_GIVEN_UP} new ones before"))

    async def stop(self) -> None:
        """Cancel the running calls, close the games and end the loop."""
        self._loop.post(self._episodes.drop_all)
        await asyncio.to_thread(self._loop.end)

    def _begin(self) -> None:
        self._episodes = Episodes(self._class, self._kwargs)
        self._loop = ForeignLoop("async-games")

    def _blocked(self, outcome: str) -> GameError:
        return GameError(
            f"{self._class.__name__} held up its event loop for {self._longest_s:g} s: {outcome}",
            hint="an async game must await what takes long; write a game that computes "
            "without async",
        )

    async def _play(self, verb: str, episode: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Run a call in the games' loop, for as long as it may take."""
        loop, episodes, limit_s = self._loop, self._episodes, self._limits.of(verb)

        def drop(*_: object) -> None:
            episodes.drop(episode)

        async def limited() -> Any:
            task = asyncio.ensure_future(call())
            has_ended = False
            try:
                await asyncio.wait({task}, timeout=limit_s)
                has_ended = task.done() and not task.cancelled()
                if has_ended:
                    return task.result()
                if task.cancelled():  # not from here: the game has cancelled its own task
                    raise game_failure(name, verb, asyncio.CancelledError())
                raise hung(name, verb, limit_s)
            finally:
                if not has_ended:
                    task.add_done_callback(drop)
                    task.cancel()

        name = self._class.__name__
        blame = partial(game_failure, name, verb)
        return await loop.submit(limited, blame, undelivered=lambda: loop.post(drop))


# An event loop for coroutines of users, in its own thread. Their exceptions become TinkermqErrors.

_END_S = 5.0


class ForeignLoop:
    """Runs coroutines for callers on the event loop that made it."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._name = name
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._probed_at: float | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._turn, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        call: Callable[[], Awaitable[Any]],
        blame: Blame,
        undelivered: Callable[[], object] = lambda: None,
    ) -> "asyncio.Future[Any]":
        """Run a coroutine in the loop; return a future of the caller's loop.

        Cancelling the future cancels the coroutine. `blame` converts its exceptions into errors.
        `undelivered` is called if the future is cancelled and the coroutine has ended.
        """
        future: asyncio.Future[Any] = self._home.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        self._loop.call_soon_threadsafe(self._start, call, blame, future, undelivered)
        return future

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the loop soon, from any thread; not if the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def is_stuck(self, limit_s: float) -> bool:
        """Return whether the loop has been blocked for `limit_s`; call it repeatedly."""
        probed_at, now = self._probed_at, time.monotonic()  # the loop's thread may answer meanwhile
        if probed_at is None:
            self._probed_at = now
            self._loop.call_soon_threadsafe(self._answer)
        return probed_at is not None and now - probed_at >= limit_s

    def give_up(self, error: TinkermqError) -> None:
        """Fail all calls; the thread ends if the loop ever runs again."""
        self._ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(error)

    def end(self) -> None:
        """Cancel running coroutines, stop the loop and wait a few seconds for its thread."""
        self._ended = True
        self.post(self._loop.stop)
        self._thread.join(_END_S)

    def _turn(self) -> None:
        """Run the loop until the end, even if a coroutine stops it or raises SystemExit.

        asyncio passes both on from the loop, and also to the awaiting task.
        """
        with (
            contextlib.suppress(BaseException),
            asyncio.Runner(loop_factory=lambda: self._loop) as runner,
        ):
            loop = runner.get_loop()
            while not self._ended and not loop.is_closed():
                with contextlib.suppress(BaseException):
                    loop.run_forever()

    def _answer(self) -> None:
        self._probed_at = None

    def _start(
        self,
        call: Callable[[], Awaitable[Any]],
        blame: Blame,
        future: "asyncio.Future[Any]",
        undelivered: Callable[[], object],
    ) -> None:
        task = self._loop.create_task(self._finish(call, blame, future, undelivered))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        self._on_home(self._follow, future, task)

    async def _finish(
        self,
        call: Callable[[], Awaitable[Any]],
        blame: Blame,
        future: "asyncio.Future[Any]",
        undelivered: Callable[[], object],
    ) -> None:
        outcome: Any = None
        error: TinkermqError | None = None
        try:
            outcome = await call()
        except BaseException as raised:  # noqa: BLE001 - raised where the call was made
            ended = StateError(f"the event loop {self._name} has ended")
            error = ended if self._ended else blame(raised)
            clear_frames(raised)
        self._on_home(lambda: _settle(future, outcome, error) or undelivered())

    def _follow(self, future: "asyncio.Future[Any]", task: "asyncio.Task[None]") -> None:
        """Cancel the coroutine when it is no longer awaited."""

        def cancel(waited: "asyncio.Future[Any]") -> None:
            if waited.cancelled():
                self.post(task.cancel)

        future.add_done_callback(cancel)

    def _on_home(self, function: Callable[..., object], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: no waiter is left
            self._home.call_soon_threadsafe(function, *arguments)


def _settle(future: "asyncio.Future[Any]", outcome: Any, error: TinkermqError | None) -> bool:
    """Set a future's outcome; return False if it is done already."""
    if future.done():
        return False
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)
    return True
