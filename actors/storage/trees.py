"""Folders in a store: their files, and `SHA256SUMS` last, which makes them whole.

A folder without that table is an incomplete upload, not a checkpoint. Models that others
have put there need none.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from ...schemas.wire.errors import StorageError
from .digests import TABLE, digest_of, is_state, read_table
from .files import flush, storage_error
from .stores import Store, StoredObject

_THREADS = 4
_FETCHES = 3


def upload_tree(store: Store, prefix: str, folder: Path) -> None:
    """Store the files of a folder that has a table of digests, the table last.

    Raises StorageError.
    """
    names = [name for name in read_table(folder) if (folder / name).is_file()]

    def put(name: str) -> None:
        store.put(f"{prefix}/{name}", folder / name)

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(put, names))
    there = {item.name: item.num_bytes for item in store.objects(prefix)}
    for name in names:
        if there.get(f"{prefix}/{name}") != (size := (folder / name).stat().st_size):
            raise StorageError(
                f"{store.url}/{prefix}/{name} has {there.get(f'{prefix}/{name}')} bytes in the "
                f"store, {size} were written",
                hint="it is written again; see the store when this stays",
            )
    store.put(f"{prefix}/{TABLE}", folder / TABLE)


def fetch_tree(store: Store, prefix: str, files: list[StoredObject], target: Path) -> None:
    """Write the files of a folder of the store to a new folder `target`; it is whole or not there.

    What its table of digests names is read again when it is not as it was written. Raises
    StorageError for a file that stays wrong, and for a disk without room.
    """
    half = target.with_name(f".{target.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    try:
        half.mkdir(parents=True)
        _fetch_files(store, prefix, files, half)
        flush(half)
        half.rename(target)
    except Exception as error:
        shutil.rmtree(half, ignore_errors=True)
        if (failure := storage_error(target, error)) is not None:
            raise failure from error
        raise


def _fetch_files(store: Store, prefix: str, files: list[StoredObject], folder: Path) -> None:
    by_name = {_inside(file.name, prefix): file for file in files}
    wanted: dict[str, str] = {}
    if (table := by_name.pop(TABLE, None)) is not None:
        store.fetch(table.name, table.num_bytes, folder / TABLE)
        wanted = read_table(folder)
        is_copy = not any(map(is_state, by_name))
        for name in wanted:
            if name not in by_name and not (is_copy and is_state(name)):
                raise _wrong(store, prefix, name, "is missing")
    for name, file in by_name.items():
        _fetch_whole(store, file, folder / name, wanted.get(name))


def _fetch_whole(store: Store, file: StoredObject, target: Path, digest: str | None) -> None:
    for _ in range(_FETCHES):
        store.fetch(file.name, file.num_bytes, target)
        if digest is None or digest_of(target) == digest:
            return
    raise _wrong(store, "", file.name, f"is not as it was written ({file.num_bytes:,} bytes)")


def _inside(name: str, prefix: str) -> str:
    """Return the name of a file in its folder; StorageError for one that leads out of it."""
    inside = PurePosixPath(name).relative_to(prefix) if prefix else PurePosixPath(name)
    if ".." in inside.parts or inside.is_absolute():
        raise StorageError(f"{name!r} is no name of a file", hint="remove it from the store")
    return str(inside)


def _wrong(store: Store, prefix: str, name: str, how: str) -> StorageError:
    place = "/".join(part for part in (store.url, prefix, name) if part)
    return StorageError(
        f"{place} {how}", hint="restore the file, or remove the folder that it is in"
    )
