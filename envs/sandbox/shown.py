"""The files of a node that code of users sees: games, reward functions, functions in algorithms."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from ...schemas.wire.errors import SandboxError

FOLDERS_VARIABLE = "TINKERMQ_GAME_FOLDERS"
"""Variable with further folders for code of users, joined by `:`, such as packages and data."""
_OURS = ("package", "actors", "broker", "clients", "envs", "schemas")
"""Folders of a checkout; an installed package has no `package`, which is its own folder there."""


class PathRefused(SandboxError):
    """A path may not be shown to code of users; a retry does not help."""


def code_folders() -> list[Path]:
    """Return the folders of the interpreter, its packages and this project, and the operator's."""
    root = Path(__file__).resolve().parents[2]
    return [
        Path(sys.prefix),
        Path(sys.base_prefix),
        *(root / folder for folder in _OURS),
        *_listed("PYTHONPATH"),
        *operator_folders(),
    ]


def operator_folders() -> list[Path]:
    """Return the folders that the operator names in `$TINKERMQ_GAME_FOLDERS`."""
    return _listed(FOLDERS_VARIABLE)


def refuse_runs(folders: Iterable[Path], run_dir: Path) -> None:
    """Raise PathRefused if a folder that all code of users may see contains the runs of all."""
    for folder in folders:
        if run_dir.resolve().is_relative_to(folder.resolve()):
            raise PathRefused(
                f"games would see the run folders of all users in {folder}",
                hint="let the runs lie elsewhere (output_dir) than what games see: Python's own "
                f"folders, $PYTHONPATH and ${FOLDERS_VARIABLE}",
            )


def _listed(variable: str) -> list[Path]:
    return [Path(item) for item in os.environ.get(variable, "").split(os.pathsep) if item]
