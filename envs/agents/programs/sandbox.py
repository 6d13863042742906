"""The sandbox of an agent program: its view of the machine, and its limits.

It sees the system's programs and libraries, this interpreter with its packages and the folders that
`agent.read` names, all read-only; its own folder at `/episode/work`, a home and a /tmp, which are
on disk and removed with it; its own processes. It sees no other episode, run, grader or file of a
user. Its network has one address, that of the model; or it is the machine's, if the job allows it.
It runs under an unused user id.

With `agent.image` it sees the files of that image in place of the system's and the interpreter's.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ....schemas.config.agent import AgentConfig
from ....schemas.wire.errors import ConfigError, SandboxError
from ...sandbox.bubblewrap import bubblewrap_program
from ...sandbox.sandbox import (
    SYSTEM_ETC,
    Mount,
    Sandbox,
    etc_mounts,
    memory_folder,
    python_variables,
    readable,
    system_mounts,
    writable,
)
from . import folders

# Container images as the root of a sandbox.
#
# Podman or docker exports an image's files once for all hosts of a user on a machine, and runs
# nothing of it. The files are in the temporary folder while a host uses them; the last host removes
# them, and the next one that starts removes those of killed hosts. The sandbox starts a Python
# program first, and an image may have no Python or another C library, so the interpreter, its
# standard library and its shared libraries are mounted one by one and started by their own loader.

_TOOLS = ("podman", "docker")
_PREFIX = "tinkermq-image-"
_ASK_S, _UNPACK_S, _PAUSE_S = 60.0, 1800.0, 0.2
_SHOWN_CHARS = 500
_FOLDERS = ("proc", "dev", "tmp", "etc", "episode")
_FILES = ("etc/passwd", "etc/group", "etc/hosts", "etc/resolv.conf")
_LOADER, _LIBRARIES, _HOME = "/.tinkermq/loader", "/.tinkermq/libraries", "/.tinkermq/python"
_PYTHON = f"{_HOME}/bin/python3"
IN_IMAGE = (_LOADER, "--library-path", _LIBRARIES, _PYTHON)
"""The command of Python there."""
_LOADED = """
import ctypes, json, marshal, os, resource, shutil, socket
print(open("/proc/self/maps").read())
"""


class ImageRoot:
    """The files of an image on this machine, held until `close`."""

    def __init__(self, name: str, key: str = "agent.image") -> None:
        """Find the image and export its files; blocks, for large images minutes.

        `key` is the configuration key of the image. Raises SandboxError with what to do if the
        machine has no podman or docker, if neither has the image, or if the export fails.
        """
        tool, facts = _find(name, key)
        self.environment = _variables(facts)
        """The variables of the image."""
        config: Any = facts.get("Config") or {}
        self.workdir = str(config.get("WorkingDir") or "/")
        """The working folder of the image."""
        self._key = key
        number = str(facts.get("Id", "")).rpartition(":")[2]
        self._folder = Path(tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}-{number[:32]}")
        self.path = self._folder / "root"
        """The folder that its programs see as `/`."""
        self._lock = _held(self._folder, exclusive=False)
        try:
            _sweep(self._folder)
            if not self._is_complete():
                self._write(tool, name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the files; the last user removes them."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # others use them
        else:
            _remove(self._folder)
        finally:
            os.close(self._lock)

    def place(self, path: str) -> None:
        """Make a mount point in it; SandboxError if it is a link."""
        try:
            folders.place_folder(self.path, path)
        except ValueError as error:
            raise SandboxError(
                f"the image has a link or a file at {error}, the mount point of {path}",
                hint="make the image with a folder there",
            ) from error

    def _is_complete(self) -> bool:
        return (self._folder / "complete").exists()

    def _write(self, tool: str, name: str) -> None:
        """Export the files, unless another host has meanwhile."""
        os.close(self._lock)
        self._lock = _held(self._folder, exclusive=True)
        if not self._is_complete():
            folders.remove_tree(self.path)
            self.path.mkdir()
            _unpack(tool, name, self.path, self._key)
            for folder in _FOLDERS:
                self.place(f"/{folder}")
            for file in _FILES:
                at = self.path / file
                at.unlink(missing_ok=True)
                at.touch()
            self.path.chmod(0o755)
            (self._folder / "complete").touch()
        fcntl.flock(self._lock, fcntl.LOCK_SH)


def _find(name: str, key: str) -> tuple[str, dict[str, Any]]:
    """Return the tool that has an image, and the image's description."""
    tools = [path for tool in _TOOLS if (path := shutil.which(tool)) is not None]
    if not tools:
        raise SandboxError(
            f"{key}={name!r} needs podman or docker, and this machine has neither",
            hint="apt-get install podman (dnf install podman) where environment hosts run, or "
            "remove the image",
        )
    reasons: list[str] = []
    for tool in tools:
        done = _run([tool, "image", "inspect", name])
        if done.returncode == 0:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                return tool, dict(json.loads(done.stdout)[0])
        reasons.append(f"{Path(tool).name} says: {_last_line(done.stderr)}")
    raise SandboxError(
        f"{key}={name!r} is not on this machine; {'; '.join(reasons)}",
        hint=f"pull or build it where environment hosts run, as the user of the host: "
        f"{Path(tools[0]).name} pull {name}",
    )


