"""The interface to a cluster: list machines, request one, release one.

A source stores nothing: requests are found in the cluster by name, so its caller may be killed
between any two calls. A machine has the name of its node.
"""

import asyncio
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import httpx

from ....envs.proxies import ProxiedTransport
from ....schemas.machines import MachinesConfig
from ....schemas.wire.errors import DeadlineError, NotFoundError, PlacementError

_DIGITS = 8


@dataclass(frozen=True)
class Machine:
    """A machine as its cluster sees it."""

    name: str
    """Name of its node."""
    id: str
    """Its id in the cluster."""
    state: Literal["asked", "started", "leaving"]
    """State of the machine; leaving: the cluster is reclaiming it."""
    started: float | None = None
    """In seconds since the epoch; None: not yet."""
    ends: float | None = None
    """When its time limit ends, in seconds since the epoch; None: never, or unknown."""
    why: str = ""
    """Reason for its wait, in the cluster's words."""
    log: str = ""
    """The log file of its node, on the machine."""


class MachineSource(Protocol):
    """A cluster's machines; errors are TinkermqError in the cluster's words."""

    async def list_machines(self) -> list[Machine]:
        """Return all machines of this pool at the cluster."""
        ...

    async def request_machine(self, name: str) -> None:
        """Request a machine; of two requests with the same name only one ever runs.

        Raises PlacementError if the cluster refuses it.
        """
        ...

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        """Return a machine, unless it has ended.

        With `drain` its node has time for its actors to write checkpoints.
        """
        ...


class MachineNames:
    """The names that a pool gives its machines: `tmq-<pool>-<number>`, the pool by its URL."""

    def __init__(self, url: str) -> None:
        """Name machines of the pool whose nodes connect to its broker at `url`."""
        self.prefix = f"tmq-{hashlib.sha256(url.encode()).hexdigest()[:_DIGITS]}-"

    def own(self, name: str) -> bool:
        """Return whether a name is that of a machine of this pool."""
        return re.fullmatch(re.escape(self.prefix) + r"\d+", name) is not None

    def number(self, name: str) -> int:
        """Return the number of a machine of this pool."""
        return int(name.removeprefix(self.prefix))

    def free(self, used: Iterable[str], count: int) -> list[str]:
        """Return the first free names, so that a repeated request is identical."""
        known = set(used)
        collected: list[str] = []
        number = 1
        while len(collected) < count:
            name = f"{self.prefix}{number}"
            collected += [] if name in known else [name]
            number += 1
        return collected


ALLOCATED_GPUS = ' --gpus "$CUDA_VISIBLE_DEVICES"'
"""The slots of a node on the GPUs that its cluster has given it, for a shell."""


def node_command(config: MachinesConfig, url: str, name: str) -> list[str]:
    """Return the command that runs a machine's node, without its slots if these are GPUs."""
    words = [config.python, "-P", "-m", "tinkermq.actors.node", "--nats", url, "--name", name]
    return words if config.gpus else [*words, "--slots", str(config.slots)]


# -- clusters behind commands ----------------------------------------------------------------------

_TIMEOUT_S = 30.0


class CommandHints(NamedTuple):
    """Hints for a failed command."""

    missing: str
    late: str
    refused: str


async def run_command(
    command: Sequence[str], hints: CommandHints, environment: Mapping[str, str] | None = None
) -> str:
    """Run a command and return its output.

    Raises NotFoundError if it is not installed, DeadlineError, and PlacementError with its message.
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
            f"{command[0]} is not installed where the scheduler runs", hint=hints.missing
        ) from error
    return await _finished(process, command[0], hints)


async def _finished(process: asyncio.subprocess.Process, name: str, hints: CommandHints) -> str:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            written, complaint = await process.communicate()
    except TimeoutError as error:
        raise DeadlineError(
            f"{name} did not answer within {_TIMEOUT_S:g} s", hint=hints.late
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        message = " ".join(complaint.decode(errors="replace").split()) or "without a message"
        raise PlacementError(
            f"{name} was refused (code {process.returncode}): {message}", hint=hints.refused
        )
    return written.decode(errors="replace")


# -- clusters behind HTTP --------------------------------------------------------------------------

_SILENCE_S = 20.0
_DEADLINE_S = 30.0
_MAX_BYTES = 64 << 20


class WebReply(NamedTuple):
    """A cluster's answer."""

    status: int
    text: str

    def last_line(self) -> str:
        """Return the last line of a traceback or text, which has the reason."""
        lines = [line.strip() for line in self.text.splitlines() if len(line.strip()) > 1]
        return lines[-1] if lines else f"HTTP {self.status} and no word"


async def request(
    method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None, *, hint: str
) -> WebReply:
    """Send a request and return the answer, of any status.

    Raises DeadlineError, and PlacementError with the reason of a failure; both have `hint`.
    """
    try:
        async with (
            asyncio.timeout(_DEADLINE_S),
            httpx.AsyncClient(
                transport=ProxiedTransport(), timeout=_SILENCE_S, follow_redirects=True
            ) as client,
            client.stream(method, url, json=body, headers=headers) as reply,
        ):
            return WebReply(reply.status_code, await _text(reply))
    except (TimeoutError, httpx.TimeoutException) as error:
        raise DeadlineError(f"{url} did not answer in time", hint=hint) from error
    except httpx.HTTPError as error:
        raise PlacementError(f"{url} cannot be reached: {error}", hint=hint) from error


async def _text(reply: httpx.Response) -> str:
    """Read an answer to its end; raise for an endless one."""
    body = bytearray()
    async for part in reply.aiter_bytes():
        body += part
        if len(body) > _MAX_BYTES:
            raise TimeoutError
    return body.decode(errors="replace")
