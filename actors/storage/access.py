"""Which files and stores a user's job may name, read and write.

Jobs write below the operator's output folders only: their runs, and weights that they share.
Libraries that read a model follow the links in its folder: symbolic links, shards that an index
names, files that a tokenizer's configuration names, the base of an adapter. This module finds all
files that a job would read, so that they are checked before anything is read.

The machines of the pool reach stores with their own keys, so only the URL decides whose files a
job reads and writes.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from ...envs.sandbox.shown import FOLDERS_VARIABLE, code_folders
from ...schemas.config.agent import TaskSource
from ...schemas.config.job import JobConfig
from ...schemas.config.sections import BROKER, is_url, model_paths
from ...schemas.job import JobRecord
from ...schemas.local.folder import Folder
from ...schemas.node import WantedActor
from ...schemas.wire.errors import ConfigError, StorageError
from .adapters import base_of, is_adapter
from .run_folders import checkpoint_folders

ROOTS_VARIABLE = "TINKERMQ_OUTPUT_ROOTS"
"""Environment variable of the scheduler: folders where jobs may write, joined by `:`. The first is
for jobs that name none."""
MODELS_VARIABLE = "TINKERMQ_MODEL_FOLDERS"
"""Environment variable of scheduler and nodes: folders of models and data of which users may learn
what is in them, joined by `:`."""
_DEFAULT = "outputs"


def output_roots(*, has_users: bool) -> list[Path]:
    """Return the folders where jobs may write; empty: anywhere, the default without users."""
    named = os.environ.get(ROOTS_VARIABLE, _DEFAULT if has_users else "")
    return [Path(path).expanduser().resolve() for path in named.split(os.pathsep) if path]


def in_default_folder(config: JobConfig, roots: Sequence[Path]) -> JobConfig:
    """Return the configuration with `output_dir`: the first root if it is not set."""
    if not roots or "output_dir" in config.model_fields_set:
        return config
    return config.model_copy(update={"output_dir": str(roots[0])})


def with_allowed_folders(config: JobConfig, roots: Sequence[Path]) -> JobConfig:
    """Return the configuration with its output folders resolved, all below the roots.

    Raises ConfigError for a folder outside of the roots.
    """
    if not roots:
        return config
    output = below_roots("output_dir", config.output_dir, roots)
    changes: dict[str, object] = {"output_dir": str(output)}
    if config.weights.folder is not None:
        folder = below_roots("weights.folder", config.weights.folder, roots)
        changes["weights"] = config.weights.model_copy(update={"folder": str(folder)})
    return config.model_copy(update=changes)


def below_roots(key: str, value: str, roots: Sequence[Path]) -> Path:
    """Return a folder with all links followed; ConfigError if it is not below a root.

    Without roots any folder is allowed.
    """
    folder = Path(os.path.realpath(without_tilde(value)))
    if roots and not any(folder.is_relative_to(root.resolve()) for root in roots):
        allowed = ", ".join(map(str, roots))
        raise ConfigError(
            f"{key}={value!r} is outside of the folders where runs may write: {allowed}",
            hint=f"leave {key} out, or name a folder there; the operator allows further ones in "
            f"${ROOTS_VARIABLE} of the scheduler",
        )
    return folder


def own_folders(job: JobRecord | WantedActor) -> list[Path]:
    """Return the folders in which the runs of a job's owner lie; each has the owner's name.

    The name alone decides nothing: runs, and folders in them, may have the name of a user.
    """
    folders = [Path(job.run_dir).parent, *map(Path, job.own_folders)]
    return [folder for folder in folders if folder.name == job.user]


def is_of_another(path: Path, own: Sequence[Path], roots: Sequence[Path]) -> bool:
    """Return whether a resolved path is below a root, but in none of a user's own folders."""
    if any(path.is_relative_to(folder) for folder in own):
        return False
    return any(path.is_relative_to(root.resolve()) for root in roots)


def refuse_unshown_folder(path: Path, job: JobRecord | WantedActor) -> None:
    """Raise ConfigError for a real path that agent programs of a job may not be shown.

    They may see runs of their owner, and what every hosted game sees.
    """
    if any(path.is_relative_to(folder) for folder in own_folders(job)):
        return
    if not any(path.is_relative_to(item.resolve()) for item in code_folders()):
        raise ConfigError(
            f"agent programs of user {job.user!r} may not be shown {str(path)!r}",
            hint="name a folder in a run of theirs, or let the operator name it in "
            f"${FOLDERS_VARIABLE} of the nodes",
        )


