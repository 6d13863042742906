"""Checks on a node before a job is submitted: its files, its game and its model.

Checking files runs no code of the game. A game is played by a process like an environment host's,
in the same sandbox; a model is inspected by a process like a generator's, with the code of the run.
"""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...broker.client.login import without_secrets
from ...broker.service_process import die_with
from ...envs.dataset import is_dataset_name
from ...envs.registry import find_game
from ...envs.task_folders import holds_tasks
from ...schemas.config.agent import TaskSource
from ...schemas.node import (
    GameCheck,
    InspectQuestion,
    LookAnswer,
    LookQuestion,
    ModelAnswer,
    ModelQuestion,
    PlayAnswer,
    PlayQuestion,
)
from ...schemas.wire.codec import pack
from ...schemas.wire.errors import TinkermqError
from ..check_game import END, PREFIX, VARIABLE, cut
from ..policy.model_folder import check_model_alike, check_model_is_here
from .children import ActorStarter
from .process import PIPE_DEADLINE_S, ErrorMemory, kill_group, read_lines
from .sandbox import ENVIRONMENT

ANSWER_S = 10.0
"""A file system that takes longer is left for the job to find out."""
PLAY_S = 60.0
"""A game that takes longer for its few episodes is ended."""
INSPECT_S = 120.0
"""A model that takes longer to be looked into is left for the job to find out."""
MAX_CHECKS = 32
MAX_CONFIG_BYTES = 96 * 1024
"""Of what a process is given by its environment, which the kernel bounds."""


async def check_files(question: LookQuestion) -> LookAnswer:
    """Say what is there, as far as that is known in time."""
    looking = asyncio.ensure_future(asyncio.to_thread(check_files_now, question))
    await asyncio.wait({looking}, timeout=ANSWER_S)
    return looking.result() if looking.done() else LookAnswer(known=False)


def check_files_now(question: LookQuestion) -> LookAnswer:
    """Look at the files, and for the game's package."""
    missing = [file for file in question.files if not _is_there(file)]
    if not question.game:
        return LookAnswer(missing=missing)
    try:
        return LookAnswer(missing=missing, game=find_game(question.game))
    except TinkermqError as error:
        return LookAnswer(missing=missing, lacks_game=error.message, hint=error.hint)


def _is_there(name: str) -> bool:
    """Whether a dataset exists; of other files and folders this is not revealed."""
    source = TaskSource.parse(name)
    if source is not None:
        return holds_tasks(source)
    path = Path(name).expanduser()
    return is_dataset_name(path) and path.is_file()


class EnvCheckRunner:
    """Plays games that jobs may be submitted with, one at a time."""

    def __init__(self, starter: ActorStarter, play_s: float = PLAY_S) -> None:
        """Play nothing yet; `starter` starts the processes, in the sandbox that hosts have."""
        self._starter = starter
        self._play_s = play_s
        self._is_busy = False

    async def play(self, question: PlayQuestion) -> PlayAnswer:
        """Play a game; a node that plays one already says so at once."""
        if question.wanted.role != "environment":
            return PlayAnswer(trouble="environment hosts play games", hint="ask for one of them")
        if self._is_busy:
            return PlayAnswer(known=False)
        given = json.dumps({"env": question.env, "seed": question.seed})
        if len(given) > MAX_CONFIG_BYTES:
            return PlayAnswer(
                trouble=f"its configuration has {len(given):,} bytes, and nodes try games of "
                f"{MAX_CONFIG_BYTES:,} at most",
                hint="let env.kwargs name a file in place of what it holds",
            )
        self._is_busy = True
        try:
            return await self._played(question, {VARIABLE: given, **ENVIRONMENT})
        finally:
            self._is_busy = False

    async def _played(self, question: PlayQuestion, environment: dict[str, str]) -> PlayAnswer:
        reading, writing = os.pipe()
        try:
            command = [sys.executable, "-m", "tinkermq.actors.check_game"]
            child = await self._starter.start(question.wanted, environment, writing, command)
        except (OSError, ValueError) as error:  # no name of a folder can have a null byte
            os.close(reading)
            return PlayAnswer(trouble=str(error), hint="see the node's log")
        finally:
            os.close(writing)
        output = _CheckOutput()
        reader = asyncio.create_task(read_lines(reading, output.add_lines))
        exit_code: int | None = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._play_s):
                    exit_code = await child.wait()
        finally:
            kill_group(child.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PIPE_DEADLINE_S):
                    await reader
        if exit_code is None:
            await child.wait()
            return output.cut_off(self._play_s)
        return output.answer(exit_code)


