"""Start and end the programs of a host, with their folders, sandboxes, limits and output.

The kernel bounds single processes and users. One thread measures the memory of the processes and
the size of the folders of all programs of a host: ten times a second, or less often if that takes
more than a tenth of its time.
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
from ....schemas.local.folder import Folder
from ....schemas.local.process import finish
from ....schemas.wire.errors import GameError, SandboxError, StorageError
from ...sandbox import bubblewrap
from ...sandbox.sandbox import Limit, Sandbox, holds_more
from ..episode import ProgramEpisode
from .folders import ProgramFolder, ProgramFolders, RootFiles, check_shown, open_folder
from .sandbox import ImageRoot, ProgramSandboxes, Reach, TaskView, refuse_shown

# Output: one thread reads that of all programs of a host, and keeps its end. It reads a flood
# slowly enough to use a bounded part of a core.

RING_BYTES = 256 << 10
"""Bytes kept of each stream."""
TAIL_BYTES = 8 << 10
"""Bytes that an episode reports."""
_CHUNK = 64 << 10
_PAUSE_S = 0.005


class Ring:
    """The last bytes of a stream."""

    def __init__(self, most: int = RING_BYTES) -> None:
        self._most = most
        self._bytes = bytearray()

    def add(self, chunk: bytes) -> None:
        """Add bytes, and drop the oldest beyond the bound."""
        self._bytes += chunk
        if len(self._bytes) > 2 * self._most:  # done rarely, since it moves the rest
            del self._bytes[: -self._most]

    def end(self, most: int = RING_BYTES) -> bytes:
        """Return the end of the stream, at most so many bytes."""
        return bytes(self._bytes[-min(most, self._most) :])

    def text(self, most: int = RING_BYTES) -> str:
        """Return its end as text."""
        return self.end(most).decode("utf-8", "replace")


@dataclass(eq=False)
class Printed:
    """The output of one program."""

    out: Ring = field(default_factory=Ring)
    """Its standard output."""
    errors: Ring = field(default_factory=lambda: Ring(TAIL_BYTES // 2))
    """The end of its standard error."""
    both: Ring = field(default_factory=Ring)
    """Standard output and standard error, in order of arrival."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when both streams have ended."""
    num_open: int = 2
    """Streams that have not ended."""

    def tail(self) -> str:
        """Return the end of its output, for people.

        The two pipes have no common order. Errors that newer output has displaced come first.
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
    """The thread that reads the output of all programs."""

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
        """End the thread, and close all open pipes."""
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
                    self._read_some(key.fd, key.data)
            while self._new:
                file, stream = self._new.popleft()
                self._selector.register(file, selectors.EVENT_READ, stream)
            time.sleep(_PAUSE_S)

    def _read_some(self, file: int, stream: _Stream) -> None:
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
    """The endpoint of the model for programs: a host's proxy, as a context manager."""

    async def __aenter__(self) -> object:
        """Listen."""
        ...

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop listening."""
        ...

    @property
    def base_url(self) -> str:
        """Its URL in the host's network, without `/v1`."""
        ...

    def open(self, episode: ProgramEpisode) -> None:
        """Answer the calls of an episode from now on."""
        ...

    def close(self, episode: str) -> None:
        """Answer them no longer."""
        ...

    def env_of(self, episode: ProgramEpisode, base_url: str) -> dict[str, str]:
        """Return a program's variables for the model at `base_url`."""
        ...

    def listen(self, listening: socket.socket) -> contextlib.AbstractAsyncContextManager[object]:
        """Answer also at a listening socket; the end of the context closes it."""
        ...


@dataclass(frozen=True)
class Running:
    """A running program, and whether it exceeds a limit."""

    program: "RunningProgram"
    over: "asyncio.Future[Limit]"


class RunningProgram:
    """A running program."""

    def __init__(self, process: bubblewrap.SandboxProcess, printed: Printed) -> None:
        self.first = process.first
        """The first process of its sandbox."""
        self.printed = printed
        self._process = process
        self.ended = asyncio.ensure_future(process.ended())
        """Its exit code, 128 plus the signal's number if a signal ended it; done when no process
        is left."""

    def terminate(self) -> None:
        """Send SIGTERM to it and the processes of its group."""
        self._process.terminate()

    async def kill(self) -> int:
        """Kill it with all its processes; return its exit code when all have ended."""
        if not self.ended.done():
            self._process.kill()
        return await asyncio.shield(self.ended)

    async def close(self) -> None:
        """Close the files of an ended program."""
        await self.ended
        self._process.close()


