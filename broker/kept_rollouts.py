"""Rollouts of a run in its folder, where they outlive the broker: for people to read.

The log is trimmed behind checkpoints, and goes when a run is archived. So at each checkpoint some
groups of what was trained since the one before are put into the run's folder, and at the end the
newest of the log, within a bound in bytes: over it every other one of the older half is removed,
so that what is left is spread over the run. Each is a file `rollouts/SEQ-STEP-TASK.group` that
holds the entry's bytes; STEP is 0 for one that was not trained.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

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
    path: Path

    def message(self) -> StoredMessage | None:
        """Return it as it stood in the log; None when it is gone, or no such file."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(file, "rb") as opened:
                payload = opened.read(_LARGEST_BYTES)
        except OSError:
            return None
        return StoredMessage(f"rollout.{self.task}", self.seq, payload, {})


def kept_rollouts(run_dir: str | Path) -> list[KeptAt]:
    """Return what the folder of a run holds, in the order of the log, links left out.

    There is none for a run whose folder is not on this machine, or cannot be read.
    """
    found: list[KeptAt] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(Path(run_dir) / FOLDER) if run_dir else ():
            match = _NAME.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                continue
            seq, step, task = map(int, match.groups())
            num_bytes = entry.stat(follow_symlinks=False).st_size
            found.append(KeptAt(seq, step or None, task, num_bytes, Path(entry.path)))
    return sorted(found, key=lambda one: one.seq)


def keep_rollout(run_dir: Path, seq: int, payload: bytes, task: int, step: int | None) -> None:
    """Put an entry of the log into the folder of a run, whole or not at all.

    Raises OSError when it cannot be written.
    """
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{seq}-{step or 0}-{task}.group"
    made = path.with_suffix(".part")
    try:
        made.write_bytes(payload)
        made.replace(path)
    except OSError:
        made.unlink(missing_ok=True)
        raise


def thin_out(run_dir: Path, most_bytes: int) -> None:
    """Remove groups until `most_bytes` are not passed: every other one of the older half first."""
    kept: list[KeptAt] = kept_rollouts(run_dir)
    while kept and sum(one.num_bytes for one in kept) > most_bytes:
        older: list[KeptAt] = kept[: max(1, len(kept) // 2)]
        removed = older[::2]
        for one in removed:
            one.path.unlink(missing_ok=True)
        gone = {one.seq for one in removed}
        kept = [one for one in kept if one.seq not in gone]


def spread(behind: int, last: int, most: int) -> list[int]:
    """Return at most so many numbers over `behind` up to `last`, evenly spread, it among them."""
    every = max(1, -(-(last - behind) // most))
    return sorted(range(last, behind, -every))
