"""The checkpoints, training runs and sessions of all users of one trainer.

Each is a file below the trainer's folder, which the catalogue alone writes; in memory it has what
the files contain.
"""

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...schemas.tinker.checkpoints import (
    ChangeCheckpoint,
    CheckpointPage,
    ListCheckpoints,
    ListRuns,
    ListSessions,
    Metadata,
    RunPage,
    SessionPage,
    SessionState,
    TellSession,
    TinkerCheckpoint,
    TinkerSession,
    TrainingRun,
)
from ...schemas.tinker.names import CheckpointName, ModelName, session_name
from ...schemas.tinker.operation import ModelInfo
from ...schemas.wire import errors
from ..storage.files import read_record, write_record
from ..storage.tinker_checkpoints import CheckpointFolders, Gone, StoredCheckpoint, missing
from .exports import make_external
from .models import TrainedModel
from .training.trainer import AdapterTrainer

MAX_CHECKPOINTS = 10_000
"""Limit per user, including records of removed checkpoints."""
MAX_BYTES = 64 << 30
MAX_PASSING = 64
"""Unnamed checkpoints of one model for its samplers."""
PASSING_S = 24 * 3600.0
"""How long such a checkpoint is kept."""
KNOWN_S = 30 * 86400.0
"""How long the record of a removed checkpoint is kept."""
MAX_RUNS = 10_000
"""Limit per user; beyond it, the oldest without checkpoints are forgotten."""
MAX_SESSIONS = 10_000
"""Limit per user; beyond it, the oldest are forgotten."""
MAX_SAMPLERS = 256
"""Limit per session; the newest are kept."""
ABANDONED_S = 86400.0
"""Time without a message after which a session is abandoned."""
_RUN, _SESSIONS = "run.json", "sessions"


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved."""

    overwrite: bool = False
    passing: bool = False
    """Whether it is for a sampling session, without a user's name."""
    ttl_s: float | None = None
    time: float = 0.0
    """When its operation was accepted; 0: now."""
    user_metadata: Metadata | None = None
    recipients: Sequence[str] = ()
    """age keys for which an external checkpoint is encrypted."""


