"""Removes the folder of a run, and keeps an archive in it. Everything may be done twice."""

import contextlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ...schemas.wire.errors import StorageError

_ARCHIVE = "archive"
_WEIGHTS = "weights"
_FEWEST_PARTS = 3
_PAYLOAD = re.compile(r"v[0-9]{1,18}-[0-9a-zA-Z-]+\.(safetensors|difference)")


def archive_of(run_dir: str) -> Path:
    """Return the folder of a run's archive."""
    return Path(run_dir) / _ARCHIVE


def begin_archive(run_dir: str) -> Path | None:
    """Return a new folder to write the archive into; None when there is a whole one already.

    Raises StorageError for a run whose folder is not on this machine.
    """
    if archive_of(run_dir).is_dir():
        return None
    if not run_dir or not Path(run_dir).is_dir():
        raise StorageError(
            f"there is no run folder {run_dir!r} to keep an archive in",
            hint="see whether the scheduler reaches that disk, or delete the run",
        )
    half = _half(run_dir)
    _remove(half)
    half.mkdir(mode=0o700)
    return half


def end_archive(run_dir: str) -> None:
    """Give the archive its name: from now on it is whole."""
    _half(run_dir).rename(archive_of(run_dir))


def drop_archive(run_dir: str) -> None:
    """Remove the archive, whose streams are back."""
    _remove(archive_of(run_dir))


def remove_weights(run_dir: str, folder: str | None, locations: Iterable[str]) -> None:
    """Remove the published versions of a run that are files.

    Of a `folder` that the configuration names only the files at `locations` that lie directly in
    it: it may be shared, and locations are a learner's word.
    """
    if run_dir:
        _remove(Path(run_dir) / _WEIGHTS)
    if not folder:
        return
    place = Path(folder).expanduser().resolve()
    for location in locations:
        path = Path(location)
        if _PAYLOAD.fullmatch(path.name) and path.parent.resolve() == place:
            path.unlink(missing_ok=True)


def remove_run_folder(run_dir: str, job: str) -> None:
    """Remove the folder of a run with all that is in it.

    It loses its name first, so that a new run of that name never meets a half of it. Raises
    StorageError for what can be no run's folder, OSError.
    """
    folder = Path(run_dir)
    if not folder.is_absolute() or len(folder.parts) < _FEWEST_PARTS or ".." in folder.parts:
        raise StorageError(f"{run_dir!r} is no folder of a run", hint="remove it by hand")
    doomed = folder.with_name(f".{folder.name}.deleted-{job}")
    _remove(doomed)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(doomed)
    _remove(doomed)


def _half(run_dir: str) -> Path:
    return Path(run_dir) / f".{_ARCHIVE}.half"


def _remove(path: Path) -> None:
    """Remove a folder, or the link that stands in its place; harmless when it is gone."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    elif path.is_dir():
        shutil.rmtree(path)
