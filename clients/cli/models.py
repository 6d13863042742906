"""`tinkermq model get` and `model list`: models by short names, as folders of this machine."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ...schemas.model_catalogue import CATALOGUE, catalogue_folder
from ...schemas.wire.errors import ConfigError, StorageError
from .output import print_json, print_plain, print_table
from .quickstart import check_worker, run_module


def get(
    source: str,
    *,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> int:
    """Write a model as an ordinary Hugging Face folder.

    `model.path: NAME` then names a model of the catalogue in configurations, and NAME serves it.

    Parameters
    ----------
    source
        A name of `tinkermq model list`, a GGUF file, a folder, or a model of the hub (owner/name).
    output
        The new folder. Default for the catalogue: below $TINKERMQ_CACHE (`~/.cache/tinkermq`).
    dtype
        Format of the weights.
    """
    target = _target(source, output)
    if (target / "config.json").is_file():
        if output is not None:
            raise StorageError(f"{target} holds a model", hint="remove it, or name another folder")
        print_plain(f"model      {target} (fetched before)")
        return 0
    if target.exists():
        raise StorageError(f"{target} exists", hint="remove it, or name another folder")
    check_worker("models are converted on this machine")
    return run_module("tinkermq.actors.get_model", source, str(target), "--dtype", dtype)


def _target(source: str, output: Path | None) -> Path:
    if output is not None:
        return output.absolute()
    if source in CATALOGUE:
        return catalogue_folder(source)
    raise ConfigError(
        f"{source!r} is not in the catalogue ({', '.join(CATALOGUE)}), and no folder is named",
        hint=f"tinkermq model get {source} --output FOLDER",
    )


def list_models(*, json: bool = False) -> int:
    """List the models that have short names."""
    rows = [
        {
            "name": name,
            "title": model.title,
            "weights": model.num_weights,
            "source": model.requirement,
            "folder": str(folder) if (folder := catalogue_folder(name)).is_dir() else None,
        }
        for name, model in CATALOGUE.items()
    ]
    if json:
        print_json(rows)
        return 0
    print_table(
        ("name", "model", "weights", "from", "folder"),
        [
            (
                row["name"],
                row["title"],
                f"{int(str(row['weights'])) / 1e6:,.0f} M",
                row["source"],
                row["folder"] or "tinkermq model get " + str(row["name"]),
            )
            for row in rows
        ],
    )
    return 0
