"""An episode's calls in exact tokens, and in the log: what a prompt is, and what an answer adds."""

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import cast

import numpy as np
import structlog

from ...broker.client.connection import Broker
from ...broker.partial_rollouts import SegmentWriter, purge_segments
from ...envs.agents.call_selection import digest_of
from ...envs.host_client import Environments
from ...schemas.model_apis.canonical import (
    CanonicalMessage,
    ReplyReader,
    canonical_history,
    pictures_of,
)
from ...schemas.model_apis.request import packed, unpacked
from ...schemas.rollout import LoggedCall, Segment
from ...schemas.task import Task
from ...schemas.wire.array import FloatVector, IntVector
from ...schemas.wire.errors import DeadlineError
from ...schemas.wire.subjects import JobScope
from ..engine.engine import Generation
from ..policy.chat import ChatTokenizer
from ..policy.grammar import TokenGrammar
from .call_tree import Attachment, Branch, CallTree, ModelCall, digest_behind
from .recording import EpisodeRecorder, TaskRecorder
from .template_facts import HistoryRenderer, TemplateFacts, Tools, facts_of

_NAME = re.compile(r"c([0-9]{5,9})")


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A request that is ready for the engine."""

    attachment: Attachment
    given_ids: IntVector
    """int32[G]: the end of the prompt, which is new."""
    name: str
    """Of the answer: the ids of its calls begin with it."""
    has_tools: bool
    thinking: bool
    """Whether the prompt has opened the reasoning of the answer."""
    prefill: str = ""
    """What the program wrote of the answer itself."""
    grammar: TokenGrammar | None = None
    """What the answer's tokens must be; None: anything."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        parent = self.attachment.parent
        return len(self.given_ids) + (0 if parent is None else parent.num_tokens)

    @property
    def prompt_ids(self) -> IntVector:
        """int32[P]: the path's tokens, then those of what is new; put together at each call."""
        return self.ids_with(())

    def ids_with(self, begun: Sequence[int]) -> IntVector:
        """Return int32: the prompt, and the tokens of an answer that were drawn before."""
        parent = self.attachment.parent
        new = [self.given_ids, *([np.array(begun, np.int32)] if begun else [])]
        return np.concatenate(new) if parent is None else parent.path_ids_with(new)

    def digest(self, *limits: object) -> bytes:
        """Return 16 bytes that identify a request by the prompt's ids and its limits."""
        digesting = digest_behind(self.attachment.parent, self.given_ids)
        digesting.update(repr(limits).encode())
        return digesting.digest()

    @property
    def images(self) -> tuple[bytes, ...]:
        """The encoded images of the prompt, in order."""
        parent = self.attachment.parent
        before = [] if parent is None else parent.path_messages
        return tuple(picture.encoded for picture in pictures_of((*before, *self.attachment.given)))

    def reader(self) -> ReplyReader:
        """Return what reads the answer while it is generated."""
        return ReplyReader(self.name, calls=self.has_tools, thinking=self.thinking)


class ExactCalls:
    """Turns requests into prompts and answers into calls of a tree."""

    def __init__(
        self,
        chat: ChatTokenizer,
        *,
        keeps_reasoning: bool = True,
        facts: TemplateFacts | None = None,
    ) -> None:
        """Render with the template of `chat`, of which `facts` are known.

        Without `keeps_reasoning`, a history that the template writes anew when a user speaks is a
        root of its own.
        """
        self.tree = CallTree()
        self._keeps_reasoning = keeps_reasoning
        self._facts = facts or facts_of(chat)
        self._chat = chat
        self._renderer = HistoryRenderer(chat)
        self._num_requests = 0

    def prepare(
        self,
        messages: Sequence[CanonicalMessage],
        tools: Tools = (),
        *,
        previous: ModelCall | None = None,
        is_prefill: bool = False,
    ) -> PreparedCall:
        """Find the call that a request continues, and render what is new behind it.

        The messages follow `previous`, or are the whole history; with `is_prefill` the last one is
        the beginning of the answer. Raises ModelError for a history that the model's template does
        not take.
        """
        before = previous.path_messages if previous is not None else []
        history = [*before, *self.shaped(messages)]
        prefill = history.pop().text if is_prefill else ""
        context = digest_of(tools)
        attachment = self.tree.attach(history, context)
        given = self._given(attachment, tools)
        if given is None and attachment.parent is not None:
            attachment = self.tree.detached(history, context, attachment.parent)
        if given is None:
            given = self._renderer.whole(history, tools)
        thinking = self._chat.opens_thinking(given, prefill)
        if prefill:
            given = np.concatenate([given, np.array(self._chat.encode_reply(prefill), np.int32)])
        name = self._next_name()
        return PreparedCall(attachment, given, name, bool(tools), thinking, prefill)

    def shaped(self, messages: Sequence[CanonicalMessage]) -> list[CanonicalMessage]:
        """Return messages as they are compared and shown: canonical, and as the template can."""
        return self._facts.shaped(canonical_history(messages))

    def _given(self, attachment: Attachment, tools: Tools) -> IntVector | None:
        """Return int32[G]: what stands for the new messages behind the parent; None: nothing."""
        parent = attachment.parent
        if parent is None:
            return None
        new = attachment.given
        if any(pictures_of(new)) and self._drew_images(parent):
            return None
        if not self._keeps_reasoning and any(message.role == "user" for message in new):
            before = parent.path_messages[:-1]
            if not self._renderer.appends(before, parent.reply, new, tools):
                return None
        generated_ids = parent.generated.token_ids
        return self._renderer.following(parent.reply, generated_ids, new, tools)

    def _drew_images(self, call: ModelCall) -> bool:
        """Whether the policy has said an image's token: no image may stand behind that."""
        return any(self._chat.has_image_token(earlier.generated.token_ids) for earlier in call.path)

    def another(self, prepared: PreparedCall) -> PreparedCall:
        """Return the same request once more, for another answer to it."""
        return replace(prepared, name=self._next_name())

    def under_name(self, prepared: PreparedCall, name: str) -> PreparedCall:
        """Return a request under the name that its answer has had before; no later one gets it."""
        if matched := _NAME.fullmatch(name):  # a host may send anything
            self._num_requests = max(self._num_requests, int(matched[1]) + 1)
        return replace(prepared, name=name)

    def restore(self, prepared: PreparedCall, generated: Generation, text: str | None) -> None:
        """Add a call that was written down, in the order in which calls ended."""
        self.finish(self.under_name(prepared, prepared.name), generated, text)

    def finish(
        self, prepared: PreparedCall, generated: Generation, text: str | None = None
    ) -> ModelCall:
        """Add the answer to the tree; `text` is the sent text if it is not that of the tokens."""
        reader = prepared.reader()
        written = self._chat.decode(generated.token_ids) if text is None else text
        reader.push(prepared.prefill + written)
        reader.finish()
        given = prepared.given_ids
        return self.tree.commit(
            prepared.attachment, given, generated, reader.reply, name=prepared.name
        )

    def _next_name(self) -> str:
        name = f"c{self._num_requests:05}"  # with a call's three digits as long as Mistral's ids
        self._num_requests += 1
        return name


