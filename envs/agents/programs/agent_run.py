"""One run of an agent program: its folder, its setup, the program, its outcome, its reward.

A program that has not called the model has nothing to train. A crashed program is tried again, a
hung one is tried again once. The last try counts as it is, and so does an episode that a limit of
the model ended.
"""

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, cast

from ....schemas.config.agent import AgentConfig
from ....schemas.local.folder import Folder
from ....schemas.wire.errors import GameError, MessageError, RewardError, SandboxError
from ....schemas.wire.foreign import plain_value
from ...game import ChatMessage, StepResult
from ...running.episodes import Opening
from ...task_folders import HarborTask
from ..episode import NoCalls, Outcome, ProgramEpisode
from .environment import (
    INPUT,
    MCP,
    REWARD,
    ROW,
    filled,
    last_user_text,
    mcp_servers,
    prompt_of,
    reward_variables,
    task_input,
    variables,
    whole_row,
    write_json,
)
from .folders import ProgramFolder
from .launcher import ModelEndpoint, ProgramLauncher, Running
from .sandbox import PORT, TESTS, Reach, TaskEnvironment, TaskView, grader_mounts
from .task_environments import TaskEnvironments

# Parsing of rewards: a number, or an object with `reward`.

_SHOWN_REWARD_CHARS = 200
_FORM = 'a number, or {"reward": number, "success": true or false, "info": {…}}'


@dataclass(frozen=True)
class ProgramReward:
    """A reward, and further data about the episode."""

    reward: float
    success: bool | None = None
    info: dict[str, Any] = field(default_factory=dict[str, Any])

    def facts(self) -> dict[str, Any]:
        """Return the data for the generator besides the reward."""
        return self.info if self.success is None else {**self.info, "success": self.success}


