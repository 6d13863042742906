"""Check and resolve names, paths and files of a configuration before a job is submitted."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from ..envs.task_folders import TaskFolders
from ..schemas.config.agent import TaskSource, name_with_folder
from ..schemas.config.sections import ADAPTER_CONFIG, given_section, is_url
from ..schemas.job import BEST_STEP, LAST_STEP
from ..schemas.model_catalogue import CATALOGUE, find_model
from ..schemas.tinker.names import is_path
from ..schemas.wire.errors import ConfigError, DataError, ModelError


def split_checkpoint_name(name: str) -> tuple[str, str | None]:
    """Return run and step of `RUN@STEP`, `RUN@last` or `RUN@best`, and None for the step of `RUN`.

    Whether the checkpoint exists is not checked. Raises ConfigError.
    """
    run, at, step = name.partition("@")
    if at and step not in (LAST_STEP, BEST_STEP) and not step.isdecimal():
        raise ConfigError(
            f"{name!r} names no step",
            hint=f"write RUN@STEP, such as my-run@40, RUN@{LAST_STEP} or RUN@{BEST_STEP}",
        )
    return run, step if at else None


def full_checkpoint_name(name: str) -> str:
    """Return `RUN@STEP` for a name that users type: `RUN` means its newest checkpoint.

    A `tinker://` path is not changed.
    """
    if is_path(name):
        return name
    run, step = split_checkpoint_name(name)
    return f"{run}@{step or LAST_STEP}"


# Paths in a configuration: relative paths become absolute.
#
# Paths that do not exist here are left unchanged, since a pool on another machine has other
# folders.

_LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}


def resolve_paths(
    config: dict[str, Any], broker_url: str, *, has_users: bool = False
) -> dict[str, Any]:
    """Return the configuration with its folders and files made absolute.

    A pool with users has its own default output folder. Folders of agent programs stay as they are
    if no host of the pool runs the programs (`env.hosts: 0`).
    """
    resolved = copy.deepcopy(config)
    model: dict[str, Any] = resolved.get("model") or {}
    for key in {"path", "tokenizer"} & model.keys():
        if model[key] is not None:
            model[key] = _existing(str(model[key]))
            if is_local_pool(broker_url):
                model[key] = find_model(model[key])
    for section, keys in (("env", {"train_data", "val_data"}), ("sft", {"data"})):
        data: dict[str, Any] = resolved.get(section) or {}
        for key in keys & data.keys():
            data[key] = [name_with_folder(str(path), _existing) for path in data[key]]
    env: dict[str, Any] = resolved.get("env") or {}
    if env.get("hosts") != 0:
        _resolve_programs(resolved.get("agent") or {})
        kwargs: dict[str, Any] = env.get("kwargs") or {}
        if env.get("game") == "openenv" and Path(str(kwargs.get("python"))).exists():
            kwargs["python"] = str(Path(str(kwargs["python"])).absolute())  # a link in a venv stays
    if is_local_pool(broker_url) and ("output_dir" in resolved or not has_users):
        resolved["output_dir"] = str(Path(str(resolved.get("output_dir", "outputs"))).resolve())
    return resolved


def _resolve_programs(agent: dict[str, Any]) -> None:
    if isinstance(agent.get("tasks"), str):
        agent["tasks"] = name_with_folder(agent["tasks"], _existing)
    for key in {"files", "reward_files"} & agent.keys():
        if agent[key] is not None:
            agent[key] = _existing(str(agent[key]))
    if "read" in agent:
        agent["read"] = [_existing(str(path)) for path in agent["read"]]


def is_local_pool(broker_url: str) -> bool:
    """Return whether the pool of a broker runs on this machine and sees the same folders."""
    return urlsplit(broker_url).hostname in _LOCAL_HOSTS


def _existing(path: str) -> str:
    """Return the absolute path of an existing file or folder; other names (hub) unchanged."""
    place = Path(path).expanduser()
    return str(place.resolve()) if place.exists() else path


# The files of a configuration (models, data, programs), which are not loaded.

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_DATA_KEYS = (
    ("env", "train_data"),
    ("env", "val_data"),
    ("sft", "data"),
)


def check_files_exist(tree: Mapping[str, Any], broker_url: str, *, has_model: bool = False) -> None:
    """Raise ModelError, DataError or ConfigError for files that a job on this machine lacks.

    Nothing is checked for a pool on other machines: its processes report missing files. With
    `has_model`, the model is a run's.
    """
    if not is_local_pool(broker_url):
        return
    path = given_section(tree, "model").get("path")
    if isinstance(path, str) and not has_model:
        check_model_folder(
            path, here=True, has_tokenizer=bool(given_section(tree, "model").get("tokenizer"))
        )
    tasks = given_section(tree, "agent").get("tasks")
    if isinstance(tasks, str):
        _check_dataset(tasks, "agent.tasks")
    for section, key in _DATA_KEYS:
        for name in cast("list[Any]", given_section(tree, section).get(key) or []):
            if isinstance(name, str):
                _check_dataset(name, f"{section}.{key}")
    if given_section(tree, "env").get("hosts") != 0:
        _check_folders_exist(given_section(tree, "agent"))


def _check_dataset(name: str, key: str) -> None:
    if (source := TaskSource.parse(name)) is not None:
        TaskFolders(source)
    elif not Path(name).expanduser().is_file():
        raise DataError(
            f"there is no dataset file {name!r} ({key})",
            hint="give the path of a parquet or JSONL file, absolute or relative to the working "
            "folder",
        )


def _check_folders_exist(agent: Mapping[str, Any]) -> None:
    named = [(key, agent.get(key)) for key in ("files", "reward_files")]
    named += [("read", folder) for folder in cast("list[Any]", agent.get("read") or [])]
    for key, name in named:
        if isinstance(name, str) and not Path(name).expanduser().is_dir():
            raise ConfigError(
                f"there is no folder {name!r} (agent.{key})",
                hint="give the path of a folder, absolute or relative to the working folder",
            )


_MODELS_OF_EXAMPLES = Path("outputs/models")
"""Each is made by the warm start of that name."""


def check_model_folder(path: str, *, here: bool, has_tokenizer: bool = False) -> str:
    """Check a model folder without loading it, and describe it; a model elsewhere is only named.

    `here`: the job would run on this machine. `has_tokenizer`: the tokenizer is in another folder.
    Raises ModelError for a folder that is not a model.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if not here:
            return f"{path} is not a folder here: the pool's own, or the hub's; not checked"
        if is_url(path):
            return f"{path} will be fetched from the store; not checked"
        if path.count("/") == 1 and not path.startswith((".", "/", "~")):
            return f"{path} is not a folder here: it will be fetched from the hub"
        if path in CATALOGUE:
            return check_model_folder(find_model(path), here=here, has_tokenizer=has_tokenizer)
        raise ModelError(
            f"there is no model folder {path!r}",
            hint=f"make it: `python -m tinkermq.actors.warm_start {folder.name} {path}`"
            if folder.parent == _MODELS_OF_EXAMPLES
            else "give a Hugging Face folder, the name of a model on the hub (owner/name), or one "
            f"of `tinkermq model list`: {', '.join(CATALOGUE)}",
        )
    if (folder / ADAPTER_CONFIG).is_file():
        return f"{folder} (an adapter, put on its base)"
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model: it has no config.json",
            hint=f"convert it: `tinkermq model get {path} --output FOLDER`"
            if folder.suffix == ".gguf" and folder.is_file()
            else "give a folder that transformers' save_pretrained wrote",
        )
    if not has_tokenizer and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer", hint="save the tokenizer into the model's folder"
        )
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ModelError(f"{folder} has no weights", hint="save the model into this folder")
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "?")
    return f"{folder} ({kind})"


# Whether a configuration is complete enough to start a job.

_LEARNT = (("env", "game"), ("agent", "command"), ("agent", "client"), ("sft", "data"))
"""Keys of which a job needs at least one to train on."""


def is_complete(tree: dict[str, Any]) -> bool:
    """Return whether a job can start: it has a model, and a game, programs or conversations."""
    return bool(section_value(tree, "model", "path")) and any(
        section_value(tree, section, key) for section, key in _LEARNT
    )


def section_value(tree: dict[str, Any], section: str, key: str) -> Any:
    """Return a value of a section, or None; raises ConfigError if the section is not a map."""
    inner: Any = tree.get(section) or {}
    if not isinstance(inner, dict):
        raise ConfigError(f"{section} is a section, got {inner!r}")
    return cast("dict[str, Any]", inner).get(key)
