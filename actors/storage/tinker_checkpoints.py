"""Named checkpoints of Tinker models on disk, for trainer, samplers and scheduler.

A checkpoint is the folder `<user>/<model>/<kind>/<name>/`. Its files are in a folder named after
the operation that saved it, and `tinker.json` beside that folder names the operation. Replacing
`tinker.json` creates, changes or removes the checkpoint, so a crash leaves either the old or the
new one.
"""

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import structlog

from ...schemas.tinker.checkpoints import Metadata, TinkerCheckpoint
from ...schemas.tinker.names import KINDS, CheckpointName, ModelName
from ...schemas.tinker.operation import ModelInfo
from ...schemas.wire import errors
from .files import read_record, write_record

TINKER_FOLDER = "tinker"
"""Folder of a run with the states and checkpoints of Tinker models."""
_META, _MARK = "tinker.json", ".mark"
_INFLIGHT = ".inflight"
"""File beside a model's sampler weights that names the newest ones saved with kind="inflight"."""
Gone = Literal["", "deleted", "expired"]
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint of a user, or the record of a removed one."""

    user: str
    name: CheckpointName
    place: Path
    """The checkpoint's folder."""
    info: ModelInfo
    seq: int
    """Operation that saved it."""
    time: float
    """When that operation was accepted, in seconds since the epoch."""
    size_bytes: int = 0
    is_public: bool = False
    expires: float = 0.0
    """In seconds since the epoch; 0: never."""
    passing: bool = False
    """Unnamed weights of a sampling session, kept for a limited time."""
    user_metadata: Metadata | None = None
    gone: Gone = ""

    @property
    def folder(self) -> Path:
        """Folder of its files."""
        return self.place / str(self.seq)

    def is_there(self, now: float) -> bool:
        """Whether it can be read."""
        return not self.gone and not 0 < self.expires <= now

    def describe(self) -> TinkerCheckpoint:
        """Return it as shown to users."""
        return TinkerCheckpoint(
            path=str(self.name),
            time=self.time,
            size_bytes=self.size_bytes,
            is_public=self.is_public,
            expires=self.expires,
            user_metadata=self.user_metadata,
        )


