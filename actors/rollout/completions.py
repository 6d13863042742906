"""Answers chats and completions of a served model.

Log-probs of prompts are sent in pieces that fit a message.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from ...broker.client.parts import Tell
from ...schemas.generation import Decoding, Delta, TextRequest
from ...schemas.infer import ChatRequest, CompletionRequest, InferPart, PromptScore
from ...schemas.model_apis.canonical import canonical_history, pictures_of
from ...schemas.tool_calls import THINK
from ...schemas.wire import errors
from ...schemas.wire.array import IntVector
from ..engine.engine import Generation, OnToken, PromptScores, Sampling
from ..policy.chat import ChatTokenizer
from ..policy.grammar import OutputGrammars, TokenGrammar
from .agent_loop import EpisodeSampling
from .choices import PART_VALUES, DeltaWriter, GrowingChoice, in_messages, sampling_of
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
    without_effect: Sequence[str] = ()
    """Options of the request that the template has no variable for."""
    text: str | None = None
    """The text as sent; None: token ids, or a conversation."""


class _Head:
    """Fields about the prompts, sent once."""

    def __init__(
        self,
        request: TextRequest,
        prompts: Sequence[_Prompt],
        max_context: int,
        bounded: int | None = None,
    ) -> None:
        self._fields: dict[str, Any] = {
            "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
            "opened": prompts[0].opened,
            "prompt_token_ids": [prompt.ids for prompt in prompts] if request.token_ids else [],
            "max_context": max_context,
            "bounded_tokens": bounded,
            "without_effect": list(prompts[0].without_effect),
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

    @property
    def num_open(self) -> int:
        """Number of choices that are generated or queued."""
        return self._num_open

    async def chat(self, request: ChatRequest, tell: Tell[InferPart]) -> InferPart:
        """Continue a conversation; ModelError if the model's template does not accept it."""
        return await self._answer(request, [await asyncio.to_thread(self._render, request)], tell)

    def _render(self, request: ChatRequest) -> _Prompt:
        """Return the prompt of a conversation, rendered as in an episode."""
        chat = self._chat.at(time.time())
        options, thinks, lost = _options(request, chat.template_options)
        history = canonical_history(request.messages)
        ids = HistoryRenderer(chat.with_options(options)).whole(history, request.tools).tolist()
        images, opened = tuple(pictures_of(history)), chat.opened(ids)
        if opened:  # the answer is converted to this mark
            opened = THINK + opened.removeprefix(chat.reasoning_mark)
        if thinks is False and opened:
            raise errors.ConfigError(
                "this model's chat template opens the reasoning of every answer, and has no "
                "variable to leave it out",
                hint="allow thinking, or serve a model whose template has `enable_thinking`",
            )
        if images and request.prompt_logprobs is not None:
            raise errors.ConfigError(
                "prompt_logprobs are not computed for prompts with images",
                hint="leave prompt_logprobs out",
            )
        return _Prompt(ids, images, opened, lost)

    async def complete(self, request: CompletionRequest, tell: Tell[InferPart]) -> InferPart:
        """Continue texts without a chat template."""
        return await self._answer(request, await asyncio.to_thread(self._encode, request), tell)

    def _encode(self, request: CompletionRequest) -> list[_Prompt]:
        return [
            _Prompt(
                self._chat.encode(prompt, special=request.add_special_tokens)
                if isinstance(prompt, str)
                else prompt,
                text=prompt if isinstance(prompt, str) else None,
            )
            for prompt in request.prompts
        ]

    async def _answer(
        self,
        request: Request,
        prompts: Sequence[_Prompt],
        tell: Tell[InferPart],
    ) -> InferPart:
        if request.count_only:
            head = _Head(request, prompts, self._max_context)
            deltas = [delta async for delta in self._echoed(request, prompts)]
            return InferPart(model=self._model_name(), deltas=deltas, **head.next_fields())
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
                    min_tokens=request.decoding.min_tokens,
                    unsaid=request.decoding.stop_token_ids,
                    num_top=request.decoding.top_logprobs,
                    by_token=request.stream,
                    tells_tokens=request.logprobs,
                    thinking=bool(prompts[0].opened) if isinstance(request, ChatRequest) else None,
                )
                for number in range(len(prompts) * copies)
            ]
            least = min(sampling.max_new_tokens for sampling in samplings)
            is_bounded = least < (request.decoding.max_tokens or 0)
            head = _Head(request, prompts, self._max_context, least if is_bounded else None)
            writer = DeltaWriter(choices)

            async def send(deltas: list[Delta]) -> None:
                part = InferPart(model=self._model_name(), deltas=deltas, **head.next_fields())
                await tell(part)

            try:
                async with asyncio.timeout(request.deadline_s), asyncio.TaskGroup() as group:
                    changed = asyncio.Event()
                    if is_bounded:
                        await send([])
                    await self._score(request, prompts, tell)
                    async for delta in self._echoed(request, prompts):
                        for piece in in_messages([delta]):
                            await send(piece)
                    for choice in choices:
                        of = choice.number // copies
                        if not draws:
                            choice.end("length")
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
        thinking = any(prompt.opened for prompt in prompts)
        return await self._grammars.of(required, tools, thinking=thinking, user=self._user)

    async def _score(
        self,
        request: Request,
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

    async def _echoed(self, request: Request, prompts: Sequence[_Prompt]) -> AsyncIterator[Delta]:
        """Yield the prompt of each answer as its first delta, if requested."""
        if isinstance(request, ChatRequest) or not request.echo:
            return
        copies = request.decoding.num_choices
        for number, prompt in enumerate(prompts):
            pieces, text = await asyncio.to_thread(self._pieces, request, prompt)
            columns: dict[str, Any] = {}
            if request.logprobs and not request.count_only:
                columns = await self._scored(request, number, prompt.ids)
                columns["tokens"] = [text for text, _ in pieces]
                columns["token_bytes"] = [encoded for _, encoded in pieces]
            for choice in range(number * copies, (number + 1) * copies):
                yield Delta(choice=choice, text=text, **columns)

    def _pieces(
        self, request: CompletionRequest, prompt: _Prompt
    ) -> tuple[list[tuple[str, bytes]], str]:
        """Return text and bytes of each token of a prompt, and its whole text.

        Tokens that the tokenizer adds to a text have no bytes.
        """
        chat, ids = self._chat, prompt.ids
        first, end = 0, len(ids)
        if prompt.text is not None and request.add_special_tokens:
            plain = chat.encode(prompt.text)
            places = range(len(ids) - len(plain) + 1)
            first = next((at for at in places if ids[at : at + len(plain)] == plain), 0)
            end = first + len(plain) if len(plain) < len(ids) else end
        pieces: list[tuple[str, bytes]] = []
        for place, token in enumerate(ids):
            encoded = b""
            if first <= place < end:
                encoded = chat.token_bytes(token, first=place == first)
                encoded = encoded or chat.token_text(token).encode()
            pieces.append((encoded.decode(errors="replace") or chat.token_text(token), encoded))
        joined = b"".join(encoded for _, encoded in pieces).decode(errors="replace")
        return pieces, joined if prompt.text is None else prompt.text

    async def _scored(
        self, request: CompletionRequest, number: int, ids: Sequence[int]
    ) -> dict[str, Any]:
        """Return the log-probs of a prompt's tokens as columns of a delta."""
        num_top, chat = request.decoding.top_logprobs, self._chat
        name = f"{request.request}.echo.{number}"
        scores = await self._engine.score(ids, request_id=name, top_k=num_top)
        columns: dict[str, Any] = {"logprobs": scores.logprobs.tolist()}
        if num_top:
            top_ids: list[list[int]] = scores.top_ids.tolist()
            columns["top_tokens"] = [[chat.token_text(t) for t in row] for row in top_ids]
            columns["top_bytes"] = [[chat.token_bytes(t) for t in row] for row in top_ids]
            columns["top_logprobs"] = scores.top_logprobs.tolist()
        return columns

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
        choice.end(generation.finish_reason)
        changed.set()

    def _sampling(
        self, decoding: Decoding, prompt_tokens: int, grammar: TokenGrammar | None
    ) -> Sampling:
        """Return the sampling after a prompt; ConfigError if the context has no room."""
        room = self._max_context - prompt_tokens
        max_new_tokens = room if decoding.max_tokens is None else min(room, decoding.max_tokens)
        if room < int(decoding.max_tokens != 0):
            raise errors.ConfigError(
                f"the prompt has {prompt_tokens} tokens: the context of this model holds "
                f"{self._max_context}",
                hint="shorten the prompt, or serve with a larger max_model_len",
            )
        if decoding.min_tokens > max_new_tokens > 0:
            raise errors.ConfigError(
                f"min_tokens is {decoding.min_tokens}, and the answer may have {max_new_tokens} "
                "tokens",
                hint="lower min_tokens, raise max_tokens, or shorten the prompt",
            )
        if decoding.ignore_eos and grammar is not None:
            raise errors.ConfigError(
                "ignore_eos cannot be used with a required form, which ends with the form",
                hint="leave ignore_eos out",
            )
        stops = () if decoding.ignore_eos else self._chat.stop_token_ids
        sampling = sampling_of(
            decoding,
            EpisodeSampling(1.0),
            max_new_tokens=max_new_tokens,
            stop_token_ids=(*stops, *decoding.stop_token_ids),
            seed=decoding.seed,
        )
        bad_words = tuple(_bad_words(decoding.bad_words, self._chat))
        return replace(sampling, grammar=grammar, bad_words=bad_words)

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
    is_chat = isinstance(request, ChatRequest)
    if is_chat or (request.prompt_logprobs is None and not request.echo):
        raise errors.ConfigError(
            "max_tokens is 0, so that no token would be generated",
            hint="give 1 or more; completions with prompt_logprobs or echo may have 0",
        )
    return False


_EFFORT, _SWITCHES = "reasoning_effort", ("enable_thinking", "thinking")


def _options(
    request: ChatRequest, known: Collection[str]
) -> tuple[dict[str, Any], bool | None, list[str]]:
    """Return variables for a template that has the `known` ones, by what a request says of them.

    Also returns whether the request asks to think, and its options for which there is no variable.
    """
    options, thinks, lost = dict(request.template_options), request.thinks, list[str]()
    if _EFFORT in known and request.effort:
        options.setdefault(_EFFORT, request.effort)
    elif request.effort == "none":
        thinks = bool(thinks)
    elif request.effort:
        lost.append("effort")
    switches = [name for name in _SWITCHES if name in known]
    if thinks is not None:
        options = {**dict.fromkeys(switches, thinks), **options}
    if thinks and not switches:
        lost.append("thinks")
    return options, thinks, lost


def _bad_words(words: Sequence[str], chat: ChatTokenizer) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each word, and those behind a space if only their first differs."""
    for word in words:
        bare = word.lstrip() or word
        alone, behind = chat.encode(bare), chat.encode(f" {bare}")
        yield tuple(alone)
        if len(behind) == len(alone) and behind[0] != alone[0]:
            yield tuple(behind)


def _are_over(choices: Sequence[GrowingChoice]) -> bool:
    return all(choice.finish is not None for choice in choices)