def parse_reward(text: str, whose: str) -> ProgramReward:
    """Parse a reward that `whose` wrote; raises RewardError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _refusal(text, whose, "is neither a number nor JSON") from None
    if not isinstance(value, dict):
        return ProgramReward(checked_number(value, text, whose))
    fields = cast("dict[str, Any]", value)
    if unknown := sorted(set(fields) - {"reward", "success", "info"}):
        raise _refusal(text, whose, f"has the key {unknown[0]!r}, which is unknown")
    success, info = fields.get("success"), fields.get("info", {})
    if not isinstance(success, bool | None):
        raise _refusal(text, whose, f"has success={success!r}")
    if not isinstance(info, dict):
        raise _refusal(text, whose, f"has info={info!r}")
    reward = checked_number(fields.get("reward"), text, whose)
    try:
        plain = plain_value(cast("dict[str, Any]", info), "info")
    except MessageError as error:
        raise _refusal(text, whose, f"cannot be sent ({error.message})") from error
    return ProgramReward(reward, success, plain)


def checked_number(value: Any, text: str, whose: str) -> float:
    """Return a reward as a finite number; raises RewardError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(text, whose, f"gives the reward {value!r}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refusal(text, whose, "gives a reward that is not finite")
    return number


def _refusal(text: str, whose: str, why: str) -> RewardError:
    shown = text if len(text) <= _SHOWN_REWARD_CHARS else f"{text[:_SHOWN_REWARD_CHARS]}…"
    return RewardError(f"what {whose} wrote {why}: {shown!r}", hint=f"write {_FORM}")


_REWARD_BYTES = 64 << 10
_LOOKS_WHILE_OPEN = 10
_SHOWN_CHARS = 1000
How: TypeAlias = Literal["exit", "said", "timeout", "stuck", "memory", "disk"]
"""How a program ended: by itself, after it posted its end, or by a limit."""
_FAILED = ("failed", "timeout", "stuck", "crash")


class ProgramCrashed(GameError):
    """A program that failed or hung after it had called the model."""

    code: ClassVar[str] = "program_crashed"


@dataclass(frozen=True)
class Ending:
    """How a program ended."""

    how: How
    exit_code: int
    printed: str
    """The end of its output."""


class AgentRun:
    """One try of one episode."""

    def __init__(
        self,
        config: AgentConfig,
        launcher: ProgramLauncher,
        endpoint: ModelEndpoint,
        opening: Opening,
        tasks: TaskEnvironments,
        *,
        max_tries: int,
        job: str = "",
    ) -> None:
        """Prepare a run."""
        self._config = config
        self._launcher = launcher
        self._tasks = tasks
        self._task = None if opening.record is None else opening.record.task
        self._view: TaskView | None = None
        self._endpoint = endpoint
        self._opening = opening
        self._max_tries = max_tries
        self.prompt: list[ChatMessage] = prompt_of(opening)
        """The chat messages that identify the task."""
        self.episode = ProgramEpisode(
            opening.episode, task_input(opening), opening.seed, opening.split, job
        )

    async def play(self, begun: Callable[[], None]) -> StepResult:
        """Run the program to its end; `begun` is called when it has started.

        Raises SandboxError, GameError, NoCalls or RewardError for an episode that does not count.
        """
        async with contextlib.AsyncExitStack() as opened:
            if self._task is not None:
                environment = await opened.enter_async_context(self._tasks.environment(self._task))
                self._view = TaskView(environment, "program")
            root = None if self._view is None else self._view.environment.root
            folder = await opened.enter_async_context(
                self._launcher.folder(self._launcher.files, root=root)
            )
            write = self._launcher.blocking
            await write(lambda: self._write_task(folder))
            if self._config.setup:
                await self._set_up(folder)
            ending = await self._run(folder, begun)
            outcome = check_counts(ending, self.episode, self._config, self._max_tries)
            reward = await self._reward(folder, outcome)
        info = {
            **self.episode.to_info(),
            **reward.facts(),
            "outcome": outcome,
            "exit_code": ending.exit_code,
            "output": ending.printed,
        }
        if ending.how in ("memory", "disk"):
            info["limit"] = ending.how
        return StepResult("", reward.reward, done=True, info=info)

    def _write_task(self, folder: ProgramFolder) -> None:
        write_json(folder["task"] / _name(INPUT), self.episode.task_input)
        if self._config.mcp:
            write_json(folder["task"] / _name(MCP), mcp_servers(self._config))
        folder.give_away("task")

    async def _set_up(self, folder: ProgramFolder) -> None:
        config = self._config
        variables_ = variables(config, self.episode, {}, self._environment)
        reach: Reach = "open" if config.network == "open" else "none"
        running = self._launcher.running(
            folder, self._filled(config.setup), variables_, reach, view=self._view
        )
        async with running as process:
            how = await _by_itself(process, config.setup_timeout_s)
            exit_code = await process.program.kill()
        if how != "exit" or exit_code:
            words = {
                "timeout": f"took longer than agent.setup_timeout_s={config.setup_timeout_s:g}"
            }
            raise SandboxError(
                f"agent.setup {words.get(how, _ended(how, exit_code))}",
                hint=f"it printed: {process.program.printed.tail().strip()[-_SHOWN_CHARS:]}",
            )

    async def _run(self, folder: ProgramFolder, begun: Callable[[], None]) -> Ending:
        """Run the program until it has ended with all its processes."""
        config, episode, endpoint = self._config, self.episode, self._endpoint
        is_open = config.network == "open"
        base_url = endpoint.base_url if is_open else f"http://127.0.0.1:{PORT}"
        model = endpoint.env_of(episode, base_url)
        environment = variables(config, episode, model, self._environment)
        episode.last_call = time.monotonic()
        episode.deadline = episode.last_call + self._timeout_s
        endpoint.open(episode)
        try:
            async with self._launcher.running(
                folder,
                self._filled(config.command),
                environment,
                "open" if is_open else "model",
                endpoint=endpoint,
                view=self._view,
            ) as running:
                begun()
                how = await self._until_over(running)
                exit_code = await self._end(running, how)
        finally:
            episode.over = episode.over or "its program has ended"
            endpoint.close(episode.episode)
        return Ending(how, exit_code, running.program.printed.tail())

    async def _until_over(self, running: Running) -> How:
        """Wait until the program ends, posts its end, or exceeds a limit."""
        episode, ended, over = self.episode, running.program.ended, running.over
        said_end = asyncio.ensure_future(episode.said_end.wait())
        try:
            while True:
                await asyncio.wait(
                    {ended, over, said_end},
                    timeout=self._patience_s(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if over.done():
                    return over.result()
                if ended.done():
                    return "exit"
                if said_end.done():
                    return "said"
                if time.monotonic() >= episode.deadline:
                    return "timeout"
                if self._idle_s() >= self._config.idle_s:
                    return "stuck"
        finally:
            said_end.cancel()

    def _patience_s(self) -> float:
        """Return the time until the next limit."""
        idle_s = self._config.idle_s
        looked_s = idle_s / _LOOKS_WHILE_OPEN if self.episode.num_open else idle_s - self._idle_s()
        return max(0.0, min(looked_s, self.episode.deadline - time.monotonic()))

    def _idle_s(self) -> float:
        episode = self.episode
        return 0.0 if episode.num_open else time.monotonic() - episode.last_call

    async def _end(self, running: Running, how: How) -> int:
        """Kill a program that has not ended by itself; return its exit code."""
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
        return filled(self._config, command, last_user_text(self.prompt), self._environment)

    @property
    def _environment(self) -> TaskEnvironment | None:
        return None if self._view is None else self._view.environment

    @property
    def _timeout_s(self) -> float:
        """Seconds for the program: the smaller limit of its task and the job."""
        of_task = None if self._task is None else self._task.settings.agent.timeout_sec
        return min(self._config.timeout_s, of_task or self._config.timeout_s)

    async def _reward(self, folder: ProgramFolder, outcome: Outcome) -> ProgramReward:
        """Return the reward of the episode; RewardError without one."""
        try:
            return await self._given_reward(folder)
        except RewardError as error:
            if earns_failed_reward(outcome):
                return ProgramReward(self._config.failed_reward, info={"no_reward": error.message})
            raise

    async def _given_reward(self, folder: ProgramFolder) -> ProgramReward:
        if self._task is not None and self._view is not None:
            self.episode.forget_rewards()
            return await self._tested(folder, self._task, self._view.environment)
        if self._config.reward:
            self.episode.forget_rewards()
            return await self._graded(folder)
        posted = self.episode.reward
        if posted is not None:
            return ProgramReward(checked_number(posted, repr(posted), "the program"))
        written = await self._launcher.blocking(
            lambda: folder.read("task", _name(REWARD), _REWARD_BYTES)
        )
        if written is not None and written.strip():
            return parse_reward(written.decode("utf-8", "replace"), "the program")
        if self.episode.has_partial_rewards:
            return ProgramReward(0.0)  # its calls have theirs
        raise RewardError(
            "the program has ended without a reward",
            hint="set agent.reward, write a number into the file that TINKERMQ_REWARD names, or "
            "post one to the episode's URL",
        )

    async def _tested(
        self, folder: ProgramFolder, task: HarborTask, environment: TaskEnvironment
    ) -> ProgramReward:
        """Run the tests of a task."""
        launcher, verifier = self._launcher, task.settings.verifier
        limit_s = verifier.timeout_sec or self._config.reward_timeout_s
        await launcher.blocking(lambda: write_tests(folder, task, self._config.disk_mb << 20))
        try:
            async with launcher.running(
                folder,
                TEST_COMMAND,
                verifier.env,
                "open" if self._config.network == "open" else "none",
                view=TaskView(environment, "tests"),
            ) as running:
                how = await _by_itself(running, limit_s)
                exit_code = await running.program.kill()
        except GameError as error:
            raise RewardError(
                f"the tests of task {task.name} cannot start: {error.message}",
                hint=f"the program may have removed {environment.workdir}",
            ) from error
        printed = running.program.printed.tail().strip()[-_SHOWN_CHARS:]
        if how != "exit":
            words = {"timeout": f"took longer than verifier.timeout_sec={limit_s:g}"}
            raise RewardError(
                f"the tests of task {task.name} {words.get(how, _ended(how, exit_code))}",
                hint=f"they printed: {printed or 'nothing'}",
            )
        written = await launcher.blocking(lambda: read_reward(folder))
        reward, metrics = parse_task_reward(written, task.name, printed)
        return ProgramReward(reward, info={**metrics, "tests_output": printed})

    async def _graded(self, folder: ProgramFolder) -> ProgramReward:
        """Run the reward command in a copy of the program's folder."""
        config = self._config
        environment = reward_variables(config, self.episode)
        launcher = self._launcher
        async with contextlib.AsyncExitStack() as opened:
            work = opened.enter_context(Folder(folder["work"]))
            copy = await opened.enter_async_context(launcher.folder(work))
            await launcher.blocking(lambda: self._write_row(copy))
            running = await opened.enter_async_context(
                launcher.running(
                    copy,
                    self._filled(config.reward),
                    environment,
                    "none",
                    more=grader_mounts(launcher.grader),
                )
            )
            how = await _by_itself(running, config.reward_timeout_s)
            exit_code = await running.program.kill()
        printed = running.program.printed
        lines = printed.out.text(_REWARD_BYTES).strip().splitlines()
        if how == "exit" and exit_code == 0 and lines:
            return parse_reward(lines[-1], "agent.reward")
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


def outcome_of(ending: Ending, episode: ProgramEpisode) -> Outcome:
    """Return the name of an ending."""
    if ending.how in ("timeout", "stuck"):
        return ending.how
    if episode.status:
        return episode.status
    return "done" if ending.how == "exit" and ending.exit_code == 0 else "crash"


def earns_failed_reward(outcome: Outcome) -> bool:
    """Return whether an episode with this end gets `failed_reward` without a posted reward."""
    return outcome in _FAILED


def check_counts(
    ending: Ending, episode: ProgramEpisode, config: AgentConfig, max_tries: int
) -> Outcome:
    """Return the outcome of an episode that counts.

    Raises NoCalls, and ProgramCrashed for an episode that will be tried again.
    """
    outcome = outcome_of(ending, episode)
    if not episode.num_calls:
        raise NoCalls(
            f"the program {_described(ending, config)} without one answered call of the model",
            hint=f"{_last_words(ending)}; it finds the model by OPENAI_BASE_URL, OPENAI_API_KEY, "
            "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY",
        )
    tries = try_number(episode.episode)
    again = {"crash": tries < max_tries, "stuck": tries == 1 < max_tries}.get(outcome, False)
    if again and config.on_crash == "retry" and not episode.limit:
        raise ProgramCrashed(
            f"the program {_described(ending, config)} after {episode.num_calls} calls",
            hint=f"{_last_words(ending)}; the last of rollout.max_tries={max_tries} tries counts, "
            "each with agent.on_crash=score",
        )
    return outcome


def try_number(episode: str) -> int:
    """Return the number of a try from its id `…-<n>`; other ids are the first try.

    Tries that were lost with their hosts are counted as well.
    """
    match = re.search(r"-(\d{1,6})\Z", episode)
    return int(match[1]) if match else 1


def _described(ending: Ending, config: AgentConfig) -> str:
    words = {
        "said": "posted its end",
        "timeout": f"ran out of time (agent.timeout_s={config.timeout_s:g})",
        "stuck": f"made no call for agent.idle_s={config.idle_s:g} s",
        "memory": f"held more than agent.memory_mb={config.memory_mb}",
        "disk": f"wrote more than agent.disk_mb={config.disk_mb}",
    }
    return words.get(ending.how, f"exited with code {ending.exit_code}")


def _last_words(ending: Ending) -> str:
    output = ending.printed.strip()[-_SHOWN_CHARS:]
    return f"it printed at last: {output}" if output else "it printed nothing"


async def _by_itself(running: Running, limit_s: float) -> How:
    """Wait until a command ends by itself, or exceeds a limit."""
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


# -- the tests of a Harbor task --------------------------------------------------------------------
#
# They are copied in and run when no process of the task's program is left, on the files that it
# left; then their reward is read. `/tests`, `/logs`, their home and their environment are new. A
# reward that the program has written is in an earlier `/logs`, which they do not see.

TEST_COMMAND = ("bash", f"{TESTS}/test.sh")
REWARD_JSON, REWARD_TEXT = "reward.json", "reward.txt"
_MAX_METRICS = 64
_TESTS_FORM = (
    "tests/test.sh writes a number into /logs/verifier/reward.txt, or a map with `reward` into "
    "/logs/verifier/reward.json, even if the program has done nothing"
)


def write_tests(folder: ProgramFolder, task: HarborTask, most_bytes: int) -> None:
    """Copy the tests of a task next to the files of its program; blocks."""
    with task.open("tests") as tests:
        folder.add("tests", tests, most_bytes)
    (folder["tests"] / "test.sh").chmod(0o755)
    for part in ("logs", "verifier", "test_home"):
        folder.add(part)
    for name in ("agent", "artifacts", "verifier"):
        (folder["logs"] / name).mkdir()
    folder.give_away("tests", "logs", "verifier", "test_home")


def read_reward(folder: ProgramFolder) -> tuple[str, bytes] | None:
    """Return the name and contents of the reward's file, None without one; blocks."""
    for name in (REWARD_JSON, REWARD_TEXT):
        written = folder.read("verifier", name, _REWARD_BYTES)
        if written is not None:
            return name, written
    return None


def parse_task_reward(
    written: tuple[str, bytes] | None, task: str, printed: str
) -> tuple[float, dict[str, float]]:
    """Return the reward, and the other numbers of a map; raises RewardError."""
    if written is None:
        raise RewardError(
            f"the tests of task {task} wrote no reward",
            hint=f"{_TESTS_FORM}; they printed: {printed or 'nothing'}",
        )
    name, content = written
    text = content.decode("utf-8", "replace").strip()
    try:
        value: Any = float(text) if name == REWARD_TEXT else json.loads(text)
    except (ValueError, RecursionError):
        raise _tests_refusal(task, name, text, "neither a number nor a map of numbers") from None
    if not isinstance(value, dict):
        return _tests_number(value, task, name, text), {}
    fields = cast("dict[str, Any]", value)
    if "reward" not in fields:
        raise _tests_refusal(task, name, text, "no `reward`")
    if len(fields) > _MAX_METRICS:
        raise _tests_refusal(task, name, text, f"more than {_MAX_METRICS} numbers")
    numbers = {key: _tests_number(number, task, name, text) for key, number in fields.items()}
    return numbers.pop("reward"), {
        key: number for key, number in numbers.items() if key.isprintable()
    }


def _tests_number(value: Any, task: str, name: str, text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _tests_refusal(task, name, text, f"{value!r}"[:_SHOWN_REWARD_CHARS])
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _tests_refusal(task, name, text, "a number that is not finite")
    return number


def _tests_refusal(task: str, name: str, text: str, what: str) -> RewardError:
    return RewardError(
        f"the tests of task {task} wrote {what} into {Path('/logs/verifier') / name}: "
        f"{text[:_SHOWN_REWARD_CHARS]!r}",
        hint=_TESTS_FORM,
    )