class _CheckOutput:
    """What the process that plays a game says; of what the game prints a little is kept."""

    def __init__(self) -> None:
        self._memory = ErrorMemory()
        self._checks: list[GameCheck] = []
        self._has_ended = False

    async def add_lines(self, lines: list[str]) -> None:
        """Read checks and errors from lines of output."""
        for line in lines:
            if line == END:
                self._has_ended = True
            elif line.startswith(PREFIX):
                with contextlib.suppress(ValidationError):  # the game has printed this
                    self._checks.append(GameCheck.model_validate_json(line.removeprefix(PREFIX)))
            else:
                self._memory.note(line)
        del self._checks[MAX_CHECKS:]

    def answer(self, exit_code: int) -> PlayAnswer:
        """Say what was found by a process that ended so."""
        if self._has_ended:
            return PlayAnswer(checks=self._checks)
        return PlayAnswer(
            checks=self._checks,
            trouble=f"the process that played it ended: {self._memory.reason(exit_code)}",
            hint="a game must not end its process",
        )

    def cut_off(self, play_s: float) -> PlayAnswer:
        """Say what was found by a process that took too long, and was ended."""
        return PlayAnswer(
            checks=self._checks,
            trouble=f"it was not played within {play_s:.0f} s",
            hint="`tinkermq env check` without --on-node has no time limit and shows the time used",
        )


class ModelInspection:
    """Looks into models of jobs that may be submitted, one at a time."""

    def __init__(self, deadline_s: float = INSPECT_S) -> None:
        """Look into nothing yet."""
        self._deadline_s = deadline_s
        self._is_busy = False

    async def answer(self, question: InspectQuestion) -> PlayAnswer:
        """Look into a job's model; a node that looks into another already says so at once."""
        if self._is_busy:
            return PlayAnswer(known=False)
        self._is_busy = True
        try:
            return await self._inspected(question)
        finally:
            self._is_busy = False

    async def _inspected(self, question: InspectQuestion) -> PlayAnswer:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinkermq.actors.check_chat"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**without_secrets(os.environ), **ENVIRONMENT},
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        parameters: dict[str, Any] = {"config": question.config, "conversations": [], "gold": False}
        parameters["job"] = True
        try:
            async with asyncio.timeout(self._deadline_s):
                said, errors = await process.communicate(pack(parameters))
        except TimeoutError:
            return PlayAnswer(
                trouble=f"its model was not looked into within {self._deadline_s:.0f} s",
                hint="see whether its folder lies on a disk that answers",
            )
        finally:
            kill_group(process.pid)
            await process.wait()
        if process.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            return PlayAnswer(trouble=f"its model cannot be looked into: {' '.join(last)}"[:1000])
        fields: dict[str, Any] = json.loads(said.splitlines()[-1])
        if "error" in fields:
            return PlayAnswer(trouble=fields["error"]["message"], hint=fields["error"]["hint"])
        result = fields["checks"][:MAX_CHECKS]
        texts = (
            {**item, "detail": cut(item["detail"]), "hint": cut(item["hint"])} for item in result
        )
        return PlayAnswer(checks=[GameCheck.model_validate(text) for text in texts])


# -- models ----------------------------------------------------------------------------------------

"""What takes longer, such as a hub that does not answer, is left for the job to find out."""
_AT_ONCE = 8


class ModelChecks:
    """Answers questions after models, some at a time."""

    def __init__(self) -> None:
        """Have been asked nothing."""
        self._running: set[asyncio.Future[None]] = set()

    async def answer(self, question: ModelQuestion) -> ModelAnswer:
        """Say whether a model can be had, as far as that is known in time."""
        if len(self._running) >= _AT_ONCE:
            return ModelAnswer(known=False)
        check = check_model_alike if question.alike else check_model_is_here
        looking = asyncio.ensure_future(asyncio.to_thread(check, question.model))
        self._running.add(looking)
        looking.add_done_callback(self._ended)
        await asyncio.wait({looking}, timeout=ANSWER_S)
        if not looking.done():
            return ModelAnswer(known=False)
        error = looking.exception()
        if isinstance(error, TinkermqError):
            return ModelAnswer(known=True, missing=error.message, hint=error.hint)
        return ModelAnswer(known=error is None)

    def _ended(self, looking: "asyncio.Future[None]") -> None:
        self._running.discard(looking)
        looking.exception()  # retrieved, also if it is no longer awaited
