"""The sandbox of an agent program: what it sees of the machine, and what it may use of it.

It sees the system's programs and libraries, this interpreter with its packages and the folders that
`agent.read` names, all read-only; its own folder at `/episode/work`, a home and a /tmp, which are
on disk and gone with it; its own processes. It sees no other episode, no run, no grader and no file
of a user. Its network is its own and has one address, at which the model answers; or, if the job
says so, the machine's. It runs as a user that nobody is.

With `agent.image` it sees the files of that image in place of the system's and the interpreter's.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from ....schemas.config.agent import AgentConfig
from ....schemas.wire.errors import ConfigError
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
from .folders import ProgramFolder, check_folder, check_shown
from .image import IN_IMAGE, ImageRoot, interpreter_files

WORK, HOME, TASK, GRADER = "/episode/work", "/episode/home", "/episode/task", "/episode/grader"
TMP = "/tmp"  # noqa: S108 - its own
PORT = 48_470
"""Where the model answers in sandboxes with a network of their own."""
Reach: TypeAlias = Literal["model", "open", "none"]
"""What a program's network leads to."""
_PLACES = {"work": WORK, "home": HOME, "task": TASK, "tmp": TMP}
_OWN_ETC = ("passwd", "group", "hosts")
_OPTIONS = ("-I", "-S", "-B", "-X", "utf8")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NUM_FILES = 4096
_SHARED_MEMORY_PART = 4


class ProgramSandboxes:
    """What all programs of a job have in common."""

    def __init__(
        self, config: AgentConfig, private: Sequence[Path] = (), image: ImageRoot | None = None
    ) -> None:
        """Look at the folders; `private` ones may not be seen by a program.

        The files of an `image` stand in place of the machine's. Raises SandboxError for a machine
        without bubblewrap, and ConfigError for a folder that is missing or shows a private one.
        """
        bubblewrap_program()
        self._config = config
        read = {f"agent.read: {one}": check_folder("agent.read", one) for one in config.read}
        own = {"this interpreter": Path(sys.prefix), "its library": Path(sys.base_prefix)}
        own = own if image is None else {}
        refuse_shown({**read, **own}, private)
        for one in config.read:
            check_shown("agent.read", one)
        self._shown = sorted({*read.values(), *own.values()})
        above = {parent for path in self._shown for parent in path.parents}
        self.unseen = sorted(set(private) - above)
        """Private folders of which programs do not even see the names."""
        self._image = image
        self._python: tuple[str, ...] = (os.path.realpath(sys.executable),)
        if image is not None:
            self._python = IN_IMAGE
            own_places = {str(Path(place).parent) for place in interpreter_files()}
            for place in (WORK, HOME, TASK, GRADER, *own_places, *map(str, self._shown)):
                image.place(place)

    def variables(self, own: Mapping[str, str]) -> Mapping[str, str]:
        """Return a program's variables, behind what an image sets: only its PATH goes before."""
        if self._image is None:
            return own
        of_image = self._image.environment
        path = self._config.environment.get("PATH") or of_image.get("PATH") or _PATH
        return {**of_image, **own, "PATH": path}

    def sandbox(
        self, folder: ProgramFolder, reach: Reach, more: Mapping[str, Path] | None = None
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

    def _system(self, folder: ProgramFolder, is_open: bool) -> Iterator[Mount]:
        """Yield the machine's programs and libraries, or this Python for an image; and /etc."""
        if self._image is None:
            yield from system_mounts()
        else:
            yield from (readable(place, path) for place, path in interpreter_files().items())
        shown = SYSTEM_ETC if self._image is None else ()
        yield from etc_mounts((*shown, *(("resolv.conf",) if is_open else ())))
        yield from (readable(f"/etc/{name}", folder["etc"] / name) for name in _OWN_ETC)


def refuse_shown(shown: Mapping[str, Path], private: Iterable[Path]) -> None:
    """Raise ConfigError for a folder in which programs would see what is not for them."""
    for name, folder in shown.items():
        for hidden in private:
            if hidden.resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"programs would see {hidden} in {folder} ({name})",
                    hint="they may read no folder that holds the run, the reward's files or other "
                    "episodes: name folders inside of it",
                )


def grader_mounts(files: Path | None) -> dict[str, Path]:
    """Return what the reward command reads and the program did not."""
    return {} if files is None else {GRADER: files}