class ProgramLauncher:
    """Starts programs in sandboxes, each with its own folder."""

    def __init__(
        self,
        config: AgentConfig,
        private: Sequence[Path] = (),
        may_read: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Open the folders of the configuration; blocks, and starts threads.

        `may_read` raises ConfigError for a path that the job's owner may not read. Raises
        ConfigError for a folder that cannot be used, SandboxError if the machine cannot sandbox
        programs, and OSError if their folders cannot be made.
        """
        self._opened = contextlib.ExitStack()
        try:
            self.files = self.grader = None
            if config.files is not None:
                files = open_folder("agent.files", config.files, may_read)
                self.files = self._opened.enter_context(files)
            if config.reward_files is not None:
                grader = open_folder("agent.reward_files", config.reward_files, may_read)
                self.grader = self._opened.enter_context(grader)
                check_shown("agent.reward_files", grader)
            read = [
                self._opened.enter_context(open_folder("agent.read", path, may_read))
                for path in config.read
            ]
            self.folders = ProgramFolders()
            self._opened.callback(self.folders.close)
            image = None if config.image is None else ImageRoot(config.image)
            if image is not None:
                self._opened.callback(image.close)
            hidden = [*private, self.folders.path, *([self.grader.path] if self.grader else [])]
            self.sandboxes = ProgramSandboxes(config, read, hidden, image)
            for folder in read:
                check_shown("agent.read", folder)
            if self.files is not None:
                refuse_shown({"agent.files": self.files.path}, hidden)
        except BaseException:
            self._opened.close()
            raise
        self._config = config
        self._reader = OutputReader()
        self._watch = LimitWatch()
        self._workers = ThreadPoolExecutor(
            min(_MAX_WORKERS, config.per_host + 1), thread_name_prefix="programs"
        )

    async def blocking(self, call: Callable[[], T]) -> T:
        """Run work on files in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)

    @contextlib.asynccontextmanager
    async def folder(
        self, files: Folder | None, user: int | None = None, root: RootFiles | None = None
    ) -> AsyncIterator[ProgramFolder]:
        """Make a folder with copies of `files` and of a task's `root`; remove it in the end.

        Raises SandboxError without room.
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
            await finish(self.blocking(folder.remove))

    @contextlib.asynccontextmanager
    async def running(
        self,
        folder: ProgramFolder,
        command: Sequence[str],
        environment: Mapping[str, str],
        reach: Reach,
        *,
        endpoint: ModelEndpoint | None = None,
        more: Mapping[str, Folder] | None = None,
        view: TaskView | None = None,
    ) -> AsyncIterator[Running]:
        """Run a program; the end of the context leaves no process of it.

        With `view` it is one stage of a task. Raises SandboxError with what to do if its sandbox
        cannot be set up, and GameError for a command that cannot be run.
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
            over=lambda limit: _report_limit(loop, over, limit),
        )
        self._watch.add(watched)
        try:
            async with _answered(endpoint, listening):
                yield Running(program, over)
        finally:
            self._watch.remove(watched)
            await finish(self._end(program))

    async def close(self) -> None:
        """Remove the folders and end the threads, after all programs have ended."""
        await asyncio.to_thread(self.close_at_once)

    def close_at_once(self) -> None:
        """Do the same; blocks."""
        self._watch.stop()
        self._reader.stop()
        self._workers.shutdown()
        self._opened.close()

    async def _start(
        self, sandbox: Sandbox, program: bubblewrap.Program
    ) -> tuple[RunningProgram, socket.socket | None]:
        """Start a program; return it with the socket for the model, if it uses one."""
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
        """Kill a program and read its last output."""
        await program.kill()
        await self.blocking(lambda: program.printed.ended.wait(_LAST_WORDS_S))
        await program.close()


@dataclass(eq=False)
class Watched:
    """A program whose limits are checked."""

    first: int
    """The first process of its sandbox."""
    folder: ProgramFolder
    memory_mb: int
    disk_mb: int
    over: Callable[[Limit], None]
    """Called once, in the thread, when it exceeds a limit."""
    next_disk_look: float = 0.0

    def exceeded(self, now: float) -> Limit | None:
        """Return the limit that it exceeds."""
        if holds_more(self.first, self.memory_mb * _MIB):
            return "memory"
        if now < self.next_disk_look:
            return None
        most_files = max(_LEAST_FILES, self.disk_mb << 8)  # each takes room
        used = self.folder.usage(most_files)
        took_s = time.monotonic() - now
        self.next_disk_look = now + max(_LEAST_DISK_LOOK_S, _SHARE * took_s)
        too_much = used.num_bytes > self.disk_mb * _MIB or used.num_files > most_files
        return "disk" if too_much else None


class LimitWatch:
    """The thread that checks the limits of programs."""

    def __init__(self) -> None:
        self._watched: list[Watched] = []
        self._changed = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="program-limits", daemon=True)
        self._thread.start()

    def add(self, watched: Watched) -> None:
        """Start to check a program."""
        self._watched = [*self._watched, watched]
        self._changed.set()

    def remove(self, watched: Watched) -> None:
        """Stop checking it; may be repeated."""
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
            began = time.thread_time()  # CPU time: a loaded machine must not slow the checks
            for watched in self._watched:
                if (limit := watched.exceeded(time.monotonic())) is not None:
                    self.remove(watched)
                    watched.over(limit)
            time.sleep(max(_LOOK_S, _SHARE * (time.thread_time() - began)))


def _explained(error: BaseException) -> GameError | SandboxError | None:
    """Return a start's error in terms of the job; None if the error is clear already."""
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
    """Answer at a program's socket while it runs."""
    if listening is None:
        yield
        return
    with listening:
        if endpoint is None:
            yield
        else:
            async with endpoint.listen(listening):
                yield


def _report_limit(
    loop: asyncio.AbstractEventLoop, over: "asyncio.Future[Limit]", limit: Limit
) -> None:
    """Report from another thread that a program exceeds a limit."""

    def settle() -> None:
        if not over.done():
            over.set_result(limit)

    loop.call_soon_threadsafe(settle)
