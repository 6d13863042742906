"""Chats and completions: from a request to prompts, from tokens to text, choice by choice.

Log-probs of prompts are returned in pieces that fit a message.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from ...broker.client.parts import Tell
from ...schemas.chat_messages import Origin, read_conversation, read_tools
from ...schemas.infer import (
    ChatRequest,
    CompletionRequest,
    Decoding,
    Delta,
    InferPart,
    PromptScore,
)
from ...schemas.wire import errors
from ...schemas.wire.array import IntVector
from ...schemas.wire.images import images_of
from ..engine.engine import Drawn, Generation, OnToken, PromptScores, Sampling, tops_of
from ..policy.chat import ChatTokenizer
from ..policy.grammar import OutputGrammars, TokenGrammar
from ..policy.token_text import TextStream
from .template_facts import call_format, certain_text, hermes_text

# -- log-probs of prompts --------------------------------------------------------------------------

_PIECE_VALUES = 1 << 17
"""Log-probs, texts and ids of one message: a few megabytes at most."""

Score = Callable[[int, Sequence[int]], Awaitable[PromptScores]]
TellScores = Callable[[list[PromptScore]], Awaitable[None]]


async def score_prompts(prompts: Sequence[Sequence[int]], score: Score, tell: TellScores) -> None:
    """Score prompts concurrently, by number and tokens, and send each result at once."""

    async def one(number: int, ids: Sequence[int]) -> None:
        for piece in pieces(number, await score(number, ids)):
            await tell([piece])

    async with asyncio.TaskGroup() as group:
        for number, ids in enumerate(prompts):
            group.create_task(one(number, ids), name=f"score {number}")


def pieces(prompt: int, scores: PromptScores) -> list[PromptScore]:
    """Cut the scores of a prompt into messages."""
    rows = max(1, _PIECE_VALUES // (1 + 2 * scores.top_ids.shape[1]))
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
_SHOWN = 200
_GATHER_S = 0.02
"""Tokens within this time are sent together: fewer messages, still faster than reading."""


class GeneratesTokens(Protocol):
    """What of an engine is needed to answer."""

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
        """End a request: its `generate` returns what it has."""
        ...


@dataclass
class Choice:
    """One answer as it grows, and its unsent part."""

    number: int
    chat: ChatTokenizer
    text: TextStream
    logprobs: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    """For calls in the model's own format, which are sent when the text is whole."""
    drawn: list[Drawn] = field(default_factory=list[Drawn])
    """All of its tokens, up to a stop text."""
    finish: Literal["stop", "length", "cancelled"] | None = None
    _fresh: list[Drawn] = field(default_factory=list[Drawn])
    _words: list[str] = field(default_factory=list[str])
    _sent: bool = False
    _plain: str = ""
    _num_sent: int = 0

    def begin(self, opened: str) -> None:
        """Begin with the mark by which the prompt has opened the reasoning of the answer."""
        self._words.append(opened)

    def add(self, drawn: Drawn) -> None:
        """Add the next token; nothing counts behind a stop text."""
        if self.text.stopped:
            return
        self.drawn.append(drawn)
        self._fresh.append(drawn)
        self._add_text(self.text.push(drawn.token_id))

    def end(self, generation: Generation) -> None:
        """Take note of the end."""
        self._add_text(self.text.finish(), last=True)
        self.finish = "stop" if self.text.stopped else generation.finish_reason

    def set_whole(self, generation: Generation) -> None:
        """Take an answer that was not streamed."""
        columns = (generation.token_ids, generation.logprobs, generation.versions)
        rows = zip(*(c.tolist() for c in columns), tops_of(generation), strict=True)
        self.drawn = [Drawn(*drawn) for drawn in rows]
        self._fresh = list(self.drawn)
        self._add_text(self.chat.decode(generation.token_ids), last=True)
        self.finish = generation.finish_reason

    def _add_text(self, text: str, *, last: bool = False) -> None:
        if not self.tools:
            self._words.append(text)
            return
        self._plain += text
        tell = hermes_text if last else certain_text
        whole = tell(self.chat, self._plain, self.tools)
        self._words.append(whole[self._num_sent :])
        self._num_sent = len(whole)

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return len(self.drawn)

    def delta(self) -> Delta | None:
        """Return what is new since the last call, or None."""
        text = "".join(self._words)
        ended = self.finish is not None and not self._sent
        if not (text or self._fresh or ended):
            return None
        fresh, self._fresh, self._words, self._sent = self._fresh, [], [], ended
        named = self._named(fresh) if self.logprobs else []
        return Delta(
            choice=self.number,
            text=text,
            token_ids=[drawn.token_id for drawn in fresh],
            tokens=[token for token, _ in named],
            token_bytes=[encoded for _, encoded in named],
            logprobs=[drawn.logprob for drawn in fresh] if self.logprobs else [],
            top_tokens=[[self.chat.token_text(t) for t, _ in d.top] for d in fresh if d.top],
            top_bytes=[[self.chat.token_bytes(t) for t, _ in d.top] for d in fresh if d.top],
            top_logprobs=[[logprob for _, logprob in d.top] for d in fresh if d.top],
            finish=self.finish,
            stop=self.text.stop if ended else "",
        )

    def _named(self, fresh: Sequence[Drawn]) -> list[tuple[str, bytes]]:
        """Return the text and the bytes of the newest tokens, each by itself."""
        begins = len(self.drawn) == len(fresh)
        images: list[tuple[str, bytes]] = []
        for number, drawn in enumerate(fresh):
            encoded = self.chat.token_bytes(drawn.token_id, first=begins and not number)
            text = encoded.decode(errors="replace") or self.chat.token_text(drawn.token_id)
            images.append((text, encoded))
        return images


