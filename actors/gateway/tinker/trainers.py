"""The Tinker trainers of a pool: which there are, which has a model, and requests to them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from cachetools import FIFOCache

from ....broker.calls import SchedulerCalls
from ....broker.client.connection import Broker, Msg
from ....broker.client.nats_internals import ERROR_CODE, NO_RESPONDERS, header, status_of
from ....broker.client.parts import Room, SharedInbox, ask_parts
from ....broker.client.rpc import error_of
from ....schemas.infer import CancelInference, ChatRequest, CompletionRequest, InferPart
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
from ....schemas.tinker.names import CheckpointName, ModelName, run_in
from ....schemas.tinker.operation import (
    AboutCheckpoint,
    AboutModel,
    AboutSessions,
    AwaitResult,
    ModelCurves,
    ModelInfo,
    ModelOperation,
    OperationResult,
    OperationTaken,
    SessionsShown,
    TrainerOffer,
)
from ....schemas.tinker.sampling import AwaitSample, SampleRequest, SamplerName, SampleTaken
from ....schemas.wire import errors
from ....schemas.wire.message import Message
from ....schemas.wire.subjects import JobScope, rpc, tinker_inbox
from ..sessions import Visitor

R = TypeVar("R", bound=Message)
_KEPT_S = 2.0
_MAX_KNOWN = 10_000
_TIMEOUT_S = 30.0
_PART_S, _LATE_S = 3.0, 4.0
"""Of a wait for a result, what is asked for at once, and how late its answer may be."""
_SUBMITS, _SUBMIT_S = 3, 12.0
"""How often an operation is handed over, and how long each may take."""


class Trainers:
    """The trainers of the pool, as users see them; which model is where never changes."""

    def __init__(self) -> None:
        """Know of none yet."""
        self._offers: tuple[float, list[TrainerOffer]] = (float("-inf"), [])
        self._jobs: FIFOCache[tuple[str, str], str] = FIFOCache(_MAX_KNOWN)
        self._replies: WeakKeyDictionary[Broker, _Replies] = WeakKeyDictionary()

    async def offers(self, broker: Broker) -> list[TrainerOffer]:
        """Return the base models of the pool, asked anew every few seconds.

        Whether their trainers run at this moment is not said: one that was killed comes back.
        """
        asked, offers = self._offers
        if time.monotonic() - asked < _KEPT_S and offers:
            return offers
        offers = await SchedulerCalls(broker).trainers()
        self._offers = (time.monotonic(), offers)
        return offers

    async def job_of_base(self, broker: Broker, base: str) -> str:
        """Return the job that trains on a base model; raises NotFoundError."""
        offers = await self.offers(broker)
        for offer in offers:
            if offer.base == base:
                return offer.job
        there = ", ".join(offer.base for offer in offers) or "none"
        raise errors.NotFoundError(
            f"there is no base model {base[:200]!r} here", hint=f"this pool offers {there}"
        )

    async def job_of_model(self, broker: Broker, model: ModelName) -> str:
        """Return the job that has a user's model; raises NotFoundError, NobodyAnswersError."""
        if (known := self._jobs.get((broker.user, str(model)))) is not None:
            return known
        away: errors.NobodyAnswersError | None = None
        for offer in await self.offers(broker):
            try:
                await self.info(broker, model, offer.job)
            except errors.NobodyAnswersError as error:  # it may have the model
                away = error
            except errors.NotFoundError:
                continue
            else:
                self.remember(broker.user, model, offer.job)
                return offer.job
        if away is not None:
            raise away
        raise errors.NotFoundError(
            f"there is no model {model}", hint="create_model returns a model's id"
        )

    def remember(self, user: str, model: ModelName, job: str) -> None:
        """Note which job has a user's model."""
        self._jobs[user, str(model)] = job

    async def info(self, broker: Broker, model: ModelName, job: str) -> ModelInfo:
        """Return a trainer's information about a model; raises NotFoundError."""
        return await self.ask(broker, job, "info", AboutModel(model=str(model)), ModelInfo)

    async def source(self, broker: Broker, path: str) -> CheckpointName:
        """Return the name of a checkpoint; one of a run (`tinker://RUN@STEP`) is taken over."""
        if run_in(path) is not None:
            await SchedulerCalls(broker).take_checkpoint(path)
        return CheckpointName.parse(path)

    async def checkpoint(self, broker: Broker, name: CheckpointName) -> ModelInfo:
        """Return what a checkpoint holds that a user may read; raises NotFoundError."""
        job = await self.job_of_checkpoint(broker, name)
        request = AboutCheckpoint(path=str(name))
        return await self.ask(broker, job, "checkpoint", request, ModelInfo)

    async def job_of_checkpoint(self, broker: Broker, name: CheckpointName) -> str:
        """Return the job that has a checkpoint which a user may read.

        Raises NotFoundError, NobodyAnswersError.
        """
        if (known := self._jobs.get((broker.user, str(name.model)))) is not None:
            return known
        request = AboutCheckpoint(path=str(name))
        job, _ = await self.first(broker, "checkpoint", request, ModelInfo)
        self.remember(broker.user, name.model, job)
        return job

    async def first(
        self, broker: Broker, method: str, request: Message, reply: type[R]
    ) -> tuple[str, R]:
        """Return the job of the trainer that has what is asked for, and its answer.

        Raises what is most telling where none has it: CheckpointGoneError, NobodyAnswersError,
        NotFoundError.
        """
        missed: errors.NotFoundError | None = None
        away: errors.NobodyAnswersError | None = None
        for offer in await self.offers(broker):
            try:
                return offer.job, await self.ask(broker, offer.job, method, request, reply)
            except errors.NobodyAnswersError as error:
                away = error
            except errors.CheckpointGoneError:
                raise  # only the trainer that had it reports that
            except errors.NotFoundError as error:
                missed = error
        raise (
            away
            or missed
            or errors.NotFoundError(
                "no Tinker service runs in this pool",
                hint="start the one that has saved it: `tinkermq tinker up --model NAME=FOLDER`",
            )
        )

    async def sessions(self, broker: Broker, job: str) -> SessionsShown:
        """Return a user's models on one base, and each user's waiting operations there."""
        return await self.ask(broker, job, "sessions", AboutSessions(), SessionsShown, 5.0)

    async def curves(self, broker: Broker, job: str, model: str) -> ModelCurves:
        """Return the curves of a user's model; raises NotFoundError."""
        return await self.ask(broker, job, "curves", AboutModel(model=model), ModelCurves)

    async def submit(self, broker: Broker, job: str, operation: ModelOperation) -> OperationTaken:
        """Hand an operation to a trainer; returns once it is in the log.

        Handed over again where no answer comes, since a trainer may die with it; its first form
        counts.
        """
        for _ in range(_SUBMITS - 1):
            with suppress(errors.DeadlineError):
                return await self.ask(broker, job, "submit", operation, OperationTaken, _SUBMIT_S)
        return await self.ask(broker, job, "submit", operation, OperationTaken, _SUBMIT_S)

    async def result(self, broker: Broker, job: str, request: AwaitResult) -> OperationResult:
        """Return the result of an operation, or what it waits for."""

        async def ask(wait_s: float) -> OperationResult:
            part = request.model_copy(update={"wait_s": wait_s})
            late_s = wait_s + _LATE_S
            return await self.ask(broker, job, "result", part, OperationResult, late_s)

        return await _in_parts(ask, request.wait_s)

    async def sample(self, broker: Broker, job: str, request: SampleRequest) -> SampleTaken:
        """Hand a request to one of a job's samplers."""
        return await self.ask(broker, job, "sample", request, SampleTaken)

    async def sampled(
        self, broker: Broker, job: str, actor: str, request: AwaitSample
    ) -> OperationResult:
        """Return what a sampler has made of a request, or that it is not done."""

        async def ask(wait_s: float) -> OperationResult:
            part = request.model_copy(update={"wait_s": wait_s})
            method, late_s = f"sampled-{actor}", wait_s + _LATE_S
            return await self.ask(broker, job, method, part, OperationResult, late_s)

        return await _in_parts(ask, request.wait_s)

    def answer(
        self,
        broker: Broker,
        job: str,
        query: ChatRequest | CompletionRequest,
        room: Room | None = None,
    ) -> AsyncGenerator[InferPart, None]:
        """Have one of a job's samplers answer in parts; closing the generator cancels the work.

        Parts that wait for a slow reader take up `room`.
        """
        service, verb = f"tinker-{job}", "chat" if isinstance(query, ChatRequest) else "complete"
        return ask_parts(
            broker,
            rpc(broker.user, service, verb),
            query,
            InferPart,
            waiting_for=f"a sampler of the Tinker service {job}",
            cancel=(rpc(broker.user, service, "cancel"), CancelInference(request=query.request)),
            shared=self._replies_of(broker).inbox,
            room=room,
        )

    async def job_of_sampler(self, broker: Broker, name: SamplerName) -> str:
        """Return the job that samples for a session; raises NotFoundError."""
        if name.base is not None:
            return await self.job_of_base(broker, name.base)
        return await self.job_of_checkpoint(broker, name.checkpoint)

    async def ask(
        self,
        broker: Broker,
        job: str,
        method: str,
        request: Message,
        reply: type[R],
        timeout_s: float = _TIMEOUT_S,
    ) -> R:
        """Return a trainer's or sampler's reply to what a user asks.

        Raises what it raised, NobodyAnswersError, DeadlineError, MessageError.
        """
        JobScope(broker.user, job)  # a name that comes from a URL may be anything
        subject = rpc(broker.user, f"tinker-{job}", method)
        replies = self._replies_of(broker)
        return await replies.ask(subject, request, reply, job=job, timeout_s=timeout_s)

    def _replies_of(self, broker: Broker) -> "_Replies":
        if broker not in self._replies:
            self._replies[broker] = _Replies(broker)
        return self._replies[broker]


