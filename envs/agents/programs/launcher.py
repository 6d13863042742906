"""What a host's programs share: their walls and folders, the threads that look after them."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ....schemas.config.agent import AgentConfig
from ....schemas.wire.errors import SandboxError, StorageError
from ..containers.image_root import ImageRoot
from ..episode import ProgramEpisode
from .folders import ProgramFolder, ProgramFolders, check_folder, check_shown
from .limits import Limit, LimitWatch, Watched
from .output import OutputReader
from .process import Launch, WalledProgram, start, surely
from .walls import ProgramWalls, Reach, refuse_shown

T = TypeVar("T")
_MAX_WORKERS = 32
_LAST_WORDS_S = 5.0


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

    program: WalledProgram
    over: "asyncio.Future[Limit]"


class ProgramLauncher:
    """Starts programs behind walls, each with a folder of its own."""

    def __init__(self, config: AgentConfig, private: Sequence[Path] = ()) -> None:
        """Look at what the configuration names; blocks, and starts threads.

        Raises ConfigError for a folder that cannot be used, SandboxError for a machine that cannot
        enclose programs, and OSError for one without room for their folders.
        """
        files, grader = config.files, config.reward_files
        self.files = None if files is None else check_folder("agent.files", files)
        self.grader = None if grader is None else check_shown("agent.reward_files", grader)
        self.folders = ProgramFolders()
        self._image: ImageRoot | None = None
        try:
            self._image = None if config.image is None else ImageRoot(config.image)
            hidden = [*private, self.folders.path, *([self.grader] if self.grader else [])]
            self.walls = ProgramWalls(config, hidden, self._image)
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
        self, files: Path | None, user: int | None = None
    ) -> AsyncIterator[ProgramFolder]:
        """Make a folder with a copy of `files` and remove it in the end.

        Raises SandboxError where there is no room.
        """
        folder = self.folders.new(user)
        try:
            try:
                most = self._config.disk_mb << 20
                await self.blocking(lambda: folder.make(files, most))
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
            await surely(self.blocking(folder.remove))

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
        processes: int = 0,
    ) -> AsyncIterator[Running]:
        """Run a program; in the end no process of it is left, whatever it has done.

        Raises SandboxError and GameError as `process.start` does.
        """
        launch = Launch(
            self.walls.command_line(folder, reach, more),
            self.walls.python,
            self.walls.filter,
            self.walls.orders(folder.user, reach, processes),
            command,
            self.walls.variables(environment),
        )
        program, listening = await start(launch, self._reader, self._workers)
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
            await surely(self._end(program))

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

    async def _end(self, program: WalledProgram) -> None:
        """End a program and hear its last words."""
        await program.kill()
        await self.blocking(lambda: program.printed.ended.wait(_LAST_WORDS_S))
        await program.close()


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
