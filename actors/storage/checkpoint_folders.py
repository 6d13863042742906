"""Where the checkpoints of a run lie: `checkpoints/step_000040` in its folder."""

import re
from pathlib import Path

from ...broker.run_folder import Folder
from ...schemas.wire.errors import StorageError

_NAME = re.compile(r"step_([0-9]{6,})")
_CHECKPOINTS = "checkpoints"


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:06d}"


def checkpoint_in(step: int) -> str:
    """Return where a step's checkpoint lies, relative to the folder of its run."""
    return f"{_CHECKPOINTS}/{checkpoint_name(step)}"


def checkpoint_folders(run_dir: str) -> dict[int, Path]:
    """Return the folders of a run's checkpoints by step, links left out.

    There are none for a run whose folder is not on this machine, or cannot be read.
    """
    if not run_dir:
        return {}
    try:
        with Folder(run_dir) as folder:
            entries = folder.entries(_CHECKPOINTS)
    except (OSError, StorageError):
        return {}
    named = ((_NAME.fullmatch(one.name), one) for one in entries if one.is_folder)
    return {int(match[1]): Path(run_dir, entry.path) for match, entry in named if match}