# -- calls in the log: each is written down before its program sees the end of an answer -----------
# They stand where other running episodes do (`broker/partial_rollouts.py`), fenced in the same way:
# a holder that was overtaken can send a program text, and end no answer. The next holder of the
# task has the tree of calls from there and answers on. Where the program itself has to start again,
# since its host has died, what it asks once more is answered from what was written down, token for
# token.

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """A call and all that its program got."""

    prepared: PreparedCall
    generated: Generation
    text: str | None
    """The sent text, if it is not that of the tokens."""
    request: bytes
    """Digest of what was asked for."""
    asked: str = ""
    """Id by which the program's proxy asked for it first, the same for all choices of an answer."""


class CallLog(EpisodeRecorder):
    """The calls of one episode; kept nowhere without a writer."""

    def __init__(
        self,
        name: str = "",
        writer: SegmentWriter | None = None,
        found: Sequence[Segment] = (),
        hosts: dict[str, str] | None = None,
    ) -> None:
        """`name` decides what the episode draws; `found` is what earlier holders wrote."""
        self.delivery = 1 if writer is None else writer.delivery
        self.segments: list[Segment] = []
        """Calls of this try that an earlier holder wrote."""
        self.episode = self.host = ""
        """The try that is under way, and the environment host that runs its program."""
        self.drawing_seed = 0
        """What its answers are drawn with."""
        self._name, self._num_tries = name, 0
        self._before = found
        self._writer = writer
        self._hosts: dict[str, str] = {} if hosts is None else hosts
        self._end = 0
        self._has_room = True

    def begin_try(self) -> None:
        """Go on with the try that an earlier holder began, or else begin one."""
        before, self._before = self._before, ()
        self.segments = [segment for segment in before if segment.call is not None]
        self._num_tries += 1
        try_key = f"{self._name} {self._num_tries}".encode()
        self.drawing_seed = int.from_bytes(blake2b(try_key, digest_size=7).digest(), "little")
        self.episode, self.host, self._end = "", "", 0
        if before:
            last = before[-1]
            self.episode, self.host = last.episode, last.host
            self.drawing_seed, self._end = last.seed, last.end
            self.num_continued = int(sum(segment.mask.sum() for segment in self.segments))

    def hold(self, episode: str, host: str, *, anew: bool) -> None:
        """Take notice of the host that runs the program; `anew`: what was written is void."""
        self.episode, self.host = episode, host
        self._hosts[episode] = host
        if anew:
            self._end = 0

    async def append(self, answered: LoggedAnswer) -> None:
        """Log a call; raises Fenced when another generator has the episode now."""
        if self._writer is None or not self._has_room:
            return
        segment = self._segment(answered)
        self._has_room = await self._writer.append(segment)
        self._end = segment.end

    def _segment(self, answered: LoggedAnswer) -> Segment:
        prepared, generated = answered.prepared, answered.generated
        given = prepared.given_ids
        assert self._writer is not None
        zeros = np.zeros(len(given), np.float32)
        return Segment(
            delivery=self._writer.delivery,
            writer=self._writer.writer,
            episode=self.episode,
            host=self.host,
            seed=self.drawing_seed,
            start=self._end,
            token_ids=np.concatenate([given, generated.token_ids]),
            mask=np.concatenate([zeros, np.ones(len(generated.token_ids))]).astype(np.uint8),
            logprobs=np.concatenate([zeros, generated.logprobs]),
            versions=np.concatenate([zeros.astype(np.int32) - 1, generated.versions]),
            call=_logged(answered),
        )


