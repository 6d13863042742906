"""One program behind walls, from outside: start it, wait for its end, end it with all it started.

The first process of its namespaces is its life: it ends when the program does, and takes whatever
the program left running with it. Nothing that the program says is believed but its exit code.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ....schemas.wire.errors import GameError, SandboxError
from ...sandbox.program import first_process, remedy
from ...sandbox.watch import first_child
from .output import OutputReader, Printed
from .walls import inside_command

T = TypeVar("T")
_START_S = 60.0
_INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH")
_SPOKEN_BYTES = 4096
_LAST_WORDS_S = 5.0
_launcher = ThreadPoolExecutor(1, thread_name_prefix="program-launcher")
"""Walls fall with the thread that set them up: this one lives as long as the process."""


@dataclass(frozen=True)
class Launch:
    """What is to be run."""

    bubblewrap: Sequence[str]
    """The command line up to the program."""
    python: Sequence[str]
    """What starts Python there."""
    filter: bytes
    """The system calls that it may not make."""
    orders: Mapping[str, Any]
    """What `inside.py` takes on first."""
    command: Sequence[str]
    environment: Mapping[str, str]


class WalledProgram:
    """A program that runs."""

    def __init__(self, bubblewrap: "subprocess.Popen[bytes]", first: int, printed: Printed) -> None:
        """`first` is the first process behind the walls."""
        self.first = first
        self.printed = printed
        self.started = time.monotonic()
        self._bubblewrap = bubblewrap
        self._handles = [os.pidfd_open(bubblewrap.pid)]
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._handles.append(os.pidfd_open(first))
        self.ended = asyncio.ensure_future(self._end())
        """Its exit code, 128 and the signal's number for one that a signal ended; done when no
        process of it is left."""

    async def _end(self) -> int:
        for handle in self._handles:
            await _readable(handle)
        return self._bubblewrap.wait()

    def terminate(self) -> None:
        """Ask it and the processes of its group to end."""
        program = first_child(self.first)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if program is not None:
                group = os.getpgid(program) == program
                (os.killpg if group else os.kill)(program, signal.SIGTERM)

    async def kill(self) -> int:
        """End it with all its processes; return its exit code when all are gone."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                if len(self._handles) > 1:
                    signal.pidfd_send_signal(self._handles[1], signal.SIGKILL)
                else:
                    self._bubblewrap.kill()
        return await asyncio.shield(self.ended)

    async def close(self) -> None:
        """Give back what it holds here; it has ended."""
        await self.ended
        for handle in self._handles:
            os.close(handle)
        self._handles = []


async def start(
    launch: Launch, reader: OutputReader, workers: Executor
) -> tuple[WalledProgram, socket.socket | None]:
    """Start a program; return it with the socket on which it finds the model, if it is to.

    Raises SandboxError where walls cannot be set up, with the remedy, and GameError for a command
    that cannot be run.
    """
    loop = asyncio.get_running_loop()
    beginning = loop.run_in_executor(_launcher, _begin, launch)
    try:
        begun = await surely(beginning)
    except OSError as error:
        raise SandboxError(
            f"no program can be started: {error}", hint="see the limits of the host's user"
        ) from error
    except asyncio.CancelledError:
        if beginning.exception() is None:
            await surely(_abandon(beginning.result(), None, reader, workers))
        raise
    printed = reader.follow(begun.out, begun.errors)
    settling = loop.run_in_executor(workers, begun.settle, launch)
    try:
        async with asyncio.timeout(_START_S):
            first, listening = await asyncio.shield(settling)
    except BaseException as error:
        await surely(_abandon(begun, settling, reader, workers, printed))
        if isinstance(error, TimeoutError):
            raise SandboxError(
                f"a program did not start within {_START_S:g} s", hint="see the machine's load"
            ) from None
        if isinstance(error, _NotStarted):
            raise error.explained(printed.tail().strip()) from None
        raise
    return WalledProgram(begun.process, first, printed), listening


