"""Find the Tinker trainers of a pool and the one that has a model, and send requests to them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar
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
from ....schemas.tinker.names import CheckpointName, ModelName
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

R = TypeVar("R", bound=Message)
_OFFERS_S = 2.0
"""Seconds for which a list of trainers is used."""
_MAX_MODELS = 10_000
"""Maximum number of models whose trainers are cached."""
_TIMEOUT_S = 30.0
_PART_S, _LATE_S = 3.0, 4.0
"""Waits for a result: duration of one request, and additional time for its reply."""
_SUBMITS, _SUBMIT_S = 3, 12.0
"""Maximum number of submissions of an operation without a reply, and the timeout of each."""


class Trainers:
    """The trainers of the pool; a model always stays with the same trainer."""

    def __init__(self) -> None:
        """Know no trainer yet."""
        self._offers: tuple[float, list[TrainerOffer]] = (float("-inf"), [])
        self._jobs: FIFOCache[tuple[str, str], str] = FIFOCache(_MAX_MODELS)
        self._replies: WeakKeyDictionary[Broker, _Replies] = WeakKeyDictionary()

    async def offers(self, broker: Broker) -> list[TrainerOffer]:
        """Return the base models of the pool, at most some seconds old.

        Some trainers may be missing: a killed one is restarted.
        """
        requested_at, offers = self._offers
        if time.monotonic() - requested_at < _OFFERS_S and offers:
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
        offered = ", ".join(offer.base for offer in offers) or "none"
        raise errors.NotFoundError(
            f"there is no base model {base[:200]!r} here", hint=f"this pool offers {offered}"
        )

    async def job_of_model(self, broker: Broker, model: ModelName) -> str:
        """Return the job that has a user's model; raises NotFoundError, NobodyAnswersError."""
        return await self._job_with(broker, model, "info", AboutModel(model=str(model)))

    async def job_of_checkpoint(self, broker: Broker, name: CheckpointName) -> str:
        """Return the job that has a checkpoint which a user may read.

        Raises NotFoundError, NobodyAnswersError.
        """
        request = AboutCheckpoint(path=str(name))
        return await self._job_with(broker, name.model, "checkpoint", request)

    async def job_of_sampler(self, broker: Broker, name: SamplerName) -> str:
        """Return the job that samples for a session; raises NotFoundError."""
        if name.base is not None:
            return await self.job_of_base(broker, name.base)
        return await self.job_of_checkpoint(broker, name.checkpoint)

    async def _job_with(
        self, broker: Broker, model: ModelName, method: str, request: Message
    ) -> str:
        if (job := self._jobs.get((broker.user, str(model)))) is None:
            job, _ = await self.first(broker, method, request, ModelInfo)
            self.remember(broker.user, model, job)
        return job

    def remember(self, user: str, model: ModelName, job: str) -> None:
        """Remember the job that has a user's model."""
        self._jobs[user, str(model)] = job

    async def info(self, broker: Broker, model: ModelName, job: str) -> ModelInfo:
        """Return a trainer's information about a model; raises NotFoundError."""
        return await self.ask(broker, job, "info", AboutModel(model=str(model)), ModelInfo)

    async def checkpoint(self, broker: Broker, name: CheckpointName) -> ModelInfo:
        """Return information about a checkpoint that a user may read; raises NotFoundError."""
        job = await self.job_of_checkpoint(broker, name)
        return await self.ask(broker, job, "checkpoint", AboutCheckpoint(path=str(name)), ModelInfo)

    async def sessions(self, broker: Broker, job: str) -> SessionsShown:
        """Return a user's models on one base, and each user's waiting operations there."""
        return await self.ask(broker, job, "sessions", AboutSessions(), SessionsShown, 5.0)

    async def curves(self, broker: Broker, job: str, model: str) -> ModelCurves:
        """Return the curves of a user's model; raises NotFoundError."""
        return await self.ask(broker, job, "curves", AboutModel(model=model), ModelCurves)

    async def submit(self, broker: Broker, job: str, operation: ModelOperation) -> OperationTaken:
        """Submit an operation to a trainer; returns once it is in the log.

        Without a reply it is submitted again, since its trainer may have died; the log keeps the
        first.
        """
        for _ in range(_SUBMITS - 1):
            with suppress(errors.DeadlineError):
                return await self.ask(broker, job, "submit", operation, OperationTaken, _SUBMIT_S)
        return await self.ask(broker, job, "submit", operation, OperationTaken, _SUBMIT_S)

    async def result(self, broker: Broker, job: str, request: AwaitResult) -> OperationResult:
        """Return the result of an operation, or the reason why it waits."""
        return await self._await(broker, job, "result", request)

    async def sample(self, broker: Broker, job: str, request: SampleRequest) -> SampleTaken:
        """Submit a request to one of a job's samplers."""
        return await self.ask(broker, job, "sample", request, SampleTaken)

    async def sampled(
        self, broker: Broker, job: str, actor: str, request: AwaitSample
    ) -> OperationResult:
        """Return a sampler's result of a request, or that it is pending."""
        return await self._await(broker, job, f"sampled-{actor}", request)

    async def _await(
        self, broker: Broker, job: str, method: str, request: AwaitResult | AwaitSample
    ) -> OperationResult:
        """Wait for a result by short requests, so that an actor's death costs only one of them.

        Raises DeadlineError if the last one has no reply.
        """
        ends = time.monotonic() + request.wait_s
        while True:
            wait_s = min(_PART_S, max(0.0, ends - time.monotonic()))
            part, timeout_s = request.model_copy(update={"wait_s": wait_s}), wait_s + _LATE_S
            try:
                result = await self.ask(broker, job, method, part, OperationResult, timeout_s)
            except errors.DeadlineError:
                if time.monotonic() >= ends:
                    raise
            else:
                if result.state != "pending" or time.monotonic() >= ends:
                    return result

    def answer(
        self,
        broker: Broker,
        job: str,
        query: ChatRequest | CompletionRequest,
        room: Room | None = None,
    ) -> AsyncGenerator[InferPart, None]:
        """Have one of a job's samplers answer in parts; closing the generator cancels the work.

        Parts that a slow reader has not read count against `room`.
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

    async def first(
        self, broker: Broker, method: str, request: Message, reply: type[R]
    ) -> tuple[str, R]:
        """Return the job of the trainer that has the object of a request, and its reply.

        If none has it, raises CheckpointGoneError, NobodyAnswersError or NotFoundError: the first
        of these that a trainer caused.
        """
        missing: errors.NotFoundError | None = None
        away: errors.NobodyAnswersError | None = None
        for offer in await self.offers(broker):
            try:
                return offer.job, await self.ask(broker, offer.job, method, request, reply)
            except errors.NobodyAnswersError as error:  # this trainer may have the object
                away = error
            except errors.CheckpointGoneError:
                raise  # only the trainer that had the checkpoint raises this error
            except errors.NotFoundError as error:
                missing = error
        raise (
            away
            or missing
            or errors.NotFoundError(
                "no Tinker service runs in this pool",
                hint="start the one that has saved it: `tinkermq tinker up --model NAME=FOLDER`",
            )
        )

    async def ask(
        self,
        broker: Broker,
        job: str,
        method: str,
        request: Message,
        reply: type[R],
        timeout_s: float = _TIMEOUT_S,
    ) -> R:
        """Return the reply of a trainer or sampler to a user's request.

        Raises the error in the reply, NobodyAnswersError, DeadlineError, MessageError.
        """
        JobScope(broker.user, job)  # checks a name, which may come from a URL
        subject = rpc(broker.user, f"tinker-{job}", method)
        replies = self._replies_of(broker)
        return await replies.ask(subject, request, reply, job=job, timeout_s=timeout_s)

    def _replies_of(self, broker: Broker) -> "_Replies":
        if broker not in self._replies:
            self._replies[broker] = _Replies(broker)
        return self._replies[broker]


class _Replies:
    """The only subscription of a visitor's connection for the replies of all trainers."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.inbox = SharedInbox(broker, tinker_inbox(broker.user))

    async def ask(
        self, subject: str, request: Message, reply: type[R], *, job: str, timeout_s: float
    ) -> R:
        """Return the reply of a job's trainer; raises as `Trainers.ask`."""
        result: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        def settle(message: Msg) -> None:
            if not result.done():
                result.set_result(message)

        inbox = await self.inbox.new_subject(settle)
        try:
            await self._broker.send(subject, request.to_bytes(), reply=inbox)
            async with asyncio.timeout(timeout_s):
                message = await result
        except TimeoutError:
            raise errors.DeadlineError(
                f"the trainer of job {job} did not answer within {timeout_s:g} s",
                hint="see its log: `tinkermq logs`",
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


# -- lists of all trainers -------------------------------------------------------------------------

MAX_DEPTH = 20_000
"""Largest offset plus limit of a page in a list of several trainers."""


I = TypeVar("I", TinkerCheckpoint, TrainingRun)  # noqa: E741  an item of a list
Page = Callable[[str, int, int], Awaitable[tuple[list[I], int]]]
"""Returns a page of one trainer's list, by job, offset and limit, and the list's length."""


class TrainerRecords:
    """Checkpoints, runs and sessions of users, of all trainers together."""

    def __init__(self, trainers: Trainers) -> None:
        """Read the records of `trainers`."""
        self._trainers = trainers

    async def checkpoints(
        self, broker: Broker, offset: int, limit: int
    ) -> tuple[list[TinkerCheckpoint], int]:
        """Return a page of a user's checkpoints, newest first, and their number.

        Raises NobodyAnswersError while a trainer is away, since its part would be missing.
        """

        async def page(job: str, start: int, most: int) -> tuple[list[TinkerCheckpoint], int]:
            request = ListCheckpoints(offset=start, limit=most)
            reply = await self._trainers.ask(broker, job, "checkpoints", request, CheckpointPage)
            return reply.checkpoints, reply.total

        return await self._merge(broker, page, offset, limit)

    async def checkpoints_of(self, broker: Broker, model: ModelName) -> list[TinkerCheckpoint]:
        """Return all checkpoints of a user's run, newest first; raises NotFoundError."""
        request = ListCheckpoints(model=str(model), limit=MAX_PAGE)
        first = self._trainers.first
        job, page = await first(broker, "checkpoints", request, CheckpointPage)
        result = list(page.checkpoints)
        while page.checkpoints and len(result) < page.total:
            request = request.model_copy(update={"offset": len(result)})
            page = await self._trainers.ask(broker, job, "checkpoints", request, CheckpointPage)
            result += page.checkpoints
        return result

    async def change(self, broker: Broker, request: ChangeCheckpoint) -> TinkerCheckpoint:
        """Change one of the user's own checkpoints; raises NotFoundError, ConflictError."""
        return (await self._trainers.first(broker, "change", request, TinkerCheckpoint))[1]

    async def export(self, broker: Broker, name: CheckpointName) -> tuple[str, CheckpointExport]:
        """Return the job that has a checkpoint, and a ticket for its files."""
        request = ExportCheckpoint(path=str(name))
        return await self._trainers.first(broker, "export", request, CheckpointExport)

    async def runs(self, broker: Broker, offset: int, limit: int) -> tuple[list[TrainingRun], int]:
        """Return a page of a user's runs, the last used first, and their number."""

        async def page(job: str, start: int, most: int) -> tuple[list[TrainingRun], int]:
            request = ListRuns(offset=start, limit=most)
            reply = await self._trainers.ask(broker, job, "runs", request, RunPage)
            return reply.runs, reply.total

        return await self._merge(broker, page, offset, limit)

    async def run(self, broker: Broker, model: ModelName) -> TrainingRun:
        """Return a user's run; raises NotFoundError."""
        request = ListRuns(model=str(model), limit=1)
        return (await self._trainers.first(broker, "runs", request, RunPage))[1].runs[0]

    async def report_event(self, broker: Broker, event: TellSession) -> str:
        """Report an event of a session to all trainers; return `live`, `over` or `unknown`.

        Raises NotFoundError for another user's session, NobodyAnswersError if no trainer answers.
        """
        offers = await self._trainers.offers(broker)
        reports = [self._report_to(broker, offer.job, event) for offer in offers]
        states = [state for state in await asyncio.gather(*reports) if state is not None]
        if offers and not states:
            raise errors.NobodyAnswersError("no trainer answers at this moment", hint="try again")
        return next((state for state in ("over", "live") if state in states), "unknown")

    async def _report_to(self, broker: Broker, job: str, event: TellSession) -> str | None:
        """Report an event to one trainer; None if it is away: it learns the session from models."""
        try:
            return (await self._trainers.ask(broker, job, "session", event, SessionState)).state
        except (errors.NobodyAnswersError, errors.DeadlineError):
            return None

    async def sessions(self, broker: Broker, offset: int, limit: int) -> list[TinkerSession]:
        """Return a page of a user's sessions, newest first, each once."""
        sessions: dict[str, TinkerSession] = {}
        num = min(offset + limit, MAX_DEPTH)
        for offer in await self._trainers.offers(broker):
            for start in range(0, num, MAX_PAGE):
                request = ListSessions(offset=start, limit=min(MAX_PAGE, num - start))
                page = await self._list_sessions(broker, offer.job, request)
                for session in page:
                    known = sessions.get(session.session)
                    sessions[session.session] = _merge_sessions(known, session)
                if len(page) < request.limit:
                    break
        newest = sorted(sessions.values(), key=lambda session: session.time, reverse=True)
        return newest[offset : offset + limit]

    async def session(self, broker: Broker, session: str) -> TinkerSession:
        """Return a user's session with all its models; raises NotFoundError."""
        result: TinkerSession | None = None
        request = ListSessions(session=session, limit=1)
        for offer in await self._trainers.offers(broker):
            for part in await self._list_sessions(broker, offer.job, request):
                result = _merge_sessions(result, part)
        if result is None:
            raise errors.NotFoundError(
                f"there is no session {session}", hint="list_sessions lists them"
            )
        return result

    async def _list_sessions(
        self, broker: Broker, job: str, request: ListSessions
    ) -> list[TinkerSession]:
        page = await self._trainers.ask(broker, job, "session-list", request, SessionPage)
        return page.sessions

    async def _merge(
        self, broker: Broker, page: Page[I], offset: int, limit: int
    ) -> tuple[list[I], int]:
        """Return a page of the list that all trainers have together, and its length."""
        jobs = [offer.job for offer in await self._trainers.offers(broker)]
        if len(jobs) == 1:
            return await page(jobs[0], offset, min(limit, MAX_PAGE))
        if offset + limit > MAX_DEPTH:
            raise errors.MessageError(
                f"offset={offset} is too far into the list",
                hint=f"the first {MAX_DEPTH:,} are listed",
            )
        items: list[I] = []
        total = 0
        for job in jobs:
            start, count = 0, 1
            while start < min(count, offset + limit) or start == 0:
                part, count = await page(job, start, MAX_PAGE)
                items += part
                start += MAX_PAGE
            total += count
        items.sort(key=lambda item: item.time, reverse=True)
        return items[offset : offset + limit], total


def _merge_sessions(known: TinkerSession | None, other: TinkerSession) -> TinkerSession:
    """Return one session from the records of two trainers."""
    if known is None:
        return other
    first, second = sorted((known, other), key=lambda session: session.time)
    samplers = [*first.samplers, *(id_ for id_ in second.samplers if id_ not in first.samplers)]
    return first.model_copy(
        update={
            "models": sorted({*first.models, *second.models}),
            "samplers": samplers,
            "user_metadata": first.user_metadata or second.user_metadata,
            "display_name": first.display_name or second.display_name,
            "seen": max(first.seen, second.seen),
            "reason": first.reason or second.reason,
        }
    )
