"""Answers chats and completions of a served model.

Log-probs of prompts are sent in pieces that fit a message.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from ...broker.client.parts import Tell
from ...schemas.generation import Decoding, Delta, TextRequest
from ...schemas.infer import ChatRequest, CompletionRequest, InferPart, PromptScore
from ...schemas.model_apis.canonical import THINK, canonical_history, pictures_of
from ...schemas.wire import errors
from ...schemas.wire.array import IntVector
from ..engine.engine import Generation, OnToken, PromptScores, Sampling
from ..policy.chat import ChatTokenizer
from ..policy.grammar import OutputGrammars, TokenGrammar
from .agent_loop import EpisodeSampling
from .choices import PART_VALUES, DeltaWriter, GrowingChoice, sampling_of
from .template_facts import HistoryRenderer

# -- log-probs of prompts --------------------------------------------------------------------------

Score = Callable[[int, Sequence[int]], Awaitable[PromptScores]]
TellScores = Callable[[list[PromptScore]], Awaitable[None]]


async def score_prompts(prompts: Sequence[Sequence[int]], score: Score, tell: TellScores) -> None:
    """Score prompts concurrently, by number and tokens, and send each result at once."""

    async def score_prompt(number: int, ids: Sequence[int]) -> None:
        for piece in pieces(number, await score(number, ids)):
            await tell([piece])

    async with asyncio.TaskGroup() as group:
        for number, ids in enumerate(prompts):
            group.create_task(score_prompt(number, ids), name=f"score {number}")


def pieces(prompt: int, scores: PromptScores) -> list[PromptScore]:
    """Cut the scores of a prompt into messages."""
    rows = max(1, PART_VALUES // (1 + 2 * scores.top_ids.shape[1]))
    return [
        PromptScore(
            prompt=prompt,
            start=start,
            logprobs=scores.logprobs[start : start + rows],
            top_ids=np.ascontiguousarray(scores.top_ids[start : start + rows]),
            top_logprobs=np.ascontiguousarray(scores.top_logprobs[start : start + rows]),
        )
        for start in range(0, len(scores.logprobs), rows)
    ]


Request = ChatRequest | CompletionRequest


class GeneratesTokens(Protocol):
    """The methods of an engine that answers need."""

    async def generate(
        self,
        prompt_ids: Sequence[int] | IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Generate from a prompt; see `Engine.generate`."""
        ...

    async def score(
        self, prompt_ids: Sequence[int] | IntVector, *, request_id: str, top_k: int = 0
    ) -> PromptScores:
        """Score a prompt; see `Engine.score`."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request: its `generate` returns the tokens so far."""
        ...


@dataclass(frozen=True)
class _Prompt:
    """The engine's input for one prompt."""

    ids: list[int]
    images: Sequence[bytes] = ()
    opened: str = ""
    """The mark with which the prompt opens the reasoning of the answer."""


class _Head:
    """Fields about the prompts, sent once."""

    def __init__(self, request: TextRequest, prompts: Sequence[_Prompt]) -> None:
        self._fields: dict[str, Any] = {
            "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
            "opened": prompts[0].opened,
            "prompt_token_ids": [prompt.ids for prompt in prompts] if request.token_ids else [],
        }

    def next_fields(self) -> dict[str, Any]:
        """Return the fields for the next part; empty after the first."""
        fields, self._fields = self._fields, {}
        return fields


