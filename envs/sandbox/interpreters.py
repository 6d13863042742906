"""Interpreters for code that a model writes, each in a sandbox of its own.

The sandbox shows no folder of users, no /etc and no programs: its root is empty but for the
system's libraries (/usr/lib), this interpreter (/python) and the packages asked for (/packages),
all of it read-only, and a /tmp in memory. It has no network and only Unix sockets.

The output of an interpreter is bounded and not trusted: `text` receives its output, a byte on
`done` ends a program, and all else (limits, the end of its processes) is decided outside.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal, Protocol, Self

from pydantic import Field, ValidationError

from ...schemas.config.sections import Section, when
from ...schemas.wire.errors import ConfigError, SandboxError
from ...schemas.wire.message import requirement
from .bubblewrap import Program, SandboxStartError, bubblewrap_program, start
from .sandbox import (
    Mount,
    Sandbox,
    cpu_seconds,
    descendants,
    exceeded,
    first_child,
    memory_folder,
    readable,
    system_mounts,
    unprivileged_user,
)
from .self_test import prove

MAX_CODE_BYTES = 60_000
"""Maximum length of a program; a longer one is refused."""

Status = Literal["ok", "error", "exited", "time", "clock", "memory", "output", "disk"]
_UNBOUNDED = 1 << 20
_LOOK_S = 0.05
_MOST_CLOCK_S = 25.0
"""Default limit by the clock: below the default of `env.step_timeout_s`."""
_FREEZE_S = 0.5
_CHUNK = 1 << 16
_NUM_FILES = 256
_PYTHON, _PACKAGES = "/python/bin/python3", "/packages"
_TMP = "/tmp"  # noqa: S108 - the sandbox's own, in memory
_NOTEBOOK = Path(__file__).with_name("notebook.py").read_text(encoding="utf-8")
_VARIABLES = {
    "HOME": _TMP,
    "LD_LIBRARY_PATH": "/python/lib",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": _PACKAGES,
}


class SandboxSettings(Section):
    """Limits of one program, and its packages; the argument `sandbox` of a game."""

    backend: Literal["bubblewrap"] = "bubblewrap"
    """What makes the sandbox."""
    time_s: float = Field(default=10.0, gt=0, le=3600)
    """CPU seconds that the programs of one turn may take, with all their processes."""
    clock_s: float | None = Field(default=None, gt=0, le=36_000)
    """Seconds that they may take by the clock; default: ten times `time_s`, but at most 25 where
    `time_s` is less."""
    memory_mb: int = Field(default=512, ge=64, le=1 << 20)
    """Memory of a program with all its processes."""
    processes: int = Field(default=16, ge=1, le=1024)
    """Processes and threads at the same time."""
    output_kb: int = Field(default=64, ge=1, le=1024)
    """Maximum output; a program that prints more is stopped."""
    disk_mb: int = Field(default=64, ge=1, le=1 << 20)
    """Size of its own /tmp, in memory."""
    packages: list[str] = Field(default_factory=lambda: ["numpy", "sympy"])
    """Installed packages that programs may import, with their requirements."""
    keep_state: bool = False
    """The turns of an episode share variables and files, like the cells of a notebook."""
    at_once: int = Field(default=0, ge=0, le=1024)
    """Programs of one environment host that run at the same time; 0: one per core."""
    max_sessions: int = Field(default=64, ge=1, le=1024, json_schema_extra=when("keep_state", True))
    """Episodes of one environment host that keep their state at the same time."""

    @property
    def most_clock_s(self) -> float:
        """Seconds that the programs of one turn may take by the clock."""
        return self.clock_s or max(self.time_s, min(10 * self.time_s, _MOST_CLOCK_S))

    @classmethod
    def parse(cls, values: dict[str, object]) -> "SandboxSettings":
        """Read the settings of a game; ConfigError names the key that cannot be used."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"env.kwargs.sandbox.{key}: {requirement(first)} (it is {first['input']!r})",
                hint=f"the keys are {', '.join(cls.model_fields)}",
            ) from error


@dataclass(frozen=True)
class Outcome:
    """The outcome of one program."""

    text: str
    """Its output, errors included, up to the limit."""
    status: Status
    """ok; error: it raised an exception; exited: its interpreter ended; else the limit that stopped
    it."""
    seconds: float
    """CPU seconds that it took."""
    clock_s: float = 0.0
    """Seconds that it took by the clock."""

    @property
    def lost_state(self) -> bool:
        """Whether the sandbox has ended with the program."""
        return self.status not in ("ok", "error")


