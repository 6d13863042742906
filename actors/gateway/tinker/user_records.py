"""What the trainers of the pool keep of a user, asked of all of them where nobody knows of whom."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from ....schemas.tinker.checkpoints import (
    MAX_PAGE,
    ChangeCheckpoint,
    CheckpointExport,
    CheckpointPage,
    ExportCheckpoint,
    ListCheckpoints,
    ListRuns,
    ListSessions,
    RunPage,
    SessionPage,
    SessionState,
    TellSession,
    TinkerCheckpoint,
    TinkerSession,
    TrainingRun,
)
from ....schemas.tinker.names import CheckpointName, ModelName
from ....schemas.wire.errors import (
    DeadlineError,
    MessageError,
    NobodyAnswersError,
    NotFoundError,
)
from ....schemas.wire.message import Message
from ..sessions import Visitor
from .trainers import Trainers

R = TypeVar("R", bound=Message)
MAX_DEPTH = 20_000
"""How far into a list that several trainers have a page may lie."""


class _Timed(Protocol):
    @property
    def time(self) -> float: ...


I = TypeVar("I", bound=_Timed)  # noqa: E741  an item of a list
Part = Callable[[str, int, int], Awaitable[tuple[list[I], int]]]
"""Returns a part of one trainer's list: of a job, from an offset, so many; and how many it has."""