def _logged(answered: LoggedAnswer) -> LoggedCall:
    prepared, attachment = answered.prepared, answered.prepared.attachment
    parent, follows = attachment.parent, attachment.follows
    return LoggedCall(
        parent=None if parent is None else parent.number,
        follows=None if follows is None else follows.number,
        context=attachment.context,
        given=[packed(message) for message in attachment.given],
        num_given=len(prepared.given_ids),
        name=prepared.name,
        has_tools=prepared.has_tools,
        is_thinking=prepared.thinking,
        prefill=prepared.prefill,
        text=answered.text,
        finish="length" if answered.generated.finish_reason == "length" else "stop",
        num_seen=attachment.num_seen,
        branch=attachment.branch,
        request=answered.request,
        asked=answered.asked,
        masked=0.0 if answered.generated.masked is None else float(answered.generated.masked.sum()),
    )


def _answered_call(segment: Segment, tree: CallTree) -> LoggedAnswer:
    """Read a call that was written down; its parent is in the tree by then."""
    call = segment.call
    assert call is not None
    parent = None if call.parent is None else tree.calls[call.parent]
    attachment = Attachment(
        parent,
        tuple(unpacked(message) for message in call.given),
        call.context,
        cast("Branch", call.branch),
        call.num_seen,
        None if call.follows is None else tree.calls[call.follows],
    )
    at = call.num_given
    given = segment.token_ids[:at].copy()
    return LoggedAnswer(
        PreparedCall(attachment, given, call.name, call.has_tools, call.is_thinking, call.prefill),
        Generation(
            segment.token_ids[at:],
            segment.logprobs[at:],
            segment.versions[at:],
            call.finish,
            masked=_spread(call.masked, len(segment.token_ids) - at),
        ),
        call.text,
        call.request,
        call.asked,
    )


def _spread(masked: float, num: int) -> FloatVector | None:
    """Return float32[num] of the recorded sum, of which only the mean is reported."""
    return np.full(num, masked / num, np.float32) if masked and num else None


def restored(segments: Sequence[Segment], calls: ExactCalls) -> list[LoggedAnswer]:
    """Bring the calls that were written down back into a tree; return them in order."""
    answered: list[LoggedAnswer] = []
    for segment in segments:
        answered.append(answer := _answered_call(segment, calls.tree))
        calls.restore(answer.prepared, answer.generated, answer.text)
    return answered


def choices_of_answers(answered: Sequence[LoggedAnswer]) -> list[list[int]]:
    """Return the places of the choices of each answer, the answer that ended first first.

    Those of one answer stand apart where a generator died between two of them.
    """
    choices = defaultdict[tuple[bytes, str, int], list[int]](list)
    for place, answer in enumerate(answered):
        num_seen = answer.prepared.attachment.num_seen
        choices[answer.request, answer.asked, num_seen].append(place)
    return sorted(choices.values(), key=lambda places: places[-1])


class PastAnswers:
    """Answers that the same try was given before its program started again."""

    def __init__(self, answered: Sequence[LoggedAnswer] = ()) -> None:
        """Take them in the order in which they were given."""
        self._by_request = defaultdict[bytes, deque[list[LoggedAnswer]]](deque)
        for places in choices_of_answers(answered):
            choices = [answered[place] for place in places]
            self._by_request[choices[0].request].append(choices)

    def next_answer(self, request: bytes) -> list[LoggedAnswer]:
        """Return the next answer to the same request, once: its choices, as many as there are."""
        waiting = self._by_request.get(request)
        return waiting.popleft() if waiting else []


@dataclass
class TaskCalls(TaskRecorder):
    """Writes the calls of one lease of a task down."""

    broker: Broker
    scope: JobScope
    environments: Environments
    task: Task
    delivery: int
    """How often the task was handed out, this time included."""
    writer: str
    """Names the lease, uniquely."""
    hosts: dict[str, str] = field(default_factory=dict[str, str])
    """Which environment host holds each episode, until the task's end."""

    async def open(self, number: int) -> CallLog:
        """Take over an episode of the task; raises Fenced when another generator has."""
        task = self.task
        writer = SegmentWriter(
            self.broker, self.scope, task.task, number, delivery=self.delivery, writer=self.writer
        )
        segments = await writer.take_over()
        return CallLog(f"{task.seed} {task.task} {number}", writer, segments, self.hosts)

    async def end(self) -> None:
        """Forget the calls and free the episodes: the task's group is in the log."""
        for episode, host in self.hosts.items():
            self.environments.close(host, episode)
        try:
            await purge_segments(self.broker, self.scope, self.task.task)
        except DeadlineError as error:  # they are bounded, and void
            _log.warning("segments_left", task=self.task.task, reason=error.message)