class Catalogue:
    """What one trainer stores for its users, apart from the states of models."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Use files below `folder`, with at most `max_bytes` of checkpoints per user."""
        self.folder = folder
        self.folders = CheckpointFolders(folder)
        self._max_bytes = max_bytes
        self._checkpoints: dict[str, dict[CheckpointName, StoredCheckpoint]] = {}
        self._runs: dict[str, dict[ModelName, TrainingRun]] = {}
        self._sessions: dict[str, dict[str, TinkerSession]] = {}
        self._owners: dict[str, str] = {}
        """The user of each session with a record or a run."""
        self._lock = threading.RLock()
        self._loaded = time.time()

    def load(self) -> None:
        """Read the files."""
        for stored in self.folders.read_all():
            self._checkpoints.setdefault(stored.user, {})[stored.name] = stored
        for file in sorted(self.folder.glob(f"*/*/{_RUN}")):
            user = file.parents[1].name
            if (run := _read_run(file, user)) is not None:
                self._add_run(user, run)
        for file in sorted(self.folder.glob(f"*/{_SESSIONS}/*.json")):
            if (session := _read_session(file)) is not None:
                live = session.model_copy(update={"seen": self._loaded})  # it may still be used
                self._add_session(file.parents[1].name, live)

    # -- checkpoints -------------------------------------------------------------------------------

    def checkpoints(self, user: str, model: ModelName | None = None) -> list[StoredCheckpoint]:
        """Return a user's existing checkpoints of one model or all, newest first."""
        now = time.time()
        with self._lock:
            records = list(self._checkpoints.get(user, {}).values())
        existing = [
            item for item in records if item.is_there(now) and model in (None, item.name.model)
        ]
        return sorted(existing, key=lambda item: item.time, reverse=True)

    def list_checkpoints(self, user: str, request: ListCheckpoints) -> CheckpointPage:
        """Return a page of a user's named checkpoints; raises NotFoundError for an unknown run."""
        model = ModelName.parse(request.model) if request.model else None
        if model is not None and model not in self._runs.get(user, {}):
            raise _unknown_run(request.model)
        named = [item for item in self.checkpoints(user, model) if not item.passing]
        page = named[request.offset : request.offset + request.limit]
        return CheckpointPage(checkpoints=[item.describe() for item in page], total=len(named))

    def save(
        self,
        adapters: AdapterTrainer,
        model: TrainedModel,
        name: CheckpointName,
        seq: int,
        options: SaveOptions,
    ) -> StoredCheckpoint:
        """Write a checkpoint for operation `seq`; if it was written before, nothing changes.

        Raises StateError for a name in use and ModelError for that of a damaged checkpoint, unless
        it is overwritten; QuotaError, StorageError.
        """
        is_damaged = options.overwrite and self.folders.is_damaged(model.user, name)
        record = None if is_damaged else self.folders.read(model.user, name)
        if record is not None and record.is_there(time.time()):
            if record.seq >= seq:
                return record
            if not options.overwrite:
                raise errors.StateError(
                    f"there is a checkpoint {name} already",
                    hint="choose another name, or set overwrite",
                )
        stored = _new(model, name, seq, options, self.folders.place_of(model.user, name))
        is_training = name.kind == "weights"
        lasting = not stored.passing
        adapters.save(model.key, stored.folder, with_optimizer=is_training, lasting=lasting)
        try:
            if name.kind == "external_weights":
                make_external(stored, options.recipients)
            files = [item for item in stored.folder.rglob("*") if item.is_file()]
            stored = replace(stored, size_bytes=sum(item.stat().st_size for item in files))
            self._make_room(stored)
            self._commit(stored)
        except Exception:
            shutil.rmtree(stored.folder, ignore_errors=True)  # no record names it
            raise
        return stored

    def change(
        self, user: str, request: ChangeCheckpoint, *, is_wanted: Callable[[CheckpointName], bool]
    ) -> TinkerCheckpoint:
        """Change one of the user's own checkpoints; a damaged one can be deleted.

        `is_wanted` returns whether a waiting operation will load a checkpoint. Raises
        NotFoundError, also for another user's published checkpoint; ConflictError.
        """
        name = CheckpointName.parse(request.path)
        is_deleted = request.action == "delete"
        with self._lock:
            stored = self._checkpoints.get(user, {}).get(name)
            is_damaged = stored is None and is_deleted and self.folders.is_damaged(user, name)
            if not is_damaged and (stored is None or not stored.is_there(time.time())):
                raise missing(name, stored)
            if is_deleted and is_wanted(name):
                raise errors.ConflictError(
                    f"{name} is about to be loaded", hint="wait for the result of load_weights"
                )
            if stored is None:
                self.folders.forget(self.folders.place_of(user, name))
                return TinkerCheckpoint(path=str(name), time=time.time(), size_bytes=0)
            if is_deleted:
                return self._remove(stored, "deleted").describe()
            if request.action == "expire":
                expires = time.time() + request.ttl_s if request.ttl_s else 0.0
                stored = replace(stored, expires=expires)
            else:
                stored = replace(stored, is_public=request.action == "publish")
            self._commit(stored)
            return stored.describe()

    def sweep(self, *, is_wanted: Callable[[CheckpointName], bool]) -> int:
        """Remove expired checkpoints that no operation waits for; return their number."""
        now, num_removed = time.time(), 0
        with self._lock:
            keys = [(user, name) for user, some in self._checkpoints.items() for name in some]
        for user, name in keys:
            with self._lock:
                stored = self._checkpoints[user].get(name)
                if stored is None or stored.is_there(now) or is_wanted(name):
                    continue
                if not stored.gone and not stored.passing:
                    self._remove(stored, "expired")
                    num_removed += 1
                elif stored.time < now - KNOWN_S or not stored.gone:
                    self._forget_checkpoint(stored)
        return num_removed

    def _make_room(self, new: StoredCheckpoint) -> None:
        """Remove passing checkpoints, oldest first, until a new one fits; else QuotaError."""
        passing = [item for item in self.checkpoints(new.user) if item.passing]
        of_model = [item for item in passing if item.name.model == new.name.model]
        for item in of_model[MAX_PASSING:]:
            self._forget_checkpoint(item)
        while (excess := self._describe_excess(new)) and passing:
            self._forget_checkpoint(passing.pop())
        if excess:
            raise errors.QuotaError(excess, hint="delete some, or save them with a TTL")

    def _describe_excess(self, new: StoredCheckpoint) -> str:
        """Return which limit a new checkpoint would exceed; empty: none."""
        with self._lock:
            records = list(self._checkpoints.get(new.user, {}).values())
        others = [item for item in records if item.name != new.name]
        used = sum(item.size_bytes for item in others)
        if used + new.size_bytes > self._max_bytes:
            return (
                f"the checkpoints of user {new.user!r} have {used:,} bytes; {new.size_bytes:,} "
                f"more are over the limit of {self._max_bytes:,} (tinker.checkpoint_mb)"
            )
        if len(others) >= MAX_CHECKPOINTS:
            return f"user {new.user!r} has {len(others):,} checkpoints, the most allowed"
        return ""

    def _commit(self, stored: StoredCheckpoint) -> None:
        with self._lock:
            self.folders.commit(stored)
            self._checkpoints.setdefault(stored.user, {})[stored.name] = stored

    def _remove(self, stored: StoredCheckpoint, why: Gone) -> StoredCheckpoint:
        record = self.folders.remove(stored, why)
        self._checkpoints[stored.user][stored.name] = record
        return record

    def _forget_checkpoint(self, stored: StoredCheckpoint) -> None:
        with self._lock:
            self._checkpoints.get(stored.user, {}).pop(stored.name, None)
        self.folders.forget(stored.place)

    # -- training runs -----------------------------------------------------------------------------

    def begin_run(self, user: str, info: ModelInfo, metadata: Metadata | None, at: float) -> None:
        """Record that a model was made; a repetition changes nothing. Raises StorageError."""
        name = ModelName.parse(info.model)
        value = {"info": info.to_map(), "time": at, "user_metadata": metadata}
        write_record(self.folder / user / name.folder / _RUN, value)
        with self._lock:
            self._add_run(user, _run(user, info, metadata, at))
            runs = self._runs[user]
            oldest = sorted(runs, key=lambda key: runs[key].time)[: max(0, len(runs) - MAX_RUNS)]
        for key in oldest:
            self._forget_run(user, key)

    def list_runs(self, user: str, request: ListRuns, used: Mapping[ModelName, float]) -> RunPage:
        """Return a page of a user's runs, the last used first; `used` has the times of models.

        Raises NotFoundError for an unknown run.
        """
        with self._lock:
            runs = [
                run for run in self._runs.get(user, {}).values() if request.model in ("", run.model)
            ]
        if request.model and not runs:
            raise _unknown_run(request.model)
        newest: dict[tuple[str, str], TinkerCheckpoint] = {}
        for item in self.checkpoints(user):
            if not item.passing:
                newest.setdefault((str(item.name.model), item.name.kind), item.describe())
        listed: list[TrainingRun] = []
        for run in runs:
            saved = newest.get((run.model, "weights")), newest.get((run.model, "sampler_weights"))
            times = [item.time for item in saved if item is not None]
            last = max(run.time, used.get(ModelName.parse(run.model), 0.0), *times)
            update = {"time": last, "checkpoint": saved[0], "sampler_checkpoint": saved[1]}
            listed.append(run.model_copy(update=update))
        listed.sort(key=lambda run: run.time, reverse=True)
        page = listed[request.offset : request.offset + request.limit]
        return RunPage(runs=page, total=len(listed))

    def models_of(self, user: str, session: str) -> list[str]:
        """Return the models of a session, in order."""
        with self._lock:
            names = [name for name in self._runs.get(user, {}) if name.session == session]
        return [str(name) for name in sorted(names, key=lambda name: name.number)]

    def _add_run(self, user: str, run: TrainingRun) -> None:
        name = ModelName.parse(run.model)
        self._runs.setdefault(user, {})[name] = run
        self._owners.setdefault(name.session, user)

    def _forget_run(self, user: str, name: ModelName) -> None:
        if self.checkpoints(user, name):
            return
        with self._lock:
            self._runs[user].pop(name, None)
            self._release_session(user, name.session)
        folder = self.folder / user / name.folder
        (folder / _RUN).unlink(missing_ok=True)
        if not (folder / "state").exists():
            shutil.rmtree(folder, ignore_errors=True)

    # -- sessions ----------------------------------------------------------------------------------

    def record_event(self, user: str, event: TellSession) -> SessionState:
        """Record an event of a session; raises NotFoundError for another user's."""
        self.check_owner(user, session_name(event.session))
        with self._lock:
            sessions = self._sessions.setdefault(user, {})
            before = sessions.get(event.session)
            if before is None:
                if event.event != "begin" and not self.models_of(user, event.session):
                    return SessionState(state="unknown")
                before = TinkerSession(session=event.session, time=time.time())
            session = _with_event(before, event)
            self._add_session(user, session)
            ignored = {"seen"}  # it changes with each heartbeat
            if event.event == "begin" or (
                session.model_dump(exclude=ignored) != before.model_dump(exclude=ignored)
            ):
                write_record(self._session_file(user, event.session), session.to_map())
            for oldest in list(sessions)[: max(0, len(sessions) - MAX_SESSIONS)]:
                del sessions[oldest]
                self._release_session(user, oldest)
                self._session_file(user, oldest).unlink(missing_ok=True)
        return SessionState(state="over" if session.reason else "live")

    def check_owner(self, user: str, session: str) -> None:
        """Raise NotFoundError for another user's session."""
        if self._owners.get(session, user) != user:
            raise errors.NotFoundError(
                f"there is no session {session}", hint="create_session returns a session's id"
            )

    def check_open(self, user: str, session: str) -> None:
        """Raise SessionOverError for a finished session."""
        record = self._sessions.get(user, {}).get(session)
        if record is not None and record.reason:
            raise errors.SessionOverError(
                f"session {session} is over: {record.reason}",
                hint="begin another one; what was saved of it can be loaded there",
            )

    def is_over(self, user: str, session: str, used: float) -> bool:
        """Return whether a session was finished, or had no message for a day.

        `used` is when one of its models was last used, by the monotonic clock; 0: never by this
        trainer.
        """
        record = self._sessions.get(user, {}).get(session)
        if record is not None and record.reason:
            return True
        seen = self._loaded if record is None else record.seen
        is_idle = not used or time.monotonic() - used > ABANDONED_S
        return is_idle and time.time() - seen > ABANDONED_S

    def list_sessions(self, user: str, request: ListSessions) -> SessionPage:
        """Return a page of a user's sessions, or one, with their models, newest first."""
        with self._lock:
            records = list(self._sessions.get(user, {}).values())
        listed = [item for item in records if request.session in ("", item.session)]
        listed.sort(key=lambda item: item.time, reverse=True)
        page = [
            item.model_copy(update={"models": self.models_of(user, item.session)})
            for item in listed[request.offset : request.offset + request.limit]
        ]
        return SessionPage(sessions=page, total=len(listed))

    def _add_session(self, user: str, session: TinkerSession) -> None:
        self._sessions.setdefault(user, {})[session.session] = session
        self._owners[session.session] = user

    def _release_session(self, user: str, session: str) -> None:
        """Forget the owner of a session of which nothing is left."""
        if session not in self._sessions.get(user, {}) and not self.models_of(user, session):
            self._owners.pop(session, None)

    def _session_file(self, user: str, session: str) -> Path:
        return self.folder / user / _SESSIONS / f"{session}.json"


