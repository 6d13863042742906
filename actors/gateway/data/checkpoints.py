"""The checkpoints of a run, listed and packed for download.

They lie in the run's folder, on this machine or on a disk that it shares with the pool, or in the
run's store, which is read with the gateway's own credentials. Only folders `checkpoints/step_*` of
the run are packed, and only regular files that really lie in them.
"""

import asyncio
import tarfile
from collections.abc import Iterator
from typing import Any

from ....broker.client.connection import Broker
from ....broker.feed import best_of, read_scores
from ....broker.run_folder import Folder, FolderEntry
from ....schemas.job import JobRecord
from ....schemas.wire.errors import NotFoundError, StorageError, TinkermqError
from ...storage.checkpoint_folders import checkpoint_folders, checkpoint_in
from ...storage.checkpoints import stored_checkpoints
from ...storage.opening import Stores

_CHUNK = 1 << 20


async def scored_checkpoints(broker: Broker, record: JobRecord) -> list[dict[str, Any]]:
    """Return what `list_checkpoints` does, with the validation of each and which is the best.

    Raises StorageError.
    """
    found = await asyncio.to_thread(list_checkpoints, record, Stores(broker))
    try:
        scores = await read_scores(broker, record.scope)
    except TinkermqError:
        scores = {}  # the bucket is not there, or not for this user
    best = best_of(scores, [one["step"] for one in found])
    return [{**one, "score": scores.get(one["step"]), "best": one["step"] == best} for one in found]


def list_checkpoints(record: JobRecord, stores: Stores) -> list[dict[str, Any]]:
    """Return step, size and time of each checkpoint, newest first; raises StorageError."""
    found = _in_store(record, stores)
    there = {one["step"] for one in found}
    for step, folder in checkpoint_folders(record.run_dir).items():
        files = _files(record.run_dir, step)
        if not files or step in there:
            continue
        found.append(
            {
                "step": step,
                "bytes": sum(file.num_bytes for file in files),
                "files": [file.path for file in files],
                "saved": max(file.changed for file in files),
                "path": str(folder),
            }
        )
    return sorted(found, key=lambda one: one["step"], reverse=True)


def _in_store(record: JobRecord, stores: Stores) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "bytes": sum(file.num_bytes for file in one.files),
            "files": [file.name for file in one.files],
            "saved": max(file.saved for file in one.files),
            "path": one.url,
        }
        for step, one in stored_checkpoints(record, stores, tries=1).items()
    ]


def check_here(record: JobRecord, step: int, stores: Stores) -> None:
    """Raise NotFoundError for a checkpoint that is not in the run's folder on this machine."""
    if step in checkpoint_folders(record.run_dir):
        return
    stored = stored_checkpoints(record, stores, tries=1).get(step)
    if stored is not None:
        raise NotFoundError(
            f"the checkpoint of step {step} of run {record.name} is in its store: {stored.url}",
            hint="copy that from there, with any tool of the store; from the broker with "
            "`nats object get`",
        )
    raise NotFoundError(
        f"run {record.name} has no checkpoint of step {step} on this machine",
        hint="checkpoints lie in the run's folder on the pool; older ones are removed "
        "(training.keep_last, training.keep_every)",
    )


def pack(run_dir: str, step: int, name: str) -> Iterator[bytes]:
    """Yield an uncompressed tar archive of a checkpoint, a chunk at a time.

    Raises OSError for what was removed or changed meanwhile.
    """
    with Folder(run_dir) as run, run.folder(checkpoint_in(step)) as folder:
        for entry in folder.files():
            with folder.open(entry.path) as source:
                info = tarfile.TarInfo(f"{name}/{entry.path}")
                info.size, info.mtime, info.mode = entry.num_bytes, int(entry.changed), 0o644
                yield info.tobuf(tarfile.PAX_FORMAT)
                left = entry.num_bytes
                while left:
                    chunk = source.read(min(_CHUNK, left)) or bytes(min(_CHUNK, left))
                    left -= len(chunk)  # a file that became shorter meanwhile is filled up
                    yield chunk
            yield bytes(-entry.num_bytes % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)


def _files(run_dir: str, step: int) -> list[FolderEntry]:
    """Return the regular files of a checkpoint, by name; none of one that cannot be read."""
    try:
        with Folder(run_dir) as run, run.folder(checkpoint_in(step)) as folder:
            return list(folder.files())
    except (OSError, StorageError):
        return []
