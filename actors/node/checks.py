"""The checks that a node runs before a job is queued: of its files, its game and its model.

Looking for files and packages runs no code of the game. A model is inspected by a process with the
code of the run (see `schemas/checks.py`).
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...broker.client.login import without_secrets
from ...broker.client.rpc import Service
from ...envs.dataset import is_dataset_name, saved_files
from ...envs.registry import find_game, find_module
from ...envs.sandbox.shown import code_folders
from ...envs.task_folders import holds_tasks
from ...schemas.checks import (
    LAST_LINE,
    Check,
    CheckReply,
    CheckResult,
    CheckSkipped,
    failed_check,
    read_result,
    run_checks,
)
from ...schemas.config.agent import TaskSource
from ...schemas.local.disk import DiskThreads
from ...schemas.local.process import die_with
from ...schemas.node import InspectQuestion, LookQuestion, ModelQuestion
from ...schemas.wire.codec import pack
from ...schemas.wire.errors import DataError, ModelError, TinkermqError, counted
from ...schemas.wire.subjects import node as node_subject
from ..policy.model_folder import check_model_alike, check_model_is_here
from ..storage.access import without_tilde
from .process import ErrorMemory, kill_group
from .sandbox import ENVIRONMENT

ANSWER_S = 10.0
"""If a file system or the hub takes longer, the reply is `done: false`: the job itself finds out.
"""
_INSPECT_S = 120.0
"""An inspection of a model that takes longer is ended."""
_MAX_RESULTS = 32
_MAX_LOOKS = 8
"""Concurrent lookups of one user of files, or of models, including those on hanging disks."""
_UNKNOWN = CheckReply(done=False)


async def serve_checks(service: Service, node: str, *, sandbox_games: bool) -> None:
    """Answer the scheduler's checks; `sandbox_games`: code of users runs in sandboxes."""
    model, inspection = ModelChecks(), _ModelInspection()
    look = FileChecks(sandbox_games=sandbox_games)
    await service.endpoint("model", node_subject(node, "model"), ModelQuestion, model.answer)
    await service.endpoint("look", node_subject(node, "look"), LookQuestion, look.answer)
    await service.endpoint(
        "inspect", node_subject(node, "inspect"), InspectQuestion, inspection.answer
    )


# -- checks of files and models --------------------------------------------------------------------


class FileChecks:
    """Looks for data files and the packages of games, with bounded concurrency."""

    def __init__(self, *, sandbox_games: bool = False) -> None:
        """Start without threads; `sandbox_games`: code of users runs in sandboxes."""
        self._threads = DiskThreads(_MAX_LOOKS, ANSWER_S)
        self._check = partial(check_files_now, shown=code_folders() if sandbox_games else ())

    async def answer(self, question: LookQuestion) -> CheckReply:
        """Return the files and packages found, if the disk answers in time."""
        try:
            return await self._threads.look(question.user, self._check, question)
        except TimeoutError:
            return _UNKNOWN


def check_files_now(question: LookQuestion, shown: Sequence[Path] = ()) -> CheckReply:
    """Look for the files, and for the modules of the game and of functions, in `shown` if given."""
    checks: list[Check] = []
    if question.files:
        checks.append(Check("data", lambda: _check_files(question.files)))
    if question.game:
        checks.append(Check("game", lambda: _check_package(question.game, shown)))
    if question.functions:
        checks.append(Check("functions", lambda: _check_modules(question.functions, shown)))
    return CheckReply(results=list(run_checks(checks)))


def _check_files(names: list[str]) -> str:
    missing = [name for name in names if not _is_dataset(name)]
    if missing:
        raise DataError(
            f"there is no file {', '.join(missing[:3])}",
            hint="give files that the nodes see, by whole paths, or bring these there",
        )
    return f"{counted(len(names), 'file')} found"


