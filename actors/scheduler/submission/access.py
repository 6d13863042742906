"""Access rules for jobs in a pool with users: no files of others, no unreviewed code.

All actors of a node except sandboxed environment hosts run as one user of the operating system, who
can read every run folder.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from ....broker.jobs import is_final
from ....envs.registry import check_registered
from ....schemas.config.agent import runs_programs
from ....schemas.config.algorithm import endpoint, is_endpoint
from ....schemas.config.job import JobConfig
from ....schemas.config.sections import is_url
from ....schemas.job import JobRecord, Removal
from ....schemas.local.disk import DiskThreads
from ....schemas.tinker.names import is_path
from ....schemas.tinker.operation import TrainerOffer
from ....schemas.wire.errors import AuthError, ConfigError, StateError, StorageError
from ...storage.access import (
    foreign_run_error,
    hard_links,
    in_default_folder,
    inodes_below,
    leads,
    named_by,
    operator_stores,
    output_roots,
    refuse_other_stores,
    texts_of,
    with_allowed_folders,
)
from ..jobs.view import JobsView

P = ParamSpec("P")
T = TypeVar("T")

ENDPOINTS_VARIABLE = "TINKERMQ_TEACHER_URLS"
"""Environment variable of the scheduler: base URLs of APIs that generators may call for users."""
_READ_S = 30.0
_READS_AT_ONCE = 8


class FileReads:
    """Reads files in threads, a few at once for one user, as a disk may hang."""

    def __init__(self) -> None:
        self._disks = DiskThreads(_READS_AT_ONCE, _READ_S)

    async def read(self, user: str, read: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Return the result of a file-reading function; StorageError if the disk hangs."""
        try:
            return await self._disks.look(user, read, *args, **named)
        except TimeoutError as error:
            raise StorageError(
                f"the run's files, or its folder, were not read within {_READ_S:g} s",
                hint="the scheduler's machine may be busy, or a disk hang: see `ls`, `df` there",
            ) from error


async def allowed_config(
    record: JobRecord, config: JobConfig, view: JobsView, files: FileReads
) -> tuple[JobConfig, list[Path]]:
    """Return the configuration that a job's owner may run, and its writable folders.

    Without folders, its processes may write everywhere. Raises ConfigError, AuthError,
    StorageError.
    """
    user, roots = record.user, output_roots(has_users=view.has_users)
    config = in_default_folder(config, roots)
    if view.is_admin(user):
        return config, []
    config = await files.read(user, with_allowed_folders, config, roots)
    if view.has_users:
        refuse_code_of_others(config)
        refuse_endpoints(config, user)
        refuse_other_stores(config, user, operator_stores())
        others = view.run_folders_of_others(user)
        more = named_by(_own_settings(record))
        await files.read(user, refuse_runs_of_others, config, others, more)
    return config, roots


def _own_settings(record: JobRecord) -> JobRecord:
    """Return a record without the folders copied from the service for the Tinker API."""
    fork_dir = "" if is_path(record.fork_of or "") else record.fork_dir
    adapters = {name: path for name, path in record.adapters.items() if not is_path(name)}
    return record.model_copy(update={"fork_dir": fork_dir, "adapters": adapters})


def refuse_second_service(
    config: Mapping[str, Any], offers: Iterable[TrainerOffer], *, is_admin: bool
) -> None:
    """Raise AuthError or ConfigError if a user may not start a service for the Tinker API.

    Such a service belongs to the pool: it trains for all users.
    """
    if not is_admin:
        raise AuthError(
            "only admins may start a service for the Tinker API, which serves all users",
            hint="ask an admin for `tinkermq tinker up --model NAME=FOLDER`",
        )
    base = cast("Mapping[str, Any]", config.get("tinker") or {}).get("base")
    if any(offer.base == base for offer in offers):
        raise ConfigError(
            f"a service for {base} exists already",
            hint="use another name, or stop that service (`tinkermq ps`)",
        )


def refuse_code_of_others(config: JobConfig) -> None:
    """Raise ConfigError for a job that would run code from a model folder."""
    if config.model.trust_remote_code:
        raise ConfigError(
            "model.trust_remote_code=true: in a pool with users, only admins may run the code of a "
            "model",
            hint="let an admin submit the run, or use a model that transformers supports itself",
        )


def refuse_endpoints(config: JobConfig, user: str) -> None:
    """Raise ConfigError for a teacher's API that the operator has not listed.

    Generators call it from within the pool's network, which users must not reach through them.
    """
    allowed = os.environ.get(ENDPOINTS_VARIABLE, "").replace(",", " ").split()
    for name in config.algorithm.asked_teachers.values():
        base = endpoint(name)[0]
        if is_endpoint(name) and base not in allowed:
            raise ConfigError(
                f"algorithm.teacher={base}: the pool's generators do not call this API for user "
                f"{user}",
                hint=f"let the operator add it to ${ENDPOINTS_VARIABLE} of the scheduler, or use "
                "an inference job: job:NAME",
            )


def refuse_runs_of_others(
    config: JobConfig, others: Iterable[tuple[str, str]], more: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError for a value that leads into another user's run folder.

    It may lead there directly, by a link inside a folder, or by another name of the same file.
    `others` are these folders with their owners; the folder of an owner's runs is protected, too.
    `more` are further folders to read, by their keys.
    """
    folders = [(Path(folder), user) for folder, user in others if folder]
    theirs = {folder for folder, _ in folders}
    theirs |= {folder.parent for folder, user in folders if folder.parent.name == user}
    for lead in leads(config, more):
        if not theirs.isdisjoint((lead.path, *lead.path.parents)):
            raise foreign_run_error(str(lead))
    several = hard_links(config, more or {})
    if several:
        outermost = {folder for folder in theirs if theirs.isdisjoint(folder.parents)}
        for inode in (inode for folder in outermost for inode in inodes_below(folder)):
            if inode in several:
                raise foreign_run_error(
                    f"{several[inode].key}={several[inode].value!r}: a file in it"
                )


def refuse_unregistered_game(config: Mapping[str, Any]) -> None:
    """Raise GameError if the pool would host a game with an unregistered name."""
    env = cast("Mapping[str, Any]", config.get("env") or {})
    is_hosted = env.get("hosts") != 0 and not runs_programs(config)
    if (game := env.get("game")) and is_hosted:
        check_registered(str(game))


# -- archiving and deleting ------------------------------------------------------------------------

_DONE = {"archive": "archived", "unarchive": "brought back", "delete": "deleted"}


def refuse_removal(record: JobRecord, removal: Removal, others: Iterable[JobRecord]) -> None:
    """Raise StateError with the reason if a job cannot be archived or deleted now.

    `others` are the pool's other jobs, which may need the data.
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
            f"run {record.name} never had a folder, so it cannot be archived",
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
    """Raise StateError for a job that cannot be restarted."""
    if record.removal != "no":
        raise StateError(f"run {record.name} is being {_DONE[record.removal]}")
    if record.archived is not None:
        raise StateError(
            f"run {record.name} is archived",
            hint=f"bring it back first: `tinkermq archive {record.name} --undo`",
        )


def _needs(other: JobRecord, record: JobRecord, removal: Removal) -> str:
    """Return what another job needs of a job to be removed; empty if nothing."""
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
