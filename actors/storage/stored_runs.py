"""The checkpoints that runs have in their stores, for others than their learners.

Who begins with one (a fork, a served or evaluated checkpoint) keeps a copy of it below its own
place in the store, made by the store itself: the run may remove its own meanwhile.
"""

from typing import Any, NamedTuple, cast

from ...schemas.config.lora import ADAPTER_CONFIG
from ...schemas.config.storage import BROKER
from ...schemas.job import JobRecord
from ...schemas.wire.errors import NotFoundError
from ...schemas.wire.subjects import JobScope
from ..models.digests import is_state
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
    """Return the `storage.url` of a job, None for a job without a store outside of the broker."""
    return None if keeps_in_broker(record) else _url_of(record)


def keeps_in_broker(record: JobRecord) -> bool:
    """Whether the broker keeps the checkpoints of a job, where others do not look for them."""
    return _url_of(record) == BROKER


def _url_of(record: JobRecord) -> str | None:
    section = cast("dict[str, Any]", record.config.get("storage") or {})
    return section.get("url")


def stored_checkpoints(record: JobRecord, *, tries: int = 3) -> dict[int, CheckpointInStore]:
    """Return by step what a run has in its store, if it has one. Raises StorageError."""
    from .checkpoint_mirror import CheckpointMirror  # needs safetensors, which gateways may lack

    if (url := store_of(record)) is None:
        return {}
    mirror = CheckpointMirror.of_run(url, record.scope, keep_last=1, keep_every=0, tries=tries)
    return {
        one.step: CheckpointInStore(
            one.step,
            f"{mirror.store.url}/{one.name}",
            [file._replace(name=file.name.removeprefix(f"{one.name}/")) for file in one.files],
        )
        for one in mirror.whole()
    }


def keep_stored(
    url: str, scope: JobScope, *, place: str = "fork", weights_only: bool = False
) -> str:
    """Copy a checkpoint of a store to the place of a job there, and return the URL of the copy.

    With `weights_only` the state of the other run's learner is left out. Raises NotFoundError when
    it has gone, StorageError.
    """
    root, source = _split(url)
    target = f"runs/{scope.user}/{scope.job}/{place}"
    store = UrlStore(root)
    store.delete([one.name for one in store.objects(target)])  # of a submission that was cut off
    files = store.objects(source)
    if not files:
        raise NotFoundError(
            f"the checkpoint {url} has been removed meanwhile",
            hint="fork from a newer one, or set training.keep_every in the run that makes them",
        )
    for one in files:
        inside = one.name.removeprefix(f"{source}/")
        if not (weights_only and is_state(inside)):
            store.copy(one, f"{target}/{inside}")
    return f"{root}/{target}"


def free_stored(record: JobRecord) -> None:
    """Remove all that a job has in its store, or keeps of another's. Raises StorageError."""
    for root in sorted(_stores(record)):
        store = UrlStore(f"{root}/runs/{record.user}/{record.job}")
        store.delete([one.name for one in store.objects()])


def _stores(record: JobRecord) -> set[str]:
    """Return the stores in which something lies that is a job's own."""
    own = f"/runs/{record.user}/{record.job}/"
    model = cast("dict[str, Any]", record.config.get("model") or {}).get("path") or ""
    named = [model, record.fork_dir, *record.adapters.values()]
    kept = {path.partition(own)[0] for path in named if own in path and "://" in path}
    url = store_of(record)
    return kept | ({url.rstrip("/")} if url is not None else set())


def _split(url: str) -> tuple[str, str]:
    """Return `storage.url` and the path below it of a run's checkpoint."""
    root, *inside = url.rsplit("/", _BELOW_ROOT)
    return root, "/".join(inside)
