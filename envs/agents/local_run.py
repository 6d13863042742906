"""Run a job's program on this machine, with the caller's model in place of the pool's."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...broker.client.connection import Broker
from ...broker.client.parts import PartsService, Tell
from ...broker.client.rpc import Service
from ...schemas.agent import CallPart, CallRequest, CancelCall
from ...schemas.config.job import JobConfig
from ...schemas.generation import Delta
from ...schemas.model_apis.canonical import (
    ModelMessage,
    call_name,
    canonical_history,
    parse_reply,
)
from ...schemas.wire.errors import ConfigError, DataError, NotFoundError, TinkermqError
from ...schemas.wire.subjects import JobScope
from ..data import HostData
from ..game import StepResult
from ..running.episodes import Opening
from .call_selection import digest_of
from .episode import EpisodeLimit, ProgramEpisode
from .programs.runner import ProgramRunner
from .proxy.proxy import ModelProxy

SCOPE = JobScope("local", "agent-check")
MAX_CALLS = 64
"""Bound on answered calls, unless the job allows fewer."""
_PIECE_CHARACTERS = 8
"""Characters of a streamed answer in one part; each is a token."""


@dataclass(eq=False)
class LocalCall:
    """One call of the model by the program."""

    number: int
    """Its index in the order of the calls."""
    request: CallRequest
    history: Sequence[ModelMessage]
    """All its messages."""
    parent: "LocalAnswer | None"
    """The answer that it continues; None: a root."""
    num_seen: int
    """Number of answers before it."""
    answers: "Sequence[LocalAnswer]" = ()
    """Its answers; empty if it was refused."""
    refusal: str = ""
    """Code of its error; empty: none."""

    @property
    def new_messages(self) -> Sequence[ModelMessage]:
        """The messages of its history after the answer that it continues."""
        return self.history[0 if self.parent is None else len(self.parent.path) :]


@dataclass(eq=False, frozen=True)
class LocalAnswer:
    """One answer to a call: an `AnsweredCall` of `which_calls`."""

    call: LocalCall
    number: int
    """Its index among all answers of the episode."""
    reply: ModelMessage
    delivered: bool = True

    @property
    def path(self) -> list[ModelMessage]:
        """The history of a call that continues it."""
        return [*self.call.history, self.reply]

    @property
    def parent(self) -> "LocalAnswer | None":
        """The answer before it on its path."""
        return self.call.parent

    @property
    def root(self) -> "LocalAnswer":
        """The first answer of its path."""
        return self if self.parent is None else self.parent.root

    @property
    def origin(self) -> "LocalAnswer":
        """The first answer of its history."""
        return self.root

    @property
    def given(self) -> Sequence[ModelMessage]:
        """The messages that are new in its prompt."""
        return self.call.new_messages

    @property
    def context(self) -> bytes:
        """Digest of its tools."""
        return digest_of(self.call.request.tools)

    @property
    def has_tools(self) -> bool:
        """Whether it may call tools."""
        return bool(self.call.request.tools)

    @property
    def num_seen(self) -> int:
        """Number of answers before its call."""
        return self.call.num_seen

    @property
    def num_generated(self) -> int:
        """Characters of the answer, in place of tokens."""
        return max(1, len(self.reply.text))

    @property
    def digest(self) -> bytes:
        """Number of the call: of equal conversations the earliest is the main one."""
        return (-self.number).to_bytes(8, signed=True)


Speak: TypeAlias = Callable[[LocalCall], Awaitable[str]]
"""Returns an answer, with tool calls as models write them; may raise a refusal."""


def num_common(history: Sequence[ModelMessage], path: Sequence[ModelMessage]) -> int:
    """Return the number of first messages that agree."""
    pairs = zip(history, path, strict=False)
    agreeing = (
        number for number, (message, other) in enumerate(pairs) if not message.agrees(other)
    )
    return next(agreeing, min(len(history), len(path)))


class LocalModel:
    """Answers the calls of one program in place of a generator."""

    def __init__(self, broker: Broker, speak: Speak, max_calls: int) -> None:
        """Answer with the results of `speak`, up to `max_calls` times."""
        self.calls: list[LocalCall] = []
        """Calls, in their order."""
        self.answers: list[LocalAnswer] = []
        """Answers, in their order."""
        self._broker = broker
        self._speak = speak
        self._max_calls = max_calls

    @contextlib.asynccontextmanager
    async def answering(self, episode: str) -> AsyncIterator[None]:
        """Answer the calls of an episode while the context runs."""
        async with contextlib.AsyncExitStack() as opened:
            service = await Service.start(
                self._broker, name="tinkermq-model", description=f"the model of episode {episode}"
            )
            opened.push_async_callback(service.stop, drain_s=0)
            parts = PartsService(self._broker, service)
            cancels = await self._broker.listen(
                SCOPE.episode(episode, "cancel"),
                lambda message: parts.cancel(CancelCall.from_bytes(message.data).request),
            )
            opened.push_async_callback(cancels.stop)
            calls = await parts.listen(
                SCOPE.episode(episode, "call"), CallRequest, CallPart, self._answer
            )
            opened.push_async_callback(calls.stop)
            yield

    async def _answer(self, request: CallRequest, tell: Tell[CallPart]) -> CallPart:
        history = self._history(request)
        name = request.request.partition("-")[0]
        names = [call_name(name, choice) for choice in range(request.decoding.num_choices)]
        if request.count_only:
            return CallPart(prompt_tokens=_num_characters(history), names=names[:1])
        call = self._enter(request, history)
        try:
            if call.number >= self._max_calls:
                raise EpisodeLimit(f"the episode has had its {self._max_calls} calls")
            texts = [await self._speak(call) for _ in names]
        except TinkermqError as error:
            call.refusal = error.code
            raise
        head = CallPart(
            names=names,
            prompt_tokens=_num_characters(history),
            num_reused=_num_characters(history) - _num_characters(call.new_messages),
            parent=None if call.parent is None else call.parent.number,
        )
        call.answers = [
            LocalAnswer(call, number, parse_reply(text, name, calls=bool(request.tools)))
            for number, (name, text) in enumerate(zip(names, texts, strict=True), len(self.answers))
        ]
        self.answers += call.answers
        await tell(head)
        for choice, text in enumerate(texts):
            for delta in _deltas(choice, text):
                await tell(CallPart(deltas=[delta]))
        return CallPart(calls=[answer.number for answer in call.answers])

    def _history(self, request: CallRequest) -> list[ModelMessage]:
        new = canonical_history(request.messages)
        if request.previous is None:
            return new
        if request.previous >= len(self.answers):
            raise NotFoundError(
                f"the episode has no answer {request.previous} to continue",
                hint="send the whole history",
            )
        return [*self.answers[request.previous].path, *new]

    def _enter(self, request: CallRequest, history: list[ModelMessage]) -> LocalCall:
        """Add a call; it continues the longest path at the beginning of its history."""
        continued = [
            answer
            for answer in self.answers
            if answer.call.request.tools == request.tools
            and num_common(history, answer.path) == len(answer.path)
        ]
        parent = max(continued, key=lambda answer: len(answer.path), default=None)
        call = LocalCall(len(self.calls), request, history, parent, len(self.answers))
        self.calls.append(call)
        return call


def _num_characters(messages: Sequence[ModelMessage]) -> int:
    return sum(len(message.text) for message in messages)


def _deltas(choice: int, text: str) -> Iterator[Delta]:
    """Yield an answer piece by piece: a token for each character."""
    for start in range(0, len(text), _PIECE_CHARACTERS):
        piece = text[start : start + _PIECE_CHARACTERS]
        yield Delta(
            choice=choice,
            text=piece,
            token_ids=[ord(letter) for letter in piece],
            logprobs=[0.0] * len(piece),
            versions=[0] * len(piece),
        )
    yield Delta(choice=choice, finish="stop")


# -- the program -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalRun:
    """The end of one program."""

    model: LocalModel
    """Its calls."""
    episode: ProgramEpisode | None
    """The episode with its posts; None: it did not start."""
    requests: Counter[tuple[str, int]]
    """Number of its HTTP requests (`POST /v1/responses`) by request and status."""
    result: StepResult | None
    """End and reward of the program; None: the episode does not count."""
    error: TinkermqError | None = None
    """Why it does not count."""


@dataclass(eq=False)
class _Seen:
    episode: ProgramEpisode | None = None
    requests: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])


class _ObservedProxy(ModelProxy):
    """A proxy that records the episode of its program, and the requests."""

    def __init__(self, broker: Broker) -> None:
        self.seen = _Seen()
        super().__init__(broker, SCOPE, seen=self._record)

    def open(self, episode: ProgramEpisode) -> None:
        self.seen.episode = episode
        super().open(episode)

    def _record(self, method: str, path: str, status: int) -> None:
        request = f"{method} /v1/{path}"[:200] if path else f"{method} /"
        self.seen.requests[request, status] += 1


class LocalProgram:
    """The program of a job on this machine."""

    def __init__(
        self, broker: Broker, job: JobConfig, runner: ProgramRunner, proxy: _ObservedProxy
    ) -> None:
        """Use the parts that `open_program` has prepared."""
        self._broker = broker
        self._job = job
        self._runner = runner
        self._proxy = proxy
        self._num_runs = 0

    async def run(
        self,
        speak: Speak,
        *,
        row: int | None = None,
        seed: int = 0,
    ) -> LocalRun:
        """Run the program on a task to its end; raises DataError for a row that does not exist."""
        opening = await asyncio.to_thread(self._opening, row, seed)
        seen = self._proxy.seen = _Seen()
        model = LocalModel(self._broker, speak, min(MAX_CALLS, self._job.agent.max_calls))
        result, error = None, None
        async with model.answering(opening.episode):
            try:
                await self._runner.reset(opening)
                result = await self._runner.step(opening.episode, "")
            except TinkermqError as failure:
                error = failure
            finally:
                self._runner.drop(opening.episode)
        return LocalRun(model, seen.episode, seen.requests, result, error)

    def _opening(self, row: int | None, seed: int) -> Opening:
        self._num_runs += 1
        with contextlib.closing(HostData(self._job.env, seed, needs_answers=False)) as data:
            if data.num_train is None and row is not None:
                raise DataError(
                    f"row {row} was requested, but the run has no env.train_data",
                    hint="its tasks have seeds",
                )
            if data.num_train is not None and row is None:
                row = seed % data.num_train
            if data.num_train is not None and not 0 <= (row or 0) < data.num_train:
                raise DataError(
                    f"row {row} does not exist: the training data has {data.num_train} rows"
                )
            record = data.record("train", row)
        return Opening(f"check{self._num_runs}-1", seed, record)


@contextlib.asynccontextmanager
async def open_program(
    broker: Broker, job: JobConfig, *, limit_s: float | None = None
) -> AsyncIterator[LocalProgram]:
    """Prepare to run a job's program here, in the same sandbox as in a pool.

    It may take `limit_s` at most, if that is less than the job allows. Raises ConfigError for a job
    without a program, or whose command does not exist, and SandboxError if the machine cannot run
    it.
    """
    if not job.agent.command:
        raise ConfigError(
            "this run has no program: agent.command is empty",
            hint="set agent.command, or make an example: `tinkermq agent new NAME`",
        )
    limits = {} if limit_s is None else {"timeout_s": limit_s, "idle_s": limit_s}
    agent = job.agent.model_copy(
        update={name: min(most, getattr(job.agent, name)) for name, most in limits.items()}
    )
    proxy = _ObservedProxy(broker)
    runner = ProgramRunner(agent, proxy, job=SCOPE.job, has_tasks=job.has_tasks)
    try:
        await runner.start()
        yield LocalProgram(broker, job, runner, proxy)
    finally:
        await runner.stop()
