"""The life of one program: its folder, its setup, its run, its end, its reward."""

import asyncio
import time
from collections.abc import Callable

from ....schemas.config.agent import AgentConfig
from ....schemas.wire.errors import RewardError, SandboxError
from ...game import ChatMessage, StepResult
from ...running.episodes import Opening
from ..episode import Outcome, ProgramEpisode
from .environment import (
    INPUT,
    REWARD,
    ROW,
    filled,
    last_user_text,
    prompt_of,
    reward_variables,
    task_input,
    variables,
    whole_row,
    write_json,
)
from .folders import ProgramFolder
from .launcher import ModelEndpoint, ProgramLauncher, Running
from .outcomes import Ending, How, check_counts, earns_failed_reward
from .walls import PORT, Reach, grader_mounts
from .worth import Worth, checked_number, read_worth

_WORTH_BYTES = 64 << 10
_LOOKS_WHILE_OPEN = 10
_SHOWN_CHARS = 1000


class ProgramLife:
    """One try of one episode."""

    def __init__(
        self,
        config: AgentConfig,
        launcher: ProgramLauncher,
        endpoint: ModelEndpoint,
        opening: Opening,
        *,
        max_tries: int,
        job: str = "",
    ) -> None:
        """Start nothing yet."""
        self._config = config
        self._launcher = launcher
        self._endpoint = endpoint
        self._opening = opening
        self._max_tries = max_tries
        self.prompt: list[ChatMessage] = prompt_of(opening)
        """The chat messages by which the task is known."""
        self.episode = ProgramEpisode(
            opening.episode, task_input(opening), opening.seed, opening.split, job
        )

    async def live(self, begun: Callable[[], None]) -> StepResult:
        """Run the program to its end; `begun` is called when it has started.

        Raises SandboxError, GameError, NoCalls or RewardError for an episode that does not count.
        """
        async with self._launcher.folder(self._launcher.files) as folder:
            write = self._launcher.blocking
            await write(lambda: self._write_task(folder))
            if self._config.setup:
                await self._set_up(folder)
            ending = await self._run(folder, begun)
            outcome = check_counts(ending, self.episode, self._config, self._max_tries)
            worth = await self._worth(folder, outcome)
        told = {
            **self.episode.told(),
            **worth.told(),
            "outcome": outcome,
            "exit_code": ending.exit_code,
            "output": ending.printed,
        }
        if ending.how in ("memory", "disk"):
            told["limit"] = ending.how
        return StepResult("", worth.reward, done=True, info=told)

    # -- setup ---------------------------------------------------------------------------------

    def _write_task(self, folder: ProgramFolder) -> None:
        write_json(folder["task"] / _name(INPUT), self.episode.task_input)
        folder.give_away("task")

    async def _set_up(self, folder: ProgramFolder) -> None:
        config = self._config
        variables_ = variables(config, self.episode, {})
        reach: Reach = "open" if config.network == "open" else "none"
        running = self._launcher.running(folder, self._filled(config.setup), variables_, reach)
        async with running as one:
            how = await _by_itself(one, config.setup_timeout_s)
            exit_code = await one.program.kill()
        if how != "exit" or exit_code:
            words = {
                "timeout": f"took longer than agent.setup_timeout_s={config.setup_timeout_s:g}"
            }
            raise SandboxError(
                f"agent.setup {words.get(how, _ended(how, exit_code))}",
                hint=f"it printed: {one.program.printed.tail().strip()[-_SHOWN_CHARS:]}",
            )

    # -- the program ---------------------------------------------------------------------------

    async def _run(self, folder: ProgramFolder, begun: Callable[[], None]) -> Ending:
        """Run the program until it has ended with all its processes."""
        config, episode, endpoint = self._config, self.episode, self._endpoint
        is_open = config.network == "open"
        base_url = endpoint.base_url if is_open else f"http://127.0.0.1:{PORT}"
        environment = variables(config, episode, endpoint.env_of(episode, base_url))
        episode.last_call = time.monotonic()
        episode.deadline = episode.last_call + config.timeout_s
        endpoint.open(episode)
        try:
            async with self._launcher.running(
                folder,
                self._filled(config.command),
                environment,
                "open" if is_open else "model",
                endpoint=endpoint,
            ) as running:
                begun()
                how = await self._until_over(running)
                exit_code = await self._end(running, how)
        finally:
            episode.over = episode.over or "its program has ended"
            endpoint.close(episode.episode)
        return Ending(how, exit_code, running.program.printed.tail())

    async def _until_over(self, running: Running) -> How:
        """Wait until the program ends or says so, or is over a limit."""
        episode, ended, over = self.episode, running.program.ended, running.over
        said = asyncio.ensure_future(episode.said_end.wait())
        try:
            while True:
                await asyncio.wait(
                    {ended, over, said},
                    timeout=self._patience_s(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if over.done():
                    return over.result()
                if ended.done():
                    return "exit"
                if said.done():
                    return "said"
                if time.monotonic() >= episode.deadline:
                    return "timeout"
                if self._idle_s() >= self._config.idle_s:
                    return "stuck"
        finally:
            said.cancel()

    def _patience_s(self) -> float:
        """Return how long nothing needs to be looked at."""
        idle_s = self._config.idle_s
        looked_s = idle_s / _LOOKS_WHILE_OPEN if self.episode.num_open else idle_s - self._idle_s()
        return max(0.0, min(looked_s, self.episode.deadline - time.monotonic()))

    def _idle_s(self) -> float:
        episode = self.episode
        return 0.0 if episode.num_open else time.monotonic() - episode.last_call

    async def _end(self, running: Running, how: How) -> int:
        """End what has not ended by itself; return its exit code."""
        program, grace_s = running.program, self._config.grace_s
        if how == "said":
            await asyncio.wait({program.ended}, timeout=grace_s / 2)
            grace_s /= 2
        elif how in ("timeout", "stuck"):
            self.episode.over = "it ran out of time" if how == "timeout" else "it made no call"
        if how in ("said", "timeout", "stuck") and not program.ended.done():
            program.terminate()
            await asyncio.wait({program.ended}, timeout=grace_s)
        return await program.kill()

    def _filled(self, command: list[str]) -> list[str]:
        return filled(self._config, command, last_user_text(self.prompt))

    # -- its reward ----------------------------------------------------------------------------

    async def _worth(self, folder: ProgramFolder, outcome: Outcome) -> Worth:
        """Return what the episode is worth; RewardError if nothing says it."""
        try:
            return await self._found_worth(folder)
        except RewardError as error:
            if earns_failed_reward(outcome):
                return Worth(self._config.failed_reward, info={"no_reward": error.message})
            raise

    async def _found_worth(self, folder: ProgramFolder) -> Worth:
        posted = self.episode.reward
        if posted is not None:
            return Worth(checked_number(posted, repr(posted), "the program"))
        if self._config.reward:
            return await self._graded(folder)
        written = await self._launcher.blocking(
            lambda: folder.read("task", _name(REWARD), _WORTH_BYTES)
        )
        if written is not None and written.strip():
            return read_worth(written.decode("utf-8", "replace"), "the program")
        if self.episode.has_partial_rewards:
            return Worth(0.0)  # its calls have theirs
        raise RewardError(
            "the program has ended, and nothing says what it is worth",
            hint="set agent.reward, write a number into the file that TINKERMQ_REWARD names, or "
            "post one to the episode's URL",
        )

    async def _graded(self, folder: ProgramFolder) -> Worth:
        """Run the reward command in a copy of the program's folder."""
        config = self._config
        environment = reward_variables(config, self.episode)
        async with self._launcher.folder(folder["work"]) as copy:
            await self._launcher.blocking(lambda: self._write_row(copy))
            async with self._launcher.running(
                copy,
                self._filled(config.reward),
                environment,
                "none",
                more=grader_mounts(self._launcher.grader),
            ) as running:
                how = await _by_itself(running, config.reward_timeout_s)
                exit_code = await running.program.kill()
        printed = running.program.printed
        lines = printed.out.text(_WORTH_BYTES).strip().splitlines()
        if how == "exit" and exit_code == 0 and lines:
            return read_worth(lines[-1], "agent.reward")
        words = {"timeout": f"took longer than agent.reward_timeout_s={config.reward_timeout_s:g}"}
        failed = words.get(how, _ended(how, exit_code)) if lines or exit_code else "printed nothing"
        raise RewardError(
            f"agent.reward {failed}",
            hint=f"it printed: {printed.tail().strip()[-_SHOWN_CHARS:] or 'nothing'}",
        )

    def _write_row(self, folder: ProgramFolder) -> None:
        write_json(folder["task"] / _name(INPUT), self.episode.task_input)
        write_json(folder["task"] / _name(ROW), whole_row(self._opening))
        folder.give_away("task")


async def _by_itself(running: Running, limit_s: float) -> How:
    """Wait until a command ends by itself, or has to be ended."""
    ended, over = running.program.ended, running.over
    await asyncio.wait({ended, over}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    if over.done():
        return over.result()
    return "exit" if ended.done() else "timeout"


def _ended(how: How, exit_code: int) -> str:
    limits = {"memory": "held more than agent.memory_mb", "disk": "wrote more than agent.disk_mb"}
    return limits.get(how, f"exited with code {exit_code}")


def _name(path: str) -> str:
    return path.rpartition("/")[2]