def shown_from(path: Path, own: Sequence[Path], roots: Sequence[Path]) -> Path | None:
    """Return the folder that contains a path and about which a user may learn, or None.

    These are the operator's folders of models and data, and the user's `own`. Without roots, as in
    an admin's jobs, they are all folders. The path must be resolved.
    """
    if not roots:
        return Path(path.anchor)
    named = os.environ.get(MODELS_VARIABLE, "").split(os.pathsep)
    models = [Path(folder).expanduser().resolve() for folder in named if folder]
    return next((folder for folder in [*models, *own] if path.is_relative_to(folder)), None)


def without_tilde(value: str) -> Path:
    """Return a path with `~` expanded."""
    return Path(os.path.expanduser(value))  # noqa: PTH111  a strange ~name stays as it is


# -- stores ----------------------------------------------------------------------------------------

STORES_VARIABLE = "TINKERMQ_STORES"
"""Environment variable of the scheduler: URLs of stores for users, joined by commas."""
_ODD = ("..", "%", "?", "#", "//", "\\")


def operator_stores() -> list[str]:
    """Return the stores that the operator has opened to users."""
    named = os.environ.get(STORES_VARIABLE, "")
    return [url.strip().rstrip("/") for url in named.split(",") if url.strip()]


def refuse_other_stores(config: JobConfig, user: str, stores: Sequence[str]) -> None:
    """Raise ConfigError for a URL that a user may not use.

    Checkpoints go below a store itself; models are read from its `models/` and from the user's own
    runs.
    """
    url = config.storage.url
    if url not in (None, BROKER) and url.rstrip("/") not in stores:
        raise _refused("storage.url", url, stores)
    for key, path in model_paths(config).items():
        if is_url(path) and not _is_readable(path, user, stores):
            raise _refused(key, path, [f"{store}/models/…" for store in stores])


def _is_readable(url: str, user: str, stores: Sequence[str]) -> bool:
    below = [f"{place}/{part}/" for place in stores for part in ("models", f"runs/{user}")]
    below.append(f"{BROKER}runs/{user}/")
    rest = next((url.removeprefix(place) for place in below if url.startswith(place)), "")
    return bool(rest) and not any(odd in rest for odd in _ODD)


def _refused(key: str, url: str, allowed: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{key}={url!r} is outside of the stores that users of this pool reach: "
        f"{', '.join(allowed) or 'there are none'}",
        hint=f"the operator names them in ${STORES_VARIABLE} of the scheduler",
    )


# -- files that a configuration names, directly or by links
# -----------------------------------------------------------

_MAX_FILES = 10_000
_MAX_DEPTH = 4
_NEWEST = 3
"""Newest checkpoints of a run that are checked: it continues from one of them."""
_MAX_JSON_BYTES = 8 << 20
_BIG = frozenset({"tokenizer.json", "vocab.json"})
"""Files of vocabularies, which name no files."""
_WRITTEN = frozenset({"output_dir", "weights.folder"})
_SANDBOXED = ("env.", "agent.")


class Lead(NamedTuple):
    """A file or folder that a job reads, and the setting or link that names it."""

    key: str
    value: str
    via: str
    """The link inside of the folder `value`; empty for `value` itself."""
    path: Path
    """Its path with all links followed."""

    def __str__(self) -> str:
        inside = f": {self.via} in it leads to {self.path}, which" if self.via else ""
        return f"{self.key}={self.value!r}{inside}"


