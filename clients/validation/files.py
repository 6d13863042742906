"""What a configuration names: models, data, programs; looked at without loading them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ...schemas.config.lora import ADAPTER_CONFIG
from ...schemas.config.storage import is_url
from ...schemas.wire.errors import ConfigError, DataError, ModelError
from .paths import is_local_pool

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_DATA_KEYS = (
    ("env", "train_data"),
    ("env", "val_data"),
    ("sft", "data"),
)


def refuse_missing(tree: Mapping[str, Any], broker_url: str, *, has_model: bool = False) -> None:
    """Raise ModelError, DataError or ConfigError for what a job on this machine would not find.

    The folders of a pool elsewhere are not seen: what it lacks, its processes say. With `has_model`
    the model is a run's.
    """
    if not is_local_pool(broker_url):
        return
    path = _section(tree, "model").get("path")
    if isinstance(path, str) and not has_model:
        look_at_model(path, here=True, has_tokenizer=bool(_section(tree, "model").get("tokenizer")))
    for section, key in _DATA_KEYS:
        for name in cast("list[Any]", _section(tree, section).get(key) or []):
            if isinstance(name, str) and not Path(name).expanduser().is_file():
                raise DataError(
                    f"there is no dataset file {name!r} ({section}.{key})",
                    hint="give the path of a parquet or JSONL file, relative to this folder or "
                    "absolute",
                )
    if _section(tree, "env").get("hosts") != 0:
        _refuse_missing_folders(_section(tree, "agent"))


def _refuse_missing_folders(agent: Mapping[str, Any]) -> None:
    named = [(key, agent.get(key)) for key in ("files", "reward_files")]
    named += [("read", one) for one in cast("list[Any]", agent.get("read") or [])]
    for key, name in named:
        if isinstance(name, str) and not Path(name).expanduser().is_dir():
            raise ConfigError(
                f"there is no folder {name!r} (agent.{key})",
                hint="give the path of a folder, relative to this one or absolute",
            )


def look_at_model(path: str, *, here: bool, has_tokenizer: bool = False) -> str:
    """Look at a model folder without loading it; one of the pool's or the hub's is named.

    `here` says that the job would run on this machine, `has_tokenizer` that the tokenizer lies
    elsewhere. Raises ModelError for a folder that is not a
    model.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if not here:
            return f"{path} is not a folder here: the pool's own, or the hub's; not checked"
        if is_url(path):
            return f"{path} will be fetched from the store; not checked"
        if path.count("/") == 1 and not path.startswith((".", "/", "~")):
            return f"{path} is not a folder here: it will be fetched from the hub"
        raise ModelError(
            f"there is no model folder {path!r}",
            hint="give a Hugging Face folder, or the name of a model on the hub (owner/name)",
        )
    if (folder / ADAPTER_CONFIG).is_file():
        return f"{folder} (an adapter, put on its base)"
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model: it has no config.json",
            hint="give a folder that transformers' save_pretrained wrote",
        )
    if not has_tokenizer and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer", hint="save the tokenizer into the model's folder"
        )
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ModelError(f"{folder} has no weights", hint="save the model into this folder")
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", "?")
    return f"{folder} ({kind})"


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = tree.get(name)
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
