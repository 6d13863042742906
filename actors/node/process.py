"""One actor of a job as a child process, restarted until it is done, stopped or given up.

Exit code 0 means done. 2 is an error that a restart cannot repair, like a refused start. 3 is the
end of a drain that this node did not request: the actor is restarted. Any other end is a crash: the
actor is restarted after a growing delay, as is an actor without a heartbeat. Crashes are counted;
an end by a signal from outside is not. The child leads its own process group and dies with the
node.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeVar, cast

import structlog

from ...schemas.local.disk import append_to
from ...schemas.local.folder import Folder
from ...schemas.local.process import is_killed_from_outside, num_oom_kills
from ...schemas.metric import LogLines, Presence
from ...schemas.node import ActorStatus, WantedActor
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import ConfigError, StorageError, TinkermqError
from ..runtime import EXIT_CRASHED, EXIT_DONE, EXIT_DRAINED, EXIT_FAILED
from .children import Child, StartChild, StartFailed
from .sandbox import StartRefused, actor_environment

# -- the output of an actor ------------------------------------------------------------------------
#
# Output never blocks an actor: lines wait for the broker in a bounded queue, which drops the oldest
# when it is full. The file always has them.

MAX_LINE_BYTES = 16 * 1024
_MAX_FILE_BYTES = 16 * 2**20
MAX_WAITING_LINES = 5_000
TAIL_LINES = 20
MAX_REASON_CHARS = 1500
"""Longest reason of an actor's end: the reasons of all actors of a node share one message."""
_BATCH_LINES = 500
_BATCH_BYTES = 256 * 1024
"""Size of a message with lines, which any server accepts; a single line is shorter."""
_PIPE_BYTES = 2**20
"""The most that a pipe holds."""
_FLUSH_S = 0.2
_DRAIN_DEADLINE_S = 2.0
"""Longest wait for a message to be sent: the broker may be away."""
_WRITE_DEADLINE_S = 30.0
"""Deadline for writing an actor's last lines, which tell why it ended, to a busy disk."""

SendLines = Callable[[LogLines], Awaitable[None]]
T = TypeVar("T")
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class LineSplitter:
    """Cuts a stream of bytes into lines; a line over the limit is cut into several."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Return the lines that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        cut: list[bytes] = []
        for line in lines:
            cut += _pieces(line) or [b""]
        while len(self._rest) > MAX_LINE_BYTES:
            cut.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        return [_text(line) for line in cut]

    def end(self) -> list[str]:
        """Return the last line if it has no line end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


async def read_lines(pipe: int, take: Callable[[list[str]], Awaitable[None]]) -> None:
    """Forward the lines of a pipe until its other end is closed; closes `pipe`.

    When cancelled, it forwards what was written before.
    """
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    file = os.fdopen(pipe, "rb", 0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), file)
    splitter = LineSplitter()
    try:
        while chunk := await stream.read(64 * 1024):
            await take(splitter.feed(chunk))
    finally:
        transport.close()
        if not file.closed and (rest := file.read(_PIPE_BYTES)):
            stream.feed_data(rest)
        stream.feed_eof()
        await take(splitter.feed(await stream.read()) + splitter.end())


def _pieces(line: bytes) -> list[bytes]:
    return [line[at : at + MAX_LINE_BYTES] for at in range(0, len(line), MAX_LINE_BYTES)]


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode("utf-8", errors="replace")


class ErrorMemory:
    """Stores why an actor ended: its last reported error, else the end of its output."""

    def __init__(self) -> None:
        self._reported = ""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def note(self, line: str) -> None:
        """Process a line of output."""
        self._tail.append(line)
        if '"actor_failed"' in line or '"actor_crashed"' in line:
            self._reported = _error_in(line) or self._reported

    def forget(self) -> None:
        """Forget everything before the next process."""
        self._reported = ""
        self._tail.clear()

    def reason(self, exit_code: int) -> str:
        """Return why the process ended."""
        if self._reported:
            return self._reported[:MAX_REASON_CHARS]
        how = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        tail = "\n".join(self._tail)[-MAX_REASON_CHARS:]
        return f"{how}\n{tail}" if tail else how


