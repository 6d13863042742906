"""Models of users, each file opened once.

The owner of a model's folder may put links in the place of its files between the check and the
moment when a library opens them by path. In a pool with users an actor therefore opens the files of
its models itself, decides on the real path of what it opened, and gives libraries a folder of its
own: with copies of small files, whose content is not read twice, and with links to the open
descriptors of the others.
"""

import contextlib
import json
import os
import resource
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...schemas.config.sections import ADAPTER_CONFIG
from ...schemas.local.folder import Folder, hold, process_folder
from ...schemas.wire.errors import ConfigError

_PREFIX = "tinkermq-models"
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_MAX_COPIED_BYTES = 64 << 20
"""Larger files are not copied."""
_MAX_FILES, _MAX_BYTES = 10_000, 1 << 30
"""Files of a model, and bytes of their copies."""
_MAX_DEPTH = 3
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

MayRead = Callable[[Path], None]
"""Raises ConfigError for a real path, to which a link leads, that the job's owner may not read."""


class HeldModels:
    """The models of this process: what they are named, and where libraries read them."""

    def __init__(self) -> None:
        """Hold none yet."""
        self._folder: Path | None = None
        self._shown: dict[str, str] = {}
        self._named: dict[str, str] = {}
        self._files: list[int] = []
        self._files_left = self._bytes_left = 0
        self._folders = set[Path]()

    def hold(self, path: str, may_read: MayRead) -> str:
        """Return the folder from which libraries read a model; a hub's name stays as it is.

        Raises ConfigError if its owner may not read a file in it, or if it cannot be read.
        """
        if path in self._shown:
            return self._shown[path]
        real = os.path.realpath(path)
        if not os.path.isdir(real):  # noqa: PTH112  False for odd paths
            return path
        if real not in self._shown:
            if self._folder is None:
                self._folder = process_folder(_PREFIX).resolve()
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            shown = self._folder / real.lstrip("/")
            self._files_left, self._bytes_left = _MAX_FILES, _MAX_BYTES
            self._folders.clear()
            try:
                named = os.path.abspath(path)  # noqa: PTH100 Path.absolute leaves `..` in it
                self._show(named, shown, may_read, depth=0)
            except OSError as error:
                raise ConfigError(
                    f"model {path} cannot be read: {error.strerror}",
                    hint="it must not change while a run starts: start the run again",
                ) from error
            self._shown[real], self._named[str(shown)] = str(shown), path
            if base := _base_of(shown):
                self.hold(base, may_read)
        self._shown[path] = self._shown[real]
        return self._shown[path]

    def shown(self, path: str) -> str:
        """Return where libraries read the model of a path; the path itself if it is not held."""
        return self._shown.get(path, path)

    def named(self, path: str) -> str:
        """Return what a job names the model that libraries read from a path."""
        return self._named.get(path, path)

    def has(self, folder: Path) -> bool:
        """Return whether a folder is one that libraries read."""
        return self._folder is not None and folder.is_relative_to(self._folder)

    def close(self) -> None:
        """Close all files, and remove the folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for file in self._files:
            os.close(file)
        self.__init__()

    def _show(self, path: str, shown: Path, may_read: MayRead, depth: int) -> None:
        with Folder.held(path) as folder:
            if str(folder.path) != path:
                may_read(folder.path)
            if folder.path in self._folders:
                return  # links go in a circle
            self._folders.add(folder.path)
            shown.mkdir(parents=True, exist_ok=True)
            for name in folder.names():
                self._files_left -= 1
                if min(self._files_left, self._bytes_left) < 0:
                    raise ConfigError(
                        f"{path} holds more than {_MAX_FILES:,} files, or {_MAX_BYTES >> 30} GiB "
                        "beside weights",
                        hint="name the model's own folder",
                    )
                self._show_entry(f"{folder.path}/{name}", shown / name, may_read, depth)

    def _show_entry(self, path: str, shown: Path, may_read: MayRead, depth: int) -> None:
        try:
            file, real = hold(path, _FILE)
        except (FileNotFoundError, PermissionError):
            return  # libraries cannot read it either
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, file)
            status = os.fstat(file)
            if str(real) != path:
                may_read(real)
            if stat.S_ISDIR(status.st_mode) and depth < _MAX_DEPTH:
                self._show(str(real), shown, may_read, depth + 1)
            elif not stat.S_ISREG(status.st_mode):
                return
            elif shown.suffix in _WEIGHTS or status.st_size > _MAX_COPIED_BYTES:
                self._files.append(os.dup(file))
                shown.symlink_to(f"/proc/{os.getpid()}/fd/{self._files[-1]}")
            else:
                with os.fdopen(os.dup(file), "rb") as source:
                    self._bytes_left -= shown.write_bytes(source.read(_MAX_COPIED_BYTES))


def _base_of(adapter: Path) -> str | None:
    """Return what a copied folder names as the base of its adapter, if it is one."""
    try:
        settings: Any = json.loads((adapter / ADAPTER_CONFIG).read_bytes())
        return str(settings["base_model_name_or_path"] or "") or None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # it is no adapter, or an error tells what it lacks


held_models = HeldModels()
"""Those of this process."""