async def surely(work: Awaitable[T]) -> T:
    """Finish what must be finished, also in a task that is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        task.exception()  # which is looked at, and of less weight
        raise asyncio.CancelledError
    return task.result()


async def _abandon(
    begun: "_Begun",
    settling: "asyncio.Future[tuple[int, socket.socket | None]] | None",
    reader: OutputReader,
    workers: Executor,
    printed: Printed | None = None,
) -> None:
    """End what has been begun, and hear what it said."""
    loop = asyncio.get_running_loop()
    begun.process.kill()  # at which whatever waits for it ends
    if settling is None or printed is None:
        printed = reader.follow(begun.out, begun.errors)
        begun.channel.close()
        os.close(begun.about)
    else:
        await asyncio.wait({settling})
        if settling.exception() is None and (unused := settling.result()[1]) is not None:
            unused.close()
    await loop.run_in_executor(workers, begun.process.wait)
    await loop.run_in_executor(workers, printed.ended.wait, _LAST_WORDS_S)


class _NotStarted(Exception):
    """Walls or a command that did not come about."""

    def __init__(self, told: str = "") -> None:
        super().__init__(told)
        self.told = told
        """What `inside.py` says of the command; empty where it never ran."""

    def explained(self, printed: str) -> SandboxError | GameError:
        if self.told:
            return GameError(
                f"the program cannot be run: {self.told}",
                hint="see agent.command; programs see the system's folders, the pool's "
                "interpreter and agent.read",
            )
        said = printed or "it ended without a word"
        return SandboxError(f"the walls of a program do not stand: {said}", hint=remedy(said))


@dataclass(frozen=True)
class _Begun:
    """Bubblewrap has been started, and our ends of what leads to it."""

    process: "subprocess.Popen[bytes]"
    out: int
    errors: int
    about: int
    channel: socket.socket

    def settle(self, launch: Launch) -> tuple[int, socket.socket | None]:
        """Give it its orders; return its first process and its socket, once the program runs."""
        orders = {
            **launch.orders,
            "command": list(launch.command),
            "environment": dict(launch.environment),
        }
        encoded = json.dumps(orders).encode()
        listening = None
        with self.channel as channel:
            try:
                first = first_process(self.about)
                channel.sendall(len(encoded).to_bytes(4, "little") + encoded)
                while told := self._told():
                    if not isinstance(told, socket.socket):
                        raise _NotStarted(told)
                    listening = told
                if launch.orders["port"] and listening is None:
                    raise _NotStarted
            except (OSError, ValueError) as error:
                raise _NotStarted from error
            except _NotStarted:
                if listening is not None:
                    listening.close()
                raise
        return first, listening

    def _told(self) -> "socket.socket | str":
        """Return what `inside.py` says next; nothing once it has become the program."""
        text, files, _, _ = socket.recv_fds(self.channel, _SPOKEN_BYTES, 1)
        if files:
            return socket.socket(fileno=files[0])
        return text.decode(errors="replace").removeprefix("!")


def _begin(launch: Launch) -> _Begun:
    """Start bubblewrap; runs in the launcher's thread."""
    out, out_in = os.pipe()
    errors, errors_in = os.pipe()
    about, about_in = os.pipe()
    rules, rules_in = os.pipe()
    ours, theirs = socket.socketpair()
    os.write(rules_in, launch.filter)
    os.close(rules_in)
    command = [*launch.bubblewrap, "--seccomp", str(rules), "--info-fd", str(about_in), "--"]
    command += inside_command(launch.python, [_INSIDE, str(theirs.fileno())])
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out_in,
            stderr=errors_in,
            pass_fds=(rules, about_in, theirs.fileno()),
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        )
    except OSError:
        for file in (out, errors, about):
            os.close(file)
        ours.close()
        raise
    finally:
        for file in (out_in, errors_in, about_in, rules):
            os.close(file)
        theirs.close()
    return _Begun(process, out, errors, about, ours)


async def _readable(file: int) -> None:
    """Wait until a descriptor can be read: one of a process, until it has ended."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        loop.remove_reader(file)
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(file, tell)
    try:
        await ready
    finally:
        loop.remove_reader(file)
