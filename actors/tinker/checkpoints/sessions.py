"""The sessions of a trainer's users: whose they are, what was said of them, whether they go on."""

import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....schemas.tinker.checkpoints import (
    ListSessions,
    Metadata,
    SessionPage,
    SessionState,
    TellSession,
    TinkerCheckpoint,
    TinkerSession,
    TrainingRun,
)
from ....schemas.tinker.names import ModelName, session_name
from ....schemas.tinker.operation import ModelInfo
from ....schemas.wire.errors import MessageError, NotFoundError, SessionOverError
from .records import read_record, write_record
from .store import KeptCheckpoints

# The training runs of a trainer's users: models that were made, in memory or not.

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
                found.setdefault((str(one.name.model), one.name.kind), one.describe())
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


MAX_SESSIONS = 10_000
"""Of one user: the oldest is forgotten."""
MAX_SAMPLERS = 256
"""Of one session, the newest ones."""
ABANDONED_S = 86400.0
"""Nothing was heard of a session for so long: nobody goes on with it."""
_FOLDER = "sessions"


class TinkerSessions:
    """All users' sessions that one trainer was told of."""

    def __init__(self, folder: Path, runs: TrainingRuns) -> None:
        """Keep them below `folder`."""
        self._folder = folder
        self._runs = runs
        self._users: dict[str, dict[str, TinkerSession]] = {}
        self._owners: dict[str, str] = {}
        self._lock = threading.Lock()
        self._loaded = time.time()

    def load(self) -> None:
        """Read what is there."""
        for file in sorted(self._folder.glob(f"*/{_FOLDER}/*.json")):
            found = read_record(file)
            if found is not None and (session := _session_in(found)) is not None:
                user = file.parents[1].name
                live = session.model_copy(update={"seen": self._loaded})  # as far as is known
                self._users.setdefault(user, {})[session.session] = live
                self._owners[session.session] = user

    def check_owner(self, user: str, session: str) -> None:
        """Raise NotFoundError for a session of somebody else."""
        with self._lock:
            owner = self._owners.get(session)
        if (owner or self._runs.owner(session) or user) != user:
            raise NotFoundError(
                f"there is no session {session}", hint="create_session returns a session's id"
            )

    def tell(self, user: str, told: TellSession) -> SessionState:
        """Take in what is told of a session; raises NotFoundError for one of somebody else."""
        self.check_owner(user, session_name(told.session))
        with self._lock:
            known = self._users.get(user, {}).get(told.session)
            if known is None:
                if told.event != "begin" and not self._runs.models_of(user, told.session):
                    return SessionState(state="unknown")
                known = TinkerSession(session=told.session, time=time.time())
            now = _changed(known, told)
            mine = self._users.setdefault(user, {})
            mine[told.session], self._owners[told.session] = now, user
            if now.model_dump(exclude={"seen"}) != known.model_dump(exclude={"seen"}) or (
                told.event == "begin"
            ):
                write_record(self._file(user, told.session), now.to_map())
            for old in list(mine)[: max(0, len(mine) - MAX_SESSIONS)]:
                del mine[old], self._owners[old]
                self._file(user, old).unlink(missing_ok=True)
        return SessionState(state="over" if now.reason else "live")

    def check_open(self, user: str, session: str) -> None:
        """Raise SessionOverError for a session that was finished."""
        with self._lock:
            known = self._users.get(user, {}).get(session)
        if known is not None and known.reason:
            raise SessionOverError(
                f"session {session} is over: {known.reason}",
                hint="begin another one; what was saved of it can be loaded there",
            )

    def is_over(self, user: str, session: str, used: float) -> bool:
        """Whether nobody will go on with a session.

        It was finished, or nothing was heard of it for a day; `used` is when a model of it was used
        last, by the monotonic clock, 0 if never by this trainer.
        """
        with self._lock:
            known = self._users.get(user, {}).get(session)
        if known is not None and known.reason:
            return True
        heard = self._loaded if known is None else known.seen
        is_idle = not used or time.monotonic() - used > ABANDONED_S
        return is_idle and time.time() - heard > ABANDONED_S

    def page(self, user: str, asked: ListSessions) -> SessionPage:
        """Return a part of the list of a user's sessions, or one, with their models."""
        with self._lock:
            mine = list(self._users.get(user, {}).values())
        found = [one for one in mine if asked.session in ("", one.session)]
        found.sort(key=lambda one: one.time, reverse=True)
        part = found[asked.offset : asked.offset + asked.limit]
        whole = [
            one.model_copy(update={"models": self._runs.models_of(user, one.session)})
            for one in part
        ]
        return SessionPage(sessions=whole, total=len(found))

    def _file(self, user: str, session: str) -> Path:
        return self._folder / user / _FOLDER / f"{session}.json"


def _changed(known: TinkerSession, told: TellSession) -> TinkerSession:
    update: dict[str, Any] = {"seen": time.time()}
    if told.event == "begin":
        names = ("user_metadata", "display_name", "sdk_version")
        update |= {name: getattr(told, name) for name in names}
    elif told.event == "finish" and not known.reason:
        update["reason"] = told.reason or "finished"
    elif told.event == "sampler" and told.sampler not in known.samplers:
        update["samplers"] = [*known.samplers, told.sampler][-MAX_SAMPLERS:]
    return known.model_copy(update=update)


def _session_in(value: dict[str, Any]) -> TinkerSession | None:
    try:
        return TinkerSession.from_map(value)
    except MessageError:
        return None
