"""The interface to a cluster: list machines, request one, release one.

A source stores nothing: requests are found again in the cluster by name, so its caller may be
killed between any two calls. A machine has the name of the node that it starts.
"""

import asyncio
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import httpx

from ....schemas.wire.errors import DeadlineError, NotFoundError, PlacementError

_DIGITS = 8


@dataclass(frozen=True)
class Machine:
    """A machine as its cluster sees it."""

    name: str
    """Name of its node."""
    id: str
    """What the cluster calls it."""
    state: Literal["asked", "started", "leaving"]
    """leaving: the cluster takes it back."""
    started: float | None = None
    """In seconds since the epoch; None: not yet."""
    ends: float | None = None
    """When its time is up; None: never, or not known."""
    why: str = ""
    """What it waits for, in the cluster's words."""
    log: str = ""
    """What its node writes to, on the machine."""


class MachineSource(Protocol):
    """Where machines come from; errors are TinkermqError in the cluster's words."""

    async def list_machines(self) -> list[Machine]:
        """Return all machines of this pool at the cluster."""
        ...

    async def request_machine(self, name: str) -> None:
        """Ask for a machine; of two of one name no more than one ever runs.

        Raises PlacementError if the cluster refuses it.
        """
        ...

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        """Give a machine back; harmless if it has ended.

        With `drain` its node has the time that its actors need to write checkpoints.
        """
        ...


class MachineNames:
    """The names that a pool gives its machines: `tmq-<pool>-<number>`, the pool by its URL."""

    def __init__(self, url: str) -> None:
        """Name machines of the pool whose nodes reach its broker at `url`."""
        self.prefix = f"tmq-{hashlib.sha256(url.encode()).hexdigest()[:_DIGITS]}-"

    def own(self, name: str) -> bool:
        """Return whether a name is that of a machine of this pool."""
        return re.fullmatch(re.escape(self.prefix) + r"\d+", name) is not None

    def number(self, name: str) -> int:
        """Return the number of a machine of this pool."""
        return int(name.removeprefix(self.prefix))

    def free(self, taken: Iterable[str], count: int) -> list[str]:
        """Return the first free names, so that a repeated request is the same."""
        known = set(taken)
        collected: list[str] = []
        number = 1
        while len(collected) < count:
            name = f"{self.prefix}{number}"
            collected += [] if name in known else [name]
            number += 1
        return collected


# -- clusters behind commands ----------------------------------------------------------------------

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
        message = " ".join(complaint.decode(errors="replace").split()) or "it said nothing"
        raise PlacementError(
            f"{name} was refused (code {process.returncode}): {message}", hint=hints.refused
        )
    return written.decode(errors="replace")


# -- clusters behind HTTP --------------------------------------------------------------------------

_SILENCE_S = 20.0
_DEADLINE_S = 30.0
_MAX_BYTES = 64 << 20


class WebReply(NamedTuple):
    """What a cluster answered."""

    status: int
    text: str

    def last_line(self) -> str:
        """Return the sentence in which a traceback, or a plain text, says what is wrong."""
        lines = [line.strip() for line in self.text.splitlines() if len(line.strip()) > 1]
        return lines[-1] if lines else f"HTTP {self.status} and no word"


async def request(
    method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None, *, hint: str
) -> WebReply:
    """Ask; an answer of any status is one.

    Raises DeadlineError, and PlacementError with the reason of a failure; `hint` says what
    a person may do then.
    """
    try:
        async with (
            asyncio.timeout(_DEADLINE_S),
            httpx.AsyncClient(timeout=_SILENCE_S, follow_redirects=True) as client,
            client.stream(method, url, json=body, headers=headers) as reply,
        ):
            return WebReply(reply.status_code, await _text(reply))
    except (TimeoutError, httpx.TimeoutException) as error:
        raise DeadlineError(f"{url} did not answer in time", hint=hint) from error
    except httpx.HTTPError as error:
        raise PlacementError(f"{url} cannot be asked: {error}", hint=hint) from error


async def _text(reply: httpx.Response) -> str:
    """Read an answer to its end; one that is endless is none."""
    body = bytearray()
    async for part in reply.aiter_bytes():
        body += part
        if len(body) > _MAX_BYTES:
            raise TimeoutError
    return body.decode(errors="replace")
