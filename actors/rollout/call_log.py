"""An episode's calls in the log: each is stored before its program gets the end of the answer.

They are segments like those of other running episodes (`broker/partial_rollouts.py`), with the same
fencing: a fenced-off generator can send text to a program, but not the end of an answer. The next
holder of the task rebuilds the tree of calls from the log and continues. If the program has to
start again because its host has died, its repeated requests are answered from the log, token for
token.
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
from ...schemas.rollout import LoggedCall, Segment
from ...schemas.task import Task
from ...schemas.tool_calls import THINK
from ...schemas.wire.array import FloatVector
from ...schemas.wire.errors import DeadlineError
from ...schemas.wire.subjects import JobScope
from ..engine.engine import Generation
from .call_tree import Branch, CallPrompt, ModelCall
from .exact_calls import ExactCalls
from .recording import EpisodeRecorder, TaskRecorder

_log = structlog.get_logger()


class CallLog(EpisodeRecorder):
    """Logs the calls of one episode; without a writer it stores nothing."""

    def __init__(
        self,
        name: str = "",
        writer: SegmentWriter | None = None,
        segments: Sequence[Segment] = (),
        hosts: dict[str, str] | None = None,
    ) -> None:
        """`name` determines the episode's random draws; `segments` are those of earlier holders."""
        self.delivery = 1 if writer is None else writer.delivery
        self.segments: list[Segment] = []
        """Calls of this try that an earlier holder logged."""
        self.episode = self.host = ""
        """The current try, and the environment host of its program."""
        self.drawing_seed = 0
        """Seed of its answers."""
        self._name, self._num_tries = name, 0
        self._before = segments
        self._writer = writer
        self._hosts: dict[str, str] = {} if hosts is None else hosts
        self._end = 0
        self._has_room = True

    def begin_try(self) -> None:
        """Continue the try of an earlier holder, or begin one."""
        before, self._before = self._before, ()
        self.segments = [segment for segment in before if segment.call is not None]
        self._num_tries += 1
        try_key = f"{self._name} {self._num_tries}".encode()
        self.drawing_seed = int.from_bytes(blake2b(try_key, digest_size=7).digest(), "little")
        self.episode, self.host, self._end = "", "", 0
        if before:
            last = before[-1]
            self.episode, self.host, self._end = last.episode, last.host, last.end
            # earlier holders that logged nothing left takeovers alone, which know no seed
            self.drawing_seed = last.seed or self.drawing_seed
            self.num_continued = int(sum(segment.mask.sum() for segment in self.segments))

    def hold(self, episode: str, host: str, *, anew: bool) -> None:
        """Record the host of the program; `anew` voids earlier segments."""
        self.episode, self.host = episode, host
        self._hosts[episode] = host
        if anew:
            self._end = 0

    async def append(self, call: ModelCall) -> None:
        """Log a call; raises Fenced if another generator has taken the episode over."""
        if self._writer is None or not self._has_room:
            return
        segment = self._segment(call)
        self._has_room = await self._writer.append(segment)
        self._end = segment.end

    def _segment(self, call: ModelCall) -> Segment:
        new_ids, generated = call.given_ids, call.generated
        assert self._writer is not None
        zeros = np.zeros(len(new_ids), np.float32)
        return Segment(
            delivery=self._writer.delivery,
            writer=self._writer.writer,
            episode=self.episode,
            host=self.host,
            seed=self.drawing_seed,
            start=self._end,
            token_ids=np.concatenate([new_ids, generated.token_ids]),
            mask=np.concatenate([zeros, np.ones(len(generated.token_ids))]).astype(np.uint8),
            logprobs=np.concatenate([zeros, generated.logprobs]),
            versions=np.concatenate([zeros.astype(np.int32) - 1, generated.versions]),
            call=_logged(call),
        )


