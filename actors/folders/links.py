"""Which files a configuration leads to: what it names, and links inside the model folders it names.

A model folder is read by libraries, which follow whatever lies in it: symbolic links, shards that
an index names, files that a tokenizer's configuration names, the base of an adapter. All of them
are found here, so that they can be looked at before anything is read.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from ...broker.disk.run_folder import Folder
from ...schemas.config.job import JobConfig
from ...schemas.job import JobRecord
from ...schemas.wire.errors import ConfigError, StorageError
from ..models.checkpoint_folders import checkpoint_folders
from ..models.lora import base_of, is_adapter
from .roots import below_roots, is_of_another, without_tilde

_MAX_FILES = 10_000
_MAX_DEPTH = 4
_NEWEST = 3
"""Checkpoints of its own that a run may go on from: the newest, or one before a damaged one."""
_MAX_JSON_BYTES = 8 << 20
_BIG = frozenset({"tokenizer.json", "vocab.json"})
"""Words of a language, no names of files."""
_WRITTEN = frozenset({"output_dir", "weights.folder"})
_SANDBOXED = ("env.", "agent.")


class Lead(NamedTuple):
    """A file or folder that will be read, and how one gets there."""

    key: str
    value: str
    via: str
    """The link inside of `value`; empty for `value` itself."""
    path: Path
    """Where it lies when all links are followed."""

    def __str__(self) -> str:
        inside = f": {self.via} in it leads to {self.path}, which" if self.via else ""
        return f"{self.key}={self.value!r}{inside}"


def leads(config: JobConfig, more: Mapping[str, str] | None = None) -> Iterator[Lead]:
    """Yield where each text of a configuration leads; files of model folders only as links.

    `more` are further folders that are read, by what names them. Raises ConfigError for a folder
    with more files than a model has.
    """
    for key, value in [*texts_of(config.model_dump(mode="json")), *(more or {}).items()]:
        for name, path in _with_bases(key, value):
            if "\0" in path or not (place := without_tilde(path)).name:
                continue
            if "/" in path or os.path.lexists(place):
                yield Lead(name, path, "", Path(os.path.realpath(place)))
            # games and programs read what `env` and `agent` name, in sandboxes, which links do not
            # lead out of
            if key not in _WRITTEN and not key.startswith(_SANDBOXED) and _is_folder(place):
                for via, target in _links(place, name):
                    yield Lead(name, path, via, target)


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a tree, each with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, one in cast("dict[str, Any]", value).items():
            yield from texts_of(one, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from texts_of(one, key)


def refuse_links_to_others(record: JobRecord, config: JobConfig) -> None:
    """Raise ConfigError for a link into a run that is not the user's own, or out of the roots.

    Called right before the files are read: who may write a model folder may have changed it since
    the job was accepted.
    """
    roots = [Path(root) for root in record.output_roots]
    if not roots:
        return
    below_roots("run_dir", record.run_dir, roots)
    if config.weights.folder is not None:
        below_roots("weights.folder", config.weights.folder, roots)
    newest = sorted(checkpoint_folders(record.run_dir).items())[-_NEWEST:]
    more = {**named_by(record), **{f"checkpoint {step}": str(path) for step, path in newest}}
    for lead in leads(config, more):
        if _is_linked(lead) and is_of_another(lead.path, record.user, roots):
            raise foreign(str(lead))


def named_by(record: JobRecord) -> dict[str, str]:
    """Return the folders that a job reads besides those of its configuration."""
    fork = {"fork_of": record.fork_dir} if record.fork_dir else {}
    return {**fork, **{f"adapters.{name}": path for name, path in record.adapters.items()}}


def foreign(what: str) -> ConfigError:
    """Return the error for what lies in a run of another user."""
    return ConfigError(
        f"{what} is in a run folder of another user",
        hint="ask its owner for a copy in a folder that is yours",
    )


def hard_links(config: JobConfig, more: Mapping[str, str]) -> dict[tuple[int, int], Lead]:
    """Return the files with several names that will be read, by device and inode."""
    found: dict[tuple[int, int], Lead] = {}
    for lead in leads(config, more):
        if lead.key in _WRITTEN:
            continue
        inside = _files(lead.path) if _is_folder(lead.path) else [lead.path]
        for path in inside if not lead.key.startswith("env.") else [lead.path]:
            status = _status(path)
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                found[status.st_dev, status.st_ino] = lead._replace(path=path)
    return found


def inodes_below(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield device and inode of every file below a folder."""
    for path, _, names in os.walk(folder):
        for name in names:
            if (status := _status(Path(path, name))) is not None:
                yield status.st_dev, status.st_ino


def _is_linked(lead: Lead) -> bool:
    return bool(lead.via) or without_tilde(lead.value).absolute() != lead.path


def _with_bases(key: str, value: str) -> Iterator[tuple[str, str]]:
    """Yield a text and, where it is the folder of an adapter, the base of that, and so on."""
    yield key, value
    seen: set[str] = set()
    while is_adapter(value) and value not in seen:
        seen.add(value)
        value = base_of(value)
        yield f"the base of the adapter in {key}", value


def _links(folder: Path, key: str) -> Iterator[tuple[str, Path]]:
    """Yield what in a folder leads elsewhere: its name in the folder, and the place."""
    num_files = 0
    waiting, seen = [(folder, 0)], {folder.resolve()}
    while waiting:
        here, depth = waiting.pop()
        for path in _entries(here):
            num_files += 1
            if num_files > _MAX_FILES:
                raise ConfigError(
                    f"{key}={str(folder)!r} holds more than {_MAX_FILES} files",
                    hint="name the model's own folder",
                )
            name = str(path.relative_to(folder))
            if path.is_symlink():
                yield name, path.resolve()
            if path.is_dir() and depth < _MAX_DEPTH and path.resolve() not in seen:
                seen.add(path.resolve())
                waiting.append((path, depth + 1))
            elif path.suffix == ".json" and path.name not in _BIG:
                for told in _told_files(path):
                    yield f"{name} ({told})", Path(os.path.realpath(here / told))


def _files(folder: Path) -> list[Path]:
    return [Path(path, name) for path, _, names in os.walk(folder) for name in names][:_MAX_FILES]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # whoever reads it says so


def _told_files(path: Path) -> Iterator[str]:
    """Yield the files in other folders that a JSON file of a model names."""
    real = Path(os.path.realpath(path))
    try:
        with Folder(real.parent) as folder:
            told = list(texts_of(json.loads(folder.read(real.name, _MAX_JSON_BYTES))))
    except (OSError, StorageError, ValueError, RecursionError):
        return  # whoever reads it says so
    for _, text in told:
        if "/" in text and os.path.exists(path.parent / text):  # noqa: PTH110  False for odd names
            yield text


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112  False for names that are too long


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
