"""The named checkpoints that a trainer keeps: saved, listed, changed, bounded for each user."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....schemas.tinker.checkpoints import ChangeCheckpoint, CheckpointPage, ListCheckpoints
from ....schemas.tinker.names import CheckpointName, ModelName
from ....schemas.wire.errors import (
    ConflictError,
    NotFoundError,
    QuotaError,
    StateError,
    StorageError,
)
from ...storage.tinker_checkpoints import CheckpointFolders, Gone, StoredCheckpoint, missing
from ..models import TrainedModel
from ..operations import Adapters
from .exports import make_external
from .records import read_record

MAX_CHECKPOINTS = 10_000
"""Of one user, those that are gone but known counted."""
MAX_BYTES = 64 << 30
KEPT_PASSING = 64
"""Of one model: those that were saved to be sampled from for a while."""
PASSING_S = 24 * 3600.0
"""How long such a one is kept."""
KNOWN_S = 30 * 86400.0
"""How long it is known of a checkpoint that it was deleted, or has expired."""
_Named = dict[CheckpointName, StoredCheckpoint]


class KeptCheckpoints:
    """All users' named checkpoints of one trainer."""

    def __init__(self, folders: CheckpointFolders, *, max_bytes: int = MAX_BYTES) -> None:
        """Keep them in `folders`, at most `max_bytes` of each user."""
        self.folders = folders
        self._max_bytes = max_bytes
        self._users: dict[str, _Named] = {}
        self._lock = threading.RLock()

    def load(self) -> None:
        """Read what is there; raises ModelError for what is damaged."""
        for stored in self.folders.read_all():
            self._users.setdefault(stored.user, {})[stored.name] = stored

    def note(self, stored: StoredCheckpoint) -> None:
        """Know of a checkpoint that is on disk: the scheduler takes over those of runs."""
        with self._lock:
            self._users.setdefault(stored.user, {}).setdefault(stored.name, stored)

    def of_user(self, user: str, model: ModelName | None = None) -> list[StoredCheckpoint]:
        """Return a user's checkpoints that are there, newest first, of one model or all."""
        now = time.time()
        with self._lock:
            mine = list(self._users.get(user, {}).values())
        found = (one for one in mine if one.is_there(now) and model in (None, one.name.model))
        return sorted(found, key=lambda one: one.time, reverse=True)

    def page(self, user: str, asked: ListCheckpoints) -> CheckpointPage:
        """Return a part of the list of a user's checkpoints that have names."""
        model = ModelName.parse(asked.model) if asked.model else None
        found = [one for one in self.of_user(user, model) if not one.passing]
        part = found[asked.offset : asked.offset + asked.limit]
        return CheckpointPage(checkpoints=[one.describe() for one in part], total=len(found))

    def save(
        self,
        adapters: Adapters,
        model: TrainedModel,
        name: CheckpointName,
        seq: int,
        told: dict[str, Any],
    ) -> StoredCheckpoint:
        """Write a checkpoint for operation `seq`; done again, it changes nothing.

        Raises StateError where the name is given away, QuotaError, StorageError.
        """
        known = self.folders.read(model.user, name)
        if known is not None and known.is_there(time.time()):
            if known.seq >= seq:
                return known
            if not told.get("overwrite"):
                raise StateError(
                    f"there is a checkpoint {name} already",
                    hint="choose another name, or set overwrite",
                )
        stored = _new(model, name, seq, told, self.folders.place_of(model.user, name))
        adapters.save(
            model.key,
            stored.folder,
            with_optimizer=name.kind == "weights",
            lasting=not stored.passing,
        )
        if name.kind == "external_weights":
            make_external(stored, told.get("age_encryption_recipients") or [])
        stored = replace(stored, size_bytes=_size(stored.folder))
        try:
            self._make_room(stored)
        except QuotaError:
            shutil.rmtree(stored.folder, ignore_errors=True)
            raise
        self._commit(stored)
        return stored

    def change(
        self, user: str, asked: ChangeCheckpoint, *, wanted: Callable[[CheckpointName], bool]
    ) -> StoredCheckpoint:
        """Change an own checkpoint; `wanted` says whether an operation that waits needs it.

        Raises NotFoundError, also for the published one of somebody else; ConflictError.
        """
        name = CheckpointName.parse(asked.path)
        with self._lock:
            found = self._users.get(user, {}).get(name)
            if found is None or not found.is_there(time.time()):
                raise missing(name, found)
            if asked.action == "delete":
                if wanted(name):
                    raise ConflictError(
                        f"{name} is about to be loaded", hint="wait for the result of load_weights"
                    )
                return self._remove(found, "deleted")
            if asked.action == "expire":
                found = replace(found, expires=time.time() + asked.ttl_s if asked.ttl_s else 0.0)
            else:
                found = replace(found, is_public=asked.action == "publish")
            self._commit(found)
            return found

    def sweep(self, *, wanted: Callable[[CheckpointName], bool]) -> int:
        """Remove what has expired; return how many that were."""
        now, removed = time.time(), 0
        for found in self._all():
            with self._lock:
                one = self._users[found.user].get(found.name)
                if one is None or one.is_there(now) or wanted(one.name):
                    continue
                if not one.gone and not one.passing:
                    self._remove(one, "expired")
                    removed += 1
                elif one.time < now - KNOWN_S or not one.gone:
                    self._forget(one)
        return removed

    def _all(self) -> Iterable[StoredCheckpoint]:
        with self._lock:
            return [one for mine in self._users.values() for one in mine.values()]

    def _make_room(self, new: StoredCheckpoint) -> None:
        """Raise QuotaError where a user has too much; what was saved for a while goes first."""
        passing = [one for one in self.of_user(new.user) if one.passing]
        of_model = [one for one in passing if one.name.model == new.name.model]
        for one in of_model[KEPT_PASSING:]:
            self._forget(one)
        while (over := self._over(new)) and passing:
            self._forget(passing.pop())
        if over:
            raise QuotaError(over, hint="delete some, or save them with a TTL")

    def _over(self, new: StoredCheckpoint) -> str:
        """Say by how much a user would have too much; empty: he has not."""
        with self._lock:
            others = [one for one in self._users.get(new.user, {}).values() if one.name != new.name]
        used = sum(one.size_bytes for one in others)
        if used + new.size_bytes > self._max_bytes:
            return (
                f"the checkpoints of user {new.user!r} have {used:,} bytes; {new.size_bytes:,} "
                f"more are over the limit of {self._max_bytes:,} (tinker.checkpoint_mb)"
            )
        if len(others) >= MAX_CHECKPOINTS:
            return f"user {new.user!r} has {len(others):,} checkpoints, as many as one may have"
        return ""

    def _commit(self, stored: StoredCheckpoint) -> None:
        with self._lock:
            self.folders.commit(stored)
            self._users.setdefault(stored.user, {})[stored.name] = stored

    def _remove(self, stored: StoredCheckpoint, why: Gone) -> StoredCheckpoint:
        gone = self.folders.remove(stored, why)
        self._users[stored.user][stored.name] = gone
        return gone

    def _forget(self, stored: StoredCheckpoint) -> None:
        with self._lock:
            self._users.get(stored.user, {}).pop(stored.name, None)
        self.folders.forget(stored)