def _error_in(line: str) -> str:
    try:
        value: Any = read_json(line)
    except ValueError:
        return ""
    if not isinstance(value, dict):
        return ""
    fields = cast("dict[str, Any]", value)
    if fields.get("event") == "actor_crashed":
        traceback = str(fields.get("exception", "")).splitlines()
        return "\n".join(["crashed:", *traceback[-TAIL_LINES:]])
    if fields.get("event") != "actor_failed":
        return ""
    text = f"{fields.get('code', 'internal')}: {fields.get('message', '')}"
    hint = fields.get("hint")
    return f"{text}\n  {hint}" if hint else text


class LogFile:
    """A log file that is renamed to `<name>.1` when it is full, so at most two files are kept.

    It is in the folder of a run, where links that jobs make are not followed.
    """

    def __init__(self, run_dir: Path, name: str, max_bytes: int = _MAX_FILE_BYTES) -> None:
        self._run_dir = run_dir
        self._name = name
        self._max_bytes = max_bytes
        self._lock = Lock()

    def append(self, lines: list[str]) -> None:
        """Write lines, all or none; OSError (full disk, no right) and StorageError are raised."""
        with self._lock, Folder(self._run_dir, make=True) as folder:
            if append_to(folder.append(self._name), lines) >= self._max_bytes:
                folder.rename(self._name, f"{self._name}.1")


class ActorOutput:
    """All output of one actor over its restarts."""

    def __init__(self, actor: str, attempt: int, file: LogFile, send: SendLines) -> None:
        self.errors = ErrorMemory()
        self._actor = actor
        self._attempt = attempt
        self._file = file
        self._send = send
        self._waiting: deque[str] = deque(maxlen=MAX_WAITING_LINES)
        self._sending: list[str] = []
        self._unwritten: list[str] = []
        self._broken = False
        self._at_file, self._at_broker = asyncio.Lock(), asyncio.Lock()

    def add(self, lines: list[str]) -> None:
        """Queue lines for the file and the broker."""
        for line in lines:
            self.errors.note(line)
        self._unwritten += lines
        self._waiting.extend(lines)

    async def read(self, pipe: int) -> None:
        """Read the output of one process until the other end is closed; closes `pipe`."""
        await read_lines(pipe, self._add_lines)

    async def _add_lines(self, lines: list[str]) -> None:
        self.add(lines)
        if len(self._unwritten) > MAX_WAITING_LINES:
            await self._write()

    async def flush_forever(self) -> None:
        """Write and send every fifth of a second; cancel to end, then call `drain`."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            await self._flush()

    async def drain(self) -> None:
        """Write and send the remaining lines, without waiting for an absent broker."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WRITE_DEADLINE_S):
                await self._write()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_DEADLINE_S) as patience:
                while self._unwritten or self._waiting or self._sending:
                    await self._write()
                    if await self._send_batch():
                        now = asyncio.get_running_loop().time()
                        patience.reschedule(now + _DRAIN_DEADLINE_S)
                    else:
                        await asyncio.sleep(0.02)

    async def _flush(self) -> None:
        await self._write()
        while await self._send_batch():
            pass

    async def _send_batch(self) -> bool:
        """Send the next lines; False if there are none, or the broker is away."""
        return await _finished(self._send_next())

    async def _send_next(self) -> bool:
        async with self._at_broker:
            self._fill()
            if not self._sending:
                return False
            try:
                await self._send(self._batch())
            except TinkermqError:  # the same lines are sent next time
                return False
            self._sending = []
            return True

    def _fill(self) -> None:
        """Return as many lines as one message may hold; escaped text is longer than its source."""
        num_bytes = sum(len(line.encode()) for line in self._sending)
        while self._waiting and len(self._sending) < _BATCH_LINES:
            num_bytes += len(self._waiting[0].encode())
            if self._sending and num_bytes > _BATCH_BYTES:
                return
            self._sending.append(self._waiting.popleft())

    def _batch(self) -> LogLines:
        return LogLines(
            actor=self._actor, attempt=self._attempt, lines=list(self._sending), time=time.time()
        )

    async def _write(self) -> None:
        await _finished(self._append())

    async def _append(self) -> None:
        async with self._at_file:
            lines, self._unwritten = self._unwritten, []
            if not lines:
                return
            try:
                await asyncio.to_thread(self._file.append, lines)
                self._broken = False
            except (OSError, StorageError) as error:
                if not self._broken:
                    _log.warning("log_file_broken", child=self._actor, error=str(error))
                self._broken = True
                waiting = [*lines, *self._unwritten]
                self._unwritten = waiting[-MAX_WAITING_LINES:]  # once there is room


