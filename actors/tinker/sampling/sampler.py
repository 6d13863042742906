"""A sampler: continues prompts with any adapter of the service's users, and scores them.

A request is accepted at once and its result is polled; a repeated request number is the same
request. After a sampler's death the client repeats its requests under new numbers.
"""

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import structlog
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from ....broker.client.connection import Broker, Msg
from ....broker.client.fair_queue import end_tasks
from ....broker.client.parts import PartsService, Tell
from ....broker.client.rpc import RequestContext
from ....schemas.infer import CancelInference, ChatRequest, CompletionRequest, InferPart
from ....schemas.tinker import wire
from ....schemas.tinker.operation import OperationResult
from ....schemas.tinker.sampling import AwaitSample, SampleRequest, SamplerName, SampleTaken
from ....schemas.tinker.wire import TinkerBody
from ....schemas.wire import errors
from ....schemas.wire.bounds import MAX_CHARS, MAX_TOP_K
from ....schemas.wire.subjects import rpc, user_of_rpc
from ...engine.engine import PromptScores, Sampling
from ...policy.chat import ChatTokenizer
from ...policy.grammar import OutputGrammars
from ...rollout.choices import GrowingChoice
from ...rollout.completions import Answers
from ...runtime import JobContext, settle_memory
from ...storage.tinker_checkpoints import TINKER_FOLDER
from ..fair_share import ShareFollower
from ..operations import as_failure
from . import engines

# -- `asample`: a JSON request and its protobuf result ---------------------------------------------

MAX_SAMPLES = 1024
MAX_STOPS, MAX_STOP_TOKENS = 256, 4096
"""Stop texts, or stop tokens, of one request."""
_STOP, _LENGTH = 0, 1
_NOTHING = -99999.0
"""Log-prob of an empty place, as the SDK defines it."""


class ChunkBody(BaseModel):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = Field(default_factory=list[int])


class PromptBody(BaseModel):
    """A prompt."""

    chunks: list[ChunkBody]

    def token_ids(self, vocab: int) -> NDArray[np.int32]:
        """Return its tokens; raises DataError for other parts and invalid tokens."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise errors.DataError(
                    f"the prompt has a chunk of type {chunk.type}", hint="send encoded_text"
                )
        tokens = [token for chunk in self.chunks for token in chunk.tokens]
        if not tokens:
            raise errors.DataError("the prompt is empty", hint="send at least one token")
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < vocab:
                raise errors.DataError(
                    f"token {token} of the prompt is outside the vocabulary",
                    hint=f"the model has {vocab:,} tokens, from 0 on",
                )
        return np.array(tokens, np.int32)


class SamplingParamsBody(BaseModel):
    """How tokens are drawn."""

    model_config = ConfigDict(extra="forbid")
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: (
        Annotated[str, Field(max_length=MAX_CHARS)]
        | Annotated[list[Annotated[str, Field(max_length=MAX_CHARS)]], Field(max_length=MAX_STOPS)]
        | Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)]
        | None
    ) = None
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(TinkerBody):
    """`asample`."""

    defaults: ClassVar[dict[str, Any]] = {
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
    }
    remedies: ClassVar[dict[str, str]] = {
        "record_stability_info": "it is for loss_fn stable_reinforce, which is not offered either: "
        "train with loss_fn=importance_sampling, ppo or cispo"
    }
    sampling_session_id: str
    seq_id: int
    prompt: PromptBody
    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    sampling_params: SamplingParamsBody = Field(default_factory=SamplingParamsBody)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_K)


@dataclass(frozen=True)
class Sampled:
    """One continuation."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ended: Literal["stop", "length"]


def write_samples(
    sequences: list[Sampled], scores: PromptScores | None = None, *, with_logprobs: bool = False
) -> bytes:
    """Return continuations, and scores of the prompt, in the SDK's format.

    `with_logprobs`: include the log-probs of the prompt's tokens, not only the likeliest.
    """
    message = wire.SampleResponse()
    for sequence in sequences:
        message.sequences.add(
            stop_reason=_STOP if sequence.ended == "stop" else _LENGTH,
            tokens=sequence.tokens.astype("<i4").tobytes(),
            logprobs=sequence.logprobs.astype("<f4").tobytes(),
        )
    if scores is not None and with_logprobs:
        message.prompt_logprobs = scores.logprobs.astype("<f4").tobytes()
    if scores is not None and scores.top_ids.shape[1]:
        top = message.topk_prompt_logprobs
        top.length, top.k = scores.top_ids.shape
        top.token_ids = scores.top_ids.astype("<i4").tobytes()
        logprobs = np.nan_to_num(scores.top_logprobs, nan=_NOTHING, neginf=_NOTHING)
        top.logprobs = logprobs.astype("<f4").tobytes()
    return message.SerializeToString()


