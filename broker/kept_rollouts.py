"""Rollouts of a run in its folder, where they outlive the broker: for people to read.

The log is trimmed behind checkpoints, and goes when a run is archived. So at each checkpoint some
groups of what was trained since the one before are put into the run's folder, and at the end the
newest of the log, within a bound in bytes: over it every other one of the older half is removed,
so that what is left is spread over the run. Each is a file `rollouts/SEQ-STEP-TASK.group` that
holds the entry's bytes; STEP is 0 for one that was not trained.
"""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from ..schemas.wire.errors import StorageError
from .disk.run_folder import Folder
from .jetstream.stored import StoredMessage

FOLDER = "rollouts"
_NAME = re.compile(r"(\d{1,18})-(\d{1,18})-(\d{1,18})\.group")
_LARGEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptAt:
    """A group in the folder of a run."""

    seq: int
    """Where it stood in the log."""
    step: int | None
    """The step that trained it."""
    task: int
    num_bytes: int
    run_dir: Path
    name: str
    """Relative to the folder of the run."""

    def message(self) -> StoredMessage | None:
        """Return it as it stood in the log; None when it is gone, or no such file."""
        try:
            with Folder(self.run_dir) as folder:
                payload = folder.read(self.name, _LARGEST_BYTES)
        except (OSError, StorageError):
            return None
        return StoredMessage(f"rollout.{self.task}", self.seq, payload, {})


def kept_rollouts(run_dir: str | Path) -> list[KeptAt]:
    """Return what the folder of a run holds, in the order of the log, links left out.

    There is none for a run whose folder is not on this machine, or cannot be read.
    """
    found: list[KeptAt] = []
    if not run_dir:
        return found
    with contextlib.suppress(OSError, StorageError), Folder(run_dir) as folder:
        for entry in folder.entries(FOLDER):
            match = _NAME.fullmatch(entry.name)
            if match is None or entry.is_folder:
                continue
            seq, step, task = map(int, match.groups())
            found.append(
                KeptAt(seq, step or None, task, entry.num_bytes, Path(run_dir), entry.path)
            )
    return sorted(found, key=lambda one: one.seq)


def keep_rollout(run_dir: Path, seq: int, payload: bytes, task: int, step: int | None) -> None:
    """Put an entry of the log into the folder of a run, whole or not at all.

    Raises OSError when it cannot be written.
    """
    with Folder(run_dir, make=True) as folder:
        folder.write(f"{FOLDER}/{seq}-{step or 0}-{task}.group", payload)


def thin_out(run_dir: Path, most_bytes: int) -> None:
    """Remove groups until `most_bytes` are not passed: every other one of the older half first."""
    kept: list[KeptAt] = kept_rollouts(run_dir)
    while kept and sum(one.num_bytes for one in kept) > most_bytes:
        older: list[KeptAt] = kept[: max(1, len(kept) // 2)]
        removed = older[::2]
        with Folder(run_dir) as folder:
            for one in removed:
                folder.unlink(one.name)
        gone = {one.seq for one in removed}
        kept = [one for one in kept if one.seq not in gone]


def spread(behind: int, last: int, most: int) -> list[int]:
    """Return at most so many numbers over `behind` up to `last`, evenly spread, it among them."""
    every = max(1, -(-(last - behind) // most))
    return sorted(range(last, behind, -every))
