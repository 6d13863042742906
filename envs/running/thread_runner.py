"""Run games in threads of the host's own process: the fastest way, for games that behave.

Worker threads take work from one queue and put finished work on another. They are woken once for
all that was asked within one turn of the event loop, and the loop once for all that finished
meanwhile, so that many short steps share the cost of a wake-up.
A thread cannot be killed: one that hangs past its limit is given up and replaced, a bounded
number of times.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from ...schemas.wire.errors import GameError, TinkermqError
from ..game import AbstractGame, ChatMessage, StepResult, game_failure
from .episodes import Call, Episodes, GameFacts, Opening, TimeLimits

MAX_GIVEN_UP = 16
"""Threads hung at the same time that are replaced; past it the host says it cannot go on."""


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
        except BaseException as error:  # noqa: BLE001 - handed on to the one who asked
            self.error = game_failure("the game", self.verb, error)

    def finish(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.outcome)
        else:
            self.future.set_exception(self.error)


@dataclass
class _Worker:
    """One thread, and the work that it is at."""

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
        self._name = game_class.__name__
        self._num_workers = num_workers
        self._limits = limits
        self._queue: deque[_Work] = deque()
        self._num_new = 0
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        """A worker takes one and plays until the queue is empty; False ends a worker."""
        self._finished: deque[_Work] = deque()
        self._waking = threading.Lock()
        self._workers: list[_Worker] = []
        self._num_given_up = 0
        self._loop: asyncio.AbstractEventLoop

    async def start(self) -> GameFacts:
        """Start the threads and make one game as a trial; return what it tells of itself."""
        self._loop = asyncio.get_running_loop()
        for _ in range(self._num_workers):
            self._add_worker()
        return await self._submit("__init__", "", self._episodes.probe)

    def reset(self, opening: Opening) -> "asyncio.Future[list[ChatMessage]]":
        """Start an episode."""
        return self._submit("reset", opening.episode, lambda: self._episodes.reset(opening))

    def step(self, episode: str, action: str) -> "asyncio.Future[StepResult]":
        """Play one action."""
        return self._submit("step", episode, lambda: self._episodes.step(episode, action))

    def turn(self, episode: str) -> "asyncio.Future[tuple[str, list[ChatMessage]]]":
        """Say whose turn it is, and what opens that role's conversation."""
        return self._submit("turn", episode, lambda: self._episodes.turn(episode))

    def drop(self, episode: str) -> None:
        """Forget an episode."""
        self._episodes.drop(episode)

    def end_overdue(self) -> None:
        """Give up threads whose game has hung past its limit, and fail its episode."""
        for worker in list(self._workers):
            if (work := worker.work) is not None and work.is_overdue:
                self._give_up(worker, work)
        if not self._workers:
            self._refuse_queued()

    async def stop(self) -> None:
        """Let the threads end; one that hangs ends with the process."""
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
        """Play what is in the queue until told to stop, or until given up."""
        while self._wakes.get():
            while True:
                try:
                    work = self._queue.popleft()
                except IndexError:
                    break
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
        """Wake the event loop unless it has been woken already and not yet looked."""
        if self._waking.acquire(blocking=False):
            self._on_loop(self._collect)

    def _on_loop(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function)

    def _collect(self) -> None:
        self._waking.release()
        while self._finished:
            self._finished.popleft().finish()

    def _give_up(self, worker: _Worker, work: _Work) -> None:
        worker.given_up = True
        self._workers.remove(worker)
        self._num_given_up += 1
        if self._num_given_up <= MAX_GIVEN_UP:
            self._add_worker()
            self._wakes.put(True)  # for what it may have left in the queue
        work.error = work.hung(self._name)
        work.finish()

    def _return_thread(self) -> None:
        """A thread that had been given up came back, and ended: its place is free again."""
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
