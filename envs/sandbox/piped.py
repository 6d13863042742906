"""Programs that exchange messages over standard input and output, each in its own sandbox.

A program sees the system's programs and libraries, this interpreter with its packages and the
folders of its settings, all read-only; a /tmp in memory, which is its home and working folder; its
own processes; and the variables of its settings. It has no network unless the settings say so. The
caller reads its output.
"""

import contextlib
import hashlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from ...schemas.config.sections import Section
from ...schemas.local.folder import hold
from ...schemas.wire.errors import ConfigError
from .bubblewrap import Program, bubblewrap_program, start
from .sandbox import (
    SYSTEM_ETC,
    Limit,
    Sandbox,
    etc_mounts,
    exceeded,
    held,
    memory_folder,
    python_variables,
    readable,
    system_mounts,
)
from .self_test import absent_commands

_TMP = "/tmp"  # noqa: S108 - its own, in memory
_OPTIONS = ("-I", "-S", "-B", "-X", "utf8")
_NUM_FILES = 1024
_LOOK_S, _SHARE = 0.25, 10
_OWN = {"HOME": _TMP, "TMPDIR": _TMP, "IS_SANDBOX": "1", "PYTHONUNBUFFERED": "1"}
_KEPT = ("PATH", "LANG", "TZ")
_OF_NETWORK = ("hosts", "resolv.conf")


class PipedSettings(Section):
    """A program, its mounts and its limits."""

    command: list[str] = Field(min_length=1, max_length=1024)
    """Program and arguments; `{python}` stands for this interpreter."""
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    """Its environment variables, in addition to PATH, LANG and TZ."""
    read: list[str] = Field(default_factory=list[str])
    """Further files and folders that it may read."""
    network: Literal["none", "open"] = "none"
    """open: the machine's network."""
    memory_mb: int = Field(default=512, ge=64, le=1 << 20)
    """Memory of all its processes."""
    processes: int = Field(default=128, ge=1, le=4096)
    """Concurrent processes and threads."""
    disk_mb: int = Field(default=64, ge=1, le=1 << 20)
    """Size of its /tmp, in memory."""


class PipedProgram(Protocol):
    """A running program."""

    def end(self, grace_s: float = 0.0) -> str:
        """Wait up to `grace_s`, then kill it; return how it ended. Blocks; may be repeated."""
        ...


class LocalPipedProgram:
    """A program that this process has started."""

    def __init__(
        self,
        settings: PipedSettings,
        stdio: int,
        errors: int,
        may_read: Callable[[str, Path], None] = lambda name, real: None,
    ) -> None:
        """Start it with two descriptors, which the caller closes; blocks.

        `may_read` raises ConfigError for a name in `read` whose real path may not be shown. Raises
        SandboxError if it does not start, ConfigError for settings that cannot be used.
        """
        self._settings = settings
        with contextlib.ExitStack() as opened:
            sandbox = piped_sandbox(settings, opened, may_read)
            _check_once(settings, sandbox)
            program = Program(_command(settings), environment=_variables(settings))
            self._process = start(sandbox, program, stdin=stdio, stdout=stdio, stderr=errors)
        self._lock = threading.Lock()
        self._exceeded: Limit | None = None
        self._ended = ""
        _watch(self)

    def end(self, grace_s: float = 0.0) -> str:
        """Wait up to `grace_s`, then kill it; return how it ended. Blocks; may be repeated."""
        with self._lock:
            if not self._ended:
                is_over = _ends_within(self._process.pid, grace_s)
                self._process.kill()
                exit_code = self._process.wait()
                self._process.close()
                self._ended = f"exited with code {exit_code}" if is_over else "was ended"
        return self._over_limit() or self._ended

    def check(self) -> bool:
        """Kill it if it exceeds a limit; return whether it still runs."""
        if self._ended:
            return False
        self._exceeded = exceeded(self._process.first, self._settings.memory_mb << 20)
        if self._exceeded is not None:
            self._process.kill()
        return self._exceeded is None

    def _over_limit(self) -> str:
        if self._exceeded == "memory":
            return f"was ended: it held more than memory_mb={self._settings.memory_mb}"
        return "was ended: it made too many files" if self._exceeded == "disk" else ""


