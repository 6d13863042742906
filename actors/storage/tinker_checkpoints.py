"""Named checkpoints on disk, as trainer and samplers find them.

A checkpoint is `<user>/<model>/<kind>/<name>/`: its files lie in a folder named by the operation
that saved it, and `tinker.json` beside that says which one counts. To replace this file is what
makes a checkpoint be there, change or be gone, so a crash leaves the one or the other.
"""

import contextlib
import json
import os
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

TINKER_FOLDER = "tinker"
"""Folder of a run in which the states and checkpoints of models of the Tinker API lie."""
_META = "tinker.json"
Gone = Literal["", "deleted", "expired"]
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint of a user, or the note that it is gone."""

    user: str
    name: CheckpointName
    place: Path
    """Folder with the name of the checkpoint."""
    info: ModelInfo
    seq: int
    """The operation that saved it."""
    time: float
    """When that was taken, in seconds since the epoch."""
    size_bytes: int = 0
    is_public: bool = False
    expires: float = 0.0
    """In seconds since the epoch; 0: never."""
    passing: bool = False
    """Saved to be sampled from for a while, without a name of the user's."""
    user_metadata: Metadata | None = None
    gone: Gone = ""

    @property
    def folder(self) -> Path:
        """Where its files lie."""
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
        """Find them below `folder`."""
        self._folder = folder

    def place_of(self, user: str, name: CheckpointName) -> Path:
        """Return where a user's checkpoint lies, whether it is there or not."""
        model = f"{name.model.session}.train.{name.model.number}"
        return self._folder / user / model / name.kind / name.name

    def find(self, user: str, name: CheckpointName) -> StoredCheckpoint:
        """Return a checkpoint that a user may read: an own one, or a published one of others.

        Raises NotFoundError, ModelError for one that is damaged.
        """
        own = self.read(user, name)
        now = time.time()
        if own is not None and own.is_there(now):
            return own
        if own is None and (other := self._published(name, now)) is not None:
            return other
        raise missing(name, own)

    def read(self, user: str, name: CheckpointName) -> StoredCheckpoint | None:
        """Return what is known of a user's own checkpoint, also of one that is gone."""
        place = self.place_of(user, name)
        return _read(user, name, place) if (place / _META).is_file() else None

    def is_damaged(self, user: str, name: CheckpointName) -> bool:
        """Whether a user's own checkpoint lies there and cannot be read."""
        try:
            self.read(user, name)
        except errors.ModelError:
            return True
        return False

    def read_all(self) -> Iterator[StoredCheckpoint]:
        """Return what is known of all checkpoints, and remove what a crash has left half.

        Those that are damaged are left out.
        """
        for place in sorted(self._folder.glob("*/*.train.*/*/*")):
            kind, session = place.parent.name, place.parent.parent.name
            if kind not in KINDS or place.name.startswith("."):
                continue
            try:
                model = ModelName.parse(session.replace(".train.", ":train:"))
                name = CheckpointName(model, kind, place.name)
                stored = self.read(place.parents[2].name, name)
            except (errors.ModelError, errors.NotFoundError) as error:
                _log.warning("checkpoint_left_out", folder=str(place), reason=error.message)
                continue  # whoever names it is told
            if stored is None:
                shutil.rmtree(place, ignore_errors=True)
                continue
            _remove_others(stored)
            yield stored

    def size_of(self, user: str) -> int:
        """Return the bytes of a user's checkpoints; what is being written is not counted."""
        num_bytes = 0
        for meta in self._folder.glob(f"{user}/*.train.*/*/*/{_META}"):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                num_bytes += int(json.loads(meta.read_text(encoding="utf-8")).get("size_bytes", 0))
        return num_bytes

    def commit(self, stored: StoredCheckpoint) -> None:
        """Let this be what counts; its files are there. Raises StorageError."""
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
        hidden = stored.place / f".{_META}"
        try:
            with hidden.open("w", encoding="utf-8") as file:
                json.dump(meta, file)
                file.flush()
                if not stored.passing:
                    os.fsync(file.fileno())
            hidden.rename(stored.place / _META)
        except OSError as error:
            raise errors.StorageError(
                f"{stored.place} cannot be written: {error.strerror}",
                hint="see the disk of the pool",
            ) from error
        _remove_others(stored)

    def remove(self, stored: StoredCheckpoint, why: Gone) -> StoredCheckpoint:
        """Remove the files of a checkpoint.

        That it was there, and why it is not, stays known where there is room to write it down.
        """
        gone = replace(stored, gone=why, size_bytes=0, is_public=False, time=time.time())
        try:
            self.commit(gone)
        except errors.StorageError:  # a full disk, on which this makes room
            self.forget(stored.place)
        return gone

    def forget(self, place: Path) -> None:
        """Remove also what is known of a checkpoint."""
        with contextlib.suppress(OSError):
            (place / _META).unlink()  # without it nothing counts
        shutil.rmtree(place, ignore_errors=True)

    def _published(self, name: CheckpointName, now: float) -> StoredCheckpoint | None:
        model = f"{name.model.session}.train.{name.model.number}"
        for place in sorted(self._folder.glob(f"*/{model}/{name.kind}/{name.name}")):
            stored = self.read(place.parents[2].name, name)
            if stored is not None and stored.is_public and stored.is_there(now):
                return stored
        return None


def missing(name: CheckpointName, known: StoredCheckpoint | None = None) -> errors.NotFoundError:
    """Return the error of a checkpoint that is not there; `known` is what its owner may know."""
    if known is not None and (known.gone == "expired" or not known.gone):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(known.expires))
        return errors.CheckpointGoneError(
            f"the checkpoint {name} has expired: its time was over at {when} UTC",
            hint="save it anew, with a longer ttl_seconds or without",
        )
    if known is not None:
        return errors.CheckpointGoneError(f"the checkpoint {name} was deleted", hint="save it anew")
    return errors.NotFoundError(
        f"there is no checkpoint {name}",
        hint="it was never saved, was deleted, or belongs to another user and is not published",
    )


def _remove_others(stored: StoredCheckpoint) -> None:
    """Remove the files that do not count (any more)."""
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
