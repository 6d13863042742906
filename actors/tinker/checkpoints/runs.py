"""The training runs of a trainer's users: models that were made, in memory or not."""

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....schemas.tinker.checkpoints import Metadata, TinkerCheckpoint, TrainingRun
from ....schemas.tinker.names import ModelName
from ....schemas.tinker.operation import ModelInfo
from ....schemas.wire.errors import MessageError
from .records import read_record, write_record
from .store import KeptCheckpoints

MAX_RUNS = 10_000
"""Of one user: of those beyond, the oldest without checkpoints are forgotten."""
_FILE = "run.json"


@dataclass(frozen=True)
class StoredRun:
    """One training run."""

    info: ModelInfo
    time: float
    user_metadata: Metadata | None


class TrainingRuns:
    """All users' training runs of one trainer."""

    def __init__(self, folder: Path, checkpoints: KeptCheckpoints) -> None:
        """Keep them below `folder`."""
        self._folder = folder
        self._checkpoints = checkpoints
        self._users: dict[str, dict[ModelName, StoredRun]] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read what is there."""
        for file in sorted(self._folder.glob(f"*/*/{_FILE}")):
            found = read_record(file)
            if found is not None and (run := _run_in(found)) is not None:
                mine = self._users.setdefault(file.parents[1].name, {})
                mine[ModelName.parse(run.info.model)] = run

    def begin(self, user: str, info: ModelInfo, metadata: Metadata | None, time: float) -> None:
        """Note that a model was made; again, it changes nothing. Raises StorageError."""
        name, run = ModelName.parse(info.model), StoredRun(info, time, metadata)
        value = {"info": info.to_map(), "time": time, "user_metadata": metadata}
        write_record(self._place(user, name) / _FILE, value)
        with self._lock:
            mine = self._users.setdefault(user, {})
            mine[name] = run
            over = sorted(mine, key=lambda one: mine[one].time)[: max(0, len(mine) - MAX_RUNS)]
        for old in over:
            self._forget(user, old)

    def of_user(self, user: str, used: dict[ModelName, float]) -> list[TrainingRun]:
        """Return a user's runs, the one used last first; `used` tells when models were."""
        with self._lock:
            mine = dict(self._users.get(user, {}))
        newest = self._newest(user)
        found = [_told(user, run, newest, used.get(name, 0.0)) for name, run in mine.items()]
        return sorted(found, key=lambda run: run.time, reverse=True)

    def owner(self, session: str) -> str | None:
        """Return who has runs of a session."""
        with self._lock:
            for user, mine in self._users.items():
                if any(name.session == session for name in mine):
                    return user
        return None

    def models_of(self, user: str, session: str) -> list[str]:
        """Return the models of a session, in order."""
        with self._lock:
            mine = [name for name in self._users.get(user, {}) if name.session == session]
        return [str(name) for name in sorted(mine, key=lambda name: name.number)]

    def _newest(self, user: str) -> dict[tuple[str, str], TinkerCheckpoint]:
        """Return the newest checkpoint of each model and kind."""
        found: dict[tuple[str, str], TinkerCheckpoint] = {}
        for one in self._checkpoints.of_user(user):
            if not one.passing:
                found.setdefault((str(one.name.model), one.name.kind), one.told())
        return found

    def _forget(self, user: str, name: ModelName) -> None:
        if self._checkpoints.of_user(user, name):
            return
        with self._lock:
            self._users[user].pop(name, None)
        (self._place(user, name) / _FILE).unlink(missing_ok=True)
        if not any(self._place(user, name).glob("state")):
            shutil.rmtree(self._place(user, name), ignore_errors=True)

    def _place(self, user: str, name: ModelName) -> Path:
        return self._folder / user / f"{name.session}.train.{name.number}"


def _told(
    user: str, run: StoredRun, newest: dict[tuple[str, str], TinkerCheckpoint], used: float
) -> TrainingRun:
    model = run.info.model
    checkpoint = newest.get((model, "weights"))
    sampled = newest.get((model, "sampler_weights"))
    saved = [one.time for one in (checkpoint, sampled) if one is not None]
    return TrainingRun(
        model=model,
        base=run.info.base,
        rank=run.info.rank,
        owner=user,
        time=max(run.time, used, *saved),
        user_metadata=run.user_metadata,
        checkpoint=checkpoint,
        sampler_checkpoint=sampled,
    )


def _run_in(value: dict[str, Any]) -> StoredRun | None:
    try:
        info = ModelInfo.from_map(value["info"])
        return StoredRun(info, float(value["time"]), value["user_metadata"])
    except (KeyError, TypeError, ValueError, MessageError):
        return None
