"""Run programs as a host's episodes: `reset` starts one, its only `step` waits for its end."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from ....broker.client.fair_queue import end_tasks
from ....schemas.config.agent import AgentConfig
from ....schemas.local.process import owned
from ....schemas.wire.errors import ConfigError, NotFoundError, SandboxError, StateError
from ...game import ChatMessage, StepResult
from ...host import HostGone
from ...running.episodes import GameFacts, Opening, retrieve_error
from ...sandbox.self_test import absent_commands
from .agent_run import AgentRun
from .environment import filled, plain_variables
from .launcher import ModelEndpoint, ProgramLauncher
from .sandbox import grader_mounts
from .task_environments import TaskEnvironments

_NAME = "agent"


class NoFreeSlot(HostGone):
    """All places of a host are taken: the episode starts elsewhere, or later."""


class ProgramRunner:
    """The programs of one host."""

    def __init__(
        self,
        config: AgentConfig,
        endpoint: ModelEndpoint,
        *,
        max_tries: int = 1,
        job: str = "",
        private: Sequence[Path] = (),
        has_tasks: bool = False,
        builds: bool = True,
        may_read: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Prepare.

        `max_tries` is the job's: the last try of an episode counts even if its program crashed.
        `private` folders are never shown to programs. With `has_tasks` the data are Harbor tasks;
        `builds`: their images may be built and pulled here. `may_read` raises ConfigError for the
        real path of a folder that the job's owner may not read.
        """
        self._may_read = may_read
        self._has_tasks = has_tasks
        self._builds = builds
        self._config = config
        self._endpoint = endpoint
        self._opened = contextlib.AsyncExitStack()
        self._max_tries = max_tries
        self._job = job
        self._private = private
        self.places = config.per_host
        """Programs at the same time."""
        self._places = asyncio.Semaphore(config.per_host)
        self._launcher: ProgramLauncher | None = None
        self._environments: TaskEnvironments | None = None
        self._held: dict[str, _RunningEpisode] = {}
        self._tasks: set[asyncio.Task[StepResult]] = set()

    async def start(self) -> GameFacts:
        """Check that programs can run here: the folders, the sandbox, the commands.

        Raises ConfigError or SandboxError with what to do.
        """
        await self._opened.enter_async_context(self._endpoint)
        try:
            open_launcher = partial(ProgramLauncher, self._config, self._private, self._may_read)
            self._launcher = await owned(
                asyncio.to_thread(open_launcher), ProgramLauncher.close_at_once
            )
        except OSError as error:
            raise SandboxError(
                f"the folder for programs cannot be made: {error}",
                hint="see the host's temporary folder ($TMPDIR)",
            ) from error
        self._opened.push_async_callback(self._launcher.close)
        await prove(self._config, self._launcher, has_tasks=self._has_tasks)
        self._environments = TaskEnvironments(self._config, self._launcher, builds=self._builds)
        self._opened.push_async_callback(self._environments.close)
        return GameFacts(_NAME, [], [])

    def reset(self, opening: Opening) -> Awaitable[list[ChatMessage]]:
        """Start an episode's program; return the messages that identify its task.

        Raises NoFreeSlot when no place is free for `setup_timeout_s`, SandboxError when the program
        cannot be started.
        """
        assert self._launcher is not None
        assert self._environments is not None
        if opening.record is not None and opening.record.task is not None:
            self._may_read(opening.record.task.root.path)
        run = AgentRun(
            self._config,
            self._launcher,
            self._endpoint,
            opening,
            self._environments,
            max_tries=self._max_tries,
            job=self._job,
        )
        begun = asyncio.Event()
        task = asyncio.create_task(self._play(run, begun), name=f"program {opening.episode}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._held[opening.episode] = _RunningEpisode(task, begun)
        return self._begun(opening.episode, run.prompt)

    async def step(self, episode: str, action: str) -> StepResult:
        """Wait for the program's end; `action` is empty, since its calls go to the model."""
        held = self._held.get(episode)
        if held is None:
            raise NotFoundError(f"episode {episode!r} has no program here")
        return await asyncio.shield(held.task)

    async def finish(self, episode: str) -> StepResult:
        """Raise an error: limits of games do not apply to programs."""
        raise StateError(f"the program of episode {episode!r} has no turns to be cut")

    async def turn(self, episode: str) -> tuple[str, list[ChatMessage]]:
        """Raise an error: programs have no roles."""
        raise StateError(f"the program of episode {episode!r} plays no role")

    def drop(self, episode: str) -> None:
        """Kill an episode's program, and forget it."""
        held = self._held.pop(episode, None)
        if held is not None:
            held.task.cancel()

    def end_overdue(self) -> None:
        """Do nothing: programs have their own limits."""

    async def stop(self) -> None:
        """Kill all programs, and end their threads."""
        await end_tasks(self._tasks)
        await self._opened.aclose()

    async def _play(self, run: AgentRun, begun: asyncio.Event) -> StepResult:
        try:
            async with asyncio.timeout(self._config.setup_timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise self._no_place() from None
        try:
            return await run.play(begun.set)
        except OSError as error:
            raise SandboxError(
                f"a file of the program's folder cannot be written or read: {error}",
                hint="see the room in the host's temporary folder ($TMPDIR)",
            ) from error
        finally:
            self._places.release()

    async def _begun(self, episode: str, prompt: list[ChatMessage]) -> list[ChatMessage]:
        """Wait until a program runs."""
        held = self._held[episode]
        waiting = asyncio.ensure_future(held.begun.wait())
        try:
            await asyncio.wait({held.task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self.drop(episode)
            raise
        finally:
            waiting.cancel()
        if held.begun.is_set():
            return prompt
        self._held.pop(episode, None)
        if held.task.cancelled():
            raise NotFoundError(f"episode {episode!r} was closed before its program started")
        await held.task  # which raises
        return prompt

    def _no_place(self) -> NoFreeSlot:
        config = self._config
        return NoFreeSlot(
            f"no place for a program became free within {config.setup_timeout_s:g} s: this host "
            f"runs agent.per_host={config.per_host} at the same time",
            hint="raise env.hosts or agent.per_host, or lower generator.max_episodes",
        )


class _RunningEpisode:
    """A run of a program, and whether its program has started."""

    def __init__(self, task: "asyncio.Task[StepResult]", begun: asyncio.Event) -> None:
        self.task = task
        self.begun = begun
        task.add_done_callback(retrieve_error)


async def prove(config: AgentConfig, launcher: ProgramLauncher, *, has_tasks: bool = False) -> None:
    """Run the self-test in a program's sandbox, and check that its commands exist.

    With `has_tasks` the commands may be in images that are not built yet. Raises SandboxError if
    the sandbox does not hold, and ConfigError for a missing command.
    """
    if any("{grader}" in word for word in config.reward) and launcher.grader is None:
        raise ConfigError(
            "agent.reward names {grader}, but agent.reward_files is empty",
            hint="set agent.reward_files to the folder with the reward command's files",
        )
    commands = {
        name: filled(config, getattr(config, name)) for name in ("command", "setup", "reward")
    }
    commands |= {
        f"mcp ({server.name})": filled(config, [server.command])
        for server in config.named_mcp()
        if server.command
    }
    keys = {words[0]: name for name, words in commands.items() if _is_needed(config, words)}
    keys = {} if has_tasks else keys
    sandboxes = launcher.sandboxes
    environment = dict(sandboxes.variables(plain_variables(config)))
    reach = "open" if config.network == "open" else "model"
    async with launcher.folder(launcher.files) as folder:
        sandbox = sandboxes.sandbox(folder, reach, grader_mounts(launcher.grader))
        absent = await launcher.blocking(
            lambda: absent_commands(sandbox, sorted(keys), environment, hidden=sandboxes.unseen)
        )
    for command in absent:
        raise ConfigError(
            f"agent.{keys[command]}: programs do not find {command!r}",
            hint="they see agent.files, agent.read, and agent.image or else the system's folders "
            "and the pool's interpreter ({python}); its folder must also be in PATH",
        )


def _is_needed(config: AgentConfig, words: list[str]) -> bool:
    """Return whether a command must exist before the setup."""
    return bool(words) and (words[0].startswith("/") or "/" not in words[0] or not config.setup)