async def _in_parts(
    ask: Callable[[float], Awaitable[OperationResult]], wait_s: float
) -> OperationResult:
    """Wait for a result by short questions: one that an actor dies with costs only its own time.

    Raises DeadlineError where the last of them has no answer.
    """
    ends = time.monotonic() + wait_s
    while True:
        left_s = max(0.0, ends - time.monotonic())
        try:
            result = await ask(min(_PART_S, left_s))
        except errors.DeadlineError:
            if time.monotonic() >= ends:
                raise
        else:
            if result.state != "pending" or time.monotonic() >= ends:
                return result


class _Replies:
    """The one subscription of a visitor's connection to all trainers."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.inbox = SharedInbox(broker, tinker_inbox(broker.user))

    async def ask(
        self, subject: str, request: Message, reply: type[R], *, job: str, timeout_s: float
    ) -> R:
        """Return the reply of a job's trainer.

        Raises what it raised, NobodyAnswersError, DeadlineError, MessageError.
        """
        result: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        inbox = await self.inbox.new_subject(lambda message: _settle(result, message))
        try:
            await self._broker.send(subject, request.to_bytes(), reply=inbox)
            async with asyncio.timeout(timeout_s):
                message = await result
        except TimeoutError:
            raise errors.DeadlineError(
                f"the trainer of job {job} did not answer within {timeout_s:g} s",
                hint="see what it does: `tinkermq logs`",
            ) from None
        finally:
            self.inbox.forget(inbox)
        if status_of(message) == NO_RESPONDERS:
            raise errors.NobodyAnswersError(
                f"the trainer of job {job} is not there", hint="it starts again; see `tinkermq ps`"
            )
        if header(message, ERROR_CODE):
            raise error_of(message)
        return reply.from_bytes(message.data)


def _settle(future: "asyncio.Future[Msg]", message: Msg) -> None:
    if not future.done():
        future.set_result(message)


# Checkpoints, runs and sessions of a user; all trainers are asked where it is not known which one
# has them.

MAX_DEPTH = 20_000
"""How far into a list that several trainers have a page may lie."""


class _Timed(Protocol):
    @property
    def time(self) -> float: ...


I = TypeVar("I", bound=_Timed)  # noqa: E741  an item of a list
Part = Callable[[str, int, int], Awaitable[tuple[list[I], int]]]
"""Returns a part of one trainer's list: of a job, from an offset, so many; and how many it has."""