def _logged(call: ModelCall) -> LoggedCall:
    masked = call.generated.masked
    return LoggedCall(
        parent=None if call.parent is None else call.parent.number,
        follows=None if call.follows is None else call.follows.number,
        context=call.context,
        given=list(call.given),
        num_given=len(call.given_ids),
        name=call.name,
        has_tools=call.has_tools,
        is_thinking=bool(call.opened),
        prefill=call.prefill,
        text=call.text,
        finish="length" if call.generated.finish_reason == "length" else "stop",
        num_seen=call.num_seen,
        branch=call.branch,
        request=call.request_digest,
        asked=call.request_id,
        masked=0.0 if masked is None else float(masked.sum()),
    )


def restore_calls(segments: Sequence[Segment], calls: ExactCalls) -> None:
    """Add logged calls to a tree, in the order in which they ended."""
    for segment in segments:
        call = segment.call
        assert call is not None
        known, at = calls.tree.calls, call.num_given
        prompt = CallPrompt(
            parent=None if call.parent is None else known[call.parent],
            given=tuple(call.given),
            context=call.context,
            branch=cast("Branch", call.branch),
            num_seen=call.num_seen,
            follows=None if call.follows is None else known[call.follows],
            given_ids=segment.token_ids[:at].copy(),
            has_tools=call.has_tools,
            opened=THINK if call.is_thinking else "",
            prefill=call.prefill,
        )
        generated = Generation(
            segment.token_ids[at:],
            segment.logprobs[at:],
            segment.versions[at:],
            call.finish,
            masked=_spread(call.masked, len(segment.token_ids) - at),
        )
        prompt = calls.under_name(prompt, call.name)
        calls.finish(
            prompt, generated, call.text, request_digest=call.request, request_id=call.asked
        )


def _spread(masked: float, num: int) -> FloatVector | None:
    """Spread a recorded sum over float32[num]; only the mean is reported."""
    return np.full(num, masked / num, np.float32) if masked and num else None


def choices_of_answers(calls: Sequence[ModelCall]) -> list[list[ModelCall]]:
    """Return the choices of each answer, in the order in which the answers ended.

    The choices of one answer are not adjacent if a generator died between two of them.
    """
    choices = defaultdict[tuple[bytes, str, int], list[ModelCall]](list)
    for call in calls:
        choices[call.request_digest, call.request_id, call.num_seen].append(call)
    return sorted(choices.values(), key=lambda answer: answer[-1].number)


class PastAnswers:
    """Answers to the same try before its program started again."""

    def __init__(self, calls: Sequence[ModelCall] = ()) -> None:
        """Keep them in the order in which they ended."""
        self._by_request = defaultdict[bytes, deque[list[ModelCall]]](deque)
        for choices in choices_of_answers(calls):
            self._by_request[choices[0].request_digest].append(choices)

    def next_answer(self, request: bytes) -> list[ModelCall]:
        """Return the choices of the next answer to a request, and remove it; empty: none."""
        waiting = self._by_request.get(request)
        return waiting.popleft() if waiting else []


@dataclass
class TaskCalls(TaskRecorder):
    """Logs the calls of one lease of a task."""

    broker: Broker
    scope: JobScope
    environments: Environments
    task: Task
    delivery: int
    """Number of deliveries of the task, including this one."""
    writer: str
    """Unique id of the lease."""
    hosts: dict[str, str] = field(default_factory=dict[str, str])
    """The environment host of each episode, until the task's end."""

    async def open(self, number: int) -> CallLog:
        """Take over an episode of the task; raises Fenced if another generator has."""
        task = self.task
        writer = SegmentWriter(
            self.broker, self.scope, task.task, number, delivery=self.delivery, writer=self.writer
        )
        segments = await writer.take_over()
        return CallLog(f"{task.seed} {task.task} {number}", writer, segments, self.hosts)

    async def end(self) -> None:
        """Delete the calls and free the episodes, once the task's group is in the log."""
        for episode, host in self.hosts.items():
            self.environments.close(host, episode)
        try:
            await purge_segments(self.broker, self.scope, self.task.task)
        except DeadlineError as error:  # they are bounded, and unused from now on
            _log.warning("segments_left", task=self.task.task, reason=error.message)
