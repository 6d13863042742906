"""The checkpoints of one run in a store, beside those in the run's folder on one machine.

`<url>/runs/<user>/<job>/checkpoints/step_000040-<digest>/` holds the files of one; the digest is
that of its table, so what two learners write never mixes. It counts once its table is there.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...schemas.wire.errors import NotFoundError, StorageError, TinkermqError
from ...schemas.wire.subjects import JobScope
from ..models.checkpoint_folders import checkpoint_name
from ..models.digests import TABLE
from .opening import Store
from .trees import fetch_tree, upload_tree
from .url_store import StoredObject, UrlStore

_NAME = re.compile(r"step_([0-9]{6,})-[0-9a-f]{16}")
_OWNER = ".job"


class MirroredCheckpoint(NamedTuple):
    """A checkpoint in the store."""

    step: int
    name: str
    files: list[StoredObject]

    @property
    def is_whole(self) -> bool:
        """Whether its table is there, which comes last."""
        return any(one.name == f"{self.name}/{TABLE}" for one in self.files)


class CheckpointMirror:
    """Puts checkpoints of a run into the store, and gets them from there. Blocks."""

    def __init__(self, store: Store, *, keep_last: int, keep_every: int) -> None:
        self.store = store
        self._keep_last = keep_last
        self._keep_every = keep_every
        self.spared: Callable[[list[int]], set[int]] = lambda _: set()
        """Which of these steps stay, beside those that the counts keep."""

    @classmethod
    def of_run(
        cls, url: str, scope: JobScope, *, keep_last: int, keep_every: int, tries: int = 6
    ) -> "CheckpointMirror":
        """Open the mirror of a run below `storage.url`. Raises StorageError."""
        place = f"{url.rstrip('/')}/runs/{scope.user}/{scope.job}/checkpoints"
        return cls(UrlStore(place, tries=tries), keep_last=keep_last, keep_every=keep_every)

    def check(self) -> None:
        """Raise StorageError for a store that cannot be written, before hours are trained."""
        self.store.put(_OWNER, b"tinkermq")

    def whole(self) -> list[MirroredCheckpoint]:
        """Return the checkpoints that are whole, the oldest first. Raises StorageError."""
        return [one for one in self._all() if one.is_whole]

    def upload(self, step: int, folder: Path) -> None:
        """Store a checkpoint, then remove those that are not kept. Raises StorageError."""
        digest = hashlib.sha256((folder / TABLE).read_bytes()).hexdigest()[:16]
        name = f"{checkpoint_name(step)}-{digest}"
        if not any(one.name == name for one in self.whole()):
            upload_tree(self.store, name, folder)
        self._remove_old(step)

    def fetch_newest(self, folder: Path) -> list[TinkermqError]:
        """Write the newest whole checkpoint into the run's folder of them, unless one is newer.

        Returns what is wrong
        with newer ones. Raises StorageError.
        """
        wrong: list[TinkermqError] = []
        for one in reversed(self.whole()):
            target = folder / checkpoint_name(one.step)
            if _has_newer(target):
                return wrong
            try:
                fetch_tree(self.store, one.name, one.files, target)
                return wrong
            except (StorageError, NotFoundError) as error:
                wrong.append(error)
                if getattr(error, "is_full", False):
                    raise
        return wrong

    def _all(self) -> list[MirroredCheckpoint]:
        found: dict[str, list[StoredObject]] = {}
        for one in self.store.objects():
            found.setdefault(one.name.partition("/")[0], []).append(one)
        named = [(_NAME.fullmatch(name), name, files) for name, files in found.items()]
        return sorted(MirroredCheckpoint(int(m[1]), name, files) for m, name, files in named if m)

    def _remove_old(self, newest: int) -> None:
        """Remove whole ones that are not kept, the table first, and halves of earlier uploads."""
        every = self._all()
        steps = sorted({one.step for one in every if one.is_whole})
        kept = {*steps[-self._keep_last :]}
        kept |= {step for step in steps if self._keep_every and step % self._keep_every == 0}
        kept |= self.spared(steps)
        for one in every:
            if one.step not in kept if one.is_whole else one.step < newest:
                names = [file.name for file in one.files]
                self.store.delete(sorted(names, key=lambda name: not name.endswith(TABLE)))


def _has_newer(target: Path) -> bool:
    """Whether a run's folder has that checkpoint or a later one."""
    return target.parent.is_dir() and any(
        path.name >= target.name for path in target.parent.glob("step_*")
    )


def own_folder(run_dir: Path, job: str) -> None:
    """Put aside what another run of that name has left in the run's folder on this machine."""
    owner = run_dir / _OWNER
    if owner.is_file() and owner.read_text() == job:
        return
    for name in ("checkpoints", "metrics.jsonl"):
        if (run_dir / name).exists():
            aside = run_dir / f"{name}.of-another-run"
            shutil.rmtree(aside) if aside.is_dir() else aside.unlink(missing_ok=True)
            (run_dir / name).rename(aside)
    (run_dir / "latest").unlink(missing_ok=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    half = run_dir / f"{_OWNER}.{os.getpid()}"
    half.write_text(job)
    half.rename(owner)