class KeptByTrainers:
    """Checkpoints, runs and sessions of the users of all trainers."""

    def __init__(self, trainers: Trainers) -> None:
        """Ask `trainers`."""
        self._trainers = trainers

    # -- checkpoints -------------------------------------------------------------------------------

    async def checkpoints(
        self, visitor: Visitor, offset: int, limit: int
    ) -> tuple[list[TinkerCheckpoint], int]:
        """Return a part of the list of a user's checkpoints, newest first, and how many there are.

        Raises NobodyAnswersError while a trainer is away: its part would be missing.
        """

        async def of(job: str, start: int, most: int) -> tuple[list[TinkerCheckpoint], int]:
            asked = ListCheckpoints(offset=start, limit=most)
            page = await self._ask(visitor, job, "checkpoints", asked, CheckpointPage)
            return page.checkpoints, page.total

        return await self._merged(visitor, of, offset, limit)

    async def checkpoints_of(self, visitor: Visitor, model: ModelName) -> list[TinkerCheckpoint]:
        """Return all checkpoints of a user's run, newest first; raises NotFoundError."""
        job, page = await self._first(
            visitor,
            "checkpoints",
            ListCheckpoints(model=str(model), limit=MAX_PAGE),
            CheckpointPage,
        )
        found = list(page.checkpoints)
        while page.checkpoints and len(found) < page.total:
            asked = ListCheckpoints(model=str(model), offset=len(found), limit=MAX_PAGE)
            page = await self._ask(visitor, job, "checkpoints", asked, CheckpointPage)
            found += page.checkpoints
        return found

    async def change(self, visitor: Visitor, asked: ChangeCheckpoint) -> TinkerCheckpoint:
        """Change an own checkpoint; raises NotFoundError, ConflictError."""
        return (await self._first(visitor, "change", asked, TinkerCheckpoint))[1]

    async def export(self, visitor: Visitor, name: CheckpointName) -> tuple[str, CheckpointExport]:
        """Return the job that has a checkpoint, and a ticket for its files."""
        asked = ExportCheckpoint(path=str(name))
        return await self._first(visitor, "export", asked, CheckpointExport)

    # -- runs --------------------------------------------------------------------------------------

    async def runs(
        self, visitor: Visitor, offset: int, limit: int
    ) -> tuple[list[TrainingRun], int]:
        """Return a part of the list of a user's runs, the one used last first."""

        async def of(job: str, start: int, most: int) -> tuple[list[TrainingRun], int]:
            page = await self._ask(
                visitor, job, "runs", ListRuns(offset=start, limit=most), RunPage
            )
            return page.runs, page.total

        return await self._merged(visitor, of, offset, limit)

    async def run(self, visitor: Visitor, model: ModelName) -> TrainingRun:
        """Return a user's run; raises NotFoundError."""
        asked = ListRuns(model=str(model), limit=1)
        return (await self._first(visitor, "runs", asked, RunPage))[1].runs[0]

    # -- sessions ----------------------------------------------------------------------------------

    async def tell(self, visitor: Visitor, told: TellSession) -> str:
        """Tell all trainers of a session; return whether it is `live`, `over` or `unknown`.

        Raises NotFoundError for one of somebody else, NobodyAnswersError when none answers.
        """
        offers = await self._trainers.offers(visitor.broker)
        asked = [self._told(visitor, offer.job, told) for offer in offers]
        states = [one for one in await asyncio.gather(*asked) if one is not None]
        if offers and not states:
            raise NobodyAnswersError("no trainer answers at this moment", hint="try again")
        return next((one for one in ("over", "live") if one in states), "unknown")

    async def _told(self, visitor: Visitor, job: str, told: TellSession) -> str | None:
        try:
            return (await self._ask(visitor, job, "session", told, SessionState)).state
        except (NobodyAnswersError, DeadlineError):  # it learns of it by what is made in it
            return None

    async def sessions(self, visitor: Visitor, offset: int, limit: int) -> list[TinkerSession]:
        """Return a part of the list of a user's sessions, newest first, each once."""
        found: dict[str, TinkerSession] = {}
        for job in await self._jobs(visitor):
            wanted = min(offset + limit, MAX_DEPTH)
            for start in range(0, wanted, MAX_PAGE):
                asked = ListSessions(offset=start, limit=min(MAX_PAGE, wanted - start))
                page = await self._ask(visitor, job, "session-list", asked, SessionPage)
                found |= {
                    one.session: _joined(found.get(one.session), one) for one in page.sessions
                }
                if len(page.sessions) < asked.limit:
                    break
        newest = sorted(found.values(), key=lambda one: one.time, reverse=True)
        return newest[offset : offset + limit]

    async def session(self, visitor: Visitor, session: str) -> TinkerSession:
        """Return a user's session with all its models; raises NotFoundError."""
        found: TinkerSession | None = None
        for job in await self._jobs(visitor):
            asked = ListSessions(session=session, limit=1)
            for one in (await self._ask(visitor, job, "session-list", asked, SessionPage)).sessions:
                found = _joined(found, one)
        if found is None:
            raise NotFoundError(
                f"there is no session {session}", hint="list_sessions tells which there are"
            )
        return found

    # -- asking ------------------------------------------------------------------------------------

    async def _ask(
        self, visitor: Visitor, job: str, method: str, asked: Message, reply: type[R]
    ) -> R:
        return await self._trainers.ask(visitor.user, visitor.broker, job, method, asked, reply)

    async def _jobs(self, visitor: Visitor) -> list[str]:
        return [offer.job for offer in await self._trainers.offers(visitor.broker)]

    async def _first(
        self, visitor: Visitor, method: str, asked: Message, reply: type[R]
    ) -> tuple[str, R]:
        return await self._trainers.first(visitor.user, visitor.broker, method, asked, reply)

    async def _merged(
        self, visitor: Visitor, part: Part[I], offset: int, limit: int
    ) -> tuple[list[I], int]:
        """Return a part of the list that all trainers have together."""
        jobs = await self._jobs(visitor)
        if len(jobs) == 1:
            return await part(jobs[0], offset, min(limit, MAX_PAGE))
        if offset + limit > MAX_DEPTH:
            raise MessageError(
                f"offset={offset} is too far into the list",
                hint=f"the first {MAX_DEPTH:,} are told",
            )
        found: list[I] = []
        total = 0
        for job in jobs:
            start, count = 0, 1
            while start < min(count, offset + limit) or start == 0:
                some, count = await part(job, start, MAX_PAGE)
                found += some
                start += MAX_PAGE
            total += count
        found.sort(key=lambda one: one.time, reverse=True)
        return found[offset : offset + limit], total


def _joined(known: TinkerSession | None, other: TinkerSession) -> TinkerSession:
    """Return what two trainers know of one session."""
    if known is None:
        return other
    first, second = sorted((known, other), key=lambda one: one.time)
    return first.model_copy(
        update={
            "models": sorted({*first.models, *second.models}),
            "samplers": [*first.samplers, *(o for o in second.samplers if o not in first.samplers)],
            "user_metadata": first.user_metadata or second.user_metadata,
            "display_name": first.display_name or second.display_name,
            "seen": max(first.seen, second.seen),
            "reason": first.reason or second.reason,
        }
    )