class CheckpointFolders:
    """The named checkpoints below a folder."""

    def __init__(self, folder: Path) -> None:
        """Read and write below `folder`."""
        self._folder = folder

    @property
    def mark(self) -> str:
        """The random mark of the folder, with which samplers recognise it; empty: none yet."""
        try:
            return (self._folder / _MARK).read_text(encoding="utf-8")
        except OSError:
            return ""

    def set_mark(self) -> None:
        """Give the folder a mark if it has none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self.mark:
            (self._folder / _MARK).write_text(secrets.token_hex(8), encoding="utf-8")

    def place_of(self, user: str, name: CheckpointName) -> Path:
        """Return the folder of a user's checkpoint, whether it exists or not."""
        return self._folder / user / name.model.folder / name.kind / name.name

    def find(self, user: str, name: CheckpointName) -> StoredCheckpoint:
        """Return a checkpoint that a user may read: the user's own, or a published one.

        Raises NotFoundError, and ModelError for a damaged one.
        """
        own = self.read(user, name)
        now = time.time()
        if own is not None and own.is_there(now):
            return own
        if own is None and (published := self._published(name, now)) is not None:
            return published
        raise missing(name, own)

    def find_snapshot(self, user: str, name: CheckpointName, *, moves: bool) -> StoredCheckpoint:
        """Return the weights that a user's samples use now; raises NotFoundError.

        With `moves` they are the newest weights that were saved for samples in flight.
        """
        return self._find_newest(user, name) if moves else self.find(user, name)

    def _find_newest(self, user: str, oldest: CheckpointName) -> StoredCheckpoint:
        record = read_record(self._inflight_file(user, oldest.model))
        if record is None:
            raise errors.NotFoundError(
                f"no weights of {oldest.model} were saved for samples in flight",
                hint="save_weights_for_sampler with kind=inflight",
            )
        return self.find(user, replace(oldest, name=str(record["name"])))

    def set_newest(self, stored: StoredCheckpoint) -> None:
        """Let in-flight samples use a checkpoint, unless they already use a later one.

        Raises StorageError.
        """
        file = self._inflight_file(stored.user, stored.name.model)
        record = read_record(file)
        if record is None or int(record["seq"]) < stored.seq:
            write_record(file, {"name": stored.name.name, "seq": stored.seq}, lasting=False)

    def read(self, user: str, name: CheckpointName) -> StoredCheckpoint | None:
        """Return the record of a user's own checkpoint, also of a removed one."""
        place = self.place_of(user, name)
        return _read(user, name, place) if (place / _META).is_file() else None

    def is_damaged(self, user: str, name: CheckpointName) -> bool:
        """Whether a user's own checkpoint exists and cannot be read."""
        try:
            self.read(user, name)
        except errors.ModelError:
            return True
        return False

    def read_all(self) -> Iterator[StoredCheckpoint]:
        """Return the records of all checkpoints, and remove incomplete ones that a crash left.

        Damaged ones are skipped.
        """
        for place in sorted(self._folder.glob("*/*.train.*/*/*")):
            kind, model_folder = place.parent.name, place.parent.parent.name
            if kind not in KINDS or place.name.startswith("."):
                continue
            try:
                name = CheckpointName(ModelName.of_folder(model_folder), kind, place.name)
                stored = self.read(place.parents[2].name, name)
            except (errors.ModelError, errors.NotFoundError) as error:
                _log.warning("checkpoint_skipped", folder=str(place), reason=error.message)
                continue  # requests for it raise the error
            if stored is None:
                shutil.rmtree(place, ignore_errors=True)
                continue
            _remove_unused_folders(stored)
            yield stored

    def commit(self, stored: StoredCheckpoint) -> None:
        """Write the record of a checkpoint whose files exist; raises StorageError."""
        meta = {
            "info": stored.info.to_map(),
            "seq": stored.seq,
            "time": stored.time,
            "size_bytes": stored.size_bytes,
            "is_public": stored.is_public,
            "expires": stored.expires,
            "passing": stored.passing,
            "user_metadata": stored.user_metadata,
            "gone": stored.gone,
        }
        write_record(stored.place / _META, meta, lasting=not stored.passing)
        _remove_unused_folders(stored)

    def remove(self, stored: StoredCheckpoint, why: Gone) -> StoredCheckpoint:
        """Remove the files of a checkpoint, and record the reason if the disk has room for it."""
        record = replace(stored, gone=why, size_bytes=0, is_public=False, time=time.time())
        try:
            self.commit(record)
        except errors.StorageError:  # the disk is full: removing the folder makes room
            self.forget(stored.place)
        return record

    def forget(self, place: Path) -> None:
        """Remove a checkpoint's files and its record."""
        with contextlib.suppress(OSError):
            (place / _META).unlink()  # first, so that a crash leaves no record without files
        shutil.rmtree(place, ignore_errors=True)

    def _published(self, name: CheckpointName, now: float) -> StoredCheckpoint | None:
        for place in sorted(self._folder.glob(f"*/{name.model.folder}/{name.kind}/{name.name}")):
            stored = self.read(place.parents[2].name, name)
            if stored is not None and stored.is_public and stored.is_there(now):
                return stored
        return None

    def _inflight_file(self, user: str, model: ModelName) -> Path:
        return self._folder / user / model.folder / "sampler_weights" / _INFLIGHT


def missing(name: CheckpointName, record: StoredCheckpoint | None = None) -> errors.NotFoundError:
    """Return the error for a missing checkpoint; `record` is its owner's record of it."""
    if record is not None and record.gone != "deleted":
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.expires))
        return errors.CheckpointGoneError(
            f"the checkpoint {name} has expired: its time was over at {when} UTC",
            hint="save it anew, with a longer ttl_seconds or without",
        )
    if record is not None:
        return errors.CheckpointGoneError(f"the checkpoint {name} was deleted", hint="save it anew")
    return errors.NotFoundError(
        f"there is no checkpoint {name}",
        hint="it was never saved, was deleted, or belongs to another user and is not published",
    )


def _remove_unused_folders(stored: StoredCheckpoint) -> None:
    """Remove all files but those of the operation that saved the checkpoint."""
    for path in stored.place.iterdir():
        if path.is_dir() and (stored.gone or path.name != str(stored.seq)):
            shutil.rmtree(path, ignore_errors=True)


def _read(user: str, name: CheckpointName, place: Path) -> StoredCheckpoint:
    try:
        meta: dict[str, Any] = json.loads((place / _META).read_text(encoding="utf-8"))
        info = ModelInfo.from_map(meta.pop("info"))
        return StoredCheckpoint(user=user, name=name, place=place, info=info, **meta)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, errors.MessageError) as error:
        raise errors.ModelError(
            f"the checkpoint {name} is damaged, {place / _META}: {error}",
            hint="delete it, or save over it with overwrite; an operator may restore it",
        ) from error
