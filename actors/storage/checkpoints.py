"""Checkpoints of runs in stores: copies of those in the runs' folders.

`<url>/runs/<user>/<job>/checkpoints/step_000040-<digest>/` has the files of one; the digest is that
of its table of digests, so files of two learners are never mixed. A checkpoint is complete once its
table exists.

A job that starts from a checkpoint of another run (a fork, a served or evaluated checkpoint) has
its own copy in the store, made by the store, or in its own bucket, since the run may remove its
checkpoint later.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from ...schemas.config.sections import ADAPTER_CONFIG, BROKER, is_url
from ...schemas.job import JobRecord
from ...schemas.local.folder import temporary_folder
from ...schemas.wire.errors import NotFoundError, StorageError, TinkermqError
from ...schemas.wire.subjects import JobScope
from .files import TABLE, is_state
from .run_folders import checkpoint_name, step_of
from .stores import Store, StoredObject, Stores, UrlStore, fetch_tree, upload_tree

_NAME = re.compile(r"step_([0-9]{6,})-[0-9a-f]{16}")
_OWNER = ".job"


class MirroredCheckpoint(NamedTuple):
    """A checkpoint in the store."""

    step: int
    name: str
    files: list[StoredObject]

    @property
    def is_whole(self) -> bool:
        """Whether its table of digests exists, which is written last."""
        return any(file.name == f"{self.name}/{TABLE}" for file in self.files)


class CheckpointMirror:
    """Stores checkpoints of a run, and fetches them. Blocks."""

    def __init__(self, store: Store, *, keep_last: int, keep_every: int) -> None:
        self.store = store
        self._keep_last = keep_last
        self._keep_every = keep_every
        self.spared: Callable[[list[int]], set[int]] = lambda _: set()
        """Returns steps that are kept in addition to the newest ones."""

    @classmethod
    def of_run(
        cls, url: str, scope: JobScope, *, keep_last: int, keep_every: int, tries: int = 6
    ) -> "CheckpointMirror":
        """Open the mirror of a run below `storage.url`. Raises StorageError."""
        place = f"{url.rstrip('/')}/runs/{scope.user}/{scope.job}/checkpoints"
        return cls(UrlStore(place, tries=tries), keep_last=keep_last, keep_every=keep_every)

    def check(self) -> None:
        """Raise StorageError, at the start of a run, for a store that cannot be written."""
        self.store.sweep()
        self.store.put(_OWNER, b"tinkermq")

    def whole(self) -> list[MirroredCheckpoint]:
        """Return the complete checkpoints, the oldest first. Raises StorageError."""
        return [checkpoint for checkpoint in self._all() if checkpoint.is_whole]

    def upload(self, step: int, folder: Path) -> None:
        """Store a checkpoint, then remove those that are not kept. Raises StorageError."""
        digest = hashlib.sha256((folder / TABLE).read_bytes()).hexdigest()[:16]
        name = f"{checkpoint_name(step)}-{digest}"
        if not any(checkpoint.name == name for checkpoint in self.whole()):
            upload_tree(self.store, name, folder)
        self._remove_old(step)

    def fetch_newest(self, folder: Path) -> list[TinkermqError]:
        """Fetch the newest complete checkpoint into the run's folder, unless it has a newer one.

        Returns problems of newer ones in the store. Raises StorageError.
        """
        wrong: list[TinkermqError] = []
        for checkpoint in reversed(self.whole()):
            target = folder / checkpoint_name(checkpoint.step)
            steps = map(step_of, (path.name for path in folder.glob("step_*")))
            if any(step is not None and step >= checkpoint.step for step in steps):
                return wrong
            try:
                fetch_tree(self.store, checkpoint.name, checkpoint.files, target)
                return wrong
            except (StorageError, NotFoundError) as error:
                wrong.append(error)
                if getattr(error, "is_full", False):
                    raise
        return wrong

    def kept(self, steps: list[int]) -> set[int]:
        """Return the steps that are kept regardless of newer ones."""
        every = {step for step in steps if self._keep_every and step % self._keep_every == 0}
        return every | self.spared(steps)

    def _all(self) -> list[MirroredCheckpoint]:
        files_of: dict[str, list[StoredObject]] = {}
        for item in self.store.objects():
            files_of.setdefault(item.name.partition("/")[0], []).append(item)
        named = [(_NAME.fullmatch(name), name, files) for name, files in files_of.items()]
        return sorted(MirroredCheckpoint(int(m[1]), name, files) for m, name, files in named if m)

    def _remove_old(self, newest: int) -> None:
        """Remove checkpoints not to keep, the table first, and parts of earlier uploads."""
        every = self._all()
        steps = sorted({checkpoint.step for checkpoint in every if checkpoint.is_whole})
        kept_steps = {*steps[-self._keep_last :]} | self.kept(steps)
        for checkpoint in every:
            if (
                checkpoint.step not in kept_steps
                if checkpoint.is_whole
                else checkpoint.step < newest
            ):
                names = [file.name for file in checkpoint.files]
                self.store.delete(sorted(names, key=lambda name: not name.endswith(TABLE)))


def own_folder(run_dir: Path, job: str) -> None:
    """Move aside checkpoints of another run of that name in the run's folder on this machine."""
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


# -- checkpoints of other runs ---------------------------------------------------------------------