def too_long(code: str) -> Outcome | None:
    """Return the outcome of a program that is too long to be run."""
    if len(code.encode("utf-8", "replace")) <= MAX_CODE_BYTES:
        return None
    return Outcome(f"the program is longer than {MAX_CODE_BYTES} bytes", "error", 0.0)


class CodeSession(Protocol):
    """One episode's interpreter; closed at the latest when it is garbage collected."""

    def run(self, code: str, time_s: float | None = None, clock_s: float | None = None) -> Outcome:
        """Run a program, for `time_s` of CPU and `clock_s` by the clock at most.

        Raises SandboxError when the sandbox itself fails.
        """
        ...

    def close(self) -> None:
        """Kill all processes in it."""
        ...


class CodeSandbox(Protocol):
    """Runs programs of a model; safe to use from many threads at once."""

    def session(self) -> CodeSession:
        """Return an interpreter, which starts with its first program."""
        ...

    def self_test(self) -> str:
        """Test the sandbox and describe it. SandboxError says what fails and what to do."""
        ...


def code_sandbox(settings: SandboxSettings) -> Sandbox:
    """Return the sandbox of an interpreter; ConfigError for a package that is not installed."""
    memory, disk = settings.memory_mb << 20, settings.disk_mb << 20
    return Sandbox(
        python=(_PYTHON, "-S", "-B", "-X", "utf8"),
        mounts=(
            *_interpreter_mounts(),
            *_package_mounts(settings.packages),
            memory_folder(_TMP, disk),
        ),
        folder=_TMP,
        hostname="sandbox",
        variables=_VARIABLES,
        limits={
            "AS": memory,
            "FSIZE": disk,
            "NPROC": settings.processes + 1,
            "NOFILE": _NUM_FILES,
            "CORE": 0,
            "MSGQUEUE": 0,
            "MEMLOCK": 0,
        },
        has_internet_sockets=False,
    )


