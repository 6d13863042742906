"""Run games in processes of their own, so that games may hang and crash.

A process is killed together with the processes that its games started, such as a tool that hangs.

`num_workers` processes hold many episodes each and play one call at a time. When a process is
killed or dies, its episodes fail with the reason, the others continue, and the next reset starts a
new process in its place. Calls that are made while a process is dying wait for its end: a step then
fails with the reason, and a reset that had not begun goes to the new process.
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, cast

from ...schemas.wire import errors
from ...schemas.wire.codec import MAX_MESSAGE_BYTES, too_large, unpack
from ..game import ChatMessage, StepResult
from ..sandbox.sandbox import descendants
from .episodes import Call, GameFacts, Opening, TimeLimits, retrieve_error
from .worker import LENGTH

MAX_ANSWER_BYTES = 4 * MAX_MESSAGE_BYTES
"""Bound on an answer of a process, which has already checked the values of its games."""
_RESET_TRIES = 3
_EXIT_S = 2.0
"""A process that has closed its socket is killed after this time."""
SLOW_S = 0.5
"""New episodes avoid a process that has been at one call for longer."""


class WorkerGone(errors.GameError):
    """The process of an episode, running or starting, was ended because of another episode."""


@dataclass
class _Process:
    """A worker process, its calls in the order in which it plays them, and its episodes."""

    child: asyncio.subprocess.Process
    sock: socket.socket
    """Its socket, which `writer` closes."""
    writer: asyncio.StreamWriter
    calls: dict[int, Call] = field(default_factory=dict[int, Call])
    late: list[Call] = field(default_factory=list[Call])
    """Calls made while it was closing: none of them caused its end."""
    episodes: set[str] = field(default_factory=set[str])
    reader: "asyncio.Task[None] | None" = None
    is_closing: bool = False
    """Whether it reads no more calls and is about to end."""
    death: errors.GameError | None = None
    """Why it ended, for its other episodes."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has ended."""

    @property
    def lives(self) -> bool:
        return self.death is None and not self.is_closing

    def head(self) -> Call | None:
        return next(iter(self.calls.values()), None)

    def kill(self) -> None:
        """Kill it with all processes that it started; does nothing once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(signal.SIGSTOP)  # so that it starts no more processes
            started = set(descendants(self.child.pid)) - {self.child.pid}
            self.child.kill()
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def hang_up(self) -> None:
        """Close its socket when it ends: a process that its games forked may hold the other end.

        Data that it has sent can still be read.
        """
        await self.child.wait()
        with contextlib.suppress(OSError):  # it is closed already
            self.sock.shutdown(socket.SHUT_RD)


@dataclass
class _Slot:
    """A place for one process, and the lock under which it is started."""

    process: _Process | None = None
    num_opening: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def load(self) -> int:
        living = self.process if self.process and self.process.lives else None
        return self.num_opening + (len(living.episodes) if living else 0)

    def is_slow(self, now: float) -> bool:
        """Return whether the process has run one call for so long that others should not queue."""
        call = self.process.head() if self.process else None
        began = call.started if call else None
        return began is not None and now - began >= SLOW_S


class ProcessRunner:
    """Plays games in `num_workers` processes."""

    def __init__(
        self,
        game: str,
        kwargs: dict[str, Any],
        *,
        num_workers: int,
        limits: TimeLimits,
        worker_memory_mb: int | None = None,
    ) -> None:
        self._game = game
        self._kwargs = kwargs
        self._limits = limits
        self._worker_memory_mb = worker_memory_mb
        self._slots = [_Slot() for _ in range(num_workers)]
        self._homes: dict[str, _Process] = {}
        self._numbers = itertools.count()

    async def start(self) -> GameFacts:
        """Start the first process and make one game as a trial; return its description."""
        return await self._start_process(self._slots[0])

    async def reset(self, opening: Opening) -> list[ChatMessage]:
        """Start an episode in the process that holds the fewest, among those that are not slow.

        If the process ends before the reset begins, because of another episode, another one is
        used.
        """
        for _ in range(_RESET_TRIES - 1):
            with contextlib.suppress(WorkerGone):
                return await self._reset(opening)
        return await self._reset(opening)

    async def _reset(self, opening: Opening) -> list[ChatMessage]:
        now = time.monotonic()
        slot = min(self._slots, key=lambda slot: (slot.is_slow(now), slot.load))
        slot.num_opening += 1
        try:
            process = await self._living(slot)
        finally:
            slot.num_opening -= 1
        self._homes[opening.episode] = process
        process.episodes.add(opening.episode)
        try:
            return await self._send(process, "reset", opening.episode, (opening,))
        except BaseException:
            self.drop(opening.episode)
            raise

    async def step(self, episode: str, action: str) -> StepResult:
        """Play one action in the process that holds the episode."""
        return await self._played("step", episode, action)

    async def finish(self, episode: str) -> StepResult:
        """Return the last result of an episode that a limit ends."""
        return await self._played("finish", episode)

    async def _played(self, verb: str, episode: str, *arguments: str) -> StepResult:
        process = await self._home(episode)
        values = await self._send(process, verb, episode, (episode, *arguments))
        try:
            result = _result(values)
        except (TypeError, ValueError):
            self._forget(episode)
            raise self._broke_protocol("its answer to a step has another form") from None
        if result.done:
            self._forget(episode)
        return result

    async def turn(self, episode: str) -> tuple[str, list[ChatMessage]]:
        """Return the role whose turn it is, and the messages that open its conversation."""
        process = await self._home(episode)
        role, prompt = await self._send(process, "turn", episode, (episode,))
        return role, prompt

    async def _home(self, episode: str) -> _Process:
        """Return the living process of an episode; raises the reason if it has ended."""
        process = self._homes.get(episode)
        if process is None:
            raise errors.NotFoundError(f"episode {episode!r} has no running game here")
        if process.is_closing:
            await process.ended.wait()
        if process.death is not None:
            self._forget(episode)
            raise process.death
        return process

    def drop(self, episode: str) -> None:
        """Forget an episode, also in its process."""
        process = self._homes.get(episode)
        self._forget(episode)
        if process is not None and process.lives:
            dropped = self._send(process, "drop", episode, (episode,))
            dropped.add_done_callback(retrieve_error)  # it is not awaited

    def end_overdue(self) -> None:
        """Kill processes whose game has hung past its limit."""
        for slot in self._slots:
            process = slot.process
            call = process.head() if process else None
            if process and call and call.is_overdue:
                self._end(process, call, call.hung(self._game))

    async def stop(self) -> None:
        """Kill the processes and wait until they are gone."""
        processes = [slot.process for slot in self._slots if slot.process is not None]
        for process in processes:
            self._bury(process, errors.GameError(f"the host of {self._game} has stopped"))
        await asyncio.gather(*(process.reader for process in processes if process.reader))

    async def _living(self, slot: _Slot) -> _Process:
        async with slot.lock:
            if slot.process is not None and slot.process.is_closing:
                await slot.process.ended.wait()
            if slot.process is None or slot.process.death is not None:
                await self._start_process(slot)
            assert slot.process is not None
            return slot.process

    async def _start_process(self, slot: _Slot) -> GameFacts:
        try:
            process = slot.process = await self._spawn()
        except OSError as error:
            raise errors.GameError(
                f"no process could be started for {self._game}: {error}",
                hint="see the machine's memory, and its limits on processes and open files",
            ) from error
        try:
            await self._send(process, "import", "", (self._game, sys.path, self._kwargs))
            made = (self._kwargs, self._worker_memory_mb)
            return GameFacts(*await self._send(process, "start", "", made))
        except BaseException as error:
            reason = (
                error.message if isinstance(error, errors.TinkermqError) else "it was cancelled"
            )
            self._bury(process, WorkerGone(f"a process of {self._game} did not start: {reason}"))
            raise

    async def _spawn(self) -> _Process:
        ours, theirs = socket.socketpair()
        async with contextlib.AsyncExitStack() as undone:
            undone.enter_context(ours)
            undone.enter_context(theirs)
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # a queue.py in the working folder must not hide Python's
                "-m",
                f"{__package__}.worker",
                str(theirs.fileno()),
                str(os.getpid()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # output of games goes to the host's log
            )
            undone.push_async_callback(child.wait)
            undone.callback(child.kill)
            theirs.close()
            incoming, writer = await asyncio.open_connection(sock=ours)
            process = _Process(child, ours, writer)
            process.reader = asyncio.create_task(self._read(process, incoming), name="env_worker")
            undone.pop_all()
            return process

    def _send(
        self, process: _Process, verb: str, episode: str, arguments: Any
    ) -> "asyncio.Future[Any]":
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        body = pickle.dumps((number, verb, arguments))
        call = Call(verb, episode, self._limits.of(verb), future, started=time.monotonic())
        if process.lives:
            process.calls[number] = call
            process.writer.write(LENGTH.pack(len(body)) + body)
        elif process.death is not None:
            future.set_exception(process.death)
        else:
            process.late.append(call)
        return future

    async def _read(self, process: _Process, incoming: asyncio.StreamReader) -> None:
        """Deliver the answers of a process until it ends, then record how it ended."""
        hanging_up = asyncio.create_task(process.hang_up(), name="env_worker_end")
        try:
            while True:
                head = await incoming.readexactly(LENGTH.size)
                num_bytes = LENGTH.unpack(head)[0]
                if num_bytes > MAX_ANSWER_BYTES:
                    raise too_large(num_bytes, MAX_ANSWER_BYTES)
                self._settle(process, await incoming.readexactly(num_bytes))
        except (asyncio.IncompleteReadError, OSError):
            pass  # the process has ended
        except (errors.MessageError, ValueError, TypeError) as error:
            self._end(process, process.head(), self._broke_protocol(str(error)))
        finally:
            hanging_up.cancel()
        process.is_closing = True
        process.writer.close()
        lingers = False
        try:
            async with asyncio.timeout(_EXIT_S):
                code = await process.child.wait()
        except TimeoutError:
            lingers = process.death is None
            process.kill()
            code = await process.child.wait()
        self._end(process, process.head(), self._crashed(process.head(), code, lingers=lingers))

    def _settle(self, process: _Process, payload: bytes) -> None:
        number, outcome, error = unpack(payload, max_bytes=MAX_ANSWER_BYTES)
        call = process.calls.pop(number, None)
        if (following := process.head()) is not None:
            following.started = time.monotonic()
        if call is None or call.future.done():
            return
        if error is None:
            call.future.set_result(outcome)
        else:
            call.future.set_exception(errors.error_from_reply(*error))

    def _broke_protocol(self, why: str) -> errors.GameError:
        return errors.GameError(
            f"{self._game} broke its pipe: {why}",
            hint="code of the game writes to the socket of its process, or replaces parts of ours",
        )

    def _crashed(self, call: Call | None, code: int, *, lingers: bool) -> errors.GameError:
        how = f"by signal {_signal_name(-code)}" if code < 0 else f"with exit code {code}"
        how = f"{how} after it had closed its socket" if lingers else how
        where = f" in {call.verb}" if call else ""
        return errors.GameError(
            f"the process of {self._game} ended {how}{where}",
            hint="a crash of native code, os._exit, or the out-of-memory killer; see the log",
        )

    def _end(self, process: _Process, culprit: Call | None, error: errors.GameError) -> None:
        """Fail the call that caused the end with `error`, and the others with WorkerGone."""
        if culprit is not None and not culprit.future.done():
            culprit.future.set_exception(error)
        self._bury(
            process,
            WorkerGone(
                f"the process of this episode was ended because of another: {error.message}",
                hint="the episode can be tried again",
            ),
        )

    def _bury(self, process: _Process, reason: errors.GameError) -> None:
        if process.death is not None:
            return
        process.death = reason
        process.kill()
        for call in (*process.calls.values(), *process.late):
            if not call.future.done():
                call.future.set_exception(reason)
        process.calls.clear()
        process.late.clear()
        process.ended.set()

    def _forget(self, episode: str) -> None:
        process = self._homes.pop(episode, None)
        if process is not None:
            process.episodes.discard(episode)


_TYPES = (str, float, bool, dict, str, dict, list)
"""Types of the fields of a StepResult."""


def _result(values: Any) -> StepResult:
    """Return a process's answer to a step; TypeError or ValueError for one of another form."""
    result = StepResult(*values)
    if not (
        all(isinstance(value, kind) for value, kind in zip(values, _TYPES, strict=True))
        and result.role in ("user", "tool")
        and all(isinstance(text, str) for text in cast("list[Any]", result.tool_results))
    ):
        raise TypeError("not an answer to a step")
    return result


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
