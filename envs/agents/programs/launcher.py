"""Starts the programs of a host and sees to their end: folders, sandboxes, limits, output.

The kernel bounds what a single process and a user may do. How much memory a program's processes
hold together, and how much its folders take, is read by one thread for all programs of a host,
often enough that what is over a limit is over it for moments: ten times a second, or as often as
takes a tenth of the time.
"""

import asyncio
import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from ....schemas.config.agent import AgentConfig
from ....schemas.wire.errors import GameError, SandboxError, StorageError
from ...sandbox import bubblewrap
from ...sandbox.sandbox import Limit, Sandbox, holds_more
from ..episode import ProgramEpisode
from .folders import ProgramFolder, ProgramFolders, RootFiles, check_folder, check_shown
from .sandbox import ImageRoot, ProgramSandboxes, Reach, TaskView, refuse_shown

# Output: the end of it, read by one thread for all programs of a host. A flood is read a little
# more slowly than it could be, so that it costs a bounded part of a core.

RING_BYTES = 256 << 10
"""What is kept of each stream."""
TAIL_BYTES = 8 << 10
"""What an episode reports."""
_CHUNK = 64 << 10
_PAUSE_S = 0.005


class Ring:
    """The last bytes of a stream."""

    def __init__(self, most: int = RING_BYTES) -> None:
        self._most = most
        self._bytes = bytearray()

    def add(self, chunk: bytes) -> None:
        """Add bytes, and forget the oldest of too many."""
        self._bytes += chunk
        if len(self._bytes) > 2 * self._most:  # seldom, since it moves what is kept
            del self._bytes[: -self._most]

    def end(self, most: int = RING_BYTES) -> bytes:
        """Return the end of it, at most so many bytes."""
        return bytes(self._bytes[-min(most, self._most) :])

    def text(self, most: int = RING_BYTES) -> str:
        """Return the end of it as text."""
        return self.end(most).decode("utf-8", "replace")