def _variables(facts: dict[str, Any]) -> dict[str, str]:
    config: Any = facts.get("Config") or {}
    pairs = [str(pair).partition("=") for pair in config.get("Env") or ()]
    return {name: value for name, _, value in pairs}


def _unpack(tool: str, name: str, root: Path, key: str) -> None:
    """Export the files of an image into a folder; nothing of the image is run."""
    made = _run([tool, "create", "--pull=never", "--network=none", name, "/none"])
    container = made.stdout.decode(errors="replace").strip()
    if made.returncode or not container:
        raise _unwritten(f"{key}={name!r}", _last_line(made.stderr))
    try:
        with (
            subprocess.Popen([tool, "export", container], stdout=subprocess.PIPE) as exporting,
            tempfile.TemporaryFile() as errors,
        ):
            try:
                done = subprocess.run(
                    ["tar", "-x", "-C", str(root), "--exclude=dev/*", "--exclude=./dev/*"],
                    stdin=exporting.stdout,
                    stderr=errors,
                    timeout=_UNPACK_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                exporting.kill()
                raise _unwritten(f"{key}={name!r}", str(error)) from error
            if done.returncode or exporting.wait(_ASK_S):
                errors.seek(0)
                raise _unwritten(f"{key}={name!r}", _last_line(errors.read()))
    finally:
        _run([tool, "rm", "-f", container])


def _unwritten(image: str, reason: str) -> SandboxError:
    return SandboxError(
        f"the files of {image} cannot be exported: {reason}",
        hint="see the room in the host's temporary folder ($TMPDIR)",
    )


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(command, capture_output=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, b"", str(error).encode())


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1][:_SHOWN_CHARS] if lines else "nothing"


def _held(folder: Path, *, exclusive: bool) -> int:
    """Make a private folder and lock it; return the lock, which is released by closing it."""
    deadline = time.monotonic() + _UNPACK_S
    while time.monotonic() < deadline:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise SandboxError(f"{folder} belongs to another user", hint="remove it, or set TMPDIR")
        with contextlib.suppress(OSError):  # it was removed meanwhile
            lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
                if os.fstat(lock).st_ino == (folder / "lock").stat().st_ino:
                    return lock
            except OSError:
                os.close(lock)
                lock = -1
            if lock >= 0:
                os.close(lock)
        time.sleep(_PAUSE_S)
    raise SandboxError(
        f"the files of an image in {folder} were not exported within {_UNPACK_S:g} s",
        hint="see the other environment hosts of the machine",
    )


def _sweep(mine: Path) -> None:
    """Remove images that no host of this user uses any more."""
    for left in mine.parent.glob(f"{_PREFIX}{os.getuid()}-*"):
        if left != mine and folders.is_own_folder(left):
            with folders.unused(left / "lock") as is_unused:
                if is_unused:
                    _remove(left)


def _remove(folder: Path) -> None:
    """Remove a folder with folders that cannot be written."""
    if os.getuid():
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=False, capture_output=True)
    folders.remove_tree(folder)


@cache
def interpreter_files() -> dict[str, Path]:
    """Return the files of Python by their paths in the sandbox; SandboxError if unknown."""
    python = Path(os.path.realpath(sys.executable))
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    loaded = _loaded(python)
    loader = next((library for library in loaded if library.name.startswith(("ld-", "ld."))), None)
    if loader is None:
        raise SandboxError(
            f"the dynamic loader of {python} is unknown, so programs cannot run in an image",
            hint="remove agent.image, or run the host with a Python of the system",
        )
    libraries = {
        name: library
        for library in loaded
        if not library.is_relative_to(standard)
        for name in _library_names(library)
    }
    inner = f"{_HOME}/{sys.platlibdir}/python{sys.version_info[0]}.{sys.version_info[1]}"
    return {
        _LOADER: loader,
        _PYTHON: python,
        inner: standard,
        **{f"{_LIBRARIES}/{name}": path for name, path in libraries.items()},
    }


