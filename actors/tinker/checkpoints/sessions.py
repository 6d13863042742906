"""The sessions of a trainer's users: whose they are, what was said of them, whether they go on."""

import threading
import time
from pathlib import Path
from typing import Any

from ....schemas.tinker.checkpoints import (
    ListSessions,
    SessionPage,
    SessionState,
    TellSession,
    TinkerSession,
)
from ....schemas.tinker.names import session_name
from ....schemas.wire.errors import MessageError, NotFoundError, SessionOverError
from .records import read_record, write_record
from .runs import TrainingRuns

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
