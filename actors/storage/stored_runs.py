"""The checkpoints that runs have in stores or in the broker, for others than their learners.

Who begins with one (a fork, a served or evaluated checkpoint) keeps a copy of it below its own
place in the store, made by the store itself, or in its own bucket: the run may remove its own
meanwhile.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple, cast

from ...schemas.config.lora import ADAPTER_CONFIG
from ...schemas.config.storage import BROKER, is_url
from ...schemas.job import JobRecord
from ...schemas.wire.errors import NotFoundError
from ...schemas.wire.subjects import JobScope
from ..models.digests import is_state
from .opening import Stores
from .url_store import StoredObject, UrlStore

_BELOW_ROOT = 5
"""Parts of the URL of a checkpoint behind `storage.url`: runs, user, job, checkpoints, its name."""


class CheckpointInStore(NamedTuple):
    """A whole checkpoint of a run in its store."""

    step: int
    url: str
    files: list[StoredObject]
    """Named as in the folder."""

    @property
    def is_adapter(self) -> bool:
        """Whether it is that of a LoRA run."""
        return any(one.name == ADAPTER_CONFIG for one in self.files)


def store_of(record: JobRecord) -> str | None:
    """Return the `storage.url` of a job, maybe `broker:`; None for a job without."""
    section = cast("dict[str, Any]", record.config.get("storage") or {})
    return section.get("url")


def is_put_away(record: JobRecord) -> bool:
    """Whether a job's checkpoints in the broker are in its archive, or the job never began."""
    in_broker = store_of(record) == BROKER
    return in_broker and (record.archived is not None or not record.has_streams)


def stored_checkpoints(
    record: JobRecord, stores: Stores, *, tries: int = 3
) -> dict[int, CheckpointInStore]:
    """Return by step what a run has in its store, if it has one. Raises StorageError."""
    from .checkpoint_mirror import CheckpointMirror  # needs safetensors, which gateways may lack

    if (url := store_of(record)) is None or is_put_away(record):
        return {}
    place = _place(url, record.scope, "checkpoints")
    mirror = CheckpointMirror(stores.open(place, tries=tries), keep_last=1, keep_every=0)
    return {
        one.step: CheckpointInStore(
            one.step,
            f"{place}/{one.name}",
            [file._replace(name=file.name.removeprefix(f"{one.name}/")) for file in one.files],
        )
        for one in mirror.whole()
    }


def keep_stored(
    url: str, scope: JobScope, stores: Stores, *, place: str = "fork", weights_only: bool = False
) -> str:
    """Copy a checkpoint of a store to the place of a job there, and return the URL of the copy.

    With `weights_only` the state of the other run's learner is left out. Raises NotFoundError when
    it has gone, StorageError.
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
    """Have a store copy a folder of it; return whether there was one."""
    root, source = _split(url)
    store, copy = UrlStore(root), target.removeprefix(f"{root}/")
    store.delete([one.name for one in store.objects(copy)])  # of a submission that was cut off
    files = store.objects(source)
    for one in files:
        inside = one.name.removeprefix(f"{source}/")
        if not (weights_only and is_state(inside)):
            store.copy(one, f"{copy}/{inside}")
    return bool(files)


def _keep_in_broker(url: str, target: str, stores: Stores, weights_only: bool) -> bool:
    """Copy a folder of one job's bucket to that of another, through a file in $TMPDIR."""
    source, copy = stores.bucket(url), stores.bucket(target)
    files = [one for one in source.objects() if not (weights_only and is_state(one.name))]
    copy.make_room(sum(one.num_bytes for one in files))
    copy.delete([one.name for one in copy.objects()])  # of a submission that was cut off
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "part"
        for one in files:
            source.fetch(one.name, one.num_bytes, here)
            copy.put(one.name, here)
    return bool(files)


def free_copies(record: JobRecord, stores: Stores) -> None:
    """Remove what a job that was refused has copied of others. Raises StorageError."""
    urls = [one for one in (record.fork_dir, *record.adapters.values()) if is_url(one)]
    for root in {_split(one)[0] for one in urls}:
        if root == BROKER:
            stores.bucket(_place(root, record.scope, "fork")).remove()
        else:
            _free(root, record)


def free_stored(record: JobRecord) -> None:
    """Remove all that a job has in its store, or keeps of another's. Raises StorageError."""
    for root in sorted(_stores(record)):
        _free(root, record)


def _free(root: str, record: JobRecord) -> None:
    store = UrlStore(f"{root}/runs/{record.user}/{record.job}")
    store.delete([one.name for one in store.objects()])


def _stores(record: JobRecord) -> set[str]:
    """Return the stores in which something lies that is a job's own."""
    own = f"/runs/{record.user}/{record.job}/"
    model = cast("dict[str, Any]", record.config.get("model") or {}).get("path") or ""
    named = [model, record.fork_dir, *record.adapters.values()]
    kept = {path.partition(own)[0] for path in named if own in path and "://" in path}
    url = store_of(record)
    return kept | ({url.rstrip("/")} if url not in (None, BROKER) else set())


def _place(root: str, scope: JobScope, name: str) -> str:
    """Return the URL of what a job has below `storage.url`."""
    slash = "" if root == BROKER else "/"
    return f"{root.rstrip('/')}{slash}runs/{scope.user}/{scope.job}/{name}"


def _split(url: str) -> tuple[str, str]:
    """Return `storage.url` and the path below it of a run's checkpoint."""
    if url.startswith(BROKER):
        return BROKER, url.removeprefix(BROKER)
    root, *inside = url.rsplit("/", _BELOW_ROOT)
    return root, "/".join(inside)
