"""Running episodes, recorded in segments, so that another generator can continue them.

Each episode has its own subject. The task's holder appends there with the last sequence that it has
seen as the expected one, so the server refuses appends of earlier holders. The next holder first
appends a segment without tokens, the takeover: from then on, appends of earlier holders are
refused, however late they arrive. The task's delivery number keeps an earlier holder from taking
the episode back. (A recreated queue counts from 1: its first holders drop the task until the count
has caught up.)

This protects running episodes only; the rollout log ensures that a group is trained once, with or
without segments.
"""

import asyncio

import structlog

from ..schemas.rollout import Segment
from ..schemas.wire.codec import most_bytes
from ..schemas.wire.errors import MessageError, TinkermqError
from ..schemas.wire.subjects import JobScope
from .client.connection import Broker
from .client.faults import Refused
from .client.nats_internals import EXPECTED_SEQ
from .jetstream.direct_get import StoredMessage, get_all, get_last_behind
from .jetstream.streams import purge

APPEND_DEADLINE_S = 60.0
_PAUSE_S = 0.02

_log = structlog.get_logger()


class Fenced(TinkermqError):
    """Another holder of the task has taken over the episode."""

    code = "fenced"


class SegmentWriter:
    """The right to append to one episode's segments, until a later delivery takes it over."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        task: int,
        episode: int,
        *,
        delivery: int,
        writer: str,
    ) -> None:
        """`delivery` is the task's delivery number, `writer` a unique name of its holder."""
        self.delivery = delivery
        self.writer = writer
        self._broker = broker
        self._stream = scope.stream_segment
        self._subject = scope.segment(task, episode)
        self._waiting_for = f"segments of task {task}"
        self._last_seq = 0

    async def take_over(self) -> list[Segment]:
        """Fence off earlier holders; return their segments from the episode's beginning.

        A task's first delivery has none, and sends no request. Raises Fenced when a later delivery
        has taken the episode already.
        """
        while self.delivery > 1:
            messages = await self._read()
            segments = _parsed(messages)
            if segments and segments[-1].delivery >= self.delivery:
                self._check_own(messages[-1])
            chain = unbroken(segments)
            last = chain[-1] if chain else Segment.empty(delivery=1, writer="", start=0)
            takeover = Segment.empty(
                delivery=self.delivery,
                writer=self.writer,
                episode=last.episode,
                host=last.host,
                seed=last.seed,
                start=last.end,
            )
            self._last_seq = messages[-1].seq if messages else 0
            try:
                await self.append(takeover)
            except Fenced:  # the holder is alive and has just appended, or a later one has
                await asyncio.sleep(_PAUSE_S)
                continue
            return chain
        return []

    async def append(self, segment: Segment) -> bool:
        """Append a segment; False when the stream is full or the segment is larger than a message.

        Raises Fenced when another generator has appended or the task is over, DeadlineError while
        the broker is away.
        """
        payload = segment.to_bytes()
        if len(payload) > (most := most_bytes(self._broker.max_payload_bytes)):
            _log.warning(
                "segment_too_large", subject=self._subject, num_bytes=len(payload), most=most
            )
            return False
        while True:
            try:
                self._last_seq = await self._broker.append(
                    self._subject,
                    payload,
                    headers={EXPECTED_SEQ: str(self._last_seq)},
                    deadline_s=APPEND_DEADLINE_S,
                    waiting_for=self._waiting_for,
                )
                return True
            except Refused as error:
                if error.is_full:
                    _log.warning("segments_full", stream=self._stream, reason=error.description)
                    return False
                if not error.is_overtaken:
                    raise
            newest = await self._last()
            if newest is None:
                raise Fenced(f"{self._subject} was removed: another generator finished the task")
            self._check_own(newest)
            self._last_seq = newest.seq  # our own earlier append, whose answer was lost
            if newest.payload == payload:
                return True

    async def _last(self) -> StoredMessage | None:
        return await self._broker.retry(
            lambda: get_last_behind(self._broker, self._stream, self._subject, self._last_seq),
            deadline_s=APPEND_DEADLINE_S,
            waiting_for=self._waiting_for,
        )

    def _check_own(self, segment: StoredMessage) -> None:
        """Raise Fenced for another generator's segment."""
        by = next(iter(_parsed([segment])), None)
        if by is None or by.writer != self.writer:
            whom = f"{by.writer} (delivery {by.delivery})" if by else "another generator"
            raise Fenced(
                f"{self._subject} was taken over by {whom}; this was delivery {self.delivery}",
                hint="nothing to do: the first group of the task counts",
            )

    async def _read(self) -> list[StoredMessage]:
        return await self._broker.retry(
            lambda: get_all(self._broker, self._stream, self._subject),
            deadline_s=APPEND_DEADLINE_S,
            waiting_for=self._waiting_for,
        )


async def purge_segments(broker: Broker, scope: JobScope, task: int) -> None:
    """Remove all segments of a task; harmless when there are none."""
    await purge(broker, scope.stream_segment, scope.segment(task))


def unbroken(segments: list[Segment]) -> list[Segment]:
    """Return the segments since the episode's last start; none if one of them is missing."""
    chain: list[Segment] = []
    for segment in segments:
        if segment.start == 0:
            chain = [segment]
        elif not chain or segment.start != chain[-1].end:
            return []
        else:
            chain.append(segment)
    return chain


def _parsed(messages: list[StoredMessage]) -> list[Segment]:
    segments: list[Segment] = []
    for message in messages:
        try:
            segments.append(Segment.from_bytes(message.payload))
        except MessageError as error:
            _log.error("segment_malformed", subject=message.subject, error=error.message)
    return segments