@dataclass(frozen=True)
class _Prompt:
    """What the engine is given for one prompt."""

    ids: list[int]
    images: Sequence[bytes] = ()
    opened: str = ""
    """The mark by which a chat's prompt opens the reasoning; the answer's text begins with it."""
    is_thinking: bool = False
    """Whether it has opened the reasoning of the answer."""


class _Head:
    """Fields about the prompts, sent once."""

    def __init__(self, request: Request, prompts: Sequence[_Prompt]) -> None:
        self._fields: dict[str, Any] = {"prompt_tokens": sum(len(prompt.ids) for prompt in prompts)}
        self._fields["is_thinking"] = any(prompt.is_thinking for prompt in prompts)
        self._ids = [prompt.ids for prompt in prompts] if request.token_ids else []

    def next_fields(self) -> dict[str, Any]:
        """Return it for the next part."""
        ids, self._ids = self._ids, []
        return {**self._fields, "prompt_token_ids": ids}


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
    ) -> None:
        """`max_open` bounds the choices that are generated or wait at the same time."""
        self._engine = engine
        self._chat = chat
        self._grammars = OutputGrammars(chat)
        self._model_name = model_name
        self._max_context = max_context
        self._max_open = max_open
        self._num_open = 0

    async def chat(self, request: ChatRequest, tell: Tell[InferPart]) -> InferPart:
        """Continue a conversation; DataError for messages or tools that cannot be read."""
        messages = read_conversation(request.messages, Origin("messages", is_request=True))
        tools = read_tools(request.tools, Origin("tools", is_request=True))
        request = request.model_copy(update={"messages": messages, "tools": tools})
        return await self._answer(request, [await asyncio.to_thread(self._read, request)], tell)

    def _read(self, request: ChatRequest) -> _Prompt:
        """Return the tokens and the images of a conversation; it may hold whatever msgpack can."""
        try:
            images = images_of(request.messages)
            ids = self._chat.at(time.time()).prompt(request.messages, request.tools)
            thinking = self._chat.opens_thinking(ids)
            return _Prompt(ids, images, opened=self._chat.opened(ids), is_thinking=thinking)
        except errors.TinkermqError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
            raise errors.MessageError(
                f"the conversation cannot be read: {type(error).__name__}: {str(error)[:_SHOWN]}",
                hint="a message has a role and a content: a text, or a list of parts",
            ) from error

    async def complete(self, request: CompletionRequest, tell: Tell[InferPart]) -> InferPart:
        """Continue texts as they are."""
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
            choices = [self._choice(request, n) for n in range(len(prompts) * copies)]
            for choice in choices:
                choice.begin(prompts[choice.number // copies].opened)
            head = _Head(request, prompts)
            try:
                async with asyncio.timeout(request.deadline_s), asyncio.TaskGroup() as group:
                    changed = asyncio.Event()
                    if isinstance(request, CompletionRequest):
                        await self._score(request, prompts, tell)
                    for choice in choices if draws else ():
                        of = choice.number // copies
                        work = self._generate(
                            request, choice, prompts[of], samplings[of], copies, changed
                        )
                        group.create_task(work, name=f"choice {choice.number}")
                    if request.stream and draws:
                        await self._stream(choices, changed, head, tell)
            except TimeoutError:
                raise errors.DeadlineError(
                    f"the answer was not complete after {request.deadline_s:g} s",
                    hint="allow more time, or fewer tokens",
                ) from None
            except BaseExceptionGroup as group:
                raise errors.root_cause(group) from group
            # in a thread: log-probs of long answers take seconds, and others are answered here
            deltas = [await asyncio.to_thread(choice.delta) for choice in choices]
            *told, last = _messages_of([delta for delta in deltas if delta is not None])
            for some in told:
                await tell(InferPart(model=self._model_name(), deltas=some, **head.next_fields()))
                await asyncio.sleep(0)
        return InferPart(
            model=self._model_name(),
            deltas=last,
            **head.next_fields(),
            completion_tokens=sum(choice.num_tokens for choice in choices),
        )

    async def _grammar(self, request: Request, prompts: Sequence[_Prompt]) -> TokenGrammar | None:
        """Return what holds the answers to their form; None: they have none."""
        wanted = request.decoding.format
        if wanted is None:
            return None
        tools = request.tools if isinstance(request, ChatRequest) else ()
        thinking = any(prompt.is_thinking for prompt in prompts)
        return await self._grammars.of(wanted, tools, thinking=thinking)

    async def _score(
        self,
        request: CompletionRequest,
        prompts: Sequence[_Prompt],
        tell: Tell[InferPart],
    ) -> None:
        """Tell the log-probs of the prompts' tokens, if they were asked for."""
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
        request: Request,
        choice: Choice,
        prompt: _Prompt,
        sampling: Sampling,
        copies: int,
        changed: asyncio.Event,
    ) -> None:
        name = f"{request.request}.{choice.number}"
        bit_by_bit = request.stream or bool(request.decoding.stop)

        def note_token(drawn: Drawn) -> None:
            choice.add(drawn)
            changed.set()
            if choice.text.stopped:
                self._engine.cancel(name)

        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + choice.number % copies)
        generation = await self._engine.generate(
            prompt.ids,
            sampling,
            request_id=name,
            on_token=note_token if bit_by_bit else None,
            images=prompt.images,
        )
        if bit_by_bit:
            choice.end(generation)
        else:
            choice.set_whole(generation)
        changed.set()

    async def _stream(
        self,
        choices: Sequence[Choice],
        changed: asyncio.Event,
        head: _Head,
        tell: Tell[InferPart],
    ) -> None:
        """Tell what is new until every choice has ended; the rest goes with the last part."""
        while True:
            await changed.wait()
            changed.clear()
            if all(choice.finish is not None for choice in choices):
                return
            deltas = _deltas(choices)
            if deltas:
                await tell(InferPart(model=self._model_name(), deltas=deltas, **head.next_fields()))
                await asyncio.sleep(_GATHER_S)

    def _choice(self, request: Request, number: int) -> Choice:
        stream = TextStream(self._chat.decode, request.decoding.stop)
        tools = request.tools if isinstance(request, ChatRequest) else ()
        held = tools if tools and call_format(self._chat) is not None else ()
        choice = Choice(number, self._chat, stream, request.logprobs, held)
        if request.decoding.max_tokens == 0:
            choice.finish = "length"
        return choice

    def _sampling(
        self, decoding: Decoding, prompt_tokens: int, grammar: TokenGrammar | None
    ) -> Sampling:
        """Return how to sample after a prompt; ConfigError when there is no room."""
        room = self._max_context - prompt_tokens
        wanted = room if decoding.max_tokens is None else decoding.max_tokens
        if min(room, wanted) < int(decoding.max_tokens != 0) or wanted > room:
            limit = f" and max_tokens is {decoding.max_tokens}" if decoding.max_tokens else ""
            raise errors.ConfigError(
                f"the prompt has {prompt_tokens} tokens{limit}: the context of this model holds "
                f"{self._max_context}",
                hint="shorten the prompt, lower max_tokens, or serve with a larger max_model_len",
            )
        return Sampling(
            max_new_tokens=wanted,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            stop_token_ids=self._chat.stop_token_ids,
            seed=decoding.seed,
            grammar=grammar,
            presence_penalty=decoding.presence_penalty,
            frequency_penalty=decoding.frequency_penalty,
            repetition_penalty=decoding.repetition_penalty,
            num_top=decoding.top_logprobs,
        )

    @contextlib.contextmanager
    def _room(self, num_choices: int) -> Iterator[None]:
        if num_choices > self._max_open:
            raise errors.ConfigError(
                f"{num_choices} answers were asked for by one request, and this server generates "
                f"or queues {self._max_open} at most",
                hint="ask for fewer prompts or choices in one request, or serve with more "
                "generator.max_requests",
            )
        if self._num_open + num_choices > self._max_open:
            raise errors.BusyError(
                f"this server generates or queues {self._num_open} answers, at most "
                f"{self._max_open} are allowed, and {num_choices} more were asked for",
                hint="ask again later, or add servers: `tinkermq scale RUN servers=N`",
            )
        self._num_open += num_choices
        try:
            yield
        finally:
            self._num_open -= num_choices