def _new(
    model: TrainedModel, name: CheckpointName, seq: int, told: dict[str, Any], place: Path
) -> StoredCheckpoint:
    assert model.info is not None
    passing, at = bool(told.get("passing")), float(told.get("time") or time.time())
    ttl = told.get("ttl_seconds") or (PASSING_S if passing else 0)
    return StoredCheckpoint(
        user=model.user,
        name=name,
        place=place,
        info=model.info.model_copy(update={"applied": seq}),
        seq=seq,
        time=at,
        expires=at + ttl if ttl else 0.0,
        passing=passing,
        user_metadata=told.get("user_metadata"),
    )


def _size(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


# The newest weights that a model has for samples that move on while they run.
#
# A file `.inflight` beside the checkpoints of a model names the one of them that counts. It is
# written when a save is done, and never goes back: an operation that is done again leaves it.

_KIND = "sampler_weights"
_FILE = ".inflight"


class InflightWeights:
    """What the samples of each model move on to."""

    def __init__(self, folders: CheckpointFolders) -> None:
        """Keep it beside the checkpoints."""
        self._folders = folders

    def move(self, stored: StoredCheckpoint) -> None:
        """Let samples move on to a checkpoint, unless they are past it; raises StorageError."""
        file = self._file(stored.user, stored.name.model)
        known = read_record(file)
        if known is not None and int(known["seq"]) >= stored.seq:
            return
        hidden = file.with_name(f"{_FILE}.new")
        try:
            text = json.dumps({"name": stored.name.name, "seq": stored.seq})
            hidden.write_text(text, encoding="utf-8")
            hidden.rename(file)
        except OSError as error:
            raise StorageError(
                f"{file} cannot be written: {error.strerror}", hint="see the disk of the pool"
            ) from error

    def newest(self, user: str, least: CheckpointName) -> StoredCheckpoint:
        """Return what samples of a user's model move on to: `least`, or what was saved later.

        Raises NotFoundError.
        """
        known = read_record(self._file(user, least.model))
        if known is None:
            raise NotFoundError(
                f"{least} moves on to nothing", hint="save_weights_for_sampler with kind=inflight"
            )
        name = replace(least, name=str(known["name"]))
        return self._folders.find(user, name)

    def _file(self, user: str, model: ModelName) -> Path:
        place = self._folders.place_of(user, CheckpointName(model, _KIND, "-"))
        return place.parent / _FILE
