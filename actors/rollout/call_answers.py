"""Answers the calls of one episode's program: limits, retries, generation, the log.

A request whose prompt and limits are those of an earlier one is a new sample, unless the program's
client says that it has asked before, or the earlier answer never arrived: then it is that answer.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any, Literal, TypeAlias

from ...broker.client.fair_queue import end_tasks
from ...broker.client.parts import Tell
from ...broker.partial_rollouts import Fenced
from ...envs.agents.episode import ContextTooLong, EpisodeLimit, EpisodeOver
from ...schemas.agent import CallDelivered, CallPart, CallRequest
from ...schemas.config.job import JobConfig
from ...schemas.model_apis.canonical import Picture, pictures_of
from ...schemas.model_apis.request import history_of
from ...schemas.output_format import MAX_PENALTY, MAX_REPETITION
from ...schemas.profile import TimeUse
from ...schemas.wire import errors
from ..engine.engine import Drawn, Engine, Sampling, nothing
from ..policy.chat import ChatTokenizer
from ..policy.grammar import OtherCallForm, OutputGrammars, TokenGrammar
from . import exact_calls
from .agent_loop import EpisodeSampling
from .answer import (
    GrowingAnswer,
    GrowingChoice,
    asking_of,
    begun_names,
    is_asked_again,
)
from .call_tree import CallTree
from .template_facts import TemplateFacts, facts_of

# -- limits and sampling ---------------------------------------------------------------------------

LimitHit: TypeAlias = Literal["", "turns", "length"]
"""The calls of an episode were used up, or its tokens or those of the model's context."""
_IMAGES_SHARE = 0.75
"""Of the message in which a group travels: the rest is for tokens and texts."""
_LEAST_REPETITION = 0.1
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

    def room(
        self, request: CallRequest, num_prompt: int, num_calls: int, num_generated: int
    ) -> int:
        """Return how many tokens each choice of a request may have.

        `num_calls` were answered or are being answered, with `num_generated` tokens. Raises
        EpisodeLimit when the calls or the tokens are used up.
        """
        if num_calls + request.num_choices > self._max_calls:
            self.hit = "turns"
            raise EpisodeLimit(
                f"the episode has had {num_calls} calls of the model, agent.max_calls is "
                f"{self._max_calls}",
                hint=_NO_MORE,
            )
        room = min(self._max_turn_tokens, self._max_context - num_prompt)
        room = min(room, request.max_tokens or room)
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

    def sampling(self, request: CallRequest, room: int, prompt: bytes, number: int) -> Sampling:
        """Return how a sample is drawn: the same for the same prompt (its digest) and number."""
        drawing = (
            _requested_sampling(request, self._sampling) if self._obeys_program else self._sampling
        )
        digest = blake2b(f"{self._seed} {number}".encode() + prompt, digest_size=7).digest()
        sampling = Sampling(
            max_new_tokens=room,
            temperature=drawing.temperature,
            top_p=drawing.top_p,
            top_k=drawing.top_k,
            stop_token_ids=self._stop_token_ids,
            seed=int.from_bytes(digest, "little"),
        )
        if not self._obeys_program:
            return sampling
        return replace(
            sampling,
            presence_penalty=_penalty(request, "presence_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
            frequency_penalty=_penalty(
                request, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0
            ),
            repetition_penalty=_penalty(
                request, "repetition_penalty", _LEAST_REPETITION, MAX_REPETITION, 1.0
            ),
        )


def _penalty(request: CallRequest, name: str, least: float, most: float, default: float) -> float:
    """Return a penalty that a program asks for, within what can be sampled with."""
    requested = request.sampled.get(name)
    return (
        min(max(least, float(requested)), most) if isinstance(requested, int | float) else default
    )


def _requested_sampling(request: CallRequest, drawing: EpisodeSampling) -> EpisodeSampling:
    """Return the sampling that a program asks for; what it does not say is the job's."""
    requested = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if isinstance(value := request.sampled.get(name), int | float)
    }
    return replace(
        drawing,
        temperature=min(max(0.0, float(requested.get("temperature", drawing.temperature))), 100.0),
        top_p=min(max(1e-6, float(requested.get("top_p", drawing.top_p))), 1.0),
        top_k=max(0, int(requested.get("top_k", drawing.top_k))),
    )


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

    def restore(self, answered: Sequence[exact_calls.LoggedAnswer]) -> None:
        """Take the calls of the tree, which were written down; they count as delivered."""
        for call in self._tree.calls:
            if call.delivered is None:  # or its program's proxy asks for it once more
                self._presumed.add(call.number)
                call.delivered = True
        for numbers in exact_calls.choices_of_answers(answered):
            first = answered[numbers[0]]
            self.add(first.request, [first.asked], numbers)

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
        log: exact_calls.CallLog,
        time_use: TimeUse,
        facts: TemplateFacts | None = None,
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
        self._facts = facts or facts_of(chat)
        self._log = log
        self._time_use = time_use
        self._over = ""
        self._order = asyncio.Lock()
        self._conversations: set[str] = set()
        self._generations = count()
        """Numbers in the engine; a name may be that of two choices, see `KnownAnswers`."""
        self._begin_tree()
        self._answered = exact_calls.restored(log.segments, self._exact)
        self._known.restore(self._answered)
        for call, answered in zip(self.tree.calls, self._answered, strict=True):
            self._count_sample(answered.prepared)
            self._limits.show(pictures_of(call.given))

    def _begin_tree(self) -> None:
        self._exact = exact_calls.ExactCalls(
            self._chat, keeps_reasoning=self._keeps_reasoning, facts=self._facts
        )
        self._past = exact_calls.PastAnswers()
        self._open: list[GrowingAnswer] = []
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
        prepared = await self._prepare(request)
        if request.count_only:
            return self._opening(request, [prepared])
        limits: list[object] = [request.num_choices, request.max_tokens, request.stop]
        if request.format is not None:
            limits.append(request.format)
            prepared = replace(prepared, grammar=await self._grammar(request, prepared))
        digest = prepared.digest(*limits)
        answer = self._earlier(request, prepared, digest) or self._begin(request, prepared, digest)
        with self._time_use.doing("generate"):
            on_alone = partial(self._keep_for_a_while, answer)
            return await answer.send_parts(
                tell, stream=request.stream, begun=request.begun, on_alone=on_alone
            )

    def note_delivered(self, delivered: CallDelivered) -> None:
        """Take notice of whether answers arrived."""
        for number in delivered.calls:
            if number < len(self.tree.calls):
                call = self.tree.calls[number]
                call.delivered = bool(call.delivered) or delivered.whole

    async def start_again(self) -> None:
        """Begin anew, for a program that does: what it asks once more is answered as it was."""
        await self._end_open()
        answered, self._answered = self._answered, []
        self._begin_tree()
        self._past = exact_calls.PastAnswers(answered)

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

    async def _prepare(self, request: CallRequest) -> exact_calls.PreparedCall:
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
            prepared = await asyncio.to_thread(prepare) if size > _LARGE_CHARS else prepare()
        if not request.count_only:
            self._limits.check_context(prepared.num_prompt)
            self._limits.show(pictures_of(prepared.attachment.given))
        return prepared

    async def _grammar(
        self, request: CallRequest, prepared: exact_calls.PreparedCall
    ) -> TokenGrammar | None:
        """Return what holds an answer to its form; raises ConfigError for one that cannot be.

        None where the template writes calls in another form: as all that has no effect, that is
        reported and no error, because some programs demand a call each time and do without.
        """
        assert request.format is not None
        if prepared.prefill:
            raise errors.ConfigError(
                "the program begins the answer itself, and demands a form of it",
                hint="leave the assistant's message at the end out, or the form",
            )
        thinking = prepared.thinking
        try:
            return await self._grammars.of(request.format, request.tools, thinking=thinking)
        except OtherCallForm:
            demands_json = request.format.json_schema is not None
            self.without_effect.add("response_format" if demands_json else "tool_choice")
            return None

    def _earlier(
        self, request: CallRequest, prepared: exact_calls.PreparedCall, digest: bytes
    ) -> GrowingAnswer | None:
        """Return the answer that this request has already; None: it is a new sample."""
        if running := self._running(request, digest):
            running.askings.append(asking_of(request))
            return running
        if past := self._past.next_answer(digest):
            self.num_replayed += sum(len(answer.generated.token_ids) for answer in past)
            self._count_sample(prepared, len(past))
            given = [self._exact.under_name(prepared, answer.prepared.name) for answer in past]
            pairs = zip(past, given, strict=True)
            asked = asking_of(request)
            known = [replace(answer, prepared=at, asked=asked) for answer, at in pairs]
            return self._begin(request, prepared, digest, known)
        if numbers := self._known.find(request, digest):
            self._known.note_repeated(numbers)
            known = [self._answered[number] for number in numbers]
            return self._begin(request, prepared, digest, known, numbers)
        return None

    def _running(self, request: CallRequest, digest: bytes) -> GrowingAnswer | None:
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

    def _opening(
        self, request: CallRequest, prepared: Sequence[exact_calls.PreparedCall]
    ) -> CallPart:
        first = prepared[0]
        parent = first.attachment.parent
        return CallPart(
            delivery=self._log.delivery,
            names=[call.name for call in prepared],
            has_tools=first.has_tools,
            is_thinking=first.thinking,
            num_prompt=first.num_prompt,
            prompt_ids=first.prompt_ids.tolist() if request.token_ids else [],
            num_reused=first.num_prompt - len(first.given_ids),
            parent=None if parent is None else parent.number,
            branch=first.attachment.branch,
        )

    def _begin(
        self,
        request: CallRequest,
        prepared: exact_calls.PreparedCall,
        digest: bytes,
        known: Sequence[exact_calls.LoggedAnswer] = (),
        numbers: Sequence[int] = (),
    ) -> GrowingAnswer:
        """Begin an answer: the first choices are `known`, the others are generated.

        Some are known where a generator died between two of them; `numbers` are of those that are
        in the tree. Raises EpisodeLimit where one would be generated and must not be.
        """
        choices = [GrowingChoice.from_log(logged, self._chat) for logged in known]
        if numbers:  # what was asked then, so that all choices are answers to one request
            prepared = replace(prepared, attachment=known[0].prepared.attachment)
        more = range(len(known), request.num_choices)
        requested = [self._exact.another(prepared) if number else prepared for number in more]
        names = begun_names(request)
        choices += [
            GrowingChoice(
                self._exact.under_name(call, names[number]) if number < len(names) else call,
                self._chat,
                request.stop,
                request.tools,
                by_token=request.stream,
                tells_tokens=request.top_logprobs is not None,
            )
            for call, number in zip(requested, more, strict=True)
        ]
        opening = self._opening(request, [choice.prepared for choice in choices])
        asking = asking_of(request)
        askings = [known[0].asked if known else asking, asking]
        answer = GrowingAnswer(digest, opening, choices, askings)
        samplings: list[Sampling] = []
        if more:
            num_calls = len(self.tree.calls) - len(numbers)
            num_calls += sum(len(open_answer.choices) for open_answer in self._open)
            num_tokens = sum(len(call.generated.token_ids) for call in self.tree.calls)
            room = self._limits.room(request, prepared.num_prompt, num_calls, num_tokens)
            prompt, drawn = self._count_sample(prepared, len(more))
            at_once = range(drawn, drawn + len(more))
            samplings = [
                replace(
                    self._drawing.sampling(request, room, prompt, number),
                    grammar=prepared.grammar,
                    num_top=request.top_logprobs or 0,
                )
                for number in at_once
            ]
        for choice in choices[: len(known)]:
            choice.tells_tokens = request.top_logprobs is not None
        for begun in request.begun.deltas if request.begun is not None else ():
            if begun.choice in more:
                for token in zip(begun.token_ids, begun.logprobs, begun.versions, strict=True):
                    choices[begun.choice].add(Drawn(*token))
        if len(numbers) == len(choices):
            answer.task = asyncio.create_task(_there(list(numbers)))
            self._known.add(digest, answer.askings, numbers)
            return answer
        return self._started(answer, self._generate_all(answer, samplings, numbers))

    def _count_sample(self, prepared: exact_calls.PreparedCall, num: int = 1) -> tuple[bytes, int]:
        """Return the digest of a prompt, and how many samples of it were begun before these."""
        prompt = prepared.digest()
        drawn = self._num_drawn.get(prompt, 0)
        self._num_drawn[prompt] = drawn + num
        return prompt, drawn

    def _started(
        self, answer: GrowingAnswer, work: "Coroutine[Any, Any, list[int]]"
    ) -> GrowingAnswer:
        answer.task = asyncio.create_task(work, name=f"answer of {self._episode}")
        self._open.append(answer)
        answer.task.add_done_callback(partial(self._ended, answer))
        return answer

    def _ended(self, answer: GrowingAnswer, task: "asyncio.Task[list[int]]") -> None:
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
        answer: GrowingAnswer,
        samplings: Sequence[Sampling],
        numbers: Sequence[int],
    ) -> list[int]:
        """Generate the last choices, and write down what is not; return the numbers of all.

        `numbers` are of the first ones, which are written down.
        """
        more = answer.choices[len(answer.choices) - len(samplings) :]
        started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for choice, sampling in zip(more, samplings, strict=True):
                    group.create_task(self._generate(answer, choice, sampling))
        except BaseExceptionGroup as raised:
            raise errors.root_cause(raised) from raised
        finally:
            self.generate_s += time.perf_counter() - started
        calls = [*numbers, *await self._commit(answer.choices[len(numbers) :])]
        if not answer.num_listeners:
            self.note_delivered(CallDelivered(calls=calls, whole=False))
        return calls

    async def _generate(
        self, answer: GrowingAnswer, choice: GrowingChoice, sampling: Sampling
    ) -> None:
        begun = list(choice.drawn)
        prepared = choice.prepared
        name = f"{self._episode}.{next(self._generations)}"
        ended = bool(begun) and begun[-1].token_id in sampling.stop_token_ids
        generation = replace(nothing(), finish_reason="stop" if ended else "length")
        if not ended and not choice.stopped and len(begun) < sampling.max_new_tokens:

            def note(drawn: Drawn) -> None:
                choice.add(drawn)
                answer.changed()
                if choice.stopped:
                    self._engine.cancel(name)

            generation = await self._engine.generate(
                prepared.ids_with([token.token_id for token in begun]),
                replace(
                    sampling,
                    max_new_tokens=sampling.max_new_tokens - len(begun),
                    num_drawn=len(begun),
                ),
                request_id=name,
                conversation=self._conversation(prepared),
                on_token=note,
                images=prepared.images,
            )
            if generation.finish_reason == "cancelled" and not choice.stopped:
                raise errors.EngineError(f"the engine ended request {name} without an answer")
        choice.end(generation, answer.digest, answer.askings[0])
        answer.changed()

    def _conversation(self, prepared: exact_calls.PreparedCall) -> str:
        """Return under which name the cache of a call is kept: that of its root."""
        parent = prepared.attachment.parent
        name = f"{self._episode}.{(parent.root if parent else prepared).name}"
        self._conversations.add(name)
        return name

    async def _commit(self, choices: Sequence[GrowingChoice]) -> list[int]:
        """Write an answer down; only then may its program see the end of it."""
        numbers: list[int] = []
        async with self._order:
            for choice in choices:
                answered = choice.answered
                assert answered is not None
                await self._log.append(answered)
                call = self._exact.finish(answered.prepared, answered.generated, answered.text)
                self._answered.append(answered)
                numbers.append(call.number)
        return numbers

    def _keep_for_a_while(self, answer: GrowingAnswer) -> None:
        """Let an answer whose program has hung up go on, in case that it asks again."""
        if not answer.task.done():
            asyncio.get_running_loop().call_later(ADOPT_S, _give_up, answer)


def _give_up(answer: GrowingAnswer) -> None:
    if not answer.num_listeners:
        answer.task.cancel()


async def _there(numbers: list[int]) -> list[int]:
    return numbers