class Interpreter:
    """A started interpreter; `run` programs in it, then `kill` it."""

    def __init__(self, sandbox: Sandbox, settings: SandboxSettings) -> None:
        """Start it; SandboxError with bubblewrap's message if it does not start."""
        self._settings = settings
        self._text, text_in = os.pipe()
        self._done, done_in = os.pipe()
        try:
            self._process = start(
                sandbox,
                Program(source=_NOTEBOOK, arguments=[str(done_in)]),
                stdin=subprocess.PIPE,
                stdout=text_in,
                stderr=text_in,
                keep=[done_in],
            )
        except BaseException:
            os.close(self._text)
            os.close(self._done)
            raise
        finally:
            os.close(text_in)
            os.close(done_in)
        assert self._process.stdin is not None
        self._programs = self._process.stdin.fileno()
        for file in (self._text, self._programs):
            os.set_blocking(file, False)
        self._poll = select.poll()
        for file in (self._text, self._done):
            self._poll.register(file, select.POLLIN)
        self.alive = True
        self._first = self._process.first
        self._cpu_s = 0.0

    def run(self, code: str, time_s: float | None = None, clock_s: float | None = None) -> Outcome:
        """Run a program within the limits; a limit or an exit ends the sandbox."""
        settings = self._settings
        time_s = settings.time_s if time_s is None else min(settings.time_s, time_s)
        longest_s = settings.most_clock_s
        clock_s = longest_s if clock_s is None else min(longest_s, clock_s)
        encoded = code.encode("utf-8", "replace")
        frame = len(encoded).to_bytes(4, "little") + encoded
        started, self._cpu_s = time.monotonic(), cpu_seconds(self._first)
        most_cpu_s = self._cpu_s + time_s
        printed = bytearray()
        try:
            status = self._wait(frame, printed, most_cpu_s, started + clock_s)
        except BrokenPipeError:
            status = "exited"
        took_s = max(self._cpu_s, cpu_seconds(self._first)) + time_s - most_cpu_s
        if status not in ("ok", "error"):  # the program is still running, or the sandbox has ended
            self.kill()
        most = self._settings.output_kb << 10
        text = printed[:most].decode("utf-8", "replace")
        return Outcome(text, status, took_s, time.monotonic() - started)

    def freeze(self) -> None:
        """Stop the interpreter between two programs, and kill processes that were left running.

        A sandbox that makes new processes faster than they can be ended is killed.
        """
        interpreter = first_child(self._first)
        if interpreter is not None:
            _signal(interpreter, signal.SIGSTOP)
            deadline = time.monotonic() + _FREEZE_S
            while time.monotonic() < deadline:
                left = set(descendants(self._first)) - {self._first, interpreter}
                if not left:
                    return
                for pid in left:
                    _signal(pid, signal.SIGKILL)
                time.sleep(_FREEZE_S / 500)
        self.kill()

    def thaw(self) -> None:
        """Resume the interpreter after `freeze`."""
        interpreter = first_child(self._first)
        if interpreter is not None:
            _signal(interpreter, signal.SIGCONT)

    def kill(self) -> None:
        """Kill every process of the sandbox; returns when all have ended."""
        if not self.alive:
            return
        self.alive = False
        self._process.kill()
        self._process.wait()
        self._process.close()
        os.close(self._text)
        os.close(self._done)

    def _wait(self, frame: bytes, printed: bytearray, most_cpu_s: float, deadline: float) -> Status:
        """Send a program, and collect its output until it has ended or exceeds a limit."""
        settings = self._settings
        look = time.monotonic() + _LOOK_S
        self._poll.register(self._programs, select.POLLOUT)
        while True:
            ready = dict(self._poll.poll(_LOOK_S * 1000))
            if frame and self._programs in ready:
                frame = frame[os.write(self._programs, frame) :]
                if not frame:
                    self._poll.unregister(self._programs)
            if self._text in ready and not self._collect(printed):
                self._poll.unregister(self._text)
            if len(printed) > settings.output_kb << 10:
                return "output"
            if self._done in ready:
                end = os.read(self._done, 1)
                self._collect(printed)
                return "ok" if end == b"." else "error" if end else "exited"
            now = time.monotonic()
            if now > deadline:
                return "clock"
            if now > look:
                self._cpu_s = max(self._cpu_s, cpu_seconds(self._first))
                if self._cpu_s > most_cpu_s:
                    return "time"
                if (limit := exceeded(self._first, settings.memory_mb << 20)) is not None:
                    return limit
                look = now + _LOOK_S

    def _collect(self, printed: bytearray) -> bool:
        """Read available output, up to the limit; return whether there may be more."""
        while len(printed) <= self._settings.output_kb << 10:
            try:
                chunk = os.read(self._text, _CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            printed += chunk
        return True


class TurnTime:
    """The time that is left for the programs of one turn."""

    def __init__(self, settings: SandboxSettings) -> None:
        """Begin with the limits of the settings."""
        self._cpu_s, self._clock_s = settings.time_s, settings.most_clock_s

    @property
    def is_over(self) -> bool:
        """Whether no further program may run."""
        return self._cpu_s <= 0 or self._clock_s <= 0

    def run(self, session: CodeSession, code: str) -> Outcome:
        """Run a program in the time that is left."""
        outcome = session.run(code, self._cpu_s, self._clock_s)
        self._cpu_s -= outcome.seconds
        self._clock_s -= outcome.clock_s
        return outcome


class LocalCodeSandbox:
    """Interpreters in bubblewrap, of which `at_once` run at the same time."""

    def __init__(self, settings: SandboxSettings) -> None:
        """Prepare; SandboxError for a machine without bubblewrap, ConfigError for a package."""
        self._settings = settings
        self._program = bubblewrap_program()
        self._sandbox = code_sandbox(settings)
        cores = len(os.sched_getaffinity(0))
        self._places = threading.BoundedSemaphore(settings.at_once or cores)
        max_kept = settings.max_sessions if settings.keep_state else _UNBOUNDED
        self._sessions = threading.BoundedSemaphore(max_kept)

    def session(self) -> "LocalCodeSession":
        """Return an interpreter, which starts with its first program."""
        return LocalCodeSession(self, self._places, self._sessions)

    def start(self) -> "Interpreter":
        """Start an interpreter."""
        return Interpreter(self._sandbox, self._settings)

    def self_test(self) -> str:
        """Test that the sandbox holds; SandboxError says what fails and what to do.

        Some machines refuse a host name (ProtectHostname of systemd) or a new /proc (containers
        with a masked one). Programs then see the machine's name, or no /proc.
        """
        while True:
            try:
                prove(self._sandbox)
                break
            except SandboxStartError as error:
                if self._sandbox.hostname and "set hostname" in error.output:
                    self._sandbox = replace(self._sandbox, hostname="")
                elif self._sandbox.has_proc and "mount proc" in error.output:
                    self._sandbox = replace(self._sandbox, has_proc=False)
                else:
                    raise
        facts = ["user namespaces" if unprivileged_user() is None else "root"]
        facts += [] if self._sandbox.hostname else ["without hostname"]
        facts += [] if self._sandbox.has_proc else ["without proc"]
        return f"bubblewrap at {self._program} encloses programs ({', '.join(facts)})"


class LocalCodeSession:
    """A sandbox that is kept between programs, frozen meanwhile."""

    def __init__(
        self,
        sandbox: LocalCodeSandbox,
        places: threading.BoundedSemaphore,
        sessions: threading.BoundedSemaphore,
    ) -> None:
        self._sandbox = sandbox
        self._places = places
        self._sessions = sessions
        self._interpreter: Interpreter | None = None
        self._finalizer: (
            weakref.finalize[[Interpreter, threading.BoundedSemaphore], Self] | None
        ) = None

    def run(self, code: str, time_s: float | None = None, clock_s: float | None = None) -> Outcome:
        """Run a program after those before it; a limit that stops it also ends the state."""
        if (refused := too_long(code)) is not None:
            return refused
        with self._places:
            interpreter = self._living()
            interpreter.thaw()
            outcome = interpreter.run(code, time_s, clock_s)
            if interpreter.alive:
                interpreter.freeze()
            if interpreter.alive:
                return outcome
            self.close()
            return outcome if outcome.lost_state else replace(outcome, status="exited")

    def close(self) -> None:
        """End the sandbox."""
        if self._finalizer is not None:
            self._finalizer()
        self._interpreter = None

    def _living(self) -> Interpreter:
        if self._interpreter is not None:
            return self._interpreter
        if not self._sessions.acquire(blocking=False):
            raise SandboxError(
                "no more episodes can keep their state: max_sessions are running",
                hint="raise env.kwargs.sandbox.max_sessions, or lower generator.max_episodes",
            )
        try:
            self._interpreter = self._sandbox.start()
        except BaseException:
            self._sessions.release()
            raise
        # ends the sandbox of a forgotten episode
        self._finalizer = weakref.finalize(self, _end, self._interpreter, self._sessions)
        return self._interpreter


def _end(interpreter: Interpreter, sessions: threading.BoundedSemaphore) -> None:
    interpreter.kill()
    sessions.release()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _interpreter_mounts() -> Iterator[Mount]:
    """Yield the interpreter and the libraries that it needs."""
    yield from system_mounts(("lib", "lib64"), above="/usr")
    yield from system_mounts(("lib", "lib64"))
    for name in ("lib", "lib64"):
        yield readable(f"/python/{name}", f"{sys.base_prefix}/{name}", is_optional=True)
    yield readable(_PYTHON, Path(sys.executable).resolve())


def _package_mounts(names: list[str]) -> Iterator[Mount]:
    """Yield installed packages and their requirements; ConfigError for one not installed."""
    yield Mount("folder", _PACKAGES)
    for top in sorted(_top_level(names)):
        yield readable(f"{_PACKAGES}/{top.name}", top)


def _top_level(names: list[str]) -> set[Path]:
    """Return the files and folders in site-packages that belong to packages and their needs."""
    distributions: dict[str, Distribution] = {}
    unresolved = list(names)
    while unresolved:
        name = unresolved.pop()
        if name in distributions:
            continue
        try:
            distributions[name] = distribution(name)
        except PackageNotFoundError:
            raise ConfigError(
                f"package {name!r} of the sandbox is not installed",
                hint=f"pip install {name}, or take it out of env.kwargs.sandbox.packages",
            ) from None
        required = distributions[name].requires or []
        unresolved += [
            re.split(r"[^\w.-]", requirement)[0]
            for requirement in required
            if ";" not in requirement
        ]
    tops: set[Path] = set()
    for installed in distributions.values():
        for file in installed.files or []:
            if file.parts[0] not in ("..", "__pycache__") and not file.parts[0].endswith(".pth"):
                tops.add(Path(str(installed.locate_file(file.parts[0]))))
    return {top for top in tops if top.exists()}