def _finished(work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Await `work` to its end even if the caller is cancelled; the next call waits for it."""
    return asyncio.shield(asyncio.create_task(work))


# -- restarts of crashed actors, and when they end (pure) -----------------------------------------
#
# An actor is given up if it fails too often within the window, or too often without finishing any
# work in between, however long that takes: an actor that repeatedly misses a deadline would
# otherwise look healthy for ever.

WINDOW_S = 600.0
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0


class Backoff:
    """Counts an actor's failures: each doubles the delay, too many are final."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_failures = 0
        self.num_fruitless = 0
        """Consecutive failures of processes that did not finish any work."""
        self._recent: list[float] = []
        self._kills: list[float] = []

    @property
    def is_hasty(self) -> bool:
        """Return whether there are too many failures within the window."""
        return len(self._recent) > self.max_restarts

    def after_failure(self, now: float, *, progress: bool | None = False) -> float | None:
        """Return the seconds to wait before the next start; None: give up.

        `progress`: whether the process had finished some work; None: unknown.
        """
        self.num_failures += 1
        if progress is not None:
            self.num_fruitless = 0 if progress else self.num_fruitless + 1
        self._recent = [time for time in self._recent if now - time < WINDOW_S] + [now]
        if self.is_hasty or self.num_fruitless > self.max_restarts:
            return None
        return min(FIRST_DELAY_S * 2 ** (len(self._recent) - 1), MAX_DELAY_S)

    def after_kill(self, now: float) -> float:
        """Return the seconds to wait after an end from outside, which counts as no failure."""
        self._kills = [time for time in self._kills if now - time < WINDOW_S] + [now]
        return min(FIRST_DELAY_S * 2 ** (len(self._kills) - 1), MAX_DELAY_S)


STOP_DEADLINE_S = 20.0
PIPE_DEADLINE_S = 1.0
"""How long to read a pipe after its process ended: a grandchild may hold it."""
SILENCE_REPORTED_S = 30.0
SILENCE_LOOK_S = 5.0
SILENCE_S = 120.0
"""Without a heartbeat for so long, an actor that had sent some is restarted."""
_SILENCE_OF_ROLE_S: dict[str, float] = dict.fromkeys(("learner", "rank", "trainer"), 300.0)
"""Bounds of roles whose work holds Python's lock for long, such as writing tens of gigabytes."""
START_SILENCE_S = 600.0
"""How long a process may import modules before its first heartbeat."""
SILENCE_VARIABLE = "TINKERMQ_ACTOR_SILENCE_S"
"""Environment variable of a node: the bound of all its actors, whatever their role."""


ReadBeat = Callable[[], Awaitable[Presence | None]]


async def no_beat() -> None:
    """Return no heartbeat."""


def silence_bound() -> float | None:
    """Return the operator's bound for an actor without heartbeats, in seconds; None: by its role.

    Raises ConfigError for a value that is not a positive number.
    """
    if not (text := os.environ.get(SILENCE_VARIABLE, "")):
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(
            f"${SILENCE_VARIABLE} is {text!r}", hint="give a positive number of seconds"
        )
    return seconds


class ActorProcess:
    """Runs one actor; `run` is the owner's task, `status` the report to the scheduler."""

    def __init__(
        self,
        spec: WantedActor,
        *,
        start: StartChild,
        nats_url: str,
        send: SendLines,
        gpus: Sequence[str] | None = None,
        stop_deadline_s: float = STOP_DEADLINE_S,
        changed: Callable[[], None] = lambda: None,
        last_beat: ReadBeat = no_beat,
        silence_s: float | None = None,
        start_silence_s: float = START_SILENCE_S,
        silence_look_s: float = SILENCE_LOOK_S,
    ) -> None:
        """`changed` is called whenever `status` changes; `last_beat` reads the actor's last
        heartbeat.

        `silence_s` is the longest time without one, None: by its role, `start_silence_s` before the
        first.
        """
        self._last_beat = last_beat
        self._silence_s = silence_s or _SILENCE_OF_ROLE_S.get(spec.role, SILENCE_S)
        self._start_silence_s = max(self._silence_s, start_silence_s)
        self._silence_look_s = silence_look_s
        self._silent_s = 0.0
        self.spec = spec
        self._changed = changed
        self.stopping = False
        self.ended = False
        self._start_child = start
        self._environment = actor_environment(spec, nats_url, gpus)
        self._stop_deadline_s = stop_deadline_s
        self._backoff = Backoff(spec.max_restarts)
        name = f"logs/attempt_{spec.attempt}/{spec.name}.log"
        self._output = ActorOutput(spec.name, spec.attempt, LogFile(Path(spec.run_dir), name), send)
        self._state: Literal["running", "restarting", "exited", "failed"] = "restarting"
        self._num_starts = 0
        self._started = 0.0
        self._oom_kills: int | None = None
        self._was_silent = False
        """Whether the last process was killed since it sent no heartbeat."""
        self._exit_code: int | None = None
        self._error = ""
        self._process: Child | None = None
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    @property
    def status(self) -> ActorStatus:
        """The state of the actor, as the node reports it."""
        spec = self.spec
        return ActorStatus(
            user=spec.user,
            job=spec.job,
            name=spec.name,
            slots=0 if self._state in {"exited", "failed"} else spec.slots,
            devices=spec.devices,
            attempt=spec.attempt,
            state=self._state,
            exit_code=self._exit_code,
            restarts=max(self._num_starts - 1, 0),
            error=self._error,
            fruitless=self._backoff.num_fruitless,
            silent_s=self._silent_s if self._state == "running" else 0.0,
            pid=self._process.pid if self._process and self._state == "running" else None,
        )

    def stop(self, *, kill: bool = False) -> None:
        """Ask the process to drain (SIGTERM), or end it at once; harmless when repeated."""
        self.stopping = True
        self._stop.set()
        if kill:
            self._kill.set()

    async def run(self) -> None:
        """Start the actor, again after a crash, until it has ended; then `ended` is True."""
        flusher = asyncio.create_task(self._output.flush_forever())
        try:
            while not self._stop.is_set():
                self._exit_code = await self._run_once()
                delay_s = self._judge(self._exit_code, await self._progress(self._exit_code))
                if delay_s is None:
                    break
                await _wait(self._stop, delay_s)
        finally:
            flusher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flusher
            await self._output.drain()
            if self.stopping and self._state in {"running", "restarting"}:
                self._state = "exited"
            self.ended = True
            self._changed()

    async def _progress(self, exit_code: int) -> bool | None:
        """Return whether the ended process had finished any work; None: unknown.

        A process that was ready and then killed from outside may have had nothing to do.
        """
        if self.stopping or exit_code in (EXIT_DONE, EXIT_DRAINED):
            return None
        try:
            beat = await self._last_beat()
        except TinkermqError:
            return None
        if beat is None or beat.time < self._started:  # of an earlier process
            return False
        if exit_code < 0 and not beat.progress and beat.state != "starting":
            return None
        return beat.progress > 0

    def _judge(self, exit_code: int, progress: bool | None) -> float | None:
        """Record how a process ended; return the delay before the next start, None for none."""
        if exit_code == EXIT_DONE or self.stopping:
            self._state = "exited"
            return None
        delay_s = self._delay_s(exit_code, progress)
        self._state = "failed" if delay_s is None else "restarting"
        self._changed()
        _log.warning(
            "actor_ended",
            job=self.spec.job,
            child=self.spec.name,
            exit_code=exit_code,
            restart_in_s=delay_s,
        )
        return delay_s

    def _delay_s(self, exit_code: int, progress: bool | None) -> float | None:
        """Remember the error and count the failure; None when it is final."""
        if exit_code == EXIT_DRAINED:
            return FIRST_DELAY_S
        self._error = self._output.errors.reason(exit_code)
        if exit_code == EXIT_FAILED:
            return None
        if not self._was_silent and is_killed_from_outside(exit_code, self._oom_kills):
            return self._backoff.after_kill(time.monotonic())
        delay_s = self._backoff.after_failure(time.monotonic(), progress=progress)
        if delay_s is None:
            self._error = f"crashed {self._crashes()}: {self._error}"
        return delay_s

    def _crashes(self) -> str:
        """Describe how often it failed, and whether it finished any work in between."""
        if self._backoff.is_hasty:
            return f"{self._backoff.num_failures} times"
        return f"{self._backoff.num_fruitless} times in a row without finishing any work"

    async def _run_once(self) -> int:
        """Run one process from start to end and return its exit code.

        Its output goes to a pipe of ours, so that waiting for its end does not wait for
        grandchildren that also hold the pipe.
        """
        self._output.errors.forget()
        self._num_starts += 1
        self._started = time.time()
        self._was_silent, self._oom_kills = False, num_oom_kills()
        reading, writing = os.pipe()
        try:
            process = await self._start_child(self.spec, self._environment, writing)
        except BaseException as error:
            os.close(reading)
            if not isinstance(error, Exception):
                raise  # one actor's error must not end the whole node
            if not isinstance(error, OSError):
                _log.exception("actor_not_started", child=self.spec.name)
            self._output.add([f"cannot start {self.spec.name}: {error}"])
            if isinstance(error, StartRefused):
                return EXIT_FAILED
            return EXIT_DRAINED if isinstance(error, StartFailed) else EXIT_CRASHED
        finally:
            os.close(writing)
        self._process = process
        self._state = "running"
        self._changed()
        _log.info("actor_started", job=self.spec.job, child=self.spec.name, pid=process.pid)
        reader = asyncio.create_task(self._output.read(reading))
        try:
            return await self._watch(process)
        finally:
            kill_group(process.pid)
            with contextlib.suppress(TimeoutError):  # a grandchild may still hold the pipe
                async with asyncio.timeout(PIPE_DEADLINE_S):
                    await reader

    async def _watch(self, process: Child) -> int:
        """Wait for the process's end; end it when a stop is requested."""
        ended = asyncio.create_task(process.wait())
        stop = asyncio.create_task(self._stop.wait())
        silent = asyncio.create_task(self._until_silent(), name=f"beats of {self.spec.name}")
        try:
            await asyncio.wait({ended, stop, silent}, return_when=asyncio.FIRST_COMPLETED)
            if silent.done() and not ended.done() and not self._stop.is_set():
                self._was_silent = True
                self._tell_silence()
                kill_group(process.pid)
            elif not ended.done():
                await self._end(process, ended)
            return await ended
        finally:
            if not ended.done():  # cancelled: the node ends
                kill_group(process.pid)
            for task in (stop, silent):
                task.cancel()
            self._silent_s = 0.0

    async def _until_silent(self) -> None:
        """Return once a process has sent no heartbeat for too long, or none at all.

        The time is counted only while the broker stores, since there are no heartbeats otherwise. A
        heartbeat is new when it differs: clocks may be set back.
        """
        last: float | None = None
        has_beaten, had_beaten, since = False, False, time.monotonic()
        while True:
            looked = time.monotonic()
            await asyncio.sleep(self._silence_look_s)
            now = time.monotonic()
            try:
                beat = await self._last_beat()
            except TinkermqError:
                since = now
                continue
            beat_time = None if beat is None else beat.time  # heartbeats expire after ten seconds
            is_new = beat_time is not None and last is not None and beat_time != last
            has_beaten = has_beaten or is_new or (beat_time or 0.0) >= self._started
            was_away = now - looked > 3 * self._silence_look_s  # this process itself
            if is_new or was_away or (has_beaten and not had_beaten):
                since = now
            last = last if beat_time is None else beat_time
            had_beaten = has_beaten
            bound_s = self._silence_s if has_beaten else self._start_silence_s
            report_s = min(SILENCE_REPORTED_S, bound_s / 2) if has_beaten else bound_s / 2
            silent_s = now - since if now - since >= report_s else 0.0
            if bool(silent_s) != bool(self._silent_s):
                _log.warning("actor_silent", child=self.spec.name, silent_s=round(silent_s))
                self._changed()
            self._silent_s = silent_s
            if silent_s >= bound_s:
                return

    def _tell_silence(self) -> None:
        fields = {
            "event": "actor_failed",
            "code": "deadline",
            "message": f"no heartbeat came for {self._silent_s:.0f} s: it may be stopped, "
            "hang, or not reach the broker",
            "hint": "it is started again; py-spy or gdb show where a process hangs",
        }
        self._output.add([json.dumps(fields)])

    async def _end(self, process: Child, ended: asyncio.Task[int]) -> None:
        if not self._kill.is_set():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # only this process: it drains with its children's help
            kill = asyncio.create_task(self._kill.wait())
            await asyncio.wait(
                {ended, kill},
                timeout=self._stop_deadline_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            kill.cancel()
        if not ended.done():
            kill_group(process.pid)


def kill_group(pid: int) -> None:
    """Kill a child and all its descendants in its group, if they still run."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
