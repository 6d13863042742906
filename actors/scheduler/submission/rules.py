"""Which jobs may be archived or deleted, and what may be done to those that are."""

from collections.abc import Iterable
from pathlib import Path

from ....broker.jobs import is_final
from ....schemas.config.storage import is_url
from ....schemas.job import JobRecord, Removal
from ....schemas.wire.errors import StateError
from ...folders.links import texts_of

_DONE = {"archive": "archived", "unarchive": "brought back", "delete": "deleted"}


def refuse_removal(record: JobRecord, removal: Removal, others: Iterable[JobRecord]) -> None:
    """Raise StateError, with the reason, for a job that cannot be archived or deleted now.

    `others` are the jobs of the pool: some of them may live on what would go.
    """
    if not is_final(record):
        raise StateError(
            f"run {record.name} is {record.state}: only a run that has ended can be "
            f"{_DONE[removal]}",
            hint=f"end it first: `tinkermq stop {record.name}`, or with --now",
        )
    if record.removal == "delete" and removal != "delete":
        raise StateError(f"run {record.name} is being deleted")
    if removal == "archive" and not record.run_dir:
        raise StateError(
            f"run {record.name} never had a folder: there is nothing to archive",
            hint=f"delete it: `tinkermq delete {record.name}`",
        )
    if removal == "unarchive" and record.archived is None and record.removal == "no":
        raise StateError(f"run {record.name} is not archived", hint="see `tinkermq ps --archived`")
    for other in others:
        if other.job != record.job and (why := _needs(other, record, removal)):
            raise StateError(
                f"run {record.name} cannot be {_DONE[removal]}: {why}",
                hint=f"end that run first: `tinkermq stop {other.name}`, or with --now",
            )


def refuse_removed(record: JobRecord) -> None:
    """Raise StateError for a job that cannot be started again."""
    if record.removal != "no":
        raise StateError(f"run {record.name} is being {_DONE[record.removal]}")
    if record.archived is not None:
        raise StateError(
            f"run {record.name} is archived",
            hint=f"bring it back first: `tinkermq archive {record.name} --undo`",
        )


def _needs(other: JobRecord, record: JobRecord, removal: Removal) -> str:
    """Say what another job needs of one that shall go; empty if nothing."""
    if removal == "delete" and record.run_dir and _is_within(other.run_dir, record.run_dir):
        return f"the folder of run {other.name} is within its own"
    if is_final(other) or other.user != record.user:
        return ""
    if other.follow == record.job:
        return f"{other.name} is {other.state} and serves its versions"
    if removal == "delete":
        for key, value in texts_of(other.config):
            if record.run_dir and _is_within(value, record.run_dir):
                return f"{other.name} is {other.state} and reads its folder ({key})"
            if is_url(value) and f"/runs/{record.user}/{record.job}/" in f"{value}/":
                return f"{other.name} is {other.state} and reads what it has in the store ({key})"
    return ""


def _is_within(path: str, folder: str) -> bool:
    return path.startswith(folder) and Path(path).is_relative_to(folder)