def _check_package(game: str, shown: Sequence[Path]) -> str:
    return f"{find_game(game, shown)}: its package is there; `tinkermq env check` plays it"


def _check_modules(functions: list[str], shown: Sequence[Path]) -> str:
    for function in functions:
        find_module(function, f"function {function!r}", shown)
    return f"the modules of {', '.join(functions)} are there"


def _is_dataset(name: str) -> bool:
    """Return whether a dataset exists; the existence of other files and folders is not revealed."""
    source = TaskSource.parse(name)
    if source is not None:
        return holds_tasks(source)
    path = without_tilde(name)
    return (is_dataset_name(path) and path.is_file()) or bool(saved_files(path))


class ModelChecks:
    """Looks for models, with bounded concurrency."""

    def __init__(self) -> None:
        """Start without threads."""
        self._threads = DiskThreads(_MAX_LOOKS, ANSWER_S)
        self._num_running = Counter[str]()

    async def answer(self, question: ModelQuestion) -> CheckReply:
        """Return whether a model can be loaded, if known in time."""
        user = question.user
        if self._num_running[user] >= _MAX_LOOKS:
            return _UNKNOWN
        check = check_model_alike if question.alike else check_model_is_here
        self._num_running[user] += 1
        try:
            await self._threads.look(user, check, question.model)
        except TinkermqError as error:
            return CheckReply(results=[failed_check("model", error)])
        except Exception:  # noqa: BLE001  any library's error: the job itself finds out
            return _UNKNOWN
        finally:
            self._num_running -= Counter([user])
        detail = f"{question.model} is there"
        return CheckReply(results=[CheckResult(name="model", outcome="ok", detail=detail)])


# -- processes that inspect a model ----------------------------------------------------------------


class _Output:
    """The output of a process of checks: its results, and the end of its other output."""

    def __init__(self) -> None:
        self._memory = ErrorMemory()
        self._results: list[CheckResult] = []
        self._is_complete = False

    async def add_lines(self, lines: list[str]) -> None:
        """Read results and errors from lines of output."""
        for line in lines:
            if line == LAST_LINE:
                self._is_complete = True
            elif (result := read_result(line)) is not None:
                self._results.append(result.bounded())
            else:
                self._memory.note(line)
        del self._results[_MAX_RESULTS:]

    def reply(self, name: str, error: TinkermqError) -> CheckReply:
        """Return the results, with a failed check `name` if the process did not complete."""
        if self._is_complete:
            return CheckReply(results=self._results)
        return CheckReply(results=[*self._results, failed_check(name, error).bounded()])

    def reason(self, exit_code: int) -> str:
        """Describe how the process ended."""
        return self._memory.reason(exit_code)


class _ModelInspection:
    """Inspects models of jobs before submission, one at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def answer(self, question: InspectQuestion) -> CheckReply:
        """Inspect a job's model; a node that already inspects one replies that it is not done."""
        if self._turn.locked():
            return _UNKNOWN
        async with self._turn:
            return await self._inspect(question)

    async def _inspect(self, question: InspectQuestion) -> CheckReply:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tinkermq.actors.model_checks"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**without_secrets(os.environ), **ENVIRONMENT},
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        request: dict[str, Any] = {"config": question.config, "exchanges": []}
        request |= {"gold": False, "whole": True}
        output = _Output()
        try:
            async with asyncio.timeout(_INSPECT_S):
                printed, _ = await process.communicate(pack(request))
        except TimeoutError:
            late = CheckSkipped(  # slowness says nothing about the model
                f"the model was not inspected within {_INSPECT_S:.0f} s",
                hint="the disk of its folder, or the node, may be slow",
            )
            return output.reply("model", late)
        finally:
            kill_group(process.pid)
            await process.wait()
        await output.add_lines(printed.decode(errors="replace").splitlines())
        ended = ModelError(
            f"the model cannot be inspected: {output.reason(process.returncode or 0)}"
        )
        return output.reply("model", ended)