class Answers:
    """Answers the chats and completions of one server."""

    def __init__(
        self,
        engine: GeneratesTokens,
        chat: ChatTokenizer,
        model_name: Callable[[], str],
        *,
        max_context: int,
        max_open: int,
        grammars: OutputGrammars | None = None,
        user: str = "",
    ) -> None:
        """Answer one user, or the callers of one job.

        `max_open` is the maximum number of choices that are generated or queued; `grammars` are
        those of `chat` if others answer with it, too.
        """
        self._engine = engine
        self._chat = chat
        self._grammars = grammars or OutputGrammars(chat)
        self._user = user
        self._model_name = model_name
        self._max_context = max_context
        self._max_open = max_open
        self._num_open = 0

    async def chat(self, request: ChatRequest, tell: Tell[InferPart]) -> InferPart:
        """Continue a conversation; ModelError if the model's template does not accept it."""
        return await self._answer(request, [await asyncio.to_thread(self._render, request)], tell)

    def _render(self, request: ChatRequest) -> _Prompt:
        """Return the prompt of a conversation, rendered as in an episode."""
        chat = self._chat.at(time.time())
        history = canonical_history(request.messages)
        ids = HistoryRenderer(chat).whole(history, request.tools).tolist()
        images = tuple(pictures_of(history))
        return _Prompt(ids, images, opened=chat.opened(ids))

    async def complete(self, request: CompletionRequest, tell: Tell[InferPart]) -> InferPart:
        """Continue texts without a chat template."""
        return await self._answer(request, await asyncio.to_thread(self._encode, request), tell)

    def _encode(self, request: CompletionRequest) -> list[_Prompt]:
        return [
            _Prompt(
                self._chat.encode(prompt, special=request.add_special_tokens)
                if isinstance(prompt, str)
                else prompt
            )
            for prompt in request.prompts
        ]

    async def _answer(
        self,
        request: Request,
        prompts: Sequence[_Prompt],
        tell: Tell[InferPart],
    ) -> InferPart:
        copies, draws = request.decoding.num_choices, _draws(request)
        grammar = await self._grammar(request, prompts)
        samplings = [
            self._sampling(request.decoding, len(prompt.ids), grammar) for prompt in prompts
        ]
        with self._room(len(prompts) * copies):
            tools = request.tools if isinstance(request, ChatRequest) else ()
            choices = [
                GrowingChoice(
                    number,
                    self._chat,
                    request.decoding.stop,
                    tools,
                    num_top=request.decoding.top_logprobs,
                    by_token=request.stream,
                    tells_tokens=request.logprobs,
                )
                for number in range(len(prompts) * copies)
            ]
            writer, head = DeltaWriter(choices), _Head(request, prompts)

            async def send(deltas: list[Delta]) -> None:
                part = InferPart(model=self._model_name(), deltas=deltas, **head.next_fields())
                await tell(part)

            try:
                async with asyncio.timeout(request.deadline_s), asyncio.TaskGroup() as group:
                    changed = asyncio.Event()
                    if isinstance(request, CompletionRequest):
                        await self._score(request, prompts, tell)
                    for choice in choices:
                        of = choice.number // copies
                        if not draws:
                            choice.end("length", lambda: ())
                            continue
                        work = self._generate(
                            request, choice, prompts[of], samplings[of], copies, changed
                        )
                        group.create_task(work, name=f"choice {choice.number}")
                    if request.stream and draws:
                        await writer.stream(changed, lambda: _are_over(choices), send, ends=True)
            except TimeoutError:
                raise errors.DeadlineError(
                    f"the answer was not complete after {request.deadline_s:g} s",
                    hint="allow more time, or fewer tokens",
                ) from None
            except BaseExceptionGroup as group:
                raise errors.root_cause(group) from group
            *messages, last = await writer.last_messages()
            for deltas in messages:
                await send(deltas)
                await asyncio.sleep(0)
        return InferPart(model=self._model_name(), deltas=last, **head.next_fields())

    async def _grammar(self, request: Request, prompts: Sequence[_Prompt]) -> TokenGrammar | None:
        """Return the grammar of the answers' required form; None: there is none."""
        required = request.decoding.format
        if required is None:
            return None
        tools = request.tools if isinstance(request, ChatRequest) else ()
        thinking = any(prompt.opened.startswith(THINK) for prompt in prompts)
        return await self._grammars.of(required, tools, thinking=thinking, user=self._user)

    async def _score(
        self,
        request: CompletionRequest,
        prompts: Sequence[_Prompt],
        tell: Tell[InferPart],
    ) -> None:
        """Send the log-probs of the prompts' tokens, if requested."""
        top_k = request.prompt_logprobs
        if top_k is None:
            return
        vocabulary = await asyncio.to_thread(self._chat.vocabulary)

        async def score(number: int, ids: Sequence[int]) -> PromptScores:
            name = f"{request.request}.score.{number}"
            return await self._engine.score(ids, request_id=name, top_k=top_k)

        async def send_scores(scores: list[PromptScore]) -> None:
            await tell(InferPart(model=self._model_name(), scores=scores, vocabulary=vocabulary))

        await score_prompts([prompt.ids for prompt in prompts], score, send_scores)

    async def _generate(
        self,
        request: TextRequest,
        choice: GrowingChoice,
        prompt: _Prompt,
        sampling: Sampling,
        copies: int,
        changed: asyncio.Event,
    ) -> None:
        name = f"{request.request}.{choice.number}"
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + choice.number % copies)
        draw = partial(
            self._engine.generate, prompt.ids, sampling, request_id=name, images=prompt.images
        )
        generation = await choice.generate(draw, partial(self._engine.cancel, name), changed.set)
        choice.end(generation.finish_reason, lambda: prompt.ids)
        changed.set()

    def _sampling(
        self, decoding: Decoding, prompt_tokens: int, grammar: TokenGrammar | None
    ) -> Sampling:
        """Return the sampling after a prompt; ConfigError if the context has no room."""
        room = self._max_context - prompt_tokens
        max_new_tokens = room if decoding.max_tokens is None else decoding.max_tokens
        if min(room, max_new_tokens) < int(decoding.max_tokens != 0) or max_new_tokens > room:
            limit = f" and max_tokens is {decoding.max_tokens}" if decoding.max_tokens else ""
            raise errors.ConfigError(
                f"the prompt has {prompt_tokens} tokens{limit}: the context of this model holds "
                f"{self._max_context}",
                hint="shorten the prompt, lower max_tokens, or serve with a larger max_model_len",
            )
        sampling = sampling_of(
            decoding,
            EpisodeSampling(1.0),
            max_new_tokens=max_new_tokens,
            stop_token_ids=self._chat.stop_token_ids,
            seed=decoding.seed,
        )
        return replace(sampling, grammar=grammar)

    @contextlib.contextmanager
    def _room(self, num_choices: int) -> Iterator[None]:
        if num_choices > self._max_open:
            raise errors.ConfigError(
                f"one request asks for {num_choices} answers, this server generates or queues "
                f"{self._max_open} at most",
                hint="send fewer prompts or choices in one request, or raise "
                "generator.max_requests of the server",
            )
        if self._num_open + num_choices > self._max_open:
            raise errors.BusyError(
                f"this server generates or queues {self._num_open} of at most {self._max_open} "
                f"answers, and the request asks for {num_choices} more",
                hint="ask again later, or add servers: `tinkermq scale RUN servers=N`",
            )
        self._num_open += num_choices
        try:
            yield
        finally:
            self._num_open -= num_choices


def _draws(request: Request) -> bool:
    """Whether tokens are generated; ConfigError if the request has no effect."""
    if request.decoding.max_tokens != 0:
        return True
    if isinstance(request, ChatRequest) or request.prompt_logprobs is None:
        raise errors.ConfigError(
            "max_tokens is 0, so that no token would be generated",
            hint="give 1 or more; completions with prompt_logprobs may have 0",
        )
    return False


def _are_over(choices: Sequence[GrowingChoice]) -> bool:
    return all(choice.finish is not None for choice in choices)
