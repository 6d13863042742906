"""Where the checkpoints of a run lie: `checkpoints/step_000040` in its folder."""

import os
import re
from pathlib import Path

_NAME = re.compile(r"step_([0-9]{6,})")


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:06d}"


def checkpoint_folders(run_dir: str) -> dict[int, Path]:
    """Return the folders of a run's checkpoints by step, links left out.

    There are none for a run whose folder is not on this machine, or cannot be read.
    """
    if not run_dir:
        return {}
    place = Path(run_dir) / "checkpoints"
    try:
        entries = list(os.scandir(place))
    except OSError:
        return {}
    named = (
        (_NAME.fullmatch(entry.name), entry)
        for entry in entries
        if entry.is_dir(follow_symlinks=False)
    )
    return {int(match[1]): place / entry.name for match, entry in named if match}
