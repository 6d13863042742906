"""Chats and completions whose model is a path: answered by a sampler, with its adapters.

The texts are made and read as by a server of an inference job. Who asks, and so what may be sampled
from, is told by the subject.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import structlog

from ....broker.client.connection import Broker, Msg
from ....broker.client.parts import PartsService, Tell
from ....schemas.config.job import ModelConfig
from ....schemas.infer import CancelInference, ChatRequest, CompletionRequest, InferPart
from ....schemas.wire.errors import BusyError, DeadlineError, MessageError
from ....schemas.wire.subjects import rpc, user_of_rpc
from ...generator.episodes.chat import ChatTokenizer, open_chat
from ...server.answers import Answers
from .engines import SampledAdapters
from .metered import EngineOfUser, MeteredEngine
from .snapshots import Snapshot

MAX_ANSWERS = 4096
"""Answers of one user that are generated or wait."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class PathAnswers:
    """Answers chats and completions with the adapters of a sampler."""

    def __init__(
        self,
        model: ModelConfig,
        engine: MeteredEngine,
        adapters: SampledAdapters,
        find: Callable[[str, str], Awaitable[Snapshot | None]],
        *,
        max_context: int,
    ) -> None:
        """Answer with what `find` returns for a user and a path, None: with the base model.

        It raises what refuses a user.
        """
        self._model = model
        self._engine = engine
        self._adapters = adapters
        self._find = find
        self._max_context = max_context
        self._opening = asyncio.Lock()
        self._chat: ChatTokenizer | None = None
        self._num_open: Counter[str] = Counter()

    async def open(self, broker: Broker, parts: PartsService, service: str) -> None:
        """Answer from now on, beside other samplers of the service."""
        for verb, request in (("chat", ChatRequest), ("complete", CompletionRequest)):
            subject = rpc("*", service, verb)
            await parts.user_endpoint(verb, subject, request, InferPart, self._answer)

        def cancel(message: Msg) -> None:
            try:
                told = CancelInference.from_bytes(message.data)
            except MessageError as error:
                _log.warning("cancel_ignored", error=error.message)
            else:
                parts.cancel(told.request, user_of_rpc(message.subject))

        await broker.listen(rpc("*", service, "cancel"), cancel)

    async def _answer(
        self, request: ChatRequest | CompletionRequest, tell: Tell[InferPart], user: str
    ) -> InferPart:
        with self._counted(user, request):
            async with contextlib.AsyncExitStack() as using:
                snapshot = await self._find(user, request.adapter)
                chat = await self._tokenizer()
                adapter = await self._loaded(using, snapshot, request)
                answers = Answers(
                    EngineOfUser(self._engine, user, adapter),
                    chat,
                    lambda: request.adapter,
                    max_context=self._max_context,
                    max_open=MAX_ANSWERS,
                )
                if isinstance(request, ChatRequest):
                    return await answers.chat(request, tell)
                return await answers.complete(request, tell)

    async def _loaded(
        self,
        using: contextlib.AsyncExitStack,
        snapshot: Snapshot | None,
        request: ChatRequest | CompletionRequest,
    ) -> str:
        """Return the engine's name of an adapter, which it has while `using` is open."""
        try:
            async with asyncio.timeout(request.deadline_s):
                return await using.enter_async_context(self._adapters.using(snapshot))
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(
                f"{request.adapter} had no place in its sampler for {request.deadline_s:g} s",
                hint="ask again, allow more time, or raise tinker.sampled_at_once",
            ) from None

    async def _tokenizer(self) -> ChatTokenizer:
        """Return the base model's; it may have no template, which chats then raise."""
        async with self._opening:
            if self._chat is None:
                self._chat = await asyncio.to_thread(open_chat, self._model, must_chat=False)
        return self._chat

    @contextlib.contextmanager
    def _counted(self, user: str, request: ChatRequest | CompletionRequest) -> Iterator[None]:
        prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
        more = prompts * request.decoding.num_choices
        if self._num_open[user] + more > MAX_ANSWERS:
            raise BusyError(
                f"user {user!r} has {self._num_open[user]:,} answers under way, {more:,} more are "
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