def _loaded(python: Path) -> list[Path]:
    """Return the shared libraries that it loads."""
    command = [str(python), "-I", "-S", "-B", "-c", _LOADED]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(
            f"{python} does not start by itself: {error}", hint="see its installation"
        ) from error
    words = (line.split(maxsplit=5) for line in done.stdout.decode().splitlines())
    mapped = {Path(fields[5]) for fields in words if len(fields) > 5 and fields[5].startswith("/")}
    return sorted(path for path in mapped if ".so" in path.name)


def _library_names(library: Path) -> set[str]:
    """Return the other names of a library: links next to it."""
    stem = library.name.partition(".so")[0]
    return {other.name for other in library.parent.glob(f"{stem}.so*") if other.samefile(library)}


WORK, HOME, TASK, GRADER = "/episode/work", "/episode/home", "/episode/task", "/episode/grader"
TMP = "/tmp"  # noqa: S108 - its own
PORT = 48_470
"""Address of the model in sandboxes with their own network."""
Reach: TypeAlias = Literal["model", "open", "none"]
"""What a program's network reaches."""
_PLACES = {"work": WORK, "home": HOME, "task": TASK, "tmp": TMP}
_OWN_ETC = ("passwd", "group", "hosts")
_OPTIONS = ("-I", "-S", "-B", "-X", "utf8")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NUM_FILES = 4096
_SHARED_MEMORY_PART = 4


TESTS, LOGS = "/tests", "/logs"
"""Folders of a task's tests, and of their reports."""
CONTEXT = "/episode/context"
"""Path of a Dockerfile's folder while its steps run."""
Stage: TypeAlias = Literal["build", "program", "tests"]
"""The stages of a task: the Dockerfile's steps, the program, the tests."""
_STAGES: Mapping[Stage, Mapping[str, str]] = {
    "build": {"context": CONTEXT, "task": TASK, "home": HOME, "tmp": TMP},
    "program": _PLACES,
    "tests": {
        "tests": TESTS,
        "logs": LOGS,
        "verifier": f"{LOGS}/verifier",
        "test_home": HOME,
        "tmp": TMP,
    },
}
TASK_HOME = "/root"


@dataclass(frozen=True)
class TaskEnvironment:
    """The environment of a task's program and tests."""

    is_image: bool
    """Whether it is from an image; otherwise the sandbox has followed the Dockerfile."""
    root: folders.RootFiles
    system: tuple[Mount, ...]
    """The system's folders, read-only: those of an image, or of the machine."""
    variables: Mapping[str, str]
    """Variables of the image or the Dockerfile."""
    workdir: str

    @property
    def command_variables(self) -> dict[str, str]:
        """The variables of a command in it."""
        return {"HOME": TASK_HOME, "PATH": _PATH, **self.variables}


@dataclass(frozen=True)
class TaskView:
    """The view of one stage of a task."""

    environment: TaskEnvironment
    stage: Stage