def _draws(request: Request) -> bool:
    """Whether tokens are generated; ConfigError for a request of nothing."""
    if request.decoding.max_tokens != 0:
        return True
    if isinstance(request, ChatRequest) or request.prompt_logprobs is None:
        raise errors.ConfigError(
            "max_tokens is 0: nothing would be generated",
            hint="give 1 or more; 0 is for completions with prompt_logprobs",
        )
    return False


def _deltas(choices: Sequence[Choice]) -> list[Delta]:
    return [delta for choice in choices if (delta := choice.delta()) is not None]


def _messages_of(deltas: Sequence[Delta]) -> list[list[Delta]]:
    """Divide what is told into messages: many choices, or log-probs of many tokens, fill several.

    There is always one, which may be empty.
    """
    messages: list[list[Delta]] = [[]]
    room = _PIECE_VALUES
    for delta in deltas:
        width = 1 + 3 * len(delta.tokens[:1]) + 3 * max(map(len, delta.top_logprobs), default=0)
        for piece in cut(delta, max(1, _PIECE_VALUES // width)):
            num_values = len(piece.text) + width * len(piece.token_ids)
            if messages[-1] and num_values > room:
                messages.append([])
                room = _PIECE_VALUES
            messages[-1].append(piece)
            room -= num_values
    return messages


_OF_TOKENS = (
    "token_ids",
    "tokens",
    "token_bytes",
    "logprobs",
    "top_tokens",
    "top_logprobs",
    "top_bytes",
)
"""Columns of a delta: each has a value for each token, or is empty."""


def cut(delta: Delta, num_tokens: int) -> Iterator[Delta]:
    """Yield a delta in pieces of so many tokens: the first has the text, the last the end."""
    starts = range(0, len(delta.token_ids), num_tokens) or range(1)
    for start in starts:
        columns = {name: getattr(delta, name)[start : start + num_tokens] for name in _OF_TOKENS}
        text = {} if start == 0 else {"text": ""}
        end = {} if start == starts[-1] else {"finish": None, "stop": ""}
        yield delta.model_copy(update={**columns, **text, **end})
