"""Answers the calls of one episode's program: limits, retries, generation, the log.

A request with the prompt and limits of an earlier one is a new sample. It gets the earlier answer
only if the program's client marks it as a retry, or if that answer never arrived.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any, Literal, TypeAlias

import numpy as np

from ...broker.client.fair_queue import end_tasks
from ...broker.client.parts import Tell
from ...broker.partial_rollouts import Fenced
from ...envs.agents.episode import ContextTooLong, EpisodeLimit, EpisodeOver
from ...schemas.agent import CallDelivered, CallPart, CallRequest
from ...schemas.config.job import JobConfig
from ...schemas.generation import Decoding, Delta
from ...schemas.model_apis.canonical import digest_of, pictures_of
from ...schemas.profile import TimeUse
from ...schemas.wire import errors
from ..engine.engine import Drawn, Engine, Generation, Sampling, nothing
from ..policy.chat import ChatTokenizer
from ..policy.grammar import OtherCallForm, OutputGrammars, TokenGrammar
from .agent_loop import EpisodeSampling
from .call_log import CallLog, PastAnswers, choices_of_answers, restore_calls
from .call_tree import CallPrompt, CallTree, ModelCall
from .choices import DeltaWriter, GrowingChoice, sampling_of
from .exact_calls import ExactCalls

# -- limits and sampling ---------------------------------------------------------------------------

LimitHit: TypeAlias = Literal["", "turns", "length"]
"""The episode's limit of calls, or a limit of tokens."""
_IMAGES_SHARE = 0.75
"""Share of a group's message for images; the rest is for tokens and texts."""
_NO_MORE = "end the program with the results so far"


class CallLimits:
    """The limits of one episode, and the limit that was reached."""

    def __init__(self, config: JobConfig, message_bytes: int | None = None) -> None:
        """Read the limits of a job.

        The images of an episode are bounded by its share of its group's message of at most
        `message_bytes`; None: no bound.
        """
        self.hit: LimitHit = ""
        self._num_episodes = config.rollout.group_size + (config.algorithm.advantage == "remax")
        self._image_bytes = message_bytes and int(
            _IMAGES_SHARE * message_bytes / self._num_episodes
        )
        self._images: dict[str, int] = {}
        self._max_calls = config.agent.max_calls
        self._max_tokens = config.agent.max_tokens
        self._max_turn_tokens = config.rollout.max_turn_tokens
        self._max_context = config.rollout.max_tokens

    def check_context(self, num_prompt: int) -> None:
        """Raise ContextTooLong for a prompt that leaves no room for an answer."""
        if num_prompt >= self._max_context:
            self.hit = "length"
            raise ContextTooLong.of(num_prompt, self._max_context)

    def show(self, pictures: Iterable[bytes]) -> None:
        """Count images in prompts, each once.

        Raises EpisodeLimit if the images of the episode are too large together.
        """
        fresh = {digest_of(picture): len(picture) for picture in pictures}
        shown = self._images | fresh
        total = sum(shown.values())
        if fresh and self._image_bytes is not None and total > self._image_bytes:
            self.hit = "length"
            raise EpisodeLimit(
                f"the episode's images have {total:,} bytes together, over its share of "
                f"{self._image_bytes:,}: a task's {self._num_episodes} episodes are one message",
                hint="send fewer or smaller images, or set a smaller rollout.group_size",
            )
        self._images = shown

    def room(self, decoding: Decoding, num_prompt: int, num_calls: int, num_generated: int) -> int:
        """Return the maximum number of tokens of each choice of a request.

        `num_calls` were answered or are being answered, with `num_generated` tokens. Raises
        EpisodeLimit if no calls or tokens are left.
        """
        if num_calls + decoding.num_choices > self._max_calls:
            self.hit = "turns"
            raise EpisodeLimit(
                f"the episode has {num_calls} calls of the model, agent.max_calls is "
                f"{self._max_calls}",
                hint=_NO_MORE,
            )
        room = min(self._max_turn_tokens, self._max_context - num_prompt)
        room = min(room, decoding.max_tokens or room)
        if self._max_tokens is None:
            return room
        if num_generated >= self._max_tokens:
            self.hit = "length"
            raise EpisodeLimit(
                f"the model has generated {num_generated} tokens in the episode, agent.max_tokens "
                f"is {self._max_tokens}",
                hint=_NO_MORE,
            )
        return min(room, self._max_tokens - num_generated)


