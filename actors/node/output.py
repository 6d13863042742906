"""What an actor writes: cut into lines, kept in a bounded file, sent to the broker, remembered.

An actor is never held up by its own output: lines wait for the broker in a bounded queue, and
when that is full the oldest go. The file keeps them in any case.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from threading import Lock
from typing import Any, cast

import structlog

from ...broker.disk import append_to
from ...broker.run_folder import Folder
from ...schemas.metric import LogLines
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import StorageError, TinkermqError

MAX_LINE_BYTES = 16 * 1024
MAX_FILE_BYTES = 16 * 2**20
MAX_WAITING_LINES = 5_000
TAIL_LINES = 20
MAX_REASON_CHARS = 1500
"""Of why an actor ended: the reasons of all actors of a node travel in one message."""
_BATCH_LINES = 500
_FLUSH_S = 0.2
_DRAIN_DEADLINE_S = 2.0

SendLines = Callable[[LogLines], Awaitable[None]]
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
    """Pass on all that is written into a pipe, until its other end is closed; closes `pipe`."""
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(pipe, "rb", 0)
    )
    splitter = LineSplitter()
    try:
        while chunk := await stream.read(64 * 1024):
            await take(splitter.feed(chunk))
    finally:
        transport.close()
        await take(splitter.end())


def _pieces(line: bytes) -> list[bytes]:
    return [line[at : at + MAX_LINE_BYTES] for at in range(0, len(line), MAX_LINE_BYTES)]


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode("utf-8", errors="replace")


class ErrorMemory:
    """Keeps why an actor ended: its last reported error, else the end of its output."""

    def __init__(self) -> None:
        self._reported = ""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def note(self, line: str) -> None:
        """Take one line of output."""
        self._tail.append(line)
        if '"actor_failed"' in line or '"actor_crashed"' in line:
            self._reported = _error_in(line) or self._reported

    def forget(self) -> None:
        """Start afresh, for the next process."""
        self._reported = ""
        self._tail.clear()

    def reason(self, exit_code: int) -> str:
        """Say why the process ended."""
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
    """A file that is renamed to `<name>.1` once it is full: at most two files' worth is kept.

    It lies in the folder of a run, where links that jobs make are not followed.
    """

    def __init__(self, run_dir: Path, name: str, max_bytes: int = MAX_FILE_BYTES) -> None:
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

    def add(self, lines: list[str]) -> None:
        """Queue lines for the file and the broker."""
        for line in lines:
            self.errors.note(line)
        self._unwritten += lines
        self._waiting.extend(lines)

    async def read(self, pipe: int) -> None:
        """Take all that one process writes, until the other end is closed; closes `pipe`."""
        await read_lines(pipe, self._take)

    async def _take(self, lines: list[str]) -> None:
        self.add(lines)
        if len(self._unwritten) > MAX_WAITING_LINES:
            await self._write()

    async def flush_forever(self) -> None:
        """Write and send every fifth of a second; cancel to end, then call `drain`."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            await self._flush()

    async def drain(self) -> None:
        """Write and send what is left; a broker that is away is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_DEADLINE_S):
                while self._unwritten or self._waiting or self._sending:
                    await self._flush()
                    await asyncio.sleep(0.02)

    async def _flush(self) -> None:
        await self._write()
        while self._waiting or self._sending:
            while self._waiting and len(self._sending) < _BATCH_LINES:
                self._sending.append(self._waiting.popleft())
            try:
                await self._send(self._batch())
            except TinkermqError:  # the broker is away: the same lines again next time
                return
            self._sending = []

    def _batch(self) -> LogLines:
        return LogLines(
            actor=self._actor, attempt=self._attempt, lines=list(self._sending), time=time.time()
        )

    async def _write(self) -> None:
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
            self._unwritten = [*lines, *self._unwritten][-MAX_WAITING_LINES:]  # once there is room