def piped_sandbox(
    settings: PipedSettings, opened: contextlib.ExitStack, may_read: Callable[[str, Path], None]
) -> Sandbox:
    """Return the sandbox of a program, whose files are open as long as `opened`.

    Raises ConfigError for a folder that does not exist, or may not be read.
    """
    is_open, disk = settings.network == "open", settings.disk_mb << 20
    shown = sorted({Path(sys.prefix), Path(sys.base_prefix)})
    named = {path: opened.enter_context(_opened(path, may_read)) for path in settings.read}
    etc = (*SYSTEM_ETC, *(_OF_NETWORK if is_open else ()))
    return Sandbox(
        python=(os.path.realpath(sys.executable), *_OPTIONS),
        mounts=(
            memory_folder("/dev/shm", disk),  # noqa: S108 - its own
            *system_mounts(),
            *etc_mounts(etc),
            memory_folder(_TMP, disk),
            *(readable(path) for path in shown),
            *(held(Path(path).expanduser(), file) for path, file in sorted(named.items())),
        ),
        folder=_TMP,
        variables=python_variables(),
        limits={
            "NPROC": settings.processes,
            "FSIZE": disk,
            "NOFILE": _NUM_FILES,
            "CORE": 0,
            "MSGQUEUE": 0,
        },
        has_network=is_open,
    )


@contextlib.contextmanager
def _opened(name: str, may_read: Callable[[str, Path], None]) -> Iterator[int]:
    """Open a file or folder that a program may read; what takes its place later is not shown."""
    path = Path(name).expanduser()
    try:
        if not path.is_absolute():
            raise FileNotFoundError(name)
        file, real = hold(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"read: {name!r} does not exist",
            hint="name files and folders by absolute paths, as they are where the game runs",
        ) from error
    try:
        may_read(name, real)
        yield file
    finally:
        os.close(file)


def _command(settings: PipedSettings) -> list[str]:
    return [word.replace("{python}", sys.executable) for word in settings.command]


def _variables(settings: PipedSettings) -> Mapping[str, str]:
    inherited = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {"PATH": os.defpath, **inherited, **_OWN, **settings.environment}


_checked: set[bytes] = set()
_check_lock = threading.Lock()


def _check_once(settings: PipedSettings, sandbox: Sandbox) -> None:
    """Test the sandbox of these settings, and that the command exists, once in a process."""
    command, environment = _command(settings)[0], dict(_variables(settings))
    kind = f"{command} {settings.model_dump_json(exclude={'command', 'environment'})}"
    key = hashlib.sha256(kind.encode(errors="replace")).digest()
    with _check_lock:
        if key in _checked:
            return
        bubblewrap_program()
        for absent in absent_commands(sandbox, [command], environment):
            raise ConfigError(
                f"the sandbox has no program {absent!r}",
                hint="it shows the system's folders, this interpreter ({python}) and what `read` "
                "names; nothing is downloaded: install the program where the game runs",
            )
        _checked.add(key)


def _ends_within(pid: int, wait_s: float) -> bool:
    """Wait for the end of a child; return whether it has ended."""
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))
    finally:
        os.close(handle)


# One thread checks the memory and files of all programs of this process: a few times a second, or
# less often if that takes more than a tenth of its time.

_running: set[LocalPipedProgram] = set()
_running_lock = threading.Lock()


def _watch(program: LocalPipedProgram) -> None:
    with _running_lock:
        if not _running:
            threading.Thread(target=_look_after, name="piped-programs", daemon=True).start()
        _running.add(program)


def _look_after() -> None:
    while True:
        begun = time.monotonic()
        over = {program for program in list(_running) if not program.check()}
        with _running_lock:
            _running.difference_update(over)
            if not _running:
                return
        time.sleep(max(_LOOK_S, _SHARE * (time.monotonic() - begun)))
