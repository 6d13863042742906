"""The walls around a program: what it sees of the machine, and what it may use of it.

It sees the system's programs and libraries, this interpreter with its packages and the folders that
`agent.read` names, all read-only; its own folder at `/episode/work`, a home and a /tmp, which are
on disk and gone with it; its own processes. It sees no other episode, no run, no grader and no file
of a user. Its network is its own and has one address, at which the model answers; or, if the job
says so, the machine's. It runs as a user that nobody is.

With `agent.image` it sees the files of that image in place of the system's and the interpreter's.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ....schemas.config.agent import AgentConfig
from ....schemas.wire.errors import ConfigError
from ...sandbox.program import bubblewrap_program, unprivileged_user
from ...sandbox.seccomp import agent_filter
from ..containers.image_root import ImageRoot
from ..containers.interpreter import IN_IMAGE, shown_files
from .folders import ProgramFolder, check_folder, check_shown

WORK, HOME, TASK, GRADER = "/episode/work", "/episode/home", "/episode/task", "/episode/grader"
TMP = "/tmp"  # noqa: S108 - its own
PORT = 48_470
"""Where the model answers behind walls with a network of their own."""
Reach: TypeAlias = Literal["model", "open", "none"]
"""What a program's network leads to."""
_PLACES = {"work": WORK, "home": HOME, "task": TASK, "tmp": TMP}
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
_ETC = (
    *("alternatives", "ca-certificates", "fonts", "host.conf", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "pki", "protocols"),
    *("services", "ssl", "timezone"),
)
_OWN_ETC = ("passwd", "group", "hosts")
_PROC_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NUM_FILES = 4096
_SHARED_MEMORY_PART = 4


class ProgramWalls:
    """What all programs of a job have in common."""

    def __init__(
        self, config: AgentConfig, private: Sequence[Path] = (), image: ImageRoot | None = None
    ) -> None:
        """Look at the folders; `private` ones may not be seen by a program.

        The files of an `image` stand in place of the machine's. Raises SandboxError for a machine
        without bubblewrap, and ConfigError for a folder that is missing or shows a private one.
        """
        self._program = bubblewrap_program()
        self.filter = agent_filter()
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
        self.python: tuple[str, ...] = (os.path.realpath(sys.executable),)
        """The words that start this interpreter behind the walls, whatever programs find there."""
        if image is not None:
            self.python = IN_IMAGE
            own_places = {str(Path(place).parent) for place in shown_files()}
            for place in (WORK, HOME, TASK, GRADER, *own_places, *map(str, self._shown)):
                image.place(place)

    def variables(self, own: Mapping[str, str]) -> Mapping[str, str]:
        """Return a program's variables, behind what an image sets: only its PATH goes before."""
        if self._image is None:
            return own
        told = self._image.environment
        path = self._config.environment.get("PATH") or told.get("PATH") or _PATH
        return {**told, **own, "PATH": path}

    def command_line(
        self, folder: ProgramFolder, reach: Reach, more: Mapping[str, Path] | None = None
    ) -> list[str]:
        """Return bubblewrap's command line up to the program that it is to run.

        `more` are further folders that it reads, by their names behind the walls.
        """
        command = [self._program, "--die-with-parent", "--new-session", *_rights()]
        if self._image is not None:  # first: what is mounted later lies in it
            command += ["--bind", str(self._image.path), "/"]
        command += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        if reach != "open":
            command += ["--unshare-net"]
        command += ["--proc", "/proc", "--dev", "/dev"]
        for name in _PROC_SETTINGS:
            command += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
        size = str((self._config.memory_mb << 20) // _SHARED_MEMORY_PART)
        command += ["--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"]  # noqa: S108 - its own
        command += ["--remount-ro", "/dev", *self._root(folder, reach == "open")]
        command += _folders([Path(WORK)])
        for part, place in _PLACES.items():
            command += ["--bind", str(folder[part]), place]
        command += _folders(self._shown)
        for path in self._shown:
            command += ["--ro-bind", str(path), str(path)]
        for place, path in (more or {}).items():
            command += ["--ro-bind", str(path), place]
        return [*command, "--remount-ro", "/"]

    def _root(self, folder: ProgramFolder, is_open: bool) -> list[str]:
        """Return what shows the machine's programs and libraries, or an image's and this Python."""
        if self._image is None:
            return [*_system(), *_etc(folder, _ETC, is_open)]
        shown = shown_files().items()
        own = [word for place, path in shown for word in ("--ro-bind", str(path), place)]
        return [*own, *_etc(folder, (), is_open)]

    def orders(self, user: int | None, reach: Reach, processes: int = 0) -> dict[str, Any]:
        """Return what `inside.py` takes on before it becomes the program.

        `processes` stands for those of the configuration.
        """
        return {
            "user": user or 0,
            "folder": WORK,
            "port": PORT if reach == "model" else 0,
            "limits": {
                "NPROC": processes or self._config.processes,
                "FSIZE": self._config.disk_mb << 20,
                "NOFILE": _NUM_FILES,
                "CORE": 0,
                "MSGQUEUE": 0,
            },
        }


def _rights() -> list[str]:
    """Return what takes the rights of root: those it needs to become somebody else go later."""
    if unprivileged_user() is None:
        return ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    rights = ("CAP_SETUID", "CAP_SETGID")
    return ["--cap-drop", "ALL", *(word for one in rights for word in ("--cap-add", one))]


def _system() -> list[str]:
    """Return what shows the system's programs."""
    words: list[str] = []
    for name in _SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        else:
            words += ["--ro-bind-try", str(path), str(path)]
    return [*words, "--perms", "0755", "--dir", "/etc"]  # where programs look for what is not shown


def _etc(folder: ProgramFolder, shown: Sequence[str], is_open: bool) -> list[str]:
    """Return what shows the names of services, users and machines."""
    words: list[str] = []
    for name in (*shown, *(("resolv.conf",) if is_open else ())):
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in _OWN_ETC:
        words += ["--ro-bind", str(folder["etc"] / name), f"/etc/{name}"]
    return words


def _folders(paths: Iterable[Path]) -> list[str]:
    """Return what makes the folders above paths, so that anybody may go through them."""
    above = {parent for path in paths for parent in path.parents if parent != Path("/")}
    return [word for one in sorted(above) for word in ("--perms", "0755", "--dir", str(one))]


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


def inside_command(python: Sequence[str], program: Sequence[str]) -> list[str]:
    """Return how `inside.py` is started behind the walls, by the words that start Python there."""
    return [*python, "-I", "-S", "-B", "-X", "utf8", "-c", *program]
