"""This Python at a place of its own, for walls in which the machine's libraries are not.

What runs first behind a program's walls is written in Python, and an image of a container may have
none, or another C library. So the interpreter, its standard library and the shared libraries that
it loads are shown one by one, and it is started by the dynamic loader that it was built for.
"""

import os
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

from ....schemas.wire.errors import SandboxError

_FOLDER = "/.tinkermq"
_LOADER, _LIBRARIES, _HOME = f"{_FOLDER}/loader", f"{_FOLDER}/libraries", f"{_FOLDER}/python"
_PYTHON = f"{_HOME}/bin/python3"
IN_IMAGE = (_LOADER, "--library-path", _LIBRARIES, _PYTHON)
"""The words that start it there."""
_LOADED = """
import json, os, resource, shutil, socket
print(open("/proc/self/maps").read())
"""
_DEADLINE_S = 60.0


@cache
def shown_files() -> dict[str, Path]:
    """Return what is shown, by its place behind the walls; SandboxError if that is not known."""
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
        name: one for one in loaded if not one.is_relative_to(standard) for name in _names(one)
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
        done = subprocess.run(command, capture_output=True, timeout=_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(
            f"{python} does not start by itself: {error}", hint="see its installation"
        ) from error
    words = (line.split(maxsplit=5) for line in done.stdout.decode().splitlines())
    mapped = {Path(found[5]) for found in words if len(found) > 5 and found[5].startswith("/")}
    return sorted(path for path in mapped if ".so" in path.name)


def _names(library: Path) -> set[str]:
    """Return the names under which others know a library: links beside it."""
    stem = library.name.partition(".so")[0]
    return {one.name for one in library.parent.glob(f"{stem}.so*") if one.samefile(library)}