class CallDrawing:
    """Sampling parameters of an episode's answers."""

    def __init__(
        self,
        sampling: EpisodeSampling,
        stop_token_ids: tuple[int, ...],
        seed: int,
        *,
        obeys_program: bool,
    ) -> None:
        """Use the job's sampling, or with `obeys_program` that of each request."""
        self._sampling = sampling
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        self._obeys_program = obeys_program

    def sampling(self, decoding: Decoding, room: int, prompt: bytes, number: int) -> Sampling:
        """Return how a sample is drawn; its seed follows from `prompt` (a digest) and `number`."""
        digest = blake2b(f"{self._seed} {number}".encode() + prompt, digest_size=7).digest()
        sampling = sampling_of(
            decoding if self._obeys_program else Decoding(),
            self._sampling,
            max_new_tokens=room,
            stop_token_ids=self._stop_token_ids,
            seed=int.from_bytes(digest, "little"),
        )
        return replace(sampling, num_top=decoding.top_logprobs)


# -- repeated requests -----------------------------------------------------------------------------
# A request is identified by its digest, which equal requests share, by its id at the proxy, and by
# the names of its choices, once the proxy has them.


class KnownAnswers:
    """The answers of one try, by their requests."""

    def __init__(self, tree: CallTree) -> None:
        """Find answers among the calls of `tree`."""
        self._tree = tree
        self._by_request: dict[bytes, list[int]] = {}
        self._by_request_id: dict[str, list[int]] = {}
        self._by_name: dict[tuple[bytes, str], list[int]] = {}
        """By digest and name: a dead generator may have sent a name without logging the answer, and
        its successor may give that name to another one."""
        self._presumed = set[int]()

    def restore(self) -> None:
        """Add the logged calls of the tree, which count as delivered until they are requested."""
        for call in self._tree.calls:
            if call.delivered is None:
                self._presumed.add(call.number)
                call.delivered = True
        for choices in choices_of_answers(self._tree.calls):
            first = choices[0]
            self.add(first.request_digest, [first.request_id], [call.number for call in choices])

    def add(self, request: bytes, request_ids: Iterable[str], numbers: Sequence[int]) -> None:
        """Add an answer; `numbers` are its choices in the tree, `request_ids` come from proxies."""
        self._by_request[request] = known = list(numbers)
        for request_id in request_ids:
            self._by_request_id[request_id] = known
        for number in numbers:
            self._by_name[request, self._tree.calls[number].name] = known

    def find(self, request: CallRequest, digest: bytes) -> list[int]:
        """Return the calls that answer a repeated request; empty for a new sample.

        If a generator died between two choices, there are fewer calls than choices.
        """
        for name in begun_names(request):
            if known := self._by_name.get((digest, name)):
                return known
        if continues_answer(request):
            return self._by_request_id.get(first_request_id(request), [])
        last = self._by_request.get(digest, [])
        undelivered = all(self._tree.calls[number].delivered is False for number in last)
        return last if request.is_retry or undelivered else []

    def note_repeated(self, numbers: Sequence[int]) -> None:
        """Record that an answer is sent again, and may not arrive."""
        for call in (self._tree.calls[number] for number in numbers):
            if call.delivered is False or call.number in self._presumed:
                call.delivered = None
        self._presumed.difference_update(numbers)


def first_request_id(request: CallRequest) -> str:
    """Return the id of the proxy's first request for an answer."""
    return request.request.partition("-")[0]


def continues_answer(request: CallRequest) -> bool:
    """Whether a proxy requests the rest of an answer whose generator has died."""
    return "-" in request.request


def begun_names(request: CallRequest) -> Sequence[str]:
    """Return the names of the choices that a program has in part."""
    return request.begun.names if request.begun is not None else ()