def _new(
    model: TrainedModel, name: CheckpointName, seq: int, options: SaveOptions, place: Path
) -> StoredCheckpoint:
    assert model.info is not None
    at = options.time or time.time()
    ttl_s = options.ttl_s or (PASSING_S if options.passing else 0)
    return StoredCheckpoint(
        user=model.user,
        name=name,
        place=place,
        info=model.info.model_copy(update={"applied": seq}),
        seq=seq,
        time=at,
        expires=at + ttl_s if ttl_s else 0.0,
        passing=options.passing,
        user_metadata=options.user_metadata,
    )


def _run(user: str, info: ModelInfo, metadata: Metadata | None, at: float) -> TrainingRun:
    return TrainingRun(
        model=info.model,
        base=info.base,
        rank=info.rank,
        owner=user,
        time=at,
        user_metadata=metadata,
    )


def _read_run(file: Path, user: str) -> TrainingRun | None:
    try:
        value = read_record(file) or {}
        info = ModelInfo.from_map(value["info"])
        ModelName.parse(info.model)
        return _run(user, info, value["user_metadata"], float(value["time"]))
    except (KeyError, TypeError, ValueError, errors.TinkermqError):
        return None


def _read_session(file: Path) -> TinkerSession | None:
    try:
        return TinkerSession.from_map(read_record(file))
    except errors.MessageError:
        return None


def _with_event(session: TinkerSession, event: TellSession) -> TinkerSession:
    update: dict[str, Any] = {"seen": time.time()}
    if event.event == "begin":
        names = ("user_metadata", "display_name", "sdk_version")
        update |= {name: getattr(event, name) for name in names}
    elif event.event == "finish" and not session.reason:
        update["reason"] = event.reason or "finished"
    elif event.event == "sampler" and event.sampler not in session.samplers:
        update["samplers"] = [*session.samplers, event.sampler][-MAX_SAMPLERS:]
    return session.model_copy(update=update)


def _unknown_run(model: str) -> errors.NotFoundError:
    return errors.NotFoundError(
        f"there is no training run {model}", hint="list_training_runs lists them"
    )
