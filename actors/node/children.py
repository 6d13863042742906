"""A node's child processes: programs of their own, or forks of the fork server.

Actors that need torch are forked from a process that has imported it, which takes a fiftieth of the
time and shares the memory of its modules. All others are started as programs, hosts of users' games
in a sandbox.
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import structlog

from ...broker.client.fair_queue import end_tasks
from ...envs import user_http
from ...schemas.local.folder import Folder
from ...schemas.local.process import die_with, is_killed_from_outside, num_oom_kills
from ...schemas.node import WantedActor
from ...schemas.wire.errors import ConfigError, StorageError
from ..storage.access import below_roots
from . import sandbox
from .fork_server import PACKET_BYTES, PING, ForkRequest

IDLE_S = 300.0
SILENCE_S = 120.0
_LOOKS = 12
"""Number of checks within `SILENCE_S`; a stop of the node itself counts as one check."""
_IMPORT_LOOKS = 5 * _LOOKS
"""Checks before the first answer: the server imports torch, possibly from a slow disk."""
_START_DEADLINE_S = 120.0
_END_S = 5.0
_FORKED_ROLES = frozenset(
    {"learner", "rank", "generator", "evaluator", "server", "trainer", "sampler"}
)
WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Settings of libraries that otherwise start a thread when they are imported."""
_WRITES = frozenset({"learner", "rank"})
_OWN_LINK = re.compile(r"(latest|best)|\.(latest|best)\.[0-9]+")
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Child(Protocol):
    """A running child, the leader of its own process group."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    async def wait(self) -> int:
        """Wait for its end and return its exit code, -n for signal n."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM so that it drains; ProcessLookupError when it has ended."""
        ...


class StartFailed(OSError):
    """An actor could not be started for an external reason; the start is repeated."""


class CannotFork(OSError):
    """A library that actors need starts threads when imported, which a fork would lose."""


StartChild = Callable[[WantedActor, Mapping[str, str], int], Awaitable[Child]]
"""`await start(spec, environment, output)`: start an actor whose output goes to a descriptor.

Raises OSError when it cannot be started.
"""