@dataclass(eq=False)
class OpenAnswer:
    """An answer in progress: its choices and its readers."""

    digest: bytes
    """Of the request's prompt and limits."""
    prompts: list[CallPrompt]
    """Of each choice; they differ in their names."""
    choices: list[GrowingChoice]
    generated: dict[int, Generation]
    """The recorded tokens of each choice that has ended, by its index."""
    opening: CallPart
    """The fields of its first part."""
    request_ids: list[str]
    """Ids of the proxies' requests for it; the first one began it."""
    task: "asyncio.Task[list[int]]" = field(init=False)
    """Generates and logs it; returns the numbers of the calls."""
    num_listeners: int = 0
    """Number of requests that wait for it; a disconnected program may request it again."""
    on_change: "set[asyncio.Event]" = field(default_factory=set["asyncio.Event"])

    def is_known_to(self, request: CallRequest) -> bool:
        """Whether a request repeats one for this answer, or continues it."""
        names = begun_names(request)
        named = any(prompt.name in names for prompt in self.prompts)
        return named or first_request_id(request) in self.request_ids

    def changed(self, *_: object) -> None:
        """Wake its readers."""
        for event in self.on_change:
            event.set()

    async def send_parts(self, request: CallRequest, tell: Tell[CallPart]) -> CallPart:
        """Send the parts of the growing answer that were not sent before; return the last part."""
        changed = asyncio.Event()
        self.on_change.add(changed)
        writer = DeltaWriter(self.choices, request.begun.deltas if request.begun else ())
        blank = CallPart(delivery=self.opening.delivery)
        head = self.opening

        async def send(deltas: list[Delta]) -> None:
            nonlocal head
            part, head = head.model_copy(update={"deltas": deltas}), blank
            await tell(part)

        try:
            if request.stream:
                await send([])
                await writer.stream(changed, self.task.done, send, ends=False)
            calls = await asyncio.shield(self.task)
            *messages, last = await writer.last_messages()
            for deltas in messages:
                await send(deltas)
            return head.model_copy(update={"deltas": last, "calls": calls})
        finally:
            self.on_change.discard(changed)


MAX_OPEN = 64
"""Maximum number of concurrent answers of one episode."""
ADOPT_S = 30.0
"""Seconds for which an answer without readers continues, since a client may reconnect."""
_LARGE_CHARS = 1 << 16