# Chats and completions whose model is a checkpoint path. Texts are rendered and parsed as in the
# server of an inference job; the subject names the user, whose checkpoints may be used.

MAX_ANSWERS = 4096
"""Running and waiting answers of one user."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class PathAnswers:
    """Answers chats and completions with the adapters of a sampler."""

    def __init__(
        self,
        chat: ChatTokenizer,
        engine: engines.MeteredEngine,
        adapters: engines.SampledAdapters,
        find: Callable[[str, str], Awaitable[engines.Snapshot | None]],
        *,
        max_context: int,
    ) -> None:
        """Answer with the adapter that `find` returns for a user and a path; None: the base model.

        `find` raises an error for a path that the user may not use. Without a chat template in
        `chat`, chats raise an error.
        """
        self._chat = chat
        self._engine = engine
        self._adapters = adapters
        self._find = find
        self._max_context = max_context
        self._grammars = OutputGrammars(chat)
        self._num_open: Counter[str] = Counter()

    async def open(self, broker: Broker, parts: PartsService, service: str) -> None:
        """Answer from now on; the service's other samplers share the requests."""
        for verb, request in (("chat", ChatRequest), ("complete", CompletionRequest)):
            subject = rpc("*", service, verb)
            await parts.user_endpoint(verb, subject, request, InferPart, self._answer)

        def cancel(message: Msg) -> None:
            try:
                cancel = CancelInference.from_bytes(message.data)
            except errors.MessageError as error:
                _log.warning("cancel_ignored", error=error.message)
            else:
                parts.cancel(cancel.request, user_of_rpc(message.subject))

        await broker.listen(rpc("*", service, "cancel"), cancel)

    async def _answer(
        self, request: ChatRequest | CompletionRequest, tell: Tell[InferPart], user: str
    ) -> InferPart:
        with self._counted(user, request):
            async with contextlib.AsyncExitStack() as using:
                snapshot = await self._find(user, request.adapter)
                adapter = await self._loaded(using, snapshot, request)
                answers = Answers(
                    engines.EngineOfUser(self._engine, user, adapter),
                    self._chat,
                    lambda: request.adapter,
                    max_context=self._max_context,
                    max_open=MAX_ANSWERS,
                    grammars=self._grammars,
                    user=user,
                )
                if isinstance(request, ChatRequest):
                    return await answers.chat(request, tell)
                return await answers.complete(request, tell)

    async def _loaded(
        self,
        using: contextlib.AsyncExitStack,
        snapshot: engines.Snapshot | None,
        request: ChatRequest | CompletionRequest,
    ) -> str:
        """Return an adapter's name in the engine, which holds it while `using` is open."""
        try:
            async with asyncio.timeout(request.deadline_s):
                return await using.enter_async_context(self._adapters.using(snapshot))
        except TimeoutError as error:
            if isinstance(error, errors.DeadlineError):
                raise
            raise errors.DeadlineError(
                f"{request.adapter} got no place in its sampler within {request.deadline_s:g} s",
                hint="ask again, allow more time, or raise tinker.sampled_at_once",
            ) from None

    @contextlib.contextmanager
    def _counted(self, user: str, request: ChatRequest | CompletionRequest) -> Iterator[None]:
        prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
        more = prompts * request.decoding.num_choices
        if self._num_open[user] + more > MAX_ANSWERS:
            raise errors.BusyError(
                f"user {user!r} has {self._num_open[user]:,} open answers, {more:,} more are "
                f"over the limit of {MAX_ANSWERS:,}",
                hint="wait for some of them",
            )
        self._num_open[user] += more
        try:
            yield
        finally:
            self._num_open[user] -= more
            if not self._num_open[user]:
                del self._num_open[user]


MAX_OPEN = 4096
"""Requests of one user that run or whose results wait to be fetched, and samples of those that
run."""
RESULT_S = 120.0
"""How long a result waits to be fetched."""
_SWEEP_S = 5.0
_MOVE_S = 0.05
_MOVE_ELSEWHERE_S = 0.5
"""How often newer in-flight weights are checked: on this disk, and at a trainer elsewhere."""


@dataclass
class _Open:
    """An accepted request."""

    work: "asyncio.Task[OperationResult]"
    num_samples: int
    requested_at: float = field(default_factory=time.monotonic)
    """When its result was last requested."""


async def run_sampler(context: JobContext) -> None:
    """Sample until stopped."""
    await context.serve_control()
    base = await engines.open_engine(context.config)
    settle_memory()
    snapshots = engines.Snapshots(context.broker, context.scope, context.run_dir / TINKER_FOLDER)
    try:
        await Sampler(context, base, snapshots).run()
    finally:
        snapshots.close()
        await base.engine.close()


