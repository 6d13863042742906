"""Writing running episodes down, and reading what the task's last holder has written.

A segment is appended while the next tokens are generated, one at a time per episode. The end of a
turn is different: it is stored before the game sees the turn. So whoever goes on with the episode
gives the game that very action, which a host that has played it already only answers again, and a
holder that was overtaken never plays another.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import structlog

from ....broker.client.connection import Broker
from ....broker.segments import SegmentWriter, purge_segments
from ....envs.serving.remote import Environments
from ....schemas.segment import Segment
from ....schemas.task import Task
from ....schemas.wire.errors import DeadlineError
from ....schemas.wire.subjects import JobScope
from ..engine.engine import Drawn
from .transcript import Transcript

_log = structlog.get_logger()


@dataclass(frozen=True)
class Recorded:
    """An episode as its last holder wrote it down."""

    episode: str
    """Its id at the environment host."""
    host: str
    seed: int
    transcript: Transcript
    """Without messages but the observations, images and data source: the game's host has them."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "Recorded | None":
        """Put segments together; None when nothing was generated."""
        if not any(segment.mask.any() for segment in segments):
            return None
        made = Transcript()
        for segment in segments:
            made.token_ids += segment.token_ids.tolist()
            made.mask += segment.mask.tolist()
            made.logprobs += segment.logprobs.tolist()
            made.versions += segment.versions.tolist()
            made.turn_ends += segment.turn_ends
            made.rewards += segment.rewards
            made.observations += segment.observations
        made.num_prompt = made.mask.index(1)
        if not made.awaits_answer:
            _reopen(made)
        last = segments[-1]
        return cls(last.episode, last.host, last.seed, made)


def _reopen(made: Transcript) -> None:
    """Take the tokens behind the last prompt or observation as those of the open turn."""
    closed = len(made.mask)
    while made.mask[closed - 1]:
        closed -= 1
    columns = (made.token_ids, made.logprobs, made.versions)
    made.open = [Drawn(*one) for one in zip(*(column[closed:] for column in columns), strict=True)]
    for column in (*columns, made.mask):
        del column[closed:]


class EpisodeRecorder:
    """Writes one episode down."""

    def __init__(
        self,
        writer: SegmentWriter,
        every: int,
        found: Recorded | None,
        sessions: dict[str, str],
        name: str,
    ) -> None:
        """`sessions` is told of the episodes at environment hosts, which are closed later; `name`
        decides what the episode draws, whoever plays it.
        """
        self._found = found
        self.num_continued = 0
        """Generated tokens that were not generated again."""
        self.seed = 0
        """Seed of the first turn's sampling; the turns count up from it."""
        self._writer = writer
        self._every = every
        self._sessions = sessions
        self._name, self._num_begun = name, 0
        self._episode, self._host = "", ""
        self._stored = self._turns = self._answers = 0
        self._appending: asyncio.Task[None] | None = None
        self._has_room = True

    def take_found(self) -> Recorded | None:
        """Return what there is to go on with; nothing more the next time: it is tried once."""
        found, self._found = self._found, None
        return found

    async def begin(
        self, transcript: Transcript, host: str, episode: str, found: Recorded | None
    ) -> None:
        """Go on with what was found, or begin anew: then what was written before is void."""
        await self.settle()
        self._num_begun += found is None
        self.seed = self._fresh_seed() if found is None else found.seed
        self.num_continued = 0 if found is None else transcript.num_generated
        self._stored = 0 if found is None else transcript.num_tokens
        self._turns, self._answers = len(transcript.turn_ends), len(transcript.rewards)
        self._host, self._episode = host, episode
        self._sessions[episode] = host
        if found is not None and (host, episode) != (found.host, found.episode):
            await self._append(transcript)

    def take(self, transcript: Transcript) -> bool:
        """Take notice of a token of the open turn; False when the episode was taken over."""
        appending = self._appending
        if appending is None or (appending.done() and appending.exception() is None):
            if self._has_room and transcript.num_tokens - self._stored >= self._every:
                self._appending = asyncio.create_task(self._append(transcript), name="segment")
            return True
        return not appending.done()

    async def turn_ended(self, transcript: Transcript) -> None:
        """Store all that is not yet; raises Fenced when the episode was taken over."""
        await self.settle()
        if len(transcript.turn_ends) > self._turns:
            await self._append(transcript)

    def stop(self) -> None:
        """Leave off, whatever is being appended."""
        appending, self._appending = self._appending, None
        if appending is not None and not appending.cancel() and not appending.cancelled():
            appending.exception()  # the episode has ended otherwise

    async def settle(self) -> None:
        """Wait for what is being appended; raises what it raises."""
        appending, self._appending = self._appending, None
        if appending is not None:
            await appending

    async def _append(self, transcript: Transcript) -> None:
        if not self._has_room:
            return
        segment = self._segment(transcript)
        turns, answers = len(transcript.turn_ends), len(transcript.observations)
        self._has_room = await self._writer.append(segment)
        self._stored, self._turns, self._answers = segment.end, turns, answers

    def _fresh_seed(self) -> int:
        digest = blake2b(f"{self._name} {self._num_begun}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little")

    def _segment(self, transcript: Transcript) -> Segment:
        at, closed = self._stored, len(transcript.token_ids)
        rest = transcript.open[max(0, at - closed) :]

        def column(given: Sequence[Any], name: str, dtype: Any) -> Any:
            return np.array([*given[at:], *(getattr(one, name) for one in rest)], dtype)

        mask = np.array([*transcript.mask[at:], *(1 for _ in rest)], np.uint8)
        return Segment(
            delivery=self._writer.delivery,
            writer=self._writer.writer,
            episode=self._episode,
            host=self._host,
            seed=self.seed,
            start=at,
            token_ids=column(transcript.token_ids, "token_id", np.int32),
            mask=mask,
            logprobs=column(transcript.logprobs, "logprob", np.float32),
            versions=column(transcript.versions, "version", np.int32),
            turn_ends=transcript.turn_ends[self._turns :],
            rewards=transcript.rewards[self._answers : len(transcript.observations)],
            observations=transcript.observations[self._answers :],
        )


@dataclass
class TaskRecorder:
    """Writes the episodes of one lease of a task down."""

    broker: Broker
    scope: JobScope
    environments: Environments
    task: Task
    delivery: int
    """How often the task was handed out, this time included."""
    writer: str
    """Names the lease, uniquely."""
    every: int
    """Tokens of a segment."""

    def __post_init__(self) -> None:
        self._sessions: dict[str, str] = {}

    async def open(self, number: int) -> EpisodeRecorder:
        """Take over an episode of the task; raises Fenced when somebody else has."""
        writer = SegmentWriter(
            self.broker,
            self.scope,
            self.task.task,
            number,
            delivery=self.delivery,
            writer=self.writer,
        )
        found = Recorded.of(await writer.take_over())
        name = f"{self.task.seed} {self.task.task} {number}"
        return EpisodeRecorder(writer, self.every, found, self._sessions, name)

    async def end(self) -> None:
        """Forget the episodes and free them at their hosts: the task's group is in the log."""
        for episode, host in self._sessions.items():
            self.environments.close(host, episode)
        task = self.task.task
        try:
            await purge_segments(self.broker, self.scope, task)
        except DeadlineError as error:  # they are bounded, and void
            _log.warning("segments_left", task=task, reason=error.message)