class TrainerRecords:
    """Checkpoints, runs and sessions of the users of all trainers."""

    def __init__(self, trainers: Trainers) -> None:
        """Ask `trainers`."""
        self._trainers = trainers

    async def checkpoints(
        self, visitor: Visitor, offset: int, limit: int
    ) -> tuple[list[TinkerCheckpoint], int]:
        """Return a part of the list of a user's checkpoints, newest first, and how many there are.

        Raises NobodyAnswersError while a trainer is away: its part would be missing.
        """

        async def of(job: str, start: int, most: int) -> tuple[list[TinkerCheckpoint], int]:
            request = ListCheckpoints(offset=start, limit=most)
            page = await self._ask(visitor, job, "checkpoints", request, CheckpointPage)
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
        result = list(page.checkpoints)
        while page.checkpoints and len(result) < page.total:
            request = ListCheckpoints(model=str(model), offset=len(result), limit=MAX_PAGE)
            page = await self._ask(visitor, job, "checkpoints", request, CheckpointPage)
            result += page.checkpoints
        return result

    async def change(self, visitor: Visitor, request: ChangeCheckpoint) -> TinkerCheckpoint:
        """Change an own checkpoint; raises NotFoundError, ConflictError."""
        return (await self._first(visitor, "change", request, TinkerCheckpoint))[1]

    async def export(self, visitor: Visitor, name: CheckpointName) -> tuple[str, CheckpointExport]:
        """Return the job that has a checkpoint, and a ticket for its files."""
        request = ExportCheckpoint(path=str(name))
        return await self._first(visitor, "export", request, CheckpointExport)

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
        request = ListRuns(model=str(model), limit=1)
        return (await self._first(visitor, "runs", request, RunPage))[1].runs[0]

    async def report_event(self, visitor: Visitor, event: TellSession) -> str:
        """Report a session to all trainers; return whether it is `live`, `over` or `unknown`.

        Raises NotFoundError for another user's, NobodyAnswersError when none answers.
        """
        offers = await self._trainers.offers(visitor.broker)
        requests = [self._report_session(visitor, offer.job, event) for offer in offers]
        states = [item for item in await asyncio.gather(*requests) if item is not None]
        if offers and not states:
            raise errors.NobodyAnswersError("no trainer answers at this moment", hint="try again")
        return next((item for item in ("over", "live") if item in states), "unknown")

    async def _report_session(self, visitor: Visitor, job: str, event: TellSession) -> str | None:
        try:
            return (await self._ask(visitor, job, "session", event, SessionState)).state
        except (
            errors.NobodyAnswersError,
            errors.DeadlineError,
        ):  # it learns of it by what is made in it
            return None

    async def sessions(self, visitor: Visitor, offset: int, limit: int) -> list[TinkerSession]:
        """Return a part of the list of a user's sessions, newest first, each once."""
        collected: dict[str, TinkerSession] = {}
        for job in await self._jobs(visitor):
            wanted = min(offset + limit, MAX_DEPTH)
            for start in range(0, wanted, MAX_PAGE):
                request = ListSessions(offset=start, limit=min(MAX_PAGE, wanted - start))
                page = await self._ask(visitor, job, "session-list", request, SessionPage)
                collected |= {
                    session.session: _joined(collected.get(session.session), session)
                    for session in page.sessions
                }
                if len(page.sessions) < request.limit:
                    break
        newest = sorted(collected.values(), key=lambda one: one.time, reverse=True)
        return newest[offset : offset + limit]

    async def session(self, visitor: Visitor, session: str) -> TinkerSession:
        """Return a user's session with all its models; raises NotFoundError."""
        result: TinkerSession | None = None
        for job in await self._jobs(visitor):
            request = ListSessions(session=session, limit=1)
            for item in (
                await self._ask(visitor, job, "session-list", request, SessionPage)
            ).sessions:
                result = _joined(result, item)
        if result is None:
            raise errors.NotFoundError(
                f"there is no session {session}", hint="list_sessions lists them"
            )
        return result

    async def _ask(
        self, visitor: Visitor, job: str, method: str, request: Message, reply: type[R]
    ) -> R:
        return await self._trainers.ask(visitor.broker, job, method, request, reply)

    async def _jobs(self, visitor: Visitor) -> list[str]:
        return [offer.job for offer in await self._trainers.offers(visitor.broker)]

    async def _first(
        self, visitor: Visitor, method: str, request: Message, reply: type[R]
    ) -> tuple[str, R]:
        return await self._trainers.first(visitor.broker, method, request, reply)

    async def _merged(
        self, visitor: Visitor, part: Part[I], offset: int, limit: int
    ) -> tuple[list[I], int]:
        """Return a part of the list that all trainers have together."""
        jobs = await self._jobs(visitor)
        if len(jobs) == 1:
            return await part(jobs[0], offset, min(limit, MAX_PAGE))
        if offset + limit > MAX_DEPTH:
            raise errors.MessageError(
                f"offset={offset} is too far into the list",
                hint=f"the first {MAX_DEPTH:,} are listed",
            )
        collected: list[I] = []
        total = 0
        for job in jobs:
            start, count = 0, 1
            while start < min(count, offset + limit) or start == 0:
                some, count = await part(job, start, MAX_PAGE)
                collected += some
                start += MAX_PAGE
            total += count
        collected.sort(key=lambda one: one.time, reverse=True)
        return collected[offset : offset + limit], total


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