@dataclass(eq=False)
class Printed:
    """What one program has printed."""

    out: Ring = field(default_factory=Ring)
    """Its standard output."""
    errors: Ring = field(default_factory=lambda: Ring(TAIL_BYTES // 2))
    """The last of its errors."""
    both: Ring = field(default_factory=Ring)
    """Its standard output and its errors, as they came."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when both streams have ended."""
    num_open: int = 2
    """Streams that have not."""

    def tail(self) -> str:
        """Return the end of what it printed, for people.

        Two pipes have no common order: errors that a flood of output has pushed out stand first.
        """
        errors, tail = self.errors.end(), self.both.end(TAIL_BYTES)
        if errors not in tail:
            tail = errors + tail[len(errors) - TAIL_BYTES :]
        return tail.decode("utf-8", "replace")


@dataclass(frozen=True, eq=False)
class _Stream:
    printed: Printed
    is_out: bool

    def add(self, chunk: bytes) -> None:
        (self.printed.out if self.is_out else self.printed.errors).add(chunk)
        self.printed.both.add(chunk)


class OutputReader:
    """The thread that reads what all programs print."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._new: deque[tuple[int, _Stream]] = deque()
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._read, name="program-output", daemon=True)
        self._thread.start()

    def follow(self, out: int, errors: int) -> Printed:
        """Read two pipes to their end and close them."""
        printed = Printed()
        for file, is_out in ((out, True), (errors, False)):
            os.set_blocking(file, False)
            self._new.append((file, _Stream(printed, is_out)))
        os.write(self._wake, b".")
        return printed

    def stop(self) -> None:
        """End the thread, and close what is still open."""
        self._stopping = True
        os.write(self._wake, b".")
        self._thread.join()
        for file in [file for file, _ in self._new] + [
            key.fd for key in self._selector.get_map().values()
        ]:
            os.close(file)
        self._selector.close()
        os.close(self._wake)

    def _read(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(key.fd, _CHUNK)
                else:
                    self._take(key.fd, key.data)
            while self._new:
                file, stream = self._new.popleft()
                self._selector.register(file, selectors.EVENT_READ, stream)
            time.sleep(_PAUSE_S)

    def _take(self, file: int, stream: _Stream) -> None:
        try:
            chunk = os.read(file, _CHUNK)
        except BlockingIOError:
            return
        if chunk:
            stream.add(chunk)
            return
        self._selector.unregister(file)
        os.close(file)
        stream.printed.num_open -= 1
        if not stream.printed.num_open:
            stream.printed.ended.set()


T = TypeVar("T")
_MAX_WORKERS = 32
_LAST_WORDS_S = 5.0
_LOOK_S = 0.1
_LEAST_DISK_LOOK_S = 0.3
_SHARE = 10
_LEAST_FILES = 20_000
_MIB = 1 << 20


class ModelEndpoint(Protocol):
    """Where programs find the model: the proxy of a host, which listens as a context manager."""

    async def __aenter__(self) -> object:
        """Listen."""
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Listen no more."""
        ...

    @property
    def base_url(self) -> str:
        """Its URL for who shares the host's network, without `/v1`."""
        ...

    def open(self, episode: ProgramEpisode) -> None:
        """Answer the calls of an episode from now on."""
        ...

    def close(self, episode: str) -> None:
        """Answer them no more."""
        ...

    def env_of(self, episode: ProgramEpisode, base_url: str) -> dict[str, str]:
        """Return the variables by which a program finds the model at `base_url`."""
        ...

    def listen(self, listening: socket.socket) -> contextlib.AbstractAsyncContextManager[object]:
        """Answer at a socket that listens, too; the context's end closes it."""
        ...


@dataclass(frozen=True)
class Running:
    """A program that runs, and whether it has gone over a limit."""

    program: "RunningProgram"
    over: "asyncio.Future[Limit]"


class RunningProgram:
    """A program that runs."""

    def __init__(self, process: bubblewrap.SandboxProcess, printed: Printed) -> None:
        self.first = process.first
        """The first process of its sandbox."""
        self.printed = printed
        self._process = process
        self.ended = asyncio.ensure_future(process.ended())
        """Its exit code, 128 and the signal's number for one that a signal ended; done when no
        process of it is left."""

    def terminate(self) -> None:
        """Ask it and the processes of its group to end."""
        self._process.terminate()

    async def kill(self) -> int:
        """End it with all its processes; return its exit code when all are gone."""
        if not self.ended.done():
            self._process.kill()
        return await asyncio.shield(self.ended)

    async def close(self) -> None:
        """Give back what it holds here; it has ended."""
        await self.ended
        self._process.close()


class ProgramLauncher:
    """Starts programs in sandboxes, each with a folder of its own."""

    def __init__(self, config: AgentConfig, private: Sequence[Path] = ()) -> None:
        """Look at what the configuration names; blocks, and starts threads.

        Raises ConfigError for a folder that cannot be used, SandboxError for a machine that cannot
        sandbox programs, and OSError for one without room for their folders.
        """
        files, grader = config.files, config.reward_files
        self.files = None if files is None else check_folder("agent.files", files)
        self.grader = None if grader is None else check_shown("agent.reward_files", grader)
        self.folders = ProgramFolders()
        self._image: ImageRoot | None = None
        try:
            self._image = None if config.image is None else ImageRoot(config.image)
            hidden = [*private, self.folders.path, *([self.grader] if self.grader else [])]
            self.sandboxes = ProgramSandboxes(config, hidden, self._image)
            if self.files is not None:
                refuse_shown({"agent.files": self.files}, hidden)
        except BaseException:
            self._give_back()
            raise
        self._config = config
        self._reader = OutputReader()
        self._watch = LimitWatch()
        self._workers = ThreadPoolExecutor(
            min(_MAX_WORKERS, config.per_host + 1), thread_name_prefix="programs"
        )

    async def blocking(self, call: Callable[[], T]) -> T:
        """Do something with files in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)

    @contextlib.asynccontextmanager
    async def folder(
        self, files: Path | None, user: int | None = None, root: RootFiles | None = None
    ) -> AsyncIterator[ProgramFolder]:
        """Make a folder with copies of `files` and of a task's `root`; remove it in the end.

        Raises SandboxError where there is no room.
        """
        folder = self.folders.new(user)
        try:
            try:
                most = self._config.disk_mb << 20
                await self.blocking(lambda: folder.make(files, most, root))
            except StorageError as error:
                raise SandboxError(
                    f"{error.message}: more than agent.disk_mb={self._config.disk_mb}",
                    hint="raise agent.disk_mb, or name a smaller folder",
                ) from error
            except OSError as error:
                raise SandboxError(
                    f"a program's folder cannot be made: {error}",
                    hint="see the room in the host's temporary folder ($TMPDIR)",
                ) from error
            yield folder
        finally:
            await bubblewrap.finish(self.blocking(folder.remove))

    @contextlib.asynccontextmanager
    async def running(
        self,
        folder: ProgramFolder,
        command: Sequence[str],
        environment: Mapping[str, str],
        reach: Reach,
        *,
        endpoint: ModelEndpoint | None = None,
        more: Mapping[str, Path] | None = None,
        view: TaskView | None = None,
    ) -> AsyncIterator[Running]:
        """Run a program; in the end no process of it is left, whatever it has done.

        With `view` it is one stage of a task. Raises SandboxError where its sandbox cannot be set
        up, with the remedy, and GameError for a command that cannot be run.
        """
        sandboxes = self.sandboxes
        if view is None:
            sandbox = sandboxes.sandbox(folder, reach, more)
        else:
            sandbox = sandboxes.task_sandbox(folder, reach, view)
            await self.blocking(folder.clear_root)
        program, listening = await self._start(
            sandbox, bubblewrap.Program(command, environment=sandboxes.variables(environment, view))
        )
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Limit] = loop.create_future()
        config = self._config
        watched = Watched(
            program.first,
            folder,
            config.memory_mb,
            config.disk_mb,
            over=lambda limit: _tell(loop, over, limit),
        )
        self._watch.add(watched)
        try:
            async with _answered(endpoint, listening):
                yield Running(program, over)
        finally:
            self._watch.remove(watched)
            await bubblewrap.finish(self._end(program))

    async def close(self) -> None:
        """Give everything back; no program runs any more."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._watch.stop()
        self._reader.stop()
        self._workers.shutdown()
        self._give_back()

    def _give_back(self) -> None:
        self.folders.close()
        if self._image is not None:
            self._image.close()

    async def _start(
        self, sandbox: Sandbox, program: bubblewrap.Program
    ) -> tuple[RunningProgram, socket.socket | None]:
        """Start a program; return it with the socket on which it finds the model, if it is to."""
        out, out_in = os.pipe()
        errors, errors_in = os.pipe()
        try:
            process = await bubblewrap.start_in_thread(
                sandbox, program, stdout=out_in, stderr=errors_in, executor=self._workers
            )
        except BaseException as error:
            for file in (out, errors):
                os.close(file)
            if (explained := _explained(error)) is not None:
                raise explained from error
            raise
        finally:
            for file in (out_in, errors_in):
                os.close(file)
        printed = self._reader.follow(out, errors)
        return RunningProgram(process, printed), next(iter(process.sockets), None)

    async def _end(self, program: RunningProgram) -> None:
        """End a program and read what it printed last."""
        await program.kill()
        await self.blocking(lambda: program.printed.ended.wait(_LAST_WORDS_S))
        await program.close()


@dataclass(eq=False)
class Watched:
    """A program that is looked after."""

    first: int
    """The first process of its sandbox."""
    folder: ProgramFolder
    memory_mb: int
    disk_mb: int
    over: Callable[[Limit], None]
    """Called once, in the thread, when it is over a limit."""
    next_disk_look: float = 0.0

    def exceeded(self, now: float) -> Limit | None:
        """Return the limit that it is over."""
        if holds_more(self.first, self.memory_mb * _MIB):
            return "memory"
        if now < self.next_disk_look:
            return None
        most_files = max(_LEAST_FILES, self.disk_mb << 8)  # each takes room of its own
        used = self.folder.usage(most_files)
        took_s = time.monotonic() - now
        self.next_disk_look = now + max(_LEAST_DISK_LOOK_S, _SHARE * took_s)
        too_much = used.num_bytes > self.disk_mb * _MIB or used.num_files > most_files
        return "disk" if too_much else None


class LimitWatch:
    """The thread that looks after programs."""

    def __init__(self) -> None:
        self._watched: list[Watched] = []
        self._changed = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="program-limits", daemon=True)
        self._thread.start()

    def add(self, watched: Watched) -> None:
        """Look after a program from now on."""
        self._watched = [*self._watched, watched]
        self._changed.set()

    def remove(self, watched: Watched) -> None:
        """Look after it no more; harmless when repeated."""
        self._watched = [other for other in self._watched if other is not watched]

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._changed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping:
            if not self._watched:
                self._changed.wait()
                self._changed.clear()
            began = time.thread_time()  # a loaded machine is no reason to look seldom
            for watched in self._watched:
                if (limit := watched.exceeded(time.monotonic())) is not None:
                    self.remove(watched)
                    watched.over(limit)
            time.sleep(max(_LOOK_S, _SHARE * (time.thread_time() - began)))


def _explained(error: BaseException) -> GameError | SandboxError | None:
    """Return the error of a start in the words of a job; None for one that says all."""
    if isinstance(error, bubblewrap.CommandError):
        return GameError(
            error.message,
            hint="see agent.command; programs see the system's folders, the pool's interpreter and "
            "agent.read",
        )
    if isinstance(error, OSError):
        return SandboxError(
            f"no program can be started: {error}", hint="see the limits of the host's user"
        )
    return None


@contextlib.asynccontextmanager
async def _answered(
    endpoint: ModelEndpoint | None, listening: socket.socket | None
) -> AsyncIterator[None]:
    """Let the model answer at a program's socket while it runs."""
    if listening is None:
        yield
    elif endpoint is None:
        with listening:
            yield
    else:
        async with endpoint.listen(listening):
            yield


def _tell(loop: asyncio.AbstractEventLoop, over: "asyncio.Future[Limit]", limit: Limit) -> None:
    """Tell, from another thread, that a program is over a limit."""

    def settle() -> None:
        if not over.done():
            over.set_result(limit)

    loop.call_soon_threadsafe(settle)
