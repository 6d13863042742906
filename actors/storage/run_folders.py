"""Folders of runs, for services outside of sandboxes: checkpoints, archive, removal.

Checkpoints are in `checkpoints/step_000040`. The archive of a job is `.archives/JOB` beside its run
folder, where jobs cannot write; the job's record has its digest, by which a changed archive is
detected. Archiving and removing can be repeated.
"""

import contextlib
import os
import re
from pathlib import Path

from ...broker.jetstream.objects import new_digest
from ...schemas.local.folder import Folder
from ...schemas.weights import payload_of
from ...schemas.wire.errors import StorageError
from ...schemas.wire.subjects import JobScope

_NAME = re.compile(r"step_([0-9]{6,})")
_CHECKPOINTS = "checkpoints"
_ARCHIVES = ".archives"
_WEIGHTS = "weights"
_FEWEST_PARTS = 3
_CHUNK_BYTES = 4 << 20


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step of the folder of a checkpoint by its name; None for another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_in(step: int) -> str:
    """Return the path of a step's checkpoint, relative to its run's folder."""
    return f"{_CHECKPOINTS}/{checkpoint_name(step)}"


def checkpoint_folders(run_dir: str) -> dict[int, Path]:
    """Return the folders of a run's checkpoints by step, without links.

    Empty for a run whose folder is not on this machine or cannot be read.
    """
    if not run_dir:
        return {}
    try:
        with Folder(run_dir) as folder:
            entries = folder.entries(_CHECKPOINTS)
    except (OSError, StorageError):
        return {}
    named = ((step_of(entry.name), entry) for entry in entries if entry.is_folder)
    return {step: Path(run_dir, entry.path) for step, entry in named if step is not None}


def archive_of(run_dir: str, job: str) -> Path:
    """Return the folder of a job's archive."""
    return Path(run_dir).parent / _ARCHIVES / job


def _parent_of(run_dir: str) -> Folder:
    """Open the parent of a run's folder, which may be a link."""
    return Folder(Path(run_dir).parent.resolve())


def begin_archive(run_dir: str, job: str) -> Path:
    """Return a new folder for the archive; files of an earlier attempt are removed.

    Raises StorageError for a run whose folder is not on this machine, OSError.
    """
    if not run_dir or not Path(run_dir).is_dir():
        raise StorageError(
            f"the run folder {run_dir!r}, beside which archives are stored, does not exist",
            hint="check that the scheduler reaches that disk, or delete the run",
        )
    with _parent_of(run_dir) as above, above.folder(_ARCHIVES, make=True) as archives:
        archives.remove(job)
        archives.folder(job, make=True).close()
    folder = archive_of(run_dir, job)
    folder.chmod(0o700)
    return folder


def digest_of_archive(run_dir: str, job: str) -> str:
    """Return the digest of all files of an archive, with their names; raises StorageError.

    Runs in a thread.
    """
    digest = new_digest()
    try:
        with Folder(archive_of(run_dir, job)) as folder:
            for entry in folder.files():
                digest.update(f"{entry.path}\0{entry.num_bytes}\0".encode())
                with folder.open(entry.path) as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        digest.update(chunk)
    except OSError as error:
        raise StorageError(
            f"the archive {archive_of(run_dir, job)} cannot be read: {error}",
            hint="check that the scheduler reaches that disk",
        ) from error
    return digest.hexdigest()


def is_archive(run_dir: str, job: str, digest: str) -> bool:
    """Whether the archive of a job is unchanged; raises as `digest_of_archive`."""
    return bool(digest) and digest_of_archive(run_dir, job) == digest


def drop_archive(run_dir: str, job: str) -> None:
    """Remove the archive of a job, if there is one."""
    with contextlib.suppress(FileNotFoundError), _parent_of(run_dir) as above:
        above.remove(f"{_ARCHIVES}/{job}")
        if not above.entries(_ARCHIVES):
            above.remove(_ARCHIVES)


def remove_weights(run_dir: str, folder: str | None, scope: JobScope) -> None:
    """Remove the files of a run's published versions, including those of a killed learner.

    The configured `folder` may be shared: only files with the job's name are removed.
    """
    if run_dir:
        with contextlib.suppress(FileNotFoundError), Folder(run_dir) as run:
            run.remove(_WEIGHTS)
    if not folder or "\0" in folder:
        return
    place = Path(os.path.realpath(os.path.expanduser(folder)))  # noqa: PTH111  an odd ~name stays
    with contextlib.suppress(FileNotFoundError), Folder(place) as shared:
        own = payload_of(scope)
        for name in [name for name in shared.names() if own.fullmatch(name)]:
            if not shared.has_folder(name):
                shared.unlink(name)


def remove_run_folder(run_dir: str, job: str) -> None:
    """Remove the folder of a run.

    It is renamed first, so that a new run with the same name never finds a part of it. Raises
    StorageError for a path that cannot be a run's folder, OSError.
    """
    place = Path(run_dir)
    if not place.is_absolute() or len(place.parts) < _FEWEST_PARTS or ".." in place.parts:
        raise StorageError(f"{run_dir!r} is not a folder of a run", hint="remove it by hand")
    removed = f".{place.name}.deleted-{job}"
    with contextlib.suppress(FileNotFoundError), _parent_of(run_dir) as above:
        above.remove(removed)
        with contextlib.suppress(FileNotFoundError):
            above.rename(place.name, removed)
        above.remove(removed)
