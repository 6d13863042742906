"""Commands by which a cluster is asked: their words, or what they refused in their own."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ....schemas.wire.errors import DeadlineError, NotFoundError, PlacementError

_TIMEOUT_S = 30.0


class CommandHints(NamedTuple):
    """What a person may do about a command that fails."""

    missing: str
    late: str
    refused: str


async def run_command(
    command: Sequence[str], hints: CommandHints, environment: Mapping[str, str] | None = None
) -> str:
    """Run a command and return what it wrote.

    Raises NotFoundError where there is none, DeadlineError, and PlacementError with its own words.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
    except FileNotFoundError as error:
        raise NotFoundError(
            f"there is no {command[0]} where the scheduler runs", hint=hints.missing
        ) from error
    return await _finished(process, command[0], hints)


async def _finished(process: asyncio.subprocess.Process, name: str, hints: CommandHints) -> str:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            written, complaint = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise DeadlineError(
            f"{name} did not answer within {_TIMEOUT_S:g} s", hint=hints.late
        ) from error
    if process.returncode:
        said = " ".join(complaint.decode(errors="replace").split()) or "it said nothing"
        raise PlacementError(
            f"{name} was refused (code {process.returncode}): {said}", hint=hints.refused
        )
    return written.decode(errors="replace")