class CallAnswers:
    """Answers the calls of one episode."""

    def __init__(
        self,
        episode: str,
        engine: Engine,
        chat: ChatTokenizer,
        config: JobConfig,
        sampling: EpisodeSampling,
        log: CallLog,
        time_use: TimeUse,
        message_bytes: int | None = None,
        grammars: OutputGrammars | None = None,
    ) -> None:
        """`log` has the earlier answers if another generator began the episode; `message_bytes` as
        in `CallLimits`."""
        self.without_effect: set[str] = set()
        """Fields of the program's requests without effect."""
        self.num_replayed = 0
        """Tokens of earlier answers that were sent to a restarted program."""
        self.generate_s = 0.0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when another generator has taken the episode over."""
        self._episode = episode
        self._engine = engine
        self._chat = chat
        self._grammars = grammars or OutputGrammars(chat)
        self._limits = CallLimits(config, message_bytes)
        obeys = config.agent.sampling == "request"
        self._drawing = CallDrawing(
            sampling, chat.stop_token_ids, log.drawing_seed, obeys_program=obeys
        )
        self._keeps_reasoning = config.agent.reasoning == "keep"
        self._log = log
        self._time_use = time_use
        self._over = ""
        self._order = asyncio.Lock()
        self._conversations: set[str] = set()
        self._generations = count()
        """Numbers for the engine's request ids; names are not unique, see `KnownAnswers`."""
        self._begin_tree()
        restore_calls(log.segments, self._exact)
        self._known.restore()
        for call in self.tree.calls:
            self._count_sample(call)
            self._limits.show(pictures_of(call.given))

    def _begin_tree(self) -> None:
        self._exact = ExactCalls(self._chat, keeps_reasoning=self._keeps_reasoning)
        self._past = PastAnswers()
        self._open: list[OpenAnswer] = []
        self._known = KnownAnswers(self.tree)
        self._num_drawn: dict[bytes, int] = {}
        """Number of samples begun for each prompt."""

    @property
    def limit_hit(self) -> LimitHit:
        """The limit for which a call was refused."""
        return self._limits.hit

    @property
    def tree(self) -> CallTree:
        """The answered calls."""
        return self._exact.tree

    async def answer(self, request: CallRequest, tell: Tell[CallPart]) -> CallPart:
        """Answer one call; raises EpisodeOver, EpisodeLimit, ContextTooLong, ModelError."""
        self._check_open()
        self.without_effect.update(request.without_effect)
        prompt = await self._prepare(request)
        if request.count_only:
            return self._opening(request, [prompt])
        decoding = request.decoding
        limits: list[object] = [decoding.num_choices, decoding.max_tokens, decoding.stop]
        if decoding.format is not None:
            limits.append(decoding.format)
            prompt = replace(prompt, grammar=await self._grammar(request, prompt))
        digest = prompt.digest_with(*limits)
        answer = self._earlier(request, prompt, digest) or self._begin(request, prompt, digest)
        answer.num_listeners += 1
        try:
            with self._time_use.doing("generate"):
                return await answer.send_parts(request, tell)
        finally:
            answer.num_listeners -= 1
            if not answer.num_listeners and not answer.task.done():
                asyncio.get_running_loop().call_later(ADOPT_S, _give_up, answer)

    def note_delivered(self, delivered: CallDelivered) -> None:
        """Record whether answers arrived."""
        for number in delivered.calls:
            if number < len(self.tree.calls):
                call = self.tree.calls[number]
                call.delivered = bool(call.delivered) or delivered.whole

    async def start_again(self) -> None:
        """Start again with a restarted program; its repeated requests get the earlier answers."""
        await self._end_open()
        calls = self.tree.calls
        self._begin_tree()
        self._past = PastAnswers(calls)

    async def close(self, why: str) -> None:
        """Refuse further calls with the reason, and end those in progress."""
        self._over = why
        try:
            await self._end_open()
        finally:
            for conversation in self._conversations:
                self._engine.release(conversation)

    async def _end_open(self) -> None:
        await end_tasks(answer.task for answer in self._open)

    def _check_open(self) -> None:
        if self._over:
            raise EpisodeOver(f"the episode is over: {self._over}", hint="end the program")
        if len(self._open) >= MAX_OPEN:
            raise errors.BusyError(
                f"{MAX_OPEN} calls of this episode are in progress, the limit",
                hint="wait for one of them to end",
            )

    async def _prepare(self, request: CallRequest) -> CallPrompt:
        """Render the new messages, in a thread if they are long."""
        previous = None
        if request.previous is not None:
            if request.previous >= len(self.tree.calls):
                raise errors.NotFoundError(
                    f"the episode has no answer {request.previous} that could be continued",
                    hint="send the whole history",
                )
            previous = self.tree.calls[request.previous]
        prepare = partial(
            self._exact.prepare,
            request.messages,
            request.tools,
            previous=previous,
            is_prefill=request.is_prefill,
        )
        size = sum(len(part) for message in request.messages for part in message.content)
        async with self._order:
            prompt = await asyncio.to_thread(prepare) if size > _LARGE_CHARS else prepare()
        if not request.count_only:
            self._limits.check_context(prompt.num_prompt)
            self._limits.show(pictures_of(prompt.given))
        return prompt

    async def _grammar(self, request: CallRequest, prompt: CallPrompt) -> TokenGrammar | None:
        """Return the grammar of the required form; raises ConfigError for an unsupported one.

        None if the model's template writes calls in another form. This is reported as a field
        without effect, not an error, because some programs require calls but work without.
        """
        required = request.decoding.format
        assert required is not None
        if prompt.prefill:
            raise errors.ConfigError(
                "a request cannot both begin the answer and require a form of it",
                hint="remove the assistant's message at the end, or the form",
            )
        try:
            return await self._grammars.of(required, request.tools, thinking=bool(prompt.opened))
        except OtherCallForm:
            is_json = required.json_schema is not None
            self.without_effect.add("response_format" if is_json else "tool_choice")
            return None

    def _earlier(
        self, request: CallRequest, prompt: CallPrompt, digest: bytes
    ) -> OpenAnswer | None:
        """Return the earlier answer to a repeated request; None: it is a new sample."""
        if running := self._running(request, digest):
            running.request_ids.append(first_request_id(request))
            return running
        if past := self._past.next_answer(digest):
            self.num_replayed += sum(call.num_generated for call in past)
            self._count_sample(prompt, len(past))
            prompts = [self._exact.under_name(prompt, call.name) for call in past]
            return self._begin(request, prompt, digest, past, prompts)
        if numbers := self._known.find(request, digest):
            self._known.note_repeated(numbers)
            known = [self.tree.calls[number] for number in numbers]
            return self._begin(request, prompt, digest, known, known)
        return None

    def _running(self, request: CallRequest, digest: bytes) -> OpenAnswer | None:
        """Return the answer in progress that this request repeats, or None."""
        for answer in list(self._open):
            if answer.task.done():  # its done callback was not called yet
                self._ended(answer, answer.task)
        equal = [answer for answer in self._open if answer.digest == digest]
        matching = [answer for answer in equal if answer.is_known_to(request)]
        if not matching and not continues_answer(request):
            unread = [answer for answer in equal if not answer.num_listeners]
            matching = unread or (equal if request.is_retry else [])
        return matching[-1] if matching else None

    def _opening(self, request: CallRequest, prompts: Sequence[CallPrompt]) -> CallPart:
        first = prompts[0]
        return CallPart(
            delivery=self._log.delivery,
            names=[prompt.name for prompt in prompts],
            opened=first.opened,
            prompt_tokens=first.num_prompt,
            prompt_token_ids=[first.prompt_ids.tolist()] if request.token_ids else [],
            num_reused=first.num_prompt - len(first.given_ids),
            parent=None if first.parent is None else first.parent.number,
            branch=first.branch,
        )

    def _begin(
        self,
        request: CallRequest,
        prompt: CallPrompt,
        digest: bytes,
        known: Sequence[ModelCall] = (),
        prompts: Sequence[CallPrompt] = (),
    ) -> OpenAnswer:
        """Begin an answer: the first choices are `known`, the others are generated.

        Some are known if a generator died between two of them. `prompts` are those of the known
        ones: calls of the tree, or repeated requests of a restarted program. Raises EpisodeLimit if
        no further choice may be generated.
        """
        decoding, request_id = request.decoding, first_request_id(request)
        in_tree = [call.number for call in prompts if isinstance(call, ModelCall)]
        if in_tree:  # all choices answer one request, at the same place in the tree
            prompt = _at_place_of(known[0], prompt)
        more = range(len(known), decoding.num_choices)
        names = begun_names(request)
        new_prompts = [self._exact.another(prompt) if number else prompt for number in more]
        all_prompts = [
            *prompts,
            *(
                self._exact.under_name(new, names[number]) if number < len(names) else new
                for new, number in zip(new_prompts, more, strict=True)
            ),
        ]
        choices = [
            GrowingChoice(
                number,
                self._chat,
                decoding.stop,
                request.tools,
                num_top=decoding.top_logprobs,
                by_token=request.stream,
                tells_tokens=request.logprobs,
                tells_policy=True,
                thinking=bool(prompt.opened),
            )
            for number in range(len(all_prompts))
        ]
        for choice, call in zip(choices, known, strict=False):
            choice.restore(call.generated, call.text)
        answer = OpenAnswer(
            digest,
            all_prompts,
            choices,
            {number: call.generated for number, call in enumerate(known)},
            self._opening(request, all_prompts),
            [known[0].request_id if in_tree else request_id, request_id],
        )
        samplings = self._samplings(decoding, prompt, len(more), len(in_tree)) if more else []
        for begun in request.begun.deltas if request.begun is not None else ():
            if begun.choice in more:
                for token in zip(begun.token_ids, begun.logprobs, begun.versions, strict=True):
                    choices[begun.choice].add(Drawn(*token))
        if len(in_tree) == len(choices):
            self._known.add(digest, answer.request_ids, in_tree)
            answer.task = asyncio.create_task(_known_numbers(in_tree))
            answer.task.add_done_callback(answer.changed)
            return answer
        return self._started(answer, self._generate_all(answer, samplings, in_tree))

    def _samplings(
        self, decoding: Decoding, prompt: CallPrompt, num: int, num_in_tree: int
    ) -> list[Sampling]:
        """Return the sampling of `num` new choices of a request with `num_in_tree` others.

        Raises EpisodeLimit if the episode has no calls or tokens left.
        """
        num_calls = len(self.tree.calls) - num_in_tree
        num_calls += sum(len(answer.choices) for answer in self._open)
        num_tokens = sum(call.num_generated for call in self.tree.calls)
        room = self._limits.room(decoding, prompt.num_prompt, num_calls, num_tokens)
        digest, num_drawn = self._count_sample(prompt, num)
        samplings = [
            self._drawing.sampling(decoding, room, digest, number)
            for number in range(num_drawn, num_drawn + num)
        ]
        return [replace(sampling, grammar=prompt.grammar) for sampling in samplings]

    def _count_sample(self, prompt: CallPrompt, num: int = 1) -> tuple[bytes, int]:
        """Count samples of a prompt; return its digest and the number of earlier samples."""
        digest = prompt.digest_with()
        drawn = self._num_drawn.get(digest, 0)
        self._num_drawn[digest] = drawn + num
        return digest, drawn

    def _started(self, answer: OpenAnswer, work: "Coroutine[Any, Any, list[int]]") -> OpenAnswer:
        answer.task = asyncio.create_task(work, name=f"answer of {self._episode}")
        self._open.append(answer)
        answer.task.add_done_callback(partial(self._ended, answer))
        answer.task.add_done_callback(answer.changed)
        return answer

    def _ended(self, answer: OpenAnswer, task: "asyncio.Task[list[int]]") -> None:
        if answer not in self._open:
            return  # it was handled already
        self._open.remove(answer)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._known.add(answer.digest, answer.request_ids, task.result())
        elif isinstance(error, Fenced) and not self.failed.done():
            self.failed.set_exception(error)

    async def _generate_all(
        self,
        answer: OpenAnswer,
        samplings: Sequence[Sampling],
        numbers: Sequence[int],
    ) -> list[int]:
        """Generate the last choices and log them; return the call numbers of all choices.

        `numbers` are those of the first ones, which are logged already.
        """
        first = len(answer.choices) - len(samplings)
        started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for number, sampling in enumerate(samplings, first):
                    group.create_task(self._generate(answer, number, sampling))
        except BaseExceptionGroup as raised:
            raise errors.root_cause(raised) from raised
        finally:
            self.generate_s += time.perf_counter() - started
        calls = [*numbers, *await self._commit(answer, len(numbers))]
        if not answer.num_listeners:
            self.note_delivered(CallDelivered(calls=calls, whole=False))
        return calls

    async def _generate(self, answer: OpenAnswer, number: int, sampling: Sampling) -> None:
        prompt, choice = answer.prompts[number], answer.choices[number]
        begun = [drawn.token_id for drawn in choice.drawn]
        ended = bool(begun) and begun[-1] in sampling.stop_token_ids
        generation = replace(nothing(), finish_reason="stop" if ended else "length")
        if not ended and not choice.stopped and len(begun) < sampling.max_new_tokens:
            name = f"{self._episode}.{next(self._generations)}"
            room = sampling.max_new_tokens - len(begun)
            draw = partial(
                self._engine.generate,
                prompt.ids_with(begun),
                replace(sampling, max_new_tokens=room, num_drawn=len(begun)),
                request_id=name,
                conversation=self._conversation(prompt),
                images=prompt.images,
            )
            cancel = partial(self._engine.cancel, name)
            generation = await choice.generate(draw, cancel, answer.changed)
            if generation.finish_reason == "cancelled" and not choice.stopped:
                raise errors.EngineError(f"the engine ended request {name} without an answer")
        choice.end(generation.finish_reason)
        answer.generated[number] = _recorded(choice, generation)
        answer.changed()

    def _conversation(self, prompt: CallPrompt) -> str:
        """Return the engine's name of a call's cache, which it shares with its root."""
        name = f"{self._episode}.{(prompt.parent.root if prompt.parent else prompt).name}"
        self._conversations.add(name)
        return name

    async def _commit(self, answer: OpenAnswer, start: int) -> list[int]:
        """Log the choices from `start` on, before the program gets the end of the answer."""
        numbers: list[int] = []
        async with self._order:
            for number in range(start, len(answer.choices)):
                call = self._exact.answered(
                    answer.prompts[number],
                    answer.generated[number],
                    answer.choices[number].own_text,
                    request_digest=answer.digest,
                    request_id=answer.request_ids[0],
                    ended=time.time(),
                )
                await self._log.append(call)
                self.tree.add(call)
                numbers.append(call.number)
        return numbers


