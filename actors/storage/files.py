"""Folders that must be whole on the disk before they get their names."""

import errno
import os
import shutil
from pathlib import Path

from ...broker.disk import FREE_SPACE, remedy
from ...schemas.wire.errors import StorageError


def flush(folder: Path) -> None:
    """Bring a folder to the disk, with all that is in it, before it gets its final name."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            flush_entries(path)
        else:
            with path.open("rb+") as handle:
                os.fsync(handle.fileno())


def flush_entries(folder: Path) -> None:
    """Bring to the disk which files a folder has."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def storage_error(
    final: Path, error: Exception, *libraries: type[Exception]
) -> StorageError | None:
    """Say why a checkpoint could not be written; None for an error that is not the disk's.

    A full disk makes the libraries raise errors of many kinds: `libraries` are those that are
    neither OSError nor RuntimeError.
    """
    free = shutil.disk_usage(final.parent if final.parent.exists() else Path("/")).free
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or free < 2**20
    if not is_full and not isinstance(error, (OSError, RuntimeError, *libraries)):
        return None
    reason = "the disk is full" if is_full else str(error)
    failure = StorageError(
        f"checkpoint {final} could not be written: {reason} ({free / 2**20:,.0f} MiB free)",
        hint=FREE_SPACE if is_full else remedy(error, final),
    )
    failure.is_full = is_full
    return failure
