"""Answers the calls of one episode's program: limits, retries, generation, the log.

A request whose prompt and limits are those of an earlier one is a new sample, unless the program's
client says that it has asked before, or the earlier answer never arrived: then it is that answer.
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
from ...schemas.model_apis.canonical import Picture, pictures_of
from ...schemas.model_apis.request import history_of
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
"""The calls of an episode were used up, or its tokens or those of the model's context."""
_IMAGES_SHARE = 0.75
"""Of the message in which a group travels: the rest is for tokens and texts."""
_NO_MORE = "end the program with what there is"


class CallLimits:
    """The limits of one episode, and which of them was met."""

    def __init__(self, config: JobConfig, message_bytes: int | None = None) -> None:
        """Take the limits of a job.

        An episode's images get their share of a message of `message_bytes`, in which its group
        travels; default: no bound.
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

    def show(self, pictures: Iterable[Picture]) -> None:
        """Take notice of images that are shown; each counts once.

        Raises EpisodeLimit when those of the episode are too large together.
        """
        fresh = {picture.digest: len(picture.encoded) for picture in pictures}
        shown = self._images | fresh
        total = sum(shown.values())
        if fresh and self._image_bytes is not None and total > self._image_bytes:
            self.hit = "length"
            raise EpisodeLimit(
                f"the episode's images have {total:,} bytes together, and may have "
                f"{self._image_bytes:,}: the {self._num_episodes} episodes of a task travel in one "
                "message",
                hint="send fewer or smaller images, or set a smaller rollout.group_size",
            )
        self._images = shown

    def room(self, decoding: Decoding, num_prompt: int, num_calls: int, num_generated: int) -> int:
        """Return how many tokens each choice of a request may have.

        `num_calls` were answered or are being answered, with `num_generated` tokens. Raises
        EpisodeLimit when the calls or the tokens are used up.
        """
        if num_calls + decoding.num_choices > self._max_calls:
            self.hit = "turns"
            raise EpisodeLimit(
                f"the episode has had {num_calls} calls of the model, agent.max_calls is "
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
    """How the answers of one episode are drawn."""

    def __init__(
        self,
        sampling: EpisodeSampling,
        stop_token_ids: tuple[int, ...],
        seed: int,
        *,
        obeys_program: bool,
    ) -> None:
        """Draw as the job says, or with `obeys_program` as the program asks."""
        self._sampling = sampling
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        self._obeys_program = obeys_program

    def sampling(self, decoding: Decoding, room: int, prompt: bytes, number: int) -> Sampling:
        """Return how a sample is drawn: the same for the same prompt (its digest) and number."""
        digest = blake2b(f"{self._seed} {number}".encode() + prompt, digest_size=7).digest()
        sampling = sampling_of(
            decoding if self._obeys_program else Decoding(),
            self._sampling,
            max_new_tokens=room,
            stop_token_ids=self._stop_token_ids,
            seed=int.from_bytes(digest, "little"),
        )
        return replace(sampling, num_top=decoding.top_logprobs)


# -- requests that are asked again -----------------------------------------------------------------
# A request is known by its digest, which equal requests share, by the id that its proxy gave it,
# and by the names of its choices, once the proxy has them.


class KnownAnswers:
    """The answers of one try so far, by what they answered."""

    def __init__(self, tree: CallTree) -> None:
        """`tree` has the calls."""
        self._tree = tree
        self._by_request: dict[bytes, list[int]] = {}
        self._by_asking: dict[str, list[int]] = {}
        self._by_name: dict[tuple[bytes, str], list[int]] = {}
        """With the request: what a dead generator has told and not written down may have a name
        that its successor gives to another one."""
        self._presumed = set[int]()

    def restore(self) -> None:
        """Take the calls of the tree, which were written down; they count as delivered."""
        for call in self._tree.calls:
            if call.delivered is None:  # or its program's proxy asks for it once more
                self._presumed.add(call.number)
                call.delivered = True
        for choices in choices_of_answers(self._tree.calls):
            first = choices[0]
            self.add(first.request, [first.asked], [call.number for call in choices])

    def add(self, request: bytes, askings: Iterable[str], numbers: Sequence[int]) -> None:
        """Take notice of an answer, all of whose choices in the tree `numbers` are.

        `askings` are the ids that proxies gave its requests.
        """
        self._by_request[request] = known = list(numbers)
        for asking in askings:
            self._by_asking[asking] = known
        for number in numbers:
            self._by_name[request, self._tree.calls[number].name] = known

    def find(self, request: CallRequest, digest: bytes) -> list[int]:
        """Return the calls that answer a request, for which no new sample is drawn; else none.

        They are fewer than its choices where a generator died between two of them.
        """
        for name in begun_names(request):
            if known := self._by_name.get((digest, name)):
                return known
        if is_asked_again(request):
            return self._by_asking.get(asking_of(request), [])
        last = self._by_request.get(digest, [])
        lost = all(self._tree.calls[number].delivered is False for number in last)
        return last if request.is_retry or lost else []

    def note_repeated(self, numbers: Sequence[int]) -> None:
        """Record that an answer is sent again; whether it arrives is not known yet."""
        for call in (self._tree.calls[number] for number in numbers):
            if call.delivered is False or call.number in self._presumed:
                call.delivered = None
        self._presumed.difference_update(numbers)


def asking_of(request: CallRequest) -> str:
    """Return the id by which a proxy asked for an answer first."""
    return request.request.partition("-")[0]


def is_asked_again(request: CallRequest) -> bool:
    """Whether a proxy asks for what it lacks of an answer, because its generator has died."""
    return "-" in request.request


def begun_names(request: CallRequest) -> Sequence[str]:
    """Return the names of the choices of which a program has a part."""
    return request.begun.names if request.begun is not None else ()


@dataclass(eq=False)
class OpenAnswer:
    """An answer that is being given: its choices, and who waits for them."""

    digest: bytes
    """Of the request, by its prompt and limits."""
    prompts: list[CallPrompt]
    """Of each choice; they differ in their names."""
    choices: list[GrowingChoice]
    generated: dict[int, Generation]
    """What is recorded of each choice that has ended, by its place."""
    opening: CallPart
    """The fields of its first part."""
    askings: list[str]
    """Ids by which proxies asked for it; the first began it."""
    task: "asyncio.Task[list[int]]" = field(init=False)
    """Generates it and writes it down; its result is the numbers of the calls."""
    num_listeners: int = 0
    """Its readers; a program that hangs up may come back for the answer."""
    on_change: "set[asyncio.Event]" = field(default_factory=set["asyncio.Event"])

    def is_known_to(self, request: CallRequest) -> bool:
        """Whether who asks has asked for it before, or has a part of it."""
        names = begun_names(request)
        named = any(prompt.name in names for prompt in self.prompts)
        return named or asking_of(request) in self.askings

    def changed(self, *_: object) -> None:
        """Wake its readers."""
        for event in self.on_change:
            event.set()

    async def send_parts(self, request: CallRequest, tell: Tell[CallPart]) -> CallPart:
        """Send the answer as it grows, after what was sent before; return the last part."""
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
"""Answers of one episode that are under way at the same time."""
ADOPT_S = 30.0
"""An answer whose program has hung up is kept for so long: its client may ask again."""
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
        """`log` has what was answered before, if another generator began the episode; see
        `CallLimits` for `message_bytes`."""
        self.without_effect: set[str] = set()
        """What the program has sent that changes nothing."""
        self.num_replayed = 0
        """Generated tokens that were sent again and not generated again."""
        self.generate_s = 0.0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with what ends the episode here: another generator has it."""
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
        """Numbers in the engine; a name may be that of two choices, see `KnownAnswers`."""
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
        """How many samples of a prompt were begun."""

    @property
    def limit_hit(self) -> LimitHit:
        """Which limit a call was refused for."""
        return self._limits.hit

    @property
    def tree(self) -> CallTree:
        """The calls that were answered."""
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
        digest = prompt.request_digest(*limits)
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
        """Take notice of whether answers arrived."""
        for number in delivered.calls:
            if number < len(self.tree.calls):
                call = self.tree.calls[number]
                call.delivered = bool(call.delivered) or delivered.whole

    async def start_again(self) -> None:
        """Begin anew, for a program that does: what it asks once more is answered as it was."""
        await self._end_open()
        calls = self.tree.calls
        self._begin_tree()
        self._past = PastAnswers(calls)

    async def close(self, why: str) -> None:
        """Answer no more calls, for the reason given; those that are under way end."""
        self._over = why
        await self._end_open()
        for conversation in self._conversations:
            self._engine.release(conversation)

    async def _end_open(self) -> None:
        await end_tasks(answer.task for answer in self._open)

    def _check_open(self) -> None:
        if self._over:
            raise EpisodeOver(f"the episode is over: {self._over}", hint="end the program")
        if len(self._open) >= MAX_OPEN:
            raise errors.BusyError(
                f"{MAX_OPEN} calls of this episode are under way, the most that there may be",
                hint="wait for one of them",
            )

    async def _prepare(self, request: CallRequest) -> CallPrompt:
        """Render what is new, beside the event loop where that is much."""
        history = history_of(request)
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
            history,
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
        """Return what holds an answer to its form; raises ConfigError for one that cannot be.

        None where the template writes calls in another form: as all that has no effect, that is
        reported and no error, because some programs demand a call each time and do without.
        """
        wanted = request.decoding.format
        assert wanted is not None
        if prompt.prefill:
            raise errors.ConfigError(
                "the program begins the answer itself, and demands a form of it",
                hint="leave the assistant's message at the end out, or the form",
            )
        try:
            return await self._grammars.of(wanted, request.tools, thinking=bool(prompt.opened))
        except OtherCallForm:
            demands_json = wanted.json_schema is not None
            self.without_effect.add("response_format" if demands_json else "tool_choice")
            return None

    def _earlier(
        self, request: CallRequest, prompt: CallPrompt, digest: bytes
    ) -> OpenAnswer | None:
        """Return the answer that this request has already; None: it is a new sample."""
        if running := self._running(request, digest):
            running.askings.append(asking_of(request))
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
        """Return the answer under way that this request asks for; None: there is none."""
        for answer in list(self._open):
            if answer.task.done():  # what is called then has yet to be
                self._ended(answer, answer.task)
        alike = [answer for answer in self._open if answer.digest == digest]
        asked = [answer for answer in alike if answer.is_known_to(request)]
        if not asked and not is_asked_again(request):
            left = [answer for answer in alike if not answer.num_listeners]
            asked = left or (alike if request.is_retry else [])
        return asked[-1] if asked else None

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

        Some are known where a generator died between two of them. `prompts` are those of the known
        ones: calls of the tree, or the same requests of a program that has started again. Raises
        EpisodeLimit where a choice would be generated and must not be.
        """
        decoding, asking = request.decoding, asking_of(request)
        in_tree = [call.number for call in prompts if isinstance(call, ModelCall)]
        if in_tree:  # what was asked then, so that all choices are answers to one request
            prompt = _as_asked_then(prompt, known[0])
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
                decoding,
                request.tools,
                by_token=request.stream,
                tells_tokens=request.logprobs,
                tells_policy=True,
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
            [known[0].asked if in_tree else asking, asking],
        )
        samplings = self._samplings(decoding, prompt, len(more), len(in_tree)) if more else []
        for begun in request.begun.deltas if request.begun is not None else ():
            if begun.choice in more:
                for token in zip(begun.token_ids, begun.logprobs, begun.versions, strict=True):
                    choices[begun.choice].add(Drawn(*token))
        if len(in_tree) == len(choices):
            self._known.add(digest, answer.askings, in_tree)
            answer.task = asyncio.create_task(_there(in_tree))
            answer.task.add_done_callback(answer.changed)
            return answer
        return self._started(answer, self._generate_all(answer, samplings, in_tree))

    def _samplings(
        self, decoding: Decoding, prompt: CallPrompt, num: int, num_in_tree: int
    ) -> list[Sampling]:
        """Return how `num` new choices of a request are drawn; `num_in_tree` others are known.

        Raises EpisodeLimit when the episode's calls or tokens are used up.
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
        """Return the digest of a prompt, and how many samples of it were begun before these."""
        digest = prompt.request_digest()
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
            return  # it is known already
        self._open.remove(answer)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._known.add(answer.digest, answer.askings, task.result())
        elif isinstance(error, Fenced) and not self.failed.done():
            self.failed.set_exception(error)

    async def _generate_all(
        self,
        answer: OpenAnswer,
        samplings: Sequence[Sampling],
        numbers: Sequence[int],
    ) -> list[int]:
        """Generate the last choices, and write down what is not; return the numbers of all.

        `numbers` are of the first ones, which are written down.
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
        choice.end(generation.finish_reason, lambda: prompt.prompt_ids.tolist())
        answer.generated[number] = _recorded(choice, generation)
        answer.changed()

    def _conversation(self, prompt: CallPrompt) -> str:
        """Return under which name the cache of a call is kept: that of its root."""
        name = f"{self._episode}.{(prompt.parent.root if prompt.parent else prompt).name}"
        self._conversations.add(name)
        return name

    async def _commit(self, answer: OpenAnswer, start: int) -> list[int]:
        """Write the choices from `start` on down; only then may the program see the end."""
        numbers: list[int] = []
        async with self._order:
            for number in range(start, len(answer.choices)):
                call = self._exact.answered(
                    answer.prompts[number],
                    answer.generated[number],
                    answer.choices[number].own_text,
                    request=answer.digest,
                    asked=answer.askings[0],
                )
                await self._log.append(call)
                self.tree.add(call)
                numbers.append(call.number)
        return numbers


def _as_asked_then(prompt: CallPrompt, call: ModelCall) -> CallPrompt:
    """Return a request at the place in the tree where an earlier answer to it stands."""
    return replace(
        prompt,
        parent=call.parent,
        given=call.given,
        branch=call.branch,
        num_seen=call.num_seen,
        follows=call.follows,
    )


def _recorded(choice: GrowingChoice, generation: Generation) -> Generation:
    """Return what is recorded of a choice: tokens that reach into a stop text are not.

    What a grammar took out of the choice of each token is 0 where another generator drew it,
    before those of `generation`.
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
    """End an answer whose program has hung up and did not ask again."""
    if not answer.num_listeners:
        answer.task.cancel()


async def _there(numbers: list[int]) -> list[int]:
    return numbers
