"""Calls of programs in the log: each is written down before its program sees the end of an answer.

They stand where other running episodes do (`broker/partial_rollouts.py`), fenced in the same way: a
holder that was overtaken can send a program text, and end no answer. The next holder of the task
has the tree of calls from there and answers on. Where the program itself has to start again, since
its host has died, what it asks once more is answered from what was written down, token for token.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import cast

import numpy as np
import structlog

from ...broker.client.connection import Broker
from ...broker.partial_rollouts import SegmentWriter, purge_segments
from ...envs.host_client import Environments
from ...envs.model_apis.request import packed, unpacked
from ...schemas.rollout import LoggedCall, Segment
from ...schemas.task import Task
from ...schemas.wire.array import FloatVector
from ...schemas.wire.errors import DeadlineError
from ...schemas.wire.subjects import JobScope
from ..engine.engine import Generation
from .call_tree import Attachment, Branch, CallTree
from .exact_calls import ExactCalls, PreparedCall
from .recording import EpisodeRecorder, TaskRecorder

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


def answered_call(segment: Segment, tree: CallTree) -> LoggedAnswer:
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
        answered.append(answer := answered_call(segment, calls.tree))
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