async def spawn(command: list[str], environment: Mapping[str, str], output: int) -> Child:
    """Start a program; it dies with this process."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **environment},
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),
    )


def programs(command: Callable[[WantedActor], list[str]]) -> StartChild:
    """Return a function that starts every actor as the program of `command`."""

    def start(spec: WantedActor, environment: Mapping[str, str], output: int) -> Awaitable[Child]:
        return spawn(command(spec), environment, output)

    return start


class ActorStarter:
    """Starts the actors of a node: forked, as a program, or in a sandbox."""

    def __init__(self, *, sandbox_games: bool = False) -> None:
        """The fork server starts with the first actor that needs it.

        With `sandbox_games`, environment hosts cannot see anything of other jobs, and jobs name
        only URLs that users of the pool reach.
        """
        self._server = ForkServer()
        self._sandboxes = sandbox.SandboxStarter() if sandbox_games else None

    async def start(
        self,
        spec: WantedActor,
        environment: Mapping[str, str],
        output: int,
    ) -> Child:
        """Start an actor.

        Its run folder may have become a link since the job was accepted. Raises OSError, and
        StartRefused if a second attempt would not help.
        """
        if self._sandboxes is not None:
            urls = os.environ.get(user_http.VARIABLE, "")
            environment = {**environment, user_http.VARIABLE: urls}
        try:
            below_roots("run_dir", spec.run_dir, [Path(root) for root in spec.output_roots])
            if self._sandboxes is not None and spec.role in _WRITES:
                await asyncio.to_thread(_refuse_led_away, Path(spec.run_dir))
        except (ConfigError, StorageError) as error:
            may_pass = isinstance(error, StorageError) and error.is_full
            raise (OSError(str(error)) if may_pass else sandbox.StartRefused.of(error)) from error
        if sys.platform == "linux" and spec.role in _FORKED_ROLES:
            with contextlib.suppress(CannotFork):
                return await self._server.fork(spec, environment, output)
        command = [
            *(sys.executable, "-P", "-m", sandbox.actor_module(spec)),
            *sandbox.actor_argv(spec),
        ]
        if spec.role == "environment" and self._sandboxes is not None:
            if spec.programs is None:
                return await self._sandboxes.start(command, spec, environment, output)
            try:
                await asyncio.to_thread(sandbox.check_programs, spec)  # disks may be slow
            except sandbox.PathRefused as error:
                raise sandbox.StartRefused.of(error) from error
        return await spawn(command, environment, output)

    async def close(self) -> None:
        """End the fork server."""
        await self._server.close()


def _refuse_led_away(run_dir: Path) -> None:
    """Raise StorageError for a run folder in which a learner would write through a link.

    Whoever may write the folder may have made links. A learner's own links lead to its checkpoints;
    it makes them anew and never writes through them.
    """
    if os.path.realpath(run_dir) != str(run_dir):
        led: str | None = "."
    else:
        with Folder(run_dir, make=True) as folder:
            led = next((item for item in folder.strange() if not _OWN_LINK.fullmatch(item)), None)
    if led is not None:
        raise StorageError(
            f"{run_dir / led} is a link, or no regular file: a learner would write through it",
            hint="remove it; the folder of a run holds what its learner has written",
        )


class ForkedChild:
    """An actor that the fork server made."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return await asyncio.shield(self.ended)

    def terminate(self) -> None:
        """Send SIGTERM so that it drains."""
        os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """The node's side of the fork server.

    An idle server is ended after a while. One that does not answer for `silence_s`, for example
    because it was stopped, is killed with its actors: their ends would not be reported, and no
    other actor could be started.
    """

    def __init__(self, idle_s: float = IDLE_S, silence_s: float = SILENCE_S) -> None:
        self._idle_s = idle_s
        self._silence_s = silence_s
        self._is_heard = False
        self._num_looks = _IMPORT_LOOKS
        """Number of consecutive checks without an answer after which it is killed."""
        self._watching = set[asyncio.Task[None]]()
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._numbers = itertools.count()
        self._forks: dict[int, asyncio.Future[ForkedChild]] = {}
        self._children: dict[int, ForkedChild] = {}
        self._idle: asyncio.TimerHandle | None = None
        self._starting = asyncio.Lock()
        self._threads = ""

    @property
    def pid(self) -> int | None:
        """Process id, while it can fork actors."""
        return self._process.pid if self._process and self._channel else None

    async def fork(self, spec: WantedActor, environment: Mapping[str, str], output: int) -> Child:
        """Fork an actor.

        Raises StartFailed if the server was killed from outside meanwhile, OSError if it cannot
        fork now, CannotFork if it never can.
        """
        if self._threads:
            raise CannotFork(self._threads)
        loop = asyncio.get_running_loop()
        if self._idle is not None:
            self._idle.cancel()
        request = ForkRequest(
            next(self._numbers),
            f"{sandbox.actor_module(spec)}.__main__",
            sandbox.actor_argv(spec),
            dict(environment),
        )
        future = self._forks[request.number] = loop.create_future()
        process, oom_kills = None, num_oom_kills()
        try:
            async with asyncio.timeout(_START_DEADLINE_S):
                async with self._starting:
                    channel = self._channel or await self._start()
                    process = self._process
                    await _send(channel, request, output)
                return await future
        except TimeoutError as slow:
            raise OSError(
                f"no actor was forked within {_START_DEADLINE_S:.0f} s; see the node's log"
            ) from slow
        except OSError as error:
            if self._threads:  # the server reported so while this request was sent
                raise CannotFork(self._threads) from error
            if process is not None and await self._was_killed(process, error, oom_kills):
                raise StartFailed(str(error)) from error
            raise
        finally:
            del self._forks[request.number]

    async def _was_killed(
        self, process: asyncio.subprocess.Process, error: OSError, oom_kills: int | None
    ) -> bool:
        """Return whether a start failed since the server was ended by a signal from outside."""
        is_current = self._channel is not None and self._process is process
        if is_current and not isinstance(error, ConnectionError):
            return False  # it answered that it cannot fork
        has_ended = await _has_ended(process, _END_S)
        return has_ended and is_killed_from_outside(process.returncode, oom_kills)

    async def close(self) -> None:
        """End the server; its actors must have ended before."""
        process, self._process = self._process, None
        if self._channel is not None:
            self._hang_up(self._channel)
        await end_tasks(self._watching)
        if process is None:
            return
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            _log.error("fork_server_hangs", pid=process.pid, silent_s=_END_S)
            process.kill()
            await process.wait()

    async def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "tinkermq.actors.node.fork_server",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **sandbox.ENVIRONMENT, **WITHOUT_THREADS},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._read_answer, ours)
        self._channel = ours
        ours.send(PING)
        self._is_heard, self._num_looks = False, _IMPORT_LOOKS
        watch = asyncio.create_task(self._watch(self._process, ours), name="fork server")
        self._watching.add(watch)
        watch.add_done_callback(self._watching.discard)
        _log.info("fork_server_started", pid=self._process.pid)
        return ours

    async def _watch(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        """Wait for the end of a server; kill it if it does not answer or end in time."""
        num_silent, look_s = 0, self._silence_s / _LOOKS
        while not await _has_ended(process, look_s):
            is_used = self._channel is channel
            if is_used and self._is_heard:
                self._is_heard, num_silent = False, 0
                with contextlib.suppress(OSError):  # requests fill the channel, or the server died
                    channel.send(PING)
            num_silent += 1
            if num_silent > (self._num_looks if is_used else _LOOKS):
                _log.error(
                    "fork_server_hangs",
                    pid=process.pid,
                    silent_s=num_silent * look_s,
                    hint="it is killed, and its actors with it; the next one that starts has "
                    "another",
                )
                process.kill()
                num_silent = 0

    def _read_answer(self, channel: socket.socket) -> None:
        """Read one answer of the server."""
        try:
            packet = channel.recv(PACKET_BYTES)
        except (BlockingIOError, ConnectionResetError):  # after a reset, the rest is readable
            return
        except OSError:
            packet = b""
        if not packet:
            self._note_death(channel)
            return
        self._is_heard, self._num_looks = True, _LOOKS
        if packet == PING:
            return
        fields = json.loads(packet)
        if "threads" in fields:
            self._threads = fields["threads"]
            _log.warning(
                "actors_are_not_forked",
                threads=self._threads,
                hint="libraries of this environment start threads as they are imported; actors "
                "start as programs, which takes seconds longer",
            )
            self._hang_up(channel)
            for fork in self._forks.values():
                if not fork.done():
                    fork.set_exception(CannotFork(self._threads))
        elif "error" in fields:
            fork = self._forks.get(fields["number"])
            if fork is not None and not fork.done():
                fork.set_exception(OSError(f"no process could be made: {fields['error']}"))
        elif "exit_code" in fields:
            self._children.pop(fields["pid"]).ended.set_result(fields["exit_code"])
            if not self._children and not self._forks:
                loop = asyncio.get_running_loop()
                self._idle = loop.call_later(self._idle_s, self._hang_up, channel)
        else:
            child = self._children[fields["pid"]] = ForkedChild(fields["pid"])
            future = self._forks.get(fields["number"])
            if future is None or future.done():  # no longer awaited
                os.kill(child.pid, signal.SIGKILL)
            else:
                future.set_result(child)

    def _note_death(self, channel: socket.socket) -> None:
        """Note that the server has died with its actors: the next fork starts another."""
        self._hang_up(channel)
        for child in self._children.values():
            child.ended.set_result(-9)
        self._children.clear()
        for fork in self._forks.values():
            if not fork.done():
                fork.set_exception(OSError("the fork server has died; see the node's log"))

    def _hang_up(self, channel: socket.socket) -> None:
        """Close our end of the channel, which ends the server."""
        if self._channel is channel:
            self._channel = None
            asyncio.get_running_loop().remove_reader(channel)
            channel.close()


async def _has_ended(process: asyncio.subprocess.Process, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


async def _send(channel: socket.socket, request: ForkRequest, output: int) -> None:
    while True:
        try:
            socket.send_fds(channel, [request.to_bytes()], [output])
        except BlockingIOError:  # it is still importing, with many pending requests
            await asyncio.sleep(0.05)
        else:
            return
