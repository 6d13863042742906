"""Images of containers as the roots of programs' sandboxes.

Podman or docker, whichever knows the image, writes its files out, once for all hosts of a user on a
machine; nothing of it is run by them. A program then runs in the same sandbox as any other, with
the image's files in place of the machine's. They lie in the temporary folder while a host uses
them: the last one that ends removes them, and those of hosts that were killed are removed by the
next one that starts.

What runs first in a sandbox is written in Python, and an image may have none, or another C library.
So the interpreter, its standard library and the shared libraries that it loads are shown one by
one, and it is started by the dynamic loader that it was built for.
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
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ....schemas.wire.errors import SandboxError
from .folders import is_own_folder, remove_tree

_TOOLS = ("podman", "docker")
_PREFIX = "tinkermq-image-"
_ASK_S, _UNPACK_S, _PAUSE_S = 60.0, 1800.0, 0.2
_SHOWN_CHARS = 500
_FOLDERS = ("proc", "dev", "tmp", "etc", "episode")
_FILES = ("etc/passwd", "etc/group", "etc/hosts", "etc/resolv.conf")
_LOADER, _LIBRARIES, _HOME = "/.tinkermq/loader", "/.tinkermq/libraries", "/.tinkermq/python"
_PYTHON = f"{_HOME}/bin/python3"
IN_IMAGE = (_LOADER, "--library-path", _LIBRARIES, _PYTHON)
"""The words that start it there."""
_LOADED = """
import ctypes, json, marshal, os, resource, shutil, socket
print(open("/proc/self/maps").read())
"""


class ImageRoot:
    """The files of an image on this machine, held until `close`."""

    def __init__(self, name: str) -> None:
        """Find the image and write its files out; blocks, for large images minutes.

        Raises SandboxError, with the remedy, for a machine without podman and docker, an image
        that neither has, and files that cannot be written out.
        """
        tool, facts = _find(name)
        self.environment = _variables(facts)
        """What the image sets for its programs."""
        number = str(facts.get("Id", "")).rpartition(":")[2]
        self._folder = Path(tempfile.gettempdir(), f"{_PREFIX}{os.getuid()}-{number[:32]}")
        self.path = self._folder / "root"
        """What its programs see as `/`."""
        self._lock = _held(self._folder, exclusive=False)
        try:
            _sweep(self._folder)
            if not self._is_complete():
                self._write(tool, name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the files up; who is the last one removes them."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # somebody else uses them
        else:
            _remove(self._folder)
        finally:
            os.close(self._lock)

    def place(self, path: str) -> None:
        """Make a folder in it where something else will be shown; SandboxError if it is a link."""
        at = self.path
        for name in Path(path).parts[1:]:
            at = at / name
            if at.is_symlink() or (at.exists() and not at.is_dir()):
                raise SandboxError(
                    f"the image has a link or a file at /{at.relative_to(self.path)}, where "
                    f"programs are to be shown {path}",
                    hint="make the image with a folder there",
                )
            if not at.exists():
                at.mkdir()
                at.chmod(0o755)  # whatever the umask: programs go through it

    def _is_complete(self) -> bool:
        return (self._folder / "complete").exists()

    def _write(self, tool: str, name: str) -> None:
        """Write the files out, unless somebody else has meanwhile."""
        os.close(self._lock)
        self._lock = _held(self._folder, exclusive=True)
        if not self._is_complete():
            remove_tree(self.path)
            self.path.mkdir()
            _unpack(tool, name, self.path)
            for folder in _FOLDERS:
                self.place(f"/{folder}")
            for file in _FILES:
                at = self.path / file
                at.unlink(missing_ok=True)
                at.touch()
            self.path.chmod(0o755)
            (self._folder / "complete").touch()
        fcntl.flock(self._lock, fcntl.LOCK_SH)


def _find(name: str) -> tuple[str, dict[str, Any]]:
    """Return which tool has an image, and what it says of it."""
    tools = [path for one in _TOOLS if (path := shutil.which(one)) is not None]
    if not tools:
        raise SandboxError(
            f"agent.image={name!r} needs podman or docker, and this machine has neither",
            hint="apt-get install podman (dnf install podman) where environment hosts run, or "
            "remove agent.image",
        )
    reasons: list[str] = []
    for tool in tools:
        done = _run([tool, "image", "inspect", name])
        if done.returncode == 0:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                return tool, dict(json.loads(done.stdout)[0])
        reasons.append(f"{Path(tool).name} says: {_last_line(done.stderr)}")
    raise SandboxError(
        f"agent.image={name!r} is not on this machine; {'; '.join(reasons)}",
        hint=f"pull or build it where environment hosts run, as the user of the host: "
        f"{Path(tools[0]).name} pull {name}",
    )


def _variables(facts: dict[str, Any]) -> dict[str, str]:
    config: Any = facts.get("Config") or {}
    pairs = [str(one).partition("=") for one in config.get("Env") or ()]
    return {name: value for name, _, value in pairs}


def _unpack(tool: str, name: str, root: Path) -> None:
    """Write the files of an image into a folder; nothing of the image is run."""
    made = _run([tool, "create", "--pull=never", "--network=none", name, "/none"])
    container = made.stdout.decode(errors="replace").strip()
    if made.returncode or not container:
        raise _unwritten(name, _last_line(made.stderr))
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
                raise _unwritten(name, str(error)) from error
            if done.returncode or exporting.wait(_ASK_S):
                errors.seek(0)
                raise _unwritten(name, _last_line(errors.read()))
    finally:
        _run([tool, "rm", "-f", container])


def _unwritten(name: str, reason: str) -> SandboxError:
    return SandboxError(
        f"the files of agent.image={name!r} cannot be written out: {reason}",
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
    """Make a folder of ours and lock it; return the lock, which closing gives back."""
    deadline = time.monotonic() + _UNPACK_S
    while time.monotonic() < deadline:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise SandboxError(f"{folder} is somebody else's", hint="remove it, or set TMPDIR")
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
        f"the files of an image in {folder} were not written out within {_UNPACK_S:g} s",
        hint="see what the other environment hosts of the machine do",
    )


def _sweep(mine: Path) -> None:
    """Remove images that no host of this user holds any more."""
    for left in mine.parent.glob(f"{_PREFIX}{os.getuid()}-*"):
        if left != mine and is_own_folder(left):
            with _unused(left) as is_unused:
                if is_unused:
                    _remove(left)


@contextlib.contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder in which some others may not be written."""
    if os.getuid():
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=False, capture_output=True)
    remove_tree(folder)


@cache
def interpreter_files() -> dict[str, Path]:
    """Return what is shown, by its path in the sandbox; SandboxError if that is not known."""
    python = Path(os.path.realpath(sys.executable))
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    loaded = _loaded(python)
    loader = next((one for one in loaded if one.name.startswith(("ld-", "ld."))), None)
    if loader is None:
        raise SandboxError(
            f"the dynamic loader of {python} is not known: programs cannot be run in an image",
            hint="remove agent.image, or run the host with a Python of the system",
        )
    libraries = {
        name: one
        for one in loaded
        if not one.is_relative_to(standard)
        for name in _library_names(one)
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
    mapped = {Path(found[5]) for found in words if len(found) > 5 and found[5].startswith("/")}
    return sorted(path for path in mapped if ".so" in path.name)


def _library_names(library: Path) -> set[str]:
    """Return the names under which others know a library: links beside it."""
    stem = library.name.partition(".so")[0]
    return {one.name for one in library.parent.glob(f"{stem}.so*") if one.samefile(library)}