class Sampler:
    """Answers requests to sample."""

    def __init__(
        self, context: JobContext, base: engines.SampledBase, snapshots: engines.Snapshots
    ) -> None:
        self._context = context
        self._engine = base.engine
        self._snapshots = snapshots
        at_once = context.config.tinker.sampled_at_once
        self._adapters = engines.SampledAdapters(
            base.engine, at_once, snapshots.fetch, snapshots.free
        )
        self._metered = engines.MeteredEngine(base.engine, base.num_requests)
        weights, tokens = self._metered.weights, self._metered.tokens
        self._shares = ShareFollower(context, weights, lambda: tokens, sampler=context.name)
        self._parts = PartsService(context.broker, context.service)
        self._answers = PathAnswers(
            base.chat,
            self._metered,
            self._adapters,
            self._admitted,
            max_context=base.max_context,
        )
        self._chat = base.chat
        self._vocab = base.vocab
        self._max_context = base.max_context
        self._open: dict[str, OrderedDict[str, _Open]] = {}

    @property
    def tokens(self) -> Mapping[str, int]:
        """Computed tokens by user."""
        return self._metered.tokens

    async def run(self) -> None:
        """Serve until `stopping` is set."""
        service, name = self._context.service, f"tinker-{self._context.scope.job}"
        subject = rpc("*", name, f"sampled-{self._context.name}")
        await service.endpoint(
            "sampled", subject, AwaitSample, self._result, queue=self._context.name
        )
        await service.endpoint("sample", rpc("*", name, "sample"), SampleRequest, self._accept)
        await self._answers.open(self._context.broker, self._parts, name)
        self._context.set_state("working")
        following = asyncio.create_task(self._shares.follow(), name="shares")
        try:
            await self._maintain()
        finally:
            following.cancel()

    async def _maintain(self) -> None:
        """Update in-flight adapters and drop old results until `stopping` is set."""
        swept = time.monotonic()
        while not self._context.stopping.is_set():
            pause_s = _MOVE_S if self._snapshots.is_here else _MOVE_ELSEWHERE_S
            await self._context.unless_stopping(asyncio.sleep(pause_s), None)
            await self._update_in_flight()
            if time.monotonic() - swept < _SWEEP_S:
                continue
            swept = time.monotonic()
            self._sweep()
            self._context.numbers["adapters"] = float(self._adapters.num_held)
            if (failure := self._engine.failure) is not None:
                raise failure

    async def _update_in_flight(self) -> None:
        """Replace in-flight adapters by the newest weights of their models."""
        for running in self._adapters.in_flight():
            try:
                newest = await self._snapshots.find(running.user, running.source)
                if newest.version > running.version:
                    async with self._adapters.using(newest):
                        pass
            except errors.TinkermqError as error:  # samples continue with their weights
                _log.warning("adapter_not_updated", adapter=running.name, error=error.message)

    async def _accept(self, request: SampleRequest, context: RequestContext) -> SampleTaken:
        """Accept a request, unless it was accepted before."""
        mine = self._open.setdefault(context.user, OrderedDict())
        if (match := mine.get(request.request)) is None:
            body = SampleBody.parse(request.body)
            drawn = sum(entry.num_samples for entry in mine.values() if not entry.work.done())
            if len(mine) >= MAX_OPEN or drawn + body.num_samples > MAX_OPEN:
                raise errors.BusyError(
                    f"user {context.user!r} has {len(mine):,} open requests, and {drawn:,} samples "
                    f"in progress or waiting: {MAX_OPEN:,} are allowed",
                    hint="wait for some of them",
                )
            snapshot = await self._admitted(context.user, request.source)
            if (match := mine.get(request.request)) is None:  # it may have been repeated meanwhile
                work = asyncio.create_task(
                    self._sample(context.user, body, snapshot), name="sample"
                )
                match = mine[request.request] = _Open(work, body.num_samples)
                self._open[context.user] = mine
        return SampleTaken(actor=self._context.name, num_samples=match.num_samples)

    async def _result(self, request: AwaitSample, context: RequestContext) -> OperationResult:
        """Wait for a result."""
        match = self._open.get(context.user, {}).get(request.request)
        if match is None:
            raise errors.NotFoundError(
                f"sampler {self._context.name} has no request {request.request[-40:]}",
                hint="sample again",
            )
        match.requested_at = time.monotonic()
        if request.cancel:
            del self._open[context.user][request.request]
            match.work.cancel()
        await asyncio.wait({match.work}, timeout=request.wait_s)
        if match.work.cancelled():
            return OperationResult(state="failed", error="it was cancelled", category="user")
        if not match.work.done():
            return OperationResult(queue_reason="it is being sampled")
        match.requested_at = time.monotonic()
        return match.work.result()

    def _sweep(self) -> None:
        """Drop results that were not requested for a while."""
        before = time.monotonic() - RESULT_S
        for user, mine in list(self._open.items()):
            for request, entry in list(mine.items()):
                if entry.work.done() and entry.requested_at < before:
                    del mine[request]
            if not mine:
                del self._open[user]

    async def _admitted(self, user: str, source: str) -> engines.Snapshot | None:
        """Return the adapter for a user's samples, None for the base model.

        Raises NotFoundError, and ExhaustedError for a user without tokens left.
        """
        self._shares.check(user)
        self._metered.count(user, 0)  # reports this user, to get the quota
        name = SamplerName("-", 0, source)
        if name.base is None:
            return await self._snapshots.find(user, name)
        if name.base != self._context.config.tinker.base:
            raise errors.NotFoundError(f"there is no base model {name.base!r} here")
        return None

    async def _sample(
        self, user: str, body: SampleBody, snapshot: engines.Snapshot | None
    ) -> OperationResult:
        try:
            written = await self._draw_all(user, body, snapshot)
            self._context.progressed()
            return OperationResult(state="done", body=written, is_proto=True)
        except errors.TinkermqError as error:
            return as_failure(error)
        except Exception as error:  # noqa: BLE001  other requests continue
            _log.exception("sample_failed")
            message = f"the sampler failed: {type(error).__name__}; its log has the details"
            return OperationResult(state="failed", error=message, category="server")

    async def _draw_all(
        self, user: str, body: SampleBody, snapshot: engines.Snapshot | None
    ) -> bytes:
        prompt = body.prompt.token_ids(self._vocab)
        async with self._adapters.using(snapshot) as adapter:
            scored = asyncio.ensure_future(self._score(user, prompt, body, adapter))
            drawn = [
                asyncio.ensure_future(self._draw(user, prompt, body, number, adapter))
                for number in range(body.num_samples)
            ]
            try:
                made = await asyncio.gather(*drawn)
                scores = await scored
                self._metered.count(user, len(prompt))
            finally:
                for number, task in enumerate(drawn):
                    if not task.done():
                        self._engine.cancel(_name_of(body, number))
                await end_tasks((scored, *drawn))
        return write_samples(made, scores, with_logprobs=bool(body.prompt_logprobs))

    async def _score(
        self, user: str, prompt: NDArray[np.int32], body: SampleBody, adapter: str
    ) -> PromptScores | None:
        if not (body.prompt_logprobs or body.topk_prompt_logprobs):
            return None
        top_k = body.topk_prompt_logprobs
        name = f"{id(body):x}-prompt"
        return await self._metered.score(
            user, prompt, request_id=name, top_k=top_k, adapter=adapter
        )

    async def _draw(
        self, user: str, prompt: NDArray[np.int32], body: SampleBody, number: int, adapter: str
    ) -> Sampled:
        params = body.sampling_params
        room = max(1, self._max_context - len(prompt))
        ids, texts = self._stops(params.stop)
        request = _name_of(body, number)
        sampling = Sampling(
            max_new_tokens=min(params.max_tokens or room, room),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            stop_token_ids=ids,
            seed=None if params.seed is None else params.seed + number,
        )
        draw = partial(
            self._metered.generate, user, prompt, sampling, request_id=request, adapter=adapter
        )
        cancel = partial(self._engine.cancel, request)
        # a stop text may be a special token, which has no text in a chat
        decode = self._chat.decode_all
        choice = GrowingChoice(number, self._chat, texts, by_token=False, decode=decode)
        made = await choice.generate(draw, cancel, lambda: None)
        num = len(choice.drawn)  # the engine may have drawn more before it was cancelled
        ended = "length" if made.finish_reason == "length" and not choice.stopped else "stop"
        return Sampled(made.token_ids[:num], made.logprobs[:num], ended)

    def _stops(self, stop: str | list[str] | list[int] | None) -> tuple[tuple[int, ...], list[str]]:
        """Return the stop tokens and stop texts; by default the model's end token."""
        if stop is None:
            end = cast("int | None", self._chat.tokenizer.eos_token_id)
            return (() if end is None else (end,)), []
        if isinstance(stop, str):
            return (), [stop]
        ids = tuple(item for item in stop if isinstance(item, int))
        return ids, [item for item in stop if isinstance(item, str)]


def _name_of(body: SampleBody, number: int) -> str:
    """Return the name of one continuation in the engine."""
    return f"{id(body):x}-{number}"