def leads(config: JobConfig, more: Mapping[str, str] | None = None) -> Iterator[Lead]:
    """Yield the file or folder of each text of a configuration, and the links in model folders.

    `more` are further folders that are read, by their settings. Raises ConfigError for a folder
    with more files than a model can have.
    """
    for key, value in [*texts_of(config.model_dump(mode="json")), *(more or {}).items()]:
        for name, path in _with_bases(key, value):
            if "\0" in path or not (place := without_tilde(path)).name:
                continue
            if "/" in path or os.path.lexists(place):
                yield Lead(name, path, "", Path(os.path.realpath(place)))
            # games and programs read the paths of `env` and `agent` in sandboxes, which no link
            # leaves
            if key not in _WRITTEN and not key.startswith(_SANDBOXED) and _is_folder(place):
                for via, target in _links(place, name):
                    yield Lead(name, path, via, target)


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a tree, each with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in cast("dict[str, Any]", value).items():
            yield from texts_of(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from texts_of(item, key)


def refuse_links_to_others(record: JobRecord, config: JobConfig) -> None:
    """Raise ConfigError for a link into a run that is not the user's own, or out of the roots.

    Call it right before the files are read, since a model folder may have changed after the job was
    accepted.
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
        if _is_linked(lead) and is_of_another(lead.path, own_folders(record), roots):
            raise foreign_run_error(str(lead))


def refuse_files_of_others(record: JobRecord) -> Callable[[Path], None] | None:
    """Return a function that raises ConfigError for a real path in another user's run.

    None for a job that may read all.
    """
    own, roots = own_folders(record), [Path(root) for root in record.output_roots]

    def may_read(path: Path) -> None:
        if is_of_another(path, own, roots):
            raise foreign_run_error(f"{path}, a file of a model or dataset of this run,")

    return may_read if roots else None


def named_by(record: JobRecord) -> dict[str, str]:
    """Return the folders that a job reads besides those of its configuration."""
    fork = {"fork_of": record.fork_dir} if record.fork_dir else {}
    return {**fork, **{f"adapters.{name}": path for name, path in record.adapters.items()}}


def foreign_run_error(what: str) -> ConfigError:
    """Return the error for a file or folder in a run of another user."""
    return ConfigError(
        f"{what} is in a run folder of another user",
        hint="ask its owner for a copy in a folder that is yours",
    )


def hard_links(config: JobConfig, more: Mapping[str, str]) -> dict[tuple[int, int], Lead]:
    """Return the files with several names that will be read, by device and inode."""
    links: dict[tuple[int, int], Lead] = {}
    for lead in leads(config, more):
        if lead.key in _WRITTEN:
            continue
        inside = _files(lead.path) if _is_folder(lead.path) else [lead.path]
        for path in inside if not lead.key.startswith("env.") else [lead.path]:
            status = _status(path)
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                links[status.st_dev, status.st_ino] = lead._replace(path=path)
    return links


def inodes_below(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield device and inode of every file below a folder."""
    for path, _, names in os.walk(folder):
        for name in names:
            if (status := _status(Path(path, name))) is not None:
                yield status.st_dev, status.st_ino


def _is_linked(lead: Lead) -> bool:
    return bool(lead.via) or without_tilde(lead.value).absolute() != lead.path


_DATA = ("env.train_data", "env.val_data")


def _with_bases(key: str, value: str) -> Iterator[tuple[str, str]]:
    """Yield a path and, for an adapter's folder, the base models below it."""
    source = TaskSource.parse(value) if key in _DATA else None
    yield key, value if source is None else source.folder
    seen: set[str] = set()
    while is_adapter(value) and value not in seen:
        seen.add(value)
        value = base_of(value)
        yield f"the base of the adapter in {key}", value


def _links(folder: Path, key: str) -> Iterator[tuple[str, Path]]:
    """Yield the links in a folder: their names in it, and their targets."""
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
                for named in _named_files(path):
                    yield f"{name} ({named})", Path(os.path.realpath(here / named))


def _files(folder: Path) -> list[Path]:
    return [Path(path, name) for path, _, names in os.walk(folder) for name in names][:_MAX_FILES]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # the actor that reads it reports it


def _named_files(path: Path) -> Iterator[str]:
    """Yield the files in other folders that a JSON file of a model names."""
    real = Path(os.path.realpath(path))
    try:
        with Folder(real.parent) as folder:
            texts = list(texts_of(json.loads(folder.read(real.name, _MAX_JSON_BYTES))))
    except (OSError, StorageError, ValueError, RecursionError):
        return  # the actor that reads it reports it
    for _, text in texts:
        if "/" in text and os.path.exists(path.parent / text):  # noqa: PTH110  False for odd names
            yield text


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112  False for names that are too long


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