_BELOW_ROOT = 5
"""Parts of a checkpoint's URL after `storage.url`: runs, user, job, checkpoints, its name."""


class CheckpointInStore(NamedTuple):
    """A complete checkpoint of a run in its store."""

    step: int
    url: str
    files: list[StoredObject]
    """Name of the checkpoint's folder."""

    @property
    def is_adapter(self) -> bool:
        """Whether it is one of a LoRA run."""
        return any(file.name == ADAPTER_CONFIG for file in self.files)


def store_of(record: JobRecord) -> str | None:
    """Return the `storage.url` of a job, which may be `broker:`; None without one."""
    section = cast("dict[str, Any]", record.config.get("storage") or {})
    return section.get("url")


def is_put_away(record: JobRecord) -> bool:
    """Whether a job's checkpoints in the broker are in its archive, or the job never began."""
    in_broker = store_of(record) == BROKER
    return in_broker and (record.archived is not None or not record.has_streams)


def stored_checkpoints(
    record: JobRecord, stores: Stores, *, tries: int = 3
) -> dict[int, CheckpointInStore]:
    """Return a run's checkpoints in its store by step. Raises StorageError."""

    if (url := store_of(record)) is None or is_put_away(record):
        return {}
    place = _place(url, record.scope, "checkpoints")
    mirror = CheckpointMirror(stores.open(place, tries=tries), keep_last=1, keep_every=0)
    return {
        checkpoint.step: CheckpointInStore(
            checkpoint.step,
            f"{place}/{checkpoint.name}",
            [
                file._replace(name=file.name.removeprefix(f"{checkpoint.name}/"))
                for file in checkpoint.files
            ],
        )
        for checkpoint in mirror.whole()
    }


def keep_stored(
    url: str, scope: JobScope, stores: Stores, *, place: str = "fork", weights_only: bool = False
) -> str:
    """Copy a checkpoint in a store to a job's place there, and return the copy's URL.

    With `weights_only` the state of the other run's learner is not copied. Raises NotFoundError for
    a removed checkpoint, StorageError.
    """
    target = _place(_split(url)[0], scope, place)
    keep = _keep_in_broker if url.startswith(BROKER) else _keep_in_store
    if not keep(url, target, stores, weights_only):
        raise NotFoundError(
            f"the checkpoint {url} has been removed meanwhile",
            hint="fork from a newer one, or set training.keep_every in the run that makes them",
        )
    return target


def _keep_in_store(url: str, target: str, stores: Stores, weights_only: bool) -> bool:
    """Copy a folder within a store; return whether it existed."""
    root, source = _split(url)
    store, copy = UrlStore(root), target.removeprefix(f"{root}/")
    store.delete([file.name for file in store.objects(copy)])  # of an interrupted submission
    files = store.objects(source)
    for file in files:
        inside = file.name.removeprefix(f"{source}/")
        if not (weights_only and is_state(inside)):
            store.copy(file, f"{copy}/{inside}")
    return bool(files)


def _keep_in_broker(url: str, target: str, stores: Stores, weights_only: bool) -> bool:
    """Copy a folder of one job's bucket to that of another, through a file in $TMPDIR."""
    source, copy = stores.bucket(url), stores.bucket(target)
    files = [file for file in source.objects() if not (weights_only and is_state(file.name))]
    copy.make_room(sum(file.num_bytes for file in files))
    copy.delete([file.name for file in copy.objects()])  # of an interrupted submission
    with temporary_folder("copy") as folder:
        here = folder / "part"
        for file in files:
            source.fetch(file.name, file.num_bytes, here)
            copy.put(file.name, here)
    return bool(files)


def free_copies(record: JobRecord, stores: Stores) -> None:
    """Remove the copies of a job that was refused. Raises StorageError."""
    urls = [path for path in (record.fork_dir, *record.adapters.values()) if is_url(path)]
    for root in {_split(path)[0] for path in urls}:
        if root == BROKER:
            stores.bucket(_place(root, record.scope, "fork")).remove()
        else:
            _free(root, record)


def free_stored(record: JobRecord) -> None:
    """Remove all objects of a job, copies included. Raises StorageError."""
    for root in sorted(_stores(record)):
        _free(root, record)


def _free(root: str, record: JobRecord) -> None:
    store = UrlStore(f"{root}/runs/{record.user}/{record.job}")
    store.delete([item.name for item in store.objects()])


def _stores(record: JobRecord) -> set[str]:
    """Return the stores with objects of a job."""
    own = f"/runs/{record.user}/{record.job}/"
    model = cast("dict[str, Any]", record.config.get("model") or {}).get("path") or ""
    named = [model, record.fork_dir, *record.adapters.values()]
    roots = {path.partition(own)[0] for path in named if own in path and "://" in path}
    url = store_of(record)
    return roots | ({url.rstrip("/")} if url not in (None, BROKER) else set())


def _place(root: str, scope: JobScope, name: str) -> str:
    """Return the URL of a job's objects below `storage.url`."""
    slash = "" if root == BROKER else "/"
    return f"{root.rstrip('/')}{slash}runs/{scope.user}/{scope.job}/{name}"


def _split(url: str) -> tuple[str, str]:
    """Return `storage.url` and the path below it of a run's checkpoint."""
    if url.startswith(BROKER):
        return BROKER, url.removeprefix(BROKER)
    root, *inside = url.rsplit("/", _BELOW_ROOT)
    return root, "/".join(inside)