def _at_place_of(call: ModelCall, prompt: CallPrompt) -> CallPrompt:
    """Return a request at the place in the tree of an earlier answer to it."""
    return replace(
        prompt,
        parent=call.parent,
        given=call.given,
        branch=call.branch,
        num_seen=call.num_seen,
        follows=call.follows,
    )


def _recorded(choice: GrowingChoice, generation: Generation) -> Generation:
    """Return the recorded tokens of a choice, without those that are part of a stop text.

    `masked` is 0 for tokens that another generator drew before those of `generation`.
    """
    num, drawn = choice.num_whole_tokens(), choice.drawn
    masked = generation.masked
    if masked is not None:
        known = masked[: len(drawn)]
        before = np.zeros(len(drawn) - len(known), np.float32)
        masked = np.concatenate([before, known])[:num]
    return Generation(
        np.array([token.token_id for token in drawn[:num]], np.int32),
        np.array([token.logprob for token in drawn[:num]], np.float32),
        np.array([token.version for token in drawn[:num]], np.int32),
        "length" if choice.finish == "length" else "stop",
        masked=masked,
    )


def _give_up(answer: OpenAnswer) -> None:
    """End an answer whose program has disconnected and did not reconnect."""
    if not answer.num_listeners:
        answer.task.cancel()


async def _known_numbers(numbers: list[int]) -> list[int]:
    return numbers