class ProgramSandboxes:
    """The sandboxes of a job's programs."""

    def __init__(
        self, config: AgentConfig, private: Sequence[Path] = (), image: ImageRoot | None = None
    ) -> None:
        """Check the folders; programs must not see `private` ones.

        The files of an `image` replace the machine's. Raises SandboxError without bubblewrap, and
        ConfigError for a folder that is missing or shows a private one.
        """
        bubblewrap_program()
        self._config = config
        read = {
            f"agent.read: {path}": folders.check_folder("agent.read", path) for path in config.read
        }
        own = {"this interpreter": Path(sys.prefix), "its library": Path(sys.base_prefix)}
        own = own if image is None else {}
        refuse_shown({**read, **own}, private)
        for path in config.read:
            folders.check_shown("agent.read", path)
        self._read = sorted({*read.values()})
        self._shown = sorted({*read.values(), *own.values()})
        above = {parent for path in self._shown for parent in path.parents}
        self.unseen = sorted(set(private) - above)
        """Private folders whose names programs do not see either."""
        self._image = image
        self._python: tuple[str, ...] = (os.path.realpath(sys.executable),)
        if image is not None:
            self._python = IN_IMAGE
            own_places = {str(Path(place).parent) for place in interpreter_files()}
            for place in (WORK, HOME, TASK, GRADER, *own_places, *map(str, self._shown)):
                image.place(place)

    def variables(self, own: Mapping[str, str], view: TaskView | None = None) -> Mapping[str, str]:
        """Return a program's variables; they replace those of an image, except PATH.

        In a task's environment HOME is kept as well. Its tests and steps do not get the job's
        variables, and the tests' HOME is an empty folder.
        """
        if view is not None:
            of_task = view.environment.command_variables
            if view.stage != "program":
                return {**of_task, **({"HOME": HOME} if view.stage == "tests" else {}), **own}
            environment = self._config.environment
            named = {name: environment.get(name) or of_task[name] for name in ("HOME", "PATH")}
            return {**of_task, **own, **named}
        if self._image is None:
            return own
        of_image = self._image.environment
        path = self._config.environment.get("PATH") or of_image.get("PATH") or _PATH
        return {**of_image, **own, "PATH": path}

    def shown(self, *, in_image: bool) -> Sequence[Path]:
        """Return the folders that programs read at their own paths; an image has its own Python."""
        return self._read if in_image else self._shown

    def task_sandbox(self, folder: folders.ProgramFolder, reach: Reach, view: TaskView) -> Sandbox:
        """Return the sandbox of one stage of a task.

        Nothing is mounted below a folder that an earlier stage could write, since it may have left
        a link there: the tests do not see `agent.read`, and Python starts from its own folder.
        """
        environment, stage = view.environment, view.stage
        writable_paths = environment.root.writable if stage != "build" else ()
        if stage == "tests":
            writable_paths = tuple(path for path in writable_paths if path not in ("tests", "logs"))
        shown = self.shown(in_image=environment.is_image)
        mounts = (
            memory_folder("/dev/shm", (self._config.memory_mb << 20) // _SHARED_MEMORY_PART),  # noqa: S108 - its own
            *environment.system,
            *(readable(f"/etc/{name}", folder["etc"] / name) for name in _OWN_ETC),
            *(etc_mounts(("resolv.conf",)) if reach == "open" else ()),
            *(readable(place, path) for place, path in interpreter_files().items()),
            *(writable(f"/{path}", folder[f"root/{path}"]) for path in writable_paths),
            *(writable(place, folder[part]) for part, place in _STAGES[stage].items()),
            *(readable(path) for path in shown if stage == "program"),
        )
        return replace(
            self.sandbox(folder, reach),
            python=(*IN_IMAGE, *_OPTIONS),
            root=folder["root"],
            is_read_only=stage != "build",
            mounts=mounts,
            folder=environment.workdir if stage != "build" else "/",
        )

    def sandbox(
        self, folder: folders.ProgramFolder, reach: Reach, more: Mapping[str, Path] | None = None
    ) -> Sandbox:
        """Return the sandbox of a program in its folder.

        `more` are further folders that it reads, by their names inside.
        """
        config, is_open = self._config, reach == "open"
        return Sandbox(
            python=(*self._python, *_OPTIONS),
            root=None if self._image is None else self._image.path,
            mounts=(
                memory_folder("/dev/shm", (config.memory_mb << 20) // _SHARED_MEMORY_PART),  # noqa: S108 - its own
                *self._system(folder, is_open),
                *(writable(place, folder[part]) for part, place in _PLACES.items()),
                *(readable(path) for path in self._shown),
                *(readable(place, path) for place, path in (more or {}).items()),
            ),
            folder=WORK,
            variables=python_variables(),
            limits={
                "NPROC": config.processes,
                "FSIZE": config.disk_mb << 20,
                "NOFILE": _NUM_FILES,
                "CORE": 0,
                "MSGQUEUE": 0,
            },
            user=folder.user,
            has_network=is_open,
            listens=(f"127.0.0.1:{PORT}",) if reach == "model" else (),
        )

    def _system(self, folder: folders.ProgramFolder, is_open: bool) -> Iterator[Mount]:
        """Yield the machine's programs and libraries, or this Python for an image; and /etc."""
        if self._image is None:
            yield from system_mounts()
        else:
            yield from (readable(place, path) for place, path in interpreter_files().items())
        shown = SYSTEM_ETC if self._image is None else ()
        yield from etc_mounts((*shown, *(("resolv.conf",) if is_open else ())))
        yield from (readable(f"/etc/{name}", folder["etc"] / name) for name in _OWN_ETC)


def refuse_shown(shown: Mapping[str, Path], private: Iterable[Path]) -> None:
    """Raise ConfigError for a folder that contains a private one."""
    for name, folder in shown.items():
        for hidden in private:
            if hidden.resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"programs would see {hidden} in {folder} ({name})",
                    hint="they may read no folder that holds the run, the reward's files or other "
                    "episodes: name folders inside of it",
                )


def grader_mounts(files: Path | None) -> dict[str, Path]:
    """Return the folders that the reward command reads and the program does not."""
    return {} if files is None else {GRADER: files}
